"""The paper's Table 4 with this package's backends: questions about pictures, before and after adaptation.

    python benchmarks/reproduce/image_text.py --model Qwen/Qwen2.5-VL-3B-Instruct --work /tmp/w     # the paper's model, ScienceQA
    python benchmarks/reproduce/image_text.py --model HuggingFaceTB/SmolVLM-256M-Instruct           # or a folder
    python benchmarks/reproduce/image_text.py --model FOLDER --tasks digits                         # no hub for the data
    python benchmarks/reproduce/image_text.py --stand-in                                            # no hub at all
    python benchmarks/reproduce/image_text.py --stand-in --small                                    # 2 steps: does it run?

Only the text decoder is frozen in 4 bits and adapted, for all methods (:mod:`reproduce.image_models`). GPTQ weights are
calibrated through as many sequences of text, or through prompts with their pictures (training rows): that is what the paper's
table compares.

No trained vision-language model is in any package. ``--stand-in`` puts the packaged SmolLM2-135M under a small random vision
tower: what it learns, it learns of random features, so it shows that all this works and how the methods compare there, not what
the paper's model would do.

Learning rates are chosen, and runs counted and kept, as in ``accuracy.py``; the same command with the same ``--out`` goes on
where it stopped. One process and one device, every step from Python: pictures give batches of many shapes. Several processes,
each with some of the methods, a ``--work`` and an ``--out`` of its own, are merged by ``runner.py --merge``. Results:
``results/reproduce/image_text.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import torch
import torch.nn.functional as F
from environment import commit, environment
from torch import Tensor, nn

from peft_nvfp4.calibration.run import CalibrationOptions, calibrate
from reproduce import image_models, image_tasks, sources
from reproduce.encoding import order
from reproduce.image_models import adapt, answer_logits, batch_of, decoder_and_rest, letter_tokens, load_model
from reproduce.image_tasks import Pictured
from reproduce.jobs import BEYOND, GRID, KEY, Board, Group, Runs, chosen_lr, replace_text
from reproduce.methods import METHODS as TEXT_METHODS
from reproduce.methods import Method
from reproduce.runner import RESULTS, adjusted, known, write_table
from reproduce.scoring import ScoredSet, _summary
from reproduce.tasks import Splits
from reproduce.training import Recipe, Trainee, reset
from reproduce.worker import _rounded

TABLE = "image_text"
STAND_IN = "SmolLM2-135M, random vision tower"
TEXT, IMAGE = "text", "image"


def _gptq(name: str, label: str, accuracy: str, by: str) -> Method:
    return Method(name, label, {"backend": "nvfp4", "accuracy": accuracy}, f"{accuracy}_{by}")


_ALL = (
    *(TEXT_METHODS[name] for name in ("bf16", "nf4", "paper")),
    _gptq("paper_gptq_text", "NVFP4 + GPTQ on text (PACT)", "paper", TEXT),
    _gptq("paper_gptq_image", "NVFP4 + GPTQ on image prompts (PACT)", "paper", IMAGE),
    TEXT_METHODS["balanced"],
    _gptq("balanced_gptq_image", "NVFP4 balanced + GPTQ on image prompts", "balanced", IMAGE),
)
METHODS = {method.name: method for method in _ALL}


# ---------------------------------------------------------------------------------------------- training, scoring


def train(trainee: Trainee, items: Sequence[Pictured], recipe: Recipe, letters: Tensor) -> dict:
    """Fine-tune from the adapter's first values of this seed, on the right letter among all tokens."""
    reset(trainee.model, recipe.seed)
    torch.manual_seed(recipe.seed)
    model, seen = trainee.model.train(), []
    optimizer = torch.optim.AdamW(trainee.parameters, weight_decay=0.0)
    rows = order(len(items), recipe.steps, recipe.batch, recipe.seed).tolist()
    for lr, chosen in zip(recipe.rates().tolist(), rows):
        some = [items[i] for i in chosen]
        right = letters[torch.tensor([item.gold for item in some], device=letters.device)]
        loss = F.cross_entropy(answer_logits(model, batch_of(some, trainee.tokenizer, trainee.device)), right)
        loss.backward()
        nn.utils.clip_grad_norm_(trainee.parameters, recipe.clip)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    losses = torch.stack(seen).cpu()
    tail = losses[-max(1, recipe.steps // 10) :]
    return {"train_loss": tail.mean().item(), "first_loss": losses[0].item(), "finite": bool(losses.isfinite().all())}


@torch.no_grad()
def score(trainee: Trainee, items: Sequence[Pictured], letters: Tensor, size: int) -> dict:
    """nll of the right letters among all tokens; accuracy and choice_nll among a row's own letters."""
    trainee.model.eval()
    gold = torch.tensor([item.gold for item in items])
    scored = ScoredSet(gold, [item.subset for item in items], widest=max(len(item.candidates) for item in items))
    sums = torch.full((len(items), scored.widest), torch.inf)
    for start in range(0, len(items), size):
        some = items[start : start + size]
        logits = answer_logits(trainee.model, batch_of(some, trainee.tokenizer, trainee.device))
        nll = -logits.log_softmax(-1)[:, letters].cpu()
        for row, (own, item) in enumerate(zip(nll, some), start):
            sums[row, : len(item.candidates)] = own[: len(item.candidates)]
    return _summary(sums, scored)


# ---------------------------------------------------------------------------------------------- runs


@dataclass
class Workbench:
    """Everything that the groups of a plan share.

    Attributes:
        model: name or folder.
        samples, length: of a calibration: prompts, or texts of so many tokens.
        until: UNIX time after which no run is started.
    """

    model: str
    processor: Any
    board: Board
    device: str
    samples: int
    length: int
    until: float | None = None
    splits: dict[str, Splits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.letters = torch.tensor(letter_tokens(self.processor), device=self.device)

    def late(self) -> bool:
        return self.until is not None and time.time() > self.until

    def calibration(self, group: Group) -> Path | None:
        """Folder of the calibration that the group's method wants; made now if it is not there."""
        if group.method.calibration is None:
            return None
        accuracy, by = group.method.calibration.split("_")
        mark = f"{accuracy}_{self.samples}x{self.length}"
        folder = self.board.folder / "calibrations" / f"{group.task if by == IMAGE else TEXT}_{mark}"
        if not (folder / "done").is_file():
            rows = self.image_prompts(group.task) if by == IMAGE else _texts()
            own = dict(accuracy=accuracy, samples=self.samples, seq_len=self.length, batch_size=8, report_tokens=0)
            where = dict(output_dir=folder, device=self.device, progress=False)
            model = load_model(self.model, self.device).eval()
            rest = decoder_and_rest(model)[1]
            calibrate(model, rows, self.processor.tokenizer, CalibrationOptions(**own), skip_modules=rest, **where)
            (folder / "done").touch()
        return folder

    def image_prompts(self, task: str) -> list[dict[str, Tensor]]:
        return [batch_of([item], self.processor, "cpu") for item in self.splits[task].train[: self.samples]]

    def one_group(self, group: Group) -> None:
        """Before training, the sweep, the runs that count: whatever of these there is not yet."""
        calibration = self.calibration(group)
        trainee = adapt(load_model(self.model, self.device), self.processor, group.method, calibration)
        try:
            self._runs(group, trainee)
        finally:
            trainee.release()

    def _runs(self, group: Group, trainee: Trainee) -> None:
        runs, splits = self.board.runs(), self.splits[group.task]
        if runs.find(group, "zero_shot", None, None) is None:
            reset(trainee.model, 0)
            found = score(trainee, splits.test[: group.rows], self.letters, group.batch)
            self.record(group, "zero_shot", None, None, found, runs)
        while (lr := chosen_lr(group, runs)) is None:
            lr = next((lr for lr in group.lrs if lr not in runs.swept(group)), BEYOND)
            for seed in group.sweep_seeds:
                if runs.find(group, "sweep", lr, seed) is None:
                    if self.late():
                        return
                    self.run(group, trainee, "sweep", lr, seed, runs)
        for seed in group.seeds:
            if runs.find(group, "final", lr, seed) is None:
                if self.late():
                    return
                self.run(group, trainee, "final", lr, seed, runs)

    def run(self, group: Group, trainee: Trainee, kind: str, lr: float, seed: int, runs: Runs) -> None:
        start, splits = time.time(), self.splits[group.task]
        split = splits.test if kind == "final" else splits.validation
        result = train(trainee, splits.train[: group.rows], Recipe(lr, seed, group.steps, group.batch), self.letters)
        trained = time.time() - start
        scores = score(trainee, split[: group.rows], self.letters, group.batch)
        if kind == "sweep":
            scores = {"validation_nll": scores["nll"], "validation_accuracy": scores["accuracy"]}
        self.record(group, kind, lr, seed, result | scores | {"train_s": trained, "seconds": time.time() - start}, runs)

    def record(self, group: Group, kind: str, lr: float | None, seed: int | None, result: dict, runs: Runs) -> None:
        made = {"label": group.method.label, "commit": commit()}
        row = dict(zip(KEY, group.key(kind, lr, seed))) | made | _rounded(result)
        runs.add(row)
        self.board.record("here", row)
        print(f"{group.task}, {group.method.name}, {kind}, seed {seed}: {json.dumps(_rounded(result))}", flush=True)


def _texts() -> list[str]:
    import texts

    return texts.split([sources.path_of(file) for file in ("c4_demo.jsonl", "wiki_demo.txt")])[0]


# ---------------------------------------------------------------------------------------------- the command


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a vision-language model, or its name on a hub")
    parser.add_argument("--stand-in", action="store_true", help="the packaged SmolLM2-135M under a random vision tower")
    parser.add_argument("--tasks", nargs="+", choices=image_tasks.TASKS, help="default: scienceqa; of --stand-in: digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lrs", nargs="+", type=float, default=list(GRID), help="of the sweep; a single one is taken as it is")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5, help="runs that count")
    parser.add_argument("--rows", type=int, help="of every split at most")
    parser.add_argument("--calibration", type=int, nargs=2, default=(128, 512), metavar=("SAMPLES", "TOKENS"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file, read and written")
    parser.add_argument("--work", type=Path, help="folder of calibrations and single runs; kept if named")
    parser.add_argument("--seconds", type=float, help="no run is started after so many seconds")
    parser.add_argument("--small", action="store_true", help="2 steps, 8 rows, one seed on the CPU: does it run?")
    args = parser.parse_args(argv)
    if (args.model is None) is not args.stand_in:
        raise SystemExit(image_models.MISSING.format(why="give either --model or --stand-in"))
    args.tasks = args.tasks or (["digits"] if args.stand_in else ["scienceqa"])
    if args.small:
        args.device, args.steps, args.seeds, args.rows, args.calibration = "cpu", 2, 1, 8, (4, 64)
        if args.out == RESULTS:
            args.out = Path(tempfile.gettempdir()) / "peft_nvfp4_small"
    args.work = args.work or Path(tempfile.mkdtemp(prefix="reproduce_"))
    return args


def read_splits(task: str) -> Splits:
    """
    Raises:
        SystemExit: the rows cannot be had; the message says why.
    """
    try:
        return image_tasks.TASKS[task].splits()
    except (OSError, ValueError, ImportError) as error:  # a hub that is not reached is a ConnectionError, an OSError
        other = "" if task == "digits" else " Without a hub: --tasks digits."
        raise SystemExit(f"No rows of {task}: {' '.join(str(error).split())[:300]}.{other}") from error


def main(argv: Sequence[str] | None = None) -> Path:
    args, start = parse(argv), time.time()
    splits = {task: read_splits(task) for task in args.tasks}
    name = str(image_models.stand_in(args.work / "stand_in")) if args.stand_in else args.model
    processor = image_models.load_processor(name)
    shown = STAND_IN if args.stand_in else Path(name).resolve().name if Path(name).is_dir() else name
    plan = [Group(TABLE, t, shown, METHODS[m], tuple(args.lrs), batch=args.batch) for t in args.tasks for m in args.methods]
    plan, board = adjusted(plan, args), Board(args.work)
    board.publish(plan, known(args.out, TABLE))
    until = start + args.seconds if args.seconds else None
    bench = Workbench(name, processor, board, args.device, *args.calibration, until, splits)
    settings = {key: getattr(args, key) for key in ("tasks", "methods", "lrs", "calibration", "device")} | {"model": shown}
    head = {"environment": environment(), "settings": settings}
    replace_text(args.work / "session.json", json.dumps(head))  # for runner.py --merge
    warnings.filterwarnings("ignore", message=".*tokens of calibration for linears")
    for group in plan:
        if not bench.late() and board.runs().left(group):
            try:
                bench.one_group(group)
            except Exception:  # another method may work
                board.failed(group.name, traceback.format_exc())
                traceback.print_exc()
            gc.collect()  # the model refers to itself
            if args.device == "cuda":
                torch.cuda.empty_cache()
        head["settings"]["seconds"] = round(time.time() - start)
        path = write_table(args.out, TABLE, head, [board], plan)  # whatever comes, this is there
    return path


if __name__ == "__main__":
    main()
