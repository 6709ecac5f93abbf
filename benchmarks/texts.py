"""Real texts for calibration and for held-out measurements.

Any ``.txt`` file (a text on every line) or ``.jsonl`` file (``text`` or ``document`` of every line). By default two files that
``reproduce/sources.py`` fetches: ``c4_demo.jsonl``, 300 web pages, and ``wiki_demo.txt``, encyclopedia articles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reproduce import sources
from torch import Tensor

from peft_nvfp4.calibration.data import batches

DEFAULT = ("c4_demo.jsonl", "wiki_demo.txt")
SHORTEST, LONGEST = 200, 4000
"""Characters: headings and captions are left out; a longer text is cut up, so that a few long articles do not make up all of a
sample."""


def read(path: Path) -> list[str]:
    """The texts of a file, in its order."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        texts = [row.get("text") or row.get("document") or "" for row in rows]
    else:
        texts = content.split("\n")
    return [text for text in texts if len(text) >= SHORTEST]


def split(paths: Sequence[Path]) -> tuple[list[str], list[str]]:
    """(for calibration, held out): the first two thirds of every file, and the rest. No text is in both."""
    calibration, held_out = [], []
    for path in paths:
        texts = read(path)
        cut = 2 * len(texts) // 3
        calibration += texts[:cut]
        held_out += texts[cut:]
    seen = set(calibration)
    return pieces(calibration), pieces([text for text in held_out if text not in seen])


def pieces(texts: list[str]) -> list[str]:
    return [text[i : i + LONGEST] for text in texts for i in range(0, len(text), LONGEST)]


def token_ids(texts: list[str], tokenizer: Any, samples: int, length: int, seed: int) -> Tensor:
    """(samples, length) ids: texts shuffled, joined and cut.

    Raises:
        ValueError: the texts are too short for that.
    """
    found = torch.cat([b["input_ids"] for b in batches(texts, tokenizer, samples=samples, seq_len=length, seed=seed)])
    if found.shape != (samples, length):
        raise ValueError(
            f"the texts give {found.shape[0]} sequences of {length} tokens, not {samples}; ask for fewer, or --text more"
        )
    return found


def default_paths() -> list[Path]:
    """The two files of the docstring.

    Raises:
        FileNotFoundError: they are not there.
    """
    return [sources.path_of(name) for name in DEFAULT]
