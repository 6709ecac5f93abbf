"""Makes Triton's CPU interpreter compute what a GPU computes; for tests only.

``TRITON_INTERPRET=1`` (set before Triton is imported) runs kernels in NumPy. As of Triton 3.6 to 3.9 that is silently wrong in
places that matter here, found by comparing with PyTorch bit for bit:

* conversions from FP32 to BF16 truncate, to E4M3 lose a carry, and E4M3's 0x7F reads as 480;
* ``tl.fma`` rounds twice: kernels here rely on its exact remainder;
* libdevice functions return None;
* ``tl.minimum``/``tl.maximum`` keep NaN also where they must not (``propagate_nan=NONE`` returns the other operand).

:func:`install` replaces those pieces. NumPy's warnings about overflow and NaN, which are the normal course of adversarial
inputs, are switched off.
"""

import json
import os
from collections.abc import Callable

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.extra import libdevice

TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_convert_float = interpreter._convert_float


def _convert(data, from_type, to_type, rounding):
    source, target = TORCH_TYPES.get(str(from_type)), TORCH_TYPES.get(str(to_type))
    if source is None or target is None:
        return _convert_float(data, from_type, to_type, rounding)
    x = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.uint8).copy()).view(source)
    y = x.float().clamp(-448, 448).to(target) if target is torch.float8_e4m3fn else x.to(target)
    return y.view(torch.uint8).numpy().view(getattr(np, f"uint{to_type.primitive_bitwidth}")).reshape(data.shape)


def _fma(self, x, y, z):
    """One rounding. FP64 holds the product of two FP32 numbers exactly; adding in FP64 and rounding to FP32 could differ from a
    true fused operation only where the FP64 sum is itself a rounded midpoint."""
    dtype = z.data.dtype
    wide = np.float64 if dtype == np.float32 else np.float32
    return interpreter.TensorHandle((x.data.astype(wide) * y.data.astype(wide) + z.data).astype(dtype), z.dtype.scalar)


def _fast_dividef(a, b):
    """The one libdevice function in use, an approximate quotient: rounded correctly here, and subnormals flushed."""
    q = a / b
    return tl.where(tl.abs(q) < 2.0**-126, q * 0.0, q)


def install() -> None:
    np.seterr(all="ignore")
    interpreter._convert_float = _convert
    builder = interpreter.InterpreterBuilder
    builder.create_fma = _fma
    libdevice.fast_dividef = _fast_dividef
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def report(work: Callable[[], object]) -> None:
    """Print the result of ``work()`` as JSON, with kernels in the interpreter."""
    install()
    torch.set_num_threads(1)
    with torch.no_grad():
        print(json.dumps(work()))
