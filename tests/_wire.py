"""The counter of bytes on the wire, which is the benchmarks': a name that tests, and the processes they start, import it by."""

from wire import count_bytes, count_ddp

__all__ = ["count_bytes", "count_ddp"]
