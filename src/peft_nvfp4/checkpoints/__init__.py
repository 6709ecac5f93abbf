"""NVFP4 checkpoints of other tools: read them into frozen layers bit for bit, write frozen layers for others to serve.

Both layouts keep the codes as this package does (two a byte, even k in the low nibble, sign in bit 3) and the E4M3 block scales
row by row, one for 16 values along K, not swizzled. They differ in names and in what they call the global scale:

| layout | codes (N, K/2) | block scales (N, K/16) | global scale | W = |
|---|---|---|---|---|
| ``compressed-tensors`` (llm-compressor, vLLM) | ``weight_packed`` U8 | ``weight_scale`` F8_E4M3 | ``weight_global_scale`` F32, \
448 * 6 / amax | code * scale / global |
| ``modelopt`` (NVIDIA ModelOpt, TensorRT-LLM) | ``weight`` U8 | ``weight_scale`` F8_E4M3 | ``weight_scale_2`` F32, \
amax / (448 * 6) | code * scale * global |

So the first stores the reciprocal of what the second, and this package, multiply with. Neither library is imported here: nothing
but safetensors and JSON is read. Files become frozen layers (:mod:`.load`) inside ``from_pretrained``
(:mod:`peft_nvfp4.transformers`).
"""

from .export import ExportReport, export_checkpoint

__all__ = ["ExportReport", "export_checkpoint"]
