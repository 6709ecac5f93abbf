"""Rows that are unusual, and what is learned of them: encodings, tools, empty and long ones; and errors that name their line."""

import json

import pytest
from _tiny_models import save_tiny, tiny_tokenizer
from test_cli_data import CHAT, MARKED, content, learned, write
from typer.testing import CliRunner

from peft_nvfp4 import cli
from peft_nvfp4.calibration.data import batches

pytest.importorskip("trl", reason="not run: trl is not installed")
pytest.importorskip("torchmetrics", reason="not run: torchmetrics is not installed")
from peft_nvfp4.cli._run import evaluation, options, texts, training

TOOLS = (
    "{% for t in tools or [] %}{{ '<tool> ' + t['function']['name'] + ' ' + t['function']['parameters'] | tojson + ' ' }}"
    "{% endfor %}{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}"
    "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}{{ 'what ' + c['function']['arguments'] | tojson + ' ' }}{% endfor %}"
    "{% else %}{{ m['content'] + ' ' }}{% endif %}{{ '</s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
"""A chat template with tools and calls of them."""
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + MARKED
QUESTION = [{"role": "user", "content": "red ?"}]


def tool(name: str, **parameters) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(**arguments) -> dict:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}


def trained(tmp_path, name, template=None, limit=1024, **settings):
    """(TRL's trainer of a run on a file, the lines it said)."""
    save_tiny(tmp_path / "model")
    tiny_tokenizer(template).save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "dataset": str(name), "output": str(tmp_path / "out"), "rank": 2}
    lines = []
    trainer, _ = training._trainer(options.TrainOptions(**given, max_length=limit, **settings), lines.append)
    return trainer, lines


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("d.jsonl", b'{"text": "red\xe2\x80\xa8blue"}\n', ["red\u2028blue"]),
        ("d.jsonl", b'\xef\xbb\xbf{"text": "red"}\r\n\r\n{"text": "2001-01-01"}', ["red", "2001-01-01"]),
        ("d.txt", b"\xef\xbb\xbfred\xe2\x80\xa8blue\r\n\r\n  good", ["red\u2028blue", "  good"]),
        ("d.csv", b"\xef\xbb\xbftext\r\n" + b"x" * 200_000 + b'\r\n"red\n\xe2\x80\xa8"', ["x" * 200_000, "red\n\u2028"]),
        ("d.json", b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
        ("d.json", b'{"text": "red"}\n{"text": "blue"}\n', ["red", "blue"]),
    ],
)
def test_the_right_text_of_any_encoding(tmp_path, name, written, expected):
    (tmp_path / name).write_bytes(written)
    assert [row["text"] for row in content(texts.read(str(tmp_path / name)))] == expected


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("d.jsonl", b'{"text": "a"}\n\n\n{"text": 1', "line 4: no JSON"),
        ("d.jsonl", b'\n{"text": "\\ud800"}', "line 2: .ud800 is half of a character"),
        ("d.jsonl", b'\n\n{"text": NaN}', "line 3: no JSON that can be read .NaN is no value"),
        ("d.jsonl", b'\n{"text": ' + b"[" * 100_000, "line 2: no JSON that can be read .nested too deeply"),
        ("d.jsonl", b'{"text": "a"}\n["a"]', "line 2: a row is an object"),
        ("d.jsonl", b'{"text": "a"}\n\n{"text": {"a": 1}}', "line 3: text is a text, got dict"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: 0xff is no UTF-8"),
        ("d.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: the file is UTF-16: save it as UTF-8"),
        ("d.txt", "red\nblue".encode("utf-16-le"), "line 1: a NUL byte"),
        ("d.csv", b'text,label\n"a\nb",c\n\na,b,c', "line 5: 3 cells, and the header has 2 .text, label"),
        ("d.csv", b'text,label\na,"b\n\n', "line 2: no CSV"),
        ("d.csv", b"text,text\na,b", "line 1: two columns have the same name"),
        ("d.csv", b"text,label\na,b\na,\n", "line 3: no label"),
        ("d.json", b'[{"text": "a"},\n {"text": }]', "line 2: no JSON"),
        ("d.parquet", b"PAR1", "d.parquet cannot be read as parquet"),
        ("d.jsonl", b'{"prompt": [], "completion": [{"role": "user", "content": "a"}]}', "line 1: prompt is a list .*is empty"),
        ("d.jsonl", json.dumps({"messages": CHAT, "tools": "{"}).encode(), "line 1: tools is a list of objects, or its JSON"),
        ("d.jsonl", json.dumps({"messages": CHAT, "tools": 5}).encode(), "line 1: tools is a list of objects"),
        ("d.jsonl", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "line 1: messages is a list of objects"),
        ("d.jsonl", b'{"text": " "}\n\n{"text": ""}', "holds no rows with a text"),
    ],
)
def test_errors_name_the_line(tmp_path, name, written, words):
    (tmp_path / name).write_bytes(written)
    with pytest.raises(ValueError, match=words) as error:
        texts.read(str(tmp_path / name))
    assert str(error.value).startswith(str(tmp_path / name)) and len(str(error.value)) < 1000


