"""``peft-nvfp4 train``: fine-tune an adapter with TRL's ``SFTTrainer``, so that it can be stopped and resumed at any time.

The output folder holds the options (``train.yaml``), Trainer's checkpoints (adapter, optimizer, scheduler, random state), and in
the end the adapter itself and ``trainer_state.json``, whose ``log_history`` has the numbers of every logged step. A first Ctrl-C
(or SIGTERM) ends the run after the step that is running, with a checkpoint; a second one at once. A run that was killed loses
what came after its last checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer, get_training_chat_template

from ...memory import Settings, fit, model_shape, parse_bytes
from ...memory.device import gpu_settings
from ...memory.settings import CONTEXT, OPTIMIZERS
from ...training.callbacks import StopOnNonFinite, deterministic, memory_advice
from ...training.cuda_graphs import disable_cuda_graphs
from ...training.distributed.resume import last_checkpoint
from . import evaluation, models, texts
from .folders import check_writable, kept_writes
from .options import FILE, FIXED, TrainOptions, adapter_config, read_yaml

CHECKPOINTS, LINES = 10, 50
"""Of a whole run, unless the options say after how many steps."""

Say = Callable[[str], None]


@dataclass
class Result:
    """What a run has done."""

    output: str
    steps: int
    finished: bool  # False if it was interrupted; the last checkpoint is then what to resume from
    seconds: float
    loss: float | None  # mean of the training loss; None if no step was taken
    eval_loss: float | None = None  # at the end, if there was something to score


def run(options: TrainOptions, resume: bool = False, say: Say = print) -> Result:
    """Train, from the last checkpoint if ``resume`` and there is one, and save the adapter. ``say`` gets lines for the user."""
    output, paths = Path(options.output), ("model", "dataset", "eval_dataset", "calibration")
    options = replace(options, **{name: models.absolute(path) for name in paths if (path := getattr(options, name))})
    if not resume and any(output.glob("checkpoint-*")):
        raise ValueError(f"{output} holds checkpoints of an earlier run: go on with --resume, or choose another output folder")
    check_writable(output)
    last = last_checkpoint(output)  # a whole one: what was killed while it wrote one goes on from the one before
    if last is not None:
        _check_resumed(options, output)
    again = f"What was saved before is kept: make room, and go on with: peft-nvfp4 train --resume --output {output}"
    with deterministic() if options.deterministic else nullcontext(), kept_writes(output, again):
        stop = StopWhenAsked(say)
        trainer, options = _trainer(options, say, stop)
        options.save(output)
        if resume:
            say(f"going on from {last}" if last else "no whole checkpoint yet: starting from the beginning")
        start = time.perf_counter()
        with stop, memory_advice(trainer):
            loss = trainer.train(resume_from_checkpoint=last).training_loss
            steps, finished = trainer.state.global_step, trainer.state.global_step >= trainer.state.max_steps
            loss = loss if loss == loss and steps > (0 if last is None else int(last.rpartition("-")[2])) else None
            score = trainer.evaluate()["eval_loss"] if finished and trainer.eval_dataset is not None else None
        if finished:
            trainer.model.save_pretrained(output)
            trainer.processing_class.save_pretrained(output)
            trainer.save_state()
    return Result(str(output), steps, finished, time.perf_counter() - start, loss, score)


def _check_resumed(options: TrainOptions, output: Path) -> None:
    """Raises ValueError if the checkpoints of a run were made with other settings of the adapter or its base."""
    before = TrainOptions(**read_yaml(output / FILE)) if (output / FILE).is_file() else options
    for name in FIXED:
        if (value := getattr(options, name)) != (old := getattr(before, name)):
            raise ValueError(
                f"{name} was {old!r} in the run in {output}, and its checkpoints cannot go on with {value!r}: resume without it, "
                "or start a new run in another output folder"
            )


def _trainer(options: TrainOptions, say: Say, *callbacks: TrainerCallback) -> tuple[SFTTrainer, TrainOptions]:
    """The trainer, after all that can be wrong with the options; and the options with what was chosen to fit ``max_memory``."""
    device = models.default_device()
    models.choose_dtype(options.dtype)  # raise before anything large is loaded
    models.check_model(options.model)
    train, test = _rows(options)
    options = replace(options, labels=[label.strip() for label in train.labels] or None)
    config = adapter_config(options)
    tokenizer = models.load_tokenizer(options.model)
    if tokenizer.eos_token is None:
        raise ValueError(f"the tokenizer of {options.model} has no eos_token, so texts would have no end: name one in its files")
    train.check_template(tokenizer)
    every_turn = train.format == "chat" and _template_marks_turns(tokenizer)
    data, held_out = (None if rows is None else _learned(options, rows, tokenizer, every_turn) for rows in (train, test))
    torch.manual_seed(options.seed)
    home = torch.device("cpu") if config.options.offload else device
    base, _ = models.load(options.model, options.dtype, options.layers, config.options, home, tokenizer)
    if options.max_memory is not None:
        options = _planned(options, base.config, train, tokenizer, say)
        config = adapter_config(options)
        if device.type == "cuda":  # held to it, so that a wrong estimate shows here and not on the smaller card
            share = (parse_bytes(options.max_memory) - CONTEXT) / torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(share, 0.0)), device)
    model = get_peft_model(base, config).to(device)
    if not options.cuda_graphs:
        disable_cuda_graphs(model)
    if report := getattr(model.base_model, "nvfp4_report", None):
        say(str(report))
    trainer = Trainer(
        model=model,
        args=_arguments(options, device, assistant_only_loss=every_turn, scored=test is not None),
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[*callbacks, StopOnNonFinite()],
    )
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL makes them BF16 on a base that was packed before: a resumed run would not be the same
            parameter.data = parameter.data.float()
    _say_prepared(options, train, data, trainer, say)
    return trainer, options


def _learned(options: TrainOptions, rows: texts.Rows, tokenizer: Any, every_turn: bool) -> Dataset:
    """The rows that TRL gets, after a look at what their chat template makes of them. Raises ValueError where a setting would let
    an answer be learned without its prompt; what packing would cut down to the prompt is left out here, the rest by TRL."""
    given = options.trainer
    cuts = given.get("truncation_mode") == "keep_end" or options.packing and given.get("packing_strategy", "bfd") != "bfd"
    if cuts and rows.format != "text":
        raise ValueError(
            "truncation_mode keep_end, and packing_strategy other than bfd, cut long rows so that their answers are learned "
            "without what was asked: leave them out, and raise max_length"
        )
    rows.check_template(tokenizer)
    learned = rows if every_turn else rows.by_turn()
    if not options.packing:
        learned.rendered(tokenizer)
        return learned.data
    fitting = set(evaluation.encode(rows, tokenizer, options.max_length))
    if every_turn:
        fitting = {place for number, place in enumerate(rows.by_turn().data["place"]) if number in fitting}
        return learned.data.filter(lambda row: row["place"] in fitting)
    return learned.data.select(sorted(fitting))


def _rows(options: TrainOptions) -> tuple[texts.Rows, texts.Rows | None]:
    """(rows to learn from, rows to score or None)."""
    read = lambda name, limit: texts.read(name, options.format, options.columns, options.template, options.split, limit)
    rows = read(options.dataset, options.limit)
    if options.eval_dataset is not None:
        return rows, read(options.eval_dataset, None)
    if not options.eval_rows:
        return rows, None
    parts = rows.data.train_test_split(test_size=options.eval_rows, seed=options.seed)
    return replace(rows, data=parts["train"]), replace(rows, data=parts["test"])


def _template_marks_turns(tokenizer: Any) -> bool:
    """Whether TRL can tell the assistant's turns from the others: the template says so, or TRL knows one for it that does."""
    texts.check_chat_template(tokenizer)
    with suppress(Exception):  # TRL tries conversations that a template may refuse, with any error
        get_training_chat_template(tokenizer)
        return True
    return False


