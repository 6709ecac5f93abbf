"""Memory of training steps, as the paper's Figures 1 and 4 and Tables 5, 9 and 10 have it: what it is made of, the peak over
batch and sequence length, the largest batch under a cap, checkpointing, and saved activations in 4 bits.

    python benchmarks/reproduce/memory.py            # one GPU, some two minutes; --seconds 140: no row is begun later
    python benchmarks/reproduce/memory.py --cases A  # these only; the rows of others stay as they are
    python benchmarks/reproduce/memory.py --largest  # keeps the file's rows, and adds the largest batches that it lacks
    python benchmarks/reproduce/memory.py --small    # a tiny model, on a CPU: does it run?

Llama shapes with random weights; models, loss and protocol are those of ``bench_train.py`` (PROTOCOL.md). Each model is built
once and stepped at each batch and length: a warm-up step, then the peak of ``max_memory_allocated`` over two more, beside what
the estimator says. What a step keeps for backward is the allocator's growth over a forward pass. Then caps on PyTorch's
allocator, and the largest batch of 1024 tokens a row below them, searched from where the measured peaks point to.

``-codes`` stands for HyC-LoRA: it compresses what autograd saves and leaves the forward pass as it is, and so does this package's
``activations="nvfp4"`` over BF16 or NF4 weights. It is not HyC-LoRA's code (which keeps 2 or 4 bits and outlier channels).

Writes ``results/reproduce/memory.json`` after every row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # in place of this folder, whose modules are a package's

import bench_train
import common
import measure_peaks
import torch
from bench_train import Case, Trainer
from environment import environment

from peft_nvfp4.memory import Settings, estimate

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reproduce"
CROSS = ((4, 1024), (4, 512), (8, 512), (4, 256), (4, 2048), (1, 1024), (16, 1024))
"""Batch x length: batch 4 over lengths, length 1024 over batches, and the two shapes of the paper's Table 10."""
SHORT = ((4, 1024), (4, 512), (8, 512))
CASES = {
    "bf16": CROSS,
    "nvfp4-paper": CROSS,
    "nvfp4": CROSS,
    "nvfp4-high": CROSS,
    "bf16-liger": CROSS,
    "qlora-liger": CROSS,
    "bf16-codes": CROSS,
    "bf16-ours": SHORT,
    "qlora": SHORT[:1],
    "qlora-ours": SHORT[:1],
    "qlora-codes": SHORT[:1],
    "nvfp4-paper-transient": SHORT[:1],
    "nvfp4-paper-recompute": SHORT[:1],
    "nvfp4-paper-recompute-once-graphs": SHORT[:1],
    "nvfp4-recompute-once-transient": SHORT[:1],
    "nvfp4-graphs": SHORT[:1],
    "bf16-ckpt": SHORT[:1],
    "bf16-liger-ckpt": SHORT[:1],
    "nvfp4-paper-ckpt": SHORT[:1],
    "nvfp4-ckpt": SHORT[:1],
}
CAPS = (16.0, 8.0, 12.0, 24.0)
CAPPED = {
    "bf16-liger": CAPS,
    "nvfp4-paper": CAPS,
    "nvfp4": CAPS,
    "nvfp4-high": CAPS,
    "qlora-liger": CAPS,
    "bf16": CAPS,
    "bf16-codes": CAPS,
    "nvfp4-paper-recompute-once-transient": CAPS,
    "nvfp4-paper-graphs": CAPS[:1],
}
CAPPED_SEQ, MOST = 1024, 96
LARGEST = "largest batch of"
SMALL = {
    "cases": {"bf16": ((1, 32), (2, 32)), "bf16-codes": ((1, 32),), "nvfp4-paper": ((1, 32),), "nvfp4-ckpt": ((1, 32),)},
    "capped": {"nvfp4-paper": (16.0,)},
    "seq": 32,
    "most": 2,
}


