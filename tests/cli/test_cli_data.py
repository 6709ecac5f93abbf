"""What the command line reads and how it scores: data files, what is learned of them, options, metrics."""

import json
from pathlib import Path

import pytest
import torch
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama
from safetensors.torch import load_file

from peft_nvfp4.cli._run import options

pytest.importorskip("trl", reason="not run: trl is not installed")
pytest.importorskip("torchmetrics", reason="not run: torchmetrics is not installed")
from peft_nvfp4.cli._run import evaluation, models, texts, training

CHAT = [
    {"role": "user", "content": "red ?"},
    {"role": "assistant", "content": "good film"},
    {"role": "user", "content": "blue ?"},
    {"role": "assistant", "content": "bad"},
]
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user> ' + m['content'] + ' ' }}{% else %}{{ '<bot> ' }}"
    "{% generation %}{{ m['content'] + ' </s> ' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
"""A chat template that says where the assistant's turns are."""


def write(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def content(rows) -> list[dict]:
    return rows.data.remove_columns("place").to_list()


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": CHAT}, "chat"),
        ({"conversations": [{"from": "user", "value": "red ?"}, {"from": "assistant", "value": "good"}]}, "chat"),
        ({"prompt": "question red", "completion": "answer"}, "prompt"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, "prompt"),
        ({"text": "film", "label": 1}, "classification"),
        ({"text": "the film"}, "text"),
    ],
)
def test_formats_are_recognised(tmp_path, row, format):
    rows = texts.read(write(tmp_path / "d.jsonl", [row, row]), limit=1)
    assert rows.format == format and len(rows.data) == 1
    assert rows.conversational is (format == "chat" or not isinstance(row.get("prompt", ""), str))


def test_kinds_of_files(tmp_path):
    row = {"prompt": "a", "completion": "01"}
    (tmp_path / "d.json").write_text(json.dumps([row]))
    (tmp_path / "d.csv").write_text("prompt,completion\na,01\n")
    (tmp_path / "d.tsv").write_text("prompt\tcompletion\na\t01\n")
    texts.read(str(tmp_path / "d.csv")).data.to_parquet(tmp_path / "d.parquet")
    for kind in ("json", "csv", "tsv", "parquet"):
        assert content(texts.read(str(tmp_path / f"d.{kind}"))) == [row], kind
    (tmp_path / "d.txt").write_text("one\nparagraph\n\nanother\n")
    assert [text.strip() for text in texts.read(str(tmp_path / "d.txt")).data["text"]] == ["one\nparagraph", "another"]


def test_columns_and_template(tmp_path):
    name = write(tmp_path / "d.jsonl", [{"q": "red", "prompt": "other", "a": "blue", "n": 1}])
    rows = texts.read(name, "prompt", {"prompt": "q", "completion": "a"})
    assert content(rows) == [{"prompt": "red", "completion": "blue"}]
    rows = texts.read(name, "classification", {"text": "q", "label": "n"}, template="{text} was")
    assert content(rows) == [{"prompt": "red was", "completion": " 1"}] and rows.labels == [" 1"]
    with pytest.raises(ValueError, match="has no column x; it has q, prompt"):
        texts.read(name, columns={"prompt": "x"})


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ('{"a": 1}\n{', "d.jsonl", "d.jsonl, line 2: no JSON .Expecting"),
        ('{"a": 1}', "d.jsonl", r"fit no format.*prompt: prompt, completion"),
        ('{"prompt": "x", "completion": "y"}\n{"prompt": "x", "completion": null}', "d.jsonl", "line 2: no completion"),
        ('{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}', "d.jsonl", "line 1: some values are texts"),
        ('{"messages": "hello"}', "d.jsonl", "line 1: messages is a list of objects"),
        ('{"messages": [{"role": [], "content": 1}]}', "d.jsonl", "line 1: messages is a list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "d.jsonl", "no message of the assistant"),
        ("", "d.jsonl", "d.jsonl holds no rows"),
        ("\udcff\udcfe", "d.txt", "d.txt, line 1: the file is UTF-16: save it as UTF-8"),
        ("x", "d.xml", "data files end in"),
    ],
)
def test_bad_files(tmp_path, content, name, words):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=words):
        texts.read(str(tmp_path / name))


