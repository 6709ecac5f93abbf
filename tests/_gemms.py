"""GEMMs of FP4 implementations for tests: one computed by the reference, ways to get it wrong, and a stand-in for torch's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from peft_nvfp4.kernels.fp4 import check
from peft_nvfp4.kernels.fp4.native import Gemms, with_products
from peft_nvfp4.numerics import layout, reference
from peft_nvfp4.numerics.formats import E4M3_NAN, QuantizedMatrix

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def one_by_one(gemm: Callable[..., Tensor]) -> Gemms:
    """``gemms`` over a function of one weight: ``gemm(terms, weight, *, constant, add, out, dtype) -> y``. Low-rank products are
    made before."""

    def gemms(terms, weights, *, constants, adds, low_ranks=None, outs=None, dtype=torch.bfloat16):
        outs, adds = outs or [None] * len(weights), with_products(adds, low_ranks, dtype)
        return [
            gemm(terms, w, constant=constant, add=add, out=out, dtype=dtype)
            for w, constant, add, out in zip(weights, constants, adds, outs)
        ]

    return gemms


def gemm(terms, weight, *, constant=None, add=None, low_rank=None, out=None, dtype=BF16):
    """What an implementation's GEMM promises, in FP32."""
    assert all(t.gscale.shape == (t.codes.shape[0],) for t in terms) and weight.gscale.shape == (1,)
    assert all(t.is_contiguous() for q in (*terms, weight) for t in q[:3])
    w = reference.dequantize(weight)
    y = sum(reference.dequantize(t) @ w.T for t in terms)
    y = y if low_rank is None else y + low_rank.hidden.float() @ low_rank.up.float().T
    y = y if constant is None else y + constant
    y = (y if add is None else y + add.float()).to(dtype)
    return y if out is None else out.copy_(y)


def narrow(bits):
    """Sums in so many significant bits, rounded after every block of 16 products."""

    def rounded(t):
        mantissa, exponent = torch.frexp(t)
        return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)

    def run(terms, weight, *, constant=None, add=None, low_rank=None, dtype=BF16, **_):
        w, y = reference.dequantize(weight), 0 if low_rank is None else low_rank.hidden.float() @ low_rank.up.float().T
        for x in map(reference.dequantize, terms):
            for i in range(0, x.shape[1], 16):
                y = rounded(y + x[:, i : i + 16] @ w[:, i : i + 16].T)
        y = y if constant is None else y + constant
        return (y if add is None else y + add.float()).to(dtype)

    return run


def changed(inputs=None, weights=None):
    """A GEMM that sees other operands than it was given."""
    same = lambda q: q

    def run(terms, weight, **others):
        return gemm([(inputs or same)(t) for t in terms], (weights or same)(weight), **others)

    return run


def swapped(q):
    return q._replace(codes=(q.codes << 4 | q.codes >> 4))


