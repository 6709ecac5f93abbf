"""The accuracy tables of ``benchmarks/reproduce`` on a tiny random model and rows made here."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _tiny_models import save_tiny
from conftest import tiny_llama

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from reproduce import (
    ablations,
    accuracy,
    encoding,
    jobs,
    long_run,
    methods,
    prompts,
    recording,
    runner,
    scoring,
    sources,
    summaries,
    tasks,
    training,
    worker,
)

from peft_nvfp4 import branches
from peft_nvfp4.data import Source

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
WORDS = "good bad fine awful great dull red blue green film story".split()


def lettered(options: list[str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip("ABCDE", options))


def write_rows(folder: Path, rows: int = 30) -> None:
    """All files of the sources, with made-up rows; no two of a group are alike."""
    folder.mkdir(parents=True)
    put = lambda name, items: (folder / name).write_text("\n".join(json.dumps(item) for item in items))
    texts = [f"the {WORDS[i % 11]} story {i}" for i in range(rows)]
    (folder / "movies.txt").write_text("\n".join(f"{i}\t{2 if i % 2 else -2}\t{t}" for i, t in enumerate(texts)))
    yes_no = [{"question": f"is it {t}", "passage": f"{t} . " * 40, "label": i % 3 == 0} for i, t in enumerate(texts)]
    put("boolq_combined.jsonl", [*yes_no, {"question": "is it unlabelled", "passage": "no"}])
    put("boolq_dev.jsonl", [{"question": r["question"], "passage": r["passage"], "answer": "True"} for r in yes_no[:8]])
    for name, count in (("piqa", 2), ("siqa", 3), ("commonsenseqa", 5), ("openbookqa", 4), ("disambiguation_qa", 3)):
        choices = [[f"{WORDS[(i + c) % 11]} {'film ' * c}{i}" for c in range(count)] for i in range(rows)]
        found = [{"question": f"{name} {t} ?", "options": lettered(c), "answer": f"B. {c[1]}"} for t, c in zip(texts, choices)]
        put(f"{name}.jsonl", [*found, {"question": "?", "options": "A. x\nB. y", "answer": "C. z"}])
    put("asdiv.jsonl", [{"passage": t, "question": "how many ?", "answer": f"{i} red"} for i, t in enumerate(texts)])
    put("disfl_qa.jsonl", [{"passage": t + " .", "question": "what ?", "answer": t.split()[1]} for t in texts])
    put("xsum.jsonl", [{"document": f"{t} " * 30, "summary": t} for t in texts])
    (folder / "alpaca.json").write_text(json.dumps([{"instruction": t, "input": "", "output": t[::-1]} for t in texts]))
    with open(folder / "mts_dialog.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["ID", "section_header", "section_text", "dialogue"], *([i, "", t, t] for i, t in enumerate(texts))]
        )
    lines = []
    for lemma in range(rows):
        lines += [f"noun{lemma}{sense}\tword{lemma}\tthe word{lemma} is {sense} {k}" for sense in "ab" for k in range(2)]
    (folder / sources.EXAMPLES).write_text("\n".join(lines))
    long = [" ".join(WORDS[(i + j) % 11] for j in range(60)) for i in range(30)]
    put("c4_demo.jsonl", [{"text": t} for t in long])
    (folder / "wiki_demo.txt").write_text("\n".join(f"again {t}" for t in long))


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    write_rows(tmp_path / "reproduce")
    return tmp_path


@pytest.fixture
def model(tmp_path):
    return save_tiny(tmp_path / "model")


@pytest.fixture
def shop(tmp_path, model):
    return methods.Workshop(tmp_path / "work", "cpu", samples=6, length=32, shipped=model)


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


class Letters:
    """A token is a letter's number."""

    eos_token_id, pad_token_id = 1, 1

    def __call__(self, text, add_special_tokens=False):
        read = lambda text: [2 + ord(c) % 100 for c in text]
        return SimpleNamespace(input_ids=read(text) if isinstance(text, str) else [read(t) for t in text])


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


# ---------------------------------------------------------------------------------------------- training


def losses(trainee, data, seed, steps=3):
    nothing = lambda t: (yield from ()) or {}
    return training.finish(training.train(trainee, data, training.Recipe(1e-2, seed, steps, 2, curve=steps), nothing))["curve"]


