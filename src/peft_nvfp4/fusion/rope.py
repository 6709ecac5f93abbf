"""Rotary position embedding of a whole model in one kernel, with the bits of transformers.

transformers' modeling files call a function of their own, ``apply_rotary_pos_emb(q, k, cos, sin)``, for ``q * cos +
rotate_half(q) * sin``: ten small GPU operations forward and eighteen backward. :func:`attach_rope` puts a wrapper in its place,
as the module's global, where all attention layers of the file look it up. The wrapper runs one kernel for q and k
(:mod:`peft_nvfp4.ops.fused`) and keeps nothing but cos and sin. It takes the place of a function only if that gives, on random
numbers, bit for bit what ours gives, values and gradients; so one wrapper can serve every model of the process, and a model that
nobody attached notices nothing. Every call that the kernel is not made for goes to the original (:func:`_is_ours`).

"The same bits" has two limits, both outside of the function: autograd adds up several gradients of one tensor in an order of its
own, so q and k must have no other reader, as in attention layers; and the gradients of q and k are stored tokens first, so a sum
over tokens and heads (the gradient of a trainable q_norm weight) may add in another order.

The original comes back when the last attached model is detached. Where attached models were freed instead, the wrapper is a mere
detour until the next call of :func:`attach_rope` or :func:`detach_rope`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from .. import kernels
from ..numerics import fused_reference
from ..numerics.recognition import samples
from ..ops import fused
from ..ops.core import FLOATS

NAME = "apply_rotary_pos_emb"
FUSED = "rotary embedding"
"""The value that :func:`attach_rope` reports for a modeling file whose function was replaced; other values are reasons."""

# ---------------------------------------------------------------------------------------------- the function


class RotaryEmbedding(torch.autograd.Function):
    """Rotated (q, k) of q (B, Hq, S, D), k (B, Hk, S, D), cos and sin (1 or B, S, D)."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        outputs = fused.rotary_embedding.run(q, k, cos, sin, False)
        ctx.mark_non_differentiable(*(t for t, needed in zip(outputs, ctx.needs_input_grad) if not needed))
        return outputs

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        if dq is None or dk is None:
            dq, dk = (None if g is None else _gradients(g, None, cos, sin)[0] for g in (dq, dk))
        else:
            dq, dk = _gradients(dq, dk, cos, sin)
        return dq, dk, None, None


