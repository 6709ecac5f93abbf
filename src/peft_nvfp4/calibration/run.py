"""Calibrate a model: :func:`calibrate` goes through its decoder layers once and leaves frozen NVFP4 linears behind.

>>> report = calibrate(model, texts, tokenizer, output_dir="calibration")
>>> model = get_peft_model(model, NVFP4LoraConfig(...))        # keeps the frozen linears as they are

Layer by layer: the inputs of a layer come from layers that are quantised already, W4A4, through the package's own linears. One
layer is on the GPU at a time; activations wait on the CPU, and so do the dense linears that were replaced: an error puts them
back. With an ``output_dir`` every finished layer is kept there, and the same call goes on where it was interrupted: finished
layers are loaded and only run to produce the next one's input, so the result has the same bits (on one device) as an
uninterrupted run. The :class:`Report` (errors per layer against rounding to nearest, time, memory) is kept there too, as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..nn.frozen_linear import FrozenOptions
from ..quantization.freeze import _mark_quantised, dense_after_error, frozen_layers, plan
from ..quantization.groups import check_accuracy
from .data import Batch, batches, count_tokens
from .gptq import GPTQOptions
from .passes import Run
from .store import Store, digest, install, load_layer, model_digest, read_manifest
from .structure import find_stack

TITLES = {"w4a4": "output, W4A4", "w4a16": "output, W4A16", "weight": "weight"}


@dataclass(frozen=True)
class CalibrationOptions:
    """What is calibrated, and on how much.

    Attributes:
        method: ``"gptq"``, or ``"nearest"`` (weights by the searching rule; for offsets and terms alone).
        gptq: see :class:`~peft_nvfp4.calibration.gptq.GPTQOptions`.
        accuracy: preset of the inputs' terms, see :class:`~peft_nvfp4.NVFP4LoraConfig`.
        budget: choose the terms by measured errors instead, adding at most this share to the multiplications of the forward
            products (two terms at all norm outputs add 0.66 in a Llama; backward has one term in any case).
        offset: subtract the mean of inputs of one term (``accuracy="high"`` has none).
        backward: source of the backward layout W_b: ``"requantize"`` D(W_f), or ``"gptq"``, D(W_f) solved against the moments of
            the gradient from a few backward passes.
        backward_batches: how many.
        weight_layouts: of the frozen linears, see :class:`~peft_nvfp4.nn.frozen_linear.FrozenOptions`.
        samples, seq_len, batch_size, seed: see :func:`peft_nvfp4.calibration.data.batches`.
        report_tokens: tokens (held out) on which errors are measured; 0 for no report.
    """

    method: str = "gptq"
    gptq: GPTQOptions = field(default_factory=GPTQOptions)
    accuracy: str = "high"
    budget: float | None = None
    offset: bool = False
    backward: str = "requantize"
    backward_batches: int = 16
    weight_layouts: str = "cached"
    samples: int = 128
    seq_len: int = 2048
    batch_size: int = 1
    seed: int = 0
    report_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, known in (("method", ("gptq", "nearest")), ("backward", ("requantize", "gptq"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        check_accuracy(self.accuracy)
        for name, least in (("samples", 1), ("seq_len", 2), ("batch_size", 1), ("backward_batches", 1), ("report_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.offset and self.accuracy == "high" and self.budget is None:
            warnings.warn(
                "offset=True subtracts means from inputs of one NVFP4 term, and with accuracy='high' there are none: say "
                "accuracy='balanced' or 'paper', or a budget",
                stacklevel=3,
            )
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise ValueError(f"budget is a share of the FP4 work between 0 and 1, got {self.budget}")
        if self.backward == "gptq" and self.weight_layouts != "cached":
            raise ValueError("backward='gptq' makes a backward layout to keep: it needs weight_layouts='cached'")
        FrozenOptions(self.weight_layouts)  # validates


@dataclass
class Report:
    """What a calibration has done. Of a layer: {"linears": {name: errors in per cent}, "seconds", "peak_gib", "not_reached",
    "sites" (names of the linears that read one input, group by group)}."""

    settings: dict[str, Any]
    device: str
    tokens: int  # of calibration, without padding: fewer than asked for, where the data held fewer
    layers: dict[str, dict] = field(default_factory=dict)  # by dotted name
    survey: dict[str, list[dict]] = field(default_factory=dict)  # the measured groups, where terms were chosen under a budget
    dense: list[str] = field(default_factory=list)  # planned linears outside of the calibrated layers, left as they were

    def means(self) -> dict[str, float]:
        """Every error, averaged over all linears."""
        rows = [r for layer in self.layers.values() for r in layer["linears"].values()]
        values = {key: [r[key] for r in rows if key in r] for key in (*TITLES, *(f"{k}_nearest" for k in TITLES), "a4")}
        return {key: sum(errors) / len(errors) for key, errors in values.items() if errors}

    def __str__(self) -> str:
        means, seconds = self.means(), sum(row.get("seconds", 0) for row in self.layers.values())
        lines = [f"{len(self.layers)} layers in {seconds:.0f} s on {self.device}, {self.tokens:,} tokens of calibration"]
        for key, title in TITLES.items() if self.layers and self.settings["report_tokens"] else ():
            lines.append(f"{title} error: {means[key]:.2f} % (to nearest {means[f'{key}_nearest']:.2f} %)")
        if self.dense:
            lines.append(f"left dense: {len(self.dense)} linears outside of these layers ({self.dense[0]}, ...)")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "means": self.means()}


def calibrate(
    model: nn.Module,
    data: Any,
    tokenizer: Any = None,
    options: CalibrationOptions | None = None,
    *,
    output_dir: str | Path | None = None,
    device: torch.device | str | None = None,
    layers: Sequence[str] | None = None,
    skip_modules: Sequence[str] = (),
    progress: bool = True,
) -> Report:
    """Freeze the linears of a dense model's layers in NVFP4, in place, calibrated on data.

    Args:
        data: texts or conversations (with ``tokenizer``), a ``datasets`` dataset, token ids, or batches of a processor, see
            :mod:`peft_nvfp4.calibration.data`.
        output_dir: keep finished layers there, to be resumed or applied to another copy of the model.
        device: where the work is done; by default the GPU if there is one.
        layers: names of the lists of layers to calibrate, in the order in which data passes them
            (``["vision_model.encoder.layers", "text_model.layers"]``); by default the one with most weights, of the text model.
        skip_modules: names (or dotted endings) of modules to leave dense.

    Returns:
        What was done and the errors of every layer.

    Raises:
        ValueError: an option or the data does not fit; the model cannot be calibrated layer by layer; ``output_dir`` holds a
            calibration of something else, or a damaged one. The model is dense again after any error.
    """
    if isinstance(tokenizer, CalibrationOptions):
        raise TypeError("options go by name: calibrate(model, data, options=...)")
    options = options or CalibrationOptions()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    skip_modules = (skip_modules,) if isinstance(skip_modules, str) else tuple(skip_modules)
    layers = (layers,) if isinstance(layers, str) else layers
    planned = plan(model, "nvfp4", skip_modules)
    if not planned and frozen_layers(model):
        raise ValueError("the linears of this model are frozen already; calibrate a dense copy of it")
    names = [find_stack(model, planned, name) for name in layers or (None,)]
    sizes = {key: getattr(options, key) for key in ("samples", "seq_len", "batch_size", "seed")}
    data = batches(data, tokenizer, **sizes)
    _check_ids(model, data)
    settings = {**asdict(options), "layers": names, "skip_modules": list(skip_modules)}
    marks = {"settings": digest(settings), "data": digest(data), "model": model_digest(model)} if output_dir is not None else {}
    store = Store(output_dir, marks, settings)
    report = Report(settings, str(device), count_tokens(data))
    with dense_after_error(model, planned):
        for name in names:
            inside = [n for n in planned if n.startswith(f"{name}.")]
            run = Run(model, name, inside, data, options, device, store)
            run.run(progress)
            report.layers.update(run.rows)
            if run.survey:
                report.survey[name] = run.survey
        report.dense = [n for n in planned if not any(n.startswith(f"{name}.") for name in names)]
        if store.folder is not None:
            (store.folder / "report.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    _mark_quantised(model)
    return report


def _check_ids(model: nn.Module, data: Sequence[Batch]) -> None:
    """On a GPU an index out of range ends the process's CUDA context, without saying what was wrong."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    ids = [batch.get("input_ids") for batch in data if "pixel_values" not in batch]  # placeholders of images may lie outside
    ids = [t for t in ids if isinstance(t, torch.Tensor) and t.numel()]
    if not ids or not isinstance(embedding, nn.Embedding):
        return
    largest, longest = max(int(t.max()) for t in ids), max(t.shape[-1] for t in ids)
    if largest >= embedding.num_embeddings:
        raise ValueError(
            f"token id {largest} in the calibration data, and the model has {embedding.num_embeddings} embeddings: "
            "the tokenizer is another model's"
        )
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and longest > limit:
        raise ValueError(f"sequences of {longest} tokens for a model of {limit} positions: CalibrationOptions(seq_len={limit})")


