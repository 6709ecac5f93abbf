"""The counter of bytes on the wire, which is the benchmarks': a name that tests, and the processes they start, import it by."""

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)  # last: its modules hide none of the tests' helpers

from wire import count_bytes, count_ddp  # noqa: E402

__all__ = ["count_bytes", "count_ddp"]
