"""The notebooks run from top to bottom and are stored without outputs. 02, 04 to 06 need the fetched model (slow); here cut.
Those that name their model (``NOTEBOOK_MODEL``) get a tiny random one, which learns nothing: they run, that is all."""

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="not run: nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="not run: nbclient is not installed")
pytest.importorskip("ipykernel", reason="not run: ipykernel is not installed")

import smollm2_reviews as data  # noqa: E402
from _tiny_models import images_or_skip, save_tiny  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
QUICK = {"NOTEBOOK_STEPS": "2", "NOTEBOOK_ROWS": "8", "NOTEBOOK_LAYERS": "2", "NOTEBOOK_SAMPLES": "2"}
SLOW = ("02_one_word", "04_calibration", "05_merge_export_serve", "06_vision_language")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_is_stored_without_outputs(path):
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)
    assert not any(
        line.startswith("from peft_nvfp4") and "._" in line for cell in book.cells for line in cell.source.splitlines()
    )


def execute(path, tmp_path):
    book = nbformat.read(path, 4)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert sum(bool(cell.get("outputs")) for cell in book.cells) >= 3
    return book


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem not in SLOW], ids=lambda p: p.stem)
def test_runs(path, tmp_path, monkeypatch):
    if "from trl" in path.read_text(encoding="utf-8"):
        pytest.importorskip("trl", reason="not run: TRL is not installed")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("NOTEBOOK_STEPS", QUICK["NOTEBOOK_STEPS"])
    monkeypatch.setenv("NOTEBOOK_MODEL", str(save_tiny(tmp_path / "model")))
    execute(path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_runs_on_the_real_model(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    if not all(source.path.is_file() for source in data.SOURCES.values()):
        pytest.skip("not run: the model and the data were not fetched")
    if name == "06_vision_language":
        images_or_skip()
    for key, value in QUICK.items():
        monkeypatch.setenv(key, value)
    execute(ROOT / "notebooks" / f"{name}.ipynb", tmp_path)