def test_absent():
    with pytest.raises(FileNotFoundError, match="no data at nothing.csv"):
        texts.read("nothing.csv")
    with pytest.raises(FileNotFoundError, match="no data at no/such/set.*give a file that ends in .jsonl"):
        texts.read("no/such/set")


def learned(tokenizer, row) -> list[str]:
    return tokenizer.convert_ids_to_tokens([label for label in row["labels"] if label != evaluation.IGNORED])


@pytest.mark.parametrize(
    ("row", "template", "expected"),
    [
        ({"prompt": "question red ?", "completion": " blue"}, None, [["blue", "</s>"]]),
        ({"text": "the film"}, None, [["the", "film", "</s>"]]),
        ({"text": "red", "label": "good"}, None, [["good", "</s>"]]),
        ({"messages": CHAT}, MARKED, [["good", "film", "</s>", "bad", "</s>"]]),
        ({"messages": CHAT}, "as it is", [["good", "film", "</s>"], ["bad", "</s>"]]),  # a row for each turn
    ],
)
def test_what_is_trained_and_what_is_scored_are_the_same(tmp_path, row, template, expected):
    """TRL's tokens and labels, and those of ``eval``: of a conversation, turn by turn."""
    tokenizer = tiny_tokenizer() if template == "as it is" else tiny_tokenizer(template)
    tiny_llama(vocab_size=64).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    name = write(tmp_path / "d.jsonl", [row])
    given = options.TrainOptions(model=str(tmp_path / "model"), dataset=name, output=str(tmp_path / "out"), rank=2)
    trainer, _ = training._trainer(given, lambda text: None)
    assert [learned(tokenizer, row) for row in trainer.train_dataset] == expected
    scored = evaluation.encode(texts.read(name), trainer.processing_class, 64).values()
    assert sum((learned(tokenizer, row) for row in scored), []) == sum(expected, [])
    if template != MARKED:
        assert [row["input_ids"] for row in scored] == list(trainer.train_dataset["input_ids"])


def test_no_chat_template(tmp_path):
    rows = texts.read(write(tmp_path / "d.jsonl", [{"messages": CHAT}]))
    with pytest.raises(ValueError, match="no chat template: use rows with prompt and completion"):
        evaluation.encode(rows, tiny_tokenizer(None), 64)


def test_long_rows_lose_their_end(tmp_path):
    """One whose prompt alone is too long has nothing to score."""
    tokenizer = tiny_tokenizer()
    rows = texts.read(write(tmp_path / "d.jsonl", [{"prompt": p, "completion": "blue"} for p in ("red " * 50, "red " * 8)]))
    with pytest.raises(ValueError, match="no row of .*d.jsonl has anything to .*within 8 tokens: raise --max-length"):
        evaluation.encode(rows, tokenizer, 8)
    ((number, row),) = evaluation.encode(rows, tokenizer, 9).items()
    assert number == 1 and len(row["input_ids"]) == 9 and learned(tokenizer, row) == ["blue"]


