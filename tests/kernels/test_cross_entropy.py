"""The kernel of the loss at labels (kernels/triton/cross_entropy.py): losses and gradients against PyTorch's in FP32, in Triton's
interpreter (a process of its own) and on CUDA; and the memory that the whole loss takes there."""

import json

import pytest
import torch
import torch.nn.functional as F
from _interpreter import interpreted_results

from peft_nvfp4.fusion.loss import CHUNK_BYTES, linear_cross_entropy

CASES = [(5, 40), (3, 300), (4, 4096), (2, 4097), (2, 9000)]  # rows, logits: under, at and over one piece


def off_bound(device: str, dtype: torch.dtype) -> list[str]:
    """Cases outside of their bounds. Logits are within 32 of the greatest. So an exponential is off by at most 2**-18 (its
    argument times log2(e) is rounded to 2**-19), and so is a probability, whose sum is no worse: 2**-17 of p, 2**-17 of a loss.
    Then a gradient is rounded to ``dtype`` once, in units of its own."""
    from peft_nvfp4.kernels.triton.cross_entropy import cross_entropy

    found = []
    for n, v in CASES:
        generator = torch.Generator().manual_seed(v)
        y = (4 * torch.randn(n, v, generator=generator)).to(dtype)
        y[0, : v // 2] = float("-inf")  # a vocabulary that is masked: more than a whole piece of it
        labels, factors = torch.randint(v // 2, v, (n,), generator=generator), torch.rand(n, generator=generator)
        labels[0] = v - 1
        leaf = y.float().requires_grad_()
        expected = F.cross_entropy(leaf, labels, reduction="none")
        for factor in (factors, factors[:1]):
            (gradient,) = torch.autograd.grad((expected * factor).sum(), leaf, retain_graph=True)
            got = y.to(device, copy=True)
            losses = cross_entropy(got, labels.to(device), factor.to(device)).cpu()
            info, p = torch.finfo(dtype), leaf.detach().softmax(dim=1)
            bound = info.eps * gradient.abs() + factor[:, None] * (2**-17 * p + 2**-24) + info.tiny * info.eps
            wrong = ((got.cpu().float() - gradient).abs() > bound).sum()
            wrong += ((losses - expected).abs() > 2**-17 * (1 + expected)).sum()
            if wrong:
                found.append(f"{n} x {v}, {len(factor)} factors: {wrong}")
        got = y.to(device, copy=True)
        alone = cross_entropy(got, labels.to(device), None)
        if not torch.equal(alone.cpu(), losses) or not torch.equal(got.cpu(), y):
            found.append(f"{n} x {v}, no gradient")
    return found


def test_interpreted():
    assert interpreted_results(__file__) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    assert off_bound("cuda", dtype) == []


@pytest.mark.gpu
def test_the_loss_takes_the_bytes_of_one_chunk_of_logits():
    """Half of CHUNK_BYTES in BF16, overwritten by their gradient; and no chunk is there when the next one is made."""
    v, d, n = 128_256, 256, 2048
    weight = torch.randn(v, d, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(v, (n,), device="cuda")
    linear_cross_entropy(hidden, weight, labels)  # cuBLAS' workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, labels)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * CHUNK_BYTES / 2
    loss.backward()
    assert hidden.grad.isfinite().all()


if __name__ == "__main__":
    print(json.dumps(off_bound("cpu", torch.float16)))
