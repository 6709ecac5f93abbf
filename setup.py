"""Metadata is in pyproject.toml; here is the one thing that it cannot say: how the CUDA extension for RTX 50xx is built.

The extension is optional. Where nvcc or the CUTLASS headers are missing the package installs without it and the build log says
what is missing (``peft_nvfp4.kernels.fp4.cutlass.load()`` says later that it is). Neither a GPU nor the network is asked.
``PEFT_NVFP4_BUILD=0`` skips it, ``PEFT_NVFP4_BUILD=1`` makes a failure an error; what else can be set is in ``csrc/build.py``.

The library has plain C symbols, so the wheel is for any Python 3 on its platform: py3-none-<platform>.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import build as extension  # noqa: E402  csrc/build.py

WANTED = os.environ.get("PEFT_NVFP4_BUILD", "")


def obstacle() -> str:
    """Why the extension is not built; empty if it can be."""
    if WANTED == "0":
        return "PEFT_NVFP4_BUILD=0"
    try:
        extension.Toolchain([arch for arch in os.environ.get("PEFT_NVFP4_ARCHS", "").split(",") if arch])
    except (extension.Missing, OSError) as error:
        if WANTED == "1":
            raise
        return str(error)
    return ""


class BuildExtension(build_ext):
    """Calls csrc/build.py instead of a C compiler."""

    def _target(self) -> Path:
        return (ROOT / "src" if self.inplace else Path(self.build_lib).absolute()) / "peft_nvfp4" / extension.LIBRARY

    def run(self) -> None:
        try:
            extension.build(self._target(), archs=os.environ.get("PEFT_NVFP4_ARCHS", ""))
        except RuntimeError as error:
            if WANTED == "1":
                raise
            print(f"peft_nvfp4: installing without the FP4 extension: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(self._target())] if self._target().exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(file.relative_to(ROOT)) for file in (ROOT / "csrc").rglob("*") if file.is_file() and file.suffix != ".pyc"]


class AnyPython(bdist_wheel):
    """The wheel's tag: no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


why_not = obstacle()
if why_not:
    print(f"peft_nvfp4: installing without the FP4 extension for RTX 50xx: {why_not}", file=sys.stderr)
setup(
    ext_modules=[] if why_not else [Extension("peft_nvfp4._sm120", [])],
    cmdclass={"build_ext": BuildExtension, "bdist_wheel": AnyPython},
)