@pytest.mark.parametrize("name", ["bf16", "paper", "balanced_gptq"])
def test_an_adapter_reset_in_place_trains_like_a_fresh_one(data, shop, name):
    task, method = tasks.TASKS["commonsense"], methods.METHODS[name]
    if method.calibration:
        shop.calibrate(methods.SHIPPED, method.calibration, [" ".join(WORDS * 3)] * 30)
    used, fresh = (shop.trainee(method, methods.SHIPPED) for _ in range(2))
    rows = encoding.training_set(task.splits().train, task, used.tokenizer)
    first = losses(used, rows, seed=1)
    scoring_set = scoring.Evaluation.of(task.splits().test, task, used.tokenizer, "cpu")
    training.finish(scoring_set.run(used))
    again, anew = losses(used, rows, seed=0), losses(fresh, rows, seed=0)
    assert again["loss"] == anew["loss"] and again["gradient_norm"] == anew["gradient_norm"]
    assert first["loss"] != again["loss"] and again["loss"][0] != again["loss"][2]
    assert losses(used, rows, seed=1)["loss"] == first["loss"]


def test_training_is_plain_adamw(data, shop):
    """Against a loop written out: the model's own loss over labels, PEFT's initial values, the same schedule."""
    task = tasks.TASKS["commonsense"]
    trainee = shop.trainee(methods.METHODS["bf16"], methods.SHIPPED)
    rows = encoding.training_set(task.splits().train, task, trainee.tokenizer)
    curve = losses(trainee, rows, seed=0, steps=4)
    other = shop.trainee(methods.METHODS["bf16"], methods.SHIPPED)
    training.reset(other.model, 0)
    bounds = [(p.abs().max().item(), p.shape[1] ** -0.5) for n, p in other.model.named_parameters() if "lora_A" in n]
    assert all(0.9 * bound < largest <= bound for largest, bound in bounds)
    optimizer = torch.optim.AdamW(other.parameters, weight_decay=0.0)
    seen = []
    for step, index in enumerate(encoding.order(len(rows), 4, 2, 0)):
        labels = torch.full_like(rows.ids[index], -100)
        for row, i in enumerate(index):
            where = rows.labels[i] != -100
            labels[row, rows.at[i][where] + 1] = rows.labels[i][where]
        loss = other.model(input_ids=rows.ids[index], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters, 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 1, (4 - step) / 3)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    # BF16 logits of single positions against those of all: two roundings of 2^-9 of losses near 4
    assert curve["loss"] == pytest.approx(seen, abs=0.03)


def in_fp32(name="paper", **config) -> training.Trainee:
    """A tiny FP32 model with an adapter."""
    method = methods.METHODS[name].changed("x", "", **config) if config else methods.METHODS[name]
    return methods.adapt(tiny_llama().requires_grad_(False), Letters(), method, Path(), graphs=True)


def made_up_rows(rows: int = 12, length: int = 16, answer: int = 3) -> encoding.Encoded:
    """Of random tokens, all with targets of one length."""
    ids = torch.randint(1, 100, (rows, length), generator=torch.Generator().manual_seed(5))
    at = torch.arange(length - answer - 1, length - 1).repeat(rows, 1)
    return encoding.Encoded(ids, at, ids.gather(1, at + 1))


@pytest.mark.parametrize("name", ["bf16", "paper"])
def test_a_step_over_static_tensors_is_the_plain_step(name):
    """Bit for bit in FP32: rows by indexing, a learning rate that is a number, a new optimizer, no buffers. Its one concession is
    that numbers are rounded to FP32 as the optimizer's kernel does on a GPU."""
    rows, recipe = made_up_rows(), training.Recipe(1e-2, 3, steps=5, batch=4, clip=0.5, curve=5)
    used, plain = in_fp32(name), in_fp32(name)
    nothing = lambda t: (yield from ()) or {}
    training.finish(training.train(used, rows, training.Recipe(2e-2, 9, steps=3, batch=4, clip=0.5)))
    curve = training.finish(training.train(used, rows, recipe, nothing))["curve"]
    training.reset(plain.model.train(), 3)
    optimizer = torch.optim.AdamW(plain.parameters, weight_decay=0.0, fused=True)
    seen, norms = [], []
    for step, index in enumerate(encoding.order(len(rows), 5, 4, 3)):
        at = encoding.supervised(rows.at[index], rows.labels[index], 16)
        base = plain.model.get_base_model()
        hidden = base.model(input_ids=rows.ids[index], use_cache=False).last_hidden_state
        loss = torch.nn.functional.cross_entropy(base.lm_head(hidden.flatten(0, 1)[at.place]), at.label, reduction="none")
        (loss.sum() / len(loss)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters, 0.5).item())
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2 * min(step + 1, (5 - step) / 4)).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.sum() / len(loss)).item())
    assert curve["loss"] == seen and curve["gradient_norm"] == norms and len(set(seen)) == 5
    assert max(norms) > 0.5  # clipped
    assert all(map(torch.equal, used.parameters, plain.parameters))


