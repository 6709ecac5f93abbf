"""Scores of answers against references: exact match, F1 of words (SQuAD's), ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous space, as SQuAD's scorer compares."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, reference: str) -> float:
    return float(normalised(answer) == normalised(reference))


def word_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words; two empty answers agree."""
    a, r = normalised(answer).split(), normalised(reference).split()
    if not a or not r:
        return float(a == r)
    common = sum((Counter(a) & Counter(r)).values())
    return 2 * common / (len(a) + len(r))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of lower-case words (letters and digits), without stemming."""
    a, r = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    if not a or not r:
        return float(a == r)
    return 2 * _longest_common(a, r) / (len(a) + len(r))


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
