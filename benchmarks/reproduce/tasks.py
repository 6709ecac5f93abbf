"""The tasks of the accuracy tables: their rows, what they stand for in the paper, and their splits.

Most tasks read files that packages contain (:mod:`reproduce.sources`); those with ``hub`` are the paper's own data sets, by name,
for machines that reach a hub. Splits are made by a hash of each row's group (its passage, word or question), so that they are the
same everywhere and no group is in two of them; where a data set has an official test split, that is used.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common import smollm2_reviews

from . import prompts, sources
from .prompts import Item, item

Rows = tuple[list[Item], list[Item]]
"""Rows to be split, and rows of an official test split."""
SCORED, GENERATED = "candidates", "generate"


@dataclass(frozen=True)
class Splits:
    train: list[Item]
    validation: list[Item]
    test: list[Item]


@dataclass(frozen=True)
class Task:
    """Attributes:
    stands_for: the paper's data set that this one is, or takes the place of.
    kind: ``candidates`` (score them) or ``generate`` (greedy answer).
    metric: what ``generate`` is scored by, a key of :data:`reproduce.scoring.METRICS`.
    length: tokens of prompt and target at most, a multiple of 16: contexts are cut to fit, all batches have this shape.
    answer: tokens of a target at most (a longer one is left out of training), and of a generated answer.
    hub: the paper's own data set.
    test, validation: rows at most.
    """

    name: str
    stands_for: str
    kind: str
    load: Callable[[], Rows]
    length: int
    answer: int
    metric: str = "accuracy"
    hub: bool = False
    test: int = 500
    validation: int = 200

    def splits(self) -> Splits:
        """Disjoint by group, the same everywhere.

        Raises:
            FileNotFoundError: the task's files were not fetched.
        """
        rows, official = self.load()
        seen = {row.group for row in official}
        rows = [row for row in rows if row.group not in seen]
        test, rows = (_some(official, self.test, "test"), rows) if official else _split(rows, self.test, "test")
        validation, train = _split(rows, self.validation, "validation")
        random.Random(0).shuffle(train)
        return Splits(train, validation, test)


def _order(items: Sequence[Item], salt: str) -> dict[str, list[Item]]:
    """Groups of rows by the hash of their name."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for row in items:
        groups[row.group].append(row)
    return {g: groups[g] for g in sorted(groups, key=lambda g: hashlib.sha256(f"{salt}{g}".encode()).digest())}


