"""Which tile of the extension's GEMM computes a product: a model of waves and tails, or what was measured on this card.

A GEMM is cut into output tiles, which the multiprocessors (SMs) take in turn. With s SMs and t tiles the busiest SM computes
ceil(t / s) of them, and the launch lasts as long as that SM:

    time = ceil(t / s) * (k tiles * (max(products / rate, bytes / share of the L2 cache's rate) + step) + exposed epilogue)
           + fill + start

Small tiles give more SMs something to do and waste less in the last wave; large ones load fewer bytes a product and pay the cost
of a step and of an epilogue less often. A tile of 128 x 32 loads 2.7 times the bytes a product of one of 128 x 128, which the L2
cache delivers to few SMs, not to all of them. The ping-pong schedule hides the epilogue of all tiles but the last behind the next
tile's products. Several weights of one input are one launch: their tiles are counted together.

The rates are estimates from a data sheet, not measured: only their proportion matters here. ``peft-nvfp4 tune``
measures on the card at hand and stores the winners in the user's cache folder (``PEFT_NVFP4_CACHE``, ``XDG_CACHE_HOME`` or
``~/.cache``); :func:`choose` then prefers them. One file per GPU model and build.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil
from pathlib import Path


@dataclass(frozen=True)
class Tile:
    """One column of the extension's table."""

    m: int
    n: int
    k: int
    schedule: str

    @cached_property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}_{self.schedule}"

    @cached_property
    def kilobytes(self) -> float:
        """Loaded a k tile: codes, and block scales, which come for 128 columns at least."""
        return ((self.m + self.n) * self.k / 2 + (self.m + max(self.n, 128)) * self.k / 16) / 1000


@dataclass(frozen=True)
class Problem:
    """A launch: x (m, k) in one or two terms times weights of ``ns`` rows; ``c``: is something added? ``d``: output type;
    ``rank`` of the low-rank product at the end of the k loop."""

    m: int
    ns: tuple[int, ...]
    k: int
    terms: int = 1
    c: bool = False
    d: str = "bf16"
    rank: int = 0

    @property
    def key(self) -> str:
        """Name in the file of measured tiles: rows in powers of two, since a batch's length varies. Without the rank, which
        lengthens the loop of all tiles alike."""
        rows = 1 << max(0, self.m - 1).bit_length()
        return f"m{rows} n{'+'.join(map(str, self.ns))} k{self.k} terms{self.terms} {'c' if self.c else '-'} {self.d}"


# Microseconds on one SM, estimated (RTX 5080: 900 TFLOP/s dense FP4 on 84 SMs)
BLOCK_US = 0.39  # a product of 128 x 128 x 128
STEP_US = 0.04  # barriers of one k tile
L2_KB_PER_US = 48.0  # to one SM while all load: a tile of 128 x 128 is just not bound by it. (An RTX 5090 moved 41 in a GEMM.)
PORT_KB_PER_US = 160.0  # to one SM at most: 64 bytes a clock
TAIL = 2  # tiles of codes in the time of one of a low-rank product: a quarter as many values of k, at an eighth of the rate
EPILOGUE_US = 1.0  # 128 x 128 outputs of two bytes
ADDEND_US = 0.5  # as many values added
START_US = 4.0  # launch, descriptors
FILL_US = 0.3  # first loads of a tile of 128 x 128 x 128, before anything can be multiplied


def modelled_us(problem: Problem, tile: Tile, sms: int) -> float:
    """Time of a launch by the model above."""
    count = ceil(problem.m / tile.m) * sum(ceil(n / tile.n) for n in problem.ns)
    mine, busy = ceil(count / sms), min(count, sms)
    area = tile.m * tile.n / 128**2
    block = area * tile.k / 128 * BLOCK_US
    load = tile.kilobytes / min(PORT_KB_PER_US, L2_KB_PER_US * sms / busy)
    tail = ceil(problem.rank / (tile.k // 4)) * (max(TAIL * block, load) + STEP_US)
    loop = problem.terms * ceil(problem.k / tile.k) * (max(block, load) + STEP_US) + tail
    width = 2 if problem.d == "f32" else 1
    epilogue = area * width * (EPILOGUE_US + (ADDEND_US if problem.c else 0))
    exposed = epilogue if tile.schedule == "pingpong" else mine * epilogue
    fill = FILL_US * (tile.m + tile.n) * tile.k / (2 * 128**2)
    return mine * loop + exposed + fill + START_US


def choose(problem: Problem, tiles: Sequence[Tile], sms: int, measured: dict[str, str] | None = None) -> Tile:
    """The tile for a problem: the measured one if there is one, else the model's; of equals the earlier in the table."""
    name = (measured or {}).get(problem.key)
    for tile in tiles:
        if tile.name == name:
            return tile
    return min(tiles, key=lambda tile: modelled_us(problem, tile, sms))


@lru_cache(maxsize=4096)
def choose_once(problem: Problem, tiles: tuple[Tile, ...], sms: int, file: Path) -> Tile:
    """:func:`choose` with what ``file`` holds; a training step asks the same questions again and again."""
    return choose(problem, tiles, sms, read(file))


def cache_file(gpu: str, source: str) -> Path:
    """Where the tiles measured on a GPU model with a build of the extension are kept."""
    return _cache_file(gpu, source, os.environ.get("PEFT_NVFP4_CACHE"), os.environ.get("XDG_CACHE_HOME"))


@cache  # asked at every launch
def _cache_file(gpu: str, source: str, base: str | None, xdg: str | None) -> Path:
    folder = Path(base) if base else Path(xdg or Path.home() / ".cache") / "peft_nvfp4"
    return folder / f"tiles-{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-').lower()}-{source}.json"


@cache
def read(file: Path) -> dict[str, str]:
    """``{problem key: tile name}``; empty where nothing usable was stored, since a cache may be lost at any time."""
    try:
        stored = json.loads(file.read_text())["tiles"]
        return {str(key): str(name) for key, name in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store(file: Path, times_us: dict[str, dict[str, float]]) -> dict[str, str]:
    """Adds measurements ``{problem key: {tile name: microseconds}}`` to the file; returns all winners that it holds now."""
    winners = {**read(file), **{key: min(times, key=times.get) for key, times in times_us.items() if times}}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"tiles": winners, "last_times_us": times_us}, indent=1, sort_keys=True))
    partial.replace(file)  # a reader sees the old file or the new one
    read.cache_clear()
    choose_once.cache_clear()
    return winners
