"""``peft-nvfp4 eval``."""

from dataclasses import asdict
from typing import Annotated, Optional

import typer
from rich.table import Table

from .common import UserError, command, console, quiet_libraries, write_json
from .train import pairs

Text = Optional[str]  # noqa: UP045


@command
def evaluate(
    dataset: Annotated[str, typer.Argument(help="Data: .jsonl, .csv, .parquet, .txt, ...")],
    model: Annotated[Text, typer.Option("--model", "-m", help="Folder or Hub id (the adapter's base).")] = None,
    adapter: Annotated[Text, typer.Option("--adapter", "-a", help="Folder of the adapter.")] = None,
    format: Annotated[str, typer.Option(help="auto, chat, prompt, text or classification.")] = "auto",
    columns: Annotated[Text, typer.Option(help="prompt=question, completion=answer")] = None,
    template: Annotated[Text, typer.Option(help="As in training.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set that is no file.")] = "test",
    limit: Annotated[Optional[int], typer.Option(help="Rows at most.")] = None,  # noqa: UP045
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 64,
    generate: Annotated[bool, typer.Option(help="Let the model answer (prompt, chat).")] = True,
    base: Annotated[bool, typer.Option("--base", help="Score the base without the adapter as well.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")] = "auto",
    layers: Annotated[Optional[int], typer.Option(help="Keep only the first: a quick look.")] = None,  # noqa: UP045
    json_file: Annotated[Text, typer.Option("--json", help="Write to this file; - is the output.")] = None,
) -> None:
    """Score a model, with or without an adapter.

    Labels: accuracy and F1. Answers: exact match, F1 and ROUGE-L. Everything: perplexity.
    """
    if base and adapter is None:
        raise UserError("--base scores the base beside the adapter: give an --adapter")
    out = console(stderr=json_file == "-")
    with quiet_libraries():
        from ._run import evaluation, models, texts

        rows = texts.read(dataset, format, pairs(columns), template, split, limit)
        device = models.default_device()
        with out.status("Loading the model"):
            loaded, tokenizer = models.load_with_adapter(model, adapter, models.choose_dtype(dtype, device), device, layers)
        sizes = {"batch": batch, "max_length": max_length, "max_new_tokens": max_new_tokens, "generate": generate}
        found = {}
        if base:
            with loaded.disable_adapter():
                found["base"] = evaluation.evaluate(loaded, tokenizer, rows, **sizes)
        found["model" if adapter is None else "adapter"] = evaluation.evaluate(loaded, tokenizer, rows, **sizes)
    write_json({key: asdict(score) for key, score in found.items()}, json_file)
    if json_file != "-":
        out.print(_table(found))


def _table(found: dict) -> Table:
    first = next(iter(found.values()))
    left_out = f"; {first.left_out} left out, whose prompt alone is too long" if first.left_out else ""
    table = Table(title=f"{first.rows} rows ({first.format}){left_out}", title_justify="left")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    for key in first.scores:
        table.add_row(key.replace("_", " "), *(f"{score.scores[key]:.4f}" for score in found.values()))
    return table
