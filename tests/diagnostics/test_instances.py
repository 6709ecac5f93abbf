"""The doctor's checks of every instance of the extension, without a GPU: right products pass, each fault is found and named."""

from types import SimpleNamespace

import pytest
import torch
from _gemms import CPU, changed, gemm

from peft_nvfp4.diagnostics.doctor import conformance_instances as instances
from peft_nvfp4.diagnostics.doctor import instruction
from peft_nvfp4.diagnostics.doctor.results import FAILED, PASSED, Noticed
from peft_nvfp4.kernels.fp4 import check
from peft_nvfp4.kernels.fp4.tiles import Tile
from peft_nvfp4.numerics import layout
from peft_nvfp4.numerics.products import LowRank

TILE = Tile(128, 128, 128, "pingpong")


def linear(q):
    """With scales row by row, whatever they were."""
    shape = len(q.codes), q.codes.shape[1] // 8
    return q if q.scales.ndim == 2 else q._replace(scales=layout.unswizzle_scales(q.scales, *shape))


def launching(one=gemm):
    """The extension's ``gemms`` over a function of one weight."""

    def gemms(terms, weights, *, constants, adds, low_ranks=None, outs=None, dtype=torch.bfloat16, tile=None, sm_count=0):
        low_ranks, outs = low_ranks or [None] * len(weights), outs or [None] * len(weights)
        rows = zip(map(linear, weights), constants, adds, low_ranks, outs)
        terms = [linear(t) for t in terms]
        return [one(terms, w, constant=c, add=a, low_rank=r, out=out, dtype=dtype) for w, c, a, r, out in rows]

    return gemms


def checks(gemms, *types):
    library = SimpleNamespace(tiles=[TILE], instances={(TILE.name, *t): i for i, t in enumerate(types)})
    return list(instances.instance_checks("extension", library, gemms, CPU, (128, 4)))


def test_right_products_pass():
    results = checks(launching(), ("none", "bf16"), ("bf16", "bf16"), ("f32", "f32"))
    assert {r.outcome for r in results} == {PASSED}, results
    assert len(results) == 5 and "launches exact" in results[1].detail and "4 times 1 tiles" in results[-1].detail


def skipping(terms, weight, *, out=None, **others):
    """The last tile of 128 columns is not written."""
    y, n = gemm(terms, weight, **others), len(weight.codes)
    out = torch.full_like(y, torch.nan) if out is None else out
    if n <= 128:
        return out.copy_(y)
    out[:, : (n - 1) // 128 * 128] = y[:, : (n - 1) // 128 * 128]
    return out


def stale():
    """Writes to the output, and reads the operands, of the first call for a shape."""
    first = {}

    def one(terms, weight, *, out=None, low_rank=None, **others):
        key = terms[0].codes.shape, weight.codes.shape
        terms, weight, low_rank, into = first.setdefault(key, (terms, weight, low_rank, out))
        y = gemm(terms, weight, low_rank=low_rank, **others)
        if into is not None:
            into.copy_(y)
        return y if out is None else out

    return one


def as_before():
    """Reads the operands of the call before, writes where it should."""
    last = []

    def one(terms, weight, **others):
        last.append((terms, weight))
        same = len(last) > 1 and [len(q.codes) for q in (*last[-2][0], last[-2][1])] == [len(q.codes) for q in (*terms, weight)]
        return gemm(*(last[-2] if same and terms[0].k == 160 else last[-1]), **others)

    return one


FAULTS = {
    "a tile": (skipping, "instance", "columns 384..399 of the output are not written (a tile is skipped)"),
    "a lane": (changed(inputs=check._scales_of_another_lane), "instance", "rows g take the block scales of rows g + 8"),
    "shared memory": (changed(*[check._other_chunks(128)] * 2), "instance", "read in another order than it was written"),
    "outputs of the call before": (stale(), "addresses", "wrote to the output of the one before"),
    "operands of the call before": (as_before(), "addresses", "that of the operands of the call before"),
    "BF16 rank": (
        lambda *a, low_rank=None, **k: gemm(*a, low_rank=low_rank and LowRank(*(t[:, :192] for t in low_rank)), **k),
        "instance",
        "a low-rank product of rank 200: what lies beyond a multiple of 16 in the rank is ignored",
    ),
}


@pytest.mark.parametrize("one, where, words", FAULTS.values(), ids=FAULTS)
def test_faults_are_named(one, where, words):
    failed = {r.name: r.detail for r in checks(launching(one), ("none", "bf16")) if r.outcome == FAILED}
    assert any(name.startswith(where) and words in detail for name, detail in failed.items()), failed


def test_work_that_depends_on_tile_or_multiprocessors_is_seen():
    def gemms(terms, weights, *, tile, sm_count, **others):
        ys = launching()(terms, weights, **others)
        return [y.mul_(2) if sm_count == 2 else y for y in ys]

    with pytest.raises(AssertionError, match="^2 multiprocessors for all tiles: 1[0-9]* of 160000 outputs wrong"):
        instances.one_instance(gemms, TILE, "none", "bf16", CPU)


def test_other_bits_under_load_are_seen():
    calls = []

    def one(*arguments, **others):
        calls.append(1)
        return gemm(*arguments, **others) + (len(calls) % 3)

    with pytest.raises(AssertionError, match="outputs changed when two products were computed 4 times in turn"):
        instances.under_load(launching(one), TILE, CPU, 64, 4)


def test_block_scales_of_the_call_before_are_seen():
    """They are read before those of this call have been rearranged."""
    last = []

    def gemms(terms, weights, **others):
        if terms[0].scales.ndim == 2:
            last.append([t.scales for t in terms])
            terms = [t._replace(scales=scales) for t, scales in zip(terms, last[-2:][0])]
        return launching()(terms, weights, **others)

    with pytest.raises(AssertionError, match="outputs changed when two products were computed 6 times in turn"):
        instances.under_load(gemms, TILE, CPU, 64, 6)


def test_a_slow_gpu_is_noticed():
    assert instances.judged_speed(600.0, 110.0) == "600 TFLOP/s, 5.5 times those of BF16"
    with pytest.raises(Noticed, match="200 TFLOP/s, 1.8 times those of BF16: slower than FP4 tensor cores should be"):
        instances.judged_speed(200.0, 110.0)


def test_long_sums_of_the_instruction_are_cut_off():
    """The model against exact products: never larger in magnitude for sums of one sign, and by less than an FP32 step an
    instruction."""
    x = check.matrix(check.codes(9, 512, 1, range(8)), check.powers(9, 512, 2, range(0x28, 0x60)))
    w = check.matrix(check.codes(7, 512, 3, range(8)), check.powers(7, 512, 4, range(0x28, 0x60)))
    sums, exact = instruction.accumulated([x], w, 128).double(), check.expected(check.Case("", (x,), w))
    assert bool((sums <= exact).all()) and bool((exact - sums <= 8 * 2.0**-23 * exact).all()) and bool((sums < exact).any())
    short = check.matrix(check.codes(9, 96, 1), gscale=check.row_scales(9, 5))
    weight = check.matrix(check.codes(7, 96, 2), gscale=torch.tensor([0.25]))
    constant, add = check.integers(7, seed=1), check.integers(9, 7, seed=2).bfloat16()
    right = check.expected(check.Case("", (short,), weight, constant, add)).bfloat16()
    assert torch.equal(instruction.modelled([short], weight, 128, constant, add), right)
