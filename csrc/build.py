"""Compiles the extension: called by setup.py, ``make build-ext``, the tests and the check on other GPUs.

    python csrc/build.py                      # into src/peft_nvfp4/, for RTX 50xx and GB10
    python csrc/build.py --emulated --out X   # test only: the same GEMMs for sm_90a, the FP4 instruction emulated

Neither a GPU nor the network is asked. Needed: nvcc >= 12.8 (``CUDA_HOME``, ``PATH``, or PyPI's ``nvidia-cuda-nvcc`` with
``nvidia-cuda-runtime`` and ``nvidia-cuda-cccl``) and the headers of CUTLASS from 4.2 on: ``pip install --no-deps
nvidia-cutlass==4.2.0.0``, or a checkout that ``PEFT_NVFP4_CUTLASS_DIR`` names. From 4.5 on, which PyPI does not have (``git clone
--depth 1 --branch v4.7.0 https://github.com/NVIDIA/cutlass``), the narrow tiles for few rows are built as well. Environment:
``PEFT_NVFP4_ARCHS`` (default ``12.0a``, and ``12.1a`` where nvcc knows it; ``12.0f`` is one program for both, in half the time),
``PEFT_NVFP4_JOBS`` (2; one takes up to 3.5 GB), ``PEFT_NVFP4_BUILD=0`` (setup.py skips all this).

The library holds the CUDA runtime of its nvcc: one of CUDA 13 needs a driver from 580 on, one of 12.9 runs on older and newer
ones.

Objects are kept in ``build/peft_nvfp4/`` under a hash of all that they depend on, so building again compiles what changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIBRARY = "_sm120.dll" if os.name == "nt" else "_sm120.so"
WINDOWS = os.name == "nt"
OBJECT = ".obj" if WINDOWS else ".o"
CUTLASS_OLDEST, CUTLASS_COMPILED = (4, 2), ("4.2.0", "4.7.0")
"""The oldest CUTLASS with these kernels, and the versions that instances were compiled with. PyPI has 4.2.0 as its last."""


class Missing(RuntimeError):
    """Something that is needed to build; the message says what and how to get it."""


def _load_generate():
    spec = importlib.util.spec_from_file_location("peft_nvfp4_generate", HERE / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = _load_generate()


# ---------------------------------------------------------------------------------------------- finding what is needed


def _site_folders() -> list[Path]:
    """Where packages are installed; the interpreter's own folder too, which pip hides when it builds in isolation."""
    return [Path(folder) for folder in dict.fromkeys([*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])]


def _wheel_folders(*parts: str) -> list[Path]:
    """Folders of PyPI's ``nvidia`` packages that exist."""
    return [folder for site in _site_folders() if (folder := Path(site, "nvidia", *parts)).is_dir()]


