"""What is built for users: a source archive that builds everything, a pure wheel, and with nvcc one with the FP4 library inside.

nvcc takes minutes, so a file of a few bytes stands for the library here; that the real one compiles and loads is in
``tests/kernels/test_extension.py``.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TEXT = {"capture_output": True, "text": True}
ROOT = Path(__file__).resolve().parents[2]
STUB = """

class Toolchain:
    def __init__(self, archs):
        pass


def build(out, archs=""):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"library")
"""

MISSING = """

def Toolchain(archs):
    raise Missing("no nvcc")
"""


def build(folder: Path, kind: str, extension: str) -> Path:
    """Calls the build backend in a folder with the sources; the file that it made."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('out')"
    shutil.rmtree(folder / "out", ignore_errors=True)
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | {"PEFT_NVFP4_BUILD": extension}, **TEXT)
    assert run.returncode == 0, run.stderr[-2000:]
    (made,) = (folder / "out").iterdir()
    return made


def copy(folder: Path) -> Path:
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "build", "benchmarks", "docs", "tests", "*.egg-info", "_sm120.*")
    )
    return folder


def test_sdist_and_pure_wheel(tmp_path):
    sources = copy(tmp_path / "sources")
    sdist = build(sources, "sdist", "0")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    names = lambda folder: {
        p.relative_to(folder) for p in (folder / "csrc").rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h")
    }
    assert names(unpacked) == names(ROOT) and len(names(ROOT)) > 8
    wheel = build(unpacked, "wheel", "0")  # out of the archive: it is complete
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py") if "egg-info" not in str(p)}
    assert modules <= inside and not any(name.startswith(("csrc", "tests")) for name in inside)


def test_a_wheel_with_the_library_is_of_a_platform_and_of_any_python(tmp_path):
    sources = copy(tmp_path / "sources")
    with open(sources / "csrc" / "build.py", "a") as file:
        file.write(STUB)
    wheel = build(sources, "wheel", "1")
    assert re.search(r"-py3-none-(linux|win|macosx)\w+\.whl$", wheel.name)
    inside = zipfile.ZipFile(wheel)
    (library,) = [name for name in inside.namelist() if "_sm120." in name]
    assert library.startswith("peft_nvfp4/") and inside.read(library) == b"library"


def test_without_nvcc_the_build_says_so_or_fails_if_it_was_asked_for(tmp_path):
    sources = copy(tmp_path / "sources")
    with open(sources / "csrc" / "build.py", "a") as file:
        file.write(MISSING)
    assert build(sources, "wheel", "").name.endswith("-py3-none-any.whl")
    with pytest.raises(AssertionError, match="no nvcc"):
        build(sources, "wheel", "1")


def test_metadata():
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"cli", "build", "demo", "test", "dev"}
    assert any(line.startswith("bitsandbytes") for line in project["dependencies"])
    pinned = re.search(r"^CUTLASS = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]
    assert extras["build"] == [pinned]
    mentioned = {
        extra
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py"))
        for match in re.findall(r"(?:peft[-_]nvfp4|\.)\[([\w,]+)\]['\"]", page.read_text(encoding="utf-8"))
        for extra in match.split(",")
    }
    assert mentioned and mentioned <= set(extras)


def test_releasing_knows_the_instances_of_the_library():
    spec = importlib.util.spec_from_file_location("generate_of_packaging", ROOT / "csrc" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generate  # its dataclass looks itself up
    spec.loader.exec_module(generate)
    text = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    assert f"all {len(generate.instances())} instances of `csrc/generate.py`" in text


def test_containers_agree_with_the_rest():
    """The images build what make builds, from files that .dockerignore lets through."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^CUTLASS = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1] in text
    sources = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for name in line.split()]
    let_through = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M))
    assert sources and all((ROOT / name).exists() for name in sources) and set(sources) == let_through
    configuration = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    development = (ROOT / ".devcontainer" / configuration["build"]["dockerfile"]).read_text(encoding="utf-8")
    first = lambda dockerfile: re.search(r"^FROM (\S+)", dockerfile, re.M)[1]
    assert first(development) == first(text)
    (target,) = re.findall(r"make (\S+)", configuration["postCreateCommand"])
    assert f"$(VENV)/{Path(target).name}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
