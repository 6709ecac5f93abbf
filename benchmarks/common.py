"""Timing, memory and profiling protocol shared by the benchmarks; PROTOCOL.md says why each choice was made.

Everything runs without a GPU as well (for tests): times come from a host clock then, and what only a GPU can tell is None.
"""

from __future__ import annotations

import csv
import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import smollm2_reviews  # noqa: E402, F401  the demo's model and data, for whoever imports this module

GB = 1e9

# ---------------------------------------------------------------------------------------------- device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes in live tensors; 0 without a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Give back everything that nobody refers to, cuBLAS workspaces included: the next case starts like the first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def guarded(row: dict, run: Callable[[], object]) -> None:
    """Run; an exception becomes part of the row, so that one case's failure does not cost the others' results."""
    try:
        run()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        row["traceback"] = traceback.format_exc()


def fits(run: Callable[[], object], device: torch.device) -> bool:
    """Whether ``run`` ends without running out of memory. Cleans up after it did, outside of the except block: the exception's
    traceback keeps every tensor of the failed step alive."""
    try:
        run()
        synchronize(device)
        return True
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
    release(device)
    return False


def _out_of_memory(error: BaseException | None) -> bool:
    """Also behind another error (a failed capture ends with one of its own) and from libraries that raise their own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or re.search(r"out of memory|ALLOC_FAILED", str(error)):
            return True
        error = error.__context__
    return False


def largest_fitting(try_batch: Callable[[int], bool], limit: int) -> int:
    """Largest batch for which ``try_batch`` is true, by doubling and bisection; 0 if one row is too much."""
    good, bad = 0, 1
    while bad <= limit and try_batch(bad):
        good, bad = bad, bad * 2
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if try_batch(middle) else (good, middle)
    return good


# ---------------------------------------------------------------------------------------------- time


def burst(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``steps`` steps in a row, after an untimed one, with no synchronisation in between: as in
    training, the host may run ahead of the device."""
    step()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in zip(marks, marks[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def interleaved(steps: dict[str, Callable], rounds: int, length: int, device: torch.device) -> dict[str, dict | Exception]:
    """Bursts of every case in turn, ``rounds`` times: drift of clocks and temperature hits all of them alike. A case that fails
    gets its exception and is left out from then on."""
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    failed: dict[str, Exception] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            if name not in failed:
                try:
                    times[name].append(burst(step, length, device))
                except Exception as error:  # reported in the case's row
                    failed[name] = error
    return {name: failed[name] if name in failed else summary(times[name]) for name in steps}


def summary(bursts: list[list[float]]) -> dict[str, float]:
    """Median and minimum over all steps; spread: how far the medians of the rounds lie apart."""
    flat, medians = [t for b in bursts for t in b], [statistics.median(b) for b in bursts]
    spread = max(medians) - min(medians)
    return {"step_ms": statistics.median(flat), "step_min_ms": min(flat), "spread_ms": spread, "timed_steps": len(flat)}


def speed(result: dict | Exception, tokens: int) -> dict[str, Any]:
    """A row's entries for what :func:`interleaved` found."""
    if isinstance(result, Exception):
        return {"error": f"while timing: {type(result).__name__}: {result}"}
    return result | {"tokens_per_s": 1e3 * tokens / result["step_ms"]}


def host_ms(step: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Milliseconds the host needs to issue one step to an idle device (least of some repeats). An upper bound where the device
    falls more than a thousand launches behind: then launching blocks."""
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        best = min(best, 1e3 * (time.perf_counter() - start))
    synchronize(device)
    return best


# ---------------------------------------------------------------------------------------------- memory


def peak_memory(run: Callable[[], object], device: torch.device, before: dict[str, int]) -> dict[str, int | None]:
    """Peak bytes allocated and reserved during ``run``, over what there was before the case was built (other cases' models)."""
    if device.type != "cuda":
        run()
        return {"peak_allocated": None, "peak_reserved": None}
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device) - before["allocated"],
        "peak_reserved": torch.cuda.max_memory_reserved(device) - before["reserved"],
    }


def memory_now(device: torch.device) -> dict[str, int]:
    release(device)
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return {"allocated": allocated(device), "reserved": reserved}


def owned_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Any]) -> int:
    """Bytes of a case's parameters, buffers, optimizer states and inputs. What it holds besides sits in some cache."""
    states = (t for state in optimizer.state.values() for t in state.values())
    storages = {}
    for t in (*model.parameters(), *model.buffers(), *states, *inputs):
        if isinstance(t, Tensor) and t.device.type == "cuda":
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(storages.values())


