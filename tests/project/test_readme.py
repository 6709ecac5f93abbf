"""The first minute of a user, as README prints it: the install line, the Python block and the first command, taken from the page.

The package is built and installed from a copy of the sources into a folder of its own, and what follows runs in new processes
that find it there. Dependencies are those of this environment: downloading them takes minutes. On a CPU, with a tiny model.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _tiny_models import save_first_minute

pytest.importorskip("datasets", reason="not run: datasets is not installed")
pytest.importorskip("trl", reason="not run: trl is not installed")
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOR_A_CPU = (
    ('"meta-llama/Llama-3.2-1B"', '"tiny"'),
    ("num_train_epochs=1", "max_steps=2, use_cpu=True, report_to='none'"),
)


def section(title: str, language: str = "") -> str:
    """The first fenced block below a heading."""
    return re.search(rf"^## {title}\n.*?```{language}\n(.*?)```", README, re.M | re.S)[1]


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Where the line for a checkout has installed the package."""
    folder = tmp_path_factory.mktemp("user")
    sources, target = folder / "checkout", folder / "packages"
    left_out = shutil.ignore_patterns(".*", "build", "benchmarks", "docs", "tests", "*.egg-info", "_sm120.*")
    shutil.copytree(ROOT, sources, ignore=left_out)
    (line,) = re.findall(r"^pip install .*?\.\[.*?(?= +#|$)", section("Install"), re.M)
    words = shlex.split(line)
    assert words[:2] == ["pip", "install"]
    here = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    run([sys.executable, "-m", *words, *here], sources, PEFT_NVFP4_BUILD="0")
    return target


def test_the_code_trains_and_saves(installed, tmp_path):
    folder = save_first_minute(tmp_path)
    code = section("Start", "python")
    assert len(code.splitlines()) <= 14
    for gpu, cpu in FOR_A_CPU:
        assert gpu in code
        code = code.replace(gpu, cpu)
    code += "import peft_nvfp4\nprint(f'{trainer.state.global_step} steps by {peft_nvfp4.__file__}')"
    said = run([sys.executable, "-c", code], folder, PYTHONPATH=str(installed), HF_HUB_OFFLINE="1")
    assert said.splitlines()[-1] == f"2 steps by {installed / 'peft_nvfp4' / '__init__.py'}"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_the_first_command_says_whether_it_fits(installed, tmp_path):
    pytest.importorskip("typer", reason="not run: typer is not installed")
    words = shlex.split(section("From a shell"), comments=True)
    words = words[: words.index("peft-nvfp4", 1)]
    said = run([str(installed / "bin" / words[0]), *words[1:]], tmp_path, PYTHONPATH=str(installed))
    assert re.search(r"GiB of GPU memory hold .*: it (fits|does not fit)", said), said
