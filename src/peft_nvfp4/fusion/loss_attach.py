"""A model of transformers that computes its loss at supervised positions only (:mod:`peft_nvfp4.fusion.loss`).

:func:`attach_loss` needs no code per architecture. While ``forward`` runs, the output head hands over its input instead of logits
and ``model.loss_function`` computes the loss from that; the rest (router losses, which labels count, the class of the output)
stays the model's own code. It works with ``labels``, in training mode or without gradient (``Trainer.evaluate``); generation and
calls with ``logits_to_keep`` are untouched, and so are heads that somebody has put hooks on (ZeRO-3, tensor parallelism). A head
that is a plain linear computes a chunk of logits at a time. Any other (with LoRA, quantised, moved about by accelerate) is called
once, with the supervised positions: where it is sharded, all ranks make that one call, whatever the number of their labels.

torch.compile from 2.13 traces all that without a break, with logits at all positions in 8 chunks; older compilers, and heads
that are not a plain linear, get the model's own loss there (:func:`linear_cross_entropy` alone compiles with every version).
TRL 1.16's SFTTrainer has a fused head of its own and never asks the model for a loss.

Calls of one model may be nested (a hook that calls it) and may run in several threads at once. What a call has put on the head
and on the model asks the context whose turn it is; a call without labels, inside one with labels, gets its logits.

The file is long because the trial that decides and the call that it tries belong together.
"""

from __future__ import annotations

import copyreg
import functools
import math
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from .lazy_logits import EvaluatedLogits, LazyLogits
from .loss import Targets, Transform, _compute_dtype, _losses, _shifted, _supervised_loss, _targets
from .probe import hooked, innermost, modes_kept, special_tokens, watched, without_observers

# ---------------------------------------------------------------------------------------------- models of transformers

TRACEABLE = torch.__version__ >= (2, 13)  # 2.10 cannot trace that an instance attribute is taken away
_SETTINGS = "_supervised_loss"  # attribute of a model that computes this loss


class Settings(NamedTuple):
    transform: Transform
    vocabulary: int
    chunk: int | None


@dataclass(frozen=True)
class LossReport:
    """What :func:`attach_loss` did: whether it ``attached`` the loss, and how or why not."""

    attached: bool
    reason: str

    def __str__(self) -> str:
        return f"loss at supervised positions: {self.reason}" if self.attached else f"ordinary loss: {self.reason}"


def attach_loss(model: nn.Module, chunk: int | None = None) -> LossReport:
    """Make a causal LM of transformers, bare or inside a ``PeftModel``, compute its training loss at supervised positions only.

    It is tried first, on 2 x 8 random tokens: the logits must be a known function of the head's output, and loss and gradient
    must equal the model's own. If they do not, or the model cannot run here and now, nothing changes and the report says why.

    Args:
        chunk: see :func:`linear_cross_entropy`; it counts where the head is a plain linear.
    """
    model = innermost(model)
    detach_loss(model)
    settings, report = _examined(model, chunk)
    if settings is not None:
        _set_class(model, _with_loss(type(model)))
        setattr(model, _SETTINGS, settings)
    return report


def attach_loss_at_first_call(model: nn.Module) -> LossReport:
    """:func:`attach_loss`, but it is tried in the first call that has labels: where the model is then, and on its own device.
    :func:`loss_report` says how that went."""
    model = innermost(model)
    detach_loss(model)
    report = LossReport(True, "to be tried in the first call with labels and without hooks")
    if not hasattr(model, "config") or not hasattr(model, "loss_function") or not hasattr(model, "get_output_embeddings"):
        return LossReport(False, "it is not a model of transformers")
    _set_class(model, _with_loss(type(model)))
    setattr(model, _SETTINGS, report)
    return report


def loss_report(model: nn.Module) -> LossReport:
    """What became of :func:`attach_loss` or :func:`attach_loss_at_first_call`."""
    settings = innermost(model).__dict__.get(_SETTINGS)
    if isinstance(settings, LossReport):
        return settings
    return LossReport(False, "not attached") if settings is None else _attached_report(innermost(model))


