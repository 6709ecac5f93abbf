"""For long runs: losses that are not finite, memory that is not enough, runs that have to repeat bit for bit.

>>> trainer = Trainer(..., callbacks=[StopOnNonFinite()])
>>> with memory_advice(trainer), deterministic(0):
...     trainer.train()

``peft-nvfp4 train`` has the first two, and the third with ``--deterministic``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from ..memory import Settings, estimate, model_shape
from ..memory.run import SACRIFICES, sacrificed
from ..memory.settings import OPTIMIZERS
from .cuda_graphs import records_steps
from .distributed.resume import last_checkpoint
from .memory_level import checkpointed, memory_level

# ---------------------------------------------------------------------------------------------- losses

IGNORED = -100
"""The label of a position that does not count."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or Inf; the message names the step that was not applied, the last checkpoint and what to do."""


class StopOnNonFinite(TrainerCallback):
    """Callback of Trainer (and its relatives): raises :class:`NonFiniteError` where a loss or a gradient is NaN or Inf, before
    the optimizer applies it, where an evaluation's loss is, and where a trained parameter is before a checkpoint or at the end of
    training. Nothing is saved then. The GPU is waited for once a step. Under FP16, gradients are left to the loss
    scaler, which skips such steps.

    Which module computes the first such number is found by ``TrainingArguments(debug="underflow_overflow")`` (transformers'
    ``DebugUnderflowOverflow``, slow) when the run is resumed; the error says so."""

    def __init__(self) -> None:
        self.hook: Any = None
        self._start_step()

    def _start_step(self) -> None:
        self.bad_loss: Tensor | None = None  # on the device: whether a loss of this step was not finite
        self.unsupervised: list[tuple[Tensor, bool]] = []  # of each micro-batch: whether no label counts; its mean is its own

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        self._remove()
        for hook in list(model._forward_hooks.values()):  # of a run that was interrupted
            if isinstance(owner := getattr(hook, "__self__", None), StopOnNonFinite):
                owner._remove()
        self.hook = model.register_forward_hook(self._after_forward, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._check_parameters(args, state, **kwargs)
        self._remove()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._check_parameters(args, state, **kwargs)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        losses = {name: value for name, value in (metrics or {}).items() if name.endswith("loss") and isinstance(value, float)}
        if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
            raise NonFiniteError(_explain_trained(f"{bad[0]} is {losses[bad[0]]}", args, state))
        self._check_parameters(args, state, **kwargs)  # what is saved as the best so far

    def _check_parameters(self, args: Any, state: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        local = lambda p: p.to_local() if hasattr(p, "to_local") else p
        trained = {name: local(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
        if bad := [name for name, p in trained.items() if not torch.isfinite(p).all()]:
            raise NonFiniteError(
                _explain_trained(f"{bad[0]} is not finite (of {len(trained)} parameters {len(bad)})", args, state)
            )

    def _remove(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.hook = None
        self._start_step()

    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not module.training:
            return
        if isinstance(output, Mapping) and isinstance(loss := output.get("loss"), Tensor):
            bad = ~torch.isfinite(loss.detach()).all()
            self.bad_loss = bad if self.bad_loss is None else self.bad_loss | bad
        if isinstance(labels := kwargs.get("labels"), Tensor):
            self.unsupervised.append(((labels == IGNORED).all(), kwargs.get("num_items_in_batch") is None))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        scaled = args.fp16 or getattr(optimizer, "scaler", None) is not None  # accelerate's configuration may have asked for it
        # of a sharded gradient this process's part: what is not finite there stops this process, which ends the others
        local = lambda grad: grad.to_local() if hasattr(grad, "to_local") else grad
        grads = {} if scaled else {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        flags = [] if self.bad_loss is None else [self.bad_loss]
        if grads:
            norm = torch.nn.utils.get_total_norm(grads.values())
            flags.append(~torch.isfinite(norm).to(flags[0].device if flags else norm.device))
        if flags and torch.stack(flags).any():
            bad = [name for name, g in grads.items() if not torch.isfinite(g).all()]
            what = "loss" if self.bad_loss is not None and self.bad_loss else "gradient"
            if what == "gradient" and 0 < len(bad) < len(grads):  # clipping by a norm spreads NaN to all of them
                what += f" of {bad[0]}"
            without_labels = self._no_label_counts()
            self._remove()
            raise NonFiniteError(_explain_non_finite(what, without_labels, args, state, optimizer))
        self._start_step()

    def _no_label_counts(self) -> bool:
        """Whether a mean over labels is 0/0: of a micro-batch, or of the step if Trainer gave the number of all its labels."""
        alone = any(bool(empty) for empty, own_mean in self.unsupervised if own_mean)
        return alone or bool(self.unsupervised) and all(bool(empty) for empty, _ in self.unsupervised)


def _explain_non_finite(what: str, without_labels: bool, args: Any, state: Any, optimizer: Any) -> str:
    checkpoint = last_checkpoint(args.output_dir)
    last = f"The step was not applied; {f'the last checkpoint is {checkpoint}' if checkpoint else 'there is no checkpoint yet'}."
    if without_labels:
        return (
            f"the {what} of step {state.global_step + 1} is not finite: a micro-batch has no label that counts (all are "
            f"{IGNORED}), so its mean is 0/0. {last} Rows that are nothing but prompt, or whose answer was cut off by the "
            "maximum length, have no such label: leave them out, or raise that length"
        )
    rate = optimizer.param_groups[0]["lr"] if optimizer is not None else args.learning_rate
    return (
        f"the {what} of step {state.global_step + 1} is not finite (learning rate {rate:.3g}). {last} Lower the learning rate or "
        "raise its warm-up, clip gradients (max_grad_norm), and look at the rows of this step for empty or broken ones. "
        "TrainingArguments(debug='underflow_overflow') prints the first module whose output is not finite when the run goes on "
        "from there"
    )


def _explain_trained(what: str, args: Any, state: Any) -> str:
    checkpoint = last_checkpoint(args.output_dir)
    last = f"the last checkpoint that is finite is {checkpoint}" if checkpoint else "there is no checkpoint that is finite"
    return (
        f"{what} after step {state.global_step}. Nothing of it was saved; {last}. Lower the learning rate or raise its warm-up, "
        "and look at the optimizer's settings: epsilon of Adam must not be 0"
    )


# ---------------------------------------------------------------------------------------------- memory


SMALL_STATE = "paged_adamw_8bit"
"""The optimizer whose state takes least of a GPU: none, where it is short."""


class OutOfMemory(RuntimeError):
    """A GPU's memory was not enough; the message says what would take less."""


def cheaper(model: Any, settings: Settings) -> list[tuple[str, int]]:
    """(what to change, estimated peak then) for every change that takes less, then for all of them together. ``model`` is what
    :func:`peft_nvfp4.memory.estimate` takes."""
    shape = model_shape(model)
    peak = lambda change: estimate(shape, replace(settings, **change)).peak
    helpful = [(words, change) for words, change in _savings(settings) if peak(change) < peak({})]
    if len(helpful) > 1:
        helpful.append(("all of these", {key: value for _, change in helpful for key, value in change.items()}))
    return [(words, peak(change)) for words, change in helpful]


def _savings(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """(in words, fields of the settings) of what can still be given up."""
    changes = [change for change in SACRIFICES if sacrificed(settings, change) != settings]
    savings = [("checkpointing" if "checkpointing" in change else f"memory={change['memory']!r}", change) for change in changes]
    if settings.batch > 1:
        half = settings.batch // 2
        savings.insert(0, (f"batch {half} (and {-(-settings.batch // half)} times the accumulation)", {"batch": half}))
    if not settings.optimizer.startswith("paged") and OPTIMIZERS[settings.optimizer]:
        savings.append((f"optimizer {SMALL_STATE}", {"optimizer": SMALL_STATE}))
    return savings


def explain(model: Any, settings: Settings, memory: int | None = None) -> str:
    """The message of :class:`OutOfMemory` for a step with these settings."""
    asked = f"{settings.batch} x {settings.sequence} tokens with backend {settings.backend}"
    limit = "" if memory is None else f", and the GPU has {memory / 2**30:.2f} GiB for this process"
    try:
        now, changes = estimate(model, settings).peak, cheaper(model, settings)
    except ValueError as error:
        return (
            f"the GPU's memory is not enough for {asked}{limit}. The estimator does not know this model ({error}); what takes "
            f"less: {', '.join(words for words, _ in _savings(settings)) or 'a shorter sequence'}"
        )
    lines = "; ".join(f"{words}: {peak / 2**30:.2f} GiB" for words, peak in changes)
    return (
        f"the GPU's memory is not enough for {asked}{limit}. A step is estimated to take {now / 2**30:.2f} GiB. What would take "
        f"less: {lines or 'none of the estimated settings'}"
    )


def settings_of(model: nn.Module, **known: Any) -> Settings:
    """The estimator's settings for a PEFT model with this package's config; ``known`` wins."""
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    options = getattr(config, "options", None)
    fields = {"backend": "bf16"} if options is None else dict(vars(options))
    if (level := memory_level(model)) is not None:
        fields["memory"] = level.level
    if config is not None and config.target_modules:
        fields |= {"targets": "all-linear", "rank": config.r}
    return Settings(**{**fields, "cuda_graphs": records_steps(model), **known})


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
            checkpointing=bool(checkpointing) or checkpointed(model),
            optimizer=name if (name := str(getattr(args.optim, "value", args.optim))) in OPTIMIZERS else "adamw_torch_fused",
        )
        memory = None
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            memory = int(total * torch.cuda.get_per_process_memory_fraction())
        raise OutOfMemory(explain(model.config, settings, memory)) from error
    finally:
        handle.remove()


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(seed: int | None = None) -> Iterator[None]:
    """Within the context PyTorch computes deterministically: two runs on one device, with one version of everything, are equal
    bit for bit. An operation that cannot raises. All random generators start from ``seed``, if one is given, and go on from where
    they are when the context ends.

    ``transformers.enable_full_determinism`` sets the same flags for good, serialises kernel launches, which costs time and
    changes no result, and takes cuBLAS's smaller workspace.

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
