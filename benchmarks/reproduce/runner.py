"""Runs a plan: prepares weights and calibrations, starts workers, watches them until the plan or the time is at its end, and
merges what they found into one JSON file a table.

What those files hold already is not run again, so a plan that was cut off goes on with the same command. A worker that dies is
replaced, its groups are tried once more, and everything that had been found before stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from environment import environment

from .jobs import Board, Group
from .methods import ROTATED, WEIGHTS
from .worker import Options, work

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results" / "reproduce"
GRACE = 25.0
"""Seconds that a worker may take to end its last run."""
RESTARTS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What all tables' commands take."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files, read and written")
    parser.add_argument("--work", type=Path, help="folder of weights, calibrations and single runs; kept if named")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", type=int, default=8 if cuda else 0, help="processes; 0: all in this one")
    parser.add_argument("--lanes", type=int, default=2 if cuda else 1, help="models at once in a process, each on its stream")
    parser.add_argument("--seconds", type=float, help="start nothing new after so many seconds, and write what there is")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and stop")
    parser.add_argument("--steps", type=int, help="of a run (default: the table's)")
    parser.add_argument("--seeds", type=int, help="runs that count (default: the table's)")
    parser.add_argument("--rows", type=int, help="of every split at most")
    parser.add_argument("--layers", type=int, help="keep so many layers of the model (to try things)")
    parser.add_argument("--calibration", type=int, nargs=2, default=(128, 512), metavar=("SAMPLES", "TOKENS"))
    parser.add_argument("--model", type=Path, help="folder of another model than SmolLM2-135M-Instruct")
    parser.add_argument("--small", action="store_true", help="2 steps, 8 rows, one seed, 2 layers on the CPU: does it run?")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs")


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """``--small`` as what it stands for."""
    if args.small:
        args.device, args.workers, args.lanes = "cpu", 0, 2
        args.steps, args.seeds, args.rows, args.layers = args.steps or 2, args.seeds or 1, args.rows or 8, args.layers or 2
        args.calibration = (4, 64)
        if args.out == RESULTS:
            args.out = Path(tempfile.gettempdir()) / "peft_nvfp4_small"
    return args


def adjusted(groups: Sequence[Group], args: argparse.Namespace) -> list[Group]:
    """Groups with what the command line says about all of them."""
    found = []
    for group in groups:
        if args.steps:
            group = replace(group, steps=args.steps, curve=min(group.curve, args.steps))
        if args.seeds:
            group = replace(group, seeds=tuple(range(args.seeds)))
        if args.small:
            group = replace(group, lrs=group.lrs[:1], batch=2)
        found.append(replace(group, rows=args.rows))
    return found


@dataclass
class Session:
    """One execution of a plan."""

    groups: list[Group]
    args: argparse.Namespace
    settings: dict[str, Any]
    start: float = field(default_factory=time.time)
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    restarts: int = 0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = self.args.work or Path(tempfile.mkdtemp(prefix="reproduce_"))
        self.board = Board(self.folder)
        a, until = self.args, None
        if a.seconds:
            until = self.start + a.seconds
        samples, length = a.calibration
        shipped = None if a.model is None else str(a.model)
        self.options = Options(str(self.folder), a.device, a.lanes, until, a.layers, samples, length, a.graphs, shipped)

    def run(self) -> dict[str, Path]:
        """Table -> its file."""
        known = [row for table in self.tables() for row in self._known(table)]
        for path in (self.folder / "runs").glob("*.jsonl"):  # of an earlier execution in a named folder
            if path.name != "known.jsonl":
                known += [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]
                path.unlink()
        self.board.publish(self.groups, known)
        runs = self.board.runs()
        left = [g for g in self.groups if runs.left(g)]
        workshop = self.options.workshop()
        for weights in dict.fromkeys(g.weights for g in left):
            workshop.prepare(weights)
        wanted = [(g.weights, g.method.calibration) for g in left if g.method.calibration]
        wanted = [pair for pair in dict.fromkeys(wanted) if not workshop.calibrated(*pair)]
        self.say(f"{len(left)} of {len(self.groups)} groups to run, {len(wanted)} calibrations, in {self.folder}")
        try:
            self._work(wanted)
        finally:
            for process in self.processes.values():
                process.kill()
        return {table: self.write(table) for table in self.tables()}

    def tables(self) -> list[str]:
        return list(dict.fromkeys(group.table for group in self.groups))

    def _known(self, table: str) -> list[dict]:
        path = self.args.out / f"{table}.json"
        return json.loads(path.read_text())["runs"] if path.is_file() else []

    def say(self, text: str) -> None:
        print(f"{time.time() - self.start:5.0f} s  {text}", flush=True)

    # -- processes

    def _work(self, calibrations: list[tuple[str, str]]) -> None:
        if self.args.workers == 0:
            self._alone(calibrations)
            return
        for weights, name in calibrations[: self.args.workers]:
            self._begin(f"calibrate:{weights}:{name}")
        waiting = calibrations[self.args.workers :]
        for i in range(self.args.workers):
            self._begin(f"w{i}")
        told = self.start
        while self.processes:
            time.sleep(0.5)
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    del self.processes[name]
                    self._ended(name, process.returncode)
                    if name.startswith("calibrate:") and waiting:
                        self._begin("calibrate:" + ":".join(waiting.pop(0)))
            if time.time() - told > 30:
                told = time.time()
                self.say(self.progress())
            if self.options.until is not None and time.time() > self.options.until + GRACE:
                self.say(f"ended while running: {', '.join(self.processes)}")
                return
            if self.processes and not any(name.startswith("w") for name in self.processes):
                return  # nobody needs the calibrations that are still being made

    def _begin(self, name: str) -> None:
        path = os.pathsep.join(p for p in (str(BENCHMARKS), os.environ.get("PYTHONPATH", "")) if p)
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "reproduce.worker", str(self.folder), name, json.dumps(asdict(self.options))]
        log = open(self.folder / f"{name.replace(':', '_')}.log", "a")  # noqa: SIM115
        self.processes[name] = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        log.close()

    def _ended(self, name: str, code: int) -> None:
        if code == 0:
            return
        log = (self.folder / f"{name.replace(':', '_')}.log").read_text().strip().split("\n")
        self.notes.append(f"{name} ended with code {code}: {log[-1][:300]}")
        self.say(self.notes[-1])
        over = self.options.until is not None and time.time() > self.options.until
        if name.startswith("calibrate:"):
            _, weights, calibration = name.split(":")
            for group in self.groups:  # nobody shall wait for it
                if (group.weights, group.method.calibration) == (weights, calibration):
                    self.board.claim(group, "no calibration")
        else:
            freed = self.board.give_back(name)
            if freed and not over and self.restarts < RESTARTS:
                self.restarts += 1
                self._begin(name)

    def _alone(self, calibrations: list[tuple[str, str]]) -> None:
        import texts

        from . import sources

        if calibrations:
            paths = [sources.path_of(file) for file in ("c4_demo.jsonl", "wiki_demo.txt")]
            for weights, name in calibrations:
                self.options.workshop().calibrate(weights, name, texts.split(paths)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work(self.board, "here", self.options)

    def progress(self) -> str:
        rows = list(self.board.runs().by_key.values())
        steps = sum(row["steps"] for row in rows if row["kind"] != "zero_shot")
        held = self.board.claimed()
        return f"{len(rows)} runs, {steps} steps, {len(held)} of {len(self.groups)} groups begun"

    # -- results

    def write(self, table: str) -> Path:
        """The table's file, with all runs there are."""
        runs = sorted(self.board.runs().of_table(table), key=_place(self.groups))
        groups = [g for g in self.groups if g.table == table]
        missing = [g.name for g in groups if self.board.runs().left(g)]
        self.args.out.mkdir(parents=True, exist_ok=True)
        path = self.args.out / f"{table}.json"
        content = {
            "environment": environment(),
            "settings": self.settings | {"seconds": round(time.time() - self.start), "device": self.args.device},
            "not_finished": missing,
            "failures": [f"{name}: {why.strip().splitlines()[-1][:300]}" for name, why in self.board.failures()] + self.notes,
            "runs": runs,
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=0) + "\n")
        os.replace(part, path)
        self.say(f"{path.name}: {len(runs)} runs, {len(missing)} groups not finished")
        return path


