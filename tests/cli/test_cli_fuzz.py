"""Data files at random, through every command that reads rows: the right tokens, or an error of one paragraph that names the file
and the place. Half of them are sound, written in one of the ways in which tools write them; the others are damaged.

Every run takes the same cases. More, and others: ``PEFT_NVFP4_FUZZ=2000 python -m pytest tests/cli/test_cli_fuzz.py``."""

import csv
import io
import json
import os
import random
import re

import pytest
from _tiny_models import save_tiny, tiny_tokenizer
from typer.testing import CliRunner

from peft_nvfp4 import cli
from peft_nvfp4.calibration.data import batches

pytest.importorskip("trl", reason="not run: trl is not installed")
pytest.importorskip("torchmetrics", reason="not run: torchmetrics is not installed")
import datasets

from peft_nvfp4.cli._run import evaluation, options, texts, training

CASES = int(os.environ.get("PEFT_NVFP4_FUZZ", "100"))
WORDS = ["the", "film", "red", "\u2028", "\x85", "\ufeff", "\U0001f600", "é", '"', "''", ",", ";", "\t", "\\", "NaN", "null"]
WORDS += ["01", "</s>", "{text}", "[bold]", "\u202e", "\x1f", "{{ x }}", "a" * 300, "<user>", "%s", "=1+1"]
JUNK = [None, True, 3, 1e300, "", " ", [], {}, [[]], [None], {"role": "user"}, [{"role": "user"}], ["a"], "\ud800", "\x00"]
JUNK += [[{"role": "assistant", "content": c}] for c in (None, 1, [], [{"type": "image"}], "a")]
JUNK += [{"a": {"b": [1]}}, json.loads("[" * 60 + "]" * 60)]
PLACE = r", (line|row) \d+: | holds no rows| cannot be read as parquet| has the label | \(.*\) fit no format| has anything to"
"""After the file's name."""


def text(rng: random.Random, extra: tuple[str, ...] = ()) -> str:
    return " ".join(rng.choices([*WORDS, *extra], k=rng.randint(0, 8)) + ["good"])


def row(rng: random.Random, kind: str) -> dict:
    say = lambda role: {"role": role, "content": text(rng, ("\n", "\r", "\x00"))}
    talk = [say(role) for role in ("user", "assistant") * rng.randint(1, 2)]
    if kind == "tools":
        calls = [{"type": "function", "function": {"name": "f", "arguments": {text(rng): rng.choice([None, 1, text(rng)])}}}]
        return {
            "messages": [*talk, talk[0], {"role": "assistant", "tool_calls": calls, "content": ""}],
            "tools": [{"name": text(rng)}],
        }
    if kind == "chat":
        return {"messages": talk}
    if kind == "turns":
        return {"prompt": talk[:-1], "completion": talk[-1:]}
    names = {"prompt": ("prompt", "completion"), "classification": ("text", "label"), "text": ("text",)}[kind]
    return {name: text(rng) for name in names}


def written(rng: random.Random, rows: list[dict], suffix: str) -> bytes:
    """As one of the tools does that write such files."""
    mark, end = rng.choice([b"", b"\xef\xbb\xbf"]), rng.choice(["\n", "\r\n"])
    compact = {"ensure_ascii": rng.random() < 0.5, "separators": rng.choice([None, (",", ":")])}
    if suffix == "parquet":
        buffer = io.BytesIO()
        datasets.Dataset.from_list(rows).to_parquet(buffer)
        return buffer.getvalue()
    if suffix == "jsonl":
        content = "".join(json.dumps(r, **compact) + end * rng.randint(1, 3) for r in rows)
    elif suffix == "json":
        content = json.dumps(rows, indent=rng.choice([None, 1]), ensure_ascii=compact["ensure_ascii"])
    elif suffix == "txt":
        content = "".join(r["text"] + end * rng.randint(2, 4) for r in rows)
    else:
        stream = io.StringIO(newline="")
        style = {"lineterminator": end, "quoting": rng.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])}
        writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if suffix == "tsv" else ",", **style)
        writer.writeheader()
        writer.writerows(rows)
        content = stream.getvalue()
    return mark + content.encode(errors="surrogatepass")


