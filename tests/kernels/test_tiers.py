"""Tiers of the two products without FP4 hardware: a GEMM computed by the reference, and ways to get it wrong, on CPU tensors.

The right GEMM must be chosen and give the reference's products; every wrong one must be found and named.
"""

import ctypes
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _gemms import one_by_one
from test_emulated import GROUPS, close, exact_dgrad, exact_fprop, group, with_seeds, without_hidden

from peft_nvfp4 import kernels
from peft_nvfp4.kernels import dispatch, tiers
from peft_nvfp4.kernels.fp4 import known_products, native, probe, scaled_mm
from peft_nvfp4.numerics import layout, reference
from peft_nvfp4.numerics.formats import E4M3_NAN, GRADIENT, QuantizedMatrix
from peft_nvfp4.numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank
from peft_nvfp4.ops.core import Operator

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def gemm(terms, weight, *, constant=None, add=None, out=None, dtype=BF16):
    """What a tier's GEMM promises, in FP32."""
    assert all(t.gscale.shape == (t.codes.shape[0],) for t in terms) and weight.gscale.shape == (1,)
    assert all(t.is_contiguous() for q in (*terms, weight) for t in q[:3])
    w = reference.dequantize(weight)
    y = sum(reference.dequantize(t) @ w.T for t in terms)
    y = y if constant is None else y + constant
    y = (y if add is None else y + add.float()).to(dtype)
    return y if out is None else out.copy_(y)


def narrow(bits):
    """Sums in so many significant bits, rounded after every block of 16 products."""

    def rounded(t):
        mantissa, exponent = torch.frexp(t)
        return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)

    def run(terms, weight, *, constant=None, add=None, dtype=BF16, **_):
        w, y = reference.dequantize(weight), 0
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
    "second term": (lambda terms, *a, **k: gemm(terms[:1], *a, **k), "the second term is ignored"),
    "shape": (lambda *a, **k: gemm(*a, **k)[:, :-1], r"the result is \(16, 15\), expected \(16, 16\)"),
}


def _plus(a, b):
    return b if a is None else a if b is None else a.float() + b


# ---------------------------------------------------------------------------------------------- the probe


def test_a_right_gemm_passes():
    assert probe.failures(gemm, CPU) == []
    assert probe.sum_bits(gemm, CPU) == (24, 24)


@pytest.mark.parametrize("mutant, message", [pytest.param(*v, id=k) for k, v in MUTANTS.items()])
def test_every_mistake_is_found_and_named(mutant, message):
    found = probe.failures(mutant, CPU)
    assert found and re.search(message, found[0]), found


def test_a_name_that_right_answers_contradict_is_not_given():
    """Block scales ignored for one K only: not "block scales are ignored", but where."""
    ignored = changed(lambda q: q._replace(scales=torch.full_like(q.scales, 0x38)))
    found = probe.failures(lambda terms, *a, **k: (ignored if terms[0].k == 64 else gemm)(terms, *a, **k), CPU)
    assert len(found) == 1 and found[0].startswith("subnormal scales: 216 of 216 outputs wrong"), found


@pytest.mark.parametrize("bits", (17, 20))
def test_the_width_of_sums_is_measured(bits):
    assert probe.sum_bits(narrow(bits), CPU) == (bits, bits)


def test_exact_cases_are_exact():
    """The sum of the summands' magnitudes, in steps of which all are multiples, is below 2**EXACT_BITS; so is every partial
    sum."""
    for case in known_products.cases():
        if not case.exact or case.name in ("NaN scales", "the largest codes and scales"):
            continue
        unscaled = replace(
            case,
            weight=case.weight._replace(gscale=torch.ones(1)),
            terms=tuple(t._replace(gscale=torch.ones(1)) for t in case.terms),
        )
        smallest = [known_products.values(q).abs() for q in (*unscaled.terms, unscaled.weight)]
        x, w = (min(t[t > 0].min() for t in ts) for ts in (smallest[:-1], smallest[-1:]))
        step = x * w if case.name != "subnormal scales" else torch.tensor(0.25 * 2.0**-18)
        assert known_products.magnitude(unscaled).max() < step * 2**known_products.EXACT_BITS, case.name


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
        x = QuantizedMatrix(*known_products.matrix(known_products.codes(9, 64, 0), gscale=known_products.row_scales(9, 1)))
        w = known_products.matrix(known_products.codes(48, 64, 2), known_products.powers(48, 64, 3))
        p = Fprop([x], [ForwardLinear(w)], BF16)
        assert torch.equal(native.fprop(one_by_one(gemm), p)[0], reference.fprop(p)[0])
        dy = (2.0 ** torch.arange(9))[:, None].to(BF16) * reference.dequantize(
            known_products.matrix(known_products.codes(9, 64, 4))
        )
        dy[:, ::16] = 6 * 2.0 ** torch.arange(9)[:, None]  # every block has a 6, so that quantising changes nothing
        dy = dy.to(BF16)
        assert torch.equal(reference.dequantize(reference.quantize(dy, GRADIENT)), dy.float())
        p = Dgrad([BackwardLinear(dy, w)])
        assert torch.equal(native.dgrad(one_by_one(gemm), p), reference.dgrad(p))