def _attached_report(model: nn.Module) -> LossReport:
    plain = _plain(model.get_output_embeddings()) is not None
    return LossReport(True, "from the head's weight" if plain else "through the head's own forward")


def _examined(model: nn.Module, chunk: int | None) -> tuple[Settings | None, LossReport]:
    try:
        return _examine(model, chunk), _attached_report(model)
    except _Unsuitable as reason:
        return None, LossReport(False, str(reason))
    except Exception as error:  # whatever a model may raise on an input it does not expect: said, not hidden
        return None, LossReport(False, f"the run on 2 x 8 random tokens failed ({type(error).__name__}: {error})")


def detach_loss(model: nn.Module) -> nn.Module:
    """Give the model its own loss back."""
    inner = innermost(model)
    inner.__dict__.pop(_SETTINGS, None)  # enough where somebody has swapped the class again since
    if original := type(inner).__dict__.get("_without_loss"):
        _set_class(inner, original)
    return model


def _set_class(model: nn.Module, cls: type) -> None:
    model.__class__ = cls
    if "_old_forward" in model.__dict__:  # accelerate, where a model is spread over devices, calls this
        model._old_forward = types.MethodType(cls.forward, model)


@functools.cache
def _with_loss(original: type) -> type:
    """Subclass of a model's class, under the same name, whose forward computes the loss here where it can. A method of the class,
    not a function set on the instance: DataParallel's replicas, copies and pickles get it with their own ``self``."""

    @functools.wraps(original.forward)  # Trainer and generate read the signature
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.__dict__.get(_SETTINGS)
        applies = settings is not None and _applies(self, kwargs)
        if applies and isinstance(settings, LossReport):
            untried = settings.attached and not torch.compiler.is_compiling() and not getattr(self, "_is_replica", False)
            untried = untried and not torch.is_inference_mode_enabled()  # it needs a gradient
            if untried and not any(watched(m, observers=False) for m in self.modules() if m is not self):  # it would call them
                _set_class(self, original)  # with the model's own forward
                try:
                    with without_observers(self):  # in a context of its own: hooks may have noted there what this call is given
                        examined, report = copy_context().run(_examined, self, None)
                finally:
                    _set_class(self, _with_loss(original))
                settings = self.__dict__[_SETTINGS] = report if examined is None else examined
            applies = isinstance(settings, Settings)
        call = _Call(self, settings) if applies else None
        if call is None and (torch.compiler.is_compiling() or not _RUNNING.get()):
            return original.forward(self, *args, **kwargs)
        if call is not None and not torch.compiler.is_compiling():
            call.find_targets(**kwargs)
        with call.traced() if call is not None and torch.compiler.is_compiling() else _running(self, call):
            output = original.forward(self, *args, **kwargs)
        return output if call is None else call.finish(output)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        reduced = original.__reduce_ex__(self, protocol)
        same = type(self).__dict__.get("_without_loss") is original
        return (_new_with_loss, (original,), *reduced[2:]) if same else reduced

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(
        original.__name__, (original,), names | dict(forward=forward, __reduce_ex__=__reduce_ex__, _without_loss=original)
    )


def _new_with_loss(original: type) -> nn.Module:
    return copyreg.__newobj__(_with_loss(original))


