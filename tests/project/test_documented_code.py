"""The Python blocks of the quick start are run as they are printed, on a CPU and with a tiny model (README's: test_readme.py)."""

import re
import warnings
from pathlib import Path

import pytest
from _tiny_models import save_first_minute

pytest.importorskip("datasets", reason="not run: datasets is not installed")
pytest.importorskip("trl", reason="not run: trl is not installed")
ROOT = Path(__file__).parents[2]
MODEL = "meta-llama/Llama-3.2-1B"


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, for this machine: on a CPU, a few steps."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    for gpu, cpu in (
        (f'"{MODEL}"', '"tiny"'),
        ('"cuda"', '"cpu"'),
        (", bf16=True", ""),
        ("num_train_epochs=1", "max_steps=2, use_cpu=True, report_to='none'"),
    ):
        found = [block.replace(gpu, cpu) for block in found]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the model and the data that the page names."""
    save_first_minute(tmp_path)
    (tmp_path / "my.txt").write_text("the film is good\nthe story was dull and bad indeed\n" * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_quickstart(folder, capsys):
    training, statistics, later = blocks("docs/quickstart.md")
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for block in (training, statistics, later):
            exec(compile(block, "docs/quickstart.md", "exec"), scope)
    assert scope["trainer"].state.global_step == 2 and scope["found"].layers
    assert (folder / "statistics.png").is_file() and (folder / "merged" / "config.json").is_file()
    assert MODEL in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
