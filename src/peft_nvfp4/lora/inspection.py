"""Does this adapter belong to this base? :func:`inspect_adapter` finds out without trusting names.

>>> print(peft_nvfp4.inspect_adapter(base_model, "my-adapter"))

It reads the adapter's files (keys and shapes from the safetensors header; nothing is executed), compares them with the base's
modules and the fingerprint recorded at training (:mod:`peft_nvfp4.lora.fingerprint`) with the base's, and loads the adapter for a
moment to see whether logits change. The base is given back as it was.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from safetensors import safe_open
from torch import nn

from ..fusion.attach import attach, attached
from ..quantization.freeze import frozen_layers
from . import fingerprint
from .config import SIDE_CAR, NVFP4LoraConfig
from .layer import DENSE_INITS
from .merge_report import as_batches, compare_logits, probe_logits

WEIGHTS = "adapter_model.safetensors"
_LORA_KEY = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?$")
_EXTRA_KEY = re.compile(r"^(?:base_model\.model\.)?(.+)\.(?:lora_magnitude_vector(?:\.weight)?|lora_B\.bias)$")


@dataclass
class AdapterReport:
    """What was found.

    Attributes:
        adapter: the folder.
        layers: adapted modules whose keys and shapes fit.
        ranks: their ranks.
        problems: why the adapter does not bind: keys without a module, wrong shapes, targets without weights.
        warnings: it binds, but may not be what was trained.
        trained_on, base: records of the base at training (None if there is no such file) and of this one.
        logit_change: |adapter - base| / |base| of the logits on the probe; None where nothing was run.
        changed_choice: share of the probe's positions at which the preferred token changes.
    """

    adapter: str
    layers: int = 0
    ranks: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    trained_on: dict[str, Any] | None = None
    base: dict[str, Any] = field(default_factory=dict)
    logit_change: float | None = None
    changed_choice: float | None = None

    @property
    def binds(self) -> bool:
        """Whether every weight of the adapter has its place in the base, and every target its weights."""
        return self.layers > 0 and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "binds": self.binds}

    def __str__(self) -> str:
        lines = [f"{self.adapter}: {'binds' if self.binds else 'DOES NOT BIND'} ({self.layers} layers, ranks {self.ranks})"]
        lines.append(f"base: {self.base['format']}, {self.base['linears']} linears, {self.base['fingerprint'][:12]}")
        if self.trained_on is not None:
            lines.append(f"trained on: {self.trained_on['format']}, {self.trained_on['fingerprint'][:12]}")
        if self.logit_change is not None:
            lines.append(f"logits change by {self.logit_change:.2%}, the choice at {self.changed_choice:.1%} of the positions")
        shown = self.problems[:5] + ([f"and {len(self.problems) - 5} more"] if len(self.problems) > 5 else [])
        return "\n".join(lines + [f"problem: {p}" for p in shown] + [f"warning: {w}" for w in self.warnings])


def inspect_adapter(base: nn.Module, adapter_dir: str | Path, *, probe: Any = True) -> AdapterReport:
    """Check a saved adapter against a base model (dense, frozen or loaded with ``PactConfig``), without adapter.

    Args:
        probe: token ids, a batch or a list of batches on which to compare logits; True for a few random tokens (where the model
            has a vocabulary), False for none.

    Raises:
        ValueError: ``adapter_dir`` holds no LoRA adapter in safetensors, or ``base`` carries an adapter already.
    """
    folder = Path(adapter_dir)
    if any(isinstance(module, BaseTunerLayer) for module in base.modules()):
        raise ValueError("base carries an adapter: give the base model alone (model.unload())")
    config, shapes = _read(folder)
    report = AdapterReport(str(folder), trained_on=fingerprint.read(folder), base=fingerprint.base_record(base))
    _bind(report, base, config, shapes)
    aware = _merge_aware(folder, report)
    report.warnings = _compare_bases(report, aware)
    if report.binds and probe is not False:
        _run(report, base, folder, config, probe, aware)
    return report


def _read(folder: Path) -> tuple[LoraConfig, dict[str, tuple[int, ...]]]:
    """The config and the shape of every tensor."""
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds no adapter: adapter_config.json is missing")
    config = LoraConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder} holds a {config.peft_type} adapter, not LoRA")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS} (a pickle, adapter_model.bin, is not read: save it again as safetensors)")
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return config, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except Exception as error:  # of the library's own type, which it does not export everywhere
        raise ValueError(f"{folder / WEIGHTS} cannot be read ({error})") from error


# ---------------------------------------------------------------------------------------------- keys and shapes


def _bind(report: AdapterReport, base: nn.Module, config: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    modules = dict(base.named_modules())
    pairs: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for key, shape in shapes.items():
        if match := _LORA_KEY.match(key):
            pairs[match[1]][match[3]] = shape
        elif match := _EXTRA_KEY.match(key):
            pairs[match[1]].setdefault(key, shape)
        else:
            _bind_whole(report, base, modules, key, shape)
    ranks = set()
    for name, pair in pairs.items():
        if config.target_parameters and name.removesuffix(".base_layer") in modules and name not in modules:
            continue  # nested wrappers of several parameters of one module: their shapes are PEFT's to check
        problem = _misfit(modules.get(name), pair, bool(config.target_parameters))
        if problem:
            report.problems.append(f"{name}: {problem}")
        else:
            report.layers += 1
            ranks.add(pair["A"][0])
    report.ranks = sorted(ranks)
    for name, module in modules.items():
        if isinstance(module, nn.Linear | nn.Embedding) and name not in pairs and _targeted(config, name):
            report.problems.append(f"{name}: is a target of the adapter, which holds no weights for it")


def _targeted(config: LoraConfig, name: str) -> bool:
    return bool(config.target_modules) and bool(check_target_module_exists(config, name))


def _bind_whole(report: AdapterReport, base: nn.Module, modules: dict[str, nn.Module], key: str, shape: tuple[int, ...]) -> None:
    """A parameter that was trained in full (modules_to_save, biases)."""
    parent, _, leaf = key.removeprefix("base_model.model.").rpartition(".")
    there = getattr(modules.get(parent), leaf, None)
    if there is None:
        report.problems.append(f"{key}: the base has no such parameter")
    elif not there.is_floating_point() or tuple(there.shape) != shape:
        report.problems.append(f"{key}: has the shape {shape}, the base holds {tuple(there.shape)} in {there.dtype}")


def _misfit(module: nn.Module | None, pair: dict[str, tuple[int, ...]], parameters: bool) -> str | None:
    """Why a module cannot take A and B of these shapes; None if it can."""
    if module is None:
        return "the base has no such module"
    if not {"A", "B"} <= pair.keys():
        return f"holds {' and '.join(sorted(pair))} only"
    a, b = pair["A"], pair["B"]
    if isinstance(module, nn.Embedding):
        want, got = (module.num_embeddings, module.embedding_dim), (a[1], b[0])
    elif isinstance(module, nn.Linear):
        want, got = (module.in_features, module.out_features), (a[-1], b[0])
    elif hasattr(module, "nf"):  # Conv1D of GPT-2
        want, got = (module.weight.shape[0], module.nf), (a[-1], b[0])
    else:
        return None if parameters else f"is a {type(module).__name__}, not a linear"
    if tuple(got) != tuple(want):
        return f"A {a} and B {b} are for {got[0]} inputs and {got[1]} outputs, the base has {want[0]} and {want[1]}"
    if a[0] != b[1]:
        return f"A {a} and B {b} have different ranks"
    return None


# ---------------------------------------------------------------------------------------------- what it was trained on


def _merge_aware(folder: Path, report: AdapterReport) -> bool:
    if report.trained_on is not None:
        return bool(report.trained_on.get("merge_aware"))
    return (folder / SIDE_CAR).is_file() and NVFP4LoraConfig.from_pretrained(str(folder)).merge_aware


def _compare_bases(report: AdapterReport, aware: bool) -> list[str]:
    then, now, found = report.trained_on, report.base, []
    if aware and now["format"] != "nvfp4":
        found.append("it was trained merge-aware: its function is the merged NVFP4 model's, which this base does not compute")
    if then is None:
        return [*found, f"nothing says which base it was trained on ({fingerprint.BASE_FILE} is missing)"]
    if then["format"] != now["format"]:
        found.append(
            f"it was trained on a {then['format']} base and this one is {now['format']}: it has learnt on other weights, and "
            "accuracy may differ"
        )
        if then.get("init") in ("loftq", "eora"):
            found.append(
                f"its initialisation ({then['init']}) holds the rounding error of its own base, which it adds to this one"
            )
        if then.get("source") and now.get("source") and then["source"] != now["source"]:
            found.append("and it was trained on another model: the dense weights differ")
    elif then["fingerprint"] != now["fingerprint"]:
        found.append(
            f"it was trained on another {now['format']} base: the stored weights differ (another model, calibration or "
            "selection of layers, or an initialisation that rewrote the base)"
        )
    elif then.get("inputs") != now.get("inputs"):
        found.append("the weights are those it was trained on, but inputs are quantised otherwise (accuracy preset, centres)")
    return found


# ---------------------------------------------------------------------------------------------- logits


def _run(report: AdapterReport, base: nn.Module, folder: Path, config: LoraConfig, probe: Any, aware: bool) -> None:
    vocabulary = getattr(getattr(base, "config", None), "vocab_size", None)
    if probe is True:
        if vocabulary is None:
            return
        probe = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(DENSE_INITS) and not frozen_layers(base):
        report.warnings.append(f"logits were not compared: loading it (init_lora_weights={init!r}) rewrites the dense base")
        return
    batches = as_batches(probe)
    before = probe_logits(base, batches)
    own = aware and report.base["format"] == "nvfp4"
    with _given_back(base):
        model = PeftModel.from_pretrained(base, str(folder), config=NVFP4LoraConfig.from_pretrained(str(folder)) if own else None)
        after = probe_logits(model, batches)
        model.unload()
    found = compare_logits(before, after, after)
    report.logit_change, report.changed_choice = found.effect, found.changed_choice
    if not found.effect:
        report.warnings.append("the adapter changes no logit on the probe")


@contextmanager
def _given_back(base: nn.Module):
    """Whatever loading an adapter changes in a model, undone at the end."""
    fused = attached(base)
    stored = [(layer, layer.snapshot()) for _, layer in frozen_layers(base)]
    flags = [(p, p.requires_grad) for p in base.parameters()]
    modes = [(m, m.training) for m in base.modules()]
    try:
        yield
    finally:
        for layer, snapshot in stored:
            layer.restore(snapshot)
        for p, flag in flags:
            p.requires_grad = flag
        for m, training in modes:
            m.training = training
        if fused:
            attach(base)
