"""``peft-nvfp4 train``: fine-tune an adapter with transformers' Trainer, so that it can be stopped and resumed at any time.

The output folder holds the options (``train.yaml``), Trainer's checkpoints (adapter, optimizer, scheduler, random state), a line
of numbers for every logged step (``log.jsonl``), and in the end the adapter itself. A first Ctrl-C (or SIGTERM) ends the run
after the step that is running, with a checkpoint; a second one at once. A run that was killed loses what came after its last
checkpoint.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ...memory import Plan, Settings, fit, model_shape, parse_bytes
from ...memory.settings import CONTEXT, OPTIMIZERS
from ...training.callbacks import OutOfMemory, StopOnNonFinite, deterministic, explain, memory_there
from ...training.distributed.resume import last_checkpoint
from . import models, texts
from .options import TrainOptions

LOG = "log.jsonl"


@dataclass
class Progress:
    """After an optimizer's step."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float
    memory: int  # peak of the GPU's allocator, or of a process without a GPU what it holds


@dataclass
class Result:
    """Of a run.

    Attributes:
        finished: False if it was interrupted; the last checkpoint is then what to resume from.
        loss: mean of the training loss; None if no step was taken.
        eval_loss: at the end, if there was something to score.
    """

    output: str
    steps: int
    finished: bool
    seconds: float
    loss: float | None
    eval_loss: float | None = None
    report: str = ""


@dataclass
class Job:
    """Everything that :func:`run` needs, after all that can be wrong with the options."""

    options: TrainOptions
    model: nn.Module
    tokenizer: Any
    train: list[dict]
    test: list[dict]
    plan: Plan | None
    device: torch.device
    said: list[str]


# ---------------------------------------------------------------------------------------------- before


def prepare(options: TrainOptions) -> Job:
    """Read the data, choose what fits, load, freeze and adapt the model.

    Raises:
        FileNotFoundError, ValueError: of the model, the data or an option.
    """
    with _determinism(options):
        return _prepare(options)


def _determinism(options: TrainOptions) -> AbstractContextManager:
    return deterministic() if options.deterministic else nullcontext()


def _prepare(options: TrainOptions) -> Job:
    device = models.default_device()
    dtype = models.choose_dtype(options.dtype, device)
    rows = texts.read(
        options.dataset, options.format, options.columns, options.template, options.split, options.limit, options.seed
    )
    config = models.frozen_config(options.lora_settings())  # raises before anything large is loaded
    models.config_of(options.model)
    torch.manual_seed(options.seed)
    home = torch.device("cpu") if config.options.offload else device
    base, tokenizer = models.load(options.model, dtype, home, options.layers, config.options)
    encoded = texts.encode(rows, tokenizer, options.max_length)
    said = [f"{len(encoded.rows)} rows ({rows.format}), the longest of {encoded.longest} tokens"]
    if encoded.cut:
        said.append(f"{encoded.cut} rows were cut to {options.max_length} tokens, at their beginning")
    train, test = _split(options, encoded.rows, tokenizer, rows.format)
    plan = None
    if options.max_memory is not None:
        plan, options = _planned(options, base.config, max(len(row["input_ids"]) for row in train))
        config = models.frozen_config(options.lora_settings())
        s = plan.settings
        said.append(
            f"for {options.max_memory}: {s.accumulation} x {s.batch} rows a step; {'; '.join(plan.changed) or 'nothing given up'}"
            f"; expected peak {plan.estimate.peak / 2**30:.2f} GiB"
        )
    from peft import get_peft_model

    from ...fusion.loss_attach import attach_loss
    from ...training.cuda_graphs import enable_cuda_graphs

    model = get_peft_model(base, config).to(device)
    if options.cuda_graphs:
        enable_cuda_graphs(model)
    if report := getattr(model.base_model, "nvfp4_report", None):
        said.append(str(report))
    said.append(str(attach_loss(model)))
    _cap(options, device)
    return Job(options, model, tokenizer, train, test, plan, device, said)


