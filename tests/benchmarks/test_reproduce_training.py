"""Training one adapter in ``benchmarks/reproduce``, on a tiny random model: against loops written out, and every variant of the
ablations."""

import pytest
import torch
from _reproduce import WORDS, data
from _tiny_models import save_tiny
from conftest import tiny_llama
from reproduce import ablations, methods, runner, tasks, training

from peft_nvfp4 import freeze_model
from peft_nvfp4.quantization.freeze import dequantize_model

__all__ = ["data"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "general_texts", lambda: [" ".join(WORDS * 3)] * 30)
    return methods.Models(tmp_path / "work", "cpu", samples=6, length=32, shipped=save_tiny(tmp_path / "model"))


def group(method: str, **k) -> runner.Group:
    return runner.Group("accuracy", "commonsense", "shipped", methods.METHODS[method], **k)


def curve(lab, model, g, seed, steps=3):
    return lab.train(model, g, training.Recipe(1e-2, seed, steps, batch=2, curve=steps))["curve"]


@pytest.mark.parametrize("name", ["bf16", "paper", "balanced_gptq"])
def test_an_adapter_reset_in_place_trains_like_a_fresh_one(data, models, name):
    lab, g = runner.TextLab(models), group(name)
    used, fresh = (lab.adapted(g) for _ in range(2))
    first = curve(lab, used, g, seed=1)
    lab.score(used, g, "test")
    again, anew = curve(lab, used, g, seed=0), curve(lab, fresh, g, seed=0)
    assert again == anew and first["loss"] != again["loss"] and again["loss"][0] != again["loss"][2]
    assert curve(lab, used, g, seed=1) == first
    assert [point["step"] for point in first["held_out"]] == [0, 3] and first["held_out"][0]["subsets"]


def test_training_is_plain_adamw(data, models):
    """Against a loop written out: the model's own loss over labels, PEFT's initial values, the same schedule."""
    lab, g = runner.TextLab(models), group("bf16")
    model, other = lab.adapted(g), lab.adapted(g)
    seen = curve(lab, model, g, seed=0, steps=4)["loss"]
    rows = lab.training_set(g.task, None)
    training.reset(other, 0)
    bounds = [(p.abs().max().item(), p.shape[1] ** -0.5) for n, p in other.named_parameters() if "lora_A" in n]
    assert all(0.9 * bound < largest <= bound for largest, bound in bounds)
    parameters = [p for p in other.parameters() if p.requires_grad]
    optimizer, expected = torch.optim.AdamW(parameters, weight_decay=0.0), []
    for step, index in enumerate(training.Recipe(1e-2, 0, 4, 2).order(len(rows))):
        labels = torch.full_like(rows.ids[index], -100)
        for row, i in enumerate(index):
            where = rows.labels[i] != -100
            labels[row, rows.at[i][where] + 1] = rows.labels[i][where]
        loss = other.train()(input_ids=rows.ids[index], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 1, (4 - step) / 3)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    # BF16 logits of single positions against those of all: two roundings of 2^-9 of losses near 4
    assert seen == pytest.approx(expected, abs=0.03)


def test_positions_without_a_label_count_nothing():
    model = methods.adapt(tiny_llama().requires_grad_(False), methods.METHODS["bf16"], None)
    ids = torch.randint(1, 100, (4, 16), generator=torch.Generator().manual_seed(5))
    at = torch.arange(12, 15).repeat(4, 1)
    labels = ids.gather(1, at + 1)
    labels[::2, 1:] = -100
    whole, rows = training.token_losses(model, training.Encoded(ids, at, labels), "cpu")
    assert rows.tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    logs = model(ids).logits.log_softmax(-1)
    expected = [-logs[r, p, labels[r, c]].item() for r in range(4) for c, p in enumerate(at[r]) if labels[r, c] != -100]
    assert whole.tolist() == pytest.approx(expected, rel=1e-4)  # FP32, the head over some positions and over all


@pytest.mark.parametrize("method", {m.name: m for b in ablations.VARIANTS.values() for m in b}.values(), ids=lambda m: m.name)
def test_every_variant_of_the_ablations_is_one_that_the_package_has(models, method):
    if method.config["backend"] == "nf4":
        pytest.importorskip("bitsandbytes")
    model, _ = models.adapted(method, methods.SHIPPED)
    ids = torch.randint(5, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    rows = training.Encoded(ids, torch.tensor([[3, 8]] * 2), torch.tensor([[7, 9]] * 2))
    training.token_losses(model.train(), rows, "cpu")[0].mean().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert gradients and all(g is not None and torch.isfinite(g).all() for g in gradients)
    if "last" in method.name:
        kept = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear and n.endswith("base_layer")]
        assert len(kept) == (14 if "first" in method.name else 7)


def test_weights_only_is_w4a16(models):
    """NVFP4 weights, exact activations: the dense model with the frozen one's dequantised weights."""
    method = methods.METHODS["w4a16_gptq"].changed("nearest", "", calibration=None)
    model, _ = models.adapted(method, methods.SHIPPED)
    dense = dequantize_model(freeze_model(models.load(methods.SHIPPED)[0], accuracy="paper", progress=False))
    ids = torch.arange(5, 25)[None]
    training.reset(model, 0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense(ids).logits)
        assert not torch.equal(dense(ids).logits, models.load(methods.SHIPPED)[0](ids).logits)


def test_rotated_weights_are_the_same_function(models):
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        one, two = (models.load(name, torch.float32)[0](ids).logits for name in methods.WEIGHTS)
    assert not torch.equal(one, two)
    assert (one - two).norm() < 0.05 * one.norm()  # the rotated ones were rounded to BF16: 2^-9 a weight


def test_tasks_have_metrics():
    assert {task.metric for task in tasks.TASKS.values() if task.kind == tasks.GENERATED} <= set(runner.scoring.METRICS)
