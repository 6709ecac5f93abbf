"""Whether the shortcuts of the accuracy runs change anything, and what they bring: to be run before a long plan.

    python benchmarks/reproduce/check.py                # some 90 seconds on a GPU

For each method: the losses of a run whose steps are replayed, on an adapter that has been trained before and was reset in place,
beside those of a fresh model step by step from Python; scores and answers of recorded passes beside those from Python; two lanes
on two streams beside one; then the steps a second of one process with 1, 2, ... lanes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Generator
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from reproduce import encoding, tasks  # noqa: E402
from reproduce.jobs import Board  # noqa: E402
from reproduce.methods import METHODS, SHIPPED, Workshop  # noqa: E402
from reproduce.recording import WAITING  # noqa: E402
from reproduce.scoring import Evaluation  # noqa: E402
from reproduce.training import Recipe, Trainee, train  # noqa: E402
from reproduce.worker import Lane, Options, Shelf  # noqa: E402


def nothing(trainee: Trainee) -> Generator[None, None, dict]:
    """Of a curve without scores."""
    return {}
    yield


def losses(trainee: Trainee, data: encoding.Encoded, seed: int, steps: int, lr: float = 1e-3) -> Generator[None, None, list]:
    result = yield from train(trainee, data, Recipe(lr, seed, steps, curve=steps), nothing)
    return result["curve"]["loss"]


def together(lanes: list[Lane], works: list[Generator]) -> list:
    """Every lane's work, a turn of each after the other."""
    results: list = [None] * len(works)
    left = dict(enumerate(works))
    while left:
        idle = True
        for i, work in list(left.items()):
            with lanes[i].at_work():
                try:
                    idle &= next(work) is WAITING
                except StopIteration as stop:
                    results[i] = stop.value
                    del left[i]
        if idle:
            time.sleep(0.001)
    return results


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def compare(workshop: Workshop, lanes: list[Lane], method: str, data: encoding.Encoded, test: Evaluation, steps: int):
    """Print the differences; the trainees, one a lane."""
    plain = Workshop(workshop.folder, workshop.device, workshop.layers, graphs=False, shipped=workshop.shipped)
    with lanes[0].at_work():
        eager = plain.trainee(METHODS[method], SHIPPED)
    fresh = together(lanes[:1], [losses(eager, data, 0, steps)])[0]
    made, start = [], time.perf_counter()
    for lane in lanes:
        with lane.at_work():
            made.append(workshop.trainee(METHODS[method], SHIPPED))
    took = time.perf_counter() - start
    first = together(lanes[:1], [losses(made[0], data, 1, steps)])[0]
    again = together(lanes[:1], [losses(made[0], data, 0, steps)])[0]
    both = together(lanes[:2], [losses(t, data, seed, steps) for seed, t in enumerate(made[:2])])
    print(f"{method}: {took / len(lanes):.1f} s to make one; not recorded because: {made[0].step.piece.why_not}")
    print(
        f"  replayed against step by step, {steps} losses differ by at most {difference(again, fresh):.2e}; last {fresh[-1]:.4f}"
    )
    if len(both) > 1:
        print(f"  two lanes against one: {difference(both[0], again):.2e}, {difference(both[1], first):.2e}", flush=True)
    scores = []
    for trainee in (eager, made[0], made[0]):
        start = time.perf_counter()
        together(lanes[:1], [losses(trainee, data, 0, steps)])
        middle = time.perf_counter()
        (found,) = together(lanes[:1], [test.run(trainee)])
        scores.append(found)
        print(f"  {middle - start:.2f} s for {steps} steps, {time.perf_counter() - middle:.2f} s for scores {_short(found)}")
    same = all(_short(s) == _short(scores[0]) and s.get("samples") == scores[0].get("samples") for s in scores)
    print(f"  scores {'are the same' if same else 'DIFFER'}; not recorded because: {[_why(p) for p in made[0].pieces.values()]}")
    return made


def _short(found: dict) -> dict:
    return {key: round(value, 6) for key, value in found.items() if isinstance(value, float)}


def _why(reader) -> str | None:
    return reader.piece.why_not


def speed(lanes: list[Lane], trainees: list[Trainee], data: encoding.Encoded, steps: int, device: str) -> None:
    together(lanes, [losses(t, data, 0, 3) for t in trainees])  # recordings
    counts = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n < len(lanes)] + [len(lanes)]
    for count in counts:
        start = time.perf_counter()
        together(lanes[:count], [losses(t, data, 0, steps) for t in trainees[:count]])
        took = time.perf_counter() - start
        print(f"  {count} lanes: {count * steps / took:.1f} steps/s of 16 x {data.ids.shape[1]} tokens", flush=True)
    held = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0
    print(f"  replays {trainees[0].replays()}, memory {held:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["bf16", "paper", "nf4"])
    parser.add_argument("--task", choices=tasks.TASKS, default="sentiment")
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60, help="of the timing; a third of them for the comparisons")
    parser.add_argument("--rows", type=int, default=200, help="of the test set")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), device, args.layers, shipped=args.model)
        options = Options(folder, device)
        shelf, board = Shelf(device), Board(Path(folder))
        lanes = [Lane(board, "check", i, options, shelf, workshop) for i in range(args.lanes)]
        _, tokenizer = workshop.load(SHIPPED)
        task = tasks.TASKS[args.task]
        splits = task.splits()
        data = encoding.training_set(splits.train, task, tokenizer)
        test = Evaluation.of(splits.test[: args.rows], task, tokenizer, device)
        for method in args.methods:
            trainees = compare(workshop, lanes, method, data, test, max(2, args.steps // 3))
            speed(lanes, trainees, data, args.steps, device)
            for trainee in trainees:
                trainee.release()
            del trainees


if __name__ == "__main__":
    main()
