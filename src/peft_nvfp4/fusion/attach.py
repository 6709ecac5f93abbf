"""Attach the fused modules to a model, by structure: no table of architectures.

An RMSNorm is replaced if, in a two-token run, nothing but frozen NVFP4 linears with one input spec read its output, and if its
formula is one we know (checked on random numbers). A gated MLP is replaced if it computes ``down(act(gate(x)) * up(x))`` with an
activation we know (checked likewise). Linears of one module that read one tensor are computed together. The rotary embedding of
the modeling file becomes one kernel (:mod:`peft_nvfp4.fusion.rope`). Everything else stays as it is and quantises per linear,
which is correct and only less shared. :func:`attach` returns a report that says what was fused and, for the rest, why not;
:func:`detach` puts the original modules back.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..autograd.module_hooks import hooks_of
from ..nn.experts.frozen_experts import FrozenExperts, frozen_experts
from ..nn.frozen_linear import FrozenLinear
from ..nn.group import SharedInputGroup
from ..nn.nvfp4 import NVFP4FrozenLinear
from ..nn.plain import fallbacks_of, report_in
from ..numerics.recognition import limit_of
from .compressed import CompressedGatedMLP, CompressedRMSNorm
from .mlp import FusedGatedMLP, looks_like_gated_mlp, recognise
from .norm import NVFP4RMSNorm, epsilon, looks_like_rmsnorm, plus_one
from .probe import Readers, base_of, between, frozen_linears, innermost, observe, special_tokens
from .rope import FUSED, attach_rope, detach_rope

CUTS_OFF = "it cuts values off ({}), which the fused form does not"
OTHER_RUN = "attach(model, run=...) takes another run than the one on two text tokens"


@dataclass
class Report:
    """What :func:`attach` did, and where a call went another way since.

    Attributes:
        fused: dotted name -> what it is now.
        skipped: dotted name of a norm or MLP, or "(model)", "(linears)" -> why it was left alone.
        groups: dotted names of linears that read one tensor and are computed together.
        fallbacks: dotted name of a layer that was found, in a call, to have to call the modules below it (they have hooks, were
            replaced, or set up otherwise), or of a norm that had to run as it was -> what was found first.
    """

    fused: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = Counter(self.fused.values()) + Counter(f"{len(group)} linears of one input" for group in self.groups)
        lines = [f"fused: {', '.join(f'{n} x {what}' for what, n in kinds.items()) or 'nothing'}"]
        for what, entries in (("not fused", self.skipped), ("computed module by module", self.fallbacks)):
            # layers differ in a number only, and share a line
            reasons = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", name), reason) for name, reason in entries.items())
            lines += [f"{what}: {name}{f' ({n})' if n > 1 else ''}: {reason}" for (name, reason), n in reasons.items()]
        return "\n".join(lines)


def attach(model: nn.Module, run: Callable[[], object] | None = None, recompute_mlp: bool = False) -> Report:
    """Replace norms and gated MLPs of ``model`` by fused ones, in place. What was attached before is detached first.

    Args:
        run: calls the model on a small input; by default on two tokens, ``model(input_ids=...)``. Needed for a model that takes
            something else, and for towers (of images, of sound) that such a call does not reach. It runs in evaluation mode: who
            reads a norm's output in training only is not seen.
        recompute_mlp: (linears in nvfp4) do not keep the codes of the input of an MLP's last linear for its adapter's gradient,
            but recompute it in backward from the kept codes of gate and up. That one gradient is taken at twice-rounded values.
    """
    report = Report(fallbacks=fallbacks_of(model))
    detach(model)
    linears = frozen_linears(model)
    if not any(_keeps_codes(base_of(m)) for m in linears.values()):
        report.skipped["(model)"] = "no linear is frozen in nvfp4, or keeps its activations in it"
        return report
    norms = {name: m for name, m in model.named_modules() if looks_like_rmsnorm(m)}
    mlps = {name: m for name, m in model.named_modules() if looks_like_gated_mlp(m)}
    try:
        readers, groups = observe(model, norms, run or (lambda: _two_tokens(model)))
    except Exception as error:  # whatever a model may raise on an input it does not expect: said, not hidden
        reason = f"the run failed ({type(error).__name__}: {error}); {OTHER_RUN}"
        report.skipped.update(dict.fromkeys(["(model)", *norms], reason))
        readers, groups = {}, []
    for name, norm in norms.items():
        if name not in report.skipped:
            _attach_norm(model, name, norm, readers.get(name, Readers()), linears, report)
    for name, mlp in mlps.items():
        _attach_mlp(model, name, mlp, recompute_mlp, report)
    for name, experts in frozen_experts(model):
        reason = experts.fuse()
        (report.skipped if reason else report.fused)[name.replace(".base_layer", "")] = reason or "experts' gated MLPs"
    for group in groups:
        _attach_group([linears[name] for name in group], group, report)
    reached = {name for group in groups for name in group}
    if reached and (missed := [name for name in linears if name not in reached]):
        report.skipped["(linears)"] = f"the run does not reach {len(missed)} of them ({missed[0]}, ...); {OTHER_RUN}"
    for name, what in attach_rope(innermost(model)).items():
        (report.fused if what == FUSED else report.skipped)[name] = what
    report_in(model, report.fallbacks)
    return report


def attached(model: nn.Module) -> bool:
    """Whether anything of the model is fused."""
    return any(
        isinstance(m, NVFP4RMSNorm | FusedGatedMLP) or isinstance(m, NVFP4FrozenLinear) and m.group is not None
        for m in model.modules()
    )


def detach(model: nn.Module) -> nn.Module:
    """Put the original norms and MLPs back, with the weights and children they have now."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, NVFP4RMSNorm | FusedGatedMLP):
            model.set_submodule(name, module.original)
        elif isinstance(module, NVFP4FrozenLinear):
            module.group = None
        elif isinstance(module, FrozenExperts):
            module.unfuse()
        detach_rope(module)
    return model