def test_a_column_of_tools_and_calls_without_content(tmp_path):
    """Every row's tools reach the template as they are: no row gets the parameters of another."""
    tools = [[tool("red", blue=1)], json.dumps([tool("green")]), None]
    rows = [{"messages": [*QUESTION, call(a=None)], "tools": t} for t in tools]
    name = write(tmp_path / "d.jsonl", rows)
    prefixes = ['<tool> red {"blue": 1} ', "<tool> green {} ", ""]
    tokenizer = tiny_tokenizer(TOOLS)
    rendered = texts.read(name).rendered(tokenizer)
    assert [prompt for prompt, _ in rendered] == [f"{prefix}<user> red ? </s> <bot> " for prefix in prefixes]
    assert {whole[len(prompt) :] for prompt, whole in rendered} == {'what {"a": null} </s> '}
    trainer, _ = trained(tmp_path, name, TOOLS)
    expected = [tokenizer(whole).input_ids for _, whole in rendered]
    assert [row["input_ids"] for row in trainer.train_dataset] == expected
    scored = evaluation.encode(texts.read(name), tokenizer, 64).values()
    assert [row["input_ids"] for row in scored] == expected
    total = sum(map(len, expected))
    for data in (texts.read(name).plain(), rows):
        found = sum(batch["input_ids"].numel() for batch in batches(data, tokenizer, samples=99, seq_len=2))
        assert found in (total, total - 1)


def test_messages_as_prompt_and_completion_and_arguments_of_the_template(tmp_path):
    """Of every row its own. ShareGPT's roles are those of the template."""
    template = "{{ 'was ' if fine }}" + MARKED
    rows = [{"prompt": QUESTION, "completion": CHAT[1:2], "chat_template_kwargs": {"fine": fine}} for fine in (True, False)]
    trainer, _ = trained(tmp_path, write(tmp_path / "d.jsonl", rows), template)
    tokens = [tiny_tokenizer().convert_ids_to_tokens(row["input_ids"]) for row in trainer.train_dataset]
    assert [row[0] for row in tokens] == ["was", "<user>"]
    assert [learned(tiny_tokenizer(), row) for row in trainer.train_dataset] == [["good", "film", "</s>"]] * 2
    turns = [{"from": "human", "value": "red ?"}, {"from": "gpt", "value": "good"}]
    (row,) = content(texts.read(write(tmp_path / "s.jsonl", [{"conversations": turns}])))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("packing", [False, True])
def test_empty_and_long_rows_are_left_out_and_counted(tmp_path, packing):
    rows = [{"prompt": "red", "completion": " blue"}, {"prompt": "", "completion": " "}]
    rows += [{"prompt": "red " * 20, "completion": " good"}, {"prompt": "bad", "completion": ""}]
    trainer, lines = trained(tmp_path, write(tmp_path / "d.jsonl", rows), limit=8, packing=packing)
    found = [token for row in trainer.train_dataset for token in learned(tiny_tokenizer(), row)]
    assert sorted(found) == ["</s>", "</s>", "blue"]
    said = "\n".join(lines)
    assert "1 row was left out: no text (the first: line 2)" in said
    assert "1 rows were left out: their prompt alone takes 8 tokens (the first: line 3)" in said


@pytest.mark.parametrize("trainer", [{"truncation_mode": "keep_end"}, {"packing_strategy": "bfd_split"}])
def test_no_setting_learns_an_answer_without_its_prompt(tmp_path, trainer):
    name = write(tmp_path / "d.jsonl", [{"prompt": "red " * 20, "completion": " good"}])
    with pytest.raises(ValueError, match="learned without what was asked"):
        trained(tmp_path, name, trainer=trainer, packing="packing_strategy" in trainer)


