"""Does this adapter belong to this base? :func:`inspect_adapter` finds out without trusting names.

>>> print(peft_nvfp4.inspect_adapter(base_model, "my-adapter"))

It reads the adapter's files (keys and shapes from the safetensors header; nothing is executed), compares them with what PEFT
expects of such an adapter on this base, compares the base with the one that the adapter was trained on
(:mod:`peft_nvfp4.lora.fingerprint`), and loads the adapter for a moment to see whether logits change. The base is given back as
it was.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn

from ..fusion.attach import attach, attached
from ..fusion.probe import modes_kept
from ..quantization.freeze import frozen_layers
from . import fingerprint
from .config import SIDE_CAR, NVFP4LoraConfig
from .layer import DENSE_INITS
from .report import as_batches, compare_logits, probe_logits

WEIGHTS = "adapter_model.safetensors"


@dataclass
class AdapterReport:
    """What :func:`inspect_adapter` finds.

    Attributes:
        adapter: the folder.
        binds: every weight of the adapter has its place in the base, and every target its weights.
        layers: adapted modules whose keys and shapes fit.
        ranks: their ranks.
        problems: why the adapter does not bind: keys without a place, wrong shapes, targets without weights.
        warnings: it binds, but may not be what was trained.
        trained_on, base: records of the base at training (None if there is no such file) and of this one.
        logit_change: |adapter - base| / |base| of the logits on the probe; None where nothing was run.
        changed_choice: share of the probe's positions at which the preferred token changes.
    """

    adapter: str
    binds: bool = False
    layers: int = 0
    ranks: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    trained_on: dict[str, Any] | None = None
    base: dict[str, Any] = field(default_factory=dict)
    logit_change: float | None = None
    changed_choice: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.adapter}: {'binds' if self.binds else 'DOES NOT BIND'} ({self.layers} layers, ranks {self.ranks})"]
        lines.append(f"base: {self.base['format']}, {self.base['fingerprint'][:12]}")
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
    config, shapes = _read_adapter(folder)
    report = AdapterReport(str(folder), trained_on=fingerprint.read(folder), base=fingerprint.base_record(base))
    _bind(report, base, config, shapes)
    merge_aware = (folder / SIDE_CAR).is_file() and NVFP4LoraConfig.from_pretrained(str(folder)).merge_aware
    report.warnings = _compare_bases(report, merge_aware)
    if report.binds and probe is not False:
        _run_probe(report, base, folder, config, probe, merge_aware)
    return report


def _read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, tuple[int, ...]]]:
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


def _bind(report: AdapterReport, base: nn.Module, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the file's keys and shapes with those of an empty adapter that PEFT makes of the config on this base."""
    empty = copy.deepcopy(config)
    empty.init_lora_weights = False  # others compute from the base's weights, and may rewrite them
    with _given_back(base):
        try:
            model = get_peft_model(base, empty, low_cpu_mem_usage=True)
        except ValueError as error:  # no target of the config is in the base
            report.problems.append(str(error))
            return
        expected = {key: tuple(t.shape) for key, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
        with warnings.catch_warnings(action="ignore"):  # it says that it saves embeddings
            whole = get_peft_model_state_dict(model, save_embedding_layers=True)
        loadable = {key: tuple(t.shape) for key, t in {**model.state_dict(), **whole}.items()}  # norms, biases, embeddings
        model.unload()
    problems: dict[str, list[str]] = defaultdict(list)
    ranks = {_split(key)[0]: shape[0] for key, shape in expected.items() if ".lora_A" in key or ".lora_embedding_A" in key}
    for key in {**shapes, **expected}:
        module, leaf = _split(key)
        place = expected.get(key, loadable.get(key))
        if place is None:
            problems[module].append(f"the base has no place for {leaf}")
        elif key not in shapes:
            problems[module].append(f"the adapter holds no {leaf}, though its config names this target")
        elif shapes[key] != place:
            problems[module].append(f"{leaf} has the shape {shapes[key]}, and the base takes {place}")
    report.problems = [f"{module}: {', '.join(texts)}" for module, texts in problems.items()]
    report.layers = len(ranks.keys() - problems.keys())
    report.ranks = sorted({rank for module, rank in ranks.items() if module not in problems})
    report.binds = report.layers > 0 and not problems


def _split(key: str) -> tuple[str, str]:
    """Key in a file -> (dotted name of the adapted module, tensor of the adapter), or (dotted name of a parameter, "it")."""
    module, _, leaf = key.removeprefix("base_model.model.").partition(".lora_")
    return module, f"lora_{leaf}" if leaf else "it"


# ---------------------------------------------------------------------------------------------- what it was trained on


def _compare_bases(report: AdapterReport, merge_aware: bool) -> list[str]:
    then, now, found = report.trained_on, report.base, []
    if merge_aware and now["format"] != "nvfp4":
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
            f"it was trained on another {now['format']} base: weights or input terms differ (another model, calibration, "
            "accuracy preset or selection of layers, or an initialisation that rewrote the base)"
        )
    return found


# ---------------------------------------------------------------------------------------------- logits


def _run_probe(report: AdapterReport, base: nn.Module, folder: Path, config: LoraConfig, probe: Any, merge_aware: bool) -> None:
    vocabulary = getattr(getattr(base, "config", None), "vocab_size", None)
    if probe is True:
        if vocabulary is None:
            return
        probe = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(DENSE_INITS) and not frozen_layers(base):
        report.warnings.append(f"logits were not compared: loading it (init_lora_weights={init!r}) rewrites the dense base")
        return
    batches = as_batches(probe)
    before = probe_logits(base, batches)
    nvfp4_config = NVFP4LoraConfig.from_pretrained(str(folder)) if merge_aware and report.base["format"] == "nvfp4" else None
    with _given_back(base):
        model = PeftModel.from_pretrained(base, str(folder), config=nvfp4_config)
        after = probe_logits(model, batches)
        model.unload()
    compared = compare_logits(before, after, after)
    report.logit_change, report.changed_choice = compared.effect, compared.changed_choice
    if not report.logit_change:
        report.warnings.append("the adapter changes no logit on the probe")


@contextmanager
def _given_back(base: nn.Module) -> Iterator[None]:
    """At the end, what loading an adapter changes in a model is undone."""
    fused = attached(base)
    stored = [(layer, layer.snapshot()) for _, layer in frozen_layers(base)]
    flags = [(p, p.requires_grad) for p in base.parameters()]
    try:
        with modes_kept(base):
            yield
    finally:
        for layer, snapshot in stored:
            layer.restore(snapshot)
        for p, flag in flags:
            p.requires_grad = flag
        if fused:
            attach(base)
