"""The SM120 extension without its card: loader, tile choice, arguments, build; and one compiled instance where nvcc is there.

Results of the kernels are checked on a GPU by benchmarks/check_extension.py (on Hopper with the emulated instruction).
"""

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from peft_nvfp4 import ops
from peft_nvfp4.kernels.fp4 import cutlass, tiles
from peft_nvfp4.kernels.fp4.native import Unavailable
from peft_nvfp4.kernels.fp4.tiles import Problem, Tile
from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ONE = "128x128x128_cooperative_none_bf16"
SMALL, LARGE = Tile(128, 128, 128, "cooperative"), Tile(256, 128, 128, "cooperative")
PINGPONG = Tile(128, 128, 128, "pingpong")


@pytest.fixture
def refused(monkeypatch):
    """Why load() does not take a given file: the exception."""

    def load(path):
        monkeypatch.setenv(cutlass.VARIABLE, str(path))
        with pytest.raises(Unavailable) as error:
            cutlass.load()
        return error.value

    return load


@pytest.fixture(scope="module")
def build():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CSRC))
        import build as module
    return module


def shared_object(tmp_path, source):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("not run: no C compiler")
    file, out = tmp_path / "fake.c", tmp_path / "fake.so"
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", out, file], check=True)
    return out


def test_missing_library_says_how_to_get_one(refused, tmp_path):
    error = refused(tmp_path / "nothing.so")
    assert re.match(f"not built: .*nothing.so.*{cutlass.VARIABLE}", str(error)) and not error.broken
    x, w = ops.quantize(torch.randn(3, 64), ACTIVATION), ops.quantize_weight(torch.randn(8, 64), WEIGHT)
    with pytest.raises(Unavailable, match="not built"):
        cutlass.gemms([x], [w], constants=[None], adds=[None])


def test_missing_library_of_an_installation(monkeypatch, tmp_path):
    monkeypatch.delenv(cutlass.VARIABLE, raising=False)
    monkeypatch.setattr(cutlass, "__file__", str(tmp_path / "kernels" / "fp4" / "cutlass.py"))
    with pytest.raises(Unavailable, match="not built: .*make build-ext"):
        cutlass.load()


BROKEN = {  # C code or bytes: words of the reason
    "garbage": (b"\x7fELF" + bytes(200), "cannot be loaded"),
    "without our symbols": ("int something(void) { return 0; }", "not the extension.*peft_nvfp4_abi"),
    "another version": ("int peft_nvfp4_abi(void) { return 99; }", f"version 99, this package speaks version {cutlass.ABI}"),
}


