"""What is to be run, in which order, by whom, and what came out: plain files that any number of processes share.

    plan.json                the groups, most valuable first
    claims/<group>           who works on a group; made exclusively, so that nobody else does
    runs/<worker>.jsonl      a line for every finished run, written at once: whatever ends a process, what is there counts
    failures/<group>.<n>     what went wrong, by attempt

A *group* is one method on one task: it shares a model, a recording and a learning rate, which a sweep on the validation split
chooses before the runs that count. Seeds of the sweep and of the runs that count are different ones. Groups of a task follow one
another, so that a plan that is cut off leaves whole columns of a table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .methods import Method

GRID = (3e-4, 7e-4, 1.5e-3)
BEYOND = 3e-3
"""Tried as well where the largest of the grid came out best."""
ATTEMPTS = 2
KEY = ("table", "task", "weights", "method", "kind", "lr", "seed", "steps", "batch", "rows")


@dataclass(frozen=True)
class Group:
    """Attributes:
    lrs: learning rates of the sweep; a single one is taken as it is.
    sweep_seeds, seeds: of the sweep, and of the runs that count.
    curve: steps between two held-out scores (0: only at the end).
    rows: of training, validation and test data at most; None: the task's own.
    """

    table: str
    task: str
    weights: str
    method: Method
    lrs: tuple[float, ...] = GRID
    sweep_seeds: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 200
    batch: int = 16
    curve: int = 0
    rows: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Group:
        """Inverse of :meth:`to_json`: lists are tuples, here and in the method's config."""
        method = found["method"] | {"config": _tuples(found["method"]["config"])}
        return cls(**_tuples(found) | {"method": Method(**method)})

    @property
    def name(self) -> str:
        method = asdict(self.method) | {"config": sorted(self.method.config.items())}
        mark = hashlib.sha256(repr((self, method)).encode()).hexdigest()[:10]
        return f"{self.table}.{self.task}.{self.weights}.{self.method.name}.{mark}".replace(":", "-").replace("/", "-")

    def key(self, kind: str, lr: float | None, seed: int | None) -> tuple:
        """Of a run."""
        steps = 0 if kind == "zero_shot" else self.steps
        return (self.table, self.task, self.weights, self.method.name, kind, lr, seed, steps, self.batch, self.rows)

    def most_runs(self) -> int:
        sweep = len(self.lrs) * len(self.sweep_seeds) if len(self.lrs) > 1 else 0
        return sweep + len(self.seeds)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


@dataclass
class Runs:
    """Finished runs, of all tables."""

    rows: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_key = {tuple(row[k] for k in KEY): row for row in self.rows}

    def find(self, group: Group, kind: str, lr: float | None, seed: int | None) -> dict | None:
        return self.by_key.get(group.key(kind, lr, seed))

    def add(self, row: dict) -> None:
        self.by_key[tuple(row[k] for k in KEY)] = row

    def of_table(self, table: str) -> list[dict]:
        """Of runs that were cut off (``planned`` says of how many steps) only what is farthest."""
        farthest: dict[tuple, dict] = {}
        for row in self.by_key.values():
            if row["table"] == table:
                steps = row.get("planned", row["steps"])
                key = tuple(steps if k == "steps" else row[k] for k in KEY)
                if key not in farthest or row["steps"] > farthest[key]["steps"]:
                    farthest[key] = row
        return list(farthest.values())

    def swept(self, group: Group) -> dict[float, float]:
        """Learning rate -> mean validation nll of a sweep's runs (infinite if one did not end well)."""
        found: dict[float, list[float]] = {}
        for row in self.by_key.values():
            if group.key("sweep", row["lr"], row["seed"]) == tuple(row[k] for k in KEY):
                nll = row.get("validation_nll")
                found.setdefault(row["lr"], []).append(nll if nll is not None and row.get("finite") else float("inf"))
        return {lr: sum(values) / len(values) for lr, values in found.items()}

    def left(self, group: Group) -> bool:
        """Whether runs that count are missing."""
        counted = {row["seed"] for row in self.by_key.values() if self._counts(row, group)}
        return not counted.issuperset(group.seeds)

    @staticmethod
    def _counts(row: dict, group: Group) -> bool:
        return group.key("final", row["lr"], row["seed"]) == tuple(row[k] for k in KEY)


