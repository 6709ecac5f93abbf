"""Tries every causal language model of transformers, tiny and random, with ``target_modules="all-linear"``, and writes
``models.md`` and ``../benchmarks/results/families.json``.

python docs/make_models.py                  # all of them, some 15 minutes of one core
python docs/make_models.py llama qwen3_next # these again; the others keep their rows

Each is run dense, then with stock PEFT's LoRA, then with ours: what fails earlier is not ours.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import set_verbosity_error

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.frozen_linear import FrozenLinear

PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "families.json"
IDS = 16 + torch.arange(24).view(2, 12) * 5 % 112


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, -2), IDS[:, 1:].flatten())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def generate(model: nn.Module) -> None:
    tokens = model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    if tokens.shape != (2, IDS.shape[1] + 3):
        raise ValueError(f"generate returned {tuple(tokens.shape)}")


def exercise(model: nn.Module, dense: torch.Tensor) -> dict[str, Any]:
    """Compare with the dense model's logits, train one step of SGD from a random adapter, generate, merge."""
    logits = logits_of(model.eval())
    found = {"loss": loss_of(logits).item(), "logits": distance(logits, dense)}
    torch.manual_seed(1)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in (p for name, p in adapters.items() if "lora_B" in name):
        nn.init.normal_(p, std=0.05)
    loss_of(model.train()(input_ids=IDS).logits).backward()
    if bad := [name for name, p in adapters.items() if p.grad is not None and not p.grad.isfinite().all()]:
        raise ValueError(f"{len(bad)} gradients are not finite: {bad[0]}, ...")
    idle = {name for name, p in adapters.items() if p.grad is None or not p.grad.any()}
    if len(idle) == len(adapters):
        raise ValueError("no adapter has a gradient")
    with torch.no_grad():
        for name, p in adapters.items():
            p.copy_(p * ("lora_B" not in name) if name in idle else p - 1e-2 * p.grad)  # idle: as training would leave it, B = 0
    model.eval().zero_grad()
    generate(model)
    adapted = logits_of(model)
    return found | {
        "adapters": len(adapters),
        "without gradient": len(idle),
        "merged": distance(logits_of(model.merge_and_unload()), adapted),
    }


def dense_shares(model: nn.Module) -> dict[str, float]:
    """Last name components of the matrices that stay dense -> their share of all but embeddings and head, the largest first."""
    head, frozen, dense = model.get_output_embeddings(), 0, Counter()
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear | FrozenExperts):
            frozen += module.elements if isinstance(module, FrozenExperts) else module.in_features * module.out_features
        elif module is not head and not isinstance(module, nn.Embedding) and "lora_" not in name:
            matrices = {key: p.numel() for key, p in module._parameters.items() if p is not None and p.dim() > 1}
            last = re.sub(r"(\.base_layer)+$", "", name).split(".")
            last = ".".join(last[-2:] if last[-1].isdigit() else last[-1:])
            dense.update({f"{last}.{key}".removesuffix(".weight"): n for key, n in matrices.items()})
    return {kind: round(n / (frozen + dense.total()), 4) for kind, n in dense.most_common()}


