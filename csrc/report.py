"""What the compiler made of the extension: time, size, registers, spills, shared memory, and the instructions of the main loop.

    python csrc/report.py benchmarks/results/sm120_build.json       # after csrc/build.py: reads its cache of objects

Per instance and architecture, from ``ptxas -v`` and, where ``cuobjdump`` is found (CUDA toolkit, Triton), from the SASS:

* ``fp4_mma``: block-scaled FP4 instructions (``OMMA.SF...E2M1.E2M1.UE4M3.4X``); none would mean that the fast path is not there;
* ``bf16_mma``: those of the low-rank tail (``HMMA.16816.F32.BF16``);
* ``waits``: for the kernel that prepares operands (``ACQBULK``); without one a GEMM, launched beside it, would read too early;
* ``loop_mma``, ``loop_local``: those in the main loop, and loads and stores of local memory (spills) there. The main loop is the
  innermost loop around FP4 instructions: from the target of a backward branch to the branch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build as extension  # noqa: E402

MMA = re.compile(r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X")
TAIL = re.compile(r"HMMA\.16816\.F32\.BF16")
WAIT = re.compile(r"\bACQBULK\b")
LOCAL = re.compile(r"\b(LDL|STL)\b")


def find_cuobjdump() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    beside = extension.find_nvcc().parent / "cuobjdump"
    spec = importlib.util.find_spec("triton")
    inside = [Path(folder, "backends/nvidia/bin/cuobjdump") for folder in (spec.submodule_search_locations if spec else [])]
    return next((str(path) for path in [beside, *inside] if path.is_file()), None)


def usage(log: str) -> dict[str, dict]:
    """arch -> what ptxas says of the GEMM kernel."""
    found = {}
    for entry, arch, rest in re.findall(r"Compiling entry function '(\S+)' for '(\w+)'(.*?)(?=Compiling entry|\Z)", log, re.S):
        if "GemmUniversal" not in entry:
            continue
        stack, stores, loads = map(
            int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", rest).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", rest)[1])
        found[arch] = {"registers": registers, "stack_bytes": stack, "spill_store_bytes": stores, "spill_load_bytes": loads}
    return found


def kernels(sass: str) -> dict[str, list[tuple[int, str]]]:
    """arch -> (address, instruction) of the GEMM kernel."""
    found = {}
    for arch, text in re.findall(r"\bcode for (sm_\w+)(.*?)(?=\bcode for |\Z)", sass, re.S):
        lines = [(int(a, 16), i.strip()) for a, i in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/;]+?)\s*;", text)]
        if any("MMA" in instruction for _, instruction in lines):
            found[arch] = lines
    return found


def main_loop(lines: list[tuple[int, str]]) -> list[str]:
    """Instructions of the shortest loop with the most FP4 instructions of all innermost ones."""
    loops = []
    for address, instruction in lines:
        target = re.search(r"\bBRA(?:\.\w+)*\s.*0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < address:
            inside = [i for a, i in lines if int(target[1], 16) <= a <= address]
            if any(MMA.search(i) for i in inside):
                loops.append(inside)
    return min(loops, key=len) if loops else []


def instructions(obj: Path, cuobjdump: str) -> dict[str, dict]:
    sass = subprocess.run([cuobjdump, "-sass", obj], capture_output=True, text=True, check=True).stdout
    found = {}
    for arch, lines in kernels(sass).items():
        loop = main_loop(lines)
        found[arch] = {
            "fp4_mma": sum(bool(MMA.search(i)) for _, i in lines),
            "bf16_mma": sum(bool(TAIL.search(i)) for _, i in lines),
            "waits": sum(bool(WAIT.search(i)) for _, i in lines),
            "loop_mma": sum(bool(MMA.search(i)) for i in loop),
            "loop_instructions": len(loop),
            "loop_local": sum(bool(LOCAL.search(i)) for i in loop),
        }
    return found


def report(compiled: list, library: Path, cuobjdump: str | None) -> dict:
    """``compiled``: what build() returned; ``library``: what it built."""
    import ctypes

    c = ctypes.CDLL(str(library))
    c.peft_nvfp4_describe.restype = c.peft_nvfp4_build_info.restype = ctypes.c_char_p
    described, i = {}, 0
    while text := c.peft_nvfp4_describe(i):
        name, *_, stages, smem = text.decode().split()
        described[name] = {"stages": int(stages), "smem_bytes": int(smem)}
        i += 1
    rows = []
    for one in compiled:
        name = one.source.stem.removeprefix("gemm_")
        if name not in described:
            continue
        sass = instructions(one.object, cuobjdump) if cuobjdump else {}
        for arch, used in usage(one.log).items():
            size = {"seconds_all_archs": one.seconds, "object_bytes_all_archs": one.object.stat().st_size}
            rows.append({"instance": name, "arch": arch, **described[name], **used, **sass.get(arch, {}), **size})
    return {
        "build": c.peft_nvfp4_build_info().decode(),
        "library_bytes": library.stat().st_size,
        "seconds_of_compiler": round(sum(one.seconds for one in compiled), 1),
        "rows": rows,
    }


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else extension.ROOT / "benchmarks" / "results" / "sm120_build.json"
    library = extension.ROOT / "build" / "peft_nvfp4" / extension.LIBRARY
    compiled = extension.build(library, archs=os.environ.get("PEFT_NVFP4_ARCHS", ""))
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("no cuobjdump: instructions are not counted", file=sys.stderr)
    result = report(compiled, library, cuobjdump)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
