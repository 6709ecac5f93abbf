"""Attach the fused modules to a model, by structure: no table of architectures.

An RMSNorm is replaced if, in a two-token run, nothing but frozen NVFP4 linears with one input spec read its output, and if its
formula is one we know (checked on random numbers). A gated MLP is replaced if it computes ``down(act(gate(x)) * up(x))`` with an
activation we know (checked likewise). Everything else stays as it is and quantises per linear, which is correct and only
less shared. :func:`attach` returns a report that says what was fused and, for the rest, why not; :func:`detach` puts the
original modules back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from .. import fused_reference
from ..backends.nvfp4 import NVFP4FrozenLinear
from .mlp import FusedGatedMLP
from .norm import NVFP4RMSNorm
from .probe import Readers, base_of, frozen_linears, observe


@dataclass
class Report:
    """What :func:`attach` did.

    Attributes:
        fused: dotted name -> what it is now.
        skipped: dotted name of a norm or MLP -> why it was left alone.
    """

    fused: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for what in self.fused.values():
            kinds[what] = kinds.get(what, 0) + 1
        lines = [f"fused: {', '.join(f'{n} x {what}' for what, n in kinds.items()) or 'nothing'}"]
        return "\n".join(lines + [f"not fused: {name}: {reason}" for name, reason in self.skipped.items()])


def attach(model: nn.Module, run: Callable[[], object] | None = None) -> Report:
    """Replace norms and gated MLPs of ``model`` by fused ones, in place.

    Args:
        run: calls the model on a small input; by default on two tokens, ``model(input_ids=...)``.
    """
    report = Report()
    norms = {name: m for name, m in model.named_modules() if _looks_like_rmsnorm(m)}
    mlps = {name: m for name, m in model.named_modules() if _looks_like_gated_mlp(m)}
    linears = frozen_linears(model)
    if not any(isinstance(base_of(m), NVFP4FrozenLinear) for m in linears.values()):
        report.skipped["(model)"] = "no linear is frozen in nvfp4"
        return report
    try:
        readers = observe(model, norms, run or (lambda: _two_tokens(model)))
    except Exception as error:  # whatever a model may raise on an input it does not expect: said, not hidden
        report.skipped.update(dict.fromkeys(norms, f"the two-token run failed ({type(error).__name__}: {error})"))
        readers = {}
    for name, norm in norms.items():
        if name not in report.skipped:
            _attach_norm(model, name, norm, readers.get(name, Readers()), linears, report)
    checked: dict[type, bool] = {}
    for name, mlp in mlps.items():
        _attach_mlp(model, name, mlp, report, checked)
    return report


def detach(model: nn.Module) -> nn.Module:
    """Put the original norms and MLPs back, with the weights and children they have now."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NVFP4RMSNorm | FusedGatedMLP):
            original = module.original.train(module.training)
            _replace(model, name, original)
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _two_tokens(model: nn.Module) -> object:
    device = next(p.device for p in model.parameters())
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    return model(input_ids=ids, use_cache=False) if getattr(model, "config", None) is not None else model(input_ids=ids)


# ---------------------------------------------------------------------------------------------- norms


def _looks_like_rmsnorm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and weight is not None and weight.ndim == 1 and not isinstance(module, NVFP4RMSNorm)


def _epsilon(module: nn.Module) -> float | None:
    return next((getattr(module, key) for key in ("variance_epsilon", "eps", "epsilon") if hasattr(module, key)), None)


def _plus_one(module: nn.Module, eps: float) -> bool | None:
    """Whether the weight counts as 1 + weight (Gemma); None if the module computes something else."""
    weight = module.weight
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    with torch.no_grad():
        expected = module(x).float()
        for plus_one in (False, True):
            got, _ = fused_reference.rmsnorm(x, weight, eps, plus_one)
            if torch.allclose(got.float(), expected, rtol=2**-6, atol=1e-6):
                return plus_one
    return None


def _attach_norm(model: nn.Module, name: str, norm: nn.Module, readers: Readers, linears: dict, report: Report) -> None:
    bases = [base_of(linears[reader]) for reader in readers.linears]
    eps = _epsilon(norm)
    if readers.others or not bases:
        report.skipped[name] = f"its output is read by {', '.join(sorted(readers.others)) or 'no frozen linear'}"
    elif not all(isinstance(base, NVFP4FrozenLinear) for base in bases):
        report.skipped[name] = "not all of its readers are frozen in nvfp4"
    elif len({(base.options.terms, id(base.input_centre)) for base in bases}) != 1:
        report.skipped[name] = "its readers quantise their input differently"
    elif eps is None or (plus_one := _plus_one(norm, eps)) is None:
        report.skipped[name] = "it is not an RMSNorm of a known formula"
    else:
        _replace(model, name, NVFP4RMSNorm(norm, eps, plus_one, bases[0].options.terms, bases[0].input_centre))
        report.fused[name] = "RMSNorm+quantise"


# ---------------------------------------------------------------------------------------------- gated MLPs

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}


def _looks_like_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    gated = {"gate_proj", "up_proj"} <= children.keys() or "gate_up_proj" in children
    return gated and "down_proj" in children and not isinstance(module, FusedGatedMLP)


def _activation(module: nn.Module) -> tuple[str, str] | None:
    """(name of the child, kind) of the MLP's activation, recognised by its values."""
    z = torch.linspace(-6, 6, 97)
    for name in ("act_fn", "activation_fn", "act"):
        act = getattr(module, name, None)
        if isinstance(act, nn.Module):
            for kind, function in ACTIVATIONS.items():
                if torch.allclose(act(z), function(z), rtol=1e-5, atol=1e-6):
                    return name, kind
    return None


def _attach_mlp(model: nn.Module, name: str, mlp: nn.Module, report: Report, checked: dict[type, bool]) -> None:
    found = _activation(mlp)
    if not isinstance(base_of(mlp.down_proj), NVFP4FrozenLinear):
        report.skipped[name] = "down_proj is not frozen in nvfp4"
    elif found is None:
        report.skipped[name] = "its activation is neither SiLU nor tanh-GELU"
    else:
        fused = FusedGatedMLP(mlp, *found)
        if type(mlp) not in checked:
            checked[type(mlp)] = _same_function(mlp, fused)
        if checked[type(mlp)]:
            _replace(model, name, fused)
            report.fused[name] = "gated MLP"
        else:
            report.skipped[name] = "it computes something else than down(act(gate(x)) * up(x))"


def _same_function(mlp: nn.Module, fused: FusedGatedMLP) -> bool:
    """Whether the original equals the plain formula on random numbers, bit for bit (the same modules in the same order)."""
    first = base_of(mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else mlp.gate_proj)
    x = torch.randn(2, first.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(first.weight.device, first.compute_dtype if hasattr(first, "compute_dtype") else first.weight.dtype)
    training = {m: m.training for m in mlp.modules()}
    try:
        mlp.eval()
        with torch.no_grad():
            if hasattr(fused, "gate_up_proj"):
                gate, up = fused.gate_up_proj(x).chunk(2, dim=-1)
            else:
                gate, up = fused.gate_proj(x), fused.up_proj(x)
            return torch.equal(mlp(x), fused.down_proj(getattr(fused, fused.act_name)(gate) * up))
    finally:
        for module, flag in training.items():
            module.training = flag
