"""What the tests of the rotary embedding share: transformers' function, and q, k, cos and sin in many layouts of memory."""

import pytest
import torch
from transformers.models.llama import modeling_llama

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
eager = modeling_llama.apply_rotary_pos_emb
by_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])

B, S, D = 2, 5, 12
LAYOUTS = {  # name -> x (b, h, s, d) of that storage
    "tokens first": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "heads first": lambda b, h, s, d: torch.randn(b, h, s, d),
    "part of qkv": lambda b, h, s, d: torch.randn(b, s, (h + 3) * d)[..., : h * d].view(b, s, h, d).transpose(1, 2),
    "batch inside": lambda b, h, s, d: torch.randn(s, b, h, d).permute(1, 2, 0, 3),
    "values apart": lambda b, h, s, d: torch.randn(b, h, d, s).transpose(2, 3),
}


def inputs(dtype, layout="tokens first", batch=1, s=S, device="cpu"):
    """(q, k, cos, sin) with zeros of both signs and numbers whose products underflow; the halves of cos and sin differ."""
    q, k = (LAYOUTS[layout](B, h, s, D) for h in (4, 2))
    for x in (q, k):
        x.view_as(x)[:, :, ::2, 1:4] = torch.tensor([0.0, -0.0, 1e-7])
        x[..., 4] *= 2.0**-120
    angles = torch.randn(batch, s, D) * 9
    cos, sin = angles.cos(), angles.sin()
    cos[..., 5], sin[..., 6] = 0.0, -0.0
    return [x.to(device, dtype, memory_format=torch.preserve_format) for x in (q, k, cos, sin)]
