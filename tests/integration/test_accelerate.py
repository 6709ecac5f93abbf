"""A training loop of one's own with accelerate: ``Accelerator.prepare`` and ``backward`` change nothing."""

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_llama
from peft import get_peft_model
from torch.utils.data import DataLoader

from peft_nvfp4 import NVFP4LoraConfig


def losses(backend, accelerator):
    """Of 4 micro-batches, two for each step of AdamW."""
    torch.manual_seed(0)
    lora = NVFP4LoraConfig(r=4, target_modules="all-linear", backend=backend, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), lora).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    rows = torch.randint(128, (8, 12), generator=torch.Generator().manual_seed(1))
    loader, found = DataLoader(rows, batch_size=2), []
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, ids in enumerate(loader):
        if accelerator is None:
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        else:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_a_loop_of_accelerate_is_the_loop_without(backend):
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    alone = losses(backend, None)
    assert alone == losses(backend, Accelerator(cpu=True, gradient_accumulation_steps=2)) and len(set(alone)) == 4