def test_what_a_tier_does_not_take():
    forward, backward = group("qkv", 1, None, 9, "cpu")
    (x,), (first, *others) = forward.terms, forward.linears
    assert native.takes_fprop(forward) and not native.takes_fprop(forward._replace(dtype=torch.float32))
    no_rows = QuantizedMatrix(*(t[:0] for t in x[:3]), 80)
    assert not native.takes_fprop(forward._replace(terms=[no_rows]))
    row_scales = first._replace(weight=first.weight._replace(gscale=torch.ones(64)))
    assert not native.takes_fprop(forward._replace(linears=[row_scales, *others]))
    assert not native.takes_dgrad(backward._replace(linears=[p._replace(dy=p.dy.float()) for p in backward.linears]))


# ---------------------------------------------------------------------------------------------- torch._scaled_mm


def fake_scaled_mm(x, wt, x_scales, w_scales, *, out_dtype, **_):
    """torch._scaled_mm for FP4, by its published rules: packed codes, swizzled scales, shapes as it checks them."""
    shapes = [t.to("meta") for t in (x, x_scales, w_scales)]
    torch._scaled_mm(shapes[0], wt.t().to("meta").t(), *shapes[1:], out_dtype=out_dtype)  # raises what CUDA would
    assert x.dtype == wt.dtype == torch.float4_e2m1fn_x2 and wt.stride(0) == 1
    values = []
    for codes, scales in ((x, x_scales), (wt.t(), w_scales)):
        codes = codes.view(torch.uint8)
        rows, k = codes.shape[0], 2 * codes.shape[1]
        linear = layout.unswizzle_scales(scales.view(torch.uint8), rows, k // 16)
        values.append(reference.dequantize(QuantizedMatrix(codes, linear, torch.ones(1), k)))
    return (values[0] @ values[1].T).to(out_dtype)


@pytest.fixture
def scaled(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_scaled_mm", fake_scaled_mm)


@pytest.mark.parametrize("product, gemms", [pytest.param(*v, id=v[0]) for v in scaled_mm.variants()])
def test_scaled_mm_by_its_rules(scaled, product, gemms):
    one = native.single(gemms)
    assert probe.failures(one, CPU) == []
    case = known_products.cases()[3]
    assert one(case.terms, case.weight, dtype=torch.float32).dtype == torch.float32
    out = torch.full((7, 33), 5.0, dtype=BF16)  # in place
    case = next(c for c in known_products.cases() if c.name == "accumulating")
    out.copy_(case.add)
    terms = [case.terms[0]._replace(gscale=torch.ones(7))]
    assert one(terms, case.weight, add=out, out=out) is out
    assert torch.equal(out, known_products.expected(case).to(BF16))


def test_scaled_mm_by_groups_of_rows(scaled, monkeypatch):
    (_, gemms), *_ = scaled_mm.variants()
    x = known_products.matrix(known_products.codes(300, 96, 1), known_products.powers(300, 96, 2))
    x = x._replace(gscale=known_products.row_scales(300, 3))
    w = known_products.matrix(known_products.codes(40, 96, 4), known_products.powers(40, 96, 5))
    add = known_products.integers(300, 40, seed=6).to(BF16)
    whole = native.single(gemms)([x], w, add=add)
    calls = []
    monkeypatch.setattr(scaled_mm, "PRODUCT_BYTES", 1)
    monkeypatch.setattr(scaled_mm, "_scaled_mm", lambda x, *a, **k: calls.append(len(x)) or fake_scaled_mm(x, *a, **k))
    assert torch.equal(native.single(gemms)([x], w, add=add), whole)
    assert calls == [128, 128, 44]
    assert torch.equal(whole, gemm([x], w, add=add))


def test_bf16_products_are_the_second_choice(scaled, monkeypatch):
    def without_fp32(*args, out_dtype, **others):
        if out_dtype == torch.float32:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return fake_scaled_mm(*args, out_dtype=out_dtype, **others)

    monkeypatch.setattr(scaled_mm, "_scaled_mm", without_fp32)
    word, gemms = tiers.working_gemms("scaled_mm", CPU)
    assert word == "BF16 products" and gemms.product_dtype == BF16


# ---------------------------------------------------------------------------------------------- the choice


NO_TRITON = "no Triton here"


@pytest.fixture
def native_tiers(monkeypatch):
    """Set the FP4 tiers there are: name -> GEMM, or exception."""
    monkeypatch.setattr(tiers, "_warned", set())

    def install(**found):
        def loader(what):
            def load():
                if isinstance(what, Exception):
                    raise what
                return [("", one_by_one(what))]

            return load

        missing = {name: tiers.Unavailable(f"not built: no {name}") for name in ("cutlass", "scaled_mm")}
        monkeypatch.setattr(tiers, "NATIVE", {name: loader(what) for name, what in {**missing, **found}.items()})

    return install


def test_the_best_that_works_is_chosen(native_tiers):
    native_tiers(cutlass=gemm, scaled_mm=gemm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = tiers.choose(CPU, "", NO_TRITON)
        assert choice.tier == "cutlass" and choice.skipped == {}
        native_tiers(scaled_mm=gemm)
        choice = tiers.choose(CPU, "", NO_TRITON)
        assert choice.tier == "scaled_mm" and choice.skipped == {"cutlass": "not built: no cutlass"}
        native_tiers(scaled_mm=raising)  # as on any GPU without FP4: nothing to warn about
        choice = tiers.choose(CPU, "", NO_TRITON)
    assert choice.tier == "reference" and choice.skipped["emulated"] == NO_TRITON
    assert choice.skipped["scaled_mm"] == (
        "cannot run on this device (RuntimeError: no kernel image is available for execution on the device)"
    )


@pytest.mark.parametrize("mutant, message", [pytest.param(*MUTANTS[k], id=k) for k in ("nibbles of x", "K tail", "BF16 sums")])
def test_a_wrong_tier_is_skipped_and_said_once(native_tiers, mutant, message):
    native_tiers(cutlass=mutant, scaled_mm=gemm)
    with pytest.warns(UserWarning, match=message) as record:
        choice = tiers.choose(CPU, "", NO_TRITON)
        assert tiers.choose(CPU, "", NO_TRITON).tier == choice.tier == "scaled_mm"
    assert len(record) == 1


def test_an_extension_that_cannot_run_is_said_once(native_tiers):
    native_tiers(cutlass=raising)
    with pytest.warns(UserWarning, match="'cutlass' kernels.*no kernel image") as record:
        tiers.choose(CPU, "", NO_TRITON)
        tiers.choose(CPU, "", NO_TRITON)
    assert len(record) == 1


DOES_NOT_WORK = {"raises": raising, "wrong": MUTANTS["signs"][0], "not built": tiers.Unavailable("not built: see csrc")}


@pytest.mark.parametrize("what", DOES_NOT_WORK.values(), ids=DOES_NOT_WORK)
def test_a_forced_tier_that_does_not_work_raises(native_tiers, what):
    native_tiers(cutlass=what, scaled_mm=gemm)
    with pytest.raises(RuntimeError, match="PEFT_NVFP4_KERNELS=cutlass cannot run: .*Unset PEFT_NVFP4_KERNELS"):
        tiers.choose(CPU, "cutlass", NO_TRITON)
    assert tiers.choose(CPU, "scaled_mm", NO_TRITON).tier == "scaled_mm"
    choice = tiers.choose(CPU, "reference", NO_TRITON)
    assert choice.tier == "reference" and set(choice.skipped) == {"cutlass", "scaled_mm", "emulated"}
    with pytest.raises(RuntimeError, match=f"emulated cannot run: {NO_TRITON}"):
        tiers.choose(CPU, "emulated", NO_TRITON)


def test_a_choice_computes_and_leaves_the_rest_to_others(native_tiers):
    calls = []
    native_tiers(cutlass=lambda *a, **k: calls.append(1) or gemm(*a, **k))
    choice = tiers.choose(CPU, "", NO_TRITON)
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
        choose = tiers.choose
        monkeypatch.setattr(tiers, "choose", lambda device, *rest: choose(CPU, *rest))


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(dispatch, "_loaded", "")  # whatever other tests have left
    monkeypatch.setattr(dispatch, "_forced", "")
    yield FakeCuda(monkeypatch)
    dispatch._obstacle.cache_clear()


def test_status_says_what_was_skipped(native_tiers, fake_cuda):
    native_tiers(scaled_mm=gemm)
    text = str(kernels.status())
    assert [line.split()[:2] for line in text.splitlines() if line.split()[0] in dispatch.PRODUCTS] == [
        ["fprop", "scaled_mm"],
        ["dgrad", "scaled_mm"],
    ]
    assert "cutlass is not used: not built: no cutlass" in text


def test_status_with_a_forced_tier_that_does_not_work(native_tiers, fake_cuda, monkeypatch):
    native_tiers(cutlass=raising)
    monkeypatch.setattr(dispatch, "_forced", "cutlass")
    lines = {o.operator: o for o in kernels.status().operators}
    assert lines["fprop"].implementation == "none" and "no kernel image" in lines["fprop"].note
    with pytest.raises(RuntimeError, match="cannot run"):
        dispatch.choice(torch.device("cuda", 0))


def test_no_choice_within_a_capture(native_tiers, fake_cuda, monkeypatch):
    native_tiers(cutlass=gemm)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        dispatch.choice(torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["cutlass", "scaled_mm", "emulated"])
def test_a_forced_tier_on_a_machine_without_gpu(monkeypatch, name):
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setattr(dispatch, "_forced", "")
    monkeypatch.setenv(dispatch.VARIABLE, name)
    monkeypatch.setattr(Operator, "register", lambda *args: None)  # registered already
    kernels.load()
    assert dispatch._forced == name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = next(o for o in kernels.status().operators if o.operator == "fprop")
    assert line.implementation == "reference" and line.note == f"no CUDA device, so {dispatch.VARIABLE}={name} has no effect"


def test_an_unknown_tier_raises(monkeypatch):
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setenv(dispatch.VARIABLE, "cutlas")
    with pytest.raises(ValueError, match="choose 'auto' .*'cutlass', 'scaled_mm', 'emulated', 'reference'"):
        kernels.load()


TRAIN = """
import torch
from torch import nn
from peft import get_peft_model
from peft_nvfp4 import NVFP4LoraConfig, kernels
model = nn.Sequential(nn.Linear(32, 32))
model = get_peft_model(model, NVFP4LoraConfig(r=2, target_modules=["0"], backend="nvfp4"))
model(torch.randn(4, 32)).square().sum().backward()
assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
kernels.status()
"""


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


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: needs /proc")


@needs_proc
@pytest.mark.parametrize("kind, warned", [("absent", 0), ("garbage", 1), ("missing symbol", 1)])
def test_a_missing_extension_is_normal_and_a_broken_one_is_said_once(tmp_path, monkeypatch, kind, warned):
    monkeypatch.setattr(tiers, "_warned", set())
    monkeypatch.setattr(tiers, "NATIVE", {**tiers.NATIVE, "scaled_mm": lambda: []})
    monkeypatch.setenv("PEFT_NVFP4_EXTENSION", str(_extension(kind, tmp_path)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            choice = tiers.choose(CPU, "", NO_TRITON)
    assert choice.tier == "reference" and len([w for w in said if "'cutlass'" in str(w.message)]) == warned
    assert choice.skipped["cutlass"].startswith("not built") == (warned == 0)


@needs_proc
def test_training_with_a_broken_extension(tmp_path):
    environment = {**os.environ, "PEFT_NVFP4_EXTENSION": str(_extension("garbage", tmp_path)), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "cutlass" not in run.stderr  # nothing asks for it on a CPU


def test_ctypes_is_all_that_a_broken_file_can_break(tmp_path):
    """What the previous test relies on: loading such files raises OSError, and does nothing worse."""
    path = _extension("garbage", tmp_path)
    with pytest.raises(OSError):
        ctypes.CDLL(str(path))