def _applies(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    head, keep = model.get_output_embeddings(), kwargs.get("logits_to_keep", 0)
    return (
        (model.training or not torch.is_grad_enabled())
        and kwargs.get("labels") is not None
        and isinstance(keep, int)
        and keep == 0
        and kwargs.get("return_dict", model.config.return_dict) is not False
        and _loss_of(model) is ForCausalLMLoss
        and not any(map(hooked, head.modules()))
        and not (torch.compiler.is_compiling() and (not TRACEABLE or _plain(head) is None))
    )


_RUNNING: ContextVar[tuple[tuple[nn.Module, nn.Module, _Call | None], ...]] = ContextVar("running", default=())
"""(model, head, call) of every forward that runs in this context, the innermost last; None: one that computes logits."""
_LOCK = threading.Lock()  # of what is installed


def computes_supervised_loss() -> bool:
    """Whether the model whose forward runs in this context computes its loss at supervised positions, and no other logits."""
    return bool(running := _RUNNING.get()) and running[-1][2] is not None



class _Dispatcher:
    """In the place of a head's ``forward`` or a model's ``_loss_function`` while calls of it run, in whatever threads: the method
    of the call that runs in this context, or else what was there."""

    def __init__(self, module: nn.Module, name: str, method: str):
        self.module, self.name, self.method, self.users = module, name, method, 0
        self.before = module.__dict__.get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entries = (call for *modules, call in reversed(_RUNNING.get()) if any(m is self.module for m in modules))
        call = next(entries, None)
        if call is not None and (self.name != "forward" or call.hidden is None):  # the loss may call the head
            return getattr(call, self.method)(*args, **kwargs)
        of_class = ForCausalLMLoss if self.name != "forward" else type(self.module).forward.__get__(self.module)
        return (self.before or of_class)(*args, **kwargs)


def _before(module: nn.Module, name: str) -> Any:
    """An instance's own attribute, but for a dispatcher; None if there is none."""
    value = module.__dict__.get(name)
    return value.before if isinstance(value, _Dispatcher) else value


def _loss_of(model: nn.Module) -> Callable:
    value = model.__dict__.get("_loss_function")
    return value.before or ForCausalLMLoss if isinstance(value, _Dispatcher) else model.loss_function


@contextmanager
def _running(model: nn.Module, call: _Call | None) -> Iterator[None]:
    """Within the context, this forward of the model is that of ``call``, or an ordinary one."""
    head = model.get_output_embeddings()
    places = () if call is None else ((head, "forward", "head_forward"), (model, "_loss_function", "loss_function"))
    token = _RUNNING.set((*_RUNNING.get(), (model, head, call)))
    with _LOCK:
        for module, name, method in places:
            if not isinstance(module.__dict__.get(name), _Dispatcher):
                module.__dict__[name] = _Dispatcher(module, name, method)
            module.__dict__[name].users += 1
    try:
        yield
    finally:
        with _LOCK:
            for module, name, _ in places:
                dispatcher = module.__dict__.get(name)
                if isinstance(dispatcher, _Dispatcher):  # else somebody has put something else there meanwhile
                    dispatcher.users -= 1
                    if not dispatcher.users:
                        _set(module, name, dispatcher.before)
        _RUNNING.reset(token)


class _Call:
    """One forward of a model: what its head was given, and the loss of that."""

    def __init__(self, model: nn.Module, settings: Settings, trial: bool = False):
        self.model, self.head, self.settings, self.trial = model, model.get_output_embeddings(), settings, trial
        self.hidden: Tensor | None = None
        self.loss: Tensor | None = None
        self.prepared: tuple[tuple, Targets] | None = None  # what the targets were made of, and they

    def find_targets(self, labels: Tensor, num_items_in_batch: Any = None, shift_labels: Any = None, **kwargs: Any) -> None:
        """Which positions have a label, before the decoder is launched: a GPU has nothing to do yet, and the wait for their
        number costs nothing. Afterwards it would wait for the decoder, and backward would be launched late."""
        if shift_labels is None and "ignore_index" not in kwargs and self.device is not None:
            shifted = _shifted(labels, -100).reshape(-1).to(self.device)
            self.prepared = (labels, num_items_in_batch), _targets(shifted, -100, num_items_in_batch)

    @property
    def device(self) -> torch.device | None:
        return next((p.device for p in self.head.parameters() if not p.is_meta), None)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """What :func:`_running` does, as a compiler can trace it: nothing else runs then."""
        before = self.model.__dict__.get("_loss_function")
        self.head.forward, self.model._loss_function = self.head_forward, self.loss_function
        try:
            yield
        finally:
            _set(self.head, "forward", None)
            _set(self.model, "_loss_function", before)

    def head_forward(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            _set(self.head, "forward", None)
        self.hidden = hidden.detach().requires_grad_() if self.trial else hidden
        return hidden.new_empty(*hidden.shape[:-2], 0, self.settings.vocabulary)

    def loss_function(
        self, logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
    ) -> Tensor:
        """In the place of ``ForCausalLMLoss``, with its arguments; these logits are empty."""
        arguments, targets = self.prepared or ((None, None), None)
        same = shift_labels is None and labels is arguments[0] and num_items_in_batch is arguments[1] and ignore_index == -100
        labels = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
        device = self.device or self.hidden.device
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1]).to(device)
        if labels.numel() != len(hidden):
            raise ValueError(f"labels have shape {tuple(labels.shape)}, the head's input {tuple(self.hidden.shape)}")
        if not same:
            targets = _targets(labels.reshape(-1).to(device), ignore_index, num_items_in_batch)
        self.loss = _head_loss(hidden, self.head, self.settings, targets)
        return self.loss

    def finish(self, output: Any) -> Any:
        if self.hidden is None:  # somebody else's forward, which does not ask the head
            return output
        if self.loss is None:
            raise RuntimeError(f"{type(self.model).__name__} took its loss from elsewhere this time; call detach_loss(model)")
        if isinstance(output, dict) and "logits" in output:
            replica = getattr(self.model, "_is_replica", False)  # DataParallel would gather them
            output["logits"] = None if replica else self.logits()
        return output

    def logits(self) -> LazyLogits:
        model, head, hidden, transform = self.model, self.head, self.hidden, self.settings.transform
        kind = hidden.device.type
        autocast = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))

        def compute() -> Tensor:
            with torch.autocast(**autocast), _running(model, None):  # perhaps within another forward of the model
                return transform.forward(head(hidden))[0]

        shape = (*hidden.shape[:-1], getattr(head, "out_features", self.settings.vocabulary))
        logits = LazyLogits if torch.is_grad_enabled() else EvaluatedLogits
        return logits(compute, shape, _compute_dtype(hidden), hidden.device)


