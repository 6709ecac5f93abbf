"""The SM120 extension without its card: loader, tile choice, arguments, build; and one compiled instance where nvcc is there.

Results of the kernels are checked on a GPU by benchmarks/check_extension.py (on Hopper with the emulated instruction).
"""

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from peft_nvfp4 import ops
from peft_nvfp4.kernels.fp4 import check, cutlass, tiles
from peft_nvfp4.kernels.fp4.native import Unavailable
from peft_nvfp4.kernels.fp4.tiles import Problem, Tile
from peft_nvfp4.numerics import layout, reference
from peft_nvfp4.numerics.formats import ACTIVATION, WEIGHT
from peft_nvfp4.numerics.products import LowRank

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


GPUS = [("12.0a,12.1a", (12, 0), True), ("12.0a,12.1a", (12, 1), True), ("12.0a,12.1a", (9, 0), False)]
GPUS += [("12.0a,12.1a", (12, 2), False), ("12.0f", (12, 1), True), ("12.1f", (12, 0), False), ("12.0f", (10, 0), False)]


@pytest.mark.parametrize("archs, capability, fits", GPUS)
def test_library_for_another_gpu(monkeypatch, tmp_path, archs, capability, fits):
    """Of several GPUs the current one counts: a library that another one can run is no broken one."""
    loaded = SimpleNamespace(path=tmp_path, archs=archs.split(","))
    monkeypatch.setattr(cutlass, "_open", lambda path: loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *i: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *i: "Some GPU")
    if fits:
        assert cutlass.load() is loaded
    else:
        with pytest.raises(Unavailable, match=f"not built for .* {', '.join(loaded.archs)}, which Some GPU cannot run") as error:
            cutlass.load()
        assert not error.value.broken


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


def test_maps_of_small_tensors(tmp_path):
    """Bit 21 of the second word is cleared where all of it holds: Blackwell, below 128 KB. The bytes are those of the whole
    extent."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("not run: no C++ compiler")
    (tmp_path / "maps.cpp").write_text("""
