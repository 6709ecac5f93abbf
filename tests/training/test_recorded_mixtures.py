"""CUDA graphs of mixtures: whatever the router chooses, a step is the same launches on the same sizes, and can be replayed.

On a CPU a recording is played by :class:`Rehearsal`: experts run in a loop there, and what is checked is the model around them.
"""

from dataclasses import replace

import pytest
import torch
from _frozen_experts import adapted
from _mixtures import by_family
from _rehearsal import Rehearsal

from peft_nvfp4 import enable_cuda_graphs, graph_status
from peft_nvfp4.nn.experts.frozen_experts import frozen_experts
from peft_nvfp4.training.steps import slow_down_steps


def step(model, ids):
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def skip_without_grouped_gemm(device):
    from peft_nvfp4.kernels import grouped

    if device == "cuda" and not grouped.has_grouped_gemm(torch.device("cuda", 0)):
        pytest.skip("not run: experts are computed in a loop on this GPU")


@by_family
@pytest.mark.parametrize("options", [{}, {"gradients": "nvfp4_sr"}, {"weight_layouts": "transient"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replays_are_bit_equal_to_eager_steps(make, options, device):
    """Two batches of one shape, which the router sends elsewhere, by one recording."""
    skip_without_grouped_gemm(device)
    model = adapted(lambda: make().to(device, torch.bfloat16), memory="small" if "weight_layouts" in options else "fast").train()
    slow_down_steps(model)
    for _, experts in frozen_experts(model):
        experts.options = {name: replace(each, **options) for name, each in experts.options.items()}
    batches = [torch.arange(48, device=device).reshape(2, 24) * factor % 128 for factor in (7, 11)]
    eager = [step(model, ids) for ids in batches]
    enable_cuda_graphs(model)
    if device == "cpu":
        model.get_base_model().model.forward.recorder = Rehearsal
    replayed = [step(model, ids) for ids in batches]
    assert all(torch.equal(a, b) for one, other in zip(eager, replayed) for a, b in zip(one, other, strict=True))
    assert graph_status(model).graphs == {"input_ids (2, 24)": 2} and not graph_status(model).reasons