def find_nvcc() -> Path:
    name = "nvcc.exe" if WINDOWS else "nvcc"
    candidates = [Path(os.environ[v], "bin", name) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    candidates += [Path(found)] if (found := shutil.which("nvcc")) else []
    candidates += [folder / name for cu in ("cu13", "cuda_nvcc") for folder in _wheel_folders(cu, "bin")]
    candidates += [Path("/usr/local/cuda/bin", name)]
    for path in candidates:
        if path.is_file():
            return path
    raise Missing("nvcc was not found: set CUDA_HOME, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl")


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.search(r"release (\d+)\.(\d+)", text).groups()
    if (int(major), int(minor)) < (12, 8):
        raise Missing(f"{nvcc} is of CUDA {major}.{minor}; sm_120a needs 12.8 or later")
    return int(major), int(minor)


def find_cutlass() -> list[Path]:
    """Include folders of CUTLASS."""
    base = os.environ.get("PEFT_NVFP4_CUTLASS_DIR")
    if base is None:
        installed = [source for site in _site_folders() if (source := Path(site, "cutlass_library", "source")).is_dir()]
        if not installed:
            raise Missing(
                "the CUTLASS headers were not found: pip install --no-deps nvidia-cutlass==4.2.0.0, or set "
                f"PEFT_NVFP4_CUTLASS_DIR to a checkout of CUTLASS (known to compile: {', '.join(CUTLASS_COMPILED)})"
            )
        base = installed[0]
    folders = [Path(base, "include"), Path(base, "tools", "util", "include")]
    for file in (folders[0] / "cutlass" / "version.h", folders[1] / "cutlass" / "util" / "packed_stride.hpp"):
        if not file.is_file():
            raise Missing(f"{base} is not a CUTLASS checkout: {file} does not exist")
    version = cutlass_version(folders[0])
    if tuple(map(int, version.split(".")[:2])) < CUTLASS_OLDEST:
        known = ", ".join(CUTLASS_COMPILED)
        raise Missing(f"{base} is CUTLASS {version}, which has no block-scaled FP4 GEMM for SM120 (known to compile: {known})")
    return folders


def cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    return ".".join(re.search(rf"#define CUTLASS_{part}\s+(\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def default_archs(nvcc: Path) -> list[str]:
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return ["12.0a", *(["12.1a"] if "compute_121" in known else [])]


def gencode(arch: str, nvcc: tuple[int, int]) -> list[str]:
    """``12.0a`` -> flags. FP4 instructions exist for targets of one architecture (a) or of a family (f: 12.0f is for all
    12.x)."""
    if not re.fullmatch(r"\d+\.\d[af]", arch):
        raise Missing(
            f"PEFT_NVFP4_ARCHS: {arch!r} is not of the form 12.0a or 12.0f (FP4 instructions are not part of plain "
            "targets like sm_120)"
        )
    if arch.endswith("f") and nvcc < (12, 9):
        raise Missing(f"PEFT_NVFP4_ARCHS: {arch} needs nvcc 12.9 or later, this is {nvcc[0]}.{nvcc[1]}; take 12.0a")
    number = arch.replace(".", "")
    return ["-gencode", f"arch=compute_{number},code=sm_{number}"]


def _refuse_msvc(nvcc: tuple[int, int]) -> None:
    """CUDA 13 aligns tensor maps to 128 bytes, and MSVC passes no such parameter by value (error C2719)."""
    if WINDOWS and nvcc >= (13, 0):
        version = f"{nvcc[0]}.{nvcc[1]}"
        raise Missing(
            f"nvcc {version} with MSVC cannot compile CUTLASS's kernel parameters (C2719): take CUDA 12.9, or build in WSL2"
        )


# ---------------------------------------------------------------------------------------------- compiling


@dataclass
class Toolchain:
    """What the build uses."""

    archs: list[str] = field(default_factory=list)
    emulated: bool = False
    nvcc: Path = field(default_factory=find_nvcc)

    def __post_init__(self) -> None:
        self.version = nvcc_version(self.nvcc)
        _refuse_msvc(self.version)
        self.includes = find_cutlass()
        self.archs = self.archs or default_archs(self.nvcc)
        self.flags = [
            "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DNDEBUG", "-Xptxas", "-v", "--threads", "1",
            *(["-DPEFT_NVFP4_EMULATED"] if self.emulated else []),
            *(flag for arch in self.archs for flag in gencode(arch, self.version)),
            f"-I{HERE}", *(f"-I{folder}" for folder in self.includes),
            *(f"-I{folder}" for cu in ("cu13", "cuda_runtime", "cuda_cccl") for folder in _wheel_folders(cu, "include")),
        ]  # fmt: skip
        # MSVC: CUTLASS needs the conforming preprocessor and __cplusplus; its symbol names overflow without bigobj (unrun)
        host = (
            ["/Zc:preprocessor", "/Zc:__cplusplus", "/bigobj", "/EHsc", "/permissive-"]
            if WINDOWS
            else ["-fPIC", "-fvisibility=hidden"]
        )
        self.flags += [part for flag in host for part in ("-Xcompiler", flag)]

    def info(self, source_hash: str) -> str:
        nvcc = ".".join(map(str, self.version))
        return (
            f"archs={','.join(self.archs)} emulated={int(self.emulated)} cutlass={cutlass_version(self.includes[0])} "
            f"nvcc={nvcc} source={source_hash}"
        )


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _headers() -> bytes:
    files = [file for pattern in ("*.h", "*.cuh", "emulated/*.h", "emulated/*.cuh") for file in sorted(HERE.glob(pattern))]
    return b"".join(file.read_bytes() for file in files)


def _portable(flags: list[str]) -> str:
    return " ".join(flag for flag in flags if not flag.startswith("-I"))


@dataclass
class Compiled:
    """An object file, and what the compiler said (resource usage)."""

    source: Path
    object: Path
    log: str
    seconds: float  # 0 where it was cached: see the log's first line


def _check_stubs(compiled: Path) -> None:
    """A kernel whose type nvcc and the host compiler spell differently has two host functions, one registered, another launched
    (see Runner in gemm.cuh): an object with two is refused here, not at its first launch."""
    if (nm := shutil.which("nm")) is None or not compiled.exists():
        return
    text = subprocess.run([nm, compiled], capture_output=True, text=True).stdout
    stubs = [name for _, kind, name in re.findall(r"^(\S+) (\w) (\S*device_kernel\S*)$", text, re.M) if kind in "tTW"]
    if sum(not name.endswith(".cold") for name in stubs) > 1:
        raise RuntimeError(f"{compiled.name}: a kernel was registered under another type than it is launched under")


def _flags_of(source: Path) -> list[str]:
    """At its default level ptxas 13.0 spills one word in the main loop of the ping-pong kernels for sm_121a; at 3, none."""
    return ["-Xptxas", "--register-usage-level=3"] if "pingpong" in source.stem else []


def compile_one(tools: Toolchain, source: Path, cache: Path, headers: bytes) -> Compiled:
    version = cutlass_version(tools.includes[0])
    flags = [*tools.flags, *_flags_of(source)]
    key = _digest(source.read_bytes(), headers, _portable(flags), str(tools.version), version)
    target = cache / f"{source.stem}-{key}{OBJECT}"
    log_file = target.with_suffix(".log")
    if not target.exists() or not log_file.exists():
        start = time.time()
        partial = target.with_suffix(f".{os.getpid()}{OBJECT}")
        done = subprocess.run([tools.nvcc, *flags, "-c", "-o", partial, source], capture_output=True, text=True)
        if done.returncode:
            lines = [line[:400] for line in (done.stdout + done.stderr).splitlines() if "error" in line][:20]
            raise RuntimeError(f"nvcc failed on {source.name}:\n" + "\n".join(lines))
        _check_stubs(partial)
        log_file.write_text(f"seconds {time.time() - start:.1f}\n{done.stdout}{done.stderr}")
        partial.replace(target)
    log = log_file.read_text()
    return Compiled(source, target, log, float(log.split()[1]))


def build(out: Path, emulated: bool = False, archs: str = "", pattern: str = "", jobs: int = 0, say=print) -> list[Compiled]:
    """Builds the library ``out``. ``pattern`` picks instances (see generate.py). Raises Missing or RuntimeError."""
    tools = Toolchain([a for a in archs.split(",") if a] or (["9.0a"] if emulated else []), emulated)
    cache = ROOT / "build" / "peft_nvfp4"
    headers = _headers()
    own = [HERE / "entry.cu", HERE / "prepare.cu", *([HERE / "emulated" / "faults.cu"] if emulated else [])]
    source_hash = _digest(headers, *(file.read_bytes() for file in own), (HERE / "generate.py").read_bytes())
    version = cutlass_version(tools.includes[0])
    sources = generate.write(cache / "src", pattern, tools.info(source_hash), tuple(map(int, version.split(".")))) + own
    jobs = jobs or int(os.environ.get("PEFT_NVFP4_JOBS", "2"))
    if version not in CUTLASS_COMPILED:
        say(f"peft_nvfp4: CUTLASS {version} was not tried before; {', '.join(CUTLASS_COMPILED)} are known to compile")
    say(f"peft_nvfp4: {len(sources)} files with {tools.nvcc} for {', '.join(tools.archs)}, {jobs} at a time")

    def one(source: Path) -> Compiled:
        compiled = compile_one(tools, source, cache, headers)
        say(f"peft_nvfp4: {source.name} ({compiled.seconds:.0f} s)")
        return compiled

    with ThreadPoolExecutor(jobs) as pool:
        compiled = list(pool.map(one, sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    # The CUDA runtime is inside and stays private: calls must not end in the one that PyTorch has loaded, which may be another's
    private = [] if WINDOWS else ["-Xlinker", "--exclude-libs=ALL", "-Xlinker", "-Bsymbolic"]
    link = [
        tools.nvcc,
        "-shared",
        "-cudart",
        "static",
        *private,
        *(flag for arch in tools.archs for flag in gencode(arch, tools.version)),
    ]
    partial = out.with_name(out.name + ".partial")
    done = subprocess.run([*link, "-o", partial, *(c.object for c in compiled)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"linking {out.name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    partial.replace(out)
    say(f"peft_nvfp4: {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    return compiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "peft_nvfp4" / LIBRARY)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--archs", default=os.environ.get("PEFT_NVFP4_ARCHS", ""), help="as in 12.0a,12.1a")
    parser.add_argument("--instances", default="", help="words of the names of the instances to build")
    parser.add_argument("--jobs", type=int, default=0)
    args = parser.parse_args()
    try:
        build(args.out, args.emulated, "" if args.emulated else args.archs, args.instances, args.jobs)
    except (Missing, RuntimeError, ValueError) as error:
        print(f"peft_nvfp4: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
