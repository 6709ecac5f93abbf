"""The tasks of the accuracy tables: their rows, what they stand for in the paper, and their splits.

A task of ``SOURCE_PACKAGE`` reads files that packages contain (:mod:`reproduce.sources`); one of ``SOURCE_HUB`` is the paper's
own data set, by name, for machines that reach a hub. Splits are made by a hash of each row's group (its passage, word or
question), so that they are the same everywhere and no group is in two of them; where a data set has an official test split, that
is used.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from common import smollm2_reviews as data

from . import prompts, sources
from .prompts import Item

SOURCE_PACKAGE, SOURCE_HUB = "package", "hub"
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
    load: returns (rows to be split, rows of an official test split).
    length: tokens of prompt and target at most, a multiple of 16: contexts are cut to fit, all batches have this shape.
    answer: tokens of a target at most (a longer one is left out of training), and of a generated answer.
    test, validation: rows at most.
    """

    name: str
    stands_for: str
    kind: str
    load: Callable[[], tuple[list[Item], list[Item]]]
    length: int
    answer: int
    metric: str = "accuracy"
    source: str = SOURCE_PACKAGE
    test: int = 500
    validation: int = 200

    def splits(self) -> Splits:
        """Disjoint by group, the same everywhere.

        Raises:
            FileNotFoundError: the task's files were not fetched.
        """
        rows, official = self.load()
        seen = {item.group for item in official}
        rows = [item for item in rows if item.group not in seen]
        test, rows = (_some(official, self.test, "test"), rows) if official else _split(rows, self.test, "test")
        validation, train = _split(rows, self.validation, "validation")
        random.Random(0).shuffle(train)
        return Splits(train, validation, test)


def _order(items: Sequence[Item], salt: str) -> dict[str, list[Item]]:
    """Groups of rows by the hash of their name."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.group].append(item)
    return {g: groups[g] for g in sorted(groups, key=lambda g: hashlib.sha256(f"{salt}{g}".encode()).digest())}


def _split(items: Sequence[Item], count: int, salt: str) -> tuple[list[Item], list[Item]]:
    """(some whole groups with at least ``count`` rows in all, but of at most a third of the rows; the rest)."""
    taken, rest, limit = [], [], min(count, len(items) // 3)
    for group in _order(items, salt).values():
        (taken if len(taken) < limit else rest).extend(group)
    return taken, rest


def _some(items: Sequence[Item], count: int, salt: str) -> list[Item]:
    return [item for group in _order(items, salt).values() for item in group][:count]


# ---------------------------------------------------------------------------------------------- from packages


def _movies() -> tuple[list[Item], list[Item]]:
    rows = data._read_reviews(sources.path_of("movies.txt"))
    return [prompts.sentiment(row.text, bool(row.label)) for row in rows], []


def _boolq() -> tuple[list[Item], list[Item]]:
    rows = [row for row in sources.read("boolq_combined.jsonl") if "label" in row]
    return [prompts.boolq(row) for row in rows], [prompts.boolq(row) for row in sources.read("boolq_dev.jsonl")]


def _wic(pairs: int = 12000) -> tuple[list[Item], list[Item]]:
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
            kind += [prompts.wic(lemma, a[1], b[1], alike) for a, b in chosen]
    count = min(len(same), len(different), pairs // 2)
    return _some(same, count, "same") + _some(different, count, "different"), []


def _options(*names: str) -> tuple[list[Item], list[Item]]:
    return [item for name in names for item in _sound(f"{name}.jsonl", lambda row, n=name: prompts.multiple_choice(row, n))], []


def _sound(file: str, make: Callable[[dict], Item]) -> Iterator[Item]:
    """Rows whose answer is none of their options (the files have a few) are left out."""
    for row in sources.read(file):
        with suppress(ValueError):
            yield make(row)


def _referent() -> tuple[list[Item], list[Item]]:
    return list(_sound("disambiguation_qa.jsonl", prompts.referent)), []


def _asdiv() -> tuple[list[Item], list[Item]]:
    return [prompts.word_problem(row) for row in sources.read("asdiv.jsonl")], []


def _disfl_qa() -> tuple[list[Item], list[Item]]:
    rows = sources.read("disfl_qa.jsonl")
    return [prompts.question_on_passage(_joined(r["passage"]), _joined(r["question"]), (_joined(r["answer"]),)) for r in rows], []


def _joined(text: str) -> str:
    """Without the spaces that this file has before punctuation."""
    for mark in ".,?!:;)'’”":
        text = text.replace(f" {mark}", mark)
    return " ".join(text.replace("( ", "(").replace(" - ", "-").split())


def _xsum() -> tuple[list[Item], list[Item]]:
    rows = sources.read("xsum.jsonl")
    return [prompts.summary(" ".join(row["document"].split()), "report", row["summary"]) for row in rows], []


def _mts_dialog() -> tuple[list[Item], list[Item]]:
    return [prompts.summary(r["dialogue"], "dialogue", r["section_text"]) for r in sources.read("mts_dialog.csv")], []


def _alpaca() -> tuple[list[Item], list[Item]]:
    return [prompts.instruction(row) for row in sources.read("alpaca.json")], []


def _mixed() -> tuple[list[Item], list[Item]]:
    """Instructions and, so that 3,000 steps are not 50 passes over the same rows, some of other tasks' training rows."""
    found = [replace(item, subset="instructions") for item in _alpaca()[0]]
    for name in ("sentiment", "boolq", "wic", "commonsense", "asdiv", "xsum"):
        found += [replace(item, subset=name) for item in TASKS[name].splits().train[:1500]]
    return found, []


