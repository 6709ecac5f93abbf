"""pytest plugin: which tests run which lines of one module and how long they take; and only some tests, in a given order."""

import sys
import time
from collections import defaultdict

import pytest


class Recorder:
    """Lines of ``path`` that each test runs, its fixtures included, and its seconds (tracing makes them an upper bound)."""

    def __init__(self, path: str):
        self.path, self.seconds, self.lines = path, {}, defaultdict(set)
        self.test, self.failed = "", set()

    def _call(self, frame, event, argument):
        # not the line of the def: that runs on import, and what it sets (a default) concerns more tests than those that call it
        return self._line if frame.f_code.co_filename == self.path else None

    def _line(self, frame, event, argument):
        self.lines[self.test].add(frame.f_lineno)
        return self._line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.test, start = item.nodeid, time.perf_counter()
        sys.settrace(self._call)
        yield
        sys.settrace(None)
        self.seconds[self.test] = time.perf_counter() - start

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)


class Selection:
    """The named tests, in that order. Stops at the first that fails, and keeps its name."""

    def __init__(self, names: list[str]):
        self.order = {name: i for i, name in enumerate(names)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"
