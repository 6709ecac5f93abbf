"""Implementations of the two products without FP4 hardware: a GEMM computed by the reference, and ways to get it wrong.

The right GEMM must be chosen and give the reference's products; every wrong one must be found and named.
"""

import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from _gemms import BF16, CPU, MUTANTS, changed, fake_scaled_mm, gemm, narrow, one_by_one, raising
from _product_groups import GROUPS, close, exact_dgrad, exact_fprop, group, with_seeds, without_hidden

from peft_nvfp4 import kernels
from peft_nvfp4.kernels import dispatch, implementations
from peft_nvfp4.kernels.fp4 import check, native, scaled_mm
from peft_nvfp4.numerics import layout, reference
from peft_nvfp4.numerics.formats import GRADIENT, QuantizedMatrix
from peft_nvfp4.numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from peft_nvfp4.ops.core import Operator


# ---------------------------------------------------------------------------------------------- the check
def test_a_right_gemm_passes():
    assert check.failures(gemm, CPU) == []
    assert check.sum_bits(gemm, CPU) == (24, 24)


@pytest.mark.parametrize("mutant, message", [pytest.param(*v, id=k) for k, v in MUTANTS.items()])
def test_every_mistake_is_found_and_named(mutant, message):
    found = check.failures(mutant, CPU)
    assert found and re.search(message, found[0]), found


def test_a_name_that_right_answers_contradict_is_not_given():
    """Block scales ignored for one K only: not "block scales are ignored", but where."""
    ignored = changed(lambda q: q._replace(scales=torch.full_like(q.scales, 0x38)))
    found = check.failures(lambda terms, *a, **k: (ignored if terms[0].k == 64 else gemm)(terms, *a, **k), CPU)
    assert len(found) == 1 and found[0].startswith("subnormal scales: 216 of 216 outputs wrong"), found


@pytest.mark.parametrize("bits", (17, 20))
def test_the_width_of_sums_is_measured(bits):
    assert check.sum_bits(narrow(bits), CPU) == (bits, bits)


def test_exact_cases_are_exact():
    """The sum of the summands' magnitudes, in steps of which all are multiples, is below 2**EXACT_BITS; so is every partial
    sum."""
    for case in check.cases():
        if not case.exact or case.name in ("NaN scales", "the largest codes and scales"):
            continue
        unscaled = replace(
            case,
            weight=case.weight._replace(gscale=torch.ones(1)),
            terms=tuple(t._replace(gscale=torch.ones(1)) for t in case.terms),
        )
        smallest = [check.values(q).abs() for q in (*unscaled.terms, unscaled.weight)]
        x, w = (min(t[t > 0].min() for t in ts) for ts in (smallest[:-1], smallest[-1:]))
        step = x * w if case.name != "subnormal scales" else torch.tensor(0.25 * 2.0**-18)
        assert check.magnitude(unscaled).max() < step * 2**check.EXACT_BITS, case.name


# ---------------------------------------------------------------------------------------------- fprop and dgrad over a GEMM
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("terms, constant", [(1, None), (1, torch.float32), (2, BF16), (2, torch.float32)])
def test_products_over_a_gemm(name, terms, constant):
    """Against exact ones: the low-rank part is rounded once by itself, dgrad once more for every linear (roundings: see
    close)."""
    with torch.no_grad():
        forward, backward = group(name, terms, constant, 9, "cpu")
        assert native.takes_fprop(forward)
        for y, exact in zip(native.fprop(one_by_one(gemm), forward), exact_fprop(forward)):
            assert y.dtype == BF16 and close(y, *exact, 2)
        if backward.a is not None:  # h computed inside, by the operator
            whole = without_hidden(forward, backward.a)
            *_, h = native.fprop(one_by_one(gemm), whole)
            assert torch.equal(h, reference.fprop(whole)[-1])
        exact, magnitude = exact_dgrad(backward)
        for p in (backward, with_seeds(backward)):
            assert native.takes_dgrad(p)
            dx = native.dgrad(one_by_one(gemm), p)
            right = exact if p is backward else reference.dgrad(p).double()
            assert dx.dtype == BF16 and close(dx, right, magnitude, len(p.linears) + 2)


