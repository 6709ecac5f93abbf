"""The methods that are compared: a frozen base, and how it computes.

Everything but the base is the same for all: LoRA of one rank on all linears, no dropout, the same rows in the same order, the
same loss. ``weights`` are the packaged ones (``shipped``; they were 4-bit before, see `examples/smollm2_reviews.py`) or the same
function with a rotated residual stream (``rotated``, :mod:`rotation`), which takes them off that grid.

The paper's TE row, direct quantisation without calibration, has no counterpart here; NVFP4 rounded to nearest (with this
package's search for block scales) stands in its place. Weights in NVFP4 with exact activations (W4A16) are no mode of the
product: the frozen weights are dequantised and kept dense, the same function at the price of a BF16 model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import smollm2_reviews as data
from peft import get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.calibration.gptq import GPTQOptions
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.quantization.freeze import dequantize_model

from .training import Trainee

SHIPPED, ROTATED = "shipped", "rotated"
WEIGHTS = (SHIPPED, ROTATED)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAST = "layers.-1"
"""In ``skip_modules``: the last decoder layer, whatever its number."""


@dataclass(frozen=True)
class Method:
    """Attributes:
    label: in the tables.
    config: fields of NVFP4LoraConfig.
    calibration: name of a set of GPTQ weights, a key of :data:`CALIBRATIONS`; None: rounded to nearest.
    weights_only: NVFP4 weights, dequantised, with exact activations and gradients.
    """

    name: str
    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    calibration: str | None = None
    weights_only: bool = False
    rank: int = 16

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


def _nvfp4(name: str, label: str, accuracy: str, gptq: bool = False, **more: Any) -> Method:
    return Method(name, label, {"backend": "nvfp4", "accuracy": accuracy}, accuracy if gptq else None, **more)


_ALL = (
    Method("bf16", "BF16 LoRA", {"backend": "bf16"}),
    Method("nf4", "NF4 QLoRA", {"backend": "nf4"}),
    _nvfp4("paper", "NVFP4 to nearest", "paper"),
    _nvfp4("paper_gptq", "NVFP4 + GPTQ (PACT)", "paper", True),
    _nvfp4("balanced", "NVFP4 balanced to nearest", "balanced"),
    _nvfp4("balanced_gptq", "NVFP4 balanced + GPTQ", "balanced", True),
    _nvfp4("high", "NVFP4 high to nearest (default)", "high"),
    _nvfp4("high_gptq", "NVFP4 high + GPTQ", "high", True),
    _nvfp4("w4a16_gptq", "NVFP4 weights only + GPTQ", "paper", True, weights_only=True),
)
METHODS = {method.name: method for method in _ALL}
DEFAULT = ("bf16", "nf4", "paper", "paper_gptq", "balanced", "balanced_gptq", "high")
"""Of the accuracy tables; the others are among the ablations."""

CALIBRATIONS: dict[str, dict[str, Any]] = {  # of CalibrationOptions
    **{accuracy: dict(accuracy=accuracy) for accuracy in ("paper", "balanced", "high")},
    "paper_centred": dict(accuracy="paper", centre=True),
    "paper_asymmetric": dict(accuracy="paper", gptq=GPTQOptions(asymmetric=True)),
    "paper_plain": dict(accuracy="paper", gptq=GPTQOptions("max6", weighted=False, act_order=False)),
    "paper_backward": dict(accuracy="paper", backward="gptq"),
    "paper_four_over_six": dict(accuracy="paper", gptq=GPTQOptions("four_over_six")),
    "paper_searched": dict(accuracy="paper", method="nearest"),
    "budget_third": dict(budget=0.33),
    "balanced_centred": dict(accuracy="balanced", centre=True),
}


@dataclass
class Workshop:
    """Makes models: the weights in ``folder/weights``, calibrations in ``folder/calibrations``.

    Attributes:
        layers: keep only the first so many (to try things).
        samples, length: of a calibration.
        shipped: folder of the packaged model, if not `smollm2_reviews.model_folder`.
    """

    folder: Path
    device: str
    layers: int | None = None
    samples: int = 128
    length: int = 512
    graphs: bool = True
    shipped: Path | None = None
    dense: dict[str, tuple[nn.Module, Any]] = field(default_factory=dict)  # on the device, to be copied

    # -- weights

    def weights(self, name: str) -> Path:
        return (self.shipped or data.model_folder()) if name == SHIPPED else self.folder / "weights" / name

    def prepare(self, name: str) -> None:
        """Make the rotated weights, once."""
        if name == SHIPPED or (self.weights(name) / "config.json").is_file():
            return
        import rotation

        model, tokenizer = self._load(SHIPPED, torch.float32)
        before = copy.deepcopy(model)
        rotation.rotate_(model, seed=0)
        ids = torch.arange(64).view(1, 64) % model.config.vocab_size
        error = rotation.difference(before, model, ids)
        if not error < 1e-3:  # 1e-6 was seen
            raise RuntimeError(f"the rotation changed the function: logits differ by {error:.1e}")
        model.to(torch.bfloat16).save_pretrained(self.weights(name))
        tokenizer.save_pretrained(self.weights(name))

    def _load(self, name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.weights(name), dtype=dtype)
        if name == SHIPPED:
            model.model.layers = model.model.layers[: self.layers]
            model.config.num_hidden_layers = len(model.model.layers)
        tokenizer = AutoTokenizer.from_pretrained(self.weights(name))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return model, tokenizer

    def load(self, name: str) -> tuple[nn.Module, Any]:
        """Dense BF16 model on the device, and tokenizer; read once."""
        if name not in self.dense:
            model, tokenizer = self._load(name, torch.bfloat16)
            self.dense[name] = model.to(self.device).requires_grad_(False), tokenizer
            if self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # copied on other streams
        model, tokenizer = self.dense[name]
        return copy.deepcopy(model), tokenizer

    # -- calibrations

    def calibration(self, weights: str, name: str) -> Path:
        return self.folder / "calibrations" / f"{weights}_{name}"

    def calibrated(self, weights: str, name: str | None) -> bool:
        return name is None or (self.calibration(weights, name) / "done").is_file()

    def calibrate(self, weights: str, name: str, texts: list[str]) -> None:
        """GPTQ on general text; once for each set of weights, whoever needs them later."""
        if self.calibrated(weights, name):
            return
        model, tokenizer = self.load(weights)
        options = CalibrationOptions(
            samples=self.samples, seq_len=self.length, batch_size=8, report_tokens=0, **CALIBRATIONS[name]
        )
        folder = self.calibration(weights, name)
        calibrate(model.eval(), texts, tokenizer, options, output_dir=folder, device=self.device, progress=False)
        (folder / "done").touch()

    # -- models

    def trainee(self, method: Method, weights: str) -> Trainee:
        model, tokenizer = self.load(weights)
        return adapt(model, tokenizer, method, self.calibration(weights, method.calibration or ""), self.graphs)


def adapt(model: nn.Module, tokenizer: Any, method: Method, calibration: Path, graphs: bool) -> Trainee:
    """A model with a frozen base and an adapter, as the method wants it; the dense model is used up."""
    own = dict(method.config)
    if method.weights_only:
        if method.calibration is None:
            freeze_model(model, accuracy=own["accuracy"], progress=False)
        else:
            apply_calibration(model, calibration)
        dequantize_model(model)
        model.config._is_quantized = False
        own = {"backend": "bf16"}
    elif method.calibration is not None:
        own["calibration"] = str(calibration)
    skipped = own.pop("skip_modules", None)
    if skipped:
        last = f"layers.{model.config.num_hidden_layers - 1}"
        own["skip_modules"] = [last if name == LAST else name for name in skipped]
    shared = dict(r=method.rank, lora_alpha=2 * method.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, NVFP4LoraConfig(**shared, **own))
    return Trainee(adapted, tokenizer, str(getattr(adapted.base_model, "nvfp4_report", "")), graphs)
