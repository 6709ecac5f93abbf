"""Runs a plan: prepares weights and calibrations, starts workers, watches them until the plan or the time is at its end, and
merges what they found into one JSON file a table.

What those files hold already is not run again, so a plan that was cut off goes on with the same command. A worker that dies is
replaced, its groups are tried once more, and everything that had been found before stays. The files are written every half
minute, when the time is over and when the process is told to stop; what a session that was killed left in its folder is merged by

    python benchmarks/reproduce/runner.py --merge WORK [WORK ...] --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import torch
from environment import environment

from reproduce.jobs import Board, Group, Runs, replace_text
from reproduce.methods import ROTATED, WEIGHTS
from reproduce.worker import Options, work

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results" / "reproduce"
RESERVE, LAST = 5.0, 3.0
"""Seconds before the end after which lanes start nothing more, and at which workers are ended and the files are written."""
EVERY = 30.0
"""Seconds between two times that the files are written."""
RESTARTS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What all tables' commands take."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files, read and written")
    parser.add_argument("--work", type=Path, help="folder of weights, calibrations and single runs; kept if named")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", type=int, default=2 if cuda else 0, help="processes on each GPU; 0: all in this one")
    parser.add_argument("--lanes", type=int, default=6 if cuda else 1, help="models at once in a process, each on its stream")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="of those that are visible")
    parser.add_argument("--seconds", type=float, help="everything is written, and nothing runs, after so many seconds")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and stop")
    parser.add_argument("--rate", type=float, help="of --plan: steps a second of all GPUs together, to say when what is done")
    parser.add_argument("--steps", type=int, help="of a run (default: the table's)")
    parser.add_argument("--seeds", type=int, help="runs that count (default: the table's)")
    parser.add_argument("--rows", type=int, help="of every split at most")
    parser.add_argument("--layers", type=int, help="keep so many layers of the model (to try things)")
    parser.add_argument("--calibration", type=int, nargs=2, default=(128, 512), metavar=("SAMPLES", "TOKENS"))
    parser.add_argument("--model", type=Path, help="folder of another model than SmolLM2-135M-Instruct")
    parser.add_argument("--small", action="store_true", help="2 steps, 8 rows, one seed, 2 layers on the CPU: does it run?")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs: all steps from Python")


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
    places: dict[str, int] = field(default_factory=dict)  # process -> GPU
    restarts: int = 0
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=environment)  # asked for once: there may be little time at the end
    written: float = field(default_factory=time.time)
    told: tuple[float, int] = (0.0, 0)  # seconds and steps when progress was last told

    def __post_init__(self) -> None:
        self.folder = self.args.work or Path(tempfile.mkdtemp(prefix="reproduce_"))
        self.board = Board(self.folder)
        a, until = self.args, None
        if a.seconds:
            until = self.start + a.seconds - RESERVE
        samples, length = a.calibration
        shipped = None if a.model is None else str(a.model)
        self.options = Options(str(self.folder), a.device, a.lanes, until, a.layers, samples, length, a.graphs, shipped)

    def run(self) -> dict[str, Path]:
        """Table -> its file."""
        before = {number: signal.signal(number, self._told_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._prepare()
        except Stopped as stop:
            self.notes.append(str(stop))
        finally:
            for number in before:
                signal.signal(number, signal.SIG_IGN)  # not while the files are written
            for process in self.processes.values():
                process.kill()
            paths = self.write()
            for number, handler in before.items():
                signal.signal(number, handler)
        return paths

    @staticmethod
    def _told_to_stop(number: int, frame: Any) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    def _prepare(self) -> None:
        self.board.publish(self.groups, [row for table in self.tables() for row in known(self.args.out, table)])
        session = {"environment": self.environment, "settings": self.settings | {"device": self.args.device}}
        replace_text(self.folder / "session.json", json.dumps(session))
        runs = self.board.runs()
        left = [g for g in self.groups if runs.left(g)]
        workshop = self.options.workshop()
        for weights in dict.fromkeys(g.weights for g in left):
            workshop.prepare(weights)
        wanted = [(g.weights, g.method.calibration) for g in left if g.method.calibration]
        wanted = [pair for pair in dict.fromkeys(wanted) if not workshop.calibrated(*pair)]
        self.say(f"{len(left)} of {len(self.groups)} groups to run, {len(wanted)} calibrations, in {self.folder}")
        if left:
            self._work(wanted)

    def tables(self) -> list[str]:
        return list(dict.fromkeys(group.table for group in self.groups))

    def say(self, text: str) -> None:
        print(f"{time.time() - self.start:5.0f} s  {text}", flush=True)

    # -- processes

    def _work(self, calibrations: list[tuple[str, str]]) -> None:
        if self.args.workers == 0:
            self._alone(calibrations)
            return
        workers = self.args.workers * self.args.gpus
        names = [f"calibrate:{weights}:{name}" for weights, name in calibrations]
        self.places = {
            name: i % self.args.gpus for some in (names, [f"w{i}" for i in range(workers)]) for i, name in enumerate(some)
        }
        for name in names[:workers]:
            self._begin(name)
        waiting = names[workers:]
        for i in range(workers):
            self._begin(f"w{i}")
        while self.processes:
            time.sleep(0.2)
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    del self.processes[name]
                    self._ended(name, process.returncode)
                    if name.startswith("calibrate:") and waiting:
                        self._begin(waiting.pop(0))
            self._tick()
            if self.args.seconds and time.time() > self.start + self.args.seconds - LAST:
                self.say(f"ended while running: {', '.join(self.processes)}")
                return
            if self.processes and not any(name.startswith("w") for name in self.processes):
                return  # nobody needs the calibrations that are still being made

    def _tick(self) -> None:
        """Every half minute: what there is, on the disk and on the screen."""
        if time.time() - self.written > EVERY:
            self.written = time.time()
            self.say(self.progress())
            self.write()

    def _begin(self, name: str) -> None:
        path = os.pathsep.join(p for p in (str(BENCHMARKS), os.environ.get("PYTHONPATH", "")) if p)
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        variables |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4"}
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # queues of the GPU: one a lane
        if self.args.device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.args.gpus)))
            variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self.places[name]]
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

        from reproduce import sources

        if calibrations:
            paths = [sources.path_of(file) for file in ("c4_demo.jsonl", "wiki_demo.txt")]
            for weights, name in calibrations:
                self.options.workshop().calibrate(weights, name, texts.split(paths)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work(self.board, "here", self.options, self._tick)

    def progress(self) -> str:
        rows = list(self.board.runs().by_key.values())
        steps = sum(row["steps"] for row in rows if row["kind"] != "zero_shot")
        now, (before, had) = time.time() - self.start, self.told
        self.told = now, steps
        rate = f"{(steps - had) / max(now - before, 1e-3):.0f} steps/s, " if before else ""
        return f"{len(rows)} runs, {steps} steps, {rate}{len(self.board.claimed())} of {len(self.groups)} groups begun"

    # -- results

    def write(self) -> dict[str, Path]:
        """The tables' files, with all runs there are."""
        head = {
            "environment": self.environment,
            "settings": self.settings | {"seconds": round(time.time() - self.start), "device": self.args.device},
        }
        self.written = time.time()
        return {table: write_table(self.args.out, table, head, [self.board], self.groups, self.notes) for table in self.tables()}


