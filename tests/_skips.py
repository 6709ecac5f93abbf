"""What was not run, by reason: a table after every run; with ``--known-skips`` a reason that is not expected fails the run.

A test that is skipped wherever the suite runs tests nothing, and nobody notices. So ``.ci/run`` passes the option, and a package
that is missing, a model that was not fetched or a new condition shows.
"""

import re
from collections import Counter

KNOWN = (
    r"no CUDA GPU",
    r"no SM120 GPU",
    r"needs two GPUs",
    r"needs a machine without CUDA",
    r"nvcc|CUTLASS",  # comes with the CUDA toolkit
    r"Triton is not installed|No module named 'triton'",  # not with CPU builds of PyTorch
    r"this machine has WordNet itself",
    r"vLLM is not installed",  # make test-serving, in an environment of its own
    r"llama_cpp is not installed \(make test-llama\)",  # minutes of compiling: an environment of its own
)
"""Regular expressions of reasons that lie in the machine."""


def pytest_addoption(parser):
    text = "fail if a test is skipped for a reason that is not in tests/_skips.py"
    parser.addoption("--known-skips", action="store_true", help=text)


def counted(config) -> Counter:
    """Reason -> how many tests, or modules, were skipped for it."""
    reports = config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", [])
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)


def unknown(config) -> list[str]:
    if not config.getoption("--known-skips"):
        return []
    return [reason for reason in counted(config) if not any(re.search(known, reason) for known in KNOWN)]


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput") and session.exitstatus == 0 and unknown(session.config):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    for reason, count in counted(config).most_common():
        terminalreporter.write_line(f"{count:6} {reason}")
    for reason in unknown(config):
        terminalreporter.write_line(f"ERROR: skipped for a reason that is not in tests/_skips.py: {reason}", red=True)