class Run:
    """One call: where it runs, what it has found, and whether there is time left to begin another row."""

    def __init__(self, args: argparse.Namespace, name: str, tables: tuple[str, ...]):
        warnings.filterwarnings("ignore", category=FutureWarning)
        self.args, self.path, self.began = args, args.out / f"{name}.json", time.perf_counter()
        self.device, self.shape = args.device, "tiny" if args.small else args.shape
        self.data = {
            "environment": environment() | common.liger_version(),
            "settings": {"shape": self.shape, "device": self.device.type, "small": args.small, "rank": bench_train.R},
            **{table: [] for table in tables},
            "not_run": [],
        }

    def keep(self, *tables: str, but: Container[str] = ()) -> None:
        """What the file has, ``but`` the rows of these cases; ``kept_from`` says of which commits."""
        before = json.loads(self.path.read_text())
        self.data["not_run"] = [what for what in before.get("not_run", []) if not any(case in what.split() for case in but)]
        for table in tables:
            self.data[table] = [row for row in before.get(table, []) if "error" not in row and row["case"] not in but]
        commits = [*before["settings"].get("kept_from", "").split(", "), before["environment"]["commit"]]
        self.data["settings"]["kept_from"] = ", ".join(dict.fromkeys(filter(None, commits)))

    def keep_others(self, *tables: str) -> None:
        """With ``--cases``: the rows of all others."""
        if self.args.cases and self.path.is_file():
            self.keep(*tables, but=self.args.cases)

    def over(self, what: str, share: float = 1.0) -> bool:
        """Whether the time, or this share of it, is up; what is therefore left out goes into the file."""
        if self.args.seconds and time.perf_counter() - self.began > share * self.args.seconds:
            self.data["not_run"].append(what)
            return True
        return False

    def save(self) -> None:
        self.data["seconds"] = time.perf_counter() - self.began
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def row(self, table: str, row: dict, fill: Callable[[], dict]) -> None:
        """Add ``row``, filled by ``fill`` or with the error that it ended in, and write the file."""
        self.data[table].append(row)
        common.guarded(row, lambda: row.update(fill()))
        row.pop("traceback", None)
        print(f"  {table} {row['case']} {row.get('batch', row.get('cap_gib'))}: {row.get('error', 'ok')}", flush=True)
        self.save()


def settings_of(case: Case) -> Settings:
    """The same for the estimator."""
    backend = {"bf16": "bf16", "qlora": "nf4", "nvfp4": "nvfp4"}[case.method]
    stock = case.method != "nvfp4" and not {"ours", "codes"} & case.options
    return Settings(
        backend=backend + "-liger" * ("liger" in case),
        adapter_bytes=2 if stock else 4,
        loss="liger" if "liger" in case else "supervised",
        accuracy=case.accuracy,
        weight_layouts="transient" if "transient" in case else "cached",
        recompute_mlp="recompute" in case,
        recompute_attention="once" in case,
        activations="nvfp4" if "codes" in case else "bf16",
        cuda_graphs="graphs" in case,
        checkpointing="ckpt" in case,
    )


def bytes_of(tensors) -> int:
    """Of unique storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def composition(trainer: Trainer) -> dict[str, int | None]:
    """What a step holds: frozen weights and buffers; adapters and the optimizer's state; and, but for recorded steps,
    what a forward pass keeps for backward: counted inside and outside of the decoder's layers, and by the allocator."""
    model, states = trainer.model, trainer.optimizer.state.values()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = {
        "weights": bytes_of([*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]),
        "adapters": bytes_of([*trained, *(t for state in states for t in state.values() if isinstance(t, torch.Tensor))]),
    }
    if "graphs" not in trainer.case:
        kept, _, growth = common._LayerWatch(model, trainer.layers, trainer.device).run(trainer.loss)
        found["kept_outside"] = kept.pop(-1, 0)
        found["kept_in_layers"] = sum(kept.values())
        found["kept"] = growth if trainer.device.type == "cuda" else None
    return found


def peak(run: Run, trainer: Trainer, batch: int, seq: int, before: dict[str, int], workspace: int) -> dict:
    """A row: measured, estimated, and made of what. A recording's peak is that of the warm-up and recording: replays allocate
    nothing."""
    row = measure_peaks.expected(trainer, settings_of(trainer.case), batch, seq, workspace)
    recorded = "graphs" in trainer.case

    def steps() -> None:
        if recorded:
            trainer.prepare(batch, seq, 2)
        for _ in range(measure_peaks.STEPS):
            trainer.step()

    def measure() -> None:
        trainer.clear()
        if not recorded:
            trainer.prepare(batch, seq, 1)
        row.update(common.peak_memory(steps, run.device, before))
        row.update(composition(trainer))

    if not common.fits(measure, run.device):
        row["skipped"] = "out of memory"
    elif row.get("peak_allocated"):
        row["ratio"] = row["estimate"] / row["peak_allocated"]
    return row


def peaks(run: Run, cases: dict[str, tuple]) -> None:
    workspace = measure_peaks.workspace(run.device)
    for name, grid in cases.items():
        if run.over(f"peaks of {name}"):
            continue
        before, trainer = common.memory_now(run.device), None
        for batch, seq in grid:
            if trainer is not None and run.over(f"peak of {name} at {batch} x {seq}"):
                continue

            def fill() -> dict:
                nonlocal trainer
                trainer = trainer or Trainer(Case(name), run.shape, run.args)
                return peak(run, trainer, batch, seq, before, workspace)

            run.row("peaks", {"case": name, "batch": batch, "seq": seq}, fill)
        del trainer
        common.release(run.device)


# ---------------------------------------------------------------------------------------------- largest batches


def largest_near(fits: Callable[[int], bool], guess: int, limit: int) -> int:
    """Largest batch up to ``limit`` for which ``fits`` is true, 0 if none: two trials where the guess is right, more the further
    it is off (strides double, then bisection)."""
    good, bad, stride = 0, limit + 1, 1
    at = min(max(guess, 1), limit)
    while bad - good > 1:
        good, bad = (at, bad) if fits(at) else (good, at)
        if good and bad <= limit:
            at = (good + bad) // 2
        else:
            at = min(good + stride, limit) if good else max(bad - stride, 1)
            stride *= 2
    return good


