"""GPUs by name: how much memory programs get, whether FP4 tensor cores are there, and the workspaces that cuBLAS takes."""

from __future__ import annotations

import re
from typing import NamedTuple

MIB = 1 << 20

CONTEXT = 512 * MIB
"""Taken by CUDA itself (context, loaded kernels) outside of PyTorch's allocator: 350 to 600 MiB on the GPUs at hand."""
NCCL = 512 * MIB
"""Taken by NCCL on each of several GPUs, outside of PyTorch's allocator: an allowance, not measured here."""
FRAGMENTATION = 0.035
"""Share of the rest that the allocator holds without using: 1.4 % with BF16 LoRA and 3.6 % with this package, measured on an H200
at the largest batch that fits."""


class Card(NamedTuple):
    """One GPU.

    Attributes:
        memory: bytes that the driver reports, a little less than what is printed on the box.
        fp4: FP4 tensor cores.
        workspace: bytes of a cuBLAS workspace as PyTorch sizes it: 32 MiB on data-centre parts from Hopper on, else 8.1.
    """

    name: str
    memory: int
    fp4: bool
    workspace: int


_SMALL, _LARGE = 8320 << 10, 32 << 20

CARDS = {
    card.name: card
    for card in (
        Card("RTX 3060 12GB", 12288 * MIB, False, _SMALL),
        Card("RTX 3090", 24576 * MIB, False, _SMALL),
        Card("RTX 4060 Ti 16GB", 16380 * MIB, False, _SMALL),
        Card("RTX 4070", 12282 * MIB, False, _SMALL),
        Card("RTX 4080", 16376 * MIB, False, _SMALL),
        Card("RTX 4090", 24564 * MIB, False, _SMALL),
        Card("RTX 5060 Ti 16GB", 16311 * MIB, True, _SMALL),
        Card("RTX 5070", 12227 * MIB, True, _SMALL),
        Card("RTX 5070 Ti", 16303 * MIB, True, _SMALL),
        Card("RTX 5080", 16303 * MIB, True, _SMALL),
        Card("RTX 5090", 32607 * MIB, True, _SMALL),
        Card("RTX PRO 6000", 97887 * MIB, True, _SMALL),
        Card("T4", 15360 * MIB, False, _SMALL),
        Card("L4", 23034 * MIB, False, _SMALL),
        Card("L40S", 46068 * MIB, False, _SMALL),
        Card("A100 40GB", 40960 * MIB, False, _SMALL),
        Card("A100 80GB", 81920 * MIB, False, _SMALL),
        Card("H100", 81559 * MIB, False, _LARGE),
        Card("H200", 143771 * MIB, False, _LARGE),
        Card("B200", 183359 * MIB, True, _LARGE),
    )
}


def card(name: str) -> Card:
    """The card of this name; case, spaces and "NVIDIA GeForce" do not matter.

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    plain = lambda text: re.sub(r"nvidia|geforce|[\s_-]", "", text.lower())
    found = [c for key, c in CARDS.items() if plain(key) == plain(name)]
    found = found or [c for key, c in CARDS.items() if plain(key).startswith(plain(name)) and plain(name)]
    if len(found) != 1:
        raise ValueError(f"unknown card {name!r}; known: {', '.join(CARDS)}. Or give --max-memory, such as 16GiB")
    return found[0]


def usable(memory: int, context: int = CONTEXT, fragmentation: float = FRAGMENTATION) -> int:
    """Bytes of tensors that fit into so much memory of a GPU."""
    return max(0, int((memory - context) * (1 - fragmentation)))