class _LayerWatch:
    """What autograd keeps while a model runs forward, by decoder layer: unique storages that are not parameters or buffers, and
    the allocator's reading at the entry of every layer."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device):
        self.layers, self.device = layers, device
        self.seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.kept: dict[int, int] = defaultdict(int)  # layer (-1: outside of all layers) -> bytes
        self.entries: list[int] = []
        self.current = -1

    def _pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.kept[self.current] += storage.nbytes()
        return t.detach()  # the same storage; t itself would close a reference cycle where it is its own node's output

    def _enter(self, index: int) -> Callable:
        def hook(module, args):
            self.current = index
            self.entries.append(allocated(self.device))

        return hook

    def _leave(self, module, args, output) -> None:
        self.current = -1

    def run(self, forward: Callable[[], Tensor]) -> tuple[dict[int, int], list[int], int]:
        """(bytes by layer, allocator at every layer's entry, allocator after minus before)."""
        handles = [layer.register_forward_pre_hook(self._enter(i)) for i, layer in enumerate(self.layers)]
        handles += [layer.register_forward_hook(self._leave) for layer in self.layers]
        before = allocated(self.device)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
                loss = forward()  # alive until the reading below
            after = allocated(self.device)
        finally:
            for handle in handles:
                handle.remove()
        del loss
        return dict(self.kept), self.entries, after - before


def saved_bytes(model, layers, forward_at: Callable[[int], Callable], seqs: tuple[int, int], batch: int, device) -> dict:
    """Bytes per token and layer that a forward keeps, as the difference of two sequence lengths (whatever does not grow with
    the tokens drops out): counted, by the allocator from layer to layer, by the allocator over the whole model."""
    runs = []
    for seq in seqs:
        forward = forward_at(seq)
        forward()  # buffers that a new shape needs once
        release(device)
        runs.append(_LayerWatch(model, layers, device).run(forward))
    (kept1, entry1, total1), (kept2, entry2, total2) = runs
    tokens = batch * (seqs[1] - seqs[0])
    inner = range(1, len(layers) - 1)  # the first also keeps the embedding's output, the last has no successor
    result = {"saved_counted": statistics.median((kept2.get(i, 0) - kept1.get(i, 0)) / tokens for i in inner)}
    result["saved_counted_whole"] = (sum(kept2.values()) - sum(kept1.values())) / tokens / len(layers)
    if device.type == "cuda":
        growth = [(entry2[i + 1] - entry2[i]) - (entry1[i + 1] - entry1[i]) for i in inner]
        result["saved_allocator"] = statistics.median(growth) / tokens
        result["saved_allocator_whole"] = (total2 - total1) / tokens / len(layers)
    return result


# ---------------------------------------------------------------------------------------------- output


def table(rows: list[dict], columns: dict[str, Callable[[dict], Any]]) -> str:
    """Rows as aligned text. A missing value prints as a dash, a column without values not at all; no columns, no table."""

    def cell(row: dict, column: Callable[[dict], Any]) -> str:
        try:
            value = column(row)
        except (KeyError, TypeError):
            value = None
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
        return "-" if value is None else str(value)

    lines = [list(columns)] + [[cell(row, column) for column in columns.values()] for row in rows]
    kept = [column for column in zip(*lines) if any(text != "-" for text in column[1:])]
    widths = [max(map(len, column)) for column in kept]
    aligned = [[f"{text:<{w}}" if text is line[0] else f"{text:>{w}}" for text, w in zip(line, widths)] for line in zip(*kept)]
    return "\n" + "\n".join(map("  ".join, aligned)) if len(kept) > 1 else ""


def liger_version() -> dict[str, str]:
    try:
        return {"liger_kernel": version("liger-kernel")}
    except PackageNotFoundError:
        return {"liger_kernel": "absent"}


def plot(rows: list[dict], path: Path) -> None:
    """Step time and peak memory of every case, side by side."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get("step_ms")]
    names = [f"{row['shape']} {row['case']}" for row in rows]
    colours = ["tab:green" if "nvfp4" in name else "tab:orange" if "qlora" in name else "tab:gray" for name in names]
    figure = Figure(figsize=(11, 1.2 + 0.32 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    values = {"step time (ms)": [row["step_ms"] for row in rows], "peak allocated (GB)": [_gigabytes(row) for row in rows]}
    for axes, (title, numbers) in zip(panels, values.items()):
        axes.bar_label(axes.barh(names, numbers, color=colours), fmt="{:.2f}", padding=3, fontsize=8)
        axes.set_title(title)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=130)


def _gigabytes(row: dict) -> float:
    return (row.get("peak_allocated") or 0) / GB


def write(out: Path, label: str, head: dict, rows: list[dict]) -> None:
    """``label.json`` with everything, ``label.csv`` with one line per case."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{label}.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    flat = []
    for row in rows:
        nested = {f"device_ms {key}": value for key, value in row.get("device_ms", {}).items()}
        flat.append({k: v for k, v in row.items() if not isinstance(v, dict | list) and k != "traceback"} | nested)
    names = list(dict.fromkeys(key for row in flat for key in row))
    with open(out / f"{label}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *head["environment"]])
        writer.writeheader()
        writer.writerows(row | head["environment"] for row in flat)
