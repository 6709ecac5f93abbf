"""The passes of a calibration over one list of layers: collect, solve, freeze, run, layer after layer.

What a pass collects and how a layer is solved is :mod:`peft_nvfp4.calibration.layer`; here is their order, and what waits where:
hidden states on the CPU or on disk, one layer at a time on the GPU, finished layers in the :class:`~.store.Store`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..nn.frozen_linear import FrozenOptions
from ..quantization.sites import input_terms
from .backward import BackwardPass, last_gradient, solve_layer
from .data import Batch, token_mask
from .gptq import GPTQOptions
from .hessian import Moments
from .layer import Reached, SiteInput, fitting, freeze_site, run_dense, site_errors
from .report import Report
from .store import Store, install, stored_tensors
from .structure import Stack, capture, sites
from .terms import as_rows, choose, survey_layer


class Hidden:
    """The hidden states of all batches, on the CPU or on disk."""

    def __init__(self, states: list[Tensor], folder: Path | None, name: str = "hidden"):
        self._folder, self._name = folder, name
        self._states: list[Tensor | None] = [None] * len(states)
        for i, state in enumerate(states):
            self[i] = state

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, i: int) -> Tensor:
        if self._folder is None:
            return self._states[i]
        return torch.load(self._folder / f"{self._name}_{i}.pt", weights_only=True)

    def __setitem__(self, i: int, state: Tensor) -> None:
        if self._folder is None:
            self._states[i] = state.cpu()
        else:
            torch.save(state.cpu(), self._folder / f"{self._name}_{i}.pt")


class Run:
    """Calibration of one list of layers."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        planned: list[str],
        data: list[Batch],
        options: Any,  # CalibrationOptions
        device: torch.device,
        store: Store | None,
        folder: Path | None,
    ):
        self.model, self.data = model, data
        self.name, self.planned, self.options, self.device, self.store = name, planned, options, device, store
        self.stack: Stack = capture(model, name, data, device)
        self.hidden = Hidden(self.stack.hidden, folder)
        self.inputs: list[Hidden] = []  # of every layer, for the backward passes
        self._folder = folder
        self.stack.hidden = []
        self.masks = [token_mask(batch) for batch in data]
        if options.method == "gptq":
            self._check_tokens(model)
        self.terms = {n: input_terms(n, options.accuracy) for n in planned}

    def _check_tokens(self, model: nn.Module) -> None:
        """With few tokens, GPTQ makes up for errors along directions that are chance. On a correlated Gaussian layer one token
        per input leaves the W4A16 error at 4.5 %, four at 3.7, 64 at 3.5 (rounding to nearest: 9.4); with white inputs it may end
        above rounding to nearest."""
        sizes = [self.hidden[i].shape for i in range(len(self.hidden))]
        tokens = sum(s.numel() // s[-1] if m is None else int(m.sum()) for s, m in zip(sizes, self.masks))
        widest = max(model.get_submodule(n).in_features for n in self.planned)
        if tokens < widest:
            warnings.warn(
                f"{tokens} tokens of calibration for linears with up to {widest} inputs: with fewer tokens than inputs GPTQ fits "
                "noise. Give more data, or longer sequences",
                stacklevel=4,
            )

    def run(self, report: Report, progress: bool) -> None:
        training = [layer.training for layer in self.stack.layers]
        self.stack.layers.eval()
        try:
            if self.options.budget is not None:
                self._choose_terms(report, progress)
            bar = tqdm(range(len(self.stack.layers)), desc=f"Calibrating {self.name}", unit="layer", disable=not progress)
            for index in bar:
                row = self._layer(index)
                report.layers[f"{self.name}.{index}"] = row
                bar.set_postfix_str(report.summary(row))
            if self.options.backward == "gptq":
                self._backward(report, progress)
        finally:
            for layer, flag in zip(self.stack.layers, training):
                layer.train(flag)

    # -- terms

    def _choose_terms(self, report: Report, progress: bool) -> None:
        """Two terms where a survey of the dense model says so; the survey is kept for a resumed run."""
        key = f"survey {self.name}"
        kept = self.store.manifest.get(key) if self.store else None
        if kept is None:
            surveys, hidden = [], [self.hidden[i].to(self.device) for i in range(min(2, len(self.hidden)))]
            for index in tqdm(range(len(self.stack.layers)), desc=f"Surveying {self.name}", unit="layer", disable=not progress):
                with self._on_device(index) as layer:
                    found = self._sites(index, hidden)
                    surveys += survey_layer(self.stack, index, found, hidden, f"{self.name}.{index}")
                    with torch.no_grad():
                        hidden = [self.stack.run(index, i, h) for i, h in enumerate(hidden)]
                    del layer
            kept = {"terms": choose(surveys, self.options.budget), "sites": as_rows(surveys)}
            if self.store:
                self.store.manifest[key] = kept
                self.store.write()
        self.terms.update(kept["terms"])
        report.survey[self.name] = kept["sites"]

    # -- one layer

    def _layer(self, index: int) -> dict:
        """Freeze one layer and run it; the row of the report."""
        start, name = time.perf_counter(), f"{self.name}.{index}"
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with self._on_device(index) as layer:
            done = self.store.finished(name) if self.store else None
            row = self._load(layer, name, done) if done else self._solve(layer, index, name)
            if self.options.backward == "gptq":
                kept = range(min(self.options.backward_batches, len(self.hidden)))
                self.inputs.append(Hidden([self.hidden[i] for i in kept], self._folder, f"input_{index}"))
            with torch.no_grad():
                for i in range(len(self.hidden)):
                    self.hidden[i] = self.stack.run(index, i, self.hidden[i].to(self.device))
        if not done:
            row.update(seconds=round(time.perf_counter() - start, 2), peak_gib=round(_peak(self.device), 3))
            if self.store:
                tensors = row.pop("tensors")
                self.store.save(name, tensors, row)
        row.pop("tensors", None)
        return row

    def _on_device(self, index: int) -> _OnDevice:
        return _OnDevice(self.stack.layers[index], self.device)

    def _names(self, index: int) -> list[str]:
        prefix = f"{self.name}.{index}."
        return [n.removeprefix(prefix) for n in self.planned if n.startswith(prefix)]

    def _sites(self, index: int, hidden: Hidden | list[Tensor]) -> list[SiteInput]:
        """The sites of a layer, found with the first batch, and with further ones while there are linears that none has reached
        (experts of a router, a branch for images)."""
        layer, left = self.stack.layers[index], self._names(index)
        found = []
        for batch in range(len(hidden)):
            if not left:
                break
            for names in sites(self.stack, index, hidden[batch].to(self.device), left, batch):
                terms = max(self.terms[f"{self.name}.{index}.{n}"] for n in names)
                found.append(SiteInput(names, [layer.get_submodule(n) for n in names], terms))
                left = [n for n in left if n not in names]
        return found

    def _solve(self, layer: nn.Module, index: int, name: str) -> dict:
        found = self._sites(index, self.hidden)
        reached = {n for site in found for n in site.names}
        missed = [n for n in self._names(index) if n not in reached]
        found += [SiteInput([n], [layer.get_submodule(n)], self.terms[f"{name}.{n}"]) for n in missed]
        row: dict[str, Any] = {"linears": {}, "tensors": {}, "sites": [], "not_reached": missed}
        if self.options.true_sequential:
            groups = [[site] for site in found]
        else:
            groups = [found]
        waiting = list(found)
        for group in groups:
            self._collect(layer, index, group, waiting, stop=len(groups) > 1)
            for site in group:
                self._freeze(layer, site, name, row)
                waiting.remove(site)
        return row

    def _freeze(self, layer: nn.Module, site: SiteInput, name: str, row: dict) -> None:
        options = FrozenOptions(self.options.weight_layouts, self.options.gradients, site.terms)
        solver = self.options.gptq if self.options.method == "gptq" else None
        frozen = freeze_site(layer, site, options, solver, name)
        if self.options.report_tokens:
            row["linears"].update(site_errors(site, frozen))
        else:
            row["linears"].update({n: {"terms": site.terms, "centred": site.centre is not None} for n in frozen})
        if self.store:
            for n, new in frozen.items():
                row["tensors"].update({k: t.cpu() for k, t in stored_tensors(f"{name}.{n}", new).items()})
        row["sites"].append(site.names)
        site.moments = site.sample = None

    def _collect(self, layer: nn.Module, index: int, group: list[SiteInput], waiting: list[SiteInput], stop: bool) -> None:
        """Centres, moments and samples of a group of sites; linears of the ``waiting`` ones are dense still."""
        if self.options.centre and any(site.terms == 1 for site in group):
            self._centres(layer, index, group, waiting, stop)
        wanted = {id(site) for site in group}
        for i in range(len(self.hidden)):
            hidden = self.hidden[i].to(self.device)
            mask, held_out = self._split(i, hidden)

            def take(site: SiteInput, x: Tensor, values: Tensor) -> None:
                if id(site) not in wanted:
                    return
                if site.moments is None and self.options.method == "gptq":
                    site.moments = Moments(site.k, self.device, cross=self.options.gptq.asymmetric)
                if site.moments is not None:
                    site.moments.add(values, x, fitting(mask, x))
                if i + 1 == len(self.hidden) and self.options.report_tokens:
                    site.sample = _sample(x, fitting(held_out, x), self.options.report_tokens)
                if stop:
                    raise Reached

            run_dense(layer, waiting, lambda: self.stack.run(index, i, hidden), take)

    def _centres(self, layer: nn.Module, index: int, group: list[SiteInput], waiting: list[SiteInput], stop: bool) -> None:
        """Mean input of the sites with one term."""
        wanted = {id(site) for site in group if site.terms == 1}
        sums: dict[int, Tensor] = {}
        counts: dict[int, int] = {}
        for i in range(len(self.hidden)):
            hidden = self.hidden[i].to(self.device)
            mask, _ = self._split(i, hidden)

            def take(site: SiteInput, x: Tensor, values: Tensor) -> None:
                if id(site) in wanted:
                    rows, its = x.reshape(-1, x.shape[-1]), fitting(mask, x)
                    rows = rows if its is None else rows[its.reshape(-1)]
                    sums[id(site)] = sums.get(id(site), 0) + rows.double().sum(0)
                    counts[id(site)] = counts.get(id(site), 0) + rows.shape[0]
                    if stop:
                        raise Reached

            run_dense(layer, waiting, lambda: self.stack.run(index, i, hidden), take)
        for site in group:
            if counts.get(id(site)):
                site.centre = (sums[id(site)] / counts[id(site)]).float()

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

    def _backward(self, report: Report, progress: bool) -> None:
        """W_b of every layer, from the last to the first."""
        with torch.no_grad():
            grads = [
                last_gradient(self.model, self.stack, self.data[i], self.hidden[i], self.device).cpu()
                for i in range(len(self.inputs[0]))
            ]
        steps = BackwardPass(self.stack, lambda index, i: self.inputs[index][i], grads, self.device)
        order = reversed(range(len(self.stack.layers)))
        for index in tqdm(list(order), desc=f"Backward layouts of {self.name}", unit="layer", disable=not progress):
            name = f"{self.name}.{index}"
            with self._on_device(index) as layer:
                row = report.layers[name]
                entry = self.store.finished(name, "backward") if self.store else None
                if entry is None:
                    linears = {n: layer.get_submodule(n) for group in row["sites"] for n in group}
                    linears = {n: linear for n, linear in linears.items() if n not in row["not_reached"]}
                    errors, tensors = solve_layer(linears, steps.collect(index, linears), self._solver(), name)
                    entry = {"linears": errors}
                    if self.store:
                        self.store.save(name, tensors, entry, "backward")
                for n, its in entry["linears"].items():
                    row["linears"][n] = {**row["linears"][n], **its}
                steps.propagate(index)

    def _solver(self) -> GPTQOptions:
        return replace(self.options.gptq, asymmetric=False)

    def _load(self, layer: nn.Module, name: str, entry: dict) -> dict:
        """Put a finished layer's linears in place."""
        install(layer, name, entry, self.store.tensors(name), self.options.weight_layouts, self.options.gradients)
        return {key: value for key, value in entry.items() if key != "file"}


class _OnDevice:
    """Within the context a layer is on a device; then where it was."""

    def __init__(self, layer: nn.Module, device: torch.device):
        self.layer, self.device = layer, device
        self.home = next(layer.parameters()).device

    def __enter__(self) -> nn.Module:
        return self.layer.to(self.device)

    def __exit__(self, *exc) -> None:
        self.layer.to(self.home)


def _sample(x: Tensor, held_out: Tensor | None, count: int) -> Tensor:
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows if held_out is None else rows[held_out.reshape(-1)]
    return rows[:: max(1, -(-rows.shape[0] // count))].clone()


def _peak(device: torch.device) -> float:
    """GiB: the GPU's peak during a layer, or what the process holds after it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30
