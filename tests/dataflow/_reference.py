"""The dense reference of a frozen model: the same decoder with stock PEFT's LoRA, by autograd, on the weights that the frozen
layers hold. What the documentation says that a frozen linear computes is written out here once more, linear by linear, without
any data flow between them:

    nvfp4      y = D(Q(x)) W_f^T + bias + LoRA(D(Q(x))), dx = D(Q(dy)) W_b + LoRA's, Q(x) of one or two terms
    nf4, bf16  y = x W^T + bias + LoRA(x)

What a fused part computes is written out in :class:`Codes`:

    norm         passes on D(Q(y)); dx = rstd * (w * dy - (D(Q(y)) / w) * mean(dy * D(Q(y))))
    gated MLP    passes on D(Q(h)), h = act(gate) * up; gradients as if gate and up were D(Q(gate)) and D(Q(up)), of one term
    (nf4, bf16)  both pass on what they computed; only the gradients are those
"""

import copy
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _parts import NOISE, decoder
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import GRADIENT, WEIGHT_BACKWARD


def rounded(x: Tensor, terms: int) -> Tensor:
    """D(Q(x))."""
    flat = reference.quantize_terms(x.detach().reshape(-1, x.shape[-1]), None, terms)
    return reference.dequantize_terms(flat, None, x.dtype).view(x.shape)


class Rounded(torch.autograd.Function):
    """D(Q(x)), with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x: Tensor, terms: int) -> Tensor:
        return rounded(x, terms).clone()  # a view must not be edited in place

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


class NormAt(torch.autograd.Function):
    """``y`` of an RMSNorm of x, with the gradient of x that belongs to the output ``at``."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, at: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
        ctx.save_for_backward(at, w, rstd)
        return y.clone()

    @staticmethod
    def backward(ctx, dy: Tensor):
        at, w, rstd = (t.float() for t in ctx.saved_tensors)
        c = (dy.float() * at).mean(-1, keepdim=True)
        return (rstd * (w * dy.float() - at / w * c)).to(dy.dtype), None, None, None, None


