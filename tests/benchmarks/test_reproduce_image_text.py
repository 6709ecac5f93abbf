"""Table 4 of ``benchmarks/reproduce``: questions with pictures, on a tiny random Idefics3 and made-up digits."""

import gzip
import io
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from _families import image_for, qwen2_5_vl
from _reproduce import write_rows
from _tiny_models import images_or_skip, tiny_tokenizer
from conftest import tiny_llama
from reproduce import image_tasks, image_text, run_log, runner, sources, tables

from peft_nvfp4.quantization.freeze import frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
DIGITS = 60


pillow = pytest.fixture(scope="module", autouse=True)(images_or_skip)


def write_digits(folder: Path) -> list[tuple[int, ...]]:
    """As scikit-learn's file. Every digit has another first row of pixels, so a picture tells which one it is of."""
    rng = random.Random(0)
    rows = [[i % 17, i // 17 * 4, *(rng.randrange(17) for _ in range(62)), rng.randrange(10)] for i in range(DIGITS)]
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (folder / sources.DIGITS).write_bytes(gzip.compress(text.encode()))
    return [tuple(row) for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data folder with all that the command reads, and PEFT_NVFP4_MODEL, the packaged model's stand-in."""
    home = tmp_path_factory.mktemp("data")
    write_rows(home / "reproduce")
    write_digits(home / "reproduce")
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
    return str(image_text.stand_in(home / "vlm"))


@pytest.fixture(scope="module")
def processor(name):
    return image_text.load_processor(name)


@pytest.fixture(scope="module")
def splits(home):
    return image_tasks.TASKS["digits"].splits()


def adapted(name, method="bf16"):
    """FP32: what is compared below differs in the order of sums."""
    return image_text.adapted_decoder(image_text.load_model(name, "cpu").float(), image_text.METHODS[method], None)


def lab(name, processor, splits, work=Path()) -> image_text.ImageLab:
    return image_text.ImageLab(name, processor, {"digits": splits}, work, torch.device("cpu"), 3, 64)


def group(method="bf16", **k) -> runner.Group:
    return runner.Group("image_text", "digits", "M", image_text.METHODS[method], **k)


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
@pytest.mark.parametrize("method", ["bf16", "nf4", "paper", "balanced"])
def test_only_the_decoder_is_frozen_and_adapted(name, method):
    if method == "nf4":
        pytest.importorskip("bitsandbytes")
    dense = image_text.load_model(name, "cpu")
    model = image_text.adapted_decoder(image_text.load_model(name, "cpu"), image_text.METHODS[method], None)
    before = {n: p for n, p in dense.named_parameters() if ".text_model." not in n}
    after = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert any("vision_model" in n for n in before)
    assert all(torch.equal(after[n], p) and after[n].dtype == torch.bfloat16 for n, p in before.items())
    trained = {n for n, p in after.items() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(".text_model.layers." in n for n in trained)  # A and B of 7 linears, 2 layers
    if method != "bf16":
        assert len(frozen_layers(model)) == 7 * 2


def test_letters_are_tokens_of_their_own(processor, monkeypatch):
    assert [processor.tokenizer.decode([t]).strip() for t in image_text.letter_tokens(processor)] == list("ABCDE")
    monkeypatch.setattr(image_text, "LETTERS", "ABCDEF")  # F is unknown, and one token by that
    assert len(image_text.letter_tokens(processor)) == 6
    monkeypatch.setattr(image_text, "LETTERS", "ABCDEFG")  # and so is G
    with pytest.raises(ValueError, match="not tokens of their own"):
        image_text.letter_tokens(processor)


def test_the_papers_model():
    """Qwen2.5-VL: its gated vision blocks have linears of the decoder's names, which are left alone."""
    model = qwen2_5_vl()
    assert image_text.decoder_and_rest(model) == ("model.language_model", ["lm_head", "model.visual"])
    model = image_text.adapted_decoder(model, image_text.METHODS["balanced"], None)
    assert {n.split(".")[3] for n, p in model.named_parameters() if p.requires_grad} == {"language_model"}
    assert all("language_model" in n for n, _ in frozen_layers(model))
    inputs = image_for(qwen2_5_vl)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        expected = model(**inputs).logits[:, -1]
        inputs.pop("labels")
        got = image_text.answer_logits(model, inputs)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # FP32; the head over one position, and over nine


@pytest.mark.parametrize("end, expected", [("Assistant:", " "), ("assistant\n", "")])
def test_letters_follow_the_prompt_as_words_do(end, expected):
    """Of pairs of characters: " A" is a token, and "A" alone is another one."""

    class Pairs:
        tokenizer = staticmethod(lambda text, **_: SimpleNamespace(input_ids=re.findall(r"\n| ?[^ \n]", text)))
        apply_chat_template = staticmethod(lambda messages, **_: end)

    assert image_text.letter_tokens(Pairs()) == [expected + letter for letter in "ABCDE"]


def test_padding_changes_no_answer(name, processor, splits):
    """Each row's logits are those behind its prompt, alone and without padding: FP32, sums in another order."""
    model = adapted(name).eval()
    items = splits.test[:6]
    batch = image_text.batch_of(items, processor, "cpu")
    assert not batch["attention_mask"].all()  # otherwise nothing is tested
    with torch.no_grad():
        got = image_text.answer_logits(model, batch)
        for row, item in zip(got, items):
            alone = model(**image_text.batch_of([item], processor, "cpu")).logits[0, -1]
            torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-5)
            assert (alone - got[0]).abs().max() > 1e-3 or item is items[0]  # the pictures or the questions are seen


# ---------------------------------------------------------------------------------------------- training, scoring
def test_scores_are_of_the_rows_own_letters(name, processor, splits, monkeypatch):
    """Made-up logits: E is always the likeliest and nobody's letter; then the right one, or in every other row a wrong one."""
    items = [item for item in splits.test if len(item.candidates) < 5][:5]
    bench = lab(name, processor, type(splits)([], [], items))
    letters = bench.letters.tolist()
    logits = torch.zeros(len(items), 200)
    for i, item in enumerate(items):
        logits[i, letters[4]] = 9.0
        logits[i, letters[item.gold if i % 2 == 0 else (item.gold + 1) % len(item.candidates)]] = 1.0
    parts = iter(logits.split(2))
    monkeypatch.setattr(image_text, "answer_logits", lambda model, inputs: next(parts))
    found = bench.score(adapted(name), group(batch=2), "test")
    gold = torch.tensor([letters[item.gold] for item in items])
    assert found["accuracy"] == pytest.approx(0.6)
    assert found["nll"] == pytest.approx(F.cross_entropy(logits, gold).item(), rel=1e-6)
    own = [logits[i, letters[: len(item.candidates)]] for i, item in enumerate(items)]
    choice = sum(F.cross_entropy(row, torch.tensor(item.gold)).item() for row, item in zip(own, items)) / len(items)
    assert found["choice_nll"] == pytest.approx(choice, rel=1e-6)
    assert set(found["subsets"]) == {item.subset for item in items}


# ---------------------------------------------------------------------------------------------- the command
def test_the_whole_table_in_small(home, name, tmp_path, monkeypatch):
    """All methods; the same command again runs nothing; the table has the paper's figures beside them."""
    pytest.importorskip("bitsandbytes")
    command = ["--model", name, "--tasks", "digits", "--small", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    image_text.main(command)
    content = run_log.read(tmp_path, "image_text")
    assert content["settings"]["model"] == name
    kinds = [(r["method"], r["kind"]) for r in content["runs"]]
    assert kinds == [(m, kind) for m in image_text.METHODS for kind in ("zero_shot", "final")]
    before = {r["method"]: r["nll"] for r in content["runs"] if r["kind"] == "zero_shot"}
    assert len(set(before.values())) == len(before)  # every method has weights of its own
    folders = {p.name for p in (tmp_path / "work" / "calibrations").iterdir()}
    assert folders == {"text_paper_4x64", "digits_paper_4x64", "digits_balanced_4x64"}
    monkeypatch.setattr(image_text, "load_model", None)  # nothing is made again
    image_text.main(command)
    assert run_log.read(tmp_path, "image_text") == content
    title, table = tables.images(content, image_text.METHODS).split("\n\n")
    assert title == "vlm on `digits`, which stands in for ScienceQA:"
    assert "not run" not in table and len(table.splitlines()) == 2 + len(image_text.METHODS)


def test_calibrations_see_text_or_the_training_rows_with_their_pictures(home, name, processor, splits, tmp_path, monkeypatch):
    """The same number of sequences of either; only the decoder; each made once."""
    seen = []

    def calibrate(*args, output_dir, **named):
        output_dir.mkdir(parents=True)
        seen.append((*args, named))

    monkeypatch.setattr(image_text, "calibrate", calibrate)
    bench = lab(name, processor, splits, tmp_path)
    for _ in range(2):
        for method, wanted in image_text.METHODS.items():
            if wanted.calibration:
                bench.calibration(group(method))
    text, image, ours = seen
    assert [call[3].accuracy for call in seen] == ["paper", "paper", "balanced"] and {call[3].samples for call in seen} == {3}
    assert all(isinstance(row, str) for row in text[1]) and text[3].seq_len == 64
    expected = [image_text.batch_of([item], processor, "cpu") for item in splits.train[:3]]
    for call in (image, ours):
        assert len(call[1]) == 3
        assert all(
            torch.equal(row[key], own[key]) for row, own in zip(call[1], expected) for key in ("input_ids", "pixel_values")
        )
    assert all({"model.vision_model", "model.connector"} <= set(call[4]["skip_modules"]) for call in seen)


def test_what_is_missing_is_said(home, name, tmp_path, monkeypatch):
    small = ["--small", "--tasks", "digits"]
    for given in ([], ["--model", name, "--stand-in"]):
        with pytest.raises(SystemExit, match="(?s)either --model or --stand-in.*Qwen2.5-VL-3B-Instruct"):
            image_text.main([*small, *given])
    with pytest.raises(SystemExit, match="reads text only"):
        image_text.main([*small, "--model", str(home / "language")])
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="(?s)no digits.*sources.py FOLDER"):
        image_text.main([*small, "--model", name])
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(home))
    monkeypatch.delenv("PEFT_NVFP4_MODEL")
    with pytest.raises(FileNotFoundError, match="smollm2_reviews.py fetch"):
        image_text.main([*small, "--stand-in"])


# ---------------------------------------------------------------------------------------------- the report
def cells(table: str, first: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def run(method: str, kind: str, seed: int | None, accuracy: float, nll: float, **more) -> dict:
    shared = {"task": "digits", "weights": "M", "label": method, "lr": None if seed is None else 7e-4}
    return {"method": method, "kind": kind, "seed": seed, "accuracy": accuracy, "nll": nll, **shared, **more}


def test_the_table_says_what_the_runs_say():
    runs = [run("bf16", "final", seed, 0.5 + 0.1 * seed, 1.0 + 0.5 * seed) for seed in (0, 1, 2)]
    runs += [run("paper_gptq_image", "final", seed, 0.4, 1.2 + 0.6 * seed) for seed in (0, 1)]
    runs += [run("paper_gptq_image", "zero_shot", None, 0.25, 2.0), run("paper", "zero_shot", None, 0.3, 3.0)]
    runs += [run("bf16", "sweep", 100, 0.9, 0.1), run("bf16", "final", 0, 0.0, 9.0, weights="N")]
    text = tables.images({"runs": runs}, image_text.METHODS).split("\n\n")
    assert text[::2] == ["M on `digits`, which stands in for ScienceQA:", "N on `digits`, which stands in for ScienceQA:"]
    found = ["77.9", "93.6", "not run", "60.0 (60.0 ± 10.0, 3)", "not run", "1.500 ± 0.500", "–", "0.0007"]
    assert cells(text[1], "BF16 LoRA") == found
    # paired by seed: 0.2 and 0.3, mean 0.25, standard error 0.05
    found = ["76.2", "91.7", "25.0", "40.0 (40.0 ± 0.0, 2)", "2.000", "1.500 ± 0.424", "+0.250 ± 0.050", "0.0007"]
    assert cells(text[1], "NVFP4 + GPTQ on image prompts (PACT)") == found
    assert cells(text[1], "NVFP4 to nearest")[2:5] == ["30.0", "not run", "3.000"]