def measure(family: str) -> dict[str, Any]:
    """One row: how far a family comes, and what was found."""
    row: dict[str, Any] = {"class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}

    def attempt(stage: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # whatever a model may raise: it is the result
            reason = " ".join(str(error).split())
            row.setdefault("failures", {})[stage] = f"{type(error).__name__}: {reason[:150]}{'...' if len(reason) > 150 else ''}"

    def dense() -> tuple[nn.Module, torch.Tensor]:
        model = tiny_model(family)
        loss_of(model.train()(input_ids=IDS).logits).backward()
        model.eval().zero_grad()
        generate(model)
        return model, logits_of(model)

    def tuned(model: nn.Module, logits: torch.Tensor, config: LoraConfig) -> dict[str, Any]:
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(model), config)
        if getattr(config, "backend", "") == "nvfp4":
            report = model.base_model.nvfp4_report
            row["dense"] = dense_shares(model.get_base_model())
            row["fused"] = dict(Counter(report.fused.values())) | {"linears of one input": sum(map(len, report.groups))}
            row["not fused"] = {re.sub(r"\.\d+(?=\.|$)", ".*", name): reason for name, reason in report.skipped.items()}
        return exercise(model, logits)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = attempt("transformers", dense)
        if made is None:
            return row
        row["loss"] = loss_of(made[1]).item()
        common = dict(r=4, target_modules="all-linear")
        row["PEFT"] = attempt("PEFT", tuned, *made, LoraConfig(**common))
        for backend in ("bf16", "nvfp4", "nf4"):
            row[backend] = attempt(backend, tuned, *made, NVFP4LoraConfig(**common, backend=backend))
    return row


HEAD = """# Model families

Generated by `docs/make_models.py`, which tried every causal language model of transformers {transformers} (PEFT {peft}): tiny,
random, in FP32 on a CPU, with `NVFP4LoraConfig(r=4, target_modules="all-linear")` and each backend. All that it found is in
`benchmarks/results/families.json`. A tiny random model shows that a family *works*; what NVFP4 costs a trained one is in
[accuracy](accuracy.md).

Of {all} families, {works} work: with the backend `bf16` the logits are the dense model's, every backend trains a step with finite
gradients, generates, and merges. Of the others, {here} fail in this package, {PEFT} in PEFT already, {transformers_} in
transformers.

* *dense*: share of the matrix weights, embeddings and output head apart, that stays dense (and what does, from 5 % on).
  These are shares of a tiny model's: a real one has other proportions.
* *fused*: how many norms, gated MLPs, experts, rotary embeddings (1: of all layers), and linears that share codes of an input.
* *loss*: of the dense model, with `nvfp4`, with `nf4`; *logits*: relative distance from the dense model's, `nvfp4` and `nf4`.
  Weights of 4 bits move the logits of a random model by 20 to 40 %, those of a mixture further where it chooses another expert.
* *merged*: distance of the logits after `merge_and_unload()` from the adapted model's, `nvfp4`. Its 4-bit activations do not come
  with the merged weights; with the other backends, all are below 0.0001.
* *idle*: parameters of adapters that a step on text gives no gradient (towers of images, cross-attention), of all.

| `model_type` | dense | fused | loss | logits | merged | idle |
|---|---|---|---|---|---|---|
"""
SHORT = ("RMSNorm+quantise", "gated MLP", "experts' gated MLPs", "rotary embedding", "linears of one input")


def line(family: str, row: dict[str, Any]) -> str:
    """Row of the table of what works."""
    large = ", ".join(kind for kind, share in row["dense"].items() if share >= 0.05)
    fused = ", ".join(str(row["fused"].get(what, 0)) for what in SHORT)
    loss, logits = f"{row['loss']:.2f}", " / ".join(f"{row[b]['logits']:.2f}" for b in ("nvfp4", "nf4"))
    loss += "".join(f" / {row[b]['loss']:.2f}" for b in ("nvfp4", "nf4"))
    dense = f"{sum(row['dense'].values()):.0%}{f' ({large})' if large else ''}"
    note = "; stock PEFT fails" if "PEFT" in row.get("failures", {}) else ""
    idle = f"{row['nvfp4']['without gradient']} / {row['nvfp4']['adapters']}{note}"
    return f"| `{family}` | {dense} | {fused} | {loss} | {logits} | {row['nvfp4']['merged']:.3f} | {idle} |"


def fault(row: dict[str, Any]) -> tuple[str, str] | None:
    """Where a family fails, and why; None where it works with all backends."""
    failures = row.get("failures", {})
    if "transformers" in failures:
        return "transformers", failures["transformers"]
    ours = [f"{backend}: {failures[backend]}" for backend in ("bf16", "nvfp4", "nf4") if backend in failures]
    if not ours and row["bf16"]["logits"] > 1e-5:
        ours = [f"bf16: the logits are {row['bf16']['logits']:.1e} from the dense model's"]
    if not ours and max(row["bf16"]["merged"], row["nf4"]["merged"]) > 1e-4:
        ours = ["merging changes the logits"]
    where = "PEFT" if "PEFT" in failures else "here"
    return (where, failures.get("PEFT", "; ".join(ours))) if ours else None


def page(results: dict[str, Any]) -> str:
    rows = results["families"]
    faults = {family: found for family, row in rows.items() if (found := fault(row))}
    counts = Counter(where for where, _ in faults.values())
    here, peft, transformers = (counts[where] or "none" for where in ("here", "PEFT", "transformers"))
    numbers = dict(all=len(rows), works=len(rows) - len(faults), here=here, PEFT=peft, transformers_=transformers)
    head = HEAD.format(**results["versions"], **numbers)
    works = [line(family, row) for family, row in rows.items() if family not in faults]
    fails = [f"| `{family}` | {where} | {why.replace('|', '/')} |" for family, (where, why) in faults.items()]
    return head + "\n".join([*works, "", "## What fails", "", "| `model_type` | in | why |", "|---|---|---|", *fails, ""])


def main(families: list[str]) -> None:
    set_verbosity_error()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    results["versions"] = {name: version(name) for name in ("transformers", "peft", "torch")}
    for family in families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        results["families"][family] = row = measure(family)
        print(family, row.get("failures", "works"), flush=True)
        results["families"] = {name: results["families"][name] for name in sorted(results["families"])}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