def _split(options: TrainOptions, rows: list[dict], tokenizer: Any, format: str) -> tuple[list[dict], list[dict]]:
    if options.eval_dataset is not None:
        split = "test" if options.eval_dataset == texts.BUILTIN else options.split
        kind = format if options.dataset != texts.BUILTIN else "auto"
        other = texts.read(options.eval_dataset, kind, options.columns, options.template, split, seed=options.seed)
        return rows, texts.encode(other, tokenizer, options.max_length).rows
    if options.eval_rows >= len(rows):
        raise ValueError(f"eval_rows={options.eval_rows} leaves nothing to train on, of {len(rows)} rows")
    if not options.eval_rows:
        return rows, []
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed)).tolist()
    kept = set(order[: options.eval_rows])
    return [r for i, r in enumerate(rows) if i not in kept], [rows[i] for i in sorted(kept)]


def _planned(options: TrainOptions, config: Any, longest: int) -> tuple[Plan, TrainOptions]:
    """The estimator's choice, and the options with it."""
    settings = estimated(options, longest)
    plan = fit(model_shape(config), settings, parse_bytes(options.max_memory), options.batch * options.accumulation)
    s = plan.settings
    chosen = replace(
        options,
        **{"batch": s.batch, "accumulation": s.accumulation, "memory": s.memory, "checkpointing": s.checkpointing},
    )
    return plan, chosen


def estimated(options: TrainOptions, longest: int) -> Settings:
    """The estimator's settings for a micro-batch whose longest row has so many tokens."""
    sequence = -(-longest // 8) * 8
    targets = options.lora_settings()["target_modules"]
    return Settings(
        **{"batch": options.batch, "accumulation": options.accumulation},
        **{"backend": options.backend, "sequence": sequence, "rank": options.rank, "accuracy": options.accuracy},
        **{"memory": options.memory, "cuda_graphs": options.cuda_graphs, "checkpointing": options.checkpointing},
        targets=targets if isinstance(targets, str) else tuple(targets),
        optimizer=options.optimizer if options.optimizer in OPTIMIZERS else "adamw_torch_fused",
        skip_modules=tuple(options.lora.get("skip_modules") or ()),
        padded=True,
        **_card(),
    )


def _card() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    from ... import kernels

    major = torch.cuda.get_device_capability()[0]
    used = next(o.implementation for o in kernels.status().operators if o.operator == "fprop")
    return {"workspace": 32 << 20 if major in (9, 10) else 8320 << 10, "native_fp4": used in kernels.tiers.NATIVE}


def _cap(options: TrainOptions, device: torch.device) -> None:
    """Hold PyTorch to ``max_memory``, so that a wrong estimate shows here and not on the smaller card."""
    if options.max_memory is not None and device.type == "cuda":
        share = (parse_bytes(options.max_memory) - CONTEXT) / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)), device)


# ---------------------------------------------------------------------------------------------- the run


def total_steps(options: TrainOptions, rows: int) -> int:
    """Optimizer's steps of the whole run."""
    per_epoch = max(1, math.ceil(math.ceil(rows / options.batch) / options.accumulation))
    return options.steps if options.steps is not None else max(1, math.ceil(per_epoch * options.epochs))