def test_packed_rows_do_not_see_each_other(tmp_path):
    """The first step's loss is that of the rows one by one. FP32 sums in another order, and codes that they move: 1e-2 is ample,
    and rows that see each other differ by more."""
    torch.manual_seed(0)
    tiny_llama(vocab_size=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    name = write(tmp_path / "d.jsonl", [{"text": "the film is good and bad"}, {"text": "red green blue story was"}])
    found = {}
    for packing in (False, True):
        given = options.TrainOptions(
            model=str(tmp_path / "model"), dataset=name, output=str(tmp_path / f"{packing}"), steps=1, batch=2, packing=packing
        )
        found[packing] = training.run(given, say=lambda text: None).loss
    assert found[True] == pytest.approx(found[False], rel=1e-4)


def test_flags_over_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("model: m\ndataset: d\noutput: o\nlr: 1e-3\nrank: 8\nlora:\n  use_rslora: true\n")
    found = options.gathered({"rank": 4, "steps": None}, tmp_path / "c.yaml")
    assert (found.rank, found.lr, found.batch, found.steps) == (4, 1e-3, 8, None)
    config = options.adapter_config(found)
    assert config.r == 4 and config.use_rslora is True and config.target_modules == "all-linear" and config.backend == "nvfp4"
    found.targets, found.backend = "q_proj, v_proj", "nf4"
    assert options.adapter_config(found).target_modules == {"q_proj", "v_proj"} and options.adapter_config(found).backend == "nf4"


def test_the_file_with_qloras_own_settings():
    """Of the paper: rank, alpha, dropout, optimizer, rate, schedule, clipping and rows of a step; a flag changes the format."""
    file = Path(__file__).parents[2] / "examples" / "qlora.yaml"
    found = options.gathered({"model": "m", "dataset": "d", "output": "o", "backend": "nvfp4"}, file)
    config = options.adapter_config(found)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (64, 16, 0.1, "all-linear")
    assert config.backend == "nvfp4"
    arguments = training._arguments(found, torch.device("cpu"), assistant_only_loss=False, scored=False)
    assert (arguments.optim, arguments.learning_rate, arguments.lr_scheduler_type) == ("paged_adamw_32bit", 2e-4, "constant")
    assert (arguments.max_grad_norm, arguments.adam_beta2, arguments.warmup_steps, arguments.max_steps) == (0.3, 0.999, 0, 1875)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 16


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
        ("ranks: 8", "unknown options:? ranks; known: model, dataset.*Leave the others out"),
        ("rank: many", "rank must be int, got 'many'"),
        ("rank: true", "rank must be int"),
        ("lr: fast", "lr must be float"),
        ("rank: 0", "rank must be at least 1"),
        ("warmup: 5", "warmup is a share of the steps"),
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


def test_the_layers_that_an_adapter_was_trained_on_are_known(tmp_path):
    """Without being said again: or every other layer's weights would be missing."""
    assert models.trained_layers(tmp_path) is None
    for text, layers in (("layers: 4", 4), ("layers: null", None), ("backend: nvfp4", None), ("layers: many", None)):
        (tmp_path / "train.yaml").write_text(text + "\n")
        assert models.trained_layers(tmp_path) == layers


def test_answers():
    """Means of two rows: "The film." is "film" to SQuAD's scorer; "a good film" has 2 of 2 and 2 of 3 words of the other. ROUGE-L
    looks at all words: the common subsequences are 1 of 2 and 1 words, and "good film" of 3 and 4."""
    found = evaluation._answer_scores(["The film.", "a good film"], ["film", "the good dull film"])
    assert found == pytest.approx({"exact_match": 0.5, "f1": (1 + 0.8) / 2, "rouge_l": (2 / 3 + 4 / 7) / 2})
    assert evaluation._answer_scores(["films"], ["film"])["exact_match"] == 0


def test_labels():
    found, true = [" p", " p", " n", " n"], [" p", " n", " n", " n"]
    scores = evaluation._label_scores(found, true, [" p", " n", " never"])
    assert scores == pytest.approx({"accuracy": 0.75, "macro_f1": (2 / 3 + 4 / 5) / 2})
    assert evaluation._label_scores([" p"], [" p"], [" p"]) == {"accuracy": 1.0, "macro_f1": 1.0}


# ---------------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("settings", [{"steps": 1}, {"steps": 1, "trainer": {"warmup_steps": 10}}])
def test_a_warm_up_leaves_the_last_step(tmp_path, settings):
    """The adapter of a short run has learned something."""
    tiny_llama(vocab_size=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    name = write(tmp_path / "d.jsonl", [{"text": "the film is good and bad"}])
    given = options.TrainOptions(model=str(tmp_path / "model"), dataset=name, output=str(tmp_path / "out"), **settings)
    training.run(given, say=lambda text: None)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(t.abs().max() > 0 for key, t in adapter.items() if "lora_B" in key)