# ---------------------------------------------------------------------------------------------- from a hub


def _hub(name: str, config: str | None, make: Callable[[dict], Item], test: str = "validation"):
    def load() -> tuple[list[Item], list[Item]]:
        train, held = (sources.from_hub(name, config, split) for split in ("train", test))
        return [make(row) for row in train], [make(row) for row in held]

    return load


def _hub_squad(row: dict) -> Item:
    return prompts.question_on_passage(row["context"], row["question"], tuple(dict.fromkeys(row["answers"]["text"])))


def _hub_sst2(row: dict) -> Item:
    return prompts.sentiment(row["sentence"].strip(), bool(row["label"]))


def _hub_rte(row: dict) -> Item:
    return prompts.rte(row["sentence1"], row["sentence2"], row["label"] == 0)


def _hub_wsc(row: dict) -> Item:
    return prompts.wsc(row["text"], row["span2_text"], row["span1_text"], bool(row["label"]))


def _hub_copa(row: dict) -> Item:
    return prompts.copa(row["premise"], row["question"], (row["choice1"], row["choice2"]), row["label"])


def _hub_wic(row: dict) -> Item:
    return prompts.wic(row["word"], row["sentence1"], row["sentence2"], bool(row["label"]))


MIX = ("piqa", "siqa", "commonsenseqa", "openbookqa")
_PACKAGED = (
    Task("sentiment", "SST-2", SCORED, _movies, 64, 4),
    Task("commonsense", "COPA, ARC (a mix of PIQA, SIQA, CommonsenseQA, OpenBookQA)", SCORED, lambda: _options(*MIX), 96, 48),
    Task("wic", "WiC", SCORED, _wic, 80, 4),
    Task("boolq", "BoolQ", SCORED, _boolq, 224, 4),
    Task("asdiv", "GSM8K", GENERATED, _asdiv, 112, 12,
         "exact_match", test=200),
    Task("disfl_qa", "SQuAD", GENERATED, _disfl_qa, 288, 24, "f1", test=200, validation=100),
    Task("xsum", "SAMSum", GENERATED, _xsum, 256, 48, "rouge_l", test=100, validation=100),
    Task("referent", "WSC", SCORED, _referent, 96, 24,
         validation=40),
    Task("mts_dialog", "SAMSum", GENERATED, _mts_dialog, 384, 96, "rouge_l", validation=15),
    *(Task(name, "COPA" if name == "piqa" else "ARC", SCORED, lambda name=name: _options(name), 96, 48) for name in MIX),
    Task("alpaca", "instructions", GENERATED, _alpaca, 256, 192, "rouge_l", test=100, validation=1),
    Task("instructions", "instructions, mixed", GENERATED, _mixed, 256, 192, "rouge_l", test=300, validation=1),
)  # fmt: skip
_ORIGINAL = (
    Task("sst2", "SST-2", SCORED, _hub("glue", "sst2", _hub_sst2), 64, 4),
    Task("rte", "RTE", SCORED, _hub("glue", "rte", _hub_rte), 256, 4),
    Task("boolq_hub", "BoolQ", SCORED, _hub("super_glue", "boolq", prompts.boolq), 224, 4),
    Task("wsc", "WSC", SCORED, _hub("super_glue", "wsc.fixed", _hub_wsc), 128, 4),
    Task("wic_hub", "WiC", SCORED, _hub("super_glue", "wic", _hub_wic), 96, 4),
    Task("copa", "COPA", SCORED, _hub("super_glue", "copa", _hub_copa), 64, 32),
    Task("winogrande", "WinoG.", SCORED, _hub("winogrande", "winogrande_xl", prompts.winogrande), 64, 32),
    Task("arc_easy", "ARC-E", SCORED, _hub("ai2_arc", "ARC-Easy", prompts.arc, "test"), 128, 48),
    Task("arc_challenge", "ARC-C", SCORED, _hub("ai2_arc", "ARC-Challenge", prompts.arc, "test"), 128, 48),
    Task("squad", "SQuAD", GENERATED, _hub("squad", None, _hub_squad), 384, 32, "f1"),
    Task("gsm8k", "GSM8K", GENERATED, _hub("gsm8k", "main", prompts.gsm8k, "test"), 384, 192, "last_number"),
    Task("samsum", "SAMSum", GENERATED,
         _hub("samsum", None, lambda r: prompts.summary(r["dialogue"], "dialogue", r["summary"]), "test"), 384, 96, "rouge_l"),
)  # fmt: skip
TASKS = {t.name: t for t in _PACKAGED} | {t.name: replace(t, source=SOURCE_HUB) for t in _ORIGINAL}
DEFAULT = ("sentiment", "commonsense", "wic", "boolq", "asdiv", "disfl_qa", "xsum", "referent")
"""Of the accuracy tables, most telling first."""
