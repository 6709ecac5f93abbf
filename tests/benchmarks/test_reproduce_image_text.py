"""Table 4 of ``benchmarks/reproduce``: questions with pictures, on a tiny random Idefics3 and made-up digits."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from _families import image_for, qwen2_5_vl
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reproduce import image_models, image_table, image_tasks, image_text, jobs, paper, report, runner, sources, summaries
from reproduce.encoding import order
from reproduce.training import Recipe, reset

from peft_nvfp4.quantization.freeze import frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
DIGITS = 60


@pytest.fixture(scope="module", autouse=True)
def pillow():
    pytest.importorskip("PIL.Image")
    try:
        transformers.Idefics3ImageProcessorPil()
    except ImportError as error:  # 5.12 asks for torchvision, in a class that does without
        pytest.skip(f"not run: {error}")


def write_digits(folder: Path) -> list[tuple[int, ...]]:
    """As scikit-learn's file. Every digit has another first row of pixels, so a picture tells which one it is of."""
    rng = random.Random(0)
    rows = [[i % 17, i // 17 * 4, *(rng.randrange(17) for _ in range(62)), rng.randrange(10)] for i in range(DIGITS)]
    folder.mkdir(parents=True)
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (folder / sources.DIGITS).write_bytes(gzip.compress(text.encode()))
    return [tuple(row) for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder with all that the command reads, and PEFT_NVFP4_MODEL, the packaged model's stand-in."""
    home = tmp_path_factory.mktemp("data")
    write_digits(home / "reproduce")
    words = "good bad fine awful great dull red blue green film story".split()
    texts = [" ".join(words[(i + j) % 11] for j in range(60)) for i in range(30)]
    (home / "reproduce" / "c4_demo.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    (home / "reproduce" / "wiki_demo.txt").write_text("\n".join(f"again {t}" for t in texts))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(image_tasks.LETTERS))
    tiny_llama(vocab_size=64, tie_word_embeddings=True).save_pretrained(home / "language")
    tokenizer.save_pretrained(home / "language")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEFT_NVFP4_DATA", str(home))
        patch.setenv("PEFT_NVFP4_MODEL", str(home / "language"))
        yield home


@pytest.fixture(scope="module")
def name(home) -> str:
    return str(image_models.stand_in(home / "vlm"))


@pytest.fixture(scope="module")
def processor(name):
    return image_models.load_processor(name)


@pytest.fixture(scope="module")
def splits(home):
    return image_tasks.TASKS["digits"].splits()


def trainee(name, processor, method="bf16"):
    """FP32: what is compared below differs in the order of sums."""
    return image_models.adapt(image_models.load_model(name, "cpu").float(), processor, image_text.METHODS[method], None)


# ---------------------------------------------------------------------------------------------- rows


def test_questions_are_about_the_digits_in_their_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    known = {row[:-1]: row[-1] for row in write_digits(tmp_path / "reproduce")}
    monkeypatch.setattr(image_tasks, "EDGE", 16)  # the pixels as they are
    items = image_tasks._digits()[0]
    assert len(items) == DIGITS // 4 * 12 and {item.subset for item in items} == set(image_tasks.KINDS)
    grey = {255 - v * 255 // 16: v for v in range(17)}
    for item in items:
        pixels = item.image().convert("L").load()
        left, right = (known[tuple(grey[pixels[x + dx, 4 + y]] for y in range(8) for x in range(8))] for dx in (0, 8))
        options = dict(line.split(". ", 1) for line in item.question.split("\n")[1:-1])
        assert tuple(options) == item.candidates and item.target == item.candidates[item.gold]
        sides = {"the left one": left > right, "the right one": left < right, "neither": left == right}
        answer = options[item.target]
        right_answer = sides[answer] if item.subset == "larger" else answer == str({"left": left, "right": right}[item.subset])
        assert right_answer, item
        assert item.subset == "larger" or {str(left), str(right)} <= set(options.values())
        assert len(set(options.values())) == len(options)


def test_no_digit_is_in_two_splits(splits):
    digits = [{half for item in part for half in item.image.args} for part in (splits.train, splits.validation, splits.test)]
    assert all(digits) and not (digits[0] & digits[1] or digits[0] & digits[2] or digits[1] & digits[2])
    assert len(splits.test) >= 60  # a third of 180 rows


def test_science_qa_reads_the_original_columns(monkeypatch):
    """In the data set's own splits, without the rows that have no picture; through ``datasets``, whose pictures stay files."""
    from PIL import Image

    datasets = pytest.importorskip("datasets")

    def picture(shade):
        Image.new("RGB", (3, 2), (shade, 0, 0)).save(out := io.BytesIO(), "PNG")
        return {"bytes": out.getvalue(), "path": None}

    def load(name, config, split):
        assert (name, config) == (image_tasks.SCIENCE_QA, None)
        rows = [
            dict(image=picture(i) if i % 2 else None, question="which ?", choices=["red", "blue", "green"], answer=i % 3, hint="")
            for i in range(40)
        ]
        if split == "test":
            rows = [{**row, "image": row["image"] and picture(200 + i), "hint": "look"} for i, row in enumerate(rows[:8])]
        columns = {key: [row[key] for row in rows] for key in rows[0]} | {"subject": ["language science"] * len(rows)}
        return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = image_tasks.TASKS["scienceqa"].splits()
    assert (len(found.test), len(found.train) + len(found.validation)) == (4, 20)
    first = min(found.test, key=lambda item: item.image().getpixel((0, 0)))
    assert first.image().getpixel((0, 0)) == (201, 0, 0) and first.image().mode == "RGB"
    assert (first.context, first.gold, first.target, first.candidates) == ("look", 1, "B", ("A", "B", "C"))
    assert first.question.split("\n") == ["Question: which ?", "A. red", "B. blue", "C. green", image_tasks.INSTRUCTION]


@pytest.mark.parametrize("options, gold", [(["a"], 0), (["a"] * 6, 0), (["a", "b"], 2)])
def test_rows_without_an_answer_are_refused(options, gold):
    with pytest.raises(ValueError, match="the answer"):
        image_tasks.pictured("?", options, gold, None, "")


# ---------------------------------------------------------------------------------------------- models


def test_the_stand_in_is_the_language_model(home, name):
    """Saved and read again, its text tower gives the language model's logits; some versions' files lack a tied head."""
    language = transformers.AutoModelForCausalLM.from_pretrained(home / "language", dtype=torch.bfloat16)
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        expected, got = language(ids).logits, image_models.load_model(name, "cpu")(ids).logits
    assert torch.equal(got[..., :64], expected[..., :64])  # the tokenizer had fewer tokens than 64 and got some more


@pytest.mark.parametrize("method", ["bf16", "nf4", "paper", "balanced"])
def test_only_the_decoder_is_frozen_and_adapted(name, processor, method):
    if method == "nf4":
        pytest.importorskip("bitsandbytes")
    dense = image_models.load_model(name, "cpu")
    model = image_models.adapt(image_models.load_model(name, "cpu"), processor, image_text.METHODS[method], None).model
    before = {n: p for n, p in dense.named_parameters() if ".text_model." not in n}
    after = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert any("vision_model" in n for n in before)
    assert all(torch.equal(after[n], p) and after[n].dtype == torch.bfloat16 for n, p in before.items())
    trained = {n for n, p in after.items() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(".text_model.layers." in n for n in trained)  # A and B of 7 linears, 2 layers
    if method != "bf16":
        assert len(frozen_layers(model)) == 7 * 2


def test_letters_are_tokens_of_their_own(processor, monkeypatch):
    assert [processor.tokenizer.decode([t]).strip() for t in image_models.letter_tokens(processor)] == list("ABCDE")
    monkeypatch.setattr(image_models, "LETTERS", "ABCDEF")  # F is unknown, and one token by that
    assert len(image_models.letter_tokens(processor)) == 6
    monkeypatch.setattr(image_models, "LETTERS", "ABCDEFG")  # and so is G
    with pytest.raises(ValueError, match="not tokens of their own"):
        image_models.letter_tokens(processor)


def test_the_papers_model():
    """Qwen2.5-VL: its gated vision blocks have linears of the decoder's names, which are left alone."""
    model = qwen2_5_vl()
    assert image_models.decoder_and_rest(model) == ("model.language_model", ["lm_head", "model.visual"])
    trainee = image_models.adapt(model, None, image_text.METHODS["balanced"], None)
    assert {n.split(".")[3] for n, p in trainee.model.named_parameters() if p.requires_grad} == {"language_model"}
    assert all("language_model" in n for n, _ in frozen_layers(trainee.model))
    inputs = image_for(qwen2_5_vl)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        expected = trainee.model(**inputs).logits[:, -1]
        inputs.pop("labels")
        got = image_models.answer_logits(trainee.model, inputs)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # FP32; the head over one position, and over nine


@pytest.mark.parametrize("end, expected", [("Assistant:", " "), ("assistant\n", "")])
def test_letters_follow_the_prompt_as_words_do(end, expected):
    """Of pairs of characters: " A" is a token, and "A" alone is another one."""

    class Pairs:
        tokenizer = staticmethod(lambda text, **_: SimpleNamespace(input_ids=re.findall(r"\n| ?[^ \n]", text)))
        apply_chat_template = staticmethod(lambda messages, **_: end)

    assert image_models.letter_tokens(Pairs()) == [expected + letter for letter in "ABCDE"]


def test_padding_changes_no_answer(name, processor, splits):
    """Each row's logits are those behind its prompt, alone and without padding: FP32, sums in another order."""
    model = trainee(name, processor).model.eval()
    items = splits.test[:6]
    batch = image_models.batch_of(items, processor, "cpu")
    assert not batch["attention_mask"].all()  # otherwise nothing is tested
    with torch.no_grad():
        got = image_models.answer_logits(model, batch)
        for row, item in zip(got, items):
            alone = model(**image_models.batch_of([item], processor, "cpu")).logits[0, -1]
            torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-5)
            assert (alone - got[0]).abs().max() > 1e-3 or item is items[0]  # the pictures or the questions are seen


# ---------------------------------------------------------------------------------------------- training, scoring


def test_training_is_plain_adamw_on_the_right_letter(name, processor, splits):
    ours, plain = trainee(name, processor), trainee(name, processor)
    recipe, rows = Recipe(2e-2, 3, steps=3, batch=2), splits.train[:10]
    letters = image_models.letter_tokens(processor)
    for _ in range(2):  # the second run starts anew
        result = image_text.train(ours, rows, recipe, torch.tensor(letters))
    reset(plain.model, 3)
    optimizer, losses = torch.optim.AdamW(plain.parameters, weight_decay=0.0), []
    for step, chosen in enumerate(order(10, 3, 2, 3).tolist()):
        optimizer.param_groups[0]["lr"] = 2e-2 * (1, 1, 0.5)[step]  # one step of warm-up, then linearly to 0
        batch = image_models.batch_of([rows[i] for i in chosen], processor, "cpu")
        logits = plain.model.train()(**batch).logits
        logits = torch.stack([row[mask.sum() - 1] for row, mask in zip(logits, batch["attention_mask"])])
        right = torch.tensor([letters["ABCDE".index(rows[i].target)] for i in chosen])
        losses.append(F.cross_entropy(logits, right))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert result["first_loss"] == pytest.approx(losses[0].item(), rel=1e-5)
    assert result["train_loss"] == pytest.approx(losses[2].item(), rel=1e-5) and result["finite"]
    assert abs(losses[2] - losses[0]) > 1e-2


def test_scores_are_of_the_rows_own_letters(name, processor, splits, monkeypatch):
    """Made-up logits: E is always the likeliest and nobody's letter; then the right one, or in every other row a wrong one."""
    model, items = trainee(name, processor), [item for item in splits.test if len(item.candidates) < 5][:5]
    letters = image_models.letter_tokens(processor)
    logits = torch.zeros(len(items), 200)
    for i, item in enumerate(items):
        logits[i, letters[4]] = 9.0
        logits[i, letters[item.gold if i % 2 == 0 else (item.gold + 1) % len(item.candidates)]] = 1.0
    parts = iter(logits.split(2))
    monkeypatch.setattr(image_text, "answer_logits", lambda model, inputs: next(parts))
    found = image_text.score(model, items, torch.tensor(letters), 2)
    gold = torch.tensor([letters[item.gold] for item in items])
    assert found["accuracy"] == pytest.approx(0.6)
    assert found["nll"] == pytest.approx(F.cross_entropy(logits, gold).item(), rel=1e-6)
    own = [logits[i, letters[: len(item.candidates)]] for i, item in enumerate(items)]
    choice = sum(F.cross_entropy(row, torch.tensor(item.gold)).item() for row, item in zip(own, items)) / len(items)
    assert found["choice_nll"] == pytest.approx(choice, rel=1e-6)
    assert set(found["subsets"]) == {item.subset for item in items}


# ---------------------------------------------------------------------------------------------- the command


def test_the_whole_table_in_small(home, name, tmp_path, monkeypatch):
    """All methods; the same command again runs nothing; the report has the paper's figures beside them."""
    pytest.importorskip("bitsandbytes")
    command = ["--model", name, "--tasks", "digits", "--small", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    path = image_text.main(command)
    content = json.loads(path.read_text())
    assert content["failures"] == content["not_finished"] == [] and content["settings"]["model"] == "vlm"
    kinds = [(r["method"], r["kind"]) for r in content["runs"]]
    assert kinds == [(m, kind) for m in image_text.METHODS for kind in ("final", "zero_shot")]
    before = {r["method"]: r["nll"] for r in content["runs"] if r["kind"] == "zero_shot"}
    assert len(set(before.values())) == len(before)  # every method has weights of its own
    folders = {p.name for p in (tmp_path / "work" / "calibrations").iterdir()}
    assert folders == {"text_paper_4x64", "digits_paper_4x64", "digits_balanced_4x64"}
    monkeypatch.setattr(image_text, "load_model", None)  # nothing is made again
    assert json.loads(image_text.main(command).read_text())["runs"] == content["runs"]
    merged = runner.merge([tmp_path / "work"], tmp_path / "merged")["image_text"]
    assert json.loads(merged.read_text())["runs"] == content["runs"]
    text = image_table.section(content)
    assert text[1] == "vlm on `digits`, which stands in for ScienceQA:"
    assert "not run" not in text[2] and len(text[2].splitlines()) == 2 + len(image_text.METHODS)


def test_calibrations_see_text_or_the_training_rows_with_their_pictures(home, name, processor, splits, tmp_path, monkeypatch):
    """The same number of sequences of either; only the decoder; each made once."""
    seen = []

    def calibrate(*args, output_dir, **named):
        output_dir.mkdir(parents=True)
        seen.append((*args, named))

    monkeypatch.setattr(image_text, "calibrate", calibrate)
    board = jobs.Board(tmp_path)
    bench = image_text.Workbench(name, processor, board, "cpu", 3, 64, splits={"digits": splits})
    for _ in range(2):
        for method in image_text.METHODS.values():
            bench.calibration(jobs.Group("image_text", "digits", "M", method))
    text, image, ours = seen
    assert [call[3].accuracy for call in seen] == ["paper", "paper", "balanced"] and {call[3].samples for call in seen} == {3}
    assert all(isinstance(row, str) for row in text[1]) and text[3].seq_len == 64
    expected = [image_models.batch_of([item], processor, "cpu") for item in splits.train[:3]]
    for call in (image, ours):
        assert len(call[1]) == 3
        assert all(
            torch.equal(row[key], own[key]) for row, own in zip(call[1], expected) for key in ("input_ids", "pixel_values")
        )
    assert all({"model.vision_model", "model.connector"} <= set(call[4]["skip_modules"]) for call in seen)


def test_learning_rates_are_swept_and_a_failure_costs_the_others_nothing(name, splits, tmp_path, monkeypatch):
    command = ["--model", name, "--tasks", "digits", "--methods", "bf16", "paper_gptq_text", "--work", str(tmp_path / "work")]
    command += ["--out", str(tmp_path), "--device", "cpu", "--steps", "1", "--batch", "2", "--rows", "4", "--seeds", "2"]

    def fails():
        raise OSError("no such texts")

    scored, score = [], image_text.score
    monkeypatch.setattr(image_text, "score", lambda trainee, items, *rest: scored.append(items) or score(trainee, items, *rest))
    monkeypatch.setattr(image_text, "_texts", fails)
    content = json.loads(image_text.main([*command, "--lrs", "1e-3", "2e-3"]).read_text())
    rows = [(r["kind"], r["lr"], r["seed"]) for r in content["runs"]]
    chosen = next(lr for kind, lr, _ in rows if kind == "final")
    assert [r for r in rows if r[0] == "final"] == [("final", chosen, 0), ("final", chosen, 1)]
    swept = {r["lr"]: r["validation_nll"] for r in content["runs"] if r["kind"] == "sweep"}
    assert {1e-3, 2e-3} <= set(swept) and chosen == min(swept, key=swept.get)
    groups = [
        [item.group for item in split[:4]] for split in (splits.test, *[splits.validation] * len(swept), *[splits.test] * 2)
    ]
    assert [[item.group for item in items] for items in scored] == groups
    assert [f.split(": ", 1)[1] for f in content["failures"]] == ["OSError: no such texts"]
    assert len(content["not_finished"]) == 1 and "paper_gptq_text" in content["not_finished"][0]


def test_nothing_is_started_when_the_time_is_over(name, tmp_path):
    command = ["--model", name, "--tasks", "digits", "--small", "--seconds", "1e-9", "--out", str(tmp_path)]
    content = json.loads(image_text.main(command).read_text())
    assert content["runs"] == [] and len(content["not_finished"]) == len(image_text.METHODS)


def test_what_is_missing_is_said(home, name, tmp_path, monkeypatch):
    small = ["--small", "--tasks", "digits"]
    for given in ([], ["--model", name, "--stand-in"]):
        with pytest.raises(SystemExit, match="(?s)either --model or --stand-in.*Qwen2.5-VL-3B-Instruct"):
            image_text.main([*small, *given])
    with pytest.raises(SystemExit, match="(?s)No vision-language model: HuggingFaceTB/Smol.*--stand-in"):  # no hub here
        image_text.main([*small, "--model", "HuggingFaceTB/SmolVLM-256M-Instruct"])
    with pytest.raises(SystemExit, match="reads text only"):
        image_text.main([*small, "--model", str(home / "language")])
    with pytest.raises(SystemExit, match="(?s)No rows of scienceqa.*--tasks digits"):
        image_text.main(["--small", "--model", name])
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="(?s)No rows of digits.*--fetch FOLDER"):
        image_text.main([*small, "--model", name])
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(home))
    monkeypatch.delenv("PEFT_NVFP4_MODEL")
    with pytest.raises(SystemExit, match="(?s)No vision-language model.*smollm2_reviews.py fetch"):
        image_text.main([*small, "--stand-in"])


# ---------------------------------------------------------------------------------------------- the report


def cells(table: str, first: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def run(method: str, kind: str, seed: int | None, accuracy: float, nll: float, **more) -> dict:
    shared = {"task": "digits", "weights": "M", "label": method, "lr": None if seed is None else 7e-4}
    return {"method": method, "kind": kind, "seed": seed, "accuracy": accuracy, "nll": nll, **shared, **more}


def test_the_table_without_results_has_the_papers_figures():
    text = image_table.section(None)
    assert text[1] == "Here: not run."
    assert cells(text[2], "BF16 LoRA") == ["77.9", "93.6", *["not run"] * 6]
    assert cells(text[2], "NVFP4 + GPTQ on text (PACT)")[:2] == ["75.4", "87.6"]
    assert cells(text[2], "NF4 QLoRA")[:3] == ["–", "–", "not run"]
    assert sorted(image_table.PAPER_ROWS.values()) == sorted(paper.SCIENCE_QA)


def test_the_table_says_what_the_runs_say(tmp_path):
    runs = [run("bf16", "final", seed, 0.5 + 0.1 * seed, 1.0 + 0.5 * seed) for seed in (0, 1, 2)]
    runs += [run("paper_gptq_image", "final", seed, 0.4, 1.2 + 0.6 * seed) for seed in (0, 1)]
    runs += [run("paper_gptq_image", "zero_shot", None, 0.25, 2.0), run("paper", "zero_shot", None, 0.3, 3.0)]
    runs += [run("bf16", "sweep", 100, 0.9, 0.1), run("bf16", "final", 0, 0.0, 9.0, weights="N")]
    text = image_table.section({"runs": runs})
    assert text[1::2] == ["M on `digits`, which stands in for ScienceQA:", "N on `digits`, which stands in for ScienceQA:"]
    assert cells(text[2], "BF16 LoRA") == [
        "77.9",
        "93.6",
        "not run",
        "60.0 (60.0 ± 10.0, 3)",
        "not run",
        "1.500 ± 0.500",
        "–",
        "0.0007",
    ]
    # paired by seed: 0.2 and 0.3, mean 0.25, standard error 0.05
    found = ["76.2", "91.7", "25.0", "40.0 (40.0 ± 0.0, 2)", "2.000", "1.500 ± 0.424", "+0.250 ± 0.050", "0.0007"]
    assert cells(text[2], "NVFP4 + GPTQ on image prompts (PACT)") == found
    assert cells(text[2], "NVFP4 to nearest")[2:5] == ["30.0", "not run", "3.000"]
    left = jobs.Group("image_text", "digits", "M", image_text.METHODS["nf4"]).name
    data = {"runs": runs, "environment": {}, "not_finished": [left], "failures": []}
    (tmp_path / "reproduce").mkdir()
    (tmp_path / "reproduce" / "image_text.json").write_text(json.dumps(data))
    page = report.images(report.Results(tmp_path))
    assert page[1:-2] == text[1:] and re.search("not finished: .*digits.*nf4", page[-2])
    assert page[-1].endswith("→ [`reproduce/image_text.json`](results/reproduce/image_text.json)")
    assert summaries.score_of(runs[0]) == 0.5