def _say_prepared(options: TrainOptions, rows: texts.Rows, given: Dataset, trainer: SFTTrainer, say: Say) -> None:
    """What became of the rows. Raises ValueError if nothing is left to learn from, or rows are longer than the model can take."""
    prepared = trainer.train_dataset
    lengths = [len(ids) for ids in prepared["input_ids"]]
    if not lengths:
        raise ValueError(f"no row of {rows.name} has anything to learn within {options.max_length} tokens: raise max_length")
    for data in (prepared, trainer.eval_dataset):
        if data is not None and "place" in data.column_names:
            models.check_tokens(trainer.model, ((f"{rows.name}, {row['place']}", row["input_ids"]) for row in data))
        elif data is not None:  # packed rows have positions of their own
            models.check_tokens(trainer.model, ((rows.name, ids[:1]) for ids in data["input_ids"]))
            longest = max(length for row in data["seq_lengths"] for length in row)
            models.check_tokens(trainer.model, [(f"{rows.name}: a row", [0] * longest)])
    before = (rows if "messages" in given.column_names else rows.by_turn()).data["place"]
    say(
        f"{len(before)} rows became {len(lengths)} sequences, the longest of {max(lengths)} tokens (at most {options.max_length})"
    )
    for line in rows.losses():
        say(line)
    kept = given if options.packing else prepared
    if lost := list((Counter(before) - Counter(kept["place"])).elements()):
        say(f"{len(lost)} rows were left out: their prompt alone takes {options.max_length} tokens (the first: {lost[0]})")