def _split(items: Sequence[Item], count: int, salt: str) -> tuple[list[Item], list[Item]]:
    """(some whole groups with at least ``count`` rows in all, but of at most a third of the rows; the rest)."""
    taken, rest, limit = [], [], min(count, len(items) // 3)
    for group in _order(items, salt).values():
        (taken if len(taken) < limit else rest).extend(group)
    return taken, rest


def _some(items: Sequence[Item], count: int, salt: str) -> list[Item]:
    return [row for group in _order(items, salt).values() for row in group][:count]


def _movies() -> Rows:
    rows = smollm2_reviews._read_reviews(sources.path_of("movies.txt"))
    return [item("sentiment", {"text": row.text, "label": row.label}) for row in rows], []


def _boolq() -> Rows:
    rows = [row for row in sources.read("boolq_combined.jsonl") if "label" in row]
    return [item("boolq", row) for row in rows], [item("boolq", row) for row in sources.read("boolq_dev.jsonl")]


def _wic(pairs: int = 12000) -> Rows:
    """Two examples of one lemma in WordNet: the same synset or two different ones. At most three pairs of a kind for a lemma, so
    that frequent words do not make up the set; as many pairs of either kind."""
    by_lemma: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for synset, lemma, sentence in sources.examples():
        by_lemma[lemma].append((synset, sentence))
    same, different = [], []
    for lemma, found in sorted(by_lemma.items()):
        rng = random.Random(lemma)
        both = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if a[1] != b[1]]
        rng.shuffle(both)
        for kind, alike in ((same, True), (different, False)):
            chosen = [(a, b) for a, b in both if (a[0] == b[0]) is alike][:3]
            rows = ({"word": lemma, "sentence1": a[1], "sentence2": b[1], "label": alike} for a, b in chosen)
            kind += [item("wic", row) for row in rows]
    count = min(len(same), len(different), pairs // 2)
    return _some(same, count, "same") + _some(different, count, "different"), []


def _lettered(form: str, *names: str) -> list[Item]:
    """Of files whose rows have lettered options; each file is a subset if there are several."""
    rows = ((name, prompts.lettered(row)) for name in names for row in sources.read(f"{name}.jsonl"))
    return [item(form, row, subset=name if len(names) > 1 else "") for name, row in rows if row]


def _disfl_qa() -> Rows:
    rows = ({key: _joined(row[key]) for key in ("passage", "question", "answer")} for row in sources.read("disfl_qa.jsonl"))
    return [item("squad", {**row, "context": row["passage"], "answers": {"text": [row["answer"]]}}) for row in rows], []


def _joined(text: str) -> str:
    """Without the spaces that this file has before punctuation."""
    for mark in ".,?!:;)'’”":
        text = text.replace(f" {mark}", mark)
    return " ".join(text.replace("( ", "(").replace(" - ", "-").split())


def _instructions() -> Rows:
    """Instructions and, so that 3,000 steps are not 50 passes over the same rows, some of other tasks' training rows."""
    found = [item("instruction", row, subset="instructions") for row in sources.read("alpaca.json")]
    for name in ("sentiment", "boolq", "wic", "commonsense", "asdiv", "xsum"):
        found += [replace(row, subset=name) for row in TASKS[name].splits().train[:1500]]
    return found, []


def _commonsense() -> Rows:
    return _lettered("options", "piqa", "siqa", "commonsenseqa", "openbookqa"), []


def _referent() -> Rows:
    return _lettered("referent", "disambiguation_qa"), []


def _file(form: str) -> Callable[[], Rows]:
    """The file with the form's name."""
    return lambda: ([item(form, row) for row in sources.read(f"{form}.jsonl")], [])


def _hub(form: str, name: str, config: str | None = None, test: str = "validation") -> Callable[[], Rows]:
    """A data set by name, from a hub."""
    return lambda: tuple([item(form, row) for row in sources.from_hub(name, config, split)] for split in ("train", test))


_PACKAGED = (
    Task("sentiment", "SST-2", SCORED, _movies, 64, 4),
    Task("commonsense", "COPA, ARC (a mix of PIQA, SIQA, CommonsenseQA, OpenBookQA)", SCORED, _commonsense, 96, 48),
    Task("wic", "WiC", SCORED, _wic, 80, 4),
    Task("boolq", "BoolQ", SCORED, _boolq, 224, 4),
    Task("asdiv", "GSM8K", GENERATED, _file("asdiv"), 112, 12, "exact_match", test=200),
    Task("disfl_qa", "SQuAD", GENERATED, _disfl_qa, 288, 24, "f1", test=200, validation=100),
    Task("xsum", "SAMSum", GENERATED, _file("xsum"), 256, 48, "rouge_l", test=100, validation=100),
    Task("referent", "WSC", SCORED, _referent, 96, 24, validation=40),
    Task("instructions", "instructions, mixed", GENERATED, _instructions, 256, 192, "rouge_l", test=300, validation=1),
)  # fmt: skip
_ORIGINAL = (
    Task("sst2", "SST-2", SCORED, _hub("sst2", "glue", "sst2"), 64, 4),
    Task("rte", "RTE", SCORED, _hub("rte", "glue", "rte"), 256, 4),
    Task("boolq_hub", "BoolQ", SCORED, _hub("boolq", "super_glue", "boolq"), 224, 4),
    Task("wsc", "WSC", SCORED, _hub("wsc", "super_glue", "wsc.fixed"), 128, 4),
    Task("wic_hub", "WiC", SCORED, _hub("wic", "super_glue", "wic"), 96, 4),
    Task("copa", "COPA", SCORED, _hub("copa", "super_glue", "copa"), 64, 32),
    Task("winogrande", "WinoG.", SCORED, _hub("winogrande", "winogrande", "winogrande_xl"), 64, 32),
    Task("arc_easy", "ARC-E", SCORED, _hub("arc", "ai2_arc", "ARC-Easy", "test"), 128, 48),
    Task("arc_challenge", "ARC-C", SCORED, _hub("arc", "ai2_arc", "ARC-Challenge", "test"), 128, 48),
    Task("squad", "SQuAD", GENERATED, _hub("squad", "squad"), 384, 32, "f1"),
    Task("gsm8k", "GSM8K", GENERATED, _hub("gsm8k", "gsm8k", "main", "test"), 384, 192, "last_number"),
    Task("samsum", "SAMSum", GENERATED, _hub("samsum", "samsum", None, "test"), 384, 96, "rouge_l"),
)  # fmt: skip
TASKS = {t.name: t for t in _PACKAGED} | {t.name: replace(t, hub=True) for t in _ORIGINAL}
DEFAULT = ("sentiment", "commonsense", "wic", "boolq", "asdiv", "disfl_qa", "xsum", "referent")
"""Of the accuracy tables, most telling first."""