def _set(module: nn.Module, name: str, value: Any) -> None:
    """An attribute of the instance, or none. (Not by ``delattr``, which torch.compile would do again after its graph.)"""
    if value is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _head_loss(hidden: Tensor, head: nn.Module, settings: Settings, targets: Targets) -> Tensor:
    if (plain := _plain(head)) is not None:
        return _supervised_loss(hidden, *plain, targets, settings.transform, settings.chunk)
    h = hidden if targets.positions is None else hidden.index_select(0, targets.positions)
    losses, _ = _losses(settings.transform.forward(head(h))[0], targets.labels)
    return (losses if targets.valid is None else torch.where(targets.valid, losses, 0)).sum() / targets.denominator


def _plain(head: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) of a head that is a linear and nothing else, also as PEFT's ``modules_to_save``."""
    if isinstance(head, ModulesToSaveWrapper):
        active = [] if head.disable_adapters else [a for a in head.active_adapters if a in head.modules_to_save]
        head = head.modules_to_save[active[0]] if active else head.original_module
    weight = getattr(head, "weight", None)
    usable = type(head) is nn.Linear and _before(head, "forward") is None and type(weight) in (nn.Parameter, Tensor)
    return (weight, head.bias) if usable and weight.is_floating_point() and not weight.is_meta else None


# ---------------------------------------------------------------------------------------------- the trial


class _Unsuitable(Exception):
    pass


