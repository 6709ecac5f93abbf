"""The table of GEMM instances, and the sources made from it.

An instance is a tile, a schedule and the types of c (what is added) and d (the output). ``write(folder)`` emits one ``.cu``
file per instance, so that they compile side by side and are cached one by one, and ``table.cu`` with the table that the entry
looks up.

Why not the emitter of ``cutlass_library`` (``EmitGemmUniversal3xInstance``): it writes an epilogue functor (alpha * acc + beta
* c, or a block-scaled output) between CUTLASS's own collectives. Scales per row need a visitor tree, several terms and weights
need the two collectives of ``collectives.cuh``; neither has a place in its description of an operation. What is left to emit is
one line.

Tiles. SM120's block-scaled collectives of CUTLASS take M in multiples of 128, the rows of a tile of scale factors; N also in
fewer columns from 4.5 on. Up to 128 rows times a weight of (2048 x 2048) are 16 tiles of 128 x 128, on a card of 84
multiprocessors; of 128 x 32 they are 64. Up to 64 rows the Triton product runs, which reads the weight with all of them.
Rejected: x and w swapped, with tiles of 8 or 16 columns for the rows of x. A weight of 2048 rows is then 16 tiles, however few
the rows are, so most multiprocessors would stand still while the weight is read, which is all that few rows cost.
101,376 bytes of shared memory bound the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SCHEDULES = {
    "cooperative": "cutlass::gemm::KernelTmaWarpSpecializedNvf4Sm120",  # 8 warps share a tile
    "pingpong": "cutlass::gemm::KernelTmaWarpSpecializedPingpongNvf4Sm120",  # 2 x 4 warps, one multiplies while the other stores
}
TYPES = {"none": "void", "bf16": "cutlass::bfloat16_t", "f32": "float"}

BF16 = (("none", "bf16"), ("bf16", "bf16"))  # (c, d); with c: added to the product before
F32 = (("none", "f32"), ("f32", "f32"))  # sums of several products (dgrad of q, k, v) before one rounding
TABLE = (
    # tile, schedule, epilogues
    ((128, 128, 128), "cooperative", BF16 + F32),  # the default: most stages, finest waves
    ((256, 128, 128), "cooperative", BF16),  # a quarter fewer bytes per product; many rows
    ((128, 128, 256), "cooperative", BF16),  # half the barriers a k; long K
    ((128, 128, 128), "pingpong", BF16),  # epilogue beside the main loop; short K
    ((128, 64, 256), "cooperative", BF16),  # narrow: few rows give each multiprocessor something to do
    ((128, 32, 256), "cooperative", BF16),
)


@dataclass(frozen=True)
class Instance:
    tile: tuple[int, int, int]
    schedule: str
    c: str
    d: str

    @property
    def name(self) -> str:
        m, n, k = self.tile
        return f"{m}x{n}x{k}_{self.schedule}_{self.c}_{self.d}"

    @property
    def cutlass(self) -> tuple[int, int]:
        """The oldest CUTLASS that has its collectives."""
        return (4, 5) if self.tile[1] < 128 else (4, 2)

    @property
    def source(self) -> str:
        """One .cu file. All types are spelled out of templates, see Runner in gemm.cuh."""
        m, n, k = self.tile
        pingpong = self.schedule == "pingpong"
        return SOURCE.format(
            name=self.name,
            tile=f"_{m}, _{n}, _{k}",
            c=TYPES[self.c],
            d=TYPES[self.d],
            schedule=SCHEDULES[self.schedule],
            epilogue_schedule="TmaWarpSpecialized" if pingpong else "TmaWarpSpecializedCooperative",
            text=f"{m} {n} {k} {self.schedule} {self.c} {self.d}",
        )


SOURCE = """#include "gemm.cuh"
namespace peft_nvfp4 {{
namespace gemm_{name} {{
using Tile = Shape<{tile}>;
using C = {c};
using D = {d};
using BaseEpilogue = cutlass::epilogue::collective::CollectiveBuilder<
    Arch, OpClass, Tile, Cluster, AutoTile, float, float, C, Row, Align<D>, D, Row, Align<D>,
    cutlass::epilogue::{epilogue_schedule}, Tree<Tile, C>::Type>::CollectiveOp;
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(Epilogue<BaseEpilogue>::SharedStorage))>;
using BaseMainloop = cutlass::gemm::collective::CollectiveBuilder<
    Arch, OpClass, Pair, Row, 32, Pair, Column, 32, float, Tile, Cluster, Stages,
    {schedule}>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<
    Shape<int, int, int, int>, Mainloop<BaseMainloop>, Epilogue<BaseEpilogue>, Scheduler>;
}}  // namespace gemm_{name}
Instance instance_{name}() {{
  return Runner<gemm_{name}::Kernel, gemm_{name}::C, gemm_{name}::D>::instance("{name}", "{text}");
}}
}}  // namespace peft_nvfp4
"""


def instances(pattern: str = "", cutlass: tuple[int, ...] = (4, 5)) -> list[Instance]:
    """The table, of what a version of CUTLASS has; with a pattern, the instances whose name contains one of its comma-separated
    words."""
    every = [Instance(tile, schedule, c, d) for tile, schedule, epilogues in TABLE for c, d in epilogues]
    words = [word for word in pattern.split(",") if word]
    return [one for one in every if cutlass >= one.cutlass and (not words or any(word in one.name for word in words))]


def table_source(chosen: list[Instance], info: str) -> str:
    """``table.cu``: the instances in their order, and what was built."""
    declared = "\n".join(f"Instance instance_{one.name}();" for one in chosen)
    rows = "\n".join(f"    instance_{one.name}()," for one in chosen)
    return (
        f'#include "instance.h"\nnamespace peft_nvfp4 {{\n{declared}\n'
        f"extern Instance const instances[];\nextern int const instance_count;\nextern char const* const build_info;\n"
        f"Instance const instances[] = {{\n{rows}\n}};\n"
        f'int const instance_count = {len(chosen)};\nchar const* const build_info = "{info}";\n}}\n'
    )


def write(folder: Path, pattern: str = "", info: str = "", cutlass: tuple[int, ...] = (4, 5)) -> list[Path]:
    """Writes the sources into ``folder``, leaving files that would not change alone; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = instances(pattern, cutlass)
    if not chosen:
        names = ", ".join(one.name for one in instances("", cutlass))
        raise ValueError(f"no instance matches {pattern!r}; with this CUTLASS there are {names}")
    texts = {f"gemm_{one.name}.cu": one.source for one in chosen}
    texts["table.cu"] = table_source(chosen, info)
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in texts]


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]), *sys.argv[2:3]):
        print(path)