#include "small_maps.h"
extern "C" uint64_t extent(unsigned rank, uint64_t row, uint64_t const* dims, uint64_t const* strides) {
  return peft_nvfp4::tensor_extent(rank, row, dims, strides);
}
extern "C" void clear(uint64_t* map, uint64_t extent, int major) { peft_nvfp4::clear_small_tensor_bit(map, extent, major); }
""")
    out = tmp_path / "maps.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{CSRC}", "-o", out, tmp_path / "maps.cpp"], check=True)
    library = ctypes.CDLL(str(out))
    library.extent.restype = ctypes.c_uint64
    numbers = lambda *values: (ctypes.c_uint64 * len(values))(*values)
    extent = lambda row, dims, strides: library.extent(len(dims), ctypes.c_uint64(row), numbers(*dims), numbers(*strides))
    assert extent(66, (33, 7, 1), (80, 0)) == 7 * 80  # N = 33 in rows of 40, and a batch of stride 0
    assert extent(80_000, (40_000, 1, 1), (80_000, 0)) == 80_000 and extent(2, (1, 1, 1), (16, 0)) == 16

    def cleared(size, major):
        library.clear(words := numbers(*[2**64 - 1] * 16), ctypes.c_uint64(size), major)
        changed = [i for i, word in enumerate(words) if word != 2**64 - 1]
        assert changed in ([], [1]) and (not changed or words[1] == 2**64 - 1 - (1 << 21))
        return bool(changed)

    small, large = (128 << 10) - 1, 128 << 10
    assert [cleared(small, major) for major in (9, 10, 12)] == [False, True, True]
    assert not any(cleared(large, major) for major in (9, 10, 12))


def test_few_tiles_prefer_small_ones_many_rows_may_take_large_ones():
    # 512 x 2048 outputs: 64 tiles of 128 x 128 in one wave of 84 SMs, 32 of 256 x 128 also one wave, each twice as long
    assert tiles.choose(Problem(512, (2048,), 2048), [LARGE, SMALL], 84) == SMALL
    # 170 SMs, 43520 x 512: 1360 tiles are 8 full waves, 680 are 4: as many products, half as many steps
    assert tiles.choose(Problem(43520, (512,), 2048), [SMALL, LARGE], 170) == LARGE


def test_pingpong_hides_epilogues_where_k_is_short():
    assert tiles.choose(Problem(8192, (8192,), 256), [SMALL, PINGPONG], 84) == PINGPONG
    # with one tile for each SM there is nothing to hide behind: equal, so the first of the table
    assert tiles.choose(Problem(128, (128,), 8192), [SMALL, PINGPONG], 84) == SMALL


def test_few_rows_take_narrow_tiles():
    table = [SMALL, LARGE, Tile(128, 64, 256, "cooperative"), Tile(128, 32, 256, "cooperative")]
    chosen = lambda m, n: tiles.choose(Problem(m, (n,), 2048), table, 84).n
    # 4, 8 or 16 tiles of 512 columns for 84 multiprocessors; of 2048 columns and 256 rows 32, 64 or 128, which are two waves
    assert chosen(128, 512) == 32 and chosen(256, 2048) == 64
    # with every multiprocessor busy, narrow tiles ask more of the L2 cache than it has
    assert chosen(4096, 2048) == chosen(1024, 8192) == 128


def test_a_low_rank_tail_lengthens_the_loop():
    plain, tail = (tiles.modelled_us(Problem(128, (128,), 2048, rank=rank), SMALL, 84) for rank in (0, 40))
    assert tail - plain == pytest.approx(2 * (tiles.TAIL * tiles.BLOCK_US + tiles.STEP_US))
    assert Problem(128, (128,), 2048, rank=40).key == Problem(128, (128,), 2048).key


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
    assert len({problem.key for problem in tuning.usual_problems()}) == 96


@pytest.mark.parametrize("problem", [Problem(9, (8, 16), 64, 2, rank=16), Problem(9, (8,), 64, c=True)])
def test_tune_launches_what_the_extension_takes(problem):
    """Up to the library itself, which is not here."""
    from peft_nvfp4.cli._run import tuning

    launch = tuning.launch_of(problem, SMALL, "cpu")
    with pytest.raises(Unavailable, match="not built"):
        launch()
    low_ranks = launch.keywords["low_ranks"]
    assert [p and (p.hidden.shape, p.up.shape) for p in low_ranks] == [
        ((9, 16), (n, 16)) if problem.rank else None for n in problem.ns
    ]


def test_a_part_as_the_library_takes_it():
    """Addresses and pitches; what TMA cannot address is copied, what it can is not."""
    wide, up = torch.randn(9, 40).bfloat16(), torch.randn(16, 12).bfloat16()
    w, y = check.matrix(check.codes(16, 64, 1)), torch.empty(9, 16).bfloat16()
    part = cutlass._Part()
    copies = cutlass._describe(part, cutlass._Product(w, torch.ones(16), None, LowRank(wide[:, 8:20], up), y))
    assert (part.n, part.rank, part.ldh, part.ldd, part.scales_swizzled, part.bias_is_bf16) == (16, 12, 40, 16, 0, 0)
    assert part.h == wide.data_ptr() + 16 and part.c is None and part.codes == w.codes.data_ptr()
    (copy,) = copies
    assert (part.up, part.ldup) == (copy.data_ptr(), 16) and torch.equal(copy, up)  # 12 columns in rows of 32 bytes

    swizzled, add = w._replace(scales=layout.swizzle_scales(w.scales)), torch.randn(9, 20).bfloat16()
    columns = torch.randn(8, 9).bfloat16().T
    product = cutlass._Product(swizzled, None, add[:, 3:19], LowRank(columns, torch.randn(16, 8).bfloat16()), y)
    copies = cutlass._describe(part, product)
    assert part.scales_swizzled == 1 and part.ldc == 16 and part.ldh == 8 and len(copies) == 2
    assert torch.equal(copies[0], add[:, 3:19]) and torch.equal(copies[1], columns)


def test_low_rank_products_that_are_made_before():
    """Beside an addend, and of more than 256 ranks."""
    pair = lambda rank: LowRank(torch.ones(3, rank).bfloat16(), torch.ones(5, rank).bfloat16())
    small, beside, large, add = pair(256), pair(2), pair(257), torch.ones(3, 5).bfloat16()
    inside, adds = cutlass._split([small, beside, large, None], [None, add, None, add], torch.bfloat16)
    assert inside == [small, None, None, None] and adds[0] is None and adds[3] is add
    assert torch.equal(adds[1], add * 3) and torch.equal(adds[2], torch.full((3, 5), 257.0).bfloat16())


def test_generated_sources(build, tmp_path):
    names = [one.name for one in build.generate.instances()]
    older = [one.name for one in build.generate.instances(cutlass=(4, 2, 0))]
    assert [name for name in names if name not in older] == [name for name in names if name.startswith(("128x64", "128x32"))]
    assert older == [one.name for one in build.generate.instances(cutlass=(4, 4, 1))] and len(older) == 10
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
    with pytest.raises(build.Missing, match="not of the form 12.0a or 12.0f"):
        build.gencode("12.0", (13, 0))
    with pytest.raises(build.Missing, match="12.0f needs nvcc 12.9 or later, this is 12.8"):
        build.gencode("12.0f", (12, 8))
    assert build.gencode("12.1a", (12, 8)) == ["-gencode", "arch=compute_121a,code=sm_121a"]
    assert build.gencode("12.0f", (12, 9)) == ["-gencode", "arch=compute_120f,code=sm_120f"]
    build._refuse_msvc((13, 0))
    monkeypatch.setattr(build, "WINDOWS", True)
    build._refuse_msvc((12, 9))
    with pytest.raises(build.Missing, match="CUDA 12.9, or build in WSL2"):
        build._refuse_msvc((13, 0))
    monkeypatch.setattr(build, "WINDOWS", False)
    monkeypatch.setenv("PEFT_NVFP4_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(build.Missing, match="is not a CUTLASS checkout"):
        build.find_cutlass()
    for file in ("include/cutlass/version.h", "tools/util/include/cutlass/util/packed_stride.hpp"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 1\n")
    with pytest.raises(build.Missing, match=r"CUTLASS 3.9.1, which has no .* \(known to compile: 4.2.0"):
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
        assert row["fp4_mma"] > 0 and row["loop_mma"] > 0 and row["loop_local"] == 0 and row["bf16_mma"] > 0
        assert row["waits"] == 2  # by the warp that loads, and before the epilogue reads biases


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
        "part.rank": dict(part=dict(rank=257)),
        "part.up": dict(part=dict(rank=8, h=2, ldh=8, up=8, ldup=8)),
        "swizzled scales": dict(x_scales_swizzled=1),
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
    pairs = [LowRank(*(torch.randn(rows, 12, device="cuda").bfloat16() for rows in (200, 136))), None, None]
    ys = cutlass.gemms([first, second], weights, constants=constants, adds=adds, low_ranks=pairs, dtype=dtype)
    value = (reference.dequantize(first) + reference.dequantize(second)).double()
    for y, w, constant, add, pair in zip(ys, weights, constants, adds, pairs):
        want = value @ reference.dequantize(w).double().T
        want = want + (0 if pair is None else pair.hidden.double() @ pair.up.double().T)
        want = want + (0 if constant is None else constant.double()) + (0 if add is None else add.double())
        # an FP32 sum of 6 instructions, each cut off, and the additions, then one rounding
        bound = 2.0**-8 * want.abs() if dtype == torch.bfloat16 else 0
        assert ((y.double() - want).abs() <= bound + 2.0**-20 * want.abs().max()).all()
