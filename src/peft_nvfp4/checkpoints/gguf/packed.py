"""Frozen NVFP4 weights as ggml's type of that name: the same codes and block scales, in another order.

ggml's block is 64 values of a row: four scales (the bits of E4M3, of which the sign is not used), then for every 16 values eight
bytes, of which byte i holds the codes i and i + 8. (Here byte i holds 2 i and 2 i + 1.) The global scale is a tensor of its own
beside the weight, ``.scale``, by which llama.cpp multiplies the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...nn.experts.frozen_experts import frozen_experts
from ...nn.frozen_linear import FrozenLinear
from ...nn.nvfp4 import NVFP4FrozenLinear
from ...numerics.formats import BLOCK, QuantizedMatrix
from .families import FAMILIES, Family, rows

VALUES = 64
"""Of ggml's block."""


def packed_linears(model: nn.Module, family: Family) -> dict[str, NVFP4FrozenLinear]:
    """Name -> linear. Raises ValueError for a model that is not frozen in NVFP4, or with which llama.cpp cannot compute."""
    frozen = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, FrozenLinear)}
    if not frozen or not all(isinstance(m, NVFP4FrozenLinear) for m in frozen.values()):
        raise ValueError("dtype='nvfp4' writes a model frozen in NVFP4: merge(model, to='nvfp4'), or freeze_model(model)")
    if not family.global_scales or frozen_experts(model):
        raise ValueError(
            f"packed {model.config.model_type} is not written as GGUF here: llama.cpp would leave out global scales (it has them "
            f"for {', '.join(kind for kind, f in FAMILIES.items() if f.global_scales)}). Merge to 'bf16', and write 'q8_0'"
        )
    return frozen


def stays_packed(name: str, layer: NVFP4FrozenLinear) -> bool:
    """Whether llama.cpp can compute with it. Its MLPs would multiply a bias by the global scale as well, and say so by ending the
    process."""
    w = layer.forward_layout
    return w.k % VALUES == 0 and w.gscale.numel() == 1 and (layer.bias is None or ".mlp." not in name)


def add_packed(writer: Any, target: str, name: str, layer: NVFP4FrozenLinear, config: Any, family: Family) -> None:
    """A linear's weight, as ``target`` of the file, and its global scale."""
    import gguf

    w = layer.forward_layout
    ((_, codes),), ((_, scales),) = (rows(f"{name}.weight", t, config, family) for t in (w.codes, w.scales))
    kind = gguf.GGMLQuantizationType.NVFP4
    writer.add_tensor(target, blocks(w._replace(codes=codes, scales=scales)).cpu().numpy(), raw_dtype=kind)
    writer.add_tensor(f"{target.removesuffix('.weight')}.scale", w.gscale.float().cpu().numpy())


def blocks(w: QuantizedMatrix) -> Tensor:
    """ggml's bytes, (R, K / 64 * 36) uint8."""
    count, n = w.codes.shape[0], w.k // VALUES
    codes = w.codes[:, : w.k // 2].reshape(count, n, VALUES // BLOCK, BLOCK // 2)
    single = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # (..., 16)
    paired = single[..., : BLOCK // 2] | single[..., BLOCK // 2 :] << 4
    scales = w.scales[:, : w.k // BLOCK].view(torch.uint8).reshape(count, n, VALUES // BLOCK)
    return torch.cat((scales, paired.flatten(-2)), -1).reshape(count, -1)
