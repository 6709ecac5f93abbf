"""The methods that are compared: a frozen base, and how it computes.

Everything but the base is the same for all: LoRA of one rank on all linears, no dropout, the same rows in the same order, the
same loss. ``weights`` are the packaged ones (``shipped``; they were 4-bit before, see `examples/smollm2_reviews.py`) or the same
function with a rotated residual stream (``rotated``, :mod:`rotation`), which takes them off that grid.

The paper's TE row, direct quantisation without calibration, has no counterpart here; NVFP4 rounded to nearest (with this
package's search for block scales) stands in its place. Weights in NVFP4 with exact activations (W4A16) are no mode of the
product: the frozen weights are dequantised and kept dense, the same function at the price of a BF16 model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import rotation
import texts
import torch
from common import smollm2_reviews as data
from low_level import adapted_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_nvfp4 import freeze_model, preprocess_eora
from peft_nvfp4.calibration.data import batches
from peft_nvfp4.calibration.gptq import GPTQOptions
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.quantization.freeze import dequantize_model

SHIPPED, ROTATED = "shipped", "rotated"
WEIGHTS = (SHIPPED, ROTATED)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAST = "layers.-1"
"""In ``skip_modules``: the last decoder layer, whatever its number."""


@dataclass(frozen=True)
class Method:
    """Attributes:
    label: in the tables.
    config: what :func:`low_level.adapted_model` takes.
    calibration: name of a set of GPTQ weights, a key of :data:`CALIBRATIONS`; None: rounded to nearest.
    weights_only: NVFP4 weights, dequantised, with exact activations and gradients.
    own_text: what the calibration, or EoRA, reads are the task's own training rows, not general text.
    starts_from: first values of the adapters, a word of ``init_lora_weights``; None: drawn from the seed.
    ratio: learning rate of B over that of A (:mod:`reproduce.together`).
    """

    name: str
    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    calibration: str | None = None
    weights_only: bool = False
    rank: int = 16
    starts_from: str | None = None
    own_text: bool = False
    ratio: float = 1.0

    def changed(self, name: str, label: str, rank: int | None = None, calibration: Any = "", **config: Any) -> Method:
        """Another method, with some fields of the config replaced."""
        return replace(
            self,
            name=f"{self.name}:{name}",
            label=label,
            config={**self.config, **config},
            rank=rank or self.rank,
            calibration=self.calibration if calibration == "" else calibration,
        )


def nvfp4(name: str, label: str, accuracy: str, calibration: str | None = None, **more: Any) -> Method:
    return Method(name, label, {"backend": "nvfp4", "accuracy": accuracy}, calibration, **more)


_ALL = (
    Method("bf16", "BF16 LoRA", {"backend": "bf16"}),
    Method("nf4", "NF4 QLoRA", {"backend": "nf4"}),
    nvfp4("paper", "NVFP4 to nearest", "paper"),
    nvfp4("paper_gptq", "NVFP4 + GPTQ (PACT)", "paper", "paper"),
    nvfp4("balanced", "NVFP4 balanced to nearest", "balanced"),
    nvfp4("balanced_gptq", "NVFP4 balanced + GPTQ", "balanced", "balanced"),
    nvfp4("high", "NVFP4 high to nearest (default)", "high"),
    nvfp4("high_gptq", "NVFP4 high + GPTQ", "high", "high"),
    nvfp4("high_eora", "NVFP4 high, adapters start at the rounding error (EoRA)", "high", starts_from="eora"),
    nvfp4("high_loftq", "NVFP4 high, adapters start at the rounding error (LoftQ)", "high", starts_from="loftq"),
    nvfp4("high_gptq_eora", "NVFP4 high + GPTQ, adapters start at what it leaves (EoRA)", "high", "high", starts_from="eora"),
    nvfp4("w4a16", "NVFP4 weights to nearest, activations exact", "paper", weights_only=True),
    nvfp4("w4a16_gptq", "NVFP4 weights only + GPTQ", "paper", "paper", weights_only=True),
)
_HIGH = next(method for method in _ALL if method.name == "high")
LEVERS = (
    nvfp4("high_gptq_own", "NVFP4 high + GPTQ on the task's rows", "high", "high", own_text=True),
    nvfp4("high_eora_own", "NVFP4 high, EoRA on the task's rows", "high", starts_from="eora", own_text=True),
    nvfp4("high_gptq_asymmetric", "NVFP4 high + GPTQ, asymmetric target", "high", "high_asymmetric"),
    _HIGH.changed("last", "NVFP4 high, last layer in BF16", skip_modules=(LAST,)),
    _HIGH.changed("first_last", "NVFP4 high, first and last layer in BF16", skip_modules=("layers.0", LAST)),
    _HIGH.changed("down", "NVFP4 high, down projections in BF16", skip_modules=("down_proj",)),
    _HIGH.changed("rslora", "NVFP4 high, rsLoRA", use_rslora=True),
    _HIGH.changed("rank32", "NVFP4 high, rank 32", rank=32),
    replace(_HIGH, name="high:lora_plus", label="NVFP4 high, B learns 16 times as fast (LoRA+)", ratio=16.0),
)
"""What may bring the default nearer to BF16, each trained with a learning rate of its own."""
METHODS = {method.name: method for method in (*_ALL, *LEVERS)}
DEFAULT = ("bf16", "nf4", "paper", "paper_gptq", "balanced", "balanced_gptq", "high")
"""Of the accuracy tables; the others are among the ablations."""

CALIBRATIONS: dict[str, dict[str, Any]] = {  # of CalibrationOptions
    **{accuracy: dict(accuracy=accuracy) for accuracy in ("paper", "balanced", "high")},
    "high_asymmetric": dict(accuracy="high", gptq=GPTQOptions(asymmetric=True)),
    "paper_centred": dict(accuracy="paper", offset=True),
    "paper_asymmetric": dict(accuracy="paper", gptq=GPTQOptions(asymmetric=True)),
    "paper_plain": dict(accuracy="paper", gptq=GPTQOptions("max6", act_order=False)),
    "paper_backward": dict(accuracy="paper", backward="gptq"),
    "paper_four_over_six": dict(accuracy="paper", gptq=GPTQOptions("four_over_six")),
    "budget_third": dict(budget=0.33),
}


def general_texts() -> list[str]:
    """What text models are calibrated with."""
    return texts.split(texts.default_paths())[0]


class Text(NamedTuple):
    """Rows that a calibration reads, and what tells their calibrations from others'."""

    name: str
    rows: Callable[[], list[str]]


