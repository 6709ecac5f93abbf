"""bitsandbytes' paged optimizers with frozen bases: their state goes on bit-equally from a file, and, on a GPU, it survives under
a cap that does not hold it, leaves the card and comes back.

Paged memory is CUDA's managed memory. What is asked for here is small beside the card: managed memory beyond what a card has free
may hang it. The cap is PyTorch's own, which managed memory does not count towards.
"""

import io

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

MIB = 1 << 20
OPTIMIZERS = {"paged_adamw_8bit": bnb.optim.PagedAdamW8bit, "paged_adamw": bnb.optim.PagedAdamW}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tuned(backend: str, device: str, wide: bool):
    """A model whose adapters have a state of a few KiB, or (``wide``) of 176 MiB in FP32."""
    sizes = dict(hidden_size=512, intermediate_size=2048) if wide else {}
    model = tiny_llama(torch.bfloat16 if device == "cuda" else torch.float32, **sizes).to(device)
    torch.manual_seed(0)
    config = NVFP4LoraConfig(backend=backend, r=1024 if wide else 64, target_modules="all-linear")
    return get_peft_model(model, config).train()


class Run:
    def __init__(self, backend: str, device: str, optimizer, wide: bool = False, length: int = 32):
        self.model = tuned(backend, device, wide)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.trained, lr=1e-3)
        self.ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(1)).to(device)

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu().clone() for p in self.trained]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_resumes(name, backend, device):
    whole = Run(backend, device, OPTIMIZERS[name]).steps(4).weights()
    first = Run(backend, device, OPTIMIZERS[name]).steps(2)
    file = io.BytesIO()
    torch.save({"weights": first.weights(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = Run(backend, device, OPTIMIZERS[name])
    with torch.no_grad():
        for p, w in zip(second.trained, saved["weights"]):
            p.copy_(w)
    without = second.steps(0).weights()
    second.optimizer.load_state_dict(saved["optimizer"])
    assert all(map(torch.equal, without, first.weights()))
    assert all(map(torch.equal, second.steps(2).weights(), whole))
    assert {s["step"] for s in second.optimizer.state.values()} == {4}


def state_tensors(run: Run) -> list[torch.Tensor]:
    return [t for s in run.optimizer.state.values() for t in (s["state1"], s["state2"])]


def cap(bytes_: int | None) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if bytes_ is None else bytes_ / total)


def clean() -> None:
    import gc

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
def test_a_cap_that_does_not_hold_the_state(backend):
    """A long sequence under a cap of what the paged run takes and 24 MiB: a resident state, 176 MiB, does not fit."""
    clean()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    paged = Run(backend, "cuda", bnb.optim.PagedAdamW, True, 2048).steps(2)
    wanted, paging = paged.weights(), [t for t in state_tensors(paged) if getattr(t, "is_paged", False)]
    assert sum(t.nbytes for t in paging) > 128 * MIB and all(not t.is_cuda for t in paging), "managed memory"
    room = torch.cuda.max_memory_reserved()
    del paged, paging
    clean()
    assert torch.cuda.memory_reserved() <= before + 64 * MIB
    cap(room + 24 * MIB)
    try:
        again = Run(backend, "cuda", bnb.optim.PagedAdamW, True, 2048).steps(2)
        assert all(map(torch.equal, again.weights(), wanted))
        del again
        clean()
        with pytest.raises(torch.OutOfMemoryError):
            Run(backend, "cuda", bnb.optim.AdamW, True, 2048).steps(2)
    finally:
        cap(None)
        clean()


@pytest.mark.gpu
def test_state_that_the_host_writes_between_steps_comes_back():
    """The CPU writes every page of the state, which takes them to the host; the next step takes them back. Whether the card's
    memory is free meanwhile is not asked: on an H200, mem_get_info does not tell. (bitsandbytes 0.50 ends the process in
    prefetch_tensor(to_cpu=True), so that is not the way.)"""
    stays = Run("nvfp4", "cuda", bnb.optim.PagedAdamW, True).steps(3).weights()
    run = Run("nvfp4", "cuda", bnb.optim.PagedAdamW, True)
    for _ in range(3):
        run.steps(1)
        torch.cuda.synchronize()
        paged = [t for t in state_tensors(run) if getattr(t, "is_paged", False)]
        assert paged
        for t in paged:
            t.copy_(t.clone())
    assert all(map(torch.equal, run.weights(), stays))
