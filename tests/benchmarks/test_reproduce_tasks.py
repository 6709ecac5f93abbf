"""The tasks of ``benchmarks/reproduce``: prompts from rows of every source, where the files come from, the tokens that are
trained on, and scores of candidates and of written answers. Rows are made up (:func:`_reproduce.write_rows`)."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _reproduce import Letters, write_rows
from conftest import tiny_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reproduce import encoding, prompts, scoring, sources, tasks, training
from smollm2_reviews import Source


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    write_rows(tmp_path / "reproduce")
    return tmp_path


# ---------------------------------------------------------------------------------------------- prompts, sources


def test_prompt_forms():
    row = {"question": "Is it?", "passage": "A passage.", "label": True}
    item = prompts.boolq(row)
    assert item.context + item.question + item.target == "A passage.\nIs it?\nYes" and item.candidates[item.gold] == "Yes"
    assert (
        prompts.boolq({**row, "label": 0}).target
        == prompts.boolq({"question": "", "passage": "", "answer": "False"}).target
        == "No"
    )
    item = prompts.sentiment("Dull.", False)
    assert item.context + item.question + item.target == "Dull. It was terrible"
    item = prompts.copa("The man fell.", "cause", ("He ran.", "It rained."), 1)
    assert item.question + item.target == "The man fell because it rained."
    item = prompts.winogrande({"sentence": "Ann thanked Bea as _ helped.", "option1": "Ann", "option2": "Bea", "answer": "2"})
    assert item.question + item.target == "Ann thanked Bea as Bea helped." and item.candidates[0] == " Ann helped."
    assert prompts.wic("bank", "a", "b", False).question.endswith("sentences? Yes, No?\na\nb\n")
    item = prompts.arc({"question": "Q?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"})
    assert (item.question, item.target) == ("Question: Q?\nAnswer:", " y")


def test_options_are_read_as_they_are():
    row = {"options": "\nA. one\n. \nB. two words ", "answer": "B. two words"}
    assert prompts.options(row) == ((" one", " two words"), 1)
    with pytest.raises(ValueError, match="not one of the options"):
        prompts.options({**row, "answer": "C. three"})


@pytest.mark.parametrize("name", [n for n, t in tasks.TASKS.items() if t.source == tasks.SOURCE_PACKAGE])
def test_splits_are_disjoint_and_the_same(data, name):
    task = tasks.TASKS[name]
    first, second = task.splits(), task.splits()
    assert first == second and first.train and first.validation and first.test
    groups = [{item.group for item in part} for part in (first.train, first.validation, first.test)]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    for item in (*first.train, *first.test):
        assert item.target.strip() and (not item.candidates or item.candidates[item.gold] == item.target)
    if name == "boolq":
        assert len(first.test) == 8 and len(first.train) + len(first.validation) == 22  # the official split; unlabelled: gone
    if name == "wic":
        assert {item.target for item in first.train} == {"Yes", "No"}


def test_hub_tasks_read_the_original_columns(monkeypatch):
    rows = {
        "sst2": {"sentence": "fine ", "label": 1},
        "rte": {"sentence1": "a", "sentence2": "b", "label": 0},
        "boolq": {"passage": "p", "question": "q", "label": 1},
        "wsc.fixed": {"text": "t", "span1_text": "s1", "span2_text": "s2", "label": 1},
        "wic": {"word": "w", "sentence1": "a", "sentence2": "b", "label": 1},
        "copa": {"premise": "p.", "question": "effect", "choice1": "X", "choice2": "Y", "label": 0},
        "winogrande_xl": {"sentence": "_ won", "option1": "A", "option2": "B", "answer": "1"},
        "ARC-Easy": {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"},
        "ARC-Challenge": {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
        None: {"context": "c", "question": "q", "answers": {"text": ["a", "a", "b"]}, "dialogue": "d", "summary": "s"},
        "main": {"question": "q", "answer": "2+2=4\n#### 4"},
    }
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        numbered = [
            {
                k: f"{v} {i}"
                if k in ("sentence", "sentence1", "question", "text", "word", "premise", "context", "dialogue")
                and v != "effect"
                and config != "copa"
                else v
                for k, v in rows[config].items()
            }
            for i in range(9)
        ]
        return numbered if split == "train" else numbered[:2]

    monkeypatch.setattr(sources, "from_hub", load)
    for task in tasks.TASKS.values():
        if task.source == tasks.SOURCE_HUB:
            train, test = task.load()
            assert len(train) == 9 and len(test) == 2 and all(item.target for item in train)
    assert ("glue", "sst2", "validation") in asked and ("ai2_arc", "ARC-Easy", "test") in asked
    squad = tasks.TASKS["squad"].load()[0][0]
    assert squad.references == ("a", "b") and squad.context == "Context: c 0"


def test_a_damaged_or_other_package_is_refused(data, monkeypatch):
    (data / "other-1.tar.gz").write_bytes(packed := _archive({"pkg/data/rows.jsonl": b'{"a": 1}\n'}))
    file = sources.File(Source("other==1", "other-1.tar.gz", ("data/rows.jsonl",)), hashlib.sha256(b'{"a": 1}\n').hexdigest())
    monkeypatch.setattr(sources, "FILES", {"rows.jsonl": file})
    sources.fetch(["rows.jsonl"])
    assert sources.read("rows.jsonl") == [{"a": 1}] and packed
    (data / "reproduce" / "rows.jsonl").unlink()
    monkeypatch.setattr(sources, "FILES", {"rows.jsonl": sources.File(file.source, "0" * 64)})
    with pytest.raises(RuntimeError, match="expected 0000"):
        sources.fetch(["rows.jsonl"])
    with pytest.raises(FileNotFoundError, match="--fetch FOLDER"):
        sources.path_of("rows.jsonl")


def _archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_wordnet_from_a_debian_package(data):
    noun = (
        '  1 a licence\n00001740 03 n 02 bank 0 river_bank 0 001 @ 1 n 0000 | land; "they sat on the bank"; "a river bank here"\n'
        '00001741 03 n 01 bank 1 000 | a firm; "the bank lends money"; "too short"\n'
    )
    files = {f"./usr/share/wordnet/data.{part}": noun.encode() if part == "noun" else b"" for part in sources.PARTS}
    tar = _archive(files)
    ar = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.gz", tar)):
        head = f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n"
        ar += head.encode() + content + b"\n" * (len(content) % 2)
    (data / "wordnet-base_1.deb").write_bytes(ar)
    (data / "reproduce" / sources.EXAMPLES).unlink()
    if Path("/usr/share/wordnet/data.noun").is_file():
        pytest.skip("this machine has WordNet itself")
    sources.fetch([sources.EXAMPLES])
    rows = sources.examples()
    assert ("noun00001740", "river bank", "a river bank here") in rows and (
        "noun00001741",
        "bank",
        "the bank lends money",
    ) in rows
    assert len(rows) == 4  # "bank" is in three sentences; "too short" has two words


def test_the_bundle_holds_what_the_tasks_need(data, tmp_path, monkeypatch):
    sources.bundle(tmp_path / "b.tar.gz")
    before = {name: task.splits() for name, task in tasks.TASKS.items() if task.source == tasks.SOURCE_PACKAGE}
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path / "elsewhere"))
    assert {name: tasks.TASKS[name].splits() for name in before} == before
    assert len(sources.read("boolq_combined.jsonl")) == 22


# ---------------------------------------------------------------------------------------------- encoding, scoring


def test_encoding_marks_the_targets_tokens():
    task = SimpleNamespace(kind=tasks.SCORED, length=16, answer=4, name="x")
    item = prompts._choice("abcdefghijklmnop", "QR", (" n", " yes"), 1, "")
    made = encoding.training_set([item, prompts._choice("a", "Q", (" n", " toolong"), 1, "")], task, Letters())
    ids = Letters()("abcdefghijQR yes").input_ids
    assert len(made) == 1 and made.ids.tolist() == [ids]  # the context lost its end; the target that is too long is left out
    at = encoding.supervised(made.at, made.labels, 16)
    assert at.label.tolist() == ids[12:] and at.place.tolist() == [11, 12, 13, 14] and at.owner.tolist() == [0] * 4
    order = encoding.order(5, 4, 3, seed=1)
    assert order.shape == (4, 3) and sorted(order.flatten()[:5].tolist()) == list(range(5))
    assert torch.equal(order, encoding.order(5, 4, 3, seed=1)) and not torch.equal(order, encoding.order(5, 4, 3, seed=2))


def direct(model, prompt: list[int], target: list[int]) -> float:
    """Mean nll of a target, computed alone."""
    ids = torch.tensor([prompt + target])
    logs = model(ids).logits[0].float().log_softmax(-1)
    return -sum(logs[len(prompt) - 1 + i, t].item() for i, t in enumerate(target)) / len(target)


@pytest.mark.parametrize("single", [True, False])
def test_candidates_are_scored_by_their_mean_likelihood(single):
    model = tiny_llama().eval()
    trainee = training.Trainee(model, Letters())
    task = SimpleNamespace(kind=tasks.SCORED, length=32, answer=8, name="x")
    candidates = (("N", "Y"),) * 5 if single else [(" a", f" bc{i}", " defg") for i in range(5)]
    items = [
        prompts._choice(f"context {i} " * (1 + i % 2), "?", c, i % 2, "", "odd" if i % 2 else "even")
        for i, c in enumerate(candidates)
    ]
    made = scoring.scored_set(items, task, Letters(), "cpu")
    assert (made.choices is not None) == single
    found = training.finish(scoring.score(trainee, made))
    nll, hits, chosen = [], [], []
    with torch.no_grad():
        for item in items:
            longest = max(len(c) for c in item.candidates)
            prompt = encoding.prompt_ids(item, Letters(), 32 - longest)
            each = torch.tensor([direct(model, prompt, Letters()(c).input_ids) for c in item.candidates])
            nll.append(each[item.gold].item())
            hits.append(float(each.argmin() == item.gold))
            chosen.append(-(-each).log_softmax(0)[item.gold].item())
    assert found["nll"] == pytest.approx(sum(nll) / 5, abs=1e-4) and found["accuracy"] == pytest.approx(sum(hits) / 5)
    assert found["choice_nll"] == pytest.approx(sum(chosen) / 5, abs=1e-4)
    assert found["subsets"]["odd"]["nll"] == pytest.approx((nll[1] + nll[3]) / 2, abs=1e-4)


def test_batches_of_scoring_are_bounded(monkeypatch):
    """All candidates once; batches of one of two shapes, whatever is in them."""
    monkeypatch.setattr(scoring, "TOKENS", 96)
    monkeypatch.setattr(scoring, "POSITIONS", 20)
    task = SimpleNamespace(kind=tasks.SCORED, length=32, answer=8, name="x")
    items = [prompts._choice("c" * (i % 7) * 3, "?", (" a", " bcd"), 0, "") for i in range(9)]
    made = scoring.scored_set(items, task, Letters(), "cpu")
    pairs = [(r, c) for b in made.batches for r, c in zip(b.rows.tolist(), b.candidates.tolist())]
    assert sorted(pairs) == [(r, c) for r in range(9) for c in range(2)] and len(made.batches) > 3
    assert {tuple(b.ids.shape) for b in made.batches} == {(6, 16), (3, 32)} and {len(b.place) for b in made.batches} == {20}
    assert all(len(b.owner) == (b.label != -100).sum() for b in made.batches)
    assert [scoring.rows_of(16, n) for n in (1, 3, 5, 99)] == [1, 4, 6, 6]


def test_metrics_of_answers():
    assert scoring.METRICS["exact_match"]("9 apples.", "9 Apples") == 1 and scoring.METRICS["exact_match"]("9", "9 apples") == 0
    assert scoring.last_number("so 2 + 2 = 4", "2+2 #### 4") == 1 and scoring.last_number("none", "4") == 0
    assert scoring.last_number("1,000", "it is 1000.0") == 1
