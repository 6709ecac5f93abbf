"""Several runs at once (``benchmarks/reproduce/together.py``) against one after the other, on a tiny random model."""

from dataclasses import replace

import pytest
import torch
from _reproduce import WORDS, data
from _tiny_models import save_tiny
from reproduce import jobs, methods, runner, scoring, seven_tasks, training
from reproduce.tasks import TASKS
from reproduce.together import Diverged, WideAdapters, rows_of, together, train_together

from peft_nvfp4.training.packing import enable_packing, packing_status
from peft_nvfp4.training.steps import slow_down_steps

__all__ = ["data"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
RECIPES = [training.Recipe(lr, seed, 4, batch=2) for lr, seed in ((1e-2, 0), (3e-3, 1), (1e-2, 2))]


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "general_texts", lambda: [" ".join(WORDS * 3)] * 30)
    return methods.Models(tmp_path / "work", "cpu", samples=6, length=32, shipped=save_tiny(tmp_path / "model"))


def rows_for(models, task="commonsense"):
    lab = runner.TextLab(models)
    _, lab.tokenizer = models.load("shipped")
    return lab.training_set(task, None), lab.tokenizer


def trained(models, name, recipes, rows):
    """(what was seen of every run, its adapters)."""
    adapters = WideAdapters(models.adapted(methods.METHODS[name], "shipped")[0])
    seen = train_together(adapters, rows, recipes, "cpu")
    return seen, [adapters.of_run(run) for run in range(len(recipes))], adapters


@pytest.mark.parametrize("name", ["bf16", "nf4", "paper", "high"])
def test_runs_together_are_the_runs_one_by_one(data, models, name):
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    rows, _ = rows_for(models)
    seen, found, _ = trained(models, name, RECIPES, rows)
    for run, recipe in enumerate(RECIPES):
        (alone,), (expected,), _ = trained(models, name, [recipe], rows)
        # FP32 sums in another order, rounded to BF16: where a sum falls on the other side, one place of BF16 (2^-8), of which an
        # AdamW step of at most the rate makes as much of the rate
        bound = recipe.steps * recipe.lr * 2**-8
        for a, b in zip(found[run], expected):
            torch.testing.assert_close(a, b, rtol=0, atol=bound)
        assert seen[run]["train_loss"] == pytest.approx(alone["train_loss"], rel=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "nf4", "paper", "high", "high_gptq_eora", "high:last"])
def test_runs_together_on_a_gpu(data, models, name):
    """One by one there, the same but for the order of sums; and scored in both ways."""
    models.device, models.shipped = torch.device("cuda", 0), save_tiny(models.folder.parent / "gpu", hidden_size=128)
    rows, tokenizer = rows_for(models)
    drawn = methods.METHODS[name].starts_from is None
    adapters, single = (WideAdapters(models.adapted(methods.METHODS[name], "shipped")[0], drawn) for _ in range(2))
    seen = train_together(adapters, rows, RECIPES, models.device)
    items, problems = TASKS["commonsense"].splits().test[:4], TASKS["asdiv"].splits().test[:2]
    with together(3):
        losses = scoring.candidate_losses(adapters.model, items, TASKS["commonsense"], tokenizer, 3)
        texts = scoring.written_answers(adapters.model, problems, replace(TASKS["asdiv"], answer=4), tokenizer, 3)
    assert len(texts) == 3 and losses[:, :, 0].isfinite().all()
    for run, recipe in enumerate(RECIPES):
        (alone,) = train_together(single, rows, [recipe], models.device)
        # as on a CPU, and GEMMs of other shapes, which split sums otherwise: a place of BF16 in the hidden states of two layers
        assert seen[run]["first_loss"] == pytest.approx(alone["first_loss"], rel=2**-7)
        assert seen[run]["train_loss"] == pytest.approx(alone["train_loss"], rel=2**-5)


