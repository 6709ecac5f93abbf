"""What the memory depends on besides the model: the options of the base, how it is trained, and the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..quantization.groups import ACCURACY, skipped
from ..quantization.options import Options
from .shapes import ModelShape, Projection

BACKENDS = ("nvfp4", "nf4", "bf16", "nf4-liger", "bf16-liger")
"""The package's own, and two baselines to compare with: stock PEFT with Liger's kernels."""

OPTIMIZERS = {
    "adamw_torch": 8.0,
    "adamw_torch_fused": 8.0,
    "adamw_8bit": 2.0,
    "adamw_bnb_8bit": 2.0,
    "paged_adamw_8bit": 2.0,
    "paged_adamw": 8.0,
    "paged_adamw_32bit": 8.0,
    "sgd": 0.0,
}
"""Name in transformers -> bytes of state for each trained parameter in FP32."""


@dataclass(frozen=True)
class Settings(Options):
    """One way of training: the :class:`~peft_nvfp4.quantization.options.Options` of the base (with ``backend`` a word of
    :data:`BACKENDS`; ``calibration`` and ``merge_aware`` count as nothing, ``memory="auto"`` as ``"fast"``), and the run.

    Attributes:
        batch, sequence: rows, and tokens a row (padding counts).
        rank: of the adapters.
        targets: names of the linears with an adapter, or ``"all-linear"``. Of a mixture: the names of its parameters (``gate``,
            the router, ``gate_up_proj``, ``down_proj``), or those of the linears that they were before transformers 5 (``w1``,
            ``gate_proj``, ...). PEFT turns the latter into ``target_parameters``, and so it does with ``"all-linear"``.
        cuda_graphs: steps are replayed (:func:`peft_nvfp4.enable_cuda_graphs`).
        checkpointing: of every decoder layer.
        host_checkpoints: the checkpoints are on the host, and MLPs compute in tiles
            (:mod:`peft_nvfp4.training.host_checkpoints`); long sequences get that by themselves.
        optimizer: a word of :data:`OPTIMIZERS`. The state of paged ones counts as the host's.
        adapter_bytes: of an adapter's parameter: 4 (the default of PEFT and of this package) or 2.
        loss: ``"supervised"``: :func:`peft_nvfp4.attach_loss`; ``"full"``: transformers' own, with all logits; ``"liger"``.
        positions: positions a row whose logits are computed (supervised ones); all of them if None.
        accumulation: micro-batches a step. From the second on, gradients are there during forward.
        padded: batches are padded, so attention gets a mask and, with it, keys and values as wide as queries.
        native_fp4: the GPU has FP4 tensor cores, and no operand is made in BF16.
        workspace: bytes of one cuBLAS workspace; :data:`CARDS` knows those of GPUs.
        cards: GPUs, each with ``batch`` rows at a time.
        strategy: how several share the model, see :mod:`~peft_nvfp4.memory.run`: ``"ddp"`` or ``"fsdp2"``.
    """

    batch: int = 1
    sequence: int = 1024
    rank: int = 16
    targets: str | Sequence[str] = "all-linear"
    cuda_graphs: bool = False
    checkpointing: bool = False
    host_checkpoints: bool = False
    optimizer: str = "adamw_torch_fused"
    adapter_bytes: int = 4
    loss: str = "supervised"
    positions: int | None = None
    accumulation: int = 1
    padded: bool = False
    native_fp4: bool = False
    workspace: int = 32 << 20
    cards: int = 1
    strategy: str = "ddp"

    known_backends: ClassVar = BACKENDS

    def __post_init__(self) -> None:
        super().__post_init__()
        losses, strategies = ("supervised", "full", "liger"), ("ddp", "fsdp2")
        for name, known in (("optimizer", OPTIMIZERS), ("loss", losses), ("strategy", strategies)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.offload and self.excludes_offload:
            raise ValueError("memory='smallest' excludes CUDA graphs and FSDP")
        if self.host_checkpoints and not self.checkpointing:
            raise ValueError("host_checkpoints needs checkpointing: without, decoder layers have no checkpoints")
        for name in ("batch", "sequence", "rank", "accumulation", "cards"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if self.positions is not None and not 0 <= self.positions <= self.sequence:
            raise ValueError(f"positions must lie between 0 and the sequence length {self.sequence}, got {self.positions}")

    @property
    def level(self) -> str:
        """Of ``"auto"``, the level that takes most."""
        return "fast" if self.memory == "auto" else self.memory

    @property
    def excludes_offload(self) -> bool:
        """Whether weights cannot be on the host, with CUDA graphs or FSDP."""
        return self.cuda_graphs or self.cards > 1 and self.strategy == "fsdp2"

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def format(self) -> str:
        """Storage of the frozen linears."""
        return self.backend.partition("-")[0]

    @property
    def liger(self) -> bool:
        return self.backend.endswith("-liger")

    @property
    def compressed(self) -> bool:
        """Codes are kept for backward instead of values."""
        return self.backend == "nvfp4" or self.level != "fast" and not self.liger

    def terms(self, kind: str) -> int:
        """NVFP4 terms of an input, of a norm (``"norm"``) or within attention or the MLP (``"interior"``)."""
        return ACCURACY[self.accuracy][kind] if self.backend == "nvfp4" else 1

    def _is_named(self, name: str) -> bool:
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, name) is not None
        return any(_last_word(target) == name for target in self.targets)

    def _old_names(self, p: Projection) -> int:
        """How many of the linears that a parameter was before transformers 5 are targets."""
        return len(p.old) if self.targets == "all-linear" else sum(map(self._is_named, p.old))

    def rank_of(self, p: Projection) -> int:
        """Rank of a projection's adapter; 0 without. By their old names, experts' gate and up get one of twice the rank: PEFT
        joins the two."""
        linear = self.targets == "all-linear" and p.is_linear
        return self.rank * max(self._old_names(p), linear or self._is_named(p.name))

    def adapter_of(self, p: Projection) -> int:
        """Parameters of a projection's adapter."""
        return p.count * self.rank_of(p) * (p.inputs + p.outputs)

    def is_target(self, p: Projection) -> bool:
        return self.rank_of(p) > 0

    def is_packed(self, p: Projection) -> bool:
        """Whether a projection is kept in :attr:`format`. Routers stay dense, and experts do with ``bf16``."""
        if p.of_experts:
            return self.format != "bf16" and not skipped("mlp.experts", self.skip_modules)
        return p.is_linear and p.name not in self.skip_modules

    def packs_experts(self, shape: ModelShape) -> bool:
        """Whether a mixture's experts are kept in :attr:`format`."""
        return any(map(self.is_packed, shape.experts))

    def check(self, shape: ModelShape) -> None:
        """Raises ValueError if targets, or the settings of a mixture, do not fit the model."""
        names = [name for p in shape.projections for name in dict.fromkeys((p.name, *p.old))]
        unknown = [] if isinstance(self.targets, str) else [t for t in self.targets if _last_word(t) not in names]
        if unknown:
            raise ValueError(f"targets that the model has not: {', '.join(unknown)}; it has {', '.join(names)}")
        if not any(map(self.is_target, shape.projections)):
            raise ValueError(f"targets {self.targets!r} match none of {', '.join(names)}")
        for p in shape.projections:
            if 0 < self._old_names(p) < len(p.old):
                raise ValueError(f"{' and '.join(p.old)} are one parameter, {p.name}: name all of them as targets, or none")
        if shape.mixture and not shape.mixture.fused and not self.packs_experts(shape):
            raise ValueError(f"{shape.name}: experts of this kind are estimated in nvfp4 and nf4, and not dense")
        if shape.mixture and self.liger:
            raise ValueError(f"backend {self.backend} is not estimated for mixtures of experts: choose nvfp4, nf4 or bf16")