class _Ordinary(_Call):
    """The model's own loss, watched: with the head's output z (or large random numbers instead) and the logits made from it."""

    noise = False

    def head_forward(self, hidden: Tensor) -> Tensor:
        super().head_forward(hidden)
        self.z = self.head(self.hidden)
        if self.noise:
            self.z = (30 * torch.randn(self.z.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")).to(self.z)
        return self.z

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.logits, self.loss = logits, ForCausalLMLoss(logits, *args, **kwargs)
        return self.loss


def _examine(model: nn.Module, chunk: int | None) -> Settings:
    """Raises :class:`_Unsuitable` unless the loss here is the model's own."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "loss_function") or not hasattr(model, "get_output_embeddings"):
        raise _Unsuitable("it is not a model of transformers")
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise _Unsuitable("it is not a causal LM with one output head")
    if model.loss_function is not ForCausalLMLoss:
        raise _Unsuitable(f"its loss is {getattr(model.loss_function, '__name__', model.loss_function)}")
    own = model.__dict__.get("_old_forward", model.__dict__.get("forward"))
    if own is not None and getattr(own, "__func__", None) is not type(model).forward:
        raise _Unsuitable("something has replaced its forward on the instance; attach the loss before that")
    settings = Settings(Transform(), config.get_text_config().vocab_size, chunk)
    watched = _Ordinary(model, settings, trial=True)
    watched.noise = True
    _try(model, watched)
    settings = settings._replace(transform=_transform_of(watched.z.detach(), watched.logits.detach(), config))
    pairs = []
    for call in (_Call(model, settings, trial=True), _Ordinary(model, settings, trial=True)):
        loss = _try(model, call)
        pairs.append((loss, torch.autograd.grad(loss, call.hidden)[0]))
    # The same arithmetic but for the order of FP32 sums; where that flips the rounding of a 16-bit value, a few last places.
    bound = max(1e-4, 8 * torch.finfo(watched.z.dtype).eps)
    for what, a, b in zip(("loss", "gradient"), *pairs):
        error = ((a - b).float().norm() / b.float().norm()).item()
        if not error <= bound:
            raise _Unsuitable(f"its {what} on random tokens differs by {error:.1e} of what the model itself computes")
    return settings


def _try(model: nn.Module, call: _Call) -> Tensor:
    """The model's whole loss on random tokens, router losses and all."""
    generator, special = torch.Generator().manual_seed(0), special_tokens(model.config)
    ids = torch.tensor([i for i in range(min(model.config.get_text_config().vocab_size, 1000)) if i not in special], device="cpu")
    ids = ids[torch.randint(len(ids), (2, 8), generator=generator, device="cpu")].to(model.get_input_embeddings().weight.device)
    labels = ids.clone()
    labels[:, :3] = labels[0, 6] = -100
    devices = {p.device for p in model.parameters() if p.is_cuda}
    # a run to come draws the random numbers that it would have drawn
    with _running(model, call), modes_kept(model), torch.random.fork_rng(list(devices)), torch.enable_grad():
        loss = model.eval()(input_ids=ids, labels=labels, use_cache=False).loss
    if call.hidden is None or call.loss is None:
        raise _Unsuitable("it does not take its loss from model.loss_function and the output of its head")
    return loss


def _transform_of(z: Tensor, logits: Tensor, config: Any) -> Transform:
    """What the model makes of the head's output: a scale and a cap that are numbers of its configuration, found bit for bit."""
    z, logits = z.flatten(0, -2)[:, :64], logits.flatten(0, -2)[:, :64].float()
    values = [*config.to_dict().values(), *config.get_text_config().to_dict().values()]
    numbers = sorted({float(v) for v in values if type(v) in (int, float) and 0 < v < math.inf and v != 1})
    scales = [{}] + [{key: v} for v in numbers for key in ("scale", "divisor")]
    for softcap in (None, *numbers):
        for scale in scales:
            transform = Transform(softcap=softcap, **scale)
            if torch.equal(transform.forward(z)[0].float(), logits):
                return transform
    raise _Unsuitable("between its head and its loss is more than a scale and a cap of the logits")
