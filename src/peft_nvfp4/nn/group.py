"""Shared-input groups: frozen linears that read one tensor (q, k and v; gate and up) are computed together.

The first of them that is called with a tensor computes all of them, in one call of
:func:`peft_nvfp4.autograd.frozen_linear.frozen_linear`: x~ is dequantised once, A of all adapters are one matrix, and the input
gradients are summed in one product. The outputs of the others wait in the tensor's entry of the activation cache until their
linears are called. **So a call of k_proj, say, often computes nothing: it returns what the call of q_proj has computed.** An
output is handed out once, and only if nothing that it was computed with has changed since.

Activation checkpointing runs a part a second time in backward, and gives the tensors that the second run saves, in their order,
to the nodes of the first. Where the part's input is the same tensor object (attention without its norm, say), an output that
still waits from the first run must not be taken in the second: other calls would compute then, and each node would get tensors
of another one. So an output is for calls under the same hooks of saved tensors: every run of a checkpointed part has its own.

An output that waits keeps its graph, and what hooks of that graph refer to: that may be the tensor whose entry it waits in, which
would keep both for good. So it waits no longer than until a backward pass comes through its graph, or the group computes for
another tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.activation_cache import QuantizedInput, stamp
from ..autograd.frozen_linear import Branch, frozen_linear
from ..autograd.module_hooks import may_change

if TYPE_CHECKING:
    from .nvfp4 import NVFP4FrozenLinear


class WaitingOutput(NamedTuple):
    """Output of a linear that was computed before the linear was called."""

    y: Tensor
    depends_on: Dependencies
    keeper: int | None  # see :func:`_keeper`


class Dependencies(NamedTuple):
    """What an output was computed with, but for x."""

    key: tuple  # identities and stamps of tensors, constants of the layer and of the branches
    tensors: list[Tensor]  # kept alive, so that their identities stay theirs


class SharedInputGroup:
    """The frozen linears that read one tensor, where a run of the model has shown which they are.

    Attributes:
        members: the layers, or the LoRA layers around them.
    """

    def __init__(self, members: Sequence[nn.Module]):
        self.members = list(members)

    def output(
        self, layer: NVFP4FrozenLinear, branches: Sequence[Branch], x: Tensor, x2: Tensor, quantized: QuantizedInput
    ) -> Tensor:
        """y (M, out_features) of ``layer`` for x, as it came, and x2 (M, in_features), cast and flattened. The outputs of the
        other members are left for their layers in ``quantized``."""
        keeper = _keeper()
        waiting: WaitingOutput | None = quantized.outputs.pop(id(layer), None)
        if waiting is not None and waiting.keeper == keeper and waiting.depends_on.key == _dependencies(layer, branches).key:
            return waiting.y
        members = [(layer, branches)]
        # a leaf's gradient accumulator holds the leaf: outputs that wait would keep x, and with it their own entry, alive
        if quantized.entered and not (x.requires_grad and x.grad_fn is None and not _is_detached(keeper)):
            members += self._others(layer)
        if keeper == NO_GRAD and any(branch.dropout for _, member_branches in members for branch in member_branches):
            # the first pass of reentrant checkpointing: each layer's seeds must be drawn where it is called, to be drawn again
            members = members[:1]
        linears = [member.operands(member_branches) for member, member_branches in members]
        y, *ys = frozen_linear(x2, quantized, linears)
        for (other, other_branches), other_y in zip(members[1:], ys):
            quantized.outputs[id(other)] = WaitingOutput(other_y, _dependencies(other, other_branches), keeper)
        if ys:
            self._limit_waiting(quantized, y)
        return y

    def _limit_waiting(self, quantized: QuantizedInput, y: Tensor) -> None:
        """Outputs that wait in ``quantized`` are forgotten once a backward pass comes through y's graph, and what waits for this
        group's linears elsewhere is forgotten now."""
        entry = weakref.ref(quantized)
        before = _LOCAL.entries.get(self)
        if before is not None and (other := before()) is not None and other is not quantized:
            other.outputs.clear()
        _LOCAL.entries[self] = entry
        if y.grad_fn is not None:
            y.grad_fn.waiting_in = entry  # no hook: making one has whoever looks for hooks look through the model again

    def _others(self, layer: NVFP4FrozenLinear) -> list[tuple[NVFP4FrozenLinear, Sequence[Branch]]]:
        """The other layers with their branches, but for those whose forward is more than that."""
        others, is_member = [], False
        for module in self.members:
            base = module
            while "base_layer" in base._modules:  # as get_base_layer(), which asks slowly whether there is one
                base = base._modules["base_layer"]
            if base is layer:
                is_member = True
                continue
            branches = module.plain_branches() if hasattr(module, "plain_branches") else ()
            if branches is None or type(base) is not type(layer):
                continue
            held = base._parameters
            if may_change(base.call_hooks) or held["weight"].is_inference():
                continue  # what it depends on might change unseen
            same_input = base.options.terms == layer.options.terms and held["input_offset"] is layer.input_offset
            if same_input and base.hosted is layer.hosted:
                others.append((base, branches))
        return others if is_member else []  # a replica of DataParallel refers to the original's group


NO_GRAD = 0


def _keeper() -> int | None:
    """Who keeps the tensors that a call saves for backward: the identity of a hook (checkpointing and offloading set such hooks),
    None for PyTorch itself, :data:`NO_GRAD` where nothing is saved. The identity stays the hook's own while an output waits: the
    output's graph holds what was saved, and that holds the hook."""
    if not torch.is_grad_enabled():
        return NO_GRAD
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else id(hooks[1])


def _is_detached(keeper: int | None) -> bool:
    """Whether a leaf is what reentrant checkpointing has detached for its second run: the backward pass through y's graph follows
    at once, and nothing waits for long. (The second run of the other checkpointing is in a backward pass, too, with hooks, and
    has to do what the first did.)"""
    return keeper is None and torch._C._current_graph_task_id() != -1


class _Local(threading.local):
    def __init__(self) -> None:
        self.entries = weakref.WeakKeyDictionary()  # group -> the entry that it computed for last


_LOCAL = _Local()


def _dependencies(layer: NVFP4FrozenLinear, branches: Sequence[Branch]) -> Dependencies:
    tensors = [t for t in layer._parameters.values() if t is not None]
    for branch in branches:
        tensors += (branch.a, branch.b)
    constants = (layer.options, layer._scale_factor, *[(branch.scaling, branch.dropout) for branch in branches])
    return Dependencies((*map(id, tensors), *map(stamp, tensors), *constants), tensors)
