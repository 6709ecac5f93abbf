"""docs/works-with.md is what its script makes of its rows, and every row names a test that is there."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_works_with", ROOT / "docs" / "make_works_with.py")
works_with = importlib.util.module_from_spec(spec)
spec.loader.exec_module(works_with)


def test_the_page_is_made_of_its_rows():
    results = json.loads(works_with.RESULTS.read_text("utf-8"))
    assert set(results["trainers"]) == set(works_with.TRAINERS)
    assert works_with.PAGE.read_text("utf-8") == works_with.page(results)


OF_TRAINERS = [works_with.TRL + name for name in ("bf16_trains_what_stock_peft_trains", "nvfp4_learns")]


@pytest.mark.parametrize("test", [*OF_TRAINERS, *(row[3] for row in (*works_with.ROWS, *works_with.SERVED))])
def test_a_row_names_a_test(test):
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text("utf-8")