def guess(rows: list[dict], case: Case, shape: str, cap: int, seq: int) -> int:
    """Batch at which a line through the measured peaks of this length (else the estimator's) reaches the cap, less some
    fragmentation."""
    measured = {
        r["batch"]: r["peak_allocated"] for r in rows if (r["case"], r["seq"]) == (case.name, seq) and r.get("peak_allocated")
    }
    if len(measured) < 2:
        name = {"1b": "llama-1b", "3b": "llama-3b", "8b": "llama-8b"}.get(shape)
        if name is None:
            return 1
        loss = "liger" if "liger" in case else "full"
        positions = bench_train.LABELS + 1
        settings = replace(settings_of(case), sequence=seq, rank=bench_train.R, loss=loss, positions=positions)
        measured = {n: estimate(name, replace(settings, batch=n)).peak for n in (4, 16)}
    few, many = min(measured), max(measured)
    slope = (measured[many] - measured[few]) / (many - few)
    return int((0.98 * cap - measured[few]) / slope) + few


def largest(run: Run, capped: dict[str, tuple], seq: int, most: int) -> None:
    there = {(row["case"], row["cap_gib"]) for row in run.data["largest"]}
    for name, caps in capped.items():
        trainer = None
        for cap in caps:
            if (name, cap) in there or run.over(f"{LARGEST} {name} under {cap:g} GiB"):
                continue

            def fill() -> dict:
                nonlocal trainer
                trainer = trainer or Trainer(Case(name), run.shape, run.args)
                start = guess(run.data["peaks"], trainer.case, run.shape, int(cap * 2**30), seq)
                tried: list[int] = []

                def fits(batch: int) -> bool:
                    tried.append(batch)
                    return bench_train.attempt(trainer, batch, seq, run.device)

                with bench_train.capped(cap, run.device):
                    row = {"largest_batch": largest_near(fits, start, most), "tried": tried}
                    if row["largest_batch"] and cap == 16.0:  # the paper's card
                        row |= bench_train.at_largest(trainer, row["largest_batch"], seq, run.device)
                return row

            run.row("largest", {"case": name, "cap_gib": cap, "seq": seq}, fill)
        del trainer
        common.release(run.device)


def arguments(doc: str, argv: list[str] | None, *flags: tuple[str, str]) -> argparse.Namespace:
    """The arguments that the scripts of this folder share, and ``flags`` (name, help) of one of them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=tuple(bench_train.SHAPES))
    parser.add_argument("--small", action="store_true", help="a tiny model, a few steps, on the CPU")
    parser.add_argument("--seconds", type=float, default=0, help="begin no row after so many; 0: no limit")
    text = "comma-separated, of those that are run by default; others stay as they are"
    parser.add_argument("--cases", default=[], type=lambda names: [name for name in names.split(",") if name], help=text)
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name, text in flags:
        parser.add_argument(name, action="store_true", help=text)
    args = parser.parse_args(argv)
    args.attention = "causal"
    if args.small and args.out == RESULTS:
        args.out = Path(tempfile.gettempdir()) / "peft_nvfp4_small"
    cuda = torch.cuda.is_available() and not args.small
    args.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return args


def chosen(cases: dict[str, tuple], args: argparse.Namespace) -> dict[str, tuple]:
    """Those of ``--cases``; all, where it is empty."""
    return {name: value for name, value in cases.items() if not args.cases or name in args.cases}


def check_cases(args: argparse.Namespace, *known: dict[str, tuple]) -> None:
    """Ends the script if ``--cases`` names something else."""
    names = {name for cases in known for name in cases}
    if unknown := [name for name in args.cases if name not in names]:
        raise SystemExit(f"unknown cases {', '.join(unknown)}; there are {', '.join(sorted(names))}")


def main(argv: list[str] | None = None) -> None:
    args = arguments(__doc__, argv, ("--largest", "only the largest batches that the file does not have; the rest stays"))
    check_cases(args, *((SMALL["cases"], SMALL["capped"]) if args.small else (CASES, CAPPED)))
    run = Run(args, "memory", ("peaks", "largest"))
    if args.largest:
        run.keep("peaks", "largest")
        run.data["not_run"] = [what for what in run.data["not_run"] if not what.startswith(LARGEST)]  # tried again
    else:
        run.keep_others("peaks", "largest")
        peaks(run, chosen(SMALL["cases"] if args.small else CASES, args))
    capped = chosen(SMALL["capped"] if args.small else CAPPED, args)
    seq, most = (SMALL["seq"], SMALL["most"]) if args.small else (CAPPED_SEQ, MOST)
    largest(run, capped, seq, most)
    run.save()


if __name__ == "__main__":
    main()