def unswizzled(q):
    """Linear scales given to a GEMM that reads swizzled ones."""
    rows, blocks = q.scales.shape
    flat = F.pad(q.scales.flatten(), (0, -(-rows // 128) * 128 * (-(-blocks // 4) * 4) - q.scales.numel()))
    return q._replace(scales=layout.unswizzle_scales(flat, rows, blocks))


def without_tail(q):
    scales = q.scales.clone()
    scales[:, q.k // 128 * 8 :] = 0
    return q._replace(scales=scales)


def last_row_of_tile(terms, weight, **others):
    y = gemm(terms, weight, **others)
    y[128:] = 0
    return y


def raising(*args, **others):
    raise RuntimeError("no kernel image is available for execution on the device\nCUDA kernel errors might be reported later")


MUTANTS = {
    "nibbles of x": (changed(inputs=swapped), "the two codes of a byte are swapped"),
    "nibbles of W": (changed(weights=swapped), "the two codes of a byte are swapped"),
    "scales of x": (changed(inputs=unswizzled), r"linear block scales are read as swizzled ones \(input\)"),
    "scales of W": (changed(weights=unswizzled), r"linear block scales are read as swizzled ones \(weight\)"),
    "scales of both": (changed(unswizzled, unswizzled), r"linear block scales .* \(input and weight\)"),
    "row scale": (changed(lambda q: q._replace(gscale=torch.ones_like(q.gscale))), "the rows' global scales are ignored"),
    "one row's scale": (
        changed(lambda q: q._replace(gscale=q.gscale[:1].expand_as(q.gscale).contiguous())),
        "the first row's global scale is used for all rows",
    ),
    "weight's scale": (changed(None, lambda q: q._replace(gscale=1 / q.gscale)), "the weight's global scale is divided by"),
    "K tail": (changed(without_tail, without_tail), "beyond a multiple of 128 in K is ignored"),
    "NaN as 0": (changed(lambda q: q._replace(scales=q.scales * (q.scales != E4M3_NAN))), "a NaN scale counts as 0"),
    "flushed": (changed(None, lambda q: q._replace(scales=q.scales * (q.scales > 7))), "subnormal scales count as 0"),
    "signs": (changed(lambda q: q._replace(codes=q.codes & 0x77)), r"signs are ignored \(input\)"),
    "BF16 sums": (narrow(8), "accumulated in BF16"),
    "FP16 sums": (narrow(11), "accumulated in FP16"),
    "M tail": (last_row_of_tile, r"every k by itself: .* in rows 128\.\.159 of 160"),
    "constant": (lambda *a, constant=None, **k: gemm(*a, **k), "the constant is ignored"),
    "overwritten": (lambda *a, add=None, **k: gemm(*a, **k), "what should be added to is ignored"),
    "scaled constant": (
        lambda terms, w, constant=None, add=None, **k: gemm(
            terms, w, add=_plus(add, None if constant is None else terms[0].gscale[:, None] * constant), **k
        ),
        "the constant is multiplied with the rows' global scales",
    ),
    "low rank": (lambda *a, low_rank=None, **k: gemm(*a, **k), "the low-rank product is ignored"),
    "scaled low rank": (
        lambda terms, w, low_rank=None, **k: gemm(
            terms,
            w,
            low_rank=low_rank and low_rank._replace(hidden=low_rank.hidden.float() * terms[0].gscale[:, None] * w.gscale),
            **k,
        ),
        "the low-rank product is multiplied with the global scales",
    ),
    "tail of the rank": (
        lambda *a, low_rank=None, **k: gemm(*a, low_rank=low_rank and type(low_rank)(*(t[:, :96] for t in low_rank)), **k),
        "beyond a multiple of 32 in the rank is ignored",
    ),
    "lane": (changed(inputs=check._scales_of_another_lane), r"rows g take the block scales of rows g \+ 8 .* \(input\)"),
    "narrow tiles": (
        changed(weights=check._scales_of_the_first_tile(64)),
        "tiles of 64 columns take the block scales of the first one of 128 columns",
    ),
    "shared memory": (
        changed(check._other_chunks(128), check._other_chunks(128)),
        r"read in another order than it was written \(swizzle of 64 bytes\) \(input and weight\)",
    ),
    "second term": (lambda terms, *a, **k: gemm(terms[:1], *a, **k), "the second term is ignored"),
    "shape": (lambda *a, **k: gemm(*a, **k)[:, :-1], r"the result is \(16, 15\), expected \(16, 16\)"),
}


def _plus(a, b):
    return b if a is None else a if b is None else a.float() + b


# ---------------------------------------------------------------------------------------------- torch's
plain_scaled_mm = F.scaled_mm


def fake_scaled_mm(x, wt, x_scales, x_recipe, w_scales, w_recipe, x_swizzle, w_swizzle, *, output_dtype):
    """F.scaled_mm for FP4, by its published rules: packed codes, swizzled block scales and a global scale, shapes as it checks
    them."""
    x_meta, wt_meta = x.to("meta"), wt.t().to("meta").t()
    scales = [[t.to("meta") for t in scales] for scales in (x_scales, w_scales)]
    given = (x_meta, wt_meta, scales[0], x_recipe, scales[1], w_recipe, x_swizzle, w_swizzle)
    plain_scaled_mm(*given, output_dtype=output_dtype)  # raises what CUDA would
    assert x.dtype == wt.dtype == torch.float4_e2m1fn_x2 and wt.stride(0) == 1
    assert x_recipe == w_recipe == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert x_swizzle == w_swizzle == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    values = []
    for codes, (blocks, gscale) in ((x, x_scales), (wt.t(), w_scales)):
        codes = codes.view(torch.uint8)
        rows, k = codes.shape[0], 2 * codes.shape[1]
        linear = layout.unswizzle_scales(blocks.view(torch.uint8), rows, k // 16)
        values.append(reference.dequantize(QuantizedMatrix(codes, linear, gscale, k)))
    return (values[0] @ values[1].T).to(output_dtype)