def _planned(options: TrainOptions, config: Any, rows: texts.Rows, tokenizer: Any, say: Say) -> TrainOptions:
    """The options with what the estimator chose to fit ``max_memory``, for micro-batches as long as the longest row with its end,
    or where rows are packed, as all of a batch."""
    longest = options.max_length * options.batch
    if not options.packing:
        longest = min(options.max_length, 1 + max(len(tokenizer(text).input_ids) for _, text in rows.rendered(tokenizer)))
    adapter, known = adapter_config(options), {f.name for f in fields(Settings)}
    settings = {f.name: getattr(options, f.name) for f in fields(options) if f.name in known}
    settings |= {"sequence": -(-longest // 8) * 8, "padded": True}
    settings["cuda_graphs"] = False  # they exclude weights on the host, which a plan may need
    settings |= {"targets": adapter.target_modules, "skip_modules": tuple(adapter.skip_modules or ())}
    if options.optimizer not in OPTIMIZERS:
        settings["optimizer"] = "adamw_torch_fused"
    settings |= gpu_settings()
    wanted = options.batch * options.accumulation
    plan = fit(model_shape(config), Settings(**settings), parse_bytes(options.max_memory), wanted)
    s = plan.settings
    say(
        f"for {options.max_memory}: {s.accumulation} x {s.batch} rows a step; {'; '.join(plan.changed) or 'nothing given up'}"
        f"; expected peak {plan.estimate.peak / 2**30:.2f} GiB"
    )
    return replace(options, batch=s.batch, accumulation=s.accumulation, memory=s.memory, checkpointing=s.checkpointing)


class Arguments(SFTConfig):
    """Of TRL's trainer. The warm-up ends before the last step: a run of one step has none, and learns at the peak rate."""

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return min(super().get_warmup_steps(num_training_steps), num_training_steps - 1)


class Trainer(SFTTrainer):
    """TRL's, which goes on from a checkpoint with the learning rate, betas and weight decay of this run, and its steps between
    checkpoints and lines: Trainer would take those that were saved."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        settings = ("initial_lr", "betas", "eps", "weight_decay")
        groups = [{key: group[key] for key in settings if key in group} for group in self.optimizer.param_groups]
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        rates = list(getattr(schedule, "base_lrs", ()))
        super()._load_optimizer_and_scheduler(checkpoint)
        for group, values in zip(self.optimizer.param_groups, groups):
            group.update(values)
        if checkpoint is not None and isinstance(schedule, LambdaLR):  # a function of the step
            schedule.base_lrs = rates
            for group, rate, share in zip(self.optimizer.param_groups, rates, schedule.lr_lambdas):
                group["lr"] = rate * share(schedule.last_epoch)
            schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # what is logged
            self.state.compute_steps(self.args, self.state.max_steps)


def _arguments(options: TrainOptions, device: torch.device, assistant_only_loss: bool, scored: bool) -> Arguments:
    """Numbers of steps below 1 are shares of the run. Raises ValueError for a name in ``options.trainer`` that SFTConfig has
    not."""
    known = {f.name for f in fields(SFTConfig) if f.init}
    if unknown := sorted(map(str, options.trainer.keys() - known)):
        raise ValueError(f"unknown settings of the trainer: {', '.join(unknown)}; they are those of TRL's SFTConfig")
    every = options.save_every or 1 / CHECKPOINTS
    settings: dict[str, Any] = {
        **{f.metadata["sft"]: getattr(options, f.name) for f in fields(options) if f.metadata["sft"]},
        "assistant_only_loss": assistant_only_loss,
        "max_steps": options.steps or -1,
        "per_device_eval_batch_size": options.batch,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": False,  # the model's own dtype
        "logging_steps": options.log_every or 1 / LINES,
        "save_steps": every,
        "save_total_limit": 2,
        "eval_strategy": "steps" if scored else "no",
        "eval_steps": every,
        "prediction_loss_only": True,
        "report_to": "none",
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type == "cuda",
    }
    return Arguments(**{**settings, **options.trainer})


class StopWhenAsked(TrainerCallback):
    """Ends a run after the step in which ``asked`` became true, with a checkpoint. As a context: a first SIGINT or SIGTERM asks,
    a second raises KeyboardInterrupt."""

    asked = False

    def __init__(self, say: Say):
        self.say = say

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.asked:
            control.should_save = control.should_training_stop = True
        return control

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("stopping after this step, with a checkpoint (once more: at once)")

    def __enter__(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # nobody sends signals to another one
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
