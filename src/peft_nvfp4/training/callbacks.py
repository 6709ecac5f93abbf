"""Long runs: losses that are not finite, memory that is not enough, runs that have to repeat bit for bit.

>>> trainer = Trainer(..., callbacks=[StopOnNonFinite()])
>>> with memory_advice(trainer), deterministic(0):
...     trainer.train()

* :class:`StopOnNonFinite` ends a run whose loss or gradient is NaN or Inf before the optimizer has applied it: weights and
  checkpoints stay what they were. One synchronisation a step.
* :func:`memory_advice` turns PyTorch's out-of-memory error into one that says which settings would take how much less, by
  :mod:`peft_nvfp4.memory`.
* :func:`deterministic` makes two runs of one script on one device equal, bit for bit.

``peft-nvfp4 train`` has the first two, and the third with ``--deterministic``.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from ..fusion.probe import modes_kept
from ..memory import Settings, estimate, model_shape
from ..memory.run import SACRIFICES, sacrificed
from ..memory.settings import OPTIMIZERS
from .cuda_graphs import records_steps
from .distributed.resume import last_checkpoint

# ---------------------------------------------------------------------------------------------- losses

KEPT = 8
"""Micro-batches of a step whose inputs are remembered, to run them again. (No more memory: Trainer holds all those of a step.)"""
IGNORED = -100
"""The label of a position that does not count."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient that is NaN or Inf.

    Attributes:
        step: that would have been taken, from 1.
        module: dotted name of the first module with such an output (or parameter with such a gradient), if it could be told.
        checkpoint: the last one of the run, if there is one.
    """

    def __init__(self, message: str, step: int, module: str | None, checkpoint: str | None):
        super().__init__(message)
        self.step, self.module, self.checkpoint = step, module, checkpoint


class StopOnNonFinite(TrainerCallback):
    """Callback of Trainer (and its relatives): raises :class:`NonFiniteError` where a loss or a gradient is NaN or Inf, before
    the optimizer applies it. Nothing is saved then. Under FP16 gradients are left to the loss scaler, which skips such steps."""

    def __init__(self) -> None:
        self.bad: Tensor | None = None  # on the device: whether a loss of this step was not finite
        self.inputs: deque[tuple[tuple, dict]] = deque(maxlen=KEPT)
        self.handles: list = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        self._remove()
        for hook in list(model._forward_hooks.values()):  # of a run that was interrupted
            if isinstance(owner := getattr(hook, "__self__", None), StopOnNonFinite):
                owner._remove()
        self.handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove()

    def _remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()
        self._forget()

    def _forget(self) -> None:
        self.bad = None
        self.inputs.clear()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module.training:
            self.inputs.append((args, kwargs))

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if module.training and isinstance(loss, Tensor):
            bad = ~torch.isfinite(loss.detach()).all()
            self.bad = bad if self.bad is None or self.bad.device != bad.device else self.bad | bad

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        scaled = args.fp16 or getattr(optimizer, "scaler", None) is not None  # accelerate's configuration may have asked for it
        grads = {} if scaled else {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        flags = [] if self.bad is None else [self.bad]
        if grads:
            norm = torch.nn.utils.get_total_norm([_whole(g) for g in grads.values()])
            flags.append(~torch.isfinite(norm).to(flags[0].device if flags else norm.device))
        if flags and torch.stack(flags).any():
            what = "loss" if self.bad is not None and self.bad else "gradient"
            inputs = list(self.inputs)
            empty = unsupervised(inputs)
            where = None if empty else first_non_finite(model, inputs, grads)
            self._remove()
            raise _non_finite(what, where, empty, args, state, optimizer)
        self._forget()


def _whole(grad: Tensor) -> Tensor:
    """A sharded gradient's part on this process: what is not finite there stops this process, which ends the others."""
    return grad.to_local() if hasattr(grad, "to_local") else grad


