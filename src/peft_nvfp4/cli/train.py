"""``peft-nvfp4 train``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ._run.options import gathered
from .common import UserError, base_option, command, console, quiet_libraries, write_json

Text = Optional[str]  # noqa: UP045
Number = Optional[int]  # noqa: UP045
Real = Optional[float]  # noqa: UP045
Flag = Optional[bool]  # noqa: UP045
Option = typer.Option
APART = {"config", "resume", "json_file", "columns"}
"""Options that are no option of :class:`~peft_nvfp4.cli._run.options.TrainOptions` under their own name, as they are."""


def pairs(text: str | None) -> dict[str, str] | None:
    """``a=b,c=d``."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name and sign and value for name, sign, value in parts):
        raise UserError(f"write columns as prompt=question,completion=answer, got {text!r}")
    return {name.strip(): value.strip() for name, _, value in parts}


@command
def train(
    model: Annotated[Text, typer.Argument(help="Folder or Hub id of the base model, or smollm2.", show_default=False)] = None,
    dataset: Annotated[
        Text, typer.Argument(help=".jsonl, .json, .csv, .tsv or .txt file, or movies.", show_default=False)
    ] = None,
    output: Annotated[Text, Option("--output", "-o", help="Folder for checkpoints and the adapter.")] = None,
    config: Annotated[Optional[Path], Option("--config", "-c", help="YAML file with these options.")] = None,  # noqa: UP045
    resume: Annotated[bool, Option("--resume", help="Go on from the output's last checkpoint.")] = False,
    backend: Annotated[Text, base_option("backend")] = None,
    accuracy: Annotated[Text, base_option("accuracy")] = None,
    memory: Annotated[Text, base_option("memory")] = None,
    calibration: Annotated[Text, base_option("calibration")] = None,
    cuda_graphs: Annotated[Flag, Option(help="Replay recorded steps.")] = None,
    rank: Annotated[Number, Option("--rank", "-r", help="Of the adapter (16).")] = None,
    alpha: Annotated[Number, Option(help="LoRA alpha (32).")] = None,
    dropout: Annotated[Real, Option(help="LoRA dropout (0).")] = None,
    targets: Annotated[Text, Option(help="all-linear, or names with commas between.")] = None,
    format: Annotated[Text, Option(help="auto, chat, prompt, text or classification.")] = None,
    columns: Annotated[Text, Option(help="prompt=question, completion=answer")] = None,
    template: Annotated[Text, Option(help='Classification: "{text}\\nLabel:".')] = None,
    limit: Annotated[Number, Option(help="Rows at most.")] = None,
    eval_dataset: Annotated[Text, Option(help="Scored during training.")] = None,
    eval_rows: Annotated[Number, Option(help="Rows kept back to be scored.")] = None,
    max_length: Annotated[Number, Option(help="Tokens of a row at most (1024).")] = None,
    steps: Annotated[Number, Option(help="Optimizer steps; instead of epochs.")] = None,
    epochs: Annotated[Real, Option(help="Times through the data (1).")] = None,
    batch: Annotated[Number, Option(help="Rows at a time (8).")] = None,
    accumulation: Annotated[Number, Option(help="Times a step (1).")] = None,
    lr: Annotated[Real, Option(help="Peak learning rate (2e-4).")] = None,
    scheduler: Annotated[Text, Option(help="linear, cosine, constant, ...")] = None,
    warmup: Annotated[Real, Option(help="Share of the steps (0.05).")] = None,
    optimizer: Annotated[Text, Option(help="adamw_torch_fused, paged_adamw_8bit, ...")] = None,
    checkpointing: Annotated[Flag, Option(help="Keep only the inputs of decoder layers for backward.")] = None,
    deterministic: Annotated[Flag, Option(help="Two runs are equal bit for bit; slower attention.")] = None,
    max_memory: Annotated[Text, Option(help="16GiB: batch, accumulation, memory, checkpointing are chosen to fit.")] = None,
    save_every: Annotated[Number, Option(help="Steps between checkpoints (a tenth).")] = None,
    log_every: Annotated[Number, Option(help="Steps between lines of the log.")] = None,
    seed: Annotated[Number, Option(help="Of data order, adapter and dropout (0).")] = None,
    dtype: Annotated[Text, Option(help="auto, bf16, fp16 or fp32.")] = None,
    layers: Annotated[Number, Option(help="Keep only the first: a quick look.")] = None,
    json_file: Annotated[Text, Option("--json", help="Result to this file; - is the output.")] = None,
) -> None:
    """Fine-tune a LoRA adapter on a frozen base.

    Everything can also be said in one YAML file (--config), further fields of NVFP4LoraConfig and TrainingArguments in it under
    lora: and trainer:. Ctrl-C stops after the running step, with a checkpoint to --resume from.
    """
    flags = {k: v for k, v in locals().items() if k not in APART}
    options = gathered(flags | {"columns": pairs(columns)}, config, resume)
    out = console(stderr=json_file == "-")
    with quiet_libraries():
        from ..training.callbacks import NonFiniteError, OutOfMemory
        from ._run import training

        with out.status("Loading and freezing the model"):
            job = training.prepare(options)
        for line in job.said:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        try:
            result = _run(job, resume, out)
        except (NonFiniteError, OutOfMemory) as error:
            raise UserError(str(error)) from error
    write_json(asdict(result), json_file)
    loss = "" if result.loss is None else f", mean loss {result.loss:.4f}"
    score = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
    if not result.finished:
        out.print(
            f"Stopped after step {result.steps}{loss}. Go on with: peft-nvfp4 train --resume --output {result.output}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(130)
    out.print(
        f"{result.steps} steps in {result.seconds:.0f} s{loss}{score}. Adapter: {result.output}", markup=False, soft_wrap=True
    )


def _run(job, resume: bool, out):
    from ._run import training

    columns = (
        *(TextColumn("Training"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]} tok/s"), TextColumn("{task.fields[memory]}")),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=out) as bar:
        fields = {"loss": "-", "speed": "-", "memory": ""}
        task = bar.add_task("", total=training.total_steps(job.options, len(job.train)), **fields)

        def report(now: training.Progress) -> None:
            loss = "-" if now.loss is None else f"{now.loss:.3f}"
            speed, memory = f"{now.tokens_per_second:,.0f}", f"{now.memory / 2**30:.2f} GiB"
            bar.update(task, completed=now.step, loss=loss, speed=speed, memory=memory)

        return training.run(job, resume, report, lambda text: bar.console.print(text, markup=False, soft_wrap=True))
