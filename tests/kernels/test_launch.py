"""When a remembered kernel may be launched again (kernels/triton_launch.py), with a stand-in for a compiled kernel."""

import pytest
import torch

launching = pytest.importorskip("peft_nvfp4.kernels.triton.launch", exc_type=ImportError)


class Kernel:
    """A ``triton.JITFunction`` that notes how it is called."""

    __name__ = "kernel"
    arg_names = ["x", "y", "n", "scale", "K", "FLAG"]

    def __init__(self):
        self.pre_run_hooks, self.compiled, self.direct = [], [], []

    def __getitem__(self, grid):
        """Triton's way: compiles, or finds what it has compiled."""

        def run(*arguments, K, FLAG, **options):
            self.compiled.append((grid, arguments, K, FLAG, options))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.direct.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def memory(offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """8 values that begin ``offset`` bytes after a multiple of 64."""
    raw = torch.zeros(256, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset
    return raw[start : start + 8 * dtype.itemsize].view(dtype)


def launch(kernel, x=None, y=None, n=24, scale=0.5, k=64, flag=False, warps=4, grid=(3,)):
    x, y = memory() if x is None else x, memory() if y is None else y
    launching.launch(kernel, grid, (x, y), (n, scale), {"K": k, "FLAG": flag}, num_warps=warps)
    return x, y


def test_the_second_launch_is_direct_with_all_arguments_in_order(kernel):
    launch(kernel)
    x, y = launch(kernel, memory(16), n=40, scale=1.0, grid=(5, 2))
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0][2:] == (64, False, {"num_warps": 4}) and kernel.compiled[0][0] == (3,)
    ((grid, arguments),) = kernel.direct
    assert grid == (5, 2, 1) and arguments[2:] == (40, 1.0, 64, False)
    assert arguments[0] is x and arguments[1] is y


OTHER_KINDS = {
    "an address that is no multiple of 16": dict(x=memory(8)),
    "another tensor that is not": dict(y=memory(4)),
    "another type": dict(y=memory(0, torch.bfloat16)),
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


def test_every_device_and_every_function_has_its_own(kernel, monkeypatch):
    launch(kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel)
    launch(other := Kernel())
    assert len(kernel.compiled) == 2 and len(other.compiled) == 1 and not kernel.direct + other.direct


def test_hooks_and_the_interpreter_go_the_way_of_triton(kernel, monkeypatch):
    launch(kernel)
    kernel.pre_run_hooks.append(print)
    launch(kernel)
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(launching, "INTERPRETED", True)
    launch(kernel)
    assert len(kernel.compiled) == 3 and not kernel.direct


def test_constants_in_another_order_are_refused(kernel):
    with pytest.raises(TypeError, match=r"constants \['FLAG', 'K'\]"):
        launching.launch(kernel, (1,), (memory(), memory()), (1, 1.0), {"FLAG": True, "K": 64}, num_warps=4)