@pytest.mark.parametrize("content, words", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_library_is_broken(refused, tmp_path, content, words):
    if isinstance(content, str):
        file = shared_object(tmp_path, content)
    else:
        (file := tmp_path / "garbage.so").write_bytes(content)
    error = refused(file)
    assert re.search(words, str(error)) and error.broken


@pytest.mark.parametrize("capability, fits", [((12, 0), True), ((12, 1), True), ((9, 0), False), ((12, 2), False)])
def test_library_for_another_gpu(monkeypatch, tmp_path, capability, fits):
    class Loaded:
        path, archs = tmp_path, ["12.0a", "12.1a"]

    monkeypatch.setattr(cutlass, "_open", lambda path: Loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Some GPU")
    if fits:
        assert cutlass.load() is Loaded
    else:
        with pytest.raises(Unavailable, match="not built for .* 12.0a, 12.1a, which Some GPU cannot run"):
            cutlass.load()


def test_structures_match_the_header(tmp_path):
    """ctypes and the C compiler agree on every offset."""
    fields = {"peft_nvfp4_gemm_args": cutlass.Arguments, "peft_nvfp4_part": cutlass._Part}
    lines = [f'#include "{CSRC / "abi.h"}"', "#include <stddef.h>", "int peft_abi(void) { return PEFT_NVFP4_ABI; }"]
    for name, structure in fields.items():
        offsets = [f"offsetof({name}, {field})" for field, _ in structure._fields_]
        lines.append(f"size_t {name}_at[] = {{{', '.join([*offsets, f'sizeof({name})'])}}};")
    library = ctypes.CDLL(str(shared_object(tmp_path, "\n".join(lines))))
    assert library.peft_abi() == cutlass.ABI
    for name, structure in fields.items():
        ours = [getattr(structure, field).offset for field, _ in structure._fields_] + [ctypes.sizeof(structure)]
        assert list((ctypes.c_size_t * len(ours)).in_dll(library, f"{name}_at")) == ours


def test_few_tiles_prefer_small_ones_many_rows_may_take_large_ones():
    # 512 x 2048 outputs: 64 tiles of 128 x 128 in one wave of 84 SMs, 32 of 256 x 128 also one wave, each twice as long
    assert tiles.choose(Problem(512, (2048,), 2048), [LARGE, SMALL], 84) == SMALL
    # 170 SMs, 43520 x 512: 1360 tiles are 8 full waves, 680 are 4: as many products, half as many steps
    assert tiles.choose(Problem(43520, (512,), 2048), [SMALL, LARGE], 170) == LARGE


def test_pingpong_hides_epilogues_where_k_is_short():
    assert tiles.choose(Problem(8192, (8192,), 256), [SMALL, PINGPONG], 84) == PINGPONG
    # with one tile for each SM there is nothing to hide behind: equal, so the first of the table
    assert tiles.choose(Problem(128, (128,), 8192), [SMALL, PINGPONG], 84) == SMALL


def test_weights_of_one_input_fill_the_last_wave():
    together = tiles.modelled_us(Problem(2048, (2048, 512, 512), 2048), SMALL, 84)
    alone = sum(tiles.modelled_us(Problem(2048, (n,), 2048), SMALL, 84) for n in (2048, 512, 512))
    # 384 tiles are 5 waves, 256 + 64 + 64 are 4 + 1 + 1; and one start instead of three
    loop = 16 * (tiles.BLOCK_US + tiles.STEP_US) + tiles.EPILOGUE_US
    assert alone - together == pytest.approx(loop + 2 * (tiles.START_US + tiles.FILL_US))


def test_measured_tiles_win_and_survive(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFT_NVFP4_CACHE", str(tmp_path))
    file = tiles.cache_file("NVIDIA GeForce RTX 5080", "abc")
    assert file == tmp_path / "tiles-nvidia-geforce-rtx-5080-abc.json"
    problem, other = Problem(1000, (2048, 512), 2048), Problem(2048, (512,), 2048)
    assert tiles.read(file) == {}
    tiles.store(file, {problem.key: {SMALL.name: 2.0, PINGPONG.name: 1.0}})
    tiles.store(file, {other.key: {SMALL.name: 1.0, PINGPONG.name: 2.0}})
    measured = tiles.read(file)
    assert measured == {problem.key: PINGPONG.name, other.key: SMALL.name}
    table = [SMALL, LARGE, PINGPONG]
    assert tiles.choose(Problem(600, (2048, 512), 2048), table, 84, measured) == PINGPONG  # same power of two of rows
    assert tiles.choose(problem, [SMALL], 84, measured) == SMALL  # an instance that this build has not
    file.write_text("not json")
    tiles.read.cache_clear()
    assert tiles.read(file) == {}


def test_tune_stores_the_fastest(tmp_path, monkeypatch, capsys):
    pytest.importorskip("typer")
    from peft_nvfp4.cli._run import tuning

    class Loaded:
        tiles, info = [SMALL, LARGE], {"source": "abc"}

    monkeypatch.setenv("PEFT_NVFP4_CACHE", str(tmp_path))
    problems = [Problem(128, (128,), 128), Problem(4096, (128,), 128)]
    winners = tuning.measure("Some GPU", Loaded, problems, lambda problem, tile: abs(problem.m / 16 - tile.m))
    assert winners == {problems[0].key: SMALL.name, problems[1].key: LARGE.name}
    assert json.loads((tmp_path / "tiles-some-gpu-abc.json").read_text())["tiles"] == winners
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert len({problem.key for problem in tuning.usual_problems()}) == 64


def test_generated_sources(build, tmp_path):
    names = [one.name for one in build.generate.instances()]
    assert len(set(names)) == len(names) >= 8 and ONE in names
    files = build.generate.write(tmp_path, "", "info")
    assert {f.name for f in files} == {f"gemm_{name}.cu" for name in names} | {"table.cu"}
    table = (tmp_path / "table.cu").read_text()
    assert re.findall(r"^    instance_(\w+)\(\),", table, re.M) == names
    before = {f: f.stat().st_mtime_ns for f in files}
    build.generate.write(tmp_path, "", "info")
    assert {f: f.stat().st_mtime_ns for f in files} == before
    with pytest.raises(ValueError, match="no instance matches"):
        build.generate.write(tmp_path, "nonsense")


def test_what_is_missing_is_named(build, monkeypatch, tmp_path):
    with pytest.raises(build.Missing, match="'a' is needed"):
        build.gencode("12.0")
    assert build.gencode("12.1a") == ["-gencode", "arch=compute_121a,code=sm_121a"]
    monkeypatch.setenv("PEFT_NVFP4_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(build.Missing, match="is not a CUTLASS checkout"):
        build.find_cutlass()
    monkeypatch.delenv("PEFT_NVFP4_CUTLASS_DIR")
    monkeypatch.setattr(build, "_site_folders", lambda: [tmp_path])
    with pytest.raises(build.Missing, match="pip install --no-deps nvidia-cutlass"):
        build.find_cutlass()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.Path, "is_file", lambda path: False)
    with pytest.raises(build.Missing, match="nvcc was not found"):
        build.find_nvcc()


def test_kernel_registered_under_another_type_is_refused(build, tmp_path):
    """Two host functions of a kernel in one object: nvcc and the host compiler spell its type differently."""
    if shutil.which("nm") is None:
        pytest.skip("not run: no nm")
    one = "void _Z13device_kernelA(void) {}\n"
    build._check_stubs(shared_object(tmp_path, one))
    with pytest.raises(RuntimeError, match="registered under another type"):
        build._check_stubs(shared_object(tmp_path, one + "void _Z13device_kernelB(void) {}\n"))


@pytest.fixture(scope="module")
def compiled(build, tmp_path_factory):
    """The extension with one instance, for sm_120a."""
    try:
        build.Toolchain(["12.0a"])
    except build.Missing as error:
        pytest.skip(f"not run: {error}")
    out = tmp_path_factory.mktemp("extension") / build.LIBRARY
    return out, build.build(out, archs="12.0a", pattern=ONE)


@pytest.fixture
def library(compiled):
    return cutlass.Library(compiled[0])


@pytest.mark.slow
def test_one_instance_compiles(compiled, library, monkeypatch):
    assert library.archs == ["12.0a"] and library.info["emulated"] == "0"
    assert library.instances == {(SMALL.name, "none", "bf16"): 0} and library.tiles == [SMALL]
    monkeypatch.syspath_prepend(str(CSRC))
    import report

    (row,) = report.report(compiled[1], compiled[0], report.find_cuobjdump())["rows"]
    assert row["arch"] == "sm_120a" and row["smem_bytes"] <= 101376
    if "fp4_mma" in row:  # cuobjdump is there
        assert row["fp4_mma"] > 0 and row["loop_mma"] > 0 and row["loop_local"] == 0


@pytest.mark.slow
def test_library_checks_its_arguments(library):
    """Each rule of entry.cu, broken alone, is the one that is named. Nothing is launched: no GPU is needed."""
    part = dict(n=8, codes=16, scales=1, gscale=4, d=16, ldd=8)
    good = dict(version=cutlass.ABI, terms=1, parts=1, m=3, k=32, x_gscale=4, x_gscale_rows=3, workspace=256)
    wrong = {
        "version": dict(version=0),
        "instance": dict(instance=9),
        "terms": dict(terms=3),
        "parts": dict(parts=0),
        "m, k": dict(m=0),
        "k:": dict(k=48),
        "x_codes": dict(x_codes=8),
        "x_gscale:": dict(x_gscale=2),
        "x_gscale_rows": dict(x_gscale_rows=2),
        "part.n": dict(part=dict(n=0)),
        "part.codes": dict(part=dict(codes=8)),
        "part.scales": dict(part=dict(scales=None)),
        "part.gscale": dict(part=dict(gscale=None)),
        "part.c:": dict(part=dict(c=16)),
        "part.d:": dict(part=dict(d=None)),
        "part.ldc, part.ldd": dict(part=dict(ldd=9)),
        "workspace:": dict(workspace=None),
        "workspace_bytes": {},
    }
    for rule, change in wrong.items():
        arguments = cutlass.Arguments()
        values = {**good, "x_codes": 16, "x_scales": 1, **{k: v for k, v in change.items() if k != "part"}}
        for name, value in values.items():
            if name in ("x_codes", "x_scales"):
                getattr(arguments, name)[0] = value
            else:
                setattr(arguments, name, value)
        for name, value in {**part, **change.get("part", {})}.items():
            setattr(arguments.part[0], name, value)
        with pytest.raises(RuntimeError, match=f"extension: {re.escape(rule)}"):
            library.gemm(arguments)
    # 128 x 4 scales of x and of w are 512 bytes each; one k tile of 128 codes a row more where TMA is emulated
    assert library.workspace_bytes(arguments) == 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_match_the_reference(dtype):
    """Needs a library for this GPU: on SM120 the extension, elsewhere PEFT_NVFP4_EXTENSION=an emulated one."""
    try:
        cutlass.load()
    except Unavailable as reason:
        pytest.skip(f"not run: {reason}")
    x = torch.randn(200, 160, device="cuda")
    first = ops.quantize(x, ACTIVATION)
    second = ops.quantize(x - ops.dequantize(first), ACTIVATION, gscale=first.gscale)
    weights = [ops.quantize_weight(torch.randn(n, 160, device="cuda"), WEIGHT) for n in (136, 40, 7)]
    constants = [torch.randn(136, device="cuda"), None, None]
    adds = [None, torch.randn(200, 40, device="cuda").to(dtype), None]
    ys = cutlass.gemms([first, second], weights, constants=constants, adds=adds, dtype=dtype)
    value = (reference.dequantize(first) + reference.dequantize(second)).double()
    for y, w, constant, add in zip(ys, weights, constants, adds):
        want = value @ reference.dequantize(w).double().T
        want = want + (0 if constant is None else constant.double()) + (0 if add is None else add.double())
        # an FP32 sum of 10 blocks and the two additions, then one rounding
        bound = 2.0**-8 * want.abs() if dtype == torch.bfloat16 else 0
        assert ((y.double() - want).abs() <= bound + 2.0**-20 * want.abs().max()).all()
