"""Which numbers of tokens a decoder's training steps are recorded for.

A recording serves batches of one size. Batches of many lengths would each want one of their own, and a recording costs what a
dozen eager steps do. So a packed row is filled up to a size that is there, or that others will want, and what is met seldom runs
eagerly. The rule was chosen by simulating runs of random lengths on measured costs; it knows sizes and counts only, nothing of
models and graphs. :mod:`peft_nvfp4.training.cuda_graphs` asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch

from ..memory.device import free_bytes
from .graph_recording import Unsupported

MAX_GRAPHS = 32
"""Combinations of input shapes that are recorded at one time: those that are met most often."""
NEAR = 1.5
"""A packed row is filled up to the tokens of a recording that is there, up to this factor,"""
FILLING = 20_000
"""until so many tokens were computed for nothing: they take about as long as recording the row's own size (0.5 s, and 0.015 ms a
token, for 1B of parameters on an H200)."""
HEADROOM = 1.5
"""A packed row longer than all recordings is filled up by this factor, where the memory is there: the recordings share a pool of
the longest one's size, so a longer one drops them all. This way that happens a handful of times, and not for each longest row."""
RECORDING_COST = 4
"""Of a recording, in what an eager step takes longer than a replay: 0.55 s and 0.14 s for 1B of parameters on an H200."""


def rounded_up(tokens: int) -> int:
    """To a multiple of an eighth of a power of two, and of 64."""
    step = max(64, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


class RecordedSizes:
    """The sizes of one decoder's recordings. A *key* stands for one combination of input shapes; ``recorded`` maps the keys of
    the recordings that are there to their numbers of tokens.

    Attributes:
        largest: tokens of the largest recording.
        pool_bytes: of the pool that the recordings share, as the largest one left it.
    """

    def __init__(self):
        self.met: Counter = Counter()  # how often a key was replayed or refused
        self.filled: Counter = Counter()  # tokens that were filled up for want of a recording of a size
        self.longer: list[int] = []  # tokens of batches since the largest recording that were longer
        self.largest = 0
        self.pool_bytes = 0

    def forget_recordings(self) -> None:
        """There are none any more."""
        self.longer, self.largest, self.pool_bytes = [], 0, 0

    def filled_size(self, tokens: int, recorded: dict[Hashable, int]) -> int:
        """To how many a packed row of so many tokens is filled up: an eighth of a power of two (6 % on average), so that few
        recordings serve all batches; more where that saves a recording (:data:`NEAR`, :data:`HEADROOM`)."""
        size, sizes = rounded_up(tokens), set(recorded.values())
        if size in sizes or not sizes:
            return size
        if size > max(sizes):
            longer = rounded_up(int(HEADROOM * size))
            return longer if self._finds_room_for(longer) else size
        nearest = min(n for n in sizes if n >= size)
        if nearest > NEAR * tokens or self.filled[size] + nearest - size > FILLING:
            return size
        self.filled[size] += nearest - size
        return nearest

    def _finds_room_for(self, tokens: int) -> bool:
        """Whether a pool for so many tokens fits on the GPU in the place of today's, and a tenth to spare."""
        if not torch.cuda.is_available():
            return True
        free = free_bytes(torch.device("cuda", torch.cuda.current_device()))
        return tokens / self.largest * self.pool_bytes < 0.9 * (free + self.pool_bytes)

    def giving_way(self, key: Hashable, tokens: int, recorded: dict[Hashable, int]) -> list[Hashable]:
        """The recordings that have to go before ``key``, of so many tokens, is recorded.

        The one that is met least gives way to one that is met more often. A recording of more tokens than any before finds no
        free memory of its size in the pool that they share. So all are dropped, and made anew in a larger pool when they are met
        again; but if it is little longer, not before eager steps of such batches have cost as much as that will.

        Raises:
            Unsupported: a recording is not worth it yet.
        """
        if tokens > self.largest:
            self.longer.append(tokens)
            if tokens < HEADROOM * self.largest and len(self.longer) < RECORDING_COST * len(recorded):
                raise Unsupported("it has more tokens than all batches that are recorded, and few batches do")
            self.largest, self.longer = max(self.longer), []
            return list(recorded)
        if len(recorded) < MAX_GRAPHS:
            return []
        self.met[key] += 1
        rarest = min(recorded, key=self.met.__getitem__)
        if self.met[key] <= self.met[rarest]:
            raise Unsupported(f"{MAX_GRAPHS} combinations of input shapes are recorded, and met more often than this one")
        return [rarest]
