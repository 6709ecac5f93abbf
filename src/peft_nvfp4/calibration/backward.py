"""Backward layouts from GPTQ: W_b (K, N) of D(W_f)^T, solved against the moments of the gradient that it will be multiplied by.

dx = D(Q(dy)) D(W_b)^T. As the forward pass collects E[x~ x~^T], this one collects E[dy~ dy~^T], dy~ = D(Q(dy)), from a few
backward passes on calibration data. Layers are taken from the last to the first, so that a layer's gradient has gone through
layers whose W_b is solved for already; one layer at a time is on the GPU, its inputs waited since the forward pass.

The source stays D(W_f): the gradient belongs to the function that is computed, only its rounding errors get smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..fusion.probe import modes_kept, standing_in
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics import reference
from ..numerics.formats import GRADIENT
from .data import Batch
from .gptq import GPTQOptions, gptq_backward, output_error
from .hessian import Moments
from .structure import Stack, call_model, outside_on

IGNORED = -100
"""Label of a position without loss."""


def labels_of(model: nn.Module, batch: Batch) -> Tensor:
    """The batch's own labels, or its tokens but for padding and placeholders of images."""
    if "labels" in batch:
        return batch["labels"]
    labels = batch["input_ids"].clone()
    if isinstance(batch.get("attention_mask"), Tensor):
        labels[batch["attention_mask"] == 0] = IGNORED
    config = getattr(model, "config", None)
    for key in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, key, None), int):
            labels[labels == getattr(config, key)] = IGNORED
    return labels


def last_gradient(model: nn.Module, stack: Stack, batch: Batch, hidden: Tensor, device: torch.device) -> Tensor:
    """Gradient of the loss in the last layer's output ``hidden``: the model runs with its layers left out.

    Scaled by a power of two to a sum over tokens: moments of a mean's gradient would be tiny.
    """
    leaf = hidden.detach().to(device).requires_grad_()
    labels = labels_of(model, batch)

    def skip(index: int) -> Callable:
        def forward(*args, **kwargs):
            out = leaf if index + 1 == len(stack.layers) else (args[0] if args else kwargs["hidden_states"])
            return (out,) if stack.tuples else out

        return forward

    with (
        modes_kept(model),
        outside_on(model, stack.layers, device),
        standing_in({m: skip(i) for i, m in enumerate(stack.layers)}),
    ):
        model.eval()
        with torch.enable_grad():
            loss = call_model(model, {**batch, "labels": labels}, device).loss
            (grad,) = torch.autograd.grad(loss, leaf)
    return grad * 2.0 ** int((labels != IGNORED).sum()).bit_length()


class BackwardPass:
    """Backward through one layer at a time.

    Args:
        inputs: inputs(layer, batch) -> its hidden states.
        grads: of the last layer's output, one for each batch.
    """

    def __init__(self, stack: Stack, inputs: Callable[[int, int], Tensor], grads: list[Tensor], device: torch.device):
        self.stack, self.inputs, self.grads, self.device = stack, inputs, grads, device

    def collect(self, index: int, linears: dict[str, NVFP4FrozenLinear]) -> dict[str, Moments]:
        """Moments of D(Q(dy)) of the named linears of a layer."""
        moments = {name: Moments(linear.out_features, self.device) for name, linear in linears.items()}

        def watch(name: str) -> Callable:
            def note(dy: Tensor) -> None:
                q = ops.quantize(dy.reshape(-1, dy.shape[-1]), GRADIENT)
                moments[name].add(ops.dequantize(q, dy.dtype))

            return lambda module, args, output: output.register_hook(note) and None

        handles = [linear.register_forward_hook(watch(name)) for name, linear in linears.items()]
        try:
            for batch in range(len(self.grads)):
                self._backward(index, batch)
        finally:
            for handle in handles:
                handle.remove()
        return moments

    def propagate(self, index: int) -> None:
        """Take the gradients through the layer."""
        for batch in range(len(self.grads)):
            self.grads[batch] = self._backward(index, batch).cpu()

    def _backward(self, index: int, batch: int) -> Tensor:
        hidden = self.inputs(index, batch).to(self.device).requires_grad_()
        layer = self.stack.layers[index]
        flags = {p: p.requires_grad for p in layer.parameters()}
        try:
            for p in flags:
                p.requires_grad_(False)
            with torch.enable_grad():
                output = self.stack.run(index, batch, hidden)
                return torch.autograd.grad(output, hidden, self.grads[batch].to(self.device, output.dtype))[0]
        finally:
            for p, flag in flags.items():
                p.requires_grad_(flag)


def solve_layer(
    linears: dict[str, NVFP4FrozenLinear], moments: dict[str, Moments], options: GPTQOptions, name: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Give the linears their new W_b. Returns the errors of dx (per cent, on the tokens it was solved for) against the layout
    that requantising made, and the tensors to be kept."""
    errors, tensors = {}, {}
    for n, linear in linears.items():
        w = linear.dequantize(torch.float32).T
        solution = gptq_backward(linear.forward_layout, moments[n], options, name=f"{name}.{n} (backward)")
        row = {"dx_requantized": _percent(w, linear.backward_layout, moments[n])}
        if solution.damping is not None:  # else keep the layout that is there
            linear._put("backward_weight", "backward_scales", "backward_gscale", solution.q)
        row["dx"] = _percent(w, linear.backward_layout, moments[n])
        errors[n] = row
        tensors.update({f"{name}.{n}.{key}": getattr(linear, key).detach().cpu() for key in BACKWARD})
    return errors, tensors


BACKWARD = ("backward_weight", "backward_scales", "backward_gscale")


def _percent(w: Tensor, layout: Any, moments: Moments) -> float:
    return round(100 * output_error(w, reference.dequantize(layout), moments.h), 4)
