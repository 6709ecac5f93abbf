"""The passes of a calibration over one list of layers: collect, solve, freeze, run, layer after layer.

What a pass collects and how a layer is solved is :mod:`peft_nvfp4.calibration.layer`; here is their order, and what waits where:
hidden states on the CPU, one layer at a time on the GPU, finished layers in the :class:`~.store.Store`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..nn.frozen_linear import FrozenOptions
from ..quantization.groups import input_terms
from .data import Batch, token_mask
from .layer import SiteInput, choose_terms, freeze_site, run_dense, site_errors, solve_backward, survey_layer
from .moments import BackwardPass, Moments, last_gradient, rows
from .store import Store, install, load_layer, stored_tensors
from .structure import capture, on_device, sites


class Run:
    """Calibration of one list of layers.

    Attributes:
        rows: dotted name of a layer -> what the report says of it.
        survey: the measured sites, where terms are chosen under a budget.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        planned: list[str],
        data: list[Batch],
        options: Any,  # CalibrationOptions
        device: torch.device,
        store: Store,
    ):
        self.model, self.data = model, data
        self.name, self.planned, self.options, self.device, self.store = name, planned, options, device, store
        self.rows: dict[str, dict] = {}
        self.survey: list[dict] = []
        self.stack = capture(model, name, data, device)
        self.hidden, self.stack.hidden = self.stack.hidden, []
        self.inputs: list[list[Tensor]] = []  # of every layer, for the backward passes
        self.masks = [token_mask(batch) for batch in data]
        if options.method == "gptq":
            self._check_tokens(model)
        self.terms = {n: input_terms(n, options.accuracy) for n in planned}

    def _check_tokens(self, model: nn.Module) -> None:
        """With few tokens, GPTQ makes up for errors along directions that are chance. On a correlated Gaussian layer one token
        per input leaves the W4A16 error at 4.5 %, four at 3.7, 64 at 3.5 (rounding to nearest: 9.4); with white inputs it may end
        above rounding to nearest."""
        tokens = sum(h.numel() // h.shape[-1] if m is None else int(m.sum()) for h, m in zip(self.hidden, self.masks))
        widest = max(model.get_submodule(n).in_features for n in self.planned)
        if tokens < widest:
            warnings.warn(
                f"{tokens} tokens of calibration for linears with up to {widest} inputs: with fewer tokens than inputs GPTQ fits "
                "noise. Give more data, or longer sequences",
                stacklevel=4,
            )

    def run(self, progress: bool) -> None:
        training = [layer.training for layer in self.stack.layers]
        self.stack.layers.eval()
        try:
            if self.options.budget is not None:
                self._choose_terms(progress)
            for index in self._bar("Calibrating", progress):
                self.rows[f"{self.name}.{index}"] = self._layer(index)
            if self.options.backward == "gptq":
                self._backward(progress)
        finally:
            for layer, flag in zip(self.stack.layers, training):
                layer.train(flag)

    def _bar(self, what: str, progress: bool, backwards: bool = False) -> tqdm:
        order = range(len(self.stack.layers))
        return tqdm(list(order[::-1] if backwards else order), desc=f"{what} {self.name}", unit="layer", disable=not progress)

    # -- terms

    def _choose_terms(self, progress: bool) -> None:
        """Two terms where a survey of the dense model says so; the survey is kept for a resumed run."""
        key = f"survey {self.name}"
        stored = self.store.manifest.get(key)
        if stored is None:
            surveys, hidden = [], [h.to(self.device) for h in self.hidden[:2]]
            for index in self._bar("Surveying", progress):
                with on_device(self.stack.layers[index], self.device), torch.no_grad():
                    surveys += survey_layer(self.stack, index, self._sites(index, hidden), hidden, f"{self.name}.{index}")
                    hidden = [self.stack.run(index, i, h) for i, h in enumerate(hidden)]
            stored = {"terms": choose_terms(surveys, self.options.budget), "sites": [asdict(s) for s in surveys]}
            self.store.manifest[key] = stored
            self.store.write()
        self.terms.update(stored["terms"])
        self.survey = stored["sites"]

    # -- one layer

    def _layer(self, index: int) -> dict:
        """Freeze one layer and run it; the row of the report."""
        start, name = time.perf_counter(), f"{self.name}.{index}"
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        finished = self.store.manifest["layers"].get(name)
        with on_device(self.stack.layers[index], self.device) as layer:
            if finished:
                tensors = load_layer(self.store.folder, self.store.manifest, name)
                install(layer, name, finished, tensors, self.options.weight_layouts)
                row = {key: value for key, value in finished.items() if key != "sha256"}
            else:
                row, tensors = self._solve(layer, index, name)
            if self.options.backward == "gptq":
                self.inputs.append(self.hidden[: self.options.backward_batches])
            with torch.no_grad():
                for i, hidden in enumerate(self.hidden):  # in place: they are kept once
                    self.hidden[i] = self.stack.run(index, i, hidden.to(self.device)).cpu()
        if not finished:
            peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
            row.update(seconds=round(time.perf_counter() - start, 2), peak_gib=round(peak / 2**30, 3))
            self.store.save(name, tensors, row)
        return row

    def _names(self, index: int) -> list[str]:
        prefix = f"{self.name}.{index}."
        return [n.removeprefix(prefix) for n in self.planned if n.startswith(prefix)]

    def _sites(self, index: int, hidden: list[Tensor]) -> list[SiteInput]:
        """The sites of a layer as the first batch shows them, and further ones while there are linears that none has reached
        (experts of a router, a branch for images)."""
        layer, left = self.stack.layers[index], self._names(index)
        reached = []
        for batch, states in enumerate(hidden):
            if not left:
                break
            for names in sites(self.stack, index, states.to(self.device), left, batch):
                terms = max(self.terms[f"{self.name}.{index}.{n}"] for n in names)
                reached.append(SiteInput(names, [layer.get_submodule(n) for n in names], terms))
                left = [n for n in left if n not in names]
        return reached

    def _solve(self, layer: nn.Module, index: int, name: str) -> tuple[dict, dict[str, Tensor]]:
        """(the row of the report, the tensors to be kept)."""
        group = self._sites(index, self.hidden)
        reached = {n for site in group for n in site.names}
        missed = [n for n in self._names(index) if n not in reached]
        group += [SiteInput([n], [layer.get_submodule(n)], self.terms[f"{name}.{n}"]) for n in missed]
        row: dict[str, Any] = {"linears": {}, "sites": [], "not_reached": missed}
        tensors: dict[str, Tensor] = {}
        if self.options.offset and any(site.terms == 1 for site in group):
            self._offsets(layer, index, group)
        if group:
            self._collect(layer, index, group)
        solver = self.options.gptq if self.options.method == "gptq" else None
        for site in group:
            options = FrozenOptions(self.options.weight_layouts, terms=site.terms)
            frozen = freeze_site(layer, site, options, solver, name)
            row["linears"] |= {n: {"terms": site.terms} for n in frozen}
            if self.options.report_tokens:
                row["linears"] |= site_errors(site, frozen)
            row["sites"].append(site.names)
            site.moments = site.sample = None
            for n, linear in frozen.items():
                tensors |= stored_tensors(f"{name}.{n}", linear)
        return row, tensors

    def _visit(self, layer: nn.Module, index: int, group: list[SiteInput], visit: Callable) -> None:
        """Run the dense layer on every batch: ``visit(i, site, x, values, mask, held_out)`` sees batch i at each of its sites,
        with the masks that fit x."""
        for i, hidden in enumerate(self.hidden):
            hidden = hidden.to(self.device)
            masks = self._split(i, hidden)

            def look(site: SiteInput, x: Tensor, values: Tensor) -> None:
                visit(i, site, x, values, *(_fitting(mask, x) for mask in masks))

            run_dense(layer, group, lambda: self.stack.run(index, i, hidden), look)

    def _collect(self, layer: nn.Module, index: int, group: list[SiteInput]) -> None:
        """Moments and samples of the layer's sites."""

        def visit(i: int, site: SiteInput, x: Tensor, values: Tensor, mask: Tensor | None, held_out: Tensor | None) -> None:
            if self.options.method == "gptq":
                site.moments = site.moments or Moments(site.k, self.device, cross=self.options.gptq.asymmetric)
                site.moments.add(values, x, mask)
            if i + 1 == len(self.hidden) and self.options.report_tokens:
                sample = rows(x, held_out)
                site.sample = sample[:: max(1, -(-sample.shape[0] // self.options.report_tokens))].clone()

        self._visit(layer, index, group, visit)

    def _offsets(self, layer: nn.Module, index: int, group: list[SiteInput]) -> None:
        """Mean inputs of the sites with one term."""
        sums: dict[int, Tensor] = {}
        counts: dict[int, int] = {}

        def visit(i: int, site: SiteInput, x: Tensor, values: Tensor, mask: Tensor | None, held_out: Tensor | None) -> None:
            if site.terms == 1:
                counted = rows(x, mask)
                sums[id(site)] = sums.get(id(site), 0) + counted.double().sum(0)
                counts[id(site)] = counts.get(id(site), 0) + counted.shape[0]

        self._visit(layer, index, group, visit)
        for site in group:
            if counts.get(id(site)):
                site.offset = (sums[id(site)] / counts[id(site)]).float()

    def _split(self, i: int, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(tokens that count, tokens held out for the errors): the last sequence, if there is more than one, is held out."""
        mask = self.masks[i]
        mask = None if mask is None or mask.shape != hidden.shape[:-1] else mask.to(self.device)
        if i + 1 < len(self.hidden) or hidden.ndim != 3 or (i == 0 and hidden.shape[0] == 1):
            return mask, mask
        everything = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=self.device) if mask is None else mask
        last = torch.zeros_like(everything)
        last[-1] = True
        return everything & ~last, everything & last

    # -- backward layouts

    def _backward(self, progress: bool) -> None:
        """W_b of every layer, from the last to the first."""
        with torch.no_grad():
            batches = list(zip(self.data, self.hidden))[: self.options.backward_batches]
            grads = [last_gradient(self.model, self.stack, batch, h, self.device).cpu() for batch, h in batches]
        steps = BackwardPass(self.stack, self.inputs, grads, self.device)
        solver = replace(self.options.gptq, asymmetric=False)
        for index in self._bar("Backward layouts of", progress, backwards=True):
            name = f"{self.name}.{index}"
            with on_device(self.stack.layers[index], self.device) as layer:
                row = self.rows[name]
                entry = self.store.manifest["backward"].get(name)
                if entry is None:
                    reached = [n for group in row["sites"] for n in group if n not in row["not_reached"]]
                    linears = {n: layer.get_submodule(n) for n in reached}
                    errors, tensors = solve_backward(linears, steps.collect(index, linears), solver, name)
                    entry = {"linears": errors}
                    self.store.save(name, tensors, entry, "backward")
                for n, errors in entry["linears"].items():
                    row["linears"][n] = {**row["linears"][n], **errors}
                steps.propagate(index)


def _fitting(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The tokens' mask, if x has these tokens in this order."""
    return mask if mask is not None and mask.numel() == x.numel() // x.shape[-1] else None
