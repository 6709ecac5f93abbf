"""bitsandbytes' paged optimizers with frozen bases: their state goes on bit-equally from a file."""

import io

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

OPTIMIZERS = {"paged_adamw_8bit": bnb.optim.PagedAdamW8bit, "paged_adamw": bnb.optim.PagedAdamW}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Run:
    def __init__(self, backend: str, device: str, optimizer):
        model = tiny_llama(torch.bfloat16 if device == "cuda" else torch.float32).to(device)
        torch.manual_seed(0)
        self.model = get_peft_model(model, NVFP4LoraConfig(backend=backend, r=64, target_modules="all-linear")).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.trained, lr=1e-3)
        self.ids = torch.randint(0, 128, (1, 32), generator=torch.Generator().manual_seed(1)).to(device)

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
