"""Second moments, collected batch by batch: what GPTQ minimises with. Of a linear's input for its forward layout, of its
gradient for its backward layout.

For inputs x~ (K,), as the layer multiplies them, that is D(Q(x)):

    H = E[x~ x~^T]  (K, K)        the error of the output is  E|(W - V) x~|^2 = tr((W - V) H (W - V)^T)
    C = E[x x~^T]   (K, K)        for the asymmetric target: x is the input that the layer should have seen

Kept as running means in FP32: the sum over a batch is formed by one product with FP32 accumulation and then averaged into what is
there, so no sum grows with the number of tokens. On a GPU, BF16 inputs (D(Q(x)) of one term is exact in BF16) go through tensor
cores with FP32 results. Same batches in the same order give the same bits on one device.

For the backward layout W_b (K, N) in dx = D(Q(dy)) D(W_b)^T it is E[dy~ dy~^T], dy~ = D(Q(dy)), from a few backward passes on
calibration data. Layers are taken from the last to the first, so that a layer's gradient has gone through layers whose W_b is
solved for already; one layer at a time is on the GPU, its inputs waited since the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from ..fusion.probe import modes_kept, standing_in
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..numerics.formats import GRADIENT
from ..numerics.matmul import exact_matmul
from .data import Batch
from .structure import Stack, call_model, outside_on

IGNORED = -100
"""Label of a position without loss."""


class Moments:
    """Running H (``h``), and where asked for C (``c``), of a linear with ``k`` inputs, float32; ``count`` tokens were seen."""

    def __init__(self, k: int, device: torch.device | str = "cpu", cross: bool = False):
        self.h = torch.zeros(k, k, device=device)
        self.c = torch.zeros(k, k, device=device) if cross else None
        self.count = 0

    def add(self, values: Tensor, x: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Average in a batch: D(x~) of the tokens (..., K), for the cross moment also x, and a mask (...) bool of the tokens to
        count (all by default)."""
        k = self.h.shape[0]
        if values.shape[-1] != k or (x is not None and x.shape != values.shape):
            raise ValueError(f"expected inputs (..., {k}), got {tuple(values.shape)} and {None if x is None else tuple(x.shape)}")
        if self.c is not None and x is None:
            raise ValueError("the cross moment E[x x~^T] needs x as well as x~")
        values = rows(values, mask).to(self.h.device)
        tokens = values.shape[0]
        if not tokens:
            return
        self.count += tokens
        old, new = 1.0 - tokens / self.count, 1.0 / self.count
        _average(self.h, values, values, old, new)
        if self.c is not None:
            _average(self.c, rows(x, mask).to(self.h.device), values, old, new)


def rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens, K) of x (..., K), without the tokens that a mask (...) leaves out."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if mask is None else x[mask.to(x.device).reshape(-1).bool()]


def _average(total: Tensor, a: Tensor, b: Tensor, old: float, new: float) -> None:
    """total = old * total + new * a^T b, the product accumulated in FP32."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        total.mul_(old).add_(torch.mm(a.T, b, out_dtype=torch.float32), alpha=new)
        return
    with exact_matmul():
        total.addmm_(a.float().T, b.float(), beta=old, alpha=new)


def _labels(model: nn.Module, batch: Batch) -> Tensor:
    """Those of the batch, or its tokens but for padding and placeholders of images."""
    if "labels" in batch:
        return batch["labels"]
    labels, config = batch["input_ids"].clone(), getattr(model, "config", None)
    if isinstance(batch.get("attention_mask"), Tensor):
        labels[batch["attention_mask"] == 0] = IGNORED
    for key in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, key, None), int):
            labels[labels == getattr(config, key)] = IGNORED
    return labels


def last_gradient(model: nn.Module, stack: Stack, batch: Batch, hidden: Tensor, device: torch.device) -> Tensor:
    """Gradient of the loss in the last layer's output ``hidden``: the model runs with its layers left out.

    Scaled by a power of two to a sum over tokens: moments of a mean's gradient would be tiny.
    """
    leaf = hidden.detach().to(device).requires_grad_()
    labels = _labels(model, batch)

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


def layer_gradients(stack: Stack, index: int, inputs: list[Tensor], grads: list[Tensor], device: torch.device) -> list[Tensor]:
    """For every batch the gradient in a layer's input, which is given, from that in its output; on the CPU."""
    results = []
    for batch, (hidden, grad) in enumerate(zip(inputs, grads)):
        leaf = hidden.detach().to(device).requires_grad_()
        with torch.enable_grad():
            output = stack.run(index, batch, leaf)
            results.append(torch.autograd.grad(output, leaf, grad.to(device, output.dtype))[0].cpu())
    return results


def gradient_moments(linears: dict[str, NVFP4FrozenLinear], backward: Callable[[], object]) -> dict[str, Moments]:
    """Moments of D(Q(dy)) of the linears while ``backward()`` goes through them."""
    moments = {name: Moments(linear.out_features, linear.weight.device) for name, linear in linears.items()}

    def watch(name: str) -> Callable:
        def note(dy: Tensor) -> None:
            q = ops.quantize(dy.reshape(-1, dy.shape[-1]), GRADIENT)
            moments[name].add(ops.dequantize(q, dy.dtype))

        return lambda module, args, output: output.register_hook(note) and None

    handles = [linear.register_forward_hook(watch(name)) for name, linear in linears.items()]
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    return moments