def damaged(rng: random.Random, rows: list[dict], suffix: str) -> bytes:
    """Values of other kinds, keys that are missing, another encoding, bytes that are changed, cut out or doubled."""
    if suffix in ("json", "jsonl") and rng.random() < 0.6:
        for _ in range(rng.randint(1, 2)):
            target = rng.choice(rows)
            inner = [v for v in target.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
            if inner and rng.random() < 0.7:
                target = rng.choice(rng.choice(inner))
            if target:
                key = rng.choice(list(target))
                target.pop(key) if rng.random() < 0.2 else target.update({key: rng.choice(JUNK)})
        return written(rng, rows, suffix)
    content = written(rng, rows, suffix)
    if suffix != "parquet" and rng.random() < 0.2:
        return content.decode("utf-8-sig").encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "latin-1"]), "replace")
    for _ in range(rng.randint(1, 4)):
        at, n = rng.randrange(len(content) + 1), rng.randint(1, 30)
        middle = rng.choice([b"", rng.randbytes(n), content[at : at + n] * 2, b'"', b"\n", b"[" * 3000, b"\0", b",", b"\xff"])
        content = content[:at] + middle + content[at + rng.choice([0, n]) :]
    return content[: rng.randint(0, len(content))] if rng.random() < 0.2 else content


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model and an adapter."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny(folder / "model", max_position_embeddings=4096)
    (folder / "d.jsonl").write_text('{"text": "red"}')
    given = {"model": str(folder / "model"), "dataset": str(folder / "d.jsonl"), "output": str(folder / "out")}
    trained = options.TrainOptions(**given, steps=1)
    training.run(trained, say=lambda words: None)
    return folder


def case(seed: int, folder) -> tuple[str, list[dict] | None]:
    """(name of a file, its rows if it is sound)."""
    rng = random.Random(seed)
    kind = rng.choice(["text", "prompt", "classification", "chat", "turns", "tools"])
    flat = kind in ("text", "prompt", "classification")
    suffix = rng.choice(["jsonl", "jsonl", "json", "parquet"] + ["csv", "tsv"] * flat + ["txt"] * (kind == "text"))
    if suffix == "parquet" and kind == "tools":
        suffix = "jsonl"  # Arrow gives every call the arguments of the others
    rows, path = [row(rng, kind) for _ in range(rng.randint(1, 4))], folder / f"data.{suffix}"
    sound = rng.random() < 0.5
    path.write_bytes((written if sound else damaged)(rng, rows, suffix))
    return str(path), rows if sound else None


def expected(tokenizer, r: dict) -> list[list[int]]:
    """Tokens of a row, turn by turn."""
    if "messages" in r or isinstance(r.get("prompt"), list):
        messages = r.get("messages") or r["prompt"] + r["completion"]
        first = 0 if "messages" in r else len(messages) - 1
        ends = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        render = lambda end: tokenizer.apply_chat_template(messages[:end], tools=r.get("tools"), tokenize=False)
        return [tokenizer(render(end), add_special_tokens=False).input_ids for end in ends]
    if "label" in r:
        r = {"prompt": texts.TEMPLATE.replace("{text}", r["text"]), "completion": f" {r['label']}"}
    whole = r.get("text") or r["prompt"] + r["completion"]
    return [tokenizer(whole.removesuffix("</s>") + "</s>").input_ids]


def explained(words: str, name: str) -> None:
    words = " ".join(words.split())
    assert re.search(re.escape(name) + f"({PLACE})", words) and len(words) < 1500, words


@pytest.mark.parametrize("seed", range(CASES))
def test_any_file_is_read_rightly_or_refused_with_its_place(seed, world, tmp_path):
    name, rows = case(seed, tmp_path)
    tokenizer = tiny_tokenizer()
    try:
        read = texts.read(name)
        encoded = evaluation.encode(read, tokenizer, 4096)
        assert batches(read.plain(), tokenizer, samples=2, seq_len=8)
    except ValueError as error:
        assert rows is None, error
        explained(str(error), name)
    else:
        if rows is not None:
            wanted = [ids for r in rows for ids in expected(tokenizer, r)]
            assert [encoded[number]["input_ids"] for number in range(len(wanted))] == wanted
    commands = {
        "train": ["train", world / "model", name, "-o", tmp_path / "out", "--steps", 1, "--rank", 2, "--batch", 2],
        "eval": ["eval", name, "-m", world / "model", "--max-new-tokens", 1, "--max-length", 4096],
        "calibrate": ["calibrate", world / "model", name, "-o", tmp_path / "cal", "--samples", 2, "--seq", 16],
        "statistics": ["statistics", name, "-m", world / "model", "--tokens", 8],
        "merge": ["merge", world / "out", "-o", tmp_path / "merged", "--probe", name],
    }
    command = list(commands.values())[seed % len(commands)]
    result = CliRunner().invoke(cli.application(), [*map(str, command)])
    assert isinstance(result.exception, SystemExit | None) and "Traceback" not in result.output, result.output
    if result.exit_code:
        assert len(re.findall("^Error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
        assert "--debug COMMAND shows" not in result.stderr, result.stderr  # an error that nobody explained
        alone = "has the label" in result.stderr and command[0] == "eval"  # sound, and nothing to choose between
        assert rows is None or alone, result.stderr
        explained(result.stderr[result.stderr.index("Error: ") :], name)
