"""A piece of GPU work that is always the same, recorded once in a CUDA graph and then replayed.

A step of a 135M model is some three thousand kernels of a few microseconds. Issued from Python one by one, or by one graph for
the decoder and Python for loss, clipping and optimizer, the host is the limit (18 ms a step on a slow core), and a second model
in the same process gains nothing. Recorded whole, a step costs the host one launch, and steps of several models overlap on
several streams.

What is recorded reads and writes tensors that stay where they are: inputs are copied into them before a replay, and whatever
changes from step to step (rows, learning rate, seeds, where the loss goes) is looked up on the device by a counter that the
recording itself advances.

The recording is made on the current stream, which must not be the default one, and every replay must be on it: cuBLAS' workspace
and autograd's accumulation belong to a stream. Not ``torch.cuda.graph``, which waits for the whole device and empties the caches:
other models are at work meanwhile.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch

WAITING = False
"""What a generator yields that can do nothing but wait for the device."""
AHEAD, TURN = 6, 4
"""Pieces of work that a stream has before it at most, in turns; pieces in a turn. What is queued keeps the GPU busy while Python
makes another model."""


class Recording:
    """``run()``, recorded. A warm-up before it compiles kernels and makes workspaces, which a capture may not."""

    def __init__(self, run: Callable[[], None]):
        run()
        self.stream = torch.cuda.current_stream()
        self.graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what it frees may belong to other streams
        try:
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid: the first error says why
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        finally:
            if collects:
                gc.enable()

    def __call__(self) -> None:
        if torch.cuda.current_stream() != self.stream:
            raise RuntimeError("a recording was made on another stream")
        self.graph.replay()


class Piece:
    """Recorded where that is possible, and otherwise run as it is; both do the same on the same tensors.

    Attributes:
        why_not: why it is not recorded: None if it is.
        played: how often it was replayed.
    """

    recorder: Any = Recording

    def __init__(self, run: Callable[[], None], device: torch.device, wanted: bool):
        self.run, self.played, self.why_not = run, 0, _obstacle(device) if wanted else "not wanted"
        self.recording = None
        if self.why_not is None:
            try:
                self.recording = self.recorder(run)
            except Exception as error:  # whatever a model does that a capture forbids: said, and the run goes on without
                self.why_not = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                print(f"not recorded: {self.why_not}", flush=True)

    def __call__(self) -> None:
        if self.recording is None:
            self.run()
        else:
            self.recording()
            self.played += 1


def _obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"no CUDA graphs on the {device.type}"
    return "on the default stream" if torch.cuda.current_stream() == torch.cuda.default_stream() else None


class Throttle:
    """Keeps a stream's queue short: Python is far ahead otherwise, and what one model has queued holds up the others."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks, self.count = device.type == "cuda", deque(), 0

    def step(self) -> Generator[bool | None, None, None]:
        """After each piece of work."""
        self.count += 1
        if not self.cuda or self.count % TURN:
            if not self.cuda:
                yield
            return
        self.marks.append(_mark())
        while len(self.marks) > AHEAD and not self.marks[0].query():
            yield WAITING
        while self.marks and self.marks[0].query():
            self.marks.popleft()
        yield


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def arrived(device: torch.device) -> Generator[bool | None, None, None]:
    """Ends when all that was queued on the current stream is done: then results are fetched without holding up other models."""
    if device.type == "cuda":
        event = _mark()
        while not event.query():
            yield WAITING
    else:
        yield
