"""What users write, damaged at random: YAML, data files, arguments. It works, or it is refused with an error that names the file
(the whole rule, and how to search longer: _fuzz.py). And no source of the package can run code that a file brings."""

import ast
import shutil
import traceback
from pathlib import Path

import pytest
from _fuzz import (
    PACKAGE,
    done_or_refused,
    edits,
    in_time,
    nothing_is_run,  # noqa: F401  a fixture of every test here
    spoil,
)
from _hypothesis import tried

pytest.importorskip("hypothesis")
pytest.importorskip("typer")
import typer.testing
from hypothesis import example, given
from hypothesis import strategies as st

from peft_nvfp4 import cli
from peft_nvfp4.cli._run import options, texts
from peft_nvfp4.kernels.fp4 import cutlass

YAML = """model: base  # a folder
dataset: data.jsonl
output: out
rank: 8
lr: 1e-4
columns: {prompt: question, completion: answer}
lora:
  use_rslora: true
trainer: {warmup_steps: 3}
"""
syntax = ["\n", "  ", "- ", "{", "}", "[", "&a ", "*a", "<<: ", "? ", ": ", "'", '"', "|", "%", "\t", "\x00", "\ufeff", "é", "~"]
scalars = ["1e999", "0x1f", "2001-01-01", "!!binary x", "!!python/object/apply:os.system ", "model: ", "rank: ", "layers: "]
pieces = st.lists(st.sampled_from(syntax + scalars), max_size=12).map("".join)


def read_options(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("yaml") / "train.yaml"
    path.write_bytes(content)
    with done_or_refused(path, *options.TrainOptions.__dataclass_fields__):
        given = options.read_yaml(path)
        assert all(isinstance(name, str) for name in given)
        made = options.TrainOptions(**given)
        options.adapter_config(made)
        made.save(path.parent / "again")
    shutil.rmtree(path.parent)


@tried(120)
@given(edits())
def test_damaged_yaml(tmp_path_factory, damage):
    read_options(tmp_path_factory, spoil(damage, YAML.encode()))


@tried(120)
@given(pieces)
@example("!!python/object/apply:os.system ['touch x']")
@example("a: &a [" + "*a, " * 3 + "]")
@example("? [1]\n: 2")
@example("? {}\n: 2")
@example("[" * 3000)
@example("rank: .inf")
@example("rank: 2001-13-45")
@example("\x00")
@example("lr: " + "9" * 5000)
@example("steps: " + "9" * 5000)
@example("lora: {1: 2, r: !!set {a, b}}")
@example("epochs: .nan")
def test_yaml_of_pieces(tmp_path_factory, text):
    read_options(tmp_path_factory, text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\xe9", b"model: \x80"])
def test_yaml_in_another_encoding(tmp_path_factory, content):
    read_options(tmp_path_factory, content)


DATA = {
    "d.jsonl": '{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
    "d.json": '[{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]',
    "d.csv": 'text,label\n"a, b",1\nc,2\n',
    "d.tsv": "text\tlabel\na\t1\n",
    "d.txt": "one\n\ntwo\n",
}


@tried(150)
@given(st.sampled_from(sorted(DATA)), edits())
def test_damaged_data(tmp_path_factory, name, damage):
    path = tmp_path_factory.mktemp("data") / name
    path.write_bytes(spoil(damage, DATA[name].encode()))
    with done_or_refused(path):
        rows = texts.read(str(path))
        assert rows.format in texts.FORMATS and len(rows.data)
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", b"[" * 50_000),
        ("d.json", b"[" * 50_000),
        ("d.json", b"[" + b"9" * 5000 + b"]"),
        ("d.jsonl", b"5"),
        ("d.json", b"[1]"),
        ("d.json", b'[{"messages": [{"role": [], "content": 1}]}]'),
        ("d.csv", b'text,label\n"' + b"x" * 200_000),
        ("d.csv", b"text,label\na\x00b,1"),
        ("d.csv", b"\n\n"),
    ],
)
def test_extremes_in_data(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with done_or_refused(name):
        texts.read(str(tmp_path / name))


@pytest.fixture(scope="module")
def app():
    return cli.application()


def flags_of(app):
    import click

    found = {}
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        options_ = [
            o for p in command.params if isinstance(p, click.Option) or hasattr(p, "opts") for o in p.opts if o.startswith("-")
        ]
        found[name] = sorted(set(options_) - {"--help", "-h"})
    return found


FLAGS = flags_of(cli.application())
values = st.one_of(
    st.sampled_from(
        ["0", "-1", "1e400", "nan", "nvfp4", "9" * 400, "a=b", "=", ",", "", "../x", "~", "smollm", "-", "16GiB", "{text}"]
    ),
    st.text(max_size=8),
)
QUIET = ("doctor", "tune")  # they need no file, and work for minutes


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from(sorted(set(FLAGS) - set(QUIET))))
    parts = draw(st.lists(values, max_size=3))
    for flag in draw(st.lists(st.sampled_from(FLAGS[name]), max_size=4)):
        parts += [flag, draw(values)] if draw(st.booleans()) else [flag]
    return [name, *parts]


@tried(60)
@given(command_lines())
def test_arguments(app, tmp_path_factory, line):
    """An exit code and a sentence, in an empty folder, in which nothing is left lying about."""
    folder = tmp_path_factory.mktemp("arguments")
    with pytest.MonkeyPatch.context() as patch, in_time():
        patch.chdir(folder)
        result = typer.testing.CliRunner().invoke(app, line)
    allowed = result.exception is None or isinstance(result.exception, SystemExit)
    assert allowed, "".join(traceback.format_exception(result.exception))
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output
    if result.exit_code == 1:
        assert result.stderr.startswith("Error: "), result.output
        assert "Error: KeyError" not in result.output and "Error: AttributeError" not in result.output, result.output
    shutil.rmtree(folder)


SOURCES = sorted(Path(PACKAGE).rglob("*.py"))
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}


def ways_in(source):
    """Calls and imports by which a file could make Python run something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            harmless = [alias.name for alias in node.names] == ["UnpicklingError"]  # what torch.load raises
            found += [name for name in names if name.split(".")[0] in PICKLES and not harmless]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called.startswith("yaml.") and called not in ("yaml.safe_load", "yaml.safe_dump"):
            found.append(called)
        if called in ("eval", "exec", "__import__", "os.system", "os.popen") or given.get("shell", "False") != "False":
            found.append(called)
        found += [
            f"{word}={given[word]}" for word in ("allow_pickle", "trust_remote_code") if given.get(word, "False") != "False"
        ]
    return found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from joblib import load", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(t, Loader=L)"]
    + ["np.load(f, allow_pickle=True)", "eval(t)", "subprocess.run(c, shell=True)", "f(n, trust_remote_code=True)"],
)
def test_ways_in_are_seen(source):
    assert ways_in(source)


def test_no_file_can_run_code():
    assert {str(path.relative_to(PACKAGE)): ways for path in SOURCES if (ways := ways_in(path.read_text()))} == {}


@pytest.mark.parametrize("told", [False, True])
def test_the_extension_is_loaded_from_the_package_or_where_one_is_told(tmp_path, monkeypatch, told):
    """Not from the current folder, nor by a name for which the dynamic loader would search."""
    (tmp_path / cutlass.FILE).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cutlass.VARIABLE, raising=False)
    if told:
        monkeypatch.setenv(cutlass.VARIABLE, str(tmp_path / "elsewhere.so"))
    path = cutlass._path()
    assert path == (tmp_path / "elsewhere.so" if told else Path(PACKAGE) / cutlass.FILE) and path.is_absolute()
