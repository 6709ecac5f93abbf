"""Fused, unfused and dense models compute the same, whatever a user does to their modules and however they run: random cases of
the conformance machine (``_oracle.py`` says what 'the same' is), and the cases that failed once. ``make dataflow`` tries more."""

import json
import os

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("bitsandbytes")
from _cases import Case
from _oracle import check
from _search import Search
from nightly import REGRESSIONS

CASES = int(os.environ.get("CASES", "300"))


@pytest.mark.parametrize("record", json.loads(REGRESSIONS.read_text()), ids=lambda record: record["why"][:60])
def test_what_failed_once(record):
    check(Case.of_json(record["case"]))


def test_random_cases():
    search = Search()
    search.go(first_seed=1, count=CASES, power_of=3)
    assert not search.failures, "\n".join(f"{failure['why']}\n    {failure['python']}" for failure in search.failures)
    assert search.tried == CASES and search.rejected < 0.4 * CASES
    assert search.shown[True] >= 0.9 * sum(search.shown.values()) > 0, "a lost intervention would not show"
