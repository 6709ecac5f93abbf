"""A skipped test has a reason that lies in the machine; any other fails a run with --known-skips."""

from types import SimpleNamespace

import _skips
import pytest


def session_of(*reasons, asked=True, **attributes):
    """A finished session of passed and skipped tests, as pytest's hooks see it."""
    skipped = [SimpleNamespace(longrepr=("test_x.py", 1, f"Skipped: {reason}")) for reason in reasons]
    reporter = SimpleNamespace(stats={"skipped": skipped} if skipped else {})
    plugins = SimpleNamespace(get_plugin=lambda name: {"terminalreporter": reporter}[name])
    config = SimpleNamespace(pluginmanager=plugins, getoption=lambda name: {"--known-skips": asked}[name], **attributes)
    return SimpleNamespace(config=config, exitstatus=0)


@pytest.mark.parametrize(
    "reasons, status",
    [
        ((), 0),
        (("not run: no CUDA GPU", "not run: no SM120 GPU", "not run: nvcc was not found: set CUDA_HOME"), 0),
        (("not run: no CUDA GPU", "not run: gguf is not installed"), 1),
        (("not run: the model and the data were not fetched",), 1),
        (("could not import 'trl': No module named 'trl'",), 1),
    ],
)
def test_an_unexpected_reason_fails_the_run(reasons, status):
    session = session_of(*reasons)
    _skips.pytest_sessionfinish(session)
    assert session.exitstatus == status
    unasked = session_of(*reasons, asked=False)
    _skips.pytest_sessionfinish(unasked)
    assert unasked.exitstatus == 0
    assert len(_skips.unknown(session.config)) == status


def test_all_reasons_are_counted():
    config = session_of("a", "b", "a").config
    assert _skips.counted(config) == {"a": 2, "b": 1}
