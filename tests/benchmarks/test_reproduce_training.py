"""Training and evaluating one adapter in ``benchmarks/reproduce``, on a tiny random model: against loops written out, steps
replayed from a recording against the same from Python, a run that is cut off, and every variant of the ablations."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _reproduce import WORDS, Letters, write_rows
from _tiny_models import save_tiny
from conftest import tiny_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reproduce import ablations, encoding, methods, recording, scoring, tasks, training

from peft_nvfp4.autograd import seeds

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


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


# ---------------------------------------------------------------------------------------------- steps and recordings of them


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
        self.run, self.tapes = run, list(seeds.TAPES)

    def __call__(self):
        for tape in self.tapes:
            order = iter(range(len(tape.places)))
            tape.draw = lambda tape=tape, order=order: tape.buffer[next(order)].clone()
            seeds.TAPES.append(tape)
        places = [dict(tape.places) for tape in self.tapes]
        try:
            self.run()
        finally:
            for tape, before in zip(self.tapes, places):
                seeds.TAPES.pop()
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


# ---------------------------------------------------------------------------------------------- variants and weights


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
    from peft_nvfp4.quantization.freeze import dequantize_model

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


# ---------------------------------------------------------------------------------------------- a run that is cut off


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