def arguments(options: TrainOptions, steps: int, device: torch.device, scored: bool) -> TrainingArguments:
    """Of transformers' Trainer.

    Raises:
        ValueError: a name in ``options.trainer`` that it has not.
    """
    known = {f.name for f in fields(TrainingArguments) if f.init}
    if unknown := options.trainer.keys() - known:
        raise ValueError(f"unknown settings of the trainer: {', '.join(sorted(unknown))}; they are those of TrainingArguments")
    settings = {
        "output_dir": options.output,
        "max_steps": steps,
        "per_device_train_batch_size": options.batch,
        "per_device_eval_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "learning_rate": options.lr,
        "lr_scheduler_type": options.scheduler,
        "warmup_steps": round(options.warmup * steps),
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "optim": options.optimizer,
        "logging_steps": options.log_every or max(1, steps // 50),
        "save_strategy": "steps",
        "save_steps": options.save_every or max(1, steps // 10),
        "save_total_limit": options.keep,
        "eval_strategy": "steps" if scored else "no",
        "eval_steps": options.save_every or max(1, steps // 10),
        "prediction_loss_only": True,
        "seed": options.seed,
        "data_seed": options.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type == "cuda",
    }
    if options.checkpointing:
        name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in known)  # the newer one first
        settings |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    return TrainingArguments(**{**settings, **options.trainer})


class Watch(TrainerCallback):
    """Reports progress, writes the log, and ends the run where it was asked to."""

    def __init__(self, log: Path, collator: texts.Collator, report: Callable[[Progress], None], device: torch.device):
        self.log, self.collator, self.report, self.device = log, collator, report, device
        self.stop, self.loss, self.started, self.before = False, None, time.perf_counter(), 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.before = time.perf_counter(), self.collator.tokens

    def on_step_end(self, args, state, control, **kwargs):
        self.report(self.progress(state))
        if self.stop:
            control.should_save = control.should_training_stop = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs:
            return
        self.loss = logs.get("loss", self.loss)
        now = self.progress(state)
        line = {"step": state.global_step, **logs, "tokens_per_second": now.tokens_per_second, "memory_bytes": now.memory}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def progress(self, state) -> Progress:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        speed = (self.collator.tokens - self.before) / seconds
        return Progress(state.global_step, state.max_steps, self.loss, speed, memory_held(self.device))


def memory_held(device: torch.device) -> int:
    """Peak of the GPU's allocator so far; without a GPU, what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import psutil

    return psutil.Process().memory_info().rss


@contextmanager
def _interruptible(watch: Watch, say: Callable[[str], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for the end after this step; the second raises KeyboardInterrupt."""

    def asked(number, frame) -> None:
        if watch.stop:
            raise KeyboardInterrupt
        watch.stop = True
        say("stopping after this step, with a checkpoint (once more: at once)")

    try:
        before = {s: signal.signal(s, asked) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody sends it signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _explained(job: Job) -> Iterator[None]:
    """An out-of-memory error says what would take less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        options, longest = job.options, max(len(row["input_ids"]) for row in job.train)
        memory = parse_bytes(options.max_memory) if options.max_memory else memory_there()
        raise OutOfMemory(explain(job.model.config, estimated(options, longest), memory)) from error


def run(
    job: Job,
    resume: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Train, from the last checkpoint if ``resume`` and there is one, and save the adapter.

    Raises:
        ValueError: the output folder holds another run's checkpoints and ``resume`` is False.
        NonFiniteError, OutOfMemory: of :mod:`peft_nvfp4.training.callbacks`.
    """
    options, output = job.options, Path(job.options.output)
    last = last_checkpoint(output)  # a whole one: what was killed while it wrote one goes on from the one before
    if not resume and any(output.glob("checkpoint-*")):
        raise ValueError(f"{output} holds checkpoints of an earlier run: go on with --resume, or choose another output folder")
    options.save(output)
    collator = texts.Collator(job.tokenizer.pad_token_id)
    watch = Watch(output / LOG, collator, report, job.device)
    steps = total_steps(options, len(job.train))
    trainer = Trainer(
        model=job.model,
        args=arguments(options, steps, job.device, bool(job.test)),
        train_dataset=job.train,
        eval_dataset=job.test or None,
        data_collator=collator,
        processing_class=job.tokenizer,
        callbacks=[watch, StopOnNonFinite()],
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    if resume:
        say(f"going on from {last}" if last else "no whole checkpoint yet: starting from the beginning")
    start = time.perf_counter()
    with _interruptible(watch, say), _explained(job), _determinism(options):
        outcome = trainer.train(resume_from_checkpoint=last)
        done = trainer.state.global_step
        finished = done >= steps
        if finished:
            job.model.save_pretrained(output)
            job.tokenizer.save_pretrained(output)
        score = trainer.evaluate()["eval_loss"] if finished and job.test else None
    loss = outcome.training_loss if outcome.training_loss == outcome.training_loss else None
    return Result(str(output), done, finished, time.perf_counter() - start, loss, score)