def test_positions_without_a_label_count_nothing():
    rows = made_up_rows()
    rows.labels[::2, 1:] = -100
    other = encoding.Encoded(rows.ids, rows.at.clone(), rows.labels)
    other.at[rows.labels == -100] = 0
    curves = [losses(in_fp32("bf16"), r, seed=0)["loss"] for r in (rows, other)]
    assert curves[0] == curves[1]
    trainee = in_fp32("bf16")
    training.reset(trainee.model, 0)
    (index,) = encoding.order(len(rows), 1, 2, 0)
    at = encoding.supervised(rows.at[index], rows.labels[index], 16)
    mean = training.token_losses(trainee.model, rows.ids[index], at.place, at.label).mean()
    assert curves[0][0] == pytest.approx(mean.item(), rel=1e-6)  # sums in another order


class Rehearsal:
    """A recording on a CPU: runs again what was recorded, with seeds from the places that the tape gave them, and finds as a
    replay would what was made anew instead of written in place."""

    def __init__(self, run):
        run()
        self.run, self.tapes = run, list(branches._TAPES)

    def __call__(self):
        for tape in self.tapes:
            order = iter(range(len(tape.places)))
            tape.draw = lambda tape=tape, order=order: tape.buffer[next(order)].clone()
            branches._TAPES.append(tape)
        places = [dict(tape.places) for tape in self.tapes]
        try:
            self.run()
        finally:
            for tape, before in zip(self.tapes, places):
                branches._TAPES.pop()
                del tape.draw
                tape.places = before


@pytest.fixture
def rehearsed(monkeypatch):
    monkeypatch.setattr(recording.Piece, "recorder", Rehearsal)
    monkeypatch.setattr(recording, "_obstacle", lambda device: None)


