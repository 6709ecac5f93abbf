"""The passes of a calibration over one list of layers: collect, solve, freeze, run, layer after layer.

What a pass collects and how a layer is solved is :mod:`peft_nvfp4.calibration.layer`; here is their order, and what waits where:
hidden states on the CPU, one layer at a time on the GPU, finished layers in the :class:`~.store.Store`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import tqdm  # honours disable_progress_bar()

from ..quantization.groups import input_terms
from .data import Batch, token_mask
from .layer import LinearGroup, choose_terms, freeze_group, group_errors, run_dense, solve_backward, survey_layer
from .moments import Moments, gradient_moments, last_gradient, layer_gradients, rows
from .store import Store, install, load_layer, stored_tensors
from .structure import capture, linear_groups, on_device


class Run:
    """Calibration of one list of layers, with :class:`~.run.CalibrationOptions`."""

    def __init__(
        self, model: nn.Module, name: str, planned: list[str], data: list[Batch], options: Any, device: torch.device, store: Store
    ):
        self.model, self.name, self.planned, self.data = model, name, planned, data
        self.options, self.device, self.store = options, device, store
        self.rows: dict[str, dict] = {}  # dotted name of a layer -> what the report says of it
        self.survey: list[dict] = []  # the measured groups, where terms are chosen under a budget
        self.stack = capture(model, name, data, device)
        self.hidden = self.stack.hidden  # of every batch, the input of the layer that is next
        self.inputs: list[list[Tensor]] = []  # of every layer, for the backward passes
        self.masks = [token_mask(batch) for batch in data]
        self.terms = {n: input_terms(n, options.accuracy) for n in planned}
        if options.method == "gptq":
            self._check_tokens()

    def _check_tokens(self) -> None:
        """With few tokens, GPTQ makes up for errors along directions that are chance. On a correlated Gaussian layer one token
        per input leaves the W4A16 error at 4.5 %, four at 3.7, 64 at 3.5 (rounding to nearest: 9.4); with white inputs it may end
        above rounding to nearest."""
        tokens = sum(h.numel() // h.shape[-1] if m is None else int(m.sum()) for h, m in zip(self.hidden, self.masks))
        widest = max(self.model.get_submodule(n).in_features for n in self.planned)
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

    def _bar(self, what: str, progress: bool, step: int = 1) -> Iterable[int]:
        order = range(len(self.stack.layers))[::step]
        return tqdm(order, desc=f"{what} {self.name}", unit="layer", disable=not progress)

    # -- terms

    def _choose_terms(self, progress: bool) -> None:
        """Two terms where a survey of the dense model says so; the survey is kept for a resumed run."""
        key = f"survey {self.name}"
        stored = self.store.manifest.get(key)
        if stored is None:
            surveys, hidden = [], [h.to(self.device) for h in self.hidden[:2]]
            for index in self._bar("Surveying", progress):
                with on_device(self.stack.layers[index], self.device), torch.no_grad():
                    surveys += survey_layer(self.stack, index, self._groups(index, hidden), hidden, f"{self.name}.{index}")
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

    def _group(self, index: int, names: list[str]) -> LinearGroup:
        terms = max(self.terms[f"{self.name}.{index}.{n}"] for n in names)
        return LinearGroup(names, [self.stack.layers[index].get_submodule(n) for n in names], terms)

    def _groups(self, index: int, hidden: list[Tensor]) -> list[LinearGroup]:
        """The groups of a layer as the first batch shows them, and further ones while there are linears that none has reached
        (experts of a router, a branch for images)."""
        left, groups = self._names(index), []
        for batch, states in enumerate(hidden):
            if not left:
                break
            for names in linear_groups(self.stack, index, states.to(self.device), left, batch):
                groups.append(self._group(index, names))
                left = [n for n in left if n not in names]
        return groups

    def _solve(self, layer: nn.Module, index: int, name: str) -> tuple[dict, dict[str, Tensor]]:
        """(the row of the report, the tensors to be kept)."""
        options, groups = self.options, self._groups(index, self.hidden)
        reached = {n for group in groups for n in group.names}
        missed = [n for n in self._names(index) if n not in reached]
        groups += [self._group(index, [n]) for n in missed]
        row: dict[str, Any] = {"linears": {}, "sites": [], "not_reached": missed}
        tensors: dict[str, Tensor] = {}
        if options.offset and any(group.terms == 1 for group in groups):
            self._offsets(index, groups)
        if groups:
            self._collect(index, groups)
        for group in groups:
            frozen = freeze_group(layer, group, options.weight_layouts, options.gptq if options.method == "gptq" else None, name)
            errors = group_errors(group, frozen) if options.report_tokens else {}
            row["sites"].append(group.names)
            group.moments = group.sample = None
            for n, linear in frozen.items():
                row["linears"][n] = {"terms": group.terms, **errors.get(n, {})}
                tensors |= stored_tensors(f"{name}.{n}", linear)
        return row, tensors

    def _visit(self, index: int, groups: list[LinearGroup], visit: Callable) -> None:
        """Run the dense layer on every batch: ``visit(i, group, x, values, mask, held_out)`` sees batch i at each of its groups,
        with the masks that fit x."""
        for i, hidden in enumerate(self.hidden):
            hidden = hidden.to(self.device)
            masks = self._split(i, hidden)

            def look(group: LinearGroup, x: Tensor, values: Tensor) -> None:
                visit(i, group, x, values, *(_fitting(mask, x) for mask in masks))

            run_dense(groups, lambda: self.stack.run(index, i, hidden), look)

    def _collect(self, index: int, groups: list[LinearGroup]) -> None:
        """Moments and samples of the layer's groups."""
        options = self.options

        def visit(i: int, group: LinearGroup, x: Tensor, values: Tensor, mask: Tensor | None, held_out: Tensor | None) -> None:
            if options.method == "gptq":
                group.moments = group.moments or Moments(x.shape[-1], self.device, cross=options.gptq.asymmetric)
                group.moments.add(values, x, mask)
            if i + 1 == len(self.hidden) and options.report_tokens:
                sample = rows(x, held_out)
                group.sample = sample[:: max(1, -(-sample.shape[0] // options.report_tokens))].clone()

        self._visit(index, groups, visit)

    def _offsets(self, index: int, groups: list[LinearGroup]) -> None:
        """Mean inputs of the groups with one term."""
        totals: dict[int, tuple[Tensor, int]] = {}  # of a group: sum over tokens, and their number

        def visit(i: int, group: LinearGroup, x: Tensor, values: Tensor, mask: Tensor | None, held_out: Tensor | None) -> None:
            if group.terms == 1:
                counted = rows(x, mask)
                total, count = totals.get(id(group), (0, 0))
                totals[id(group)] = total + counted.double().sum(0), count + counted.shape[0]

        self._visit(index, groups, visit)
        for group in groups:
            total, count = totals.get(id(group), (0, 0))
            group.offset = (total / count).float() if count else None

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
        batches = zip(self.data[: self.options.backward_batches], self.hidden)
        with torch.no_grad():
            grads = [last_gradient(self.model, self.stack, batch, h, self.device).cpu() for batch, h in batches]
        solver = replace(self.options.gptq, asymmetric=False)
        for index in self._bar("Backward layouts of", progress, step=-1):
            name = f"{self.name}.{index}"
            backward = partial(layer_gradients, self.stack, index, self.inputs[index], grads, self.device)
            with on_device(self.stack.layers[index], self.device) as layer:
                row = self.rows[name]
                entry = self.store.manifest["backward"].get(name)
                if entry is None:
                    reached = [n for names in row["sites"] for n in names if n not in row["not_reached"]]
                    linears = {n: layer.get_submodule(n) for n in reached}
                    errors, tensors = solve_backward(linears, gradient_moments(linears, backward), solver, name)
                    entry = {"linears": errors}
                    self.store.save(name, tensors, entry, "backward")
                for n, errors in entry["linears"].items():
                    row["linears"][n] = {**row["linears"][n], **errors}
                grads = backward()


def _fitting(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The tokens' mask, if x has these tokens in this order."""
    return mask if mask is not None and mask.numel() == x.numel() // x.shape[-1] else None