def apply_calibration(
    model: nn.Module,
    folder: str | Path,
    *,
    weight_layouts: str | None = None,
    on_frozen: Callable[[str, nn.Linear, nn.Module], None] | None = None,
) -> list[str]:
    """Put the linears of a finished calibration into another copy of the model it was made for.

    Args:
        weight_layouts: of the frozen linears; by default those of the calibration.
        on_frozen: see :func:`~peft_nvfp4.quantization.freeze.freeze_model`.

    Returns:
        Dotted names of the linears.

    Raises:
        ValueError: the folder holds no calibration, an unfinished or damaged one, or one of another model. Nothing has been
            changed then.
    """
    manifest = read_manifest(folder)
    settings = manifest["settings"]
    try:
        expected = [f"{name}.{i}" for name in settings["layers"] for i in range(len(model.get_submodule(name)))]
    except AttributeError as error:
        raise ValueError(f"the calibration in {folder} is of a model with other layers: {error}") from None
    parts = ("layers", "backward") if settings["backward"] == "gptq" else ("layers",)
    missing = [n for part in parts for n in expected if n not in manifest[part]]
    if missing:
        raise ValueError(f"the calibration in {folder} is not finished ({missing[0]} is missing); run calibrate again to go on")
    if manifest["fingerprint"].get("model") != model_digest(model):
        raise ValueError(f"the calibration in {folder} was made for other weights than this model's")
    for name in expected:
        load_layer(folder, manifest, name)  # all are whole, before the first linear is replaced
    done = [f"{name}.{n}" for name in expected for names in manifest["layers"][name]["sites"] for n in names]
    with dense_after_error(model, done if on_frozen is not None else ()):
        for name in expected:
            entry, layer = manifest["layers"][name], model.get_submodule(name)
            dense = {n: layer.get_submodule(n) for names in entry["sites"] for n in names}
            install(layer, name, entry, load_layer(folder, manifest, name), weight_layouts or settings["weight_layouts"])
            for n, linear in dense.items() if on_frozen is not None else ():
                on_frozen(f"{name}.{n}", linear, layer.get_submodule(n))
                linear.to("cpu")
    _mark_quantised(model)
    return done