class Stopped(BaseException):
    """By a signal."""


def known(out: Path, table: str) -> list[dict]:
    """Runs that the table's file has."""
    path = out / f"{table}.json"
    return json.loads(path.read_text())["runs"] if path.is_file() else []


def write_table(
    out: Path, table: str, head: dict[str, Any], boards: Sequence[Board], groups: Sequence[Group], notes: Sequence[str] = ()
) -> Path:
    """A table's file: what it had and what the boards have, in the plan's order."""
    runs = Runs([*known(out, table), *(row for board in boards for row in board.runs().rows)])
    failures = [f"{name}: {why.strip().splitlines()[-1][:300]}" for board in boards for name, why in board.failures()]
    content = head | {
        "not_finished": [g.name for g in groups if g.table == table and runs.left(g)],
        "failures": failures + list(notes),
        "runs": sorted(runs.of_table(table), key=_place(groups)),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{table}.json"
    replace_text(path, json.dumps(content, indent=0) + "\n")
    print(f"{path.name}: {len(content['runs'])} runs, {len(content['not_finished'])} groups not finished", flush=True)
    return path


def merge(folders: Sequence[Path], out: Path) -> dict[str, Path]:
    """What sessions that were killed left in their folders, into the tables' files."""
    boards = [Board(folder) for folder in folders]
    groups = list({g.name: g for board in boards for g in board.plan()}.values())
    sessions = [folder / "session.json" for folder in folders if (folder / "session.json").is_file()]
    head = json.loads(sessions[0].read_text()) if sessions else {"environment": environment(), "settings": {}}
    tables = dict.fromkeys(row["table"] for board in boards for row in board.runs().rows)
    return {table: write_table(out, table, head, boards, groups) for table in tables}


def _place(groups: Sequence[Group]):
    order = {(g.task, g.weights, g.method.name): i for i, g in enumerate(groups)}

    def key(row: dict) -> tuple:
        place = order.get((row["task"], row["weights"], row["method"]), len(order))
        return place, row["kind"], row["lr"] or 0, row["seed"] or 0

    return key


def print_plan(groups: Sequence[Group], rate: float | None = None) -> None:
    """Jobs and steps, by table, task and weights, in the order in which they are begun; with a rate, when they are done."""
    runs = steps = 0
    for table, task, weights in dict.fromkeys((g.table, g.task, g.weights) for g in groups):
        part = [g for g in groups if (g.table, g.task, g.weights) == (table, task, weights)]
        n, s = sum(g.most_runs() for g in part), sum(g.most_runs() * g.steps for g in part)
        runs, steps = runs + n, steps + s
        when = f" {steps:7d} in all, at {steps / rate:5.0f} s" if rate else ""
        print(f"{table:12s} {task:14s} {weights:8s} {len(part):3d} methods {n:4d} runs {s:7d} steps{when}")
    calibrations = {(g.weights, g.method.calibration) for g in groups if g.method.calibration}
    print(f"{len(groups)} groups, {runs} runs, {steps} steps; calibrations: {len(calibrations)}")


def execute(groups: list[Group], args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Path]:
    """Run a plan, or print it."""
    if args.plan:
        print_plan(groups, args.rate)
        return {}
    return Session(groups, args, settings).run()


def parse_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help=f"{ROTATED}: off the 4-bit grid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--merge", type=Path, nargs="+", required=True, metavar="WORK", help="folders of sessions")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    merge(args.merge, args.out)


if __name__ == "__main__":
    main()
