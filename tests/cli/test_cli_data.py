"""What the command line reads and how it scores: data files, token ids and labels, options, metrics."""

import json

import pytest
import torch
from _tiny_models import tiny_tokenizer

from peft_nvfp4.cli._run import metrics, options, texts
from peft_nvfp4.cli._run.texts import IGNORED

CHAT = [
    {"role": "user", "content": "red ?"},
    {"role": "assistant", "content": "good film"},
    {"role": "user", "content": "blue ?"},
    {"role": "assistant", "content": "bad"},
]


def write(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": CHAT}, "chat"),
        ({"prompt": "question red", "completion": "answer"}, "prompt"),
        ({"text": "film", "label": 1}, "classification"),
        ({"text": "the film"}, "text"),
    ],
)
def test_formats_are_recognised(tmp_path, row, format):
    rows = texts.read(write(tmp_path / "d.jsonl", [row]))
    assert rows.format == format and len(rows.rows) == 1


def test_kinds_of_files(tmp_path):
    row = {"prompt": "a", "completion": "b"}
    (tmp_path / "d.json").write_text(json.dumps([row]))
    (tmp_path / "d.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "d.tsv").write_text("prompt\tcompletion\na\tb\n")
    for kind in ("json", "csv", "tsv"):
        assert texts.read(str(tmp_path / f"d.{kind}")).rows == [row]
    (tmp_path / "d.txt").write_text("one\nparagraph\n\n\nanother\n")
    assert [r["text"] for r in texts.read(str(tmp_path / "d.txt")).rows] == ["one\nparagraph", "another"]


def test_columns_and_template(tmp_path):
    name = write(tmp_path / "d.jsonl", [{"q": "red", "a": "blue", "n": 1}])
    rows = texts.read(name, "prompt", {"prompt": "q", "completion": "a"})
    assert rows.rows == [{"prompt": "red", "completion": "blue"}]
    rows = texts.read(name, "classification", {"text": "q", "label": "n"}, template="{text} was")
    assert rows.rows == [{"prompt": "red was", "completion": " 1", "label": "1"}] and rows.labels == ["1"]


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ('{"a": 1}\n{', "d.jsonl", "line 2 is not JSON"),
        ('{"a": 1}', "d.jsonl", r"fit no format.*prompt: prompt, completion"),
        ('{"prompt": "x", "completion": null}', "d.jsonl", "row 1: no completion"),
        ('{"messages": "hello"}', "d.jsonl", "a list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "d.jsonl", "no message of the assistant"),
        ("", "d.jsonl", "holds no rows"),
        ("x", "d.parquet", "data files end in"),
        ('{"a": 1}', "d.json", "a list of rows"),
    ],
)
def test_bad_files(tmp_path, content, name, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        texts.read(str(tmp_path / name))


def test_not_text(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        texts.read(str(tmp_path / "d.txt"))


def test_absent():
    with pytest.raises(FileNotFoundError, match="no data at nothing.csv: give a .jsonl"):
        texts.read("nothing.csv")


# ---------------------------------------------------------------------------------------------- tokens


def encoded(rows, format, max_length=64):
    tokenizer = tiny_tokenizer()
    found = texts.encode(texts.Rows(format, rows), tokenizer, max_length)
    return tokenizer, found


def learned(tokenizer, row) -> list[str]:
    return tokenizer.convert_ids_to_tokens([t for t, label in zip(row["input_ids"], row["labels"]) if label != IGNORED])


def test_completions_are_learned_and_prompts_are_not():
    tokenizer, found = encoded([{"prompt": "question red ?", "completion": " blue"}], "prompt")
    (row,) = found.rows
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["question", "red", "?", "blue", "</s>"]
    assert learned(tokenizer, row) == ["blue", "</s>"] and row["labels"][:3] == [IGNORED] * 3


def test_the_assistant_is_learned():
    tokenizer, found = encoded([{"messages": CHAT}], "chat")
    (row,) = found.rows
    assert learned(tokenizer, row) == ["good", "film", "</s>", "bad", "</s>"]
    assert all(label in (IGNORED, token) for label, token in zip(row["labels"], row["input_ids"]))


def test_a_template_that_rewrites_earlier_turns():
    """Only the last turn stands in the whole conversation as it did when it was written."""
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}"
        "{{ m['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
    )
    (row,) = texts.encode(texts.Rows("chat", [{"messages": CHAT}]), tokenizer, 64).rows
    assert learned(tokenizer, row) == ["bad"]