@pytest.mark.parametrize("name", ["bf16", "nf4", "high"])
def test_a_run_is_the_products_own_training(data, models, name):
    """Against :func:`training.train` with the package's own packing: ``torch.optim.AdamW``, gradients clipped by PyTorch."""
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    rows, _ = rows_for(models)
    seen, found, _ = trained(models, name, RECIPES, rows)
    model, _ = models.adapted(methods.METHODS[name], "shipped")
    slow_down_steps(model)
    enable_packing(model)
    decoder = training.base_model(model)
    last = (rows.at + 1).masked_fill(rows.labels == training.IGNORED, 0).amax(1)

    def loss_of(index):
        part = training.Encoded(rows.ids[index], rows.at[index], rows.labels[index])
        place, label, _ = part.supervised()
        mask = torch.arange(rows.ids.shape[1]) < last[index][:, None]
        hidden = decoder.base_model(input_ids=part.ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        logits = decoder.get_output_embeddings()(hidden.flatten(0, 1)[place]).float()
        return torch.nn.functional.cross_entropy(logits, label)

    for run, recipe in enumerate(RECIPES):
        own = training.train(model, len(rows), recipe, loss_of)
        parameters = [[p for n, p in sorted(model.named_parameters()) if kind in n] for kind in ("lora_A", "lora_B")]
        # before the first step nothing but the mean over labels is summed in another order: same codes. Then a step of AdamW
        # may differ in FP32's last place, and a sum that falls on the other side of a rounding by a place of BF16 (2^-8)
        assert seen[run]["first_loss"] == pytest.approx(own["first_loss"], rel=2**-20)
        assert seen[run]["train_loss"] == pytest.approx(own["train_loss"], rel=2**-12)
        difference = torch.cat([(a - b).abs().flatten() for a, b in zip(found[run], sum(parameters, []))])
        assert difference.mean() < recipe.lr * 2**-8
    assert packing_status(model).calls == 12


@pytest.mark.parametrize("name", seven_tasks.LEVERS)
def test_levers_train(data, models, name):
    """Every run learns: its adapters move, and by another way than those of the next one."""
    rows, _ = rows_for(models)
    adapters = WideAdapters(models.adapted(methods.METHODS[name], "shipped")[0], drawn=methods.METHODS[name].starts_from is None)
    adapters.reset([0, 1])
    before = [t.clone() for t in adapters.of_run(0)]
    ratio = methods.METHODS[name].ratio
    train_together(adapters, rows, [training.Recipe(1e-3, seed, 2, batch=2) for seed in (0, 1)], "cpu", ratio)
    one, other = adapters.of_run(0), adapters.of_run(1)
    assert len(one) == 2 * 14 and all(not torch.equal(a, b) for a, b in zip(one, before))
    assert all(not torch.equal(a, b) for a, b in zip(one, other))
    assert jobs.weight_bytes(adapters.model) > 0
    # B moves by its rate in both steps; A, whose gradient is zero while B is, by less than its own in the second
    moved = [(a - b).abs().max().item() for a, b in zip(one, before)]
    if methods.METHODS[name].starts_from is None:
        assert max(moved[14:]) == pytest.approx(2 * ratio * 1e-3, rel=0.01) and max(moved[:14]) < 1e-3


@pytest.mark.parametrize("name", ["bf16", "high"])
def test_answers_of_runs_together_are_those_of_each(data, models, name):
    rows, tokenizer = rows_for(models)
    _, found, adapters = trained(models, name, RECIPES, rows)
    choice, generated = TASKS["commonsense"], replace(TASKS["asdiv"], answer=4)
    items, problems = choice.splits().test[:4], generated.splits().test[:2]
    with together(3):
        losses = scoring.candidate_losses(adapters.model, items, choice, tokenizer, 3, tokens=400)
        texts = scoring.written_answers(adapters.model, problems, generated, tokenizer, 3, tokens=700)
    assert len({str(t) for t in texts}) > 1 or not torch.equal(losses[0], losses[1])
    single = WideAdapters(models.adapted(methods.METHODS[name], "shipped")[0])
    single.reset([0])
    for run in range(3):
        for p, value in zip(single.parameters, found[run]):
            p.data.copy_(value)
        own = scoring.candidate_losses(single.model, items, choice, tokenizer)
        torch.testing.assert_close(losses[run], own[0], rtol=2**-8, atol=0)  # BF16 hidden states of two attention shapes
        assert texts[run] == scoring.written_answers(single.model, problems, generated, tokenizer)[0]


def test_a_method_may_bring_first_values(models):
    model, _ = models.adapted(methods.METHODS["bf16"], "shipped")
    for i, p in enumerate(p for n, p in model.named_parameters() if "lora_" in n):
        p.data.fill_(i)
    adapters = WideAdapters(model, drawn=False)
    first = [p.detach().clone() for p in adapters.parameters]
    adapters.reset([3, 4])
    assert all(torch.equal(a, b) for run in (0, 1) for a, b in zip(adapters.of_run(run), first))


def test_a_run_that_diverges_is_loud(data, models):
    rows, _ = rows_for(models)
    adapters = WideAdapters(models.adapted(methods.METHODS["bf16"], "shipped")[0])
    recipes = [training.Recipe(lr, 0, 3, batch=2) for lr in (1e-3, 1e38)]
    with pytest.raises(Diverged, match="of 2 runs"):
        train_together(adapters, rows, recipes, "cpu")
    assert train_together(adapters, rows, recipes[:1], "cpu")[0]["finite"]


def test_rows_have_no_padding(data, models):
    rows, _ = rows_for(models)
    index = torch.tensor([[3, 1], [0, 2]])
    batch = rows_of(rows, index)
    assert batch.run.unique_consecutive().tolist() == [0, 1] and batch.run_of_label.unique_consecutive().tolist() == [0, 1]
    for i, (start, end) in enumerate(zip(batch.first_tokens.tolist(), batch.first_tokens.tolist()[1:])):
        row = index.flatten()[i]
        assert torch.equal(batch.ids[start:end], rows.ids[row, : end - start]) and end - start <= batch.longest
        assert batch.positions[start:end].tolist() == list(range(end - start))
        own = (batch.place >= start) & (batch.place < end)
        known = rows.labels[row] != training.IGNORED
        assert torch.equal(batch.label[own], rows.labels[row][known])
        assert torch.equal(batch.place[own] - start, rows.at[row][known])