def _gradients(dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """The kernel, or, where second derivatives were asked for (``create_graph``), PyTorch's own differentiable operations."""
    again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return (fused_reference.rotary_embedding if again else fused.rotary_embedding.run)(dq, dk, cos, sin, True)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiable in q and k, not in cos and sin."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return RotaryEmbedding.apply(q, k, cos, sin)
    return fused.rotary_embedding(q, k, cos, sin, False)


# ---------------------------------------------------------------------------------------------- which calls are ours


@functools.cache
def _has_kernel() -> bool:
    return any(o.operator == "rotary_embedding" and o.implementation == "triton" for o in kernels.status().operators)


def _on_a_kernel(x: Tensor) -> bool:
    """Whether a kernel would run; the reference would be slower than the original, with the same bits."""
    return x.is_cuda and _has_kernel()


def _is_ours(args: tuple, kwargs: dict) -> bool:
    """Whether a call of ``apply_rotary_pos_emb`` is the one that the kernel computes: on a GPU, over the whole width of a head,
    in one dtype, with fixed cos and sin. Not while a compiler traces (inductor fuses the operations by itself), nor under what an
    autograd Function with a Triton kernel does not serve: torch.func, forward-mode derivatives, the tracer of TorchScript."""
    if torch.compiler.is_compiling() or len(args) != 4 or kwargs not in ({}, {"unsqueeze_dim": 1}):
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return False
    q, k, cos, sin = args
    if not all(type(t) in (Tensor, nn.Parameter) and t.dtype == q.dtype and t.device == q.device for t in args):
        return False
    if not (_on_a_kernel(q) and q.dtype in FLOATS and q.ndim == k.ndim == 4) or cos.requires_grad or sin.requires_grad:
        return False
    b, _, s, d = q.shape
    return d % 2 == 0 and k.shape == (b, k.shape[1], s, d) and cos.shape == sin.shape and cos.shape in ((1, s, d), (b, s, d))


# ---------------------------------------------------------------------------------------------- which functions are ours


def _check_tensors() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(q, k, cos, sin) and gradients of the results, BF16 on the CPU: all sizes and all halves differ; zeros of both signs."""
    random = functools.partial(samples, generator=torch.Generator("cpu").manual_seed(0))
    b, s, d = 2, 5, 8
    q, k, dq, dk = (random(b, s, h, d).to(torch.bfloat16).transpose(1, 2) for h in (3, 4, 3, 4))
    dq[..., 1, ::2], dq[..., 2, :] = -0.0, 0.0
    angles = random(b, s, d) * 9
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    return (q.requires_grad_(), k.requires_grad_(), cos, sin), (dq, dk)


def _differs(function: Callable) -> str:
    """Why ``function`` may not be replaced; empty if it computes what ours does, bit for bit."""
    try:
        results = []
        with torch.inference_mode(False), torch.enable_grad():
            for f in (RotaryEmbedding.apply, function):
                inputs, gradients = _check_tensors()
                outputs = f(*inputs)
                values = (*outputs, *torch.autograd.grad(outputs, inputs[:2], gradients))
                results.append(torch.cat([v.contiguous().view(torch.int16).flatten() for v in values]))
    except Exception as error:  # whatever another package's function may raise on a CPU: said, not hidden
        return f"{NAME} could not be checked ({type(error).__name__}: {error})"
    return "" if torch.equal(*results) else f"{NAME} computes something else than q * cos + rotate_half(q) * sin"


def _rotates_part(model: nn.Module, modeling: str) -> str:
    """Why no call would be ours: the frequencies of a modeling file's rotary embedding cover less than a head. Empty if they do
    cover it, or if either is unknown."""
    modules = [m for m in model.modules() if type(m).__module__ == modeling]
    rotary = {2 * t.numel() for m in modules for name, t in m.named_buffers(recurse=False) if name.endswith("inv_freq")}
    heads = {m.head_dim for m in modules if isinstance(getattr(m, "head_dim", None), int)}
    return f"rotates {max(rotary)} of {min(heads)} values per head" if rotary and heads and max(rotary) < min(heads) else ""


# ---------------------------------------------------------------------------------------------- patching


class _Patch:
    """A modeling file whose function is replaced, while one of ``models`` uses it."""

    def __init__(self, module: ModuleType):
        self.module, self.original = module, (original := getattr(module, NAME))
        self.models = models = weakref.WeakSet()

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            # without models, this is a reference that outlived the patch
            return rotary_embedding(*args) if _is_ours(args, kwargs) and models else original(*args, **kwargs)

        self.replacement = replacement

    @property
    def installed(self) -> bool:
        return getattr(self.module, NAME, None) is self.replacement


_PATCHES: list[_Patch] = []


def attach_rope(model: nn.Module) -> dict[str, str]:
    """Have the modeling files of ``model`` compute rotary embeddings with one kernel. A second call changes nothing.

    Returns:
        name of the Python module -> :data:`FUSED`, or why its function was left alone. Where ``kernels.status()`` has no kernel
        for ``rotary_embedding``, the original still runs.
    """
    _restore_unused()
    report = {}
    for name, module in _modeling_files(model).items():
        patch = next((p for p in _PATCHES if p.module is module and p.installed), None)
        reason = "" if patch else _differs(getattr(module, NAME))
        report[name] = reason or _rotates_part(model, name) or FUSED
        if report[name] == FUSED:
            if patch is None:
                _PATCHES.append(patch := _Patch(module))
                setattr(module, NAME, patch.replacement)
            patch.models.add(model)
            _swap(model, patch.original, patch.replacement)
    return report


def detach_rope(model: nn.Module) -> nn.Module:
    """Inverse of :func:`attach_rope`; the originals come back when no attached model is left."""
    for patch in _PATCHES:
        if model in patch.models:
            patch.models.remove(model)
            _swap(model, patch.replacement, patch.original)
    _restore_unused()
    return model


def _swap(model: nn.Module, old: Callable, new: Callable) -> None:
    """transformers 5.12 notes the function in every attention layer, for its kernel hub. A layer that held another object than
    the modeling file's global could not be pickled."""
    for module in model.modules():
        noted = vars(module).get("_hidden_kernels", {})
        if noted.get(NAME) is old:
            noted[NAME] = new


def _restore_unused() -> None:
    for patch in [p for p in _PATCHES if not p.models]:
        if patch.installed:  # else somebody replaced the function after us: theirs stays
            setattr(patch.module, NAME, patch.original)
        _PATCHES.remove(patch)


def _modeling_files(model: nn.Module) -> dict[str, ModuleType]:
    """The Python modules that define the classes of ``model``, or their bases, and have a function of that name."""
    names = {base.__module__ for kind in {type(m) for m in model.modules()} for base in kind.__mro__}
    found = {name: sys.modules.get(name) for name in sorted(names)}
    return {name: module for name, module in found.items() if callable(getattr(module, NAME, None))}