@dataclass
class Codes:
    """What a fused part emits and keeps. ``terms``: of what it passes on, in nvfp4; 0 elsewhere. ``handed``: its readers take
    these codes, and do not quantise anew."""

    terms: int
    handed: bool = True

    def of_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        y = norm.compute(x).detach()
        at = rounded(y, self.terms or 1)
        w = norm.weight.detach() + 1 if getattr(norm, "kind", "") == "one_plus" else norm.weight.detach()
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        rstd = torch.rsqrt(x.detach().float().pow(2).mean(-1, keepdim=True) + eps)
        return self.tagged(NormAt.apply(x, at if self.terms else y, at, w, rstd))

    def of_product(self, mlp: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        h = mlp.product(gate, up)
        if torch.is_grad_enabled():
            moved = mlp.product(*(t + (rounded(t, 1) - t).detach() for t in (gate, up)))
            h = moved + (h - moved).detach()
        return self.tagged(Rounded.apply(h, self.terms)) if self.terms else h

    def tagged(self, y: Tensor) -> Tensor:
        """The readers of y take the codes that it was made from, as long as nobody has changed it."""
        if self.terms and self.handed:
            y.unchanged = y.detach().clone()
        return y


class Product(torch.autograd.Function):
    """x W^T, with the gradient D(Q(dy)) W_b."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, w_b: Tensor) -> Tensor:
        ctx.save_for_backward(w_b)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (w_b,) = ctx.saved_tensors
        rounded = reference.dequantize(reference.quantize(dy.reshape(-1, dy.shape[-1]), GRADIENT)).view(dy.shape)
        return (rounded.to(dy.dtype).float() @ w_b.float()).to(dy.dtype), None, None


def cast(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


class ReferenceLinear(nn.Linear):
    """A frozen linear's definition. ``terms``: of its input, 0 where it is not quantised."""

    terms = 0

    @classmethod
    def of(cls, layer: FrozenLinear, dtype: torch.dtype) -> "ReferenceLinear":
        linear = cls(layer.in_features, layer.out_features, bias=layer.bias is not None).requires_grad_(False)
        linear.weight.data = layer.dequantize(torch.float32).clone()
        if layer.backend == "nvfp4":
            linear.terms = layer.options.terms
            w_b = reference.quantize(linear.weight.data.T.contiguous(), WEIGHT_BACKWARD)
            linear.register_buffer("w_b", reference.dequantize(w_b).T.contiguous())
        if linear.bias is not None:
            linear.bias.data = layer.bias.data.clone()
        return linear.to(dtype)

    def seen(self, x: Tensor) -> Tensor:
        """What the product and the adapters see of x."""
        emitted = getattr(x, "unchanged", None)
        if not self.terms:
            return cast(x)
        if emitted is not None and torch.equal(emitted, x):
            return cast(x).clone()  # backward needs the codes, which an edit of x leaves alone
        return Rounded.apply(cast(x), self.terms)

    def seen_by_adapters(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """PEFT calls this for one adapter after the other, each time with what it returned before: that stays as it is, edited
        by a hook or not."""
        if getattr(x, "is_seen_by_adapters", False):
            return x
        y = self.seen(x).to(dtype)
        y.is_seen_by_adapters = self.terms > 0
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not self.terms:
            return NOISE.added(super().forward(x))
        seen = self.seen(x)
        with torch.autocast("cpu", enabled=False):
            y = Product.apply(seen, self.weight.to(seen.dtype), self.w_b.to(seen.dtype))
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        return NOISE.added(y)


class ReferenceA(nn.Linear):
    """lora_A, with errors of relative size ``kept`` in the input as its own gradient sees it."""

    kept = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not (self.kept and NOISE.size and torch.is_grad_enabled()):
            return y
        moved = F.linear((x * (1 + self.kept * torch.randn(x.shape))).detach(), self.weight)  # dA from there, dx from x
        return F.linear(x, self.weight.detach()) + moved - moved.detach()


class Copies:
    """Makes copies of a model. As ``copy.deepcopy`` would, in a fifth of the time (a case takes dozens): what is no tensor has
    been pickled once."""

    def __init__(self, model: nn.Module):
        self.tensors: list[Tensor] = []
        self.indices: dict[int, int] = {}  # by identity
        content = io.BytesIO()
        pickler = pickle.Pickler(content, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._index
        pickler.dump(model)
        self.content = content.getvalue()

    def _index(self, value) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.indices:
            self.indices[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self.indices[id(value)]

    def __call__(self) -> nn.Module:
        unpickler, memo = pickle.Unpickler(io.BytesIO(self.content)), {}
        unpickler.persistent_load = lambda index: copy.deepcopy(self.tensors[index], memo)
        return unpickler.load()


def dense_reference(case, frozen: nn.Module, settings: dict) -> Copies:
    """Copies of the reference of ``frozen``, with its weights and its adapters, and no part fused."""
    model = decoder(case)
    for name, layer in list(frozen.base_model.model.named_modules()):
        if isinstance(layer, FrozenLinear):
            model.set_submodule(name.removesuffix(".base_layer"), ReferenceLinear.of(layer, getattr(torch, case.dtype)))
    model = get_peft_model(model, LoraConfig(**settings))
    if case.adapters > 1:
        model.add_adapter("second", LoraConfig(**settings))
        model.base_model.set_adapter(["default", "second"])
    adapters = {name: p for name, p in frozen.state_dict().items() if "lora_" in name}
    assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    for module_name, module in list(model.named_modules()):
        if not hasattr(module, "lora_A"):
            continue
        if isinstance(module.base_layer, ReferenceLinear):
            module._cast_input_dtype = module.base_layer.seen_by_adapters
        for a in module.lora_A.values():
            a.__class__, a.kept = ReferenceA, kept_for_adapters(case, module_name)
    return Copies(model)


def kept_for_adapters(case, name: str) -> float:
    """Relative size of the error of one NVFP4 term where an adapter's A sees in backward another input than in forward: where
    nf4 and bf16 keep codes, and behind a gated product that is computed again from D(Q(gate)) and D(Q(up))."""
    return 0.1 if case.memory == "small" and (case.backend != "nvfp4" or name.endswith("down_proj")) else 0.0


def copied(copies: Copies, fused: Mapping[str, Codes]) -> nn.Module:
    """A copy of a reference in which the parts of these dotted names are fused."""
    model = copies()
    for name, codes in fused.items():
        model.base_model.model.get_submodule(name).codes = codes
    return model
