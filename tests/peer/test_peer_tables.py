"""The tables of the peer tests, and that the exit code says what they show. (The peer tests themselves: ``make peer-tests``.)"""

import peer_tables
from peer_tables import REASONS


def outcome(test, word="passed", reason=""):
    return {"test": test, "outcome": word, "reason": reason}


def helper(base, way="loaded", setting="plain", name="training", word="passed"):
    return outcome(f"helpers.py::test_helper[{base}-{way}-opt-{setting}-{name}]", word, "E")


def test_a_difference_is_found():
    plain = [outcome("a"), outcome("b", "failed", "x"), outcome("c", "skipped")]
    same = peer_tables.compare(plain, list(reversed(plain)))
    assert same["differ"] == {} and same["plain"] == {"passed": 1, "failed": 1, "skipped": 1} and same["failures"] == {"x": 1}
    for changed in (outcome("a", "failed", "y"), outcome("b", "failed", "z"), outcome("d")):
        run = [o for o in plain if o["test"] != changed["test"]] + [changed]
        differ = peer_tables.compare(plain, run)["differ"]
        assert list(differ) == [changed["test"]]
        assert peer_tables.verdict({"stock": {"file": {"differ": differ}}}) == 1
    assert peer_tables.verdict({"stock": {"file": same}}) == 0


def test_what_stock_peft_fails_does_not_count():
    found = peer_tables.summarise(
        [
            helper("nvfp4", word="failed"),
            helper("nvfp4", name="generate"),
            helper("stock", word="failed"),
            helper("stock", name="generate"),
        ]
    )
    assert found["failures"] == [] and peer_tables.verdict({"helpers": found}) == 0
    assert found["table"]["nvfp4 loaded"] == {"collected": 2, "fails in stock too": 1, "passed": 1}
    assert peer_tables.share(found["table"]["nvfp4 loaded"]) == 1


def test_a_failure_needs_a_reason():
    rows = [helper("nvfp4", word="failed"), helper("stock"), helper("nf4", word="passed as quantised")]
    found = peer_tables.summarise(rows)
    assert [row["reason"] for row in found["failures"]] == [None] and peer_tables.verdict({"helpers": found}) == 1
    assert "**unexplained**" in peer_tables.markdown({"versions": {}, "helpers": found})
    assert peer_tables.share(found["table"]["nf4 loaded"]) == 1 and peer_tables.share(found["table"]["nvfp4 loaded"]) == 0
    known = peer_tables.summarise(
        [helper("nvfp4", way="config", name="unload_adapter", word="failed"), helper("stock", name="unload_adapter")]
    )
    assert known["failures"][0]["reason"] == REASONS[0][1] and peer_tables.verdict({"helpers": known}) == 0
