"""The structure that calibration needs of a model, found by running it: its decoder layers, what they are called with, and which
linears of a layer read one input. No table of architectures.

* The *stack* of layers is the ``nn.ModuleList`` that holds most of the linear weights.
* Calls: the model runs with every layer of the stack replaced by one that notes its arguments and returns its input. That costs
  next to nothing and gives each layer its own arguments (masks and rotary embeddings differ between sliding and full attention).
  From then on a layer can be run alone, on the output of the one before it.
* Groups: linears of a layer that are handed the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..fusion.probe import modes_kept, standing_in
from .data import Batch


class _Stop(Exception):
    """The last layer has been reached."""


Call = tuple[tuple, dict[str, Any]]
"""The arguments of one layer, but for the hidden states."""


@dataclass
class Stack:
    """A run of layers and what each is called with."""

    name: str  # dotted name of the ModuleList
    layers: nn.ModuleList
    hidden: list[Tensor]  # for every batch, the input of the first layer
    calls: list[list[Call]]  # for every batch, for every layer, the other arguments
    tuples: bool | None = None  # layers return a tuple whose first item is the hidden states; None until one has run

    def run(self, index: int, batch: int, hidden: Tensor) -> Tensor:
        """Output of layer ``index`` for a batch."""
        args, kwargs = to_device(self.calls[batch][index], hidden.device)
        output = self.layers[index](hidden, *args, **kwargs)
        return output[0] if self.tuples else output


def to_device(tree: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), tree)


def find_stack(model: nn.Module, planned: Sequence[str], name: str | None = None) -> str:
    """Dotted name of the ModuleList of decoder layers: the one given, or the one with most weights of the planned linears."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if name is not None:
        matches = [n for n in lists if n == name or n.endswith(f".{name}")]
        if len(matches) != 1:
            raise ValueError(f"{name!r} names {len(matches)} lists of layers of this model; it has {', '.join(lists) or 'none'}")
        return matches[0]
    sizes = {n: sum(model.get_submodule(p).weight.numel() for p in planned if p.startswith(f"{n}.")) for n in lists}
    best = max(sizes, key=lambda n: (sizes[n], -len(n)), default=None)
    if best is None or not sizes[best]:
        raise ValueError("this model has no list of layers with linears to calibrate; name it: calibrate(..., layers=...)")
    return best


@contextmanager
def on_device(layer: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Within the context the layer is on ``device``; and where it was, afterwards. Linears that were replaced meanwhile wait on
    the CPU, for an error to put them back."""
    home = next(layer.parameters()).device
    linears = {module for module in layer.modules() if isinstance(module, nn.Linear)}
    try:
        yield layer.to(device)
    finally:
        layer.to(home)
        for linear in linears.difference(layer.modules()):
            linear.to("cpu")


@contextmanager
def outside_on(model: nn.Module, layers: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context, what lies outside of the layers (embeddings, towers) is on ``device``; and where it was, afterwards."""
    inside = set(layers.modules())
    moved = []
    for module in model.modules():
        if module not in inside:
            home = next((t.device for t in (*module.parameters(False), *module.buffers(False))), None)
            if home is not None and home != device:
                moved.append((module, home))
    try:
        for module, _ in moved:
            module._apply(lambda t: t.to(device), recurse=False)
        yield
    finally:
        for module, home in moved:
            module._apply(lambda t: t.to(home), recurse=False)


def call_model(model: nn.Module, batch: Batch, device: torch.device) -> Any:
    config = getattr(model, "config", None)
    return model(**to_device(batch, device), **({"use_cache": False} if config is not None else {}))


def capture(model: nn.Module, name: str, data: Sequence[Batch], device: torch.device) -> Stack:
    """What the layers of the stack are called with for every batch, kept on the CPU."""
    layers = model.get_submodule(name)
    stack = Stack(name, layers, [], [])
    with torch.no_grad(), modes_kept(model), outside_on(model, layers, device):
        model.eval()
        for batch in data:
            record: list[tuple[Tensor, Call]] = []
            with standing_in({layer: _recorder(stack, i, record, device) for i, layer in enumerate(layers)}):
                with suppress(_Stop):
                    call_model(model, batch, device)
            if len(record) != len(layers):
                raise ValueError(f"a forward pass reached {len(record)} of the {len(layers)} layers of {name}")
            memo: dict[int, Tensor] = {}  # what layers share stays shared
            to_cpu = lambda t: memo.setdefault(id(t), t.detach().cpu())  # noqa: B023
            stack.hidden.append(record[0][0].cpu())
            stack.calls.append(tree_map_only(Tensor, to_cpu, [call for _, call in record]))
    return stack


def _recorder(stack: Stack, index: int, record: list[tuple[Tensor, Call]], device: torch.device) -> Callable:
    """Stands in for a layer. The first one also runs once, to see whether layers return tuples."""
    layer = stack.layers[index]
    inner = layer.forward

    def forward(*args, **kwargs):
        args = list(args)
        hidden = args.pop(0) if args else kwargs.pop("hidden_states")
        if len(record) != index or (record and record[-1][0] is not hidden):
            raise ValueError(
                f"this model does something to the hidden states before layer {index} of {stack.name}, or calls its layers in "
                "another order; layers cannot be calibrated one after the other"
            )
        record.append((hidden, (tuple(args), kwargs)))
        if stack.tuples is None:
            with on_device(layer, device):
                stack.tuples = isinstance(inner(hidden.clone(), *args, **kwargs), tuple)
        if index + 1 == len(stack.layers):
            raise _Stop
        return (hidden,) if stack.tuples else hidden

    return forward


def linear_groups(stack: Stack, index: int, hidden: Tensor, names: Sequence[str], batch: int = 0) -> list[list[str]]:
    """Groups of the named linears of a layer that are handed one tensor, in the order of use, when it runs on a batch; linears
    that the run does not reach are left out."""
    layer = stack.layers[index]
    groups: list[tuple[Tensor, list[str]]] = []
    seen: set[str] = set()

    def watch(name: str, linear: nn.Linear) -> Callable:
        inner = linear.forward

        def forward(x: Tensor, *args, **kwargs):
            if name not in seen:
                seen.add(name)
                group = next((names for tensor, names in groups if tensor is x), None)
                if group is None:
                    groups.append((x, group := []))
                group.append(name)
            return inner(x, *args, **kwargs)

        return forward

    with standing_in({layer.get_submodule(n): watch(n, layer.get_submodule(n)) for n in names}), torch.no_grad():
        stack.run(index, batch, hidden)
    return [group for _, group in groups]