def _last_word(target: str) -> str:
    """The last component of a target's name, that of the module if it is a module's ``weight``."""
    return target.removesuffix(".weight").rpartition(".")[2]


def parse_bytes(text: str) -> int:
    """Bytes of ``"16GiB"``, ``"500MiB"`` (powers of 1024) or ``"16 GB"`` (of 1000). Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMG])(I?)B\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is no amount of memory: write it as 16GiB, 16GB or 500MiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (1 + "KMG".index(prefix)))


# ---------------------------------------------------------------------------------------------- GPUs

MIB = 1 << 20

CONTEXT = 512 * MIB
"""Taken by CUDA itself (context, loaded kernels) outside of PyTorch's allocator: 350 to 600 MiB on the GPUs at hand."""
NCCL = 512 * MIB
"""Taken by NCCL on each of several GPUs, outside of PyTorch's allocator: an allowance, not measured here."""
FRAGMENTATION = 0.035
"""Share of the rest that the allocator holds without using: 1.4 % with BF16 LoRA and 3.6 % with this package, measured on an H200
at the largest batch that fits."""


class Card(NamedTuple):
    """One GPU."""

    name: str
    memory: int  # bytes that the driver reports, a little less than what is printed on the box
    fp4: bool  # it has FP4 tensor cores
    workspace: int  # bytes of a cuBLAS workspace as PyTorch sizes it: 32 MiB on data-centre parts from Hopper on, else 8.1


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
    """The card of this name; case, spaces and "NVIDIA GeForce" do not matter. Raises ValueError for an unknown one."""
    plain = lambda text: re.sub(r"nvidia|geforce|[\s_-]", "", text.lower())
    matches = [c for key, c in CARDS.items() if plain(key) == plain(name)]
    matches = matches or [c for key, c in CARDS.items() if plain(key).startswith(plain(name)) and plain(name)]
    if len(matches) != 1:
        raise ValueError(f"unknown card {name!r}; known: {', '.join(CARDS)}. Or give --max-memory, such as 16GiB")
    return matches[0]


def usable(memory: int) -> int:
    """Bytes of tensors that fit into so much memory of a GPU."""
    return max(0, int((memory - CONTEXT) * (1 - FRAGMENTATION)))
