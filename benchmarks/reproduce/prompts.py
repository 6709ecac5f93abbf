"""Rows of the data sets as what a model reads and what it should say: the prompt forms of the paper's Table 8.

| task | input | target |
|---|---|---|
| SST-2 | sentence, "It was" | terrible / great |
| RTE | premise, a question whether the hypothesis is true | Yes / No |
| BoolQ | passage, question | Yes / No |
| WSC | text, a question about the pronoun's referent | Yes / No |
| WiC | word, two sentences, a question about shared meaning | Yes / No |
| COPA | premise, "because" or "so" | the continuation |

Wordings that the table only describes are those of MeZO's prompts, which it follows. Questions with options are asked without
showing the options, and each option is scored as the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One example.

    Attributes:
        context: text that loses its end where the whole is too long; may be empty.
        question: what follows it, never cut.
        target: what should be said next, with its leading space if it has one.
        candidates: what is scored; the target is ``candidates[gold]``. Empty where the answer is generated.
        group: rows of one group are in one split (a passage, a word, a question).
        subset: part of the task that is reported by itself as well.
        references: all answers that count (generation); the target is the first.
    """

    context: str
    question: str
    target: str
    candidates: tuple[str, ...] = ()
    gold: int = 0
    group: str = ""
    subset: str = ""
    references: tuple[str, ...] = ()


def _choice(context: str, question: str, candidates: tuple[str, ...], gold: int, group: str, subset: str = "") -> Item:
    return Item(context, question, candidates[gold], candidates, gold, group, subset)


def _answer(context: str, question: str, references: tuple[str, ...], group: str) -> Item:
    return Item(context, question, " " + references[0], group=group, references=references)


def _yes(context: str, question: str, true: bool, group: str) -> Item:
    return _choice(context, question, ("No", "Yes"), int(true), group)


# ---------------------------------------------------------------------------------------------- classification


def sentiment(text: str, positive: bool) -> Item:
    return _choice(text, " It was", (" terrible", " great"), int(positive), text)


def boolq(row: Row) -> Item:
    question = row["question"].strip().rstrip("?")
    label = row["label"] if "label" in row else row["answer"]
    return _yes(row["passage"], f"\n{question}?\n", str(label).lower() in ("true", "1"), question)


def rte(premise: str, hypothesis: str, entailed: bool) -> Item:
    return _yes(premise, f'\nDoes this mean that "{hypothesis}" is true? Yes or No?\n', entailed, premise)


def wic(word: str, first: str, second: str, same: bool) -> Item:
    head = f'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
    return _yes("", f"{head}{first}\n{second}\n", same, word)


def wsc(text: str, pronoun: str, referent: str, same: bool) -> Item:
    asked = f'\nIn the previous sentence, does the pronoun "{pronoun}" refer to {referent}? Yes or No?\n'
    return _yes(text, asked, same, text)


def referent(row: Row) -> Item:
    """Who a pronoun stands for, of two readings and "ambiguous" (DisambiguationQA). Sentences that differ in the pronoun alone
    have the same readings: one group."""
    candidates, gold = options(row)
    asked = "\nIn the previous sentence, what does the pronoun mean?\nAnswer:"
    return _choice(row["question"], asked, candidates, gold, "|".join(sorted(candidates)))


def copa(premise: str, asks: str, choices: tuple[str, str], label: int) -> Item:
    candidates = tuple(" " + (c[:1].lower() + c[1:]) for c in choices)
    link = " because" if asks == "cause" else " so"
    return _choice("", premise.rstrip(". ") + link, candidates, label, premise)


def winogrande(row: Row) -> Item:
    before, after = row["sentence"].split("_")
    candidates = tuple(f" {row[key]}{after}" for key in ("option1", "option2"))
    return _choice("", before.rstrip(), candidates, int(row["answer"]) - 1, row["sentence"])


# ---------------------------------------------------------------------------------------------- questions with options


def options(row: Row) -> tuple[tuple[str, ...], int]:
    """Of "A. first\\nB. second" and "B. second": (" first", " second") and 1.

    Raises:
        ValueError: the answer is none of the options.
    """
    lines = [line.strip() for line in row["options"].split("\n") if re.match(r"\s*[A-H]\.", line)]
    texts = [line[2:].strip() for line in lines]
    gold = [i for i, line in enumerate(lines) if line[:2] == row["answer"].strip()[:2]]
    if len(gold) != 1 or len(texts) < 2 or not all(texts):
        raise ValueError(f"the answer {row['answer']!r} is not one of the options {lines}")
    return tuple(f" {text}" for text in texts), gold[0]


def multiple_choice(row: Row, subset: str = "") -> Item:
    candidates, gold = options(row)
    question = row["question"].strip()
    return _choice(row.get("passage", ""), _asked(question, bool(row.get("passage"))), candidates, gold, question, subset)


def _asked(question: str, after_context: bool) -> str:
    return f"{chr(10) if after_context else ''}Question: {question}\nAnswer:"


def arc(row: Row) -> Item:
    texts, labels = row["choices"]["text"], row["choices"]["label"]
    candidates = tuple(f" {text}" for text in texts)
    return _choice("", _asked(row["question"], False), candidates, labels.index(row["answerKey"]), row["question"])


# ---------------------------------------------------------------------------------------------- generation


def word_problem(row: Row) -> Item:
    """ASDiv: the answer is a value and its unit."""
    return _answer(row["passage"], f"\nQuestion: {row['question']}\nAnswer:", (row["answer"].strip(),), row["passage"])


def gsm8k(row: Row) -> Item:
    """The worked solution is learned; the number after "####" counts."""
    return _answer(row["question"], "\nAnswer:", (row["answer"].replace("\n", " ").strip(),), row["question"])


def question_on_passage(context: str, question: str, answers: tuple[str, ...]) -> Item:
    return _answer(f"Context: {context}", f"\nQuestion: {question}\nAnswer:", answers, context)


def summary(text: str, of: str, result: str) -> Item:
    return _answer(text, f"\nSummary of the {of}:", (" ".join(result.split()),), text)


def instruction(row: Row) -> Item:
    given = f"\n{row['input']}" if row.get("input") else ""
    return Item("", f"Instruction: {row['instruction']}{given}\nResponse:", " " + row["output"].strip(), group=row["instruction"])


Form = Callable[..., Item]
