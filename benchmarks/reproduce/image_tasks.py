"""Questions with a picture and options to choose from: the rows of the paper's Table 4, and of a set that needs no hub.

``scienceqa`` is the paper's data set by name, its rows that have a picture, in its own splits. ``digits`` stands in for it where
no hub is reached: two of the 1,797 handwritten digits that scikit-learn ships (8 x 8 pixels, real ones; no packaged set has
questions about photographs) side by side, and a question about them that is made here. It asks for much less than ScienceQA.

The options are shown, each with a letter, and the letters are what is scored: so one pass answers a row however long its options
are, and "Which of these ...?" is a question at all. Paper and ScienceQA's own evaluation do the same, as far as is known.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import sources
from .prompts import Item, Row
from .tasks import SCORED, Task

LETTERS = "ABCDE"
INSTRUCTION = "Answer with the letter of the right option."
EDGE = 224
"""Pixels of a picture of digits: processors make small pictures larger, some of them to a few image tokens only."""
CLUSTER = 4
"""Digits that are paired with each other only, so that none is in two splits."""
KINDS = ("left", "right", "larger")
SCIENCE_QA = "derek-thomas/ScienceQA"


@dataclass(frozen=True)
class Pictured(Item):
    """An item whose candidates are letters of options that its question shows.

    Attributes:
        image: makes the picture (PIL, RGB).
    """

    image: Callable[[], Any] | None = None


def pictured(
    question: str, options: Sequence[str], gold: int, image: Callable[[], Any], group: str, context: str = "", subset: str = ""
) -> Pictured:
    """
    Raises:
        ValueError: fewer than two options, more than there are letters, or the answer is none of them.
    """
    if not 2 <= len(options) <= len(LETTERS) or not 0 <= gold < len(options):
        raise ValueError(f"the answer {gold} of the options {list(options)}")
    lines = [f"Question: {question}", *(f"{letter}. {text}" for letter, text in zip(LETTERS, options)), INSTRUCTION]
    letters = tuple(LETTERS[: len(options)])
    return Pictured(context, "\n".join(lines), letters[gold], letters, gold, group, subset, image=image)


def _science_qa() -> tuple[list[Item], list[Item]]:
    train, test = (sources.from_hub(SCIENCE_QA, None, split, images="image") for split in ("train", "test"))
    return [science_qa(row) for row in train if row["image"]], [science_qa(row) for row in test if row["image"]]


def science_qa(row: Row) -> Pictured:
    """A row whose picture is the bytes of a file. Rows of other pictures, questions or options are of other groups: the data set
    asks the same question of many maps, and its own splits are the paper's."""
    packed = row["image"]["bytes"]
    mark = hashlib.sha256(packed + repr((row["question"], row["choices"])).encode()).hexdigest()
    image = partial(_opened, packed)
    return pictured(row["question"], row["choices"], row["answer"], image, mark, row["hint"], row["subject"])


def _opened(packed: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(packed)).convert("RGB")


def _digits() -> tuple[list[Item], list[Item]]:
    """All ordered pairs of each cluster of digits, with one question a pair."""
    lines = gzip.decompress(sources.path_of(sources.DIGITS).read_bytes()).decode().split()
    rows = [tuple(int(v) for v in line.split(",")) for line in lines]  # 8 * 8 values of 0 to 16, and the digit
    random.Random(0).shuffle(rows)
    found = []
    for start in range(0, len(rows), CLUSTER):
        for i, (left, right) in enumerate(itertools.permutations(rows[start : start + CLUSTER], 2)):
            found.append(_about_digits(KINDS[(start // CLUSTER + i) % len(KINDS)], left, right, str(start)))
    return found, []


def _about_digits(kind: str, left: Sequence[int], right: Sequence[int], group: str) -> Pictured:
    """The other digit is among the options, so that finding a digit is not enough: it has to be the right one of two."""
    a, b = left[-1], right[-1]
    image = partial(_side_by_side, left[:-1], right[:-1])
    if kind == "larger":
        options = ("the left one", "the right one", "neither")
        return pictured("Which of the two digits is larger?", options, (a > b, a < b, a == b).index(True), image, group, "", kind)
    asked, other = (a, b) if kind == "left" else (b, a)
    rng = random.Random(f"{group} {kind} {left} {right}")
    wrong = [digit for digit in range(10) if digit not in (asked, other)]
    options = [asked, *([other] if other != asked else []), *rng.sample(wrong, 3)][:4]
    rng.shuffle(options)
    names = [str(digit) for digit in options]
    return pictured(f"Which digit is on the {kind}?", names, options.index(asked), image, group, "", kind)


def _side_by_side(left: Sequence[int], right: Sequence[int]) -> Any:
    """Black on white, in a square: 8 x 8 and 8 x 8 in the middle of 16 x 16, enlarged."""
    from PIL import Image

    small = Image.new("L", (16, 16), 255)
    for x, values in ((0, left), (8, right)):
        small.paste(Image.frombytes("L", (8, 8), bytes(255 - v * 255 // 16 for v in values)), (x, 4))
    return small.resize((EDGE, EDGE), Image.Resampling.BICUBIC).convert("RGB")


TASKS = {  # length and answer are not used: prompts are whole, pictures set their length, and an answer is one token
    "scienceqa": Task("scienceqa", "ScienceQA", SCORED, _science_qa, 0, 1, hub=True, test=2100),  # all 2,017 of them
    "digits": Task("digits", "ScienceQA", SCORED, _digits, 0, 1),
}
