"""Two processes joined by gloo, started once for all tests: starting Python with transformers twice takes longer than any test.

A test calls ``both(function, *arguments)``; each process runs ``function(rank, *arguments)``, which must be importable by name,
and the two results come back. An exception in either is raised in the test; after one that does not answer, both start anew.
"""

import atexit
import functools
import os
import tempfile
import traceback
from typing import Any

import torch
import torch.multiprocessing as mp

PATIENCE = 120
"""Seconds. The first call waits for both processes to start."""


class Failed(Exception):
    """What went wrong in the processes."""


def _serve(rank: int, meeting: str, pipe) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", ACCELERATE_USE_CPU="true")  # looked at, not used
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            torch.manual_seed(0)
            pipe.send((True, function(rank, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


@functools.cache
def _processes() -> list:
    context = mp.get_context("spawn")
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    found = []
    for rank in range(2):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, meeting, there), daemon=True)
        process.start()
        found.append((process, here))
    atexit.register(_stop, found)
    return found


def _stop(processes: list) -> None:
    for process, _ in processes:
        process.kill()
    _processes.cache_clear()


def refusal(call) -> str:
    """What the ``ValueError`` of a call says; nothing where there is none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def both(function, *arguments: Any) -> list:
    """[result of rank 0, of rank 1]."""
    processes = _processes()
    for _, pipe in processes:
        pipe.send((function, arguments))
    results, failures, stuck = [], [], False
    for rank, (_, pipe) in enumerate(processes):
        if failures and not pipe.poll(5) or not pipe.poll(PATIENCE):  # one is stuck where the other failed
            failures.append(f"rank {rank} did not answer")
            stuck = True
            continue
        fine, result = pipe.recv()
        results.append(result)
        if not fine:
            failures.append(f"rank {rank}: {result}")
    if stuck:
        _stop(processes)  # the next call starts new ones
    if failures:
        raise Failed("\n".join(failures))
    return results