def test_products_without_additions_are_rounded_once():
    """Then there is only the order of the sums: all of this is exact in FP32, so the bits are those of the reference."""
    with torch.no_grad():
        x = QuantizedMatrix(*check.matrix(check.codes(9, 64, 0), gscale=check.row_scales(9, 1)))
        w = check.matrix(check.codes(48, 64, 2), check.powers(48, 64, 3))
        p = Fprop([x], [ForwardLinear(w)], BF16)
        assert torch.equal(native.fprop(one_by_one(gemm), p)[0], reference.fprop(p)[0])
        dy = (2.0 ** torch.arange(9))[:, None].to(BF16) * reference.dequantize(check.matrix(check.codes(9, 64, 4)))
        dy[:, ::16] = 6 * 2.0 ** torch.arange(9)[:, None]  # every block has a 6, so that quantising changes nothing
        dy = dy.to(BF16)
        assert torch.equal(reference.dequantize(reference.quantize(dy, GRADIENT)), dy.float())
        p = Dgrad([BackwardLinear(dy, w)])
        assert torch.equal(native.dgrad(one_by_one(gemm), p), reference.dgrad(p))


def test_what_a_implementation_does_not_take():
    forward, backward = group("qkv", 1, None, 9, "cpu")
    (x,), (first, *others) = forward.terms, forward.linears
    assert native.takes_fprop(forward) and not native.takes_fprop(forward._replace(dtype=torch.float32))
    no_rows = QuantizedMatrix(*(t[:0] for t in x[:3]), 80)
    assert not native.takes_fprop(forward._replace(terms=[no_rows]))
    row_scales = first._replace(weight=first.weight._replace(gscale=torch.ones(64)))
    assert not native.takes_fprop(forward._replace(linears=[row_scales, *others]))
    assert not native.takes_dgrad(backward._replace(linears=[p._replace(dy=p.dy.float()) for p in backward.linears]))


