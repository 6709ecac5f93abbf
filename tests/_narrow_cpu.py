"""The tests as a lesser x86 CPU computes them: ``PEFT_NVFP4_TEST_CPU=avx512`` (without AVX512-BF16), ``avx2`` or ``default``.

PyTorch's own kernels, oneDNN and MKL read a variable each. (MKL obeys its one on Intel's CPUs only; elsewhere it takes its
AVX2 kernels by itself, and its oldest ones in the mode ``COMPATIBLE``.) bitsandbytes, and PyTorch where it is asked for
AVX512-BF16, read CPUID and nothing else: their functions are replaced. Importing this module does all that; it has to come
before PyTorch. Processes that a test starts inherit the variables, and have those functions as they are.
"""

import ctypes
import os

VARIABLE = "PEFT_NVFP4_TEST_CPU"
SETTINGS = {
    "avx512": dict(ATEN_CPU_CAPABILITY="avx512", ONEDNN_MAX_CPU_ISA="AVX512_CORE", MKL_ENABLE_INSTRUCTIONS="AVX512"),
    "avx2": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "default": dict(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_CBWR="COMPATIBLE"),
}


CPU = os.environ.get(VARIABLE, "")
if CPU and CPU not in SETTINGS:
    raise ValueError(f"{VARIABLE}={CPU}: known are {', '.join(SETTINGS)}")
os.environ.update(SETTINGS.get(CPU, {}))


def _narrow_functions(with_avx512: bool) -> None:
    import torch

    torch.cpu._is_avx512_bf16_supported = lambda: False
    try:
        from bitsandbytes.cextension import lib
    except ImportError:
        return
    lib.has_avx512bf16_cpu = lambda: False
    if not with_avx512:
        for name in (f"cdequantize_blockwise_cpu_{q}_{d}" for q in ("nf4", "fp4") for d in ("fp32", "bf16", "fp16")):
            setattr(lib, name, _in_one_row(getattr(lib, name)))


def _in_one_row(kernel):
    """What the branch without AVX-512 computes, by the one with it: they differ in the block scales from the second row on."""

    def call(packed, absmax, out, blocksize, rows, columns):
        kernel(packed, absmax, out, blocksize, ctypes.c_longlong(1), ctypes.c_longlong(rows.value * columns.value))

    return call


if CPU:
    _narrow_functions(with_avx512=CPU == "avx512")
