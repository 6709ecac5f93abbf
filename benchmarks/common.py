"""What the benchmarks share: arguments, timing and memory protocol, and the files they write. PROTOCOL.md says why.

Everything runs without a GPU as well (for tests): times come from a host clock then, and what only a GPU can tell is None.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import smollm2_reviews  # noqa: E402, F401  the demo's model and data, for whoever imports this module

GB = 1e9
RESULTS = Path(__file__).resolve().parent / "results"

# ---------------------------------------------------------------------------------------------- arguments, device


def device_of(name: str) -> torch.device:
    """The device, with an index: statistics of memory are of one GPU."""
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def parser(doc: str) -> argparse.ArgumentParser:
    """With ``--device`` and ``--out``; the help is the script's docstring."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=device_of)
    found.add_argument("--out", type=Path, default=RESULTS, help="folder of the files written (%(default)s)")
    return found


def text_parser(doc: str) -> argparse.ArgumentParser:
    """Of the scripts that calibrate or score SmolLM2 on texts: see :func:`parse_texts`."""
    found = parser(doc)
    found.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    found.add_argument("--batch", type=int, default=8, help="sequences at a time; 1 needs least memory")
    found.add_argument("--dtype", choices=["fp32", "bf16"], help="default: fp32 on a CPU, bf16 on a GPU")
    found.add_argument("--layers", type=int, help="keep so many layers (to try the script)")
    found.add_argument("--text", type=Path, nargs="*", help=".txt or .jsonl files, instead of the default ones")
    return found


def parse_texts(found: argparse.ArgumentParser) -> argparse.Namespace:
    args = found.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device.type == "cuda" else "fp32")
    if args.device.type == "cpu":
        torch.set_num_threads(1)
    return args


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        print(f"out of memory: {str(error)[:300]}", file=sys.stderr, flush=True)
    release(device)
    return False


def _out_of_memory(error: BaseException | None) -> bool:
    """Also behind another error (a failed capture ends with one of its own) and from libraries that raise their own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or re.search(r"out of memory|ALLOC_FAILED", str(error)):
            return True
        error = error.__context__
    return False


def total_memory(device: torch.device) -> int:
    """Bytes of the card; without a GPU more than anything takes."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 60


@contextmanager
def capped(gib: float, device: torch.device, context: int = 0) -> Iterator[None]:
    """So much memory for PyTorch's allocator and a CUDA context of so many bytes. Without a GPU nothing happens."""
    if device.type != "cuda":
        yield
        return
    share = (gib * 2**30 - context) / total_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


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


class LayerWatch:
    """What autograd keeps while a model runs forward, by decoder layer: unique storages that are not parameters or buffers."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device):
        self.layers, self.device = layers, device
        self.seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.kept: dict[int, int] = defaultdict(int)  # layer (-1: outside of all layers) -> bytes
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

        return hook

    def _leave(self, module, args, output) -> None:
        self.current = -1

    def run(self, forward: Callable[[], Tensor]) -> tuple[dict[int, int], int]:
        """(bytes by layer, allocator after minus before)."""
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
        return dict(self.kept), after - before


# ---------------------------------------------------------------------------------------------- output


def table(rows: list, columns: dict[str, Callable[[Any], Any]]) -> str:
    """Rows as aligned text. A missing value prints as a dash, a column without values not at all; no columns, no table."""

    def cell(row: Any, column: Callable[[Any], Any]) -> str:
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


def head(args: argparse.Namespace) -> dict[str, dict]:
    """What a result file begins with."""
    plain = (int, float, str, bool, type(None))
    settings = {key: value if isinstance(value, plain) else str(value) for key, value in vars(args).items() if key != "out"}
    return {"environment": environment(), "settings": settings}


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_report(path: Path, content: dict, text: str) -> None:
    """``path.json``, and the Markdown ``text`` in ``path.md`` and on the terminal."""
    write_json(path.with_suffix(".json"), content)
    path.with_suffix(".md").write_text(text + "\n")
    print(text)


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def write(args: argparse.Namespace, label: str, rows: list[dict]) -> None:
    """``label.json`` with everything, ``label.csv`` with one line per case, in the folder ``args.out``."""
    content = head(args)
    write_json(args.out / f"{label}.json", {**content, "rows": rows})
    flat = []
    for row in rows:
        nested = {f"device_ms {key}": value for key, value in row.get("device_ms", {}).items()}
        plain = {k: v for k, v in row.items() if not isinstance(v, dict | list) and k != "traceback"}
        flat.append(plain | nested | content["environment"])
    write_csv(args.out / f"{label}.csv", flat)