def chosen_lr(group: Group, runs: Runs) -> float | None:
    """The learning rate of the runs that count; None while the sweep is not finished."""
    if len(group.lrs) == 1:
        return group.lrs[0]
    swept = runs.swept(group)
    if not set(group.lrs) <= swept.keys():
        return None
    best = min(swept, key=swept.get)
    if best == max(group.lrs) and best < BEYOND and BEYOND not in swept:
        return None
    return best


def replace_text(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    os.replace(part, path)


class Board:
    """The shared folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.groups: list[Group] = []
        for part in ("claims", "runs", "failures"):
            (folder / part).mkdir(parents=True, exist_ok=True)

    # -- the plan

    def publish(self, groups: Sequence[Group], known: Sequence[dict]) -> None:
        """Put up a new plan, with the runs that are known from elsewhere. Nobody may be at work. What the folder has of runs is
        kept: in one file now, which is there before the others go."""
        for part in ("claims", "failures"):
            for path in (self.folder / part).iterdir():
                path.unlink()
        known = Runs([*known, *self._lines()])
        old = [path for path in (self.folder / "runs").glob("*.jsonl") if path.name != "known.jsonl"]
        replace_text(self.folder / "runs" / "known.jsonl", "".join(json.dumps(row) + "\n" for row in known.by_key.values()))
        for path in old:
            path.unlink()
        self.groups = list(groups)
        replace_text(self.folder / "plan.json", json.dumps([group.to_json() for group in groups], indent=0))

    def plan(self) -> list[Group]:
        """Read once: it does not change while anybody is at work."""
        if not self.groups and (self.folder / "plan.json").is_file():
            self.groups = [Group.from_json(found) for found in json.loads((self.folder / "plan.json").read_text())]
        return self.groups

    # -- claims

    def claim(self, group: Group, worker: str) -> bool:
        try:
            descriptor = os.open(self.folder / "claims" / group.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(worker)
        return True

    def claimed(self) -> set[str]:
        return {path.name for path in (self.folder / "claims").iterdir()}

    def give_back(self, worker: str) -> int:
        """Free what a worker that died had claimed; counts as a failure of each."""
        freed = 0
        for path in (self.folder / "claims").iterdir():
            if path.read_text().partition("/")[0] == worker:
                self.failed(path.name, "the worker died")
                freed += 1
        return freed

    def failed(self, name: str, why: str) -> None:
        """Note why a group failed and let somebody try again, but not for ever."""
        attempts = len(list((self.folder / "failures").glob(f"{name}.*")))
        (self.folder / "failures" / f"{name}.{attempts}").write_text(why)
        if attempts + 1 < ATTEMPTS:
            (self.folder / "claims" / name).unlink(missing_ok=True)
        else:
            (self.folder / "claims" / name).write_text("failed")

    def finished(self, group: Group) -> None:
        (self.folder / "claims" / group.name).write_text("done")

    def failures(self) -> list[tuple[str, str]]:
        return [(path.name, path.read_text()) for path in sorted((self.folder / "failures").iterdir())]

    # -- results

    def runs(self) -> Runs:
        return Runs(list(self._lines()))

    def _lines(self) -> Iterator[dict]:
        for path in sorted((self.folder / "runs").glob("*.jsonl")):
            for line in path.read_text().split("\n"):
                with suppress(ValueError):  # a process that was killed may have left half a line
                    yield json.loads(line)

    def record(self, worker: str, row: dict[str, Any]) -> None:
        with open(self.folder / "runs" / f"{worker}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