def _two_tokens(model: nn.Module) -> object:
    """Call the model on two text tokens that stand for nothing else (an image, say)."""
    model = innermost(model)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    config = getattr(model, "config", None)
    special = special_tokens(config)
    ids = torch.full((1, 2), next(i for i in range(len(special) + 1) if i not in special), device=device)
    parameters = inspect.signature(model.forward).parameters
    inputs = {name: ids for name in ("input_ids", "decoder_input_ids") if name == "input_ids" or name in parameters}
    return model(**inputs, **({"use_cache": False} if config is not None else {}))


def _keeps_codes(base: nn.Module) -> bool:
    """Whether a linear keeps its input for backward as NVFP4 codes."""
    return isinstance(base, NVFP4FrozenLinear) or isinstance(base, FrozenLinear) and base.options.activations == "nvfp4"


def _input_spec(base: FrozenLinear) -> tuple:
    """What linears must have in common to share the codes of an input."""
    if isinstance(base, NVFP4FrozenLinear):
        return base.options.terms, id(base.input_offset)
    return ("kept",)


def _attach_group(members: list[nn.Module], names: list[str], report: Report) -> None:
    bases = [base_of(member) for member in members]
    if len(set(map(id, bases))) < max(2, len(bases)) or not all(isinstance(base, NVFP4FrozenLinear) for base in bases):
        return  # one linear, or one that is called twice, or not ours
    if len(set(map(_input_spec, bases))) == 1:
        group = SharedInputGroup(members)
        for base in bases:
            base.group, base.shares_input = group, True
        report.groups.append(names)


def _attach_norm(
    model: nn.Module, name: str, norm: nn.Module, readers: Readers, linears: Mapping[str, nn.Module], report: Report
) -> None:
    bases = [base_of(linears[reader]) for reader in readers.linears]
    if readers.calls == 0:
        report.skipped[name] = f"the run does not reach it; {OTHER_RUN}"
    elif readers.others or not bases:
        report.skipped[name] = f"its output is read by {', '.join(sorted(readers.others)) or 'no frozen linear'}"
    elif not all(map(_keeps_codes, bases)):
        report.skipped[name] = "not all of its readers are frozen in nvfp4, or keep their activations in it"
    elif len(set(map(_input_spec, bases))) != 1:
        report.skipped[name] = "its readers quantise their input differently"
    elif not readers.simple:
        report.skipped[name] = "it is called with more than one tensor"
    elif limit := limit_of(norm):
        report.skipped[name] = CUTS_OFF.format(limit)
    else:
        kind = _checked(plus_one, norm, name, report)
        if kind is None:
            report.skipped.setdefault(name, "it is not an RMSNorm of a known formula")
        else:
            kept = not isinstance(bases[0], NVFP4FrozenLinear)
            hooks = [base.call_hooks for base in bases] + [hooks_of(m) for m in between(model, name, readers.linears)]
            fused = (CompressedRMSNorm if kept else NVFP4RMSNorm)(norm, epsilon(norm), kind, bases[0], readers.converted, hooks)
            model.set_submodule(name, fused)
            report.fused[name] = "RMSNorm, codes kept" if kept else "RMSNorm+quantise"


def _checked(check: Callable[[nn.Module], Any], module: nn.Module, name: str, report: Report) -> Any:
    """What a check on random numbers finds out about a module; None, and an entry in the report, if it fails."""
    try:
        return check(module)
    except Exception as error:  # whatever an unknown module may raise
        report.skipped[name] = f"it could not be checked ({type(error).__name__}: {error})"
        return None


def _attach_mlp(model: nn.Module, name: str, mlp: nn.Module, recompute: bool, report: Report) -> None:
    parts = _checked(recognise, mlp, name, report)
    if parts is None:
        return  # something else with linears of these shapes
    if limit := limit_of(mlp):
        report.skipped[name] = CUTS_OFF.format(limit)
    elif parts.act is None:
        report.skipped[name] = "it computes something else than down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"
    elif not _keeps_codes(down := base_of(mlp.get_submodule(parts.down))):
        report.skipped[name] = f"{parts.down} is not frozen in nvfp4, nor keeps its activations in it"
    else:
        kept = not isinstance(down, NVFP4FrozenLinear)
        model.set_submodule(name, CompressedGatedMLP(mlp, parts) if kept else FusedGatedMLP(mlp, parts, recompute))
        report.fused[name] = "gated MLP, codes kept" if kept else "gated MLP"