def test_no_chat_template():
    with pytest.raises(ValueError, match="no chat template"):
        texts.encode(texts.Rows("chat", [{"messages": CHAT}]), tiny_tokenizer(None), 64)


def test_long_rows_lose_their_beginning():
    tokenizer, found = encoded([{"prompt": "red " * 50, "completion": "blue"}], "prompt", 8)
    assert found.cut == 1 and found.longest == 8 and learned(tokenizer, found.rows[0]) == ["blue", "</s>"]
    tokenizer, found = encoded([{"text": "red " * 20}], "text", 8)
    assert [len(r["input_ids"]) for r in found.rows] == [8, 8, 5] and found.cut == 0


def test_nothing_to_learn():
    with pytest.raises(ValueError, match="nothing|anything to learn"):
        encoded([{"text": ""}], "text")


def test_batches():
    rows = [{"input_ids": [3, 4, 5], "labels": [IGNORED, 4, 5]}, {"input_ids": list(range(9)), "labels": list(range(9))}]
    collate = texts.Collator(pad_id=7)
    batch = collate(rows)
    assert batch["input_ids"].shape == (2, 16) and collate.tokens == 12
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert (batch["input_ids"][0, 3:] == 7).all() and (batch["labels"][0, 3:] == IGNORED).all()
    assert batch["labels"].dtype == torch.int64


# ---------------------------------------------------------------------------------------------- options


def test_flags_over_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("model: m\ndataset: d\noutput: o\nlr: 1e-3\nrank: 8\nlora:\n  use_rslora: true\n")
    found = options.gathered({"rank": 4, "steps": None}, tmp_path / "c.yaml")
    assert (found.rank, found.lr, found.batch, found.steps) == (4, 1e-3, 8, None)
    settings = found.lora_settings()
    assert settings["r"] == 4 and settings["use_rslora"] is True and settings["target_modules"] == "all-linear"


def test_resuming_reads_what_the_run_was(tmp_path):
    out = tmp_path / "run"
    options.TrainOptions(model="m", dataset="d", output=str(out), rank=3, columns={"prompt": "q"}).save(out)
    found = options.gathered({"output": str(out), "steps": 7}, None, resume=True)
    assert (found.model, found.rank, found.steps, found.columns) == ("m", 3, 7, {"prompt": "q"})
    with pytest.raises(ValueError, match="no run to resume"):
        options.gathered({"output": str(tmp_path / "other")}, None, resume=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks: 8", "unknown options ranks; known: model, dataset"),
        ("rank: many", "rank must be int, got 'many'"),
        ("rank: true", "rank must be int"),
        ("lr: fast", "lr must be float"),
        ("rank: 0", "rank must be at least 1"),
        ("- a", "holds no 'name: value' lines"),
        ("a: [", "is not YAML"),
        ("a: !!python/object/apply:os.system [echo]", "is not YAML"),
    ],
)
def test_bad_yaml(tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        options.gathered({"model": "m", "dataset": "d", "output": "o"}, tmp_path / "c.yaml")


def test_missing():
    with pytest.raises(ValueError, match="missing: dataset, output"):
        options.gathered({"model": "m"})


# ---------------------------------------------------------------------------------------------- metrics


def test_answers():
    assert metrics.exact_match("The film.", "film") == 1 and metrics.exact_match("films", "film") == 0
    assert metrics.word_f1("a good film", "the good dull film") == pytest.approx(0.8)  # 2 of 2 and 2 of 3 words
    assert metrics.word_f1("", "") == 1 and metrics.word_f1("x", "") == 0
    # the cat sat | the cat is here: common subsequence of 2; precision 2/3, recall 2/4
    assert metrics.rouge_l("The cat sat", "the cat is here") == pytest.approx(4 / 7)
    assert metrics.rouge_l("b a", "a b") == 0.5


def test_labels():
    found, true = ["p", "p", "n", "n"], ["p", "n", "n", "n"]
    assert metrics.accuracy(found, true) == 0.75
    assert metrics.macro_f1(found, true) == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_the_layers_that_an_adapter_was_trained_on_are_known(tmp_path):
    """Without being said again: or every other layer's weights would be missing."""
    from peft_nvfp4.cli._run.models import trained_layers

    assert trained_layers(tmp_path) is None
    for text, layers in (("layers: 4", 4), ("layers: null", None), ("backend: nvfp4", None), ("layers: many", None)):
        (tmp_path / "train.yaml").write_text(text + "\n")
        assert trained_layers(tmp_path) == layers
