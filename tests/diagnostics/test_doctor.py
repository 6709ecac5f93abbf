"""``peft-nvfp4 doctor`` without a GPU: its checks pass on what is right, and each fails on what it is there for."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _gemms import CPU, fake_scaled_mm, gemm, narrow, one_by_one
from scalar_nvfp4 import quantize_exact, swizzled_position

from peft_nvfp4.diagnostics.doctor import conformance, conformance_gemm, environment, oracle
from peft_nvfp4.diagnostics.doctor import run as doctor
from peft_nvfp4.diagnostics.doctor.results import FAILED, NOT_RUN, PASSED, WARNING, Noticed, Result, checked
from peft_nvfp4.kernels import implementations
from peft_nvfp4.kernels.dispatch import OperatorStatus, Status
from peft_nvfp4.kernels.fp4 import check, scaled_mm
from peft_nvfp4.numerics import layout, philox, reference
from peft_nvfp4.numerics.formats import ACTIVATION
from peft_nvfp4.numerics.products import LowRank
from peft_nvfp4.ops.core import OPERATORS


def outcomes(results):
    return {r.name: r.outcome for r in results}


def failed(results):
    return {r.name: r.detail for r in results if r.outcome == FAILED}


def of_gemm(function):
    return list(conformance_gemm.gemm_checks("an implementation", one_by_one(function), CPU))


# ---------------------------------------------------------------------------------------------- the report
def test_the_report_of_this_machine(tmp_path):
    report = doctor.run()
    assert report.ok == (not failed(report.checks))
    assert failed(c for c in report.checks if c.group != "set-up") == {}
    assert report.machine["torch"] == environment.installed("torch") and "extension" in report.machine
    assert {"reference", "training"} <= {c.group for c in report.checks if c.outcome == PASSED}
    assert json.loads(json.dumps(report.as_dict()))["checks"][-1]["outcome"] == PASSED
    text = str(report)
    assert report.verdict in text and all(c.name in text for c in report.checks)
    if not torch.cuda.is_available():
        assert all(c.detail for c in report.checks if c.outcome == NOT_RUN)


def test_what_makes_a_report_bad():
    report = doctor.Report({"torch": "1"}, Status(()), [Result("g", "n", PASSED), Result("g", "m", WARNING)])
    assert report.ok and report.verdict == "Nothing is wrong: 1 passed, 1 warning"
    report.checks.append(Result("g", "o", FAILED, "why"))
    assert not report.ok and report.verdict == "SOMETHING IS WRONG: 1 passed, 1 warning, 1 failed"
    assert not doctor.Report({"torch": "1"}, Status(()), [environment.wrong("no")]).ok
    assert doctor.Report({"torch": "1"}, Status(()), [environment.note("slow")]).ok


def test_outcomes_of_a_check():
    def wrong():
        raise AssertionError("what")

    def noticed():
        raise Noticed("why")

    assert checked("g", lambda: "said").outcome == PASSED and checked("g", wrong).name == "wrong"
    assert (checked("g", wrong).outcome, checked("g", wrong).detail) == (FAILED, "what")
    assert (checked("g", noticed, name="n").outcome, checked("g", noticed).detail) == (WARNING, "why")
    broken = checked("g", lambda: 1 / 0)
    assert broken.outcome == FAILED and "ZeroDivisionError" in broken.detail


# ---------------------------------------------------------------------------------------------- reference
def test_the_oracle_agrees_with_the_other_oracle():
    """The doctor's hand-made numbers against the tests' independent implementation."""
    assert [oracle.e4m3(b) for b in (0, 1, 8, 0x38, 0x7E)] == [0.0, 2.0**-9, 2.0**-6, 1.0, 448.0]
    assert swizzled_position(130, 5, 7) == (1 * 2 + 1) * 512 + 2 * 16 + 1
    codes, scales, exponents = quantize_exact(torch.tensor([[2688.0, 224.0, 672.0]]).numpy(), "max6", True)
    assert codes[0, :2].tolist() == [7 | 1 << 4, 3] and scales[0, 0] == 0x7E and exponents.tolist() == [0]


def _index_below(quotient: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(quotient.abs(), torch.tensor(oracle.GRID[1:]))


BROKEN_REFERENCE = {
    "e4m3 scales": ("e4m3_encode", lambda v: (v.clamp(max=448.0) * 0.99).to(torch.float8_e4m3fn).view(torch.uint8)),
    "e2m1 codes": ("_nearest", lambda x, sg: torch.tensor(oracle.GRID)[_index_below(x / sg[..., None])].copysign(x)),
    "global scales": ("power_of_two_scale", lambda amax: torch.exp2(torch.floor(torch.log2(amax / 2688)))),
    "swizzled layout of scales": ("swizzle_scales", lambda s: torch.nn.functional.pad(s, (0, 1, 0, 123)).flatten()),
    "random bits": ("philox", lambda seed, count: torch.arange(count)),
    "matrix product": ("matmul", lambda *a: torch.zeros(2, 2)),
    "blocks that are not ordinary": ("e4m3_decode", lambda bits: bits.float()),
}


def reference_checks():
    return [checked("reference", compare) for compare in oracle.CHECKS]


@pytest.mark.parametrize("name", BROKEN_REFERENCE)
def test_a_broken_reference_is_found(monkeypatch, name):
    attribute, replacement = BROKEN_REFERENCE[name]
    if name == "blocks that are not ordinary":
        monkeypatch.setattr(oracle.reference, "dequantize", lambda q, *a: torch.zeros(4, 32))
    else:
        module = next(m for m in (layout, philox, reference) if hasattr(m, attribute))
        monkeypatch.setattr(module, attribute, replacement)
    assert name in failed(reference_checks())


# ---------------------------------------------------------------------------------------------- kernels
def test_kernels_are_compared_in_every_bit(monkeypatch):
    """The reference stands for the kernels: equal to itself; with one bit changed, not."""
    changed = {}

    def kernel(name):
        reference_of = OPERATORS[name].flat(OPERATORS[name].reference)

        def run(*arguments):
            out = reference_of(*arguments)
            if changed.get(name):
                first = out if isinstance(out, torch.Tensor) else out[0]
                first.view(torch.uint8).view(-1)[-1] ^= 1
            return out

        return run, reference_of

    monkeypatch.setattr(conformance, "_kernel", kernel)
    for dtype in (torch.bfloat16, torch.float32):
        for name, arguments in conformance._operators(CPU, dtype).items():
            changed[name.split(" ")[0]] = False
            assert "bytes equal" in conformance._same_bits(name, arguments)
            changed[name.split(" ")[0]] = True
            with pytest.raises(AssertionError, match="are not equal"):
                conformance._same_bits(name, arguments)


# ---------------------------------------------------------------------------------------------- matrix products
def unstable():
    calls = []

    def run(*arguments, **others):
        calls.append(1)
        y = gemm(*arguments, **others)
        return y + len(calls) % 3 * y.abs().max() if y.shape == (40, 48) else y

    return run


def leaking(write):
    def run(terms, weight, *, out=None, **others):
        y = gemm(terms, weight, **others)
        if out is None:
            return y
        out.copy_(y)
        memory = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        if write:
            memory[-1] = 0
        return y if memory[0] != 0x7F or write else torch.full_like(y, float("nan"))

    return run


@pytest.mark.parametrize(
    "mutant, check",
    [
        pytest.param(narrow(8), "width of sums", id="BF16 sums"),
        pytest.param(unstable(), "the same bits again", id="other bits"),
        pytest.param(leaking(True), "bounds and padding", id="writes outside"),
        pytest.param(leaking(False), "bounds and padding", id="reads outside"),
        pytest.param(lambda t, w, **k: gemm(t, w, **k) * (t[0].k != 416), "tails of tiles", id="one K"),
        pytest.param(lambda t, w, **k: gemm(t[:1], w, **k), "two terms of random values", id="one term"),
        pytest.param(lambda t, w, **k: gemm(t, w, **k) * (t[0].k != 2048), "the size of a layer", id="large K"),
        pytest.param(lambda t, w, **k: gemm(t, w, **k) * (t[0].k != 160), "fprop with lora", id="fprop"),
        pytest.param(lambda t, w, out=None, **k: gemm(t, w, **k), "bounds and padding", id="out is ignored"),
        pytest.param(lambda t, w, add=None, **k: gemm(t, w, **k), "dgrad with lora", id="dgrad"),
    ],
)
def test_each_check_fails_on_what_it_is_for(mutant, check):
    assert check in failed(of_gemm(mutant)), outcomes(of_gemm(mutant))


def test_narrow_sums_are_noticed():
    results = {r.name: r for r in of_gemm(narrow(18))}
    assert results["width of sums"].outcome == WARNING and "18 significant bits" in results["width of sums"].detail


def test_implementations_that_are_there_are_checked(monkeypatch):
    """As on a GPU, with implementations that work on a CPU."""
    device = torch.device("cpu")
    monkeypatch.setattr(scaled_mm, "_scaled_mm", fake_scaled_mm)
    absent = lambda: (_ for _ in ()).throw(implementations.Unavailable("not built: no file"))
    monkeypatch.setitem(implementations.NATIVE, "cutlass", absent)
    results = list(conformance.implementation_checks(device))
    assert {r.group for r in results} == {"cutlass", "scaled_mm"}
    assert outcomes(r for r in results if r.group == "cutlass") == {"all": NOT_RUN} and failed(results) == {}

    def no_image(*arguments, **others):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(scaled_mm, "_scaled_mm", no_image)
    monkeypatch.setitem(implementations.NATIVE, "cutlass", lambda: one_by_one(no_image))
    results = list(conformance.implementation_checks(device))
    assert {(r.group, r.outcome) for r in results} == {("cutlass", FAILED), ("scaled_mm", NOT_RUN)}


# ---------------------------------------------------------------------------------------------- products and training
def test_wrong_products_of_a_training_step_are_found():
    scaled = lambda *arguments: [y * 1.03 for y in reference.fprop(*arguments)]
    turned = lambda *arguments: reference.dgrad(*arguments).flip(0)
    right = conformance_gemm.product_checks("chosen", reference.fprop, reference.dgrad, CPU)
    assert set(outcomes(right).values()) == {PASSED}
    assert len(failed(conformance_gemm.product_checks("chosen", scaled, turned, CPU))) == 2


def test_products_joined_as_fp4_kernels_join_them_are_right():
    """What the training step of an FP4 implementation is compared with."""
    for choice in (conformance.SEPARATE, conformance.SUMMED):
        assert set(outcomes(conformance_gemm.product_checks("x", choice.fprop, choice.dgrad, CPU)).values()) == {PASSED}
    term, weight = (
        reference.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(i)), ACTIVATION) for i in (0, 1)
    )
    add = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    (y,) = conformance.separate_gemms([term], [weight], constants=[None], adds=[add], outs=[out := torch.empty_like(add)])
    exact = reference.dequantize(term) @ reference.dequantize(weight).T
    assert y is out and torch.equal(y, (exact + add.float()).bfloat16())
    low_rank = LowRank(*(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (3, 4)))
    product = low_rank.hidden.float() @ low_rank.up.float().T
    for gemms, summand in ((conformance.summed_gemms, product), (conformance.separate_gemms, product.bfloat16().float())):
        (y,) = gemms([term], [weight], constants=[None], adds=[None], low_ranks=[low_rank])
        assert torch.equal(y, (exact + summand).bfloat16())


def test_training_is_compared(monkeypatch):
    """Gradients that are not finite; and an implementation that computes something else than the reference."""
    model = conformance._tiny_model(CPU)
    loss, grads = conformance._step(model, CPU)
    assert grads.isfinite().all() and len(grads) > 1000
    assert conformance._agree("x", (loss, grads), (loss, grads)).startswith("x: loss")
    for other in ((loss * 1.02, grads), (loss, grads.flip(0)), (loss, grads * float("nan"))):
        with pytest.raises(AssertionError):
            conformance._agree("x", other, (loss, grads))


# ---------------------------------------------------------------------------------------------- set-up
def gpu(monkeypatch, **changes):
    """What advice asks torch.cuda and for versions of packages: an RTX 5080, in a good set-up but for the changes."""
    settings = dict(available=True, capability=(12, 0), targets=["sm_90", "sm_120"], cuda="13.0", free=15 << 30) | changes
    for name, value in {
        "is_available": settings["available"],
        "device_count": 1,
        "get_device_capability": settings["capability"],
        "get_arch_list": settings["targets"],
        "mem_get_info": (settings["free"], 16 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", settings["cuda"])
    monkeypatch.setattr(environment, "_query_driver", lambda: ["NVIDIA GeForce RTX 5080, 580.1"])
    installed, found = environment.installed, environment.importlib.util.find_spec
    monkeypatch.setattr(environment, "installed", lambda package: settings.get(package, installed(package)))
    disk = SimpleNamespace(free=settings.get("disk", 10**12))
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: disk)
    if "library" in settings:
        monkeypatch.setenv("PEFT_NVFP4_EXTENSION", "/nowhere/_sm120.so")
    programs = settings.get("programs", ("gcc", "nvcc"))
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}" if Path(name).name in programs else None)
    for name in ("CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if "cc" in settings:
        monkeypatch.setenv("CC", settings["cc"])
    monkeypatch.setattr(environment, "_python_header", lambda: Path(settings.get("header", __file__)))
    spec = None if settings.get("no_triton") else object()
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: spec if name == "triton" else found(name))


SETUPS = {
    "old torch version": (dict(torch="2.9.1"), True, "torch 2.9.1 is not supported"),
    "new peft": (dict(peft="0.24.0"), True, "peft 0.24.0 is not supported"),
    "no bitsandbytes": (dict(bitsandbytes=""), False, "bitsandbytes is absent"),
    "CPU build": (
        dict(available=False, cuda=None),
        True,
        "build for CPUs. Install one for CUDA, such as: pip install --force-reinstall",
    ),
    "old driver": (dict(available=False), True, "built for CUDA 13.0, cannot use it"),
    "old torch": (dict(targets=["sm_80", "sm_90"]), True, r"no code for compute capability 12.0 (it has sm_80 sm_90)"),
    "old CUDA": (dict(cuda="12.6"), True, "FP4 tensor cores need CUDA 12.8"),
    "no Triton": (dict(no_triton=True), True, "pip install triton"),
    "full": (dict(free=1 << 30), False, "only 1.0 of 16.0 GiB"),
    "full disk": (dict(disk=10**9), False, "1.0 GB are left on the disk of"),
    "no library": (dict(library=""), False, "nvcc is here (/usr/bin/nvcc): pip install --no-deps nvidia-cutlass"),
    "no nvcc": (dict(library="", programs=("gcc",)), False, "nvcc, which was not found (CUDA's toolkit, 12.8 or later, or"),
    "no C compiler": (dict(programs=()), True, "no C compiler was found, and Triton's kernels need one: apt-get install gcc"),
    "another C compiler": (dict(cc="icc"), True, "CC=icc does not exist"),
    "no headers": (dict(header="/nowhere/Python.h"), True, "/nowhere/Python.h does not exist"),
}


@pytest.mark.parametrize("changes, wrong, message", [pytest.param(*v, id=k) for k, v in SETUPS.items()])
def test_advice_on_set_ups(monkeypatch, changes, wrong, message):
    gpu(monkeypatch, **changes)
    assert any((a.outcome == FAILED) == wrong and message in a.detail for a in environment.advice()), environment.advice()


@pytest.mark.parametrize("nvcc, driver, oldest", [("13.0", "570.1", 580), ("13.0", "580.1", 0), ("12.9", "570.1", 0)])
def test_a_driver_older_than_the_extension(monkeypatch, nvcc, driver, oldest):
    gpu(monkeypatch)
    monkeypatch.setattr(environment, "_query_driver", lambda: [f"NVIDIA GeForce RTX 5080, {driver}"])
    monkeypatch.setattr(environment.cutlass, "load", lambda: SimpleNamespace(info={"nvcc": nvcc}))
    found = [a.detail for a in environment._driver()]
    assert len(found) == bool(oldest) and all(
        f"needs a driver from {oldest} on; NVIDIA GeForce RTX 5080 has {driver}" in d for d in found
    )


def test_a_good_gpu_needs_no_advice(monkeypatch):
    gpu(monkeypatch)
    assert list(environment._cuda()) == list(environment._gpus()) == list(environment._compiler()) == []


@pytest.mark.parametrize(
    "target, capability, runs",
    [
        ("sm_120", (12, 0), True), ("sm_120", (12, 1), True), ("sm_121", (12, 0), False), ("sm_90", (12, 0), False),
        ("sm_90a", (9, 0), True), ("sm_120a", (12, 1), False), ("compute_90", (12, 0), True), ("compute_120", (9, 0), False),
        ("sm_120f", (12, 1), True),
    ],
)  # fmt: skip
def test_which_code_runs_where(target, capability, runs):
    assert environment._runs_on(target, *capability) == runs


def test_fp4_that_is_not_used_is_wrong(monkeypatch):
    gpu(monkeypatch)
    status = lambda implementation: Status((OperatorStatus("fprop", implementation, "gpu", ""),), {"cutlass": "not built"})
    (advice,) = doctor._fp4_advice(status("emulated"))
    assert advice.outcome == FAILED and "cutlass: not built" in advice.detail
    assert doctor._fp4_advice(status("scaled_mm")) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    assert doctor._fp4_advice(status("emulated")) == []


# ---------------------------------------------------------------------------------------------- the command
def test_the_commands(tmp_path, monkeypatch):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from peft_nvfp4.cli import application

    report = doctor.Report({"torch": "1 [x]"}, Status(()), [Result("g", "n", PASSED, "fine [a]")])
    monkeypatch.setattr("peft_nvfp4.diagnostics.doctor.run.run", lambda: report)
    run = lambda *arguments: CliRunner().invoke(application(), arguments)
    shown = run("doctor", "--json", str(tmp_path / "r.json"))
    assert shown.exit_code == 0 and "Nothing is wrong" in shown.output and "fine [a]" in shown.output, shown.output
    assert json.loads((tmp_path / "r.json").read_text())["ok"]
    assert run("doctor", "--plain").output.strip() == str(report).strip()
    report.checks.append(Result("g", "m", FAILED, "why"))
    assert run("doctor").exit_code == 1
    if not torch.cuda.is_available():
        shown = run("tune")
        assert shown.exit_code == 1 and "Nothing to tune: no CUDA device" in shown.output


def test_without_typer(monkeypatch):
    code = "import sys; sys.modules['typer'] = None; from peft_nvfp4.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "pip install 'peft_nvfp4[cli]'" in run.stderr


def test_known_products_of_two_terms_use_small_scales():
    """Of a second term, in the first one's global scale: some are subnormal, as the check says."""
    scales = check.gaussian("", 133, 48, 416, 5, terms=2).terms[1].scales
    assert bool((scales < 8).any()) and bool((scales > 8).any())