def test_a_text_longer_than_the_model(tmp_path):
    """Of training and of scoring, and its line; what is cut fits."""
    name = write(tmp_path / "d.jsonl", [{"text": "red"}, {"text": "blue " * 100}])
    short = {"max_position_embeddings": 32}
    save_tiny(tmp_path / "model", **short)
    app, words = cli.application(), "line 2 has 101 tokens"
    for command in (
        ["train", tmp_path / "model", name, "-o", tmp_path / "out", "--steps", "1"],
        ["eval", name, "-m", tmp_path / "model"],
        ["statistics", name, "-m", tmp_path / "model"],
    ):
        result = CliRunner().invoke(app, [*map(str, command)])
        assert result.exit_code == 1 and words in " ".join(result.stderr.split()), result.output
        assert "--max-length 32" in " ".join(result.stderr.split())
    assert CliRunner().invoke(app, ["eval", name, "-m", str(tmp_path / "model"), "--max-length", "32"]).exit_code == 0


@pytest.mark.parametrize("template", [NO_SYSTEM, "{{ messages[0]['content'] + 5 }}"])
def test_a_template_that_refuses_a_row(tmp_path, template):
    rows = [{"messages": CHAT}, {"messages": [{"role": "system", "content": "red"}, *CHAT]}][template != NO_SYSTEM :]
    name = write(tmp_path / "d.jsonl", rows)
    words = rf"d.jsonl, line {len(rows)}: the chat template of this tokenizer refuses.*system message"
    for run in (
        lambda: trained(tmp_path, name, template),
        lambda: evaluation.encode(texts.read(name), tiny_tokenizer(template), 64),
    ):
        with pytest.raises(ValueError, match=words):
            run()


def test_labels_are_those_of_the_data_and_of_training(tmp_path):
    """Not those of the rows that are scored: a model would be right of the only one."""
    save_tiny(tmp_path / "model")
    both = write(tmp_path / "d.jsonl", [{"text": "film", "label": label} for label in ("good", "good", "bad")])
    one = write(tmp_path / "one.jsonl", [{"text": "film", "label": "good"}])
    assert texts.read(both, limit=1).labels == [" good", " bad"]
    app = cli.application()
    command = lambda *args: CliRunner().invoke(app, [*map(str, args)])
    result = command("eval", one, "-m", tmp_path / "model")
    assert result.exit_code == 1 and "has the label 'good' alone" in " ".join(result.stderr.split())
    assert command("eval", one, "-m", tmp_path / "model", "--labels", "good,bad").exit_code == 0
    settings = ("--template", "{text} :", "--batch", 1, "--steps", 1)
    assert command("train", tmp_path / "model", both, "-o", tmp_path / "out", *settings).exit_code == 0
    shown = json.loads(command("eval", one, "--adapter", tmp_path / "out", "--json", "-").stdout)["adapter"]
    assert shown["samples"][0]["prompt"] == "film :"


def test_labels_that_are_cut_are_not_compared(tmp_path):
    """A row that does not fit with every label is left out."""
    rows = [{"text": f"{'red ' * n}", "label": label} for n, label in ((1, "good"), (4, "bad fine great"))]
    name = write(tmp_path / "d.jsonl", rows)
    found = evaluation._candidates(texts.read(name, template="{text}"), tiny_tokenizer(), 6)
    assert list(found) == [0] and [len(row["input_ids"]) for row in found[0]] == [3, 5]


def test_every_command_counts_empty_rows(tmp_path):
    save_tiny(tmp_path / "model")
    name = write(tmp_path / "d.jsonl", [{"text": " "}, {"text": "red is good"}, {"text": ""}])
    for command in (
        ["train", tmp_path / "model", name, "-o", tmp_path / "out", "--steps", 1],
        ["eval", name, "-m", tmp_path / "model"],
        ["statistics", name, "-m", tmp_path / "model"],
        ["calibrate", tmp_path / "model", name, "-o", tmp_path / "cal", "--seq", 4],
    ):
        result = CliRunner().invoke(cli.application(), [*map(str, command)])
        assert "2 rows were left out: no text (the first: line 1)" in " ".join(result.stdout.split()), result.output
