"""What this package adds to a training run's log lines: ``TrainingArguments(report_to="tensorboard")``, "wandb", "trackio", ...

Nothing has to be switched on. A Trainer (or a relative, as TRL's) that trains a model with our config and reports to somebody
gets :class:`StepMetrics` when training begins, in front of the reporters. It looks at counters that are kept in any case, once
for each line of ``logging_steps``; a Trainer that reports to nobody has no such callback. The names are stable:

| name (after ``nvfp4/``) | |
|---|---|
| ``tokens_per_second`` | real tokens, padding not counted, since the line before; those of an evaluation in between, too |
| ``padding_share`` | of the places of batches, since the line before |
| ``replayed_share`` | of forward passes in training that replayed a recording, since the line before |
| ``recordings`` | combinations of input shapes that were replayed so far |
| ``memory_frozen_gib``, ``memory_dense_gib``, ``memory_trained_gib`` | weights: packed, not packed, trained |
| ``memory_optimizer_gib`` | the optimizer's state |
| ``memory_recordings_gib`` | the pool that recordings share |
| ``memory_peak_gib`` | most that tensors took on the GPU so far |

Figures are those of the process that logs. A model that :mod:`.packing` cannot read has neither of the first two (transformers'
``include_num_input_tokens_seen="non_padding"`` counts its tokens). Quantisation errors cost a measured step, so they have a
callback of their own (:class:`~peft_nvfp4.diagnostics.statistics.NVFP4StatisticsCallback`: ``nvfp4/input_error`` and so on).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..nn.wrapping import wrap
from ..quantization.freeze import frozen_bytes, frozen_modules
from .cuda_graphs import recording_bytes
from .steps import StepReport

GIB = 1 << 30


def install() -> None:
    """Wrap the handler of Trainer's callbacks, until :func:`~peft_nvfp4.nn.wrapping.unwrap_all`."""
    wrap(CallbackHandler, "on_train_begin", _on_train_begin)


def _on_train_begin(original: Callable, self: CallbackHandler, args: Any, state: Any, control: Any) -> Any:
    has_it = any(isinstance(callback, StepMetrics) for callback in self.callbacks)
    if not has_it and getattr(args, "report_to", None) and _report(self.model) is not None:
        self.callbacks.insert(0, StepMetrics())
    return original(self, args, state, control)


def _report(model: nn.Module | None) -> StepReport | None:
    return getattr(getattr(model, "base_model", None), "nvfp4_steps", None)


class _Counters(NamedTuple):
    seconds: float
    tokens: int
    places: int
    uncounted: int  # calls whose tokens nobody counted
    replays: int
    eager: int

    @classmethod
    def read(cls, report: StepReport) -> _Counters:
        packing, recordings = report.packing, report.recordings
        replays, eager = sum(recordings.graphs.values()), sum(recordings.reasons.values())
        tokens, places = packing.tokens + packing.unpadded, packing.places + packing.unpadded
        return cls(time.perf_counter(), tokens, places, sum(packing.reasons.values()), replays, eager)


class StepMetrics(TrainerCallback):
    """Adds numbers to the log lines that hold a training loss, see the module. Added by itself; given to a Trainer that reports
    to nobody (``callbacks=[StepMetrics()]``), it completes ``trainer.state.log_history``."""

    def __init__(self) -> None:
        self._before: _Counters | None = None
        self._held: tuple[int, dict[str, int]] = (-1, {})  # (what memory="auto" had done, bytes by kind then)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        report = _report(model)
        self._before = None if report is None else _Counters.read(report)
        self._held = -1, {}

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._before is None or logs is None or "loss" not in logs:
            return
        report = _report(model)
        now = _Counters.read(report)
        numbers: dict[str, float] = {**_rates(self._before, now), "recordings": len(report.recordings.graphs)}
        numbers |= {f"memory_{kind}_gib": size / GIB for kind, size in self._memory(report, optimizer).items()}
        numbers = {f"nvfp4/{name}": value for name, value in numbers.items()}
        self._before = now
        logs.update(numbers)  # the reporters, which come after, are given the same dictionary,
        if state.log_history:  # and Trainer has put a copy of it here
            state.log_history[-1].update(numbers)

    def _memory(self, report: StepReport, optimizer: Any) -> dict[str, int]:
        """Bytes by kind. What is held between steps is counted at the first line, and where memory="auto" changed it."""
        done = len(report.memory.lines) if report.memory is not None else 0
        if done != self._held[0]:
            self._held = done, _held_bytes(report.model, optimizer)
        sizes = {**self._held[1], "recordings": recording_bytes(report.model)}
        return sizes | ({"peak": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})


def _rates(before: _Counters, now: _Counters) -> dict[str, float]:
    """Since the line before; nothing of what was not used since."""
    since = _Counters(*(new - old for new, old in zip(now, before)))
    rates = {}
    if since.places and not since.uncounted:
        rates = {"tokens_per_second": since.tokens / since.seconds, "padding_share": 1 - since.tokens / since.places}
    if passes := since.replays + since.eager:
        rates["replayed_share"] = since.replays / passes
    return rates


def _held_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes between two steps by kind; of sharded tensors this process's part. A walk over all modules: milliseconds."""
    packed = {id(p) for _, layer in frozen_modules(model) for p in layer.parameters(recurse=False)}
    parameters = list(model.parameters())
    return {
        "frozen": frozen_bytes(model),
        "dense": _bytes(p for p in parameters if not p.requires_grad and id(p) not in packed),
        "trained": _bytes(p for p in parameters if p.requires_grad),
        "optimizer": _bytes(v for s in getattr(optimizer, "state", {}).values() for v in s.values() if isinstance(v, Tensor)),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
