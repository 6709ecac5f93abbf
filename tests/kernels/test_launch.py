"""When a remembered kernel may be launched again (kernels/triton/launch.py), with a stand-in for a compiled kernel."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

launching = pytest.importorskip("peft_nvfp4.kernels.triton.launch", exc_type=ImportError)


class Kernel:
    """A ``triton.JITFunction`` that notes how it is called."""

    __name__ = "kernel"
    arg_names = ["x", "y", "n", "scale", "K", "FLAG"]

    def __init__(self):
        self.pre_run_hooks, self.compiled, self.with_hooks, self.direct = [], [], [], []

    def __getitem__(self, grid):
        """Triton's way: compiles, or finds what it has compiled."""

        def run(*arguments, **named):
            constants = [named.pop(name) for name in self.arg_names if name in named]
            self.compiled.append((grid, arguments, *constants, named))
            return Compiled(self)

        return run


class Compiled:
    """A ``triton.compiler.CompiledKernel``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.with_hooks.append((grid, arguments))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (stream, function, metadata, launch_metadata, enter, leave) == ("stream", "function", "metadata", None, None, None)
        self.kernel.direct.append(((x, y, z), arguments))


class Memory(NamedTuple):
    """A tensor on a GPU, as far as a launch looks at it."""

    address: int
    dtype: torch.dtype = torch.float32
    device: int = 0

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device

    def view(self, dtype):
        return self._replace(dtype=dtype)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_plans", {})
    monkeypatch.setattr(launching.triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    return Kernel()


X, Y = Memory(64), Memory(128)


def launch(kernel, x=X, y=Y, n=24, scale=0.5, k=64, flag=False, warps=4, grid=(3,)):
    launching.launch(kernel, grid, (x, y), (n, scale), {"K": k, "FLAG": flag}, num_warps=warps)


def test_the_second_launch_is_direct_with_all_arguments_in_order(kernel):
    launch(kernel)
    launch(kernel, Memory(16), Memory(32), n=40, scale=1.0, grid=(5, 2))
    assert kernel.compiled == [((3,), (X, Y, 24, 0.5), 64, False, {"num_warps": 4})]
    assert kernel.direct == [((5, 2, 1), (16, 32, 40, 1.0, 64, False))]


OTHER_KINDS = {
    "an address that is no multiple of 16": dict(x=Memory(8)),
    "another tensor that is not": dict(y=Memory(4)),
    "another type": dict(y=Memory(128, torch.bfloat16)),
    "a tensor on the host": dict(y=Memory(128, device=-1)),
    "another device": dict(x=Memory(64, device=1), y=Memory(128, device=1)),
    "the number 1": dict(n=1),
    "a multiple of 16": dict(n=32),
    "a wide number": dict(n=(1 << 31) + 8),
    "a wide negative number": dict(n=-(1 << 31) - 8),
    "a wide multiple of 16": dict(n=1 << 31),
    "another constant": dict(k=96),
    "a flag": dict(flag=True),
    "other options": dict(warps=8),
}


@pytest.mark.parametrize("change", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_what_a_kernel_is_specialised_on_is_compiled_for(kernel, change):
    launch(kernel)
    launch(kernel, **change)
    assert len(kernel.compiled) == 2 and not kernel.direct
    launch(kernel, **change)
    launch(kernel)
    assert len(kernel.compiled) == 2 and len(kernel.direct) == 2


def test_every_function_has_its_own(kernel):
    launch(kernel)
    launch(other := Kernel())
    assert len(kernel.compiled) == len(other.compiled) == 1 and not kernel.direct + other.direct


def test_hooks_of_the_kernel_and_the_interpreter_go_the_way_of_triton(kernel, monkeypatch):
    launch(kernel)
    kernel.pre_run_hooks.append(print)
    launch(kernel)
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(launching, "INTERPRETED", True)
    launch(kernel)
    assert len(kernel.compiled) == 3 and not kernel.direct


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chain", [True, False])
def test_hooks_of_launches_are_called(kernel, monkeypatch, name, chain):
    """Triton keeps a chain of hooks, empty as a rule, where somebody may put a function of their own."""
    monkeypatch.setattr(launching.triton.knobs.runtime, name, SimpleNamespace(calls=[print]) if chain else print)
    launch(kernel)
    launch(kernel)
    assert kernel.with_hooks == [((3, 1, 1), (X, Y, 24, 0.5, 64, False))] and not kernel.direct
    monkeypatch.setattr(launching.triton.knobs.runtime, name, SimpleNamespace(calls=[]) if chain else None)
    launch(kernel)
    assert len(kernel.with_hooks) == len(kernel.direct) == 1


@pytest.mark.parametrize("plans", [1, 1 << 14])
def test_rows_and_words_are_launched_by_shape(kernel, monkeypatch, plans):
    """Of kernels whose programs hold a row, or decode words; with few plans, all of them are made anew, and Triton is asked."""
    monkeypatch.setattr(launching, "MOST_PLANS", plans)
    for arg_names, start, constants, compiled_for in (
        (["x", "y", "n", "scale", "K", "NB", "MODE", "FLAG"], ("rows", "terms", (5, 100), 0), {"FLAG": True}, (100, 8, 0, True)),
        (["x", "y", "n", "scale", "NW", "FLAG"], ("words", 5, 100), {"FLAG": True}, (16, True)),
    ):
        kernel.arg_names, (form, *start) = arg_names, start
        kernel.compiled.clear()
        kernel.direct.clear()
        start_kernel = launching.launch_rows if form == "rows" else launching.launch_words
        codes = Memory(64, torch.uint8)
        for n in (3, 3, 4, 3):
            start_kernel(kernel, *start, (codes, Memory(128)), (n, 0.5), constants)
        assert len(kernel.compiled) == (3 if plans == 1 else 2)
        assert kernel.compiled[0][1][0].dtype == (torch.uint8 if form == "rows" else torch.int32)
        grid = (5, 1, 1)
        assert kernel.direct[0] == (grid, (64, 128, 3, 0.5, *compiled_for))


def test_constants_in_another_order_are_refused(kernel):
    with pytest.raises(TypeError, match=r"constants \['FLAG', 'K'\]"):
        launching.launch(kernel, (1,), (Memory(64), Memory(64)), (1, 1.0), {"FLAG": True, "K": 64}, num_warps=4)
