"""pytest plugin for a run of PEFT's tests: offline, LoRA rows only, every outcome written to a file.

Read from the environment: ``PEER_OUT`` (one JSON line per test), ``PEER_IMPORT`` (``1``: with peft_nvfp4 imported).
"""

import json
import os
import re
import warnings

import pytest


class Offline(dict):
    """PEFT's list of models that were fetched before: all of them, so that it never goes online."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 0


def pytest_configure(config: pytest.Config) -> None:
    warnings.simplefilter("ignore")
    if os.environ.get("PEER_IMPORT") == "1":
        import peft_nvfp4

        assert peft_nvfp4.nn.wrapping.WRAPPED
    from tests import testing_utils

    testing_utils._HUB_MODEL_ACCESSES = Offline()


def is_ours(item: pytest.Item) -> bool:
    """Tests of another method are left out: their rows name its configuration."""
    from peft import LoraConfig, PeftConfig

    if not hasattr(item, "callspec"):
        return True
    kinds = {v if isinstance(v, type) else type(v) for v in item.callspec.params.values()}
    kinds = {k for k in kinds if issubclass(k, PeftConfig)}
    return not kinds or LoraConfig in kinds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if not is_ours(item)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if is_ours(item)]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(report.nodeid, "not collected", last_line(report.longreprtext))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
    else:
        reason = last_line(report.longreprtext)
    if outcome == "passed" and dict(report.user_properties).get("criterion"):
        outcome = "passed as quantised"
    note(report.nodeid, outcome, reason)


def note(test: str, outcome: str, reason: str) -> None:
    """At once: a run that is ended early leaves what it has."""
    with open(os.environ["PEER_OUT"], "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def last_line(text: str) -> str:
    """The error of a traceback, without addresses and folders made for the test."""
    errors = [line[2:].strip() for line in text.splitlines() if line.startswith("E  ")]
    line = errors[0] if errors else text.strip().rpartition("\n")[2]
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+", "*", line)[:300]
