"""What quantising does to every tensor of a frozen model: errors, underflow, saturation, ranges, layer by layer.

>>> tensor_statistics(model, [batch], weights=dense_state_dict).worst(5)   # any number of batches; nothing is trained
>>> trainer.add_callback(NVFP4StatisticsCallback(trainer, every=100))      # while training, through Trainer's own log

Three tensors of every frozen linear are looked at: its *weight*, its *input*, and the *gradient* that comes back to its output.
For each, with t the tensor and D(Q(t)) what the layer computes with:

    error       ||D(Q(t)) - t|| / ||t||, Frobenius norms
    underflow   share of the values other than zero that became zero
    saturation  share of the values beyond what their block can hold: 6 times its scales (with two terms: of both)
    amax        largest magnitude
    scales      smallest and largest E4M3 block scale, between 2**-9 and 448, of blocks that are not zero

A layer that does not quantise a tensor (nf4 and bf16 compute with unquantised inputs and gradients) gets the numbers that one
NVFP4 term would have, marked ``used=False``.

Nothing about the training changes: hooks look at tensors that are there anyway, no random number is drawn, all sums are taken
beside the graph (in FP32, added up in FP64). A measured step takes the memory of one layer's gate and up in addition, and runs
without CUDA graphs and ``torch.compile``; the steps between measured ones cost nothing, since there are no hooks then.

Activation checkpointing runs forwards twice; the second one, within backward, is not counted. Padding is counted.
"""

from __future__ import annotations

import heapq
import math
import re
import statistics
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, TrainerCallback

from .statistics_hooks import NUMBERS, SITES, Measurement, TensorStatistics

PERCENT = NUMBERS[:3]
TITLES = {"weight": "weight", "input": "input activation", "gradient": "incoming gradient"}