def unsupervised(inputs: Sequence[tuple[tuple, dict]]) -> bool:
    """Whether a mean over labels is 0/0: none counts in a micro-batch, or, if Trainer gave the number of all, in the step."""
    found = [kwargs for _, kwargs in inputs if isinstance(kwargs.get("labels"), Tensor)]
    empty = [bool((kwargs["labels"] == IGNORED).all()) for kwargs in found]
    alone = [kwargs.get("num_items_in_batch") is None for kwargs in found]
    return any(none and own for none, own in zip(empty, alone)) or bool(empty) and all(empty)


def _non_finite(what: str, where: tuple[str, str] | None, empty: bool, args: Any, state: Any, optimizer: Any) -> NonFiniteError:
    step, checkpoint = state.global_step + 1, last_checkpoint(args.output_dir)
    good = f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    if empty:
        return NonFiniteError(
            f"the {what} of step {step} is not finite: a micro-batch has no label that counts (all are {IGNORED}), so its mean "
            f"is 0/0. The step was not applied; {good}. Rows that are nothing but prompt, or whose answer was cut off by the "
            "maximum length, have no such label: leave them out, or raise that length",
            *(step, None, checkpoint),
        )
    rate = optimizer.param_groups[0]["lr"] if optimizer is not None else args.learning_rate
    told = f"first in {where[0]} of {where[1]}" if where else "no single module could be told"
    return NonFiniteError(
        f"the {what} of step {step} is not finite (learning rate {rate:.3g}); {told}. The step was not applied; {good}. Lower "
        "the learning rate or raise its warm-up, clip gradients (max_grad_norm), and look at the rows of this step for empty or "
        "broken ones",
        step,
        where[1] if where else None,
        checkpoint,
    )