GENERAL = Text("", lambda: general_texts())


@dataclass
class Models:
    """Makes models: rotated weights in ``folder/weights``, calibrations in ``folder/calibrations``.

    Attributes:
        layers: keep only the first so many (to try things).
        samples, length: of a calibration.
        shipped: folder of the model, if not `smollm2_reviews.model_folder`.
    """

    folder: Path
    device: torch.device
    layers: int | None = None
    samples: int = 128
    length: int = 512
    shipped: Path | None = None

    def dense(self, weights: str) -> Path:
        """Folder of the dense model. The rotated weights are made when they are first asked for."""
        folder = (self.shipped or data.model_folder()) if weights == SHIPPED else self.folder / "weights" / weights
        if weights == ROTATED and not (folder / "config.json").is_file():
            self._rotate(folder)
        return folder

    def load(self, weights: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
        """Dense model on the device, and tokenizer."""
        folder = self.dense(weights)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.model.layers = model.model.layers[: self.layers]
        model.config.num_hidden_layers = len(model.model.layers)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return model.to(self.device).requires_grad_(False), tokenizer

    def _rotate(self, folder: Path) -> None:
        model, tokenizer = self.load(SHIPPED, torch.float32)
        original, _ = self.load(SHIPPED, torch.float32)
        rotation.rotate_(model, seed=0)
        rotation.check(original, model, torch.arange(64).view(1, 64) % model.config.vocab_size)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def calibration(self, weights: str, name: str, text: Text | None = None) -> Path:
        """Folder of GPTQ weights, made when it is first asked for."""
        text = text or GENERAL
        folder = self.folder / "calibrations" / f"{weights}_{name}{text.name and '_'}{text.name}"
        if not (folder / "done").is_file():
            model, tokenizer = self.load(weights)
            shape = dict(samples=self.samples, seq_len=self.length, batch_size=8, report_tokens=0)
            options = CalibrationOptions(**shape, **CALIBRATIONS[name])
            where = dict(output_dir=folder, device=self.device, progress=False)
            calibrate(model.eval(), text.rows(), tokenizer, options, **where)
            (folder / "done").touch()
        return folder

    def adapted(self, method: Method, weights: str, text: Text | None = None) -> tuple[nn.Module, Any]:
        """A frozen base with an adapter, as the method wants it, and the tokenizer. ``text``: what a calibration reads, by
        default general text."""
        calibration = None if method.calibration is None else self.calibration(weights, method.calibration, text)
        model, tokenizer = self.load(weights)
        if method.starts_from == "eora":
            self._see_inputs(model, tokenizer, (text or GENERAL).rows())
        return adapt(model, method, calibration), tokenizer

    def _see_inputs(self, model: nn.Module, tokenizer: Any, rows: list[str]) -> None:
        """Of every linear, on the text that GPTQ reads: what EoRA weighs rounding errors by."""
        found = batches(rows, tokenizer, samples=self.samples, seq_len=self.length, batch_size=8)

        def run() -> None:
            for batch in found:
                model.model(input_ids=batch["input_ids"].to(self.device), use_cache=False)

        preprocess_eora(model.eval(), run)


def adapt(model: nn.Module, method: Method, calibration: Path | None, **fields: Any) -> nn.Module:
    """The dense model is used up. ``fields``: of NVFP4LoraConfig, instead of a text model's."""
    config = dict(method.config)
    if method.weights_only:
        if calibration is None:
            freeze_model(model, accuracy=config["accuracy"], progress=False)
        else:
            apply_calibration(model, calibration)
        dequantize_model(model)
        model.config._is_quantized = False
        config = {"backend": "bf16"}
    elif calibration is not None:
        config["calibration"] = str(calibration)
    if method.starts_from is not None:
        config["init_lora_weights"] = method.starts_from
    if skipped := config.pop("skip_modules", None):
        last = f"layers.{model.config.num_hidden_layers - 1}"
        config["skip_modules"] = [last if name == LAST else name for name in skipped]
    shared = dict(r=method.rank, lora_alpha=2 * method.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return adapted_model(model, **shared | config | fields)