# ---------------------------------------------------------------------------------------------- F.scaled_mm
@pytest.fixture
def scaled(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_scaled_mm", fake_scaled_mm)


def test_scaled_mm_by_its_rules(scaled):
    one = native.single(scaled_mm.gemms)
    assert check.failures(one, CPU) == []
    case = check.cases()[3]
    assert one(case.terms, case.weight, dtype=torch.float32).dtype == torch.float32
    out = torch.full((7, 33), 5.0, dtype=BF16)  # in place
    case = next(c for c in check.cases() if c.name == "accumulating")
    out.copy_(case.add)
    terms = [case.terms[0]._replace(gscale=torch.ones(7))]
    assert one(terms, case.weight, add=out, out=out) is out
    assert torch.equal(out, check.expected(case).to(BF16))


def test_scaled_mm_by_groups_of_rows(scaled, monkeypatch):
    x = check.matrix(check.codes(300, 96, 1), check.powers(300, 96, 2))
    x = x._replace(gscale=check.row_scales(300, 3))
    w = check.matrix(check.codes(40, 96, 4), check.powers(40, 96, 5))
    add = check.integers(300, 40, seed=6).to(BF16)
    whole = native.single(scaled_mm.gemms)([x], w, add=add)
    calls = []
    monkeypatch.setattr(scaled_mm, "PRODUCT_BYTES", 1)
    monkeypatch.setattr(scaled_mm, "_scaled_mm", lambda x, *a, **k: calls.append(len(x)) or fake_scaled_mm(x, *a, **k))
    assert torch.equal(native.single(scaled_mm.gemms)([x], w, add=add), whole)
    assert calls == [128, 128, 44]
    assert torch.equal(whole, gemm([x], w, add=add))


@pytest.mark.parametrize("m, k, shape", [(9, 320, (18, 320)), (200, 320, (200, 640)), (200, 352, (200, 704))])
def test_scaled_mm_of_two_terms_is_one_product(scaled, monkeypatch, m, k, shape):
    """Few rows are stacked, so that W is taken as it lies; for many, W is put beside itself."""
    terms = [check.matrix(check.codes(m, k, s), check.powers(m, k, s), check.row_scales(m, 3)) for s in (1, 2)]
    w = check.matrix(check.codes(40, k, 4), check.powers(40, k, 5))
    calls = []
    monkeypatch.setattr(
        scaled_mm, "_scaled_mm", lambda x, *a, **o: calls.append((len(x), 2 * x.shape[1])) or fake_scaled_mm(x, *a, **o)
    )
    add = check.integers(m, 40, seed=6).to(BF16)
    assert torch.equal(native.single(scaled_mm.gemms)(terms, w, add=add), gemm(terms, w, add=add))
    assert calls == [shape]


def test_scaled_mm_of_scales_in_tiles(scaled, monkeypatch):
    """As the quantiser of gradients makes them: taken as they are."""
    x = check.matrix(check.codes(200, 320, 1), check.powers(200, 320, 2), check.row_scales(200, 3))
    w = check.matrix(check.codes(40, 320, 4), check.powers(40, 320, 5))
    in_tiles, whole = x._replace(scales=layout.swizzle_scales(x.scales)), gemm([x], w)
    given = []
    monkeypatch.setattr(scaled_mm, "_scaled_mm", lambda *a, **k: given.append(a[2][0]) or fake_scaled_mm(*a, **k))
    assert torch.equal(native.single(scaled_mm.gemms)([in_tiles], w), whole)
    assert given[0].data_ptr() == in_tiles.scales.data_ptr()
    monkeypatch.setattr(scaled_mm, "PRODUCT_BYTES", 1)  # by groups of rows
    assert torch.equal(native.single(scaled_mm.gemms)([in_tiles], w), whole)


# ---------------------------------------------------------------------------------------------- the choice
NO_TRITON = "no Triton here"


@pytest.fixture
def native_implementations(monkeypatch):
    """Set the FP4 implementations there are: name -> GEMM, or exception."""
    monkeypatch.setattr(implementations, "_warned", set())

    def install(**found):
        def loader(what):
            def load():
                if isinstance(what, Exception):
                    raise what
                return one_by_one(what)

            return load

        missing = {name: implementations.Unavailable(f"not built: no {name}") for name in ("cutlass", "scaled_mm")}
        monkeypatch.setattr(implementations, "NATIVE", {name: loader(what) for name, what in {**missing, **found}.items()})

    return install


def test_the_best_that_works_is_chosen(native_implementations):
    native_implementations(cutlass=gemm, scaled_mm=gemm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = implementations.choose(CPU, "", NO_TRITON)
        assert choice.implementation == "cutlass" and choice.skipped == {}
        native_implementations(scaled_mm=gemm)
        choice = implementations.choose(CPU, "", NO_TRITON)
        assert choice.implementation == "scaled_mm" and choice.skipped == {"cutlass": "not built: no cutlass"}
        native_implementations(scaled_mm=raising)  # as on any GPU without FP4: nothing to warn about
        choice = implementations.choose(CPU, "", NO_TRITON)
    assert choice.implementation == "reference" and choice.skipped["emulated"] == NO_TRITON
    assert choice.skipped["scaled_mm"] == (
        "cannot run on this device (RuntimeError: no kernel image is available for execution on the device)"
    )


NOT_USED = {k: MUTANTS[k] for k in ("nibbles of x", "K tail", "BF16 sums")} | {
    "cannot run": (raising, "'cutlass' kernels.*no kernel image")
}


@pytest.mark.parametrize("broken, message", NOT_USED.values(), ids=NOT_USED)
def test_an_implementation_that_does_not_work_is_skipped_and_said_once(native_implementations, broken, message):
    native_implementations(cutlass=broken, scaled_mm=gemm)
    with pytest.warns(UserWarning, match=message) as record:
        choice = implementations.choose(CPU, "", NO_TRITON)
        assert implementations.choose(CPU, "", NO_TRITON).implementation == choice.implementation == "scaled_mm"
    assert len(record) == 1


DOES_NOT_WORK = {"raises": raising, "wrong": MUTANTS["signs"][0], "not built": implementations.Unavailable("not built: see csrc")}


@pytest.mark.parametrize("what", DOES_NOT_WORK.values(), ids=DOES_NOT_WORK)
def test_a_forced_implementation_that_does_not_work_raises(native_implementations, what):
    native_implementations(cutlass=what, scaled_mm=gemm)
    with pytest.raises(RuntimeError, match="PEFT_NVFP4_KERNELS=cutlass cannot run: .*Unset PEFT_NVFP4_KERNELS"):
        implementations.choose(CPU, "cutlass", NO_TRITON)
    assert implementations.choose(CPU, "scaled_mm", NO_TRITON).implementation == "scaled_mm"
    choice = implementations.choose(CPU, "reference", NO_TRITON)
    assert choice.implementation == "reference" and set(choice.skipped) == {"cutlass", "scaled_mm", "bf16", "emulated"}
    with pytest.raises(RuntimeError, match=f"emulated cannot run: {NO_TRITON}"):
        implementations.choose(CPU, "emulated", NO_TRITON)


def test_a_choice_computes_and_leaves_the_rest_to_others(native_implementations):
    calls = []
    native_implementations(cutlass=lambda *a, **k: calls.append(1) or gemm(*a, **k))
    choice = implementations.choose(CPU, "", NO_TRITON)
    calls.clear()
    forward, backward = group("qkv", 2, None, 9, "cpu")
    with torch.no_grad():
        choice.fprop(forward)
        choice.dgrad(backward)
        assert len(calls) == 6
        wide = [item._replace(adapters=[LowRank(h.float(), up.float()) for h, up in item.adapters]) for item in forward.linears]
        (y, *_) = choice.fprop(forward._replace(linears=wide, dtype=torch.float32))
    assert len(calls) == 6 and y.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- the package around it
class FakeCuda:
    """torch.cuda of a machine with one GPU whose tensors live on the CPU, as far as kernels.status() asks."""

    def __init__(self, monkeypatch):
        for name, value in {
            "is_available": lambda: True,
            "get_device_name": lambda *a: "a card",
            "get_device_capability": lambda *a: (12, 0),
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: False,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
        monkeypatch.setattr(dispatch, "_choices", {})
        dispatch._obstacle.cache_clear()
        choose = implementations.choose
        monkeypatch.setattr(implementations, "choose", lambda device, *rest: choose(CPU, *rest))


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(dispatch, "_loaded", "")  # whatever other tests have left
    monkeypatch.setattr(dispatch, "_forced", "")
    yield FakeCuda(monkeypatch)
    dispatch._obstacle.cache_clear()


def test_status_says_what_was_skipped(native_implementations, fake_cuda):
    native_implementations(scaled_mm=gemm)
    text = str(kernels.status())
    assert [line.split()[:2] for line in text.splitlines() if line.split()[0] in dispatch.PRODUCTS] == [
        ["fprop", "scaled_mm"],
        ["dgrad", "scaled_mm"],
    ]
    assert "cutlass is not used: not built: no cutlass" in text


def test_status_with_a_forced_implementation_that_does_not_work(native_implementations, fake_cuda, monkeypatch):
    native_implementations(cutlass=raising)
    monkeypatch.setattr(dispatch, "_forced", "cutlass")
    lines = {o.operator: o for o in kernels.status().operators}
    assert lines["fprop"].implementation == "none" and "no kernel image" in lines["fprop"].note
    with pytest.raises(RuntimeError, match="cannot run"):
        dispatch.choice(torch.device("cuda", 0))


def test_no_choice_within_a_capture(native_implementations, fake_cuda, monkeypatch):
    native_implementations(cutlass=gemm)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        dispatch.choice(torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["cutlass", "scaled_mm", "bf16", "emulated"])
def test_a_forced_implementation_on_a_machine_without_gpu(monkeypatch, name):
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setattr(dispatch, "_forced", "")
    monkeypatch.setenv(dispatch.VARIABLE, name)
    monkeypatch.setattr(Operator, "register", lambda *args: None)  # registered already
    kernels.load()
    assert dispatch._forced == name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = next(o for o in kernels.status().operators if o.operator == "fprop")
    assert line.implementation == "reference" and line.note == f"no CUDA device, so {dispatch.VARIABLE}={name} has no effect"


def test_an_unknown_implementation_raises(monkeypatch):
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setenv(dispatch.VARIABLE, "cutlas")
    with pytest.raises(ValueError, match="choose 'auto' .*'cutlass', 'scaled_mm', 'bf16', 'emulated', 'reference'"):
        kernels.load()


def _extension(kind, folder):
    """A file that is no usable extension."""
    path = folder / "_sm120.so"
    if kind == "garbage":
        path.write_bytes(b"\x7fELF" + b"garbage" * 100)
    elif kind == "missing symbol":  # a real library without our symbols
        path.symlink_to(next(iter(_libraries())))
    return path


def _libraries():
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if line.strip().endswith(".so") and "/torch/" not in line})


def unavailable():
    raise implementations.Unavailable("not here")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: needs /proc")
@pytest.mark.parametrize("kind, warned", [("absent", 0), ("garbage", 1), ("missing symbol", 1)])
def test_a_missing_extension_is_normal_and_a_broken_one_is_said_once(tmp_path, monkeypatch, kind, warned):
    monkeypatch.setattr(implementations, "_warned", set())
    monkeypatch.setattr(implementations, "NATIVE", {**implementations.NATIVE, "scaled_mm": unavailable})
    monkeypatch.setenv("PEFT_NVFP4_EXTENSION", str(_extension(kind, tmp_path)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            choice = implementations.choose(CPU, "", NO_TRITON)
    assert choice.implementation == "reference" and len([w for w in said if "'cutlass'" in str(w.message)]) == warned
    assert choice.skipped["cutlass"].startswith("not built") == (warned == 0)