def first_non_finite(
    model: nn.Module, inputs: Sequence[tuple[tuple, dict]], grads: Mapping[str, Tensor]
) -> tuple[str, str] | None:
    """("the output", name of the first module whose output is not finite) when the model runs on ``inputs`` again; or ("the
    gradient", name of the first parameter with such a one); None where all is finite, or all gradients are not (clipping by their
    norm spreads NaN), or nothing can be looked at (sharded)."""
    if not any(hasattr(p, "device_mesh") for p in model.parameters()):
        found: list[str] = []
        handles = [m.register_forward_hook(_noting(name, found)) for name, m in model.named_modules()]  # inner ones end first
        devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        try:
            with torch.no_grad(), modes_kept(model), torch.random.fork_rng(devices):
                for args, kwargs in inputs:
                    model(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (whatever the numbers lead to: what was found is told in any case)
            warnings.warn(f"the second look at the step ended early ({type(error).__name__}: {error})", stacklevel=2)
        finally:
            for handle in handles:
                handle.remove()
        if found:
            return "the output", found[0]
    bad = [name for name, g in grads.items() if not torch.isfinite(_whole(g)).all()]
    return ("the gradient", bad[0]) if bad and len(bad) < len(grads) else None


def _noting(name: str, found: list[str]):
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        tensors = [t for t in (output if isinstance(output, tuple | list) else (output,)) if isinstance(t, Tensor)]
        if not found and any(t.is_floating_point() and not torch.isfinite(t).all() for t in tensors):
            found.append(name)

    return hook


# ---------------------------------------------------------------------------------------------- memory


class OutOfMemory(RuntimeError):
    """A GPU's memory was not enough; the message says what would take less."""


def cheaper(model: Any, settings: Settings) -> list[tuple[str, int]]:
    """(what to change, estimated peak then) for every change that takes less, then for all of them together.

    Args:
        model: what :func:`peft_nvfp4.memory.estimate` takes.
    """
    shape, now = model_shape(model), estimate(model, settings).peak
    changes: list[tuple[str, dict[str, Any]]] = []
    if settings.batch > 1:
        half = settings.batch // 2
        changes.append((f"batch {half} (and {-(-settings.batch // half)} times the accumulation)", {"batch": half}))
    changes += _savings(settings)
    found = [(words, estimate(shape, replace(settings, **change)).peak) for words, change in changes]
    found = [(words, peak) for words, peak in found if peak < now]
    if len(found) > 1:
        everything = {key: value for words, change in changes if words in dict(found) for key, value in change.items()}
        found.append(("all of these", estimate(shape, replace(settings, **everything)).peak))
    return found


def _savings(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """(in words, fields of the settings) of what can still be given up."""
    possible = [change for change in SACRIFICES if sacrificed(settings, change) != settings]
    return [("checkpointing" if "checkpointing" in change else f"memory={change['memory']!r}", change) for change in possible]


def explain(model: Any, settings: Settings, memory: int | None = None) -> str:
    """The message of :class:`OutOfMemory` for a step with these settings."""
    asked = f"{settings.batch} x {settings.sequence} tokens with backend {settings.backend}"
    there = "" if memory is None else f", and the GPU has {memory / 2**30:.2f} GiB for this process"
    try:
        now, changes = estimate(model, settings).peak, cheaper(model, settings)
    except ValueError as error:
        return (
            f"the GPU's memory is not enough for {asked}{there}. The estimator does not know this model ({error}); what takes "
            f"less: {', '.join(['a smaller batch', *(words for words, _ in _savings(settings))])}"
        )
    lines = "; ".join(f"{words}: {peak / 2**30:.2f} GiB" for words, peak in changes)
    return (
        f"the GPU's memory is not enough for {asked}{there}. A step is estimated to take {now / 2**30:.2f} GiB. What would take "
        f"less: {lines or 'none of the estimated settings'}"
    )


def settings_of(model: nn.Module, **known: Any) -> Settings:
    """The estimator's settings for a PEFT model with this package's config; ``known`` wins."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    options = getattr(config, "options", None)
    found = {"backend": "bf16"} if options is None else dict(vars(options))
    if config is not None and config.target_modules:
        found |= {"targets": "all-linear", "rank": config.r}
    return Settings(**{**found, "cuda_graphs": records_steps(model), **known})


@contextmanager
def memory_advice(trainer: Any) -> Iterator[None]:
    """Around ``trainer.train()`` (transformers' Trainer or a relative): an out-of-memory error of the GPU becomes
    :class:`OutOfMemory`, which names cheaper settings."""
    model, args = trainer.model, trainer.args
    longest = [0]

    def note(module: nn.Module, positional: tuple, kwargs: dict) -> None:
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        longest[0] = max(longest[0], ids.shape[1]) if isinstance(ids, Tensor) and ids.ndim > 1 else longest[0]

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    except torch.OutOfMemoryError as error:
        checkpointing = getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False)
        settings = settings_of(
            model,
            batch=args.per_device_train_batch_size,
            sequence=-(-max(longest[0], 1) // 8) * 8,
            accumulation=args.gradient_accumulation_steps,
            checkpointing=bool(checkpointing),
            optimizer=name if (name := str(getattr(args.optim, "value", args.optim))) in OPTIMIZERS else "adamw_torch_fused",
        )
        raise OutOfMemory(explain(model.config, settings, memory_there())) from error
    finally:
        handle.remove()


def memory_there() -> int | None:
    """Bytes of the current GPU that PyTorch may use; None without one."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction())


# ---------------------------------------------------------------------------------------------- the same bits


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(seed: int | None = None) -> Iterator[None]:
    """Within the context PyTorch computes deterministically: two runs on one device, with one version of everything, are equal
    bit for bit. An operation that cannot raises.

    All random generators start from ``seed``, if one is given, and go on from where they are when the context ends.

    It costs time in attention's backward and in scattering operations; this package's own kernels are deterministic in any
    case. cuBLAS takes its workspaces from an environment variable that it reads once: set here if it is not, too late if the
    process has multiplied matrices on the GPU before (PyTorch then says so): start with ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.
    """
    os.environ.setdefault(CUBLAS, ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    if seed is not None:
        set_seed(seed)
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads memory before it is written
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[3:]