def _place(groups: Sequence[Group]):
    order = {(g.task, g.weights, g.method.name): i for i, g in enumerate(groups)}

    def key(row: dict) -> tuple:
        place = order.get((row["task"], row["weights"], row["method"]), len(order))
        return place, row["kind"], row["lr"] or 0, row["seed"] or 0

    return key


def print_plan(groups: Sequence[Group]) -> None:
    """Jobs and steps, by table and task."""
    runs = steps = 0
    for table, task, weights in dict.fromkeys((g.table, g.task, g.weights) for g in groups):
        part = [g for g in groups if (g.table, g.task, g.weights) == (table, task, weights)]
        n, s = sum(g.most_runs() for g in part), sum(g.most_runs() * g.steps for g in part)
        runs, steps = runs + n, steps + s
        print(f"{table:12s} {task:14s} {weights:8s} {len(part):3d} methods {n:4d} runs {s:7d} steps")
    calibrations = {(g.weights, g.method.calibration) for g in groups if g.method.calibration}
    print(f"{len(groups)} groups, {runs} runs, {steps} steps; calibrations: {len(calibrations)}")


def execute(groups: list[Group], args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Path]:
    """Run a plan, or print it."""
    if args.plan:
        print_plan(groups)
        return {}
    return Session(groups, args, settings).run()


def parse_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["shipped"], help=f"{ROTATED}: off the 4-bit grid")