@pytest.mark.parametrize("gradients", ["nvfp4", "nvfp4_sr"])
def test_replayed_steps_are_those_from_python(gradients, monkeypatch):
    """With stochastic rounding from the same seeds, run after run, and the generator where it would be."""
    rows, found = made_up_rows(), []
    for replayed in (False, True):
        with monkeypatch.context() as patch:
            if replayed:
                patch.setattr(recording.Piece, "recorder", Rehearsal)
                patch.setattr(recording, "_obstacle", lambda device: None)
            trainee = in_fp32("paper", gradients=gradients)
            curves = [losses(trainee, rows, seed) for seed in (1, 0)]
            found.append([(c["loss"], c["gradient_norm"]) for c in curves] + [torch.rand(2).tolist()])
            assert trainee.replays() == (6 if replayed else 0)
            assert (trainee.step.seeds is not None) == (replayed and gradients == "nvfp4_sr")
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_a_step_that_cannot_be_recorded_is_done_from_python(monkeypatch, capsys):
    def refuses(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    rows = made_up_rows()
    expected = losses(in_fp32(), rows, seed=0)
    monkeypatch.setattr(recording, "_obstacle", lambda device: None)
    monkeypatch.setattr(recording.Piece, "recorder", staticmethod(refuses))
    trainee = in_fp32()
    assert losses(trainee, rows, seed=0) == expected
    assert "operation not permitted" in trainee.step.piece.why_not
    assert "not recorded: RuntimeError: operation not permitted" in capsys.readouterr().out


def test_one_recording_serves_all_runs_and_splits_of_a_task(data, shop, rehearsed):
    task = tasks.TASKS["asdiv"]
    trainee = shop.trainee(methods.METHODS["bf16"], methods.SHIPPED)
    plain = shop.trainee(methods.METHODS["bf16"], methods.SHIPPED)
    plain.graphs = False
    splits = task.splits()
    rows = encoding.training_set(splits.train, task, trainee.tokenizer)
    sets = [scoring.Evaluation.of(s[:8], task, trainee.tokenizer, "cpu") for s in (splits.validation, splits.test)]
    steps, results = [], []
    for t in (trainee, plain):
        for seed in (0, 1):
            losses(t, rows, seed)
            steps.append(t.step)
            results.append([training.finish(s.run(t)) for s in sets])
    assert steps[0] is steps[1] and steps[0].piece.played == 6 and steps[2].piece.played == 0
    assert results[:2] == results[2:] and results[0] != results[1] and "exact_match" in results[0][0]
    assert 2 <= len(trainee.pieces) <= scoring.PIECES and all(r.piece.played > 0 for r in trainee.pieces.values())
    trainee.forget_recordings()
    assert trainee.step is None and not trainee.pieces


def test_answers_are_those_of_generate():
    """Greedy without a cache, padding on the right, as transformers writes with a cache, every row alone."""
    trainee = in_fp32("bf16")
    model = trainee.model.eval()
    rows = [torch.randint(3, 100, (4 + 3 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(5)]
    writer = scoring.Writer(trainee, (5, 32))
    writer.ids.copy_(torch.tensor([row + [0] * (32 - len(row)) for row in rows]))
    writer.ends.copy_(torch.tensor([len(row) for row in rows]))
    for _ in range(12):
        writer.piece()
    for row, written in zip(rows, writer.ids.tolist()):
        alone = model.generate(
            input_ids=torch.tensor([row]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert written[: len(row) + 12] == alone[0].tolist()
    words = SimpleNamespace(eos_token_id=1, decode=lambda tokens, **_: " " + "".join("ab\n"[t - 2] for t in tokens))
    assert scoring._text([3, 2, 4, 2, 1, 3], words) == "ba" and scoring._text([3, 1, 2], words) == "b"


@pytest.mark.parametrize("method", {m.name: m for b in ablations.VARIANTS.values() for m in b}.values(), ids=lambda m: m.name)
def test_every_variant_of_the_ablations_is_one_that_the_package_has(shop, method):
    if method.config["backend"] == "nf4":
        pytest.importorskip("bitsandbytes")
    if method.calibration:
        shop.calibrate(methods.SHIPPED, method.calibration, [" ".join(WORDS * 3)] * 30)
    trainee = shop.trainee(method, methods.SHIPPED)
    ids = torch.randint(5, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    at = encoding.supervised(torch.tensor([[3, 8]] * 2), torch.tensor([[7, 9]] * 2), 12)
    trainee.model.train()
    training.token_losses(trainee.model, ids, at.place, at.label).mean().backward()
    gradients = [p.grad for n, p in trainee.model.named_parameters() if "lora_B" in n]
    assert gradients and all(g is not None and torch.isfinite(g).all() for g in gradients)
    if "last" in method.name:
        kept = [n for n, m in trainee.model.named_modules() if type(m) is torch.nn.Linear and n.endswith("base_layer")]
        assert len(kept) == (14 if "first" in method.name else 7)


def test_weights_only_is_w4a16(shop):
    """NVFP4 weights, exact activations: the dense model with the frozen one's dequantised weights."""
    from peft_nvfp4 import freeze_model
    from peft_nvfp4.freeze import dequantize_model

    method = methods.METHODS["w4a16_gptq"].changed("nearest", "", calibration=None)
    trainee = shop.trainee(method, methods.SHIPPED)
    dense = dequantize_model(freeze_model(shop.load(methods.SHIPPED)[0], accuracy="paper", progress=False))
    ids = torch.arange(5, 25)[None]
    training.reset(trainee.model, 0)
    with torch.no_grad():
        assert torch.equal(trainee.model(ids).logits, dense(ids).logits)
    assert not torch.equal(dense(ids).logits, shop.load(methods.SHIPPED)[0](ids).logits)


def test_rotated_weights_are_the_same_function(shop):
    shop.prepare(methods.ROTATED)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        one, two = (shop._load(name, torch.float32)[0](ids).logits for name in methods.WEIGHTS)
    assert not torch.equal(one, two)
    assert (one - two).norm() < 0.05 * one.norm()  # the rotated ones were rounded to BF16: 2^-9 a weight


# ---------------------------------------------------------------------------------------------- the board


def group(**k) -> jobs.Group:
    return jobs.Group(**{**dict(table="accuracy", task="sentiment", weights="shipped", method=methods.METHODS["bf16"]), **k})


def run_of(g: jobs.Group, kind: str, lr, seed, **found) -> dict:
    return dict(zip(jobs.KEY, g.key(kind, lr, seed))) | {"label": g.method.label, "finite": True} | found


def test_the_learning_rate_is_that_of_the_least_validation_loss():
    g, runs = group(), jobs.Runs()
    assert jobs.chosen_lr(g, runs) is None
    for lr, nll in zip(jobs.GRID, (0.5, 0.3, 0.4)):
        runs.add(run_of(g, "sweep", lr, 100, validation_nll=nll))
    assert jobs.chosen_lr(g, runs) == 7e-4
    runs.add(run_of(g, "sweep", 7e-4, 100, validation_nll=0.3, finite=False))
    assert jobs.chosen_lr(g, runs) is None  # the largest is best now: one more is tried
    runs.add(run_of(g, "sweep", jobs.BEYOND, 100, validation_nll=0.6))
    assert jobs.chosen_lr(g, runs) == 1.5e-3
    assert jobs.chosen_lr(group(lrs=(1e-4,)), runs) == 1e-4
    assert jobs.chosen_lr(group(steps=100), runs) is None  # other steps: other runs


def test_claims_are_exclusive_and_come_back_once(tmp_path):
    board, g = jobs.Board(tmp_path), group()
    board.publish([g], [])
    assert board.claim(g, "w0/0") and not board.claim(g, "w1/0")
    assert board.give_back("w1") == 0 and board.give_back("w0") == 1
    assert board.claim(g, "w1/0") and board.give_back("w1") == 1
    assert not board.claim(g, "w2/0") and len(board.failures()) == 2  # it has failed twice
    board.publish([g], [])
    assert board.claim(g, "w2/0") and not board.failures()
    board.record("w2", run_of(g, "final", 1e-3, 0))
    with open(tmp_path / "runs" / "w2.jsonl", "a") as file:
        file.write('{"table": "accuracy", "subsets": {"a": 1}')  # killed while writing
    runs = board.runs()
    assert len(runs.rows) == 1 and runs.left(g)
    for seed in range(1, 5):
        board.record("w3", run_of(g, "final", 1e-3, seed))
    assert not board.runs().left(g) and board.runs().left(group(seeds=(0, 9)))


def test_a_plan_is_json_and_comes_back_the_same(tmp_path):
    plan = [*ablations.groups(tmp_path), *long_run.groups(), group(rows=8, lrs=(1e-3,))]
    jobs.Board(tmp_path).publish(plan, [])
    assert json.loads((tmp_path / "plan.json").read_text())[0]["task"] == plan[0].task
    again = jobs.Board(tmp_path).plan()
    assert again == plan and [g.name for g in again] == [g.name for g in plan]
    assert any(isinstance(g.method.config.get("skip_modules"), tuple) for g in again)


def test_publishing_keeps_what_the_folder_has(tmp_path, monkeypatch):
    board, g = jobs.Board(tmp_path), group()
    board.publish([g], [run_of(g, "final", 1e-3, 0, nll=1.0)])
    board.record("w0", run_of(g, "final", 1e-3, 1, nll=2.0))
    board.record("w0", run_of(g, "final", 1e-3, 0, nll=3.0))
    with monkeypatch.context() as patch:  # killed when the new file was not there yet
        patch.setattr(jobs, "replace_text", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            board.publish([g], [])
    assert len(board.runs().by_key) == 2
    board.publish([g], [])
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["known.jsonl"]
    assert {r["seed"]: r["nll"] for r in board.runs().rows} == {0: 3.0, 1: 2.0}


def test_a_lane_stays_with_its_model_among_the_next_tasks(tmp_path, model):
    options = worker.Options(str(tmp_path), "cpu", shipped=str(model))
    board = jobs.Board(tmp_path)
    bf16, paper = methods.METHODS["bf16"], methods.METHODS["paper"]
    plan = [group(task=t, method=m) for t in ("sentiment", "wic", "boolq") for m in (bf16, paper)]
    plan.insert(0, group(method=methods.METHODS["paper_gptq"]))  # not calibrated
    board.publish(plan, [])
    lane, other = (worker.Lane(board, "w", i, options, worker.Shelf("cpu"), options.workshop()) for i in (0, 1))
    lane.models["shipped", "paper"] = None
    taken = [(g.task, g.method.name) for g in (lane.next_group(), lane.next_group(), other.next_group(), lane.next_group())]
    # wic's is near, boolq's comes only when sentiment's other method is taken
    assert taken == [("sentiment", "paper"), ("wic", "paper"), ("sentiment", "bf16"), ("boolq", "paper")]
    lane.next_group(), lane.next_group()
    assert lane.next_group() is None and [g.method.name for g in lane.free()] == ["paper_gptq"]


def arguments(tmp_path, model, **k) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    args = parser.parse_args(["--small", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--model", str(model)])
    args = runner.settle(args)
    args.calibration, args.layers = (6, 32), None
    vars(args).update(k)
    return args


def test_a_plan_runs_to_the_end_and_not_twice(data, tmp_path, model):
    args = arguments(tmp_path, model)
    chosen = [methods.METHODS[name] for name in ("bf16", "paper_gptq")]
    plan = [group(task=task, method=m, weights=w, sweep_seeds=(7,)) for w in methods.WEIGHTS for task in ("commonsense", "asdiv")
            for m in chosen]  # fmt: skip
    plan = runner.adjusted(plan, args)
    path = runner.Session(plan, args, {"note": 1}).run()["accuracy"]
    content = json.loads(path.read_text())
    assert content["settings"]["note"] == 1 and content["not_finished"] == [] and content["failures"] == []
    kinds = [(r["weights"], r["task"], r["method"], r["kind"]) for r in content["runs"]]
    assert len(kinds) == len(set(kinds)) == 16
    assert all("exact_match" in r for r in content["runs"] if r["task"] == "asdiv")
    assert all(0 <= r["accuracy"] <= 1 and len(r["subsets"]) > 1 for r in content["runs"] if r["task"] == "commonsense")
    again = runner.Session(plan, args, {"note": 2})
    again.run()
    assert json.loads(path.read_text())["runs"] == content["runs"]


def test_lanes_in_turn_and_a_failure_among_them(data, tmp_path, model, monkeypatch):
    """Two lanes find what one finds, and a group that fails costs no other one its results."""
    random = methods.METHODS["paper"].changed("sr", "stochastic", gradients="nvfp4_sr")  # draws from the lane's generator
    chosen = (methods.METHODS["bf16"], random)
    plan = [group(method=m, lrs=(2e-2, 4e-2), sweep_seeds=(7,), seeds=(0, 1)) for m in chosen]
    broken = group(task="asdiv", lrs=(1e-3,), seeds=(0,))
    results = []
    for lanes in (1, 2):
        args = arguments(tmp_path, model, lanes=lanes, out=tmp_path / f"out{lanes}", work=tmp_path / f"work{lanes}")
        steps = (2, 3, 5)  # lanes that do not begin their runs, and set their seeds, at the same moments
        groups = [jobs.Group(**{**vars(g), "steps": n, "batch": 2, "rows": 8}) for n, g in zip(steps, (broken, *plan))]
        original = worker.Shelf.of

        def fails(self, g, tokenizer, original=original):
            if g.task == "asdiv":
                raise ValueError("no such rows")
            return original(self, g, tokenizer)

        monkeypatch.setattr(worker.Shelf, "of", fails)
        content = json.loads(runner.Session(groups, args, {}).run()["accuracy"].read_text())
        monkeypatch.setattr(worker.Shelf, "of", original)
        assert len(content["not_finished"]) == 1 and len(content["failures"]) == 2 and "no such rows" in content["failures"][0]
        drop = ("seconds", "train_s")
        results.append([{k: v for k, v in r.items() if k not in drop} for r in content["runs"]])
    assert results[0] == results[1]
    kinds = [r["kind"] for r in results[0] if r["method"] == "bf16"]
    # the larger of the two rates may win, and one beyond is tried then
    assert kinds.count("final") == 2 and kinds.count("sweep") in (2, 3) and kinds.count("zero_shot") == 1


def test_nothing_is_started_when_the_time_is_over(data, tmp_path, model):
    args = arguments(tmp_path, model, seconds=1e-3)
    content = json.loads(runner.Session(runner.adjusted([group()], args), args, {}).run()["accuracy"].read_text())
    assert content["runs"] == [] and len(content["not_finished"]) == 1


def short_plan(args) -> list[jobs.Group]:
    return runner.adjusted([group(method=methods.METHODS[name]) for name in ("bf16", "paper")], args)


def test_results_are_written_on_the_way(data, tmp_path, model, monkeypatch):
    args = arguments(tmp_path, model, lanes=1)
    monkeypatch.setattr(runner, "EVERY", 0.0)
    seen = []
    write = runner.write_table
    monkeypatch.setattr(runner, "write_table", lambda *a: seen.append(len(json.loads(write(*a).read_text())["runs"])))
    runner.Session(short_plan(args), args, {}).run()
    assert seen == sorted(seen) and {1, 2, 3, 4} <= set(seen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_results_are_written_when_told_to_stop(data, tmp_path, model, monkeypatch, number):
    args = arguments(tmp_path, model, lanes=1)
    before = signal.getsignal(number)
    original = jobs.Board.record

    def stops(self, name, row):
        original(self, name, row)
        if row["kind"] == "final":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(jobs.Board, "record", stops)
    content = json.loads(runner.Session(short_plan(args), args, {}).run()["accuracy"].read_text())
    assert [r["kind"] for r in content["runs"]] == ["final", "zero_shot"] and len(content["not_finished"]) == 1
    assert content["failures"] == [f"stopped by {number.name}"] and signal.getsignal(number) is before
    monkeypatch.setattr(jobs.Board, "record", original)
    args.work = tmp_path / "other"  # what was written is enough
    content = json.loads(runner.Session(short_plan(args), args, {}).run()["accuracy"].read_text())
    assert len(content["runs"]) == 4 and content["not_finished"] == content["failures"] == []


def test_folders_of_killed_sessions_are_merged(data, tmp_path, model):
    args = arguments(tmp_path, model)
    plan = short_plan(args)
    runner.Session(plan, args, {"note": 1}).run()
    (args.out / "accuracy.json").unlink()
    with open(args.work / "runs" / "here.jsonl", "a") as file:
        file.write('{"table": "accu')
    second = jobs.Board(tmp_path / "second")
    second.publish([group(task="wic")], [])
    second.record("w0", run_of(group(task="wic"), "final", 1e-3, 0))
    script = Path(runner.__file__)
    command = [sys.executable, str(script), "--merge", str(args.work), str(tmp_path / "second"), "--out", str(args.out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((args.out / "accuracy.json").read_text())
    assert len(content["runs"]) == 5 and content["settings"]["note"] == 1 and content["environment"]["torch"]
    assert content["not_finished"] == [group(task="wic").name]  # four of its seeds are missing
    runner.merge([args.work], args.out)  # and again: nothing goes, nothing comes twice
    assert len(json.loads((args.out / "accuracy.json").read_text())["runs"]) == 5


def test_a_plan_says_when_what_is_done(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy", "--plan", "--rate", "100", "--tasks", "wic", "boolq"])
    accuracy.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 7 methods, 3 runs of a sweep and 5 that count, 200 steps each: 11200
    assert [line[1:3] for line in lines[:4]] == [[t, w] for t in ("wic", "boolq") for w in ("shipped", "rotated")]
    assert [(line[7], line[9], line[-2]) for line in lines[:2]] == [("11200", "11200", "112"), ("11200", "22400", "224")]
    assert lines[4][:2] == ["28", "groups,"]


@pytest.mark.slow
def test_processes(data, tmp_path, model):
    """With real worker and calibration processes."""
    args = arguments(tmp_path, model, workers=1, gpus=2)
    plan = runner.adjusted([group(method=methods.METHODS[m]) for m in ("paper_gptq", "bf16")], args)
    content = json.loads(runner.Session(plan, args, {}).run()["accuracy"].read_text())
    assert content["not_finished"] == [] and content["failures"] == [] and len(content["runs"]) == 4


@pytest.mark.parametrize("script", ["accuracy", "ablations", "long_run"])
def test_the_commands_print_their_plan(data, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--plan", "--seeds", "2"])
    {"accuracy": accuracy, "ablations": ablations, "long_run": long_run}[script].main()
    out = capsys.readouterr().out
    assert "calibrations:" in out and script in out


def test_long_runs_keep_a_curve(data, tmp_path, model):
    args = arguments(tmp_path, model)
    plan = runner.adjusted(long_run.groups()[:2], args)
    path = runner.Session(plan, args, {}).run()["long_run"]
    runs = json.loads(path.read_text())["runs"]
    assert [len(r["curve"]["loss"]) for r in runs] == [2, 2]
    assert [p["step"] for p in runs[0]["curve"]["held_out"]] == [0, 2] and runs[0]["curve"]["held_out"][0]["subsets"]
    summaries.plot_long_run({"runs": runs}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert summaries.long_run_table({"runs": runs}).count("\n") == 3


def test_a_run_that_is_cut_off_goes_on_as_if_it_never_stopped(data, shop, tmp_path):
    task = tasks.TASKS["commonsense"]
    whole, first, later = (
        shop.trainee(methods.METHODS["paper"].changed("sr", "", gradients="nvfp4_sr"), methods.SHIPPED) for _ in "abc"
    )
    rows, recipe = encoding.training_set(task.splits().train, task, whole.tokenizer), training.Recipe(1e-2, 0, 5, 2, curve=2)
    held_out = lambda t: (yield from ()) or {"first": next(iter(t.parameters)).sum().item()}
    wanted = training.finish(training.train(whole, rows, recipe, held_out))
    asked = iter([False, False, False, True])
    pause = training.Pause(lambda: next(asked), tmp_path / "new" / "run.pt")
    cut = training.finish(training.train(first, rows, recipe, held_out, pause))
    assert cut["steps"] == 3 and cut["curve"]["loss"] == wanted["curve"]["loss"][:3]
    assert [p["step"] for p in cut["curve"]["held_out"]] == [0, 2]
    torch.rand(3)  # somebody else's
    pause = training.Pause(lambda: False, pause.path)
    assert training.finish(training.train(later, rows, recipe, held_out, pause)) == wanted
    assert [p["step"] for p in wanted["curve"]["held_out"]] == [0, 2, 4, 5] and wanted["steps"] == 5
    assert all(map(torch.equal, later.parameters, whole.parameters))


def test_what_was_cut_off_is_in_the_table_until_it_is_whole(data, tmp_path, model, monkeypatch):
    args = arguments(tmp_path, model)
    plan = runner.adjusted(long_run.groups()[:1], args)
    late = iter([False, True])  # before either step
    with monkeypatch.context() as patch:
        patch.setattr(worker, "Pause", lambda _, path: training.Pause(lambda: next(late), path))
        content = json.loads(runner.Session(plan, args, {}).run()["long_run"].read_text())
    assert [(r["steps"], r["planned"]) for r in content["runs"]] == [(1, 2)] and content["not_finished"] == [plan[0].name]
    assert "1 of 2" in summaries.long_run_table(content)
    content = json.loads(runner.Session(plan, args, {}).run()["long_run"].read_text())
    assert [(r["steps"], "planned" in r) for r in content["runs"]] == [(2, False)] and content["not_finished"] == []
    assert content["runs"][0]["curve"]["held_out"][0]["step"] == 0 and content["runs"][0]["commit"]


# ---------------------------------------------------------------------------------------------- summaries


def made_up() -> dict:
    rows = []
    for task, metric in (("sentiment", "accuracy"), ("asdiv", "exact_match")):
        for method, shift in (("bf16", 0.0), ("paper", -0.1)):
            g = group(task=task, method=methods.METHODS[method])
            rows.append(run_of(g, "zero_shot", None, None, nll=2.0, **{metric: 0.25}))
            for seed, noise in enumerate((0.0, 0.02, 0.1)):
                extra = 0.01 * seed if method == "paper" else 0.0
                rows.append(run_of(g, "final", 1e-3, seed, nll=1 - shift, **{metric: 0.5 + shift + noise + extra}))
    return {"runs": rows}


def test_tables_of_accuracy():
    content = made_up()
    table = summaries.accuracy_table(content).splitlines()
    assert table[0] == "| method | sentiment | asdiv | average of 2 |" and table[2] == "| Zero-shot, BF16 | 25.0 | 25.0 | 25.0 |"
    assert "| 52.0 (54.0 ± 5.3, 3) |" in table[3] and table[3].endswith("| 52.0 |")
    mean = summaries.averages(content)["paper"]
    # differences -0.10, -0.09, -0.08: mean -0.09, sd 0.01, se 0.01 / sqrt(3); of two tasks, that over sqrt(2)
    assert mean["difference"] == pytest.approx(-0.09) and mean["se"] == pytest.approx(0.01 / math.sqrt(6))
    assert "| −9.0 ± 0.6 | −9.0 ± 0.6 | −9.0 ± 0.4 |" in summaries.difference_table(content)
    assert "+0.100 ± 0.000" in summaries.difference_table(content, value="nll")
    assert "25.0 (2.000)" in summaries.zero_shot_table(content) and "0.001" in summaries.rate_table(content)
    content["runs"] = [r for r in content["runs"] if (r["task"], r["method"]) != ("asdiv", "paper")]
    assert summaries.accuracy_table(content).splitlines()[0].endswith("average of 1 |")


def test_table_of_ablations(tmp_path):
    rows = []
    for method in (
        methods.METHODS["paper_gptq"],
        methods.METHODS["paper_gptq"].changed("sr", "stochastic", gradients="nvfp4_sr"),
    ):
        g = group(table="ablations", method=method)
        for seed in range(3):
            rows.append(run_of(g, "final", 1e-3, seed, nll=1.0 + 0.1 * (":" in method.name), accuracy=0.5 + 0.1 * seed))
    table = summaries.ablation_table({"runs": rows}).splitlines()
    assert "**itself** | 60.0 | 1.000 | 3" in table[2] and "stochastic | +0.0 ± 0.0 | +0.100 ± 0.000 | 3" in table[3]
    summaries.plot_accuracy(made_up(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_ablations_take_the_accuracy_tables_learning_rates(tmp_path):
    assert {g.lrs for g in ablations.groups(tmp_path) if g.task == "sentiment"} == {(7e-4,)}
    run = run_of(group(method=methods.METHODS["balanced"]), "final", 3e-4, 0)
    (tmp_path / "accuracy.json").write_text(json.dumps({"runs": [run]}))
    rates = {g.method.name: g.lrs for g in ablations.groups(tmp_path) if g.task == "sentiment"}
    assert rates["balanced"] == rates["balanced:sr"] == (3e-4,) and rates["paper_gptq:sr"] == (7e-4,)


def test_scripts_start_from_any_folder(tmp_path):
    script = Path(__file__).parents[1] / "benchmarks" / "reproduce" / "ablations.py"
    done = subprocess.run([sys.executable, str(script), "--plan"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "ablations" in done.stdout, done.stderr