@dataclass(frozen=True)
class Statistics:
    """Of the frozen linears of a model: dotted name -> ``"weight"``, ``"input"``, ``"gradient"`` -> numbers; those that were
    measured."""

    layers: dict[str, dict[str, TensorStatistics]]

    def of(self, site: str, number: str = "error") -> dict[str, float]:
        """Name -> one number of one kind of tensor, where it is known."""
        numbers = {name: getattr(sites[site], number) for name, sites in self.layers.items() if site in sites}
        return {name: value for name, value in numbers.items() if value is not None}

    def mean(self, site: str, number: str = "error") -> float | None:
        """Over all layers, every layer counting the same."""
        return statistics.fmean(numbers.values()) if (numbers := self.of(site, number)) else None

    def worst(self, count: int = 10, by: str = "error", site: str | None = None) -> list[tuple[str, str, TensorStatistics]]:
        """(layer, kind of tensor, numbers) of the largest ``by``; NaN is the largest of all."""
        rows = [(n, kind, s) for n, sites in self.layers.items() for kind, s in sites.items() if site in (None, kind)]
        key = lambda row: (math.isnan(value := getattr(row[2], by)), value)
        return heapq.nlargest(count, (row for row in rows if getattr(row[2], by) is not None), key=key)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        means = {site: {n: self.mean(site, n) for n in PERCENT} for site in SITES if self.of(site, "amax")}
        return {"means": means, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} frozen linears"]
        for site in (s for s in SITES if self.of(s, "amax")):
            words = [f"{n} {100 * m:.2f} %" for n in PERCENT if (m := self.mean(site, n)) is not None]
            worst = [f"; worst: {name}" for name, _, _ in self.worst(1, site=site)]
            lines.append(f"{site}: {', '.join(words) or 'unknown'}{''.join(worst)}")
        return "\n".join(lines)

    def png(self, path: str | Path | BinaryIO, number: str = "error") -> None:
        """Heat maps (needs matplotlib): a panel for each kind of tensor, layers down, linears across.

        Raises:
            ValueError: nothing to draw.
        """
        from matplotlib.figure import Figure

        if number not in PERCENT:
            raise ValueError(f"a heat map shows one of {', '.join(PERCENT)}, got {number!r}")
        panels = [(site, *self.grid(site, number)) for site in SITES if self.of(site, number)]
        if not panels:
            raise ValueError(f"nothing was measured that has {number}")
        height = max(3.0, 1.8 + 0.26 * max(len(rows) for _, rows, _, _ in panels))
        figure = Figure(figsize=(1.2 + 3.6 * len(panels), height), layout="constrained")
        for axes, (site, rows, columns, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            image = axes.imshow([[100 * v for v in row] for row in values], aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes, format="%.3g").ax.tick_params(labelsize=8)
            axes.set_xticks(range(len(columns)), [c.removesuffix("_proj") for c in columns], rotation=45, ha="right", fontsize=8)
            step = -(-len(rows) // 40)
            axes.set_yticks(range(0, len(rows), step), [short(row) for row in rows[::step]], fontsize=8)
            axes.set_title(f"{TITLES[site]}: {number}, %", fontsize=10)
        figure.savefig(path, dpi=130)

    def grid(self, site: str, number: str) -> tuple[list[str], list[str], list[list[float]]]:
        """(rows, columns, values, NaN where there is no such linear) of one heat map. In the order of the model."""
        values = {place(name): value for name, value in self.of(site, number).items()}
        rows, columns = list(dict.fromkeys(r for r, _ in values)), list(dict.fromkeys(c for _, c in values))
        return rows, columns, [[values.get((r, c), float("nan")) for c in columns] for r in rows]


def short(name: str) -> str:
    """A layer's name without what all of them begin with."""
    return re.sub(r"^(model\.)*(language_model\.|text_model\.)?(layers\.)?", "", name)


def place(name: str) -> tuple[str, str]:
    """(row, column) of a linear in the heat map: its layer (all before it, where none has a number), and its last name."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    above, _, last = name.rpartition(".")
    return numbered[0] if numbered else above, last


def tensor_statistics(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor] | Tensor] = (),
    *,
    weights: Mapping[str, Tensor] | nn.Module | None = None,
    rows: int | None = None,
    sites: Sequence[str] = SITES,
) -> Statistics:
    """Measure the frozen linears of a model.

    Args:
        model: frozen; for gradients, with adapters (something has to be trained).
        batches: what the model is called with: a dictionary, or token ids. Every one runs forward and backward; the gradients of
            the adapters, and the states of random generators, are afterwards what they were. Without ``labels``, the loss is that
            of predicting the tokens themselves. None at all: only weights are measured.
        weights: the dense model, or its state dict: without, a packed weight's error is not known. (A model is frozen in place:
            take ``{name: p.detach() for name, p in model.named_parameters()}`` before.)
        rows: at most so many tokens of every tensor, evenly spaced: faster.
        sites: which of ``"weight"``, ``"input"``, ``"gradient"``.

    Raises:
        ValueError: the model has no frozen linears, or returns no loss.
    """
    weights = weights.state_dict() if isinstance(weights, nn.Module) else weights
    watching = Measurement(model, rows, sites)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = next(model.parameters()).device
    before = [p.grad for p in trained]
    try:
        for batch in batches:
            for p in trained:
                p.grad = None
            with watching, torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                _step(model, batch, device, "gradient" in sites and bool(trained))
    finally:
        for p, grad in zip(trained, before):
            p.grad = grad
    return Statistics(watching.result(weights, "weight" in sites))


def _step(model: nn.Module, batch: Mapping[str, Tensor] | Tensor, device: torch.device, backward: bool) -> None:
    """One forward, and if asked for one backward."""
    inputs = BatchEncoding({"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)).to(device).data
    if backward and "labels" not in inputs and "input_ids" in inputs:
        labels, mask = inputs["input_ids"], inputs.get("attention_mask")
        inputs["labels"] = labels if mask is None else labels.masked_fill(mask == 0, -100)
    loss = getattr(model(**inputs), "loss", None)
    if backward and loss is None:
        raise ValueError("the model returns no loss: give batches with labels, or leave 'gradient' out of sites")
    if backward:
        loss.backward()


class NVFP4StatisticsCallback(TrainerCallback):
    """Measures inputs and gradients every so many steps and logs, with ``Trainer.log``, means over all layers and the worst
    layer's error, as ``nvfp4/input_error``, ``nvfp4/input_error_worst``, ``nvfp4/gradient_underflow`` and so on, and the
    gradients' ``amax``. (Frozen weights do not change.)

    Args:
        trainer: that the callback belongs to.
        every: steps from one measured step to the next, the first included.
        rows: tokens of a tensor that are looked at.
        sites: of ``"input"`` and ``"gradient"`` those to look at.
    """

    def __init__(self, trainer: Any, every: int = 100, rows: int | None = 1024, sites: Sequence[str] = ("input", "gradient")):
        if every < 1:
            raise ValueError(f"every must be a positive number of steps, got {every}")
        self._trainer = weakref.ref(trainer)  # which owns this callback
        self.every, self.rows, self.sites = every, rows, tuple(sites)
        self.latest: Statistics | None = None  # of the last measured step
        self._running: Measurement | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        self.on_train_end()
        if state.global_step % self.every == 0:
            self._running = Measurement(model, self.rows, self.sites).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (watched := self._running) is None:
            return
        self.on_train_end()
        self.latest = latest = Statistics(watched.result(stored=False))
        numbers = {f"{site}_{number}": latest.mean(site, number) for site in self.sites for number in PERCENT}
        numbers |= {f"{site}_error_worst": row.error for site in self.sites for _, _, row in latest.worst(1, site=site)}
        numbers["gradient_amax"] = max(latest.of("gradient", "amax").values(), default=None)
        if (trainer := self._trainer()) is not None:
            asked = control.should_log
            trainer.log({f"nvfp4/{name}": value for name, value in numbers.items() if value is not None})
            control.should_log = asked  # a line counts as the one that was asked for, and the step's loss would have none

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._running is not None:
            self._running.__exit__()
        self._running = None
