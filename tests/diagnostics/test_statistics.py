"""Statistics of quantised tensors: numbers by hand, the tensors that training quantises, a training that does not notice."""

import json

import pytest
import torch
from _assertions import by_device
from _tiny_models import save_tiny
from conftest import tiny_llama
from low_level import adapted_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_nvfp4 import BACKENDS, FrozenOptions, NVFP4StatisticsCallback, enable_cuda_graphs, tensor_statistics
from peft_nvfp4.cli import statistics as tools
from peft_nvfp4.diagnostics import statistics_hooks as hooks
from peft_nvfp4.diagnostics.statistics import Statistics, TensorStatistics
from peft_nvfp4.diagnostics.statistics_hooks import Measurement, Sums
from peft_nvfp4.numerics import reference
from peft_nvfp4.ops import fused as fused_ops
from peft_nvfp4.ops import linear as linear_ops

IDS = torch.arange(32).view(2, 16) % 64


def adapted(dtype=torch.float32, seed=0, **fields):
    """(model, its dense weights)."""
    base = tiny_llama(dtype, vocab_size=64)
    dense = {name: p.detach() for name, p in base.named_parameters()}
    torch.manual_seed(seed)
    return adapted_model(base, **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields}).train(), dense


def step(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(loss, gradients) of one step."""
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    ids = IDS.to(next(model.parameters()).device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_offloaded_weights_are_measured_where_they_compute(backend):
    found = []
    for memory in ("small", "smallest"):
        model, dense = adapted(torch.bfloat16, backend=backend, memory=memory)
        found.append(tensor_statistics(model.to("cuda"), [IDS], weights=dense).as_dict())
    assert found[0] == found[1]


# ---------------------------------------------------------------------------------------------- by hand
def test_numbers_of_one_row_by_hand():
    """amax 6.2, so g = 2**ceil(log2(6.2 / 2688)) = 2**-8 and s = e4m3(6.2 / 6 * 256 = 264.5) = 256 (its neighbour is 288): codes
    count ones, the block holds at most 6. The second block is a thousand times smaller: s = e4m3(.006 / 6 * 256) = .25, step
    2**-10."""
    first = [6.2, 5.5, 0.2, -0.25, 0.3, 0.0, 2.0, 3.4] + [1.0] * 8
    becomes = [6.0, 6.0, 0.0, 0.0, 0.5, 0.0, 2.0, 3.0] + [1.0] * 8  # .25 is a tie: to the even code, 0
    second = [0.006] + [0.0002] * 3 + [0.0] * 12
    becomes += [6 * 2**-10] + [0.0] * 15  # .0002 is a fifth of a step
    x = torch.tensor([first + second])
    sums = Sums()
    sums.add(x, linear_ops.quantize_input(x, None, 1))
    found = sums.result()
    d = torch.tensor([becomes])
    assert found.error == pytest.approx(float((x - d).norm() / x.norm()), rel=1e-6)  # FP32 norms of 32 numbers
    assert found.underflow == pytest.approx(5 / 19)  # .2, .25 and three times .0002, of 19 values that are not zero
    assert found.saturation == pytest.approx(2 / 32)  # 6.2, and .006 > 6 * 2**-10
    assert found.amax == pytest.approx(6.2) and found.values == 32
    assert (found.scale_min, found.scale_max) == (0.25, 256.0)


def test_two_terms_hold_more_and_a_offset_is_taken_off():
    x = torch.randn(8, 64) + 5
    one, two, centred = Sums(), Sums(), Sums()
    one.add(x, linear_ops.quantize_input(x, None, 1))
    two.add(x, linear_ops.quantize_input(x, None, 2))
    mu = torch.full((64,), 5.0)
    parts = linear_ops.quantize_input(x, mu, 1)
    centred.add(x, parts, mu)
    d = linear_ops.dequantize_input(parts, mu, torch.float32)
    assert centred.result().error == pytest.approx(float((d - x).norm() / x.norm()), rel=1e-5)
    assert two.result().error < 0.2 * one.result().error and centred.result().error < 0.5 * one.result().error
    assert two.result().saturation < one.result().saturation


def test_chunks_are_added_up(monkeypatch):
    x = torch.randn(40, 48)
    whole, pieces = Sums(), Sums()
    whole.add(x, linear_ops.quantize_input(x, None, 2))
    monkeypatch.setattr(hooks, "CHUNK", 100)
    pieces.add(x, linear_ops.quantize_input(x, None, 2))
    a, b = whole.result(), pieces.result()
    assert (a.underflow, a.saturation, a.amax, a.scale_min, a.scale_max, a.values) == (
        *(b.underflow, b.saturation, b.amax, b.scale_min, b.scale_max, b.values),
    )
    assert a.error == pytest.approx(b.error, rel=1e-6)  # FP32 squares, summed in FP64


def test_values_that_are_not_finite_are_seen():
    x = torch.randn(2, 32)
    x[0, 3] = torch.nan
    sums = Sums()
    sums.add(x, linear_ops.quantize_input(x, None, 1))
    assert sums.result().error != sums.result().error
    zero = Sums()
    zero.add(torch.zeros(2, 32), linear_ops.quantize_input(torch.zeros(2, 32), None, 1))
    assert (zero.result().error, zero.result().underflow, zero.result().scale_min) == (0.0, 0.0, None)


# ---------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_a_weight_against_its_original(backend):
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    linear = nn.Linear(96, 48)
    original = linear.weight.detach().clone()
    layer = BACKENDS[backend].quantize(linear, FrozenOptions())
    found = hooks.weight_sums(layer, original).result()
    w = reference.dequantize(reference.quantize(original, hooks.WEIGHT)) if backend == "bf16" else layer.dequantize(torch.float32)
    assert found.error == pytest.approx(float((w - original).norm() / original.norm()), rel=1e-5)
    assert found.underflow == pytest.approx(float(((w == 0) & (original != 0)).sum() / (original != 0).sum()))
    assert found.used == (backend != "bf16") and (found.scale_max is None) == (backend == "nf4")
    alone = hooks.weight_sums(layer, None).result()
    assert (alone.error is None) == (backend != "bf16") and alone.values == 96 * 48
    with pytest.raises(ValueError, match="weight must be"):
        hooks.weight_sums(layer, original[:5])


# ---------------------------------------------------------------------------------------------- what training quantises
@pytest.fixture
def seen(monkeypatch):
    """[(t, terms)] of everything that is compared."""
    calls = []
    original = Sums.add
    monkeypatch.setattr(Sums, "add", lambda self, t, parts=(), *args: (calls.append((t, parts)), original(self, t, parts, *args)))
    return calls


def same_codes(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for p, q in zip(a, b) for x, y in zip(p[:3], q[:3]))


@by_device
@pytest.mark.parametrize("accuracy", ["paper", "high"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_those_that_fused_producers_quantise(monkeypatch, seen, accuracy, dtype, device):
    model, made = adapted(dtype, accuracy=accuracy)[0].to(device), []
    for name in ("rmsnorm_quantize", "silu_mul_quantize"):
        original = getattr(fused_ops, name)
        monkeypatch.setattr(fused_ops, name, lambda *a, original=original: (made.append(out := original(*a)), out)[1])
    tensor_statistics(model, [IDS], sites=("input",))
    assert len(made) == 6  # two norms and a product in each of two layers
    measured = [parts for _, parts in seen]
    assert all(any(same_codes(out.parts, parts) for parts in measured) for out in made)
    # o_proj by itself; k_proj and v_proj, up_proj share what the norm before them was measured by
    assert len(measured) == 8


@by_device
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_those_that_enter_the_product(monkeypatch, seen, fused, device):
    model = adapted(fused=fused)[0].to(device)
    entered = []
    original = linear_ops.dgrad.run
    monkeypatch.setattr(linear_ops.dgrad, "run", lambda p: (entered.extend(item.dy for item in p.linears), original(p))[1])
    with Measurement(model, sites=("gradient",)) as watching:
        step(model)
    measured = [t for t, _ in seen]
    # the first q, k, v need no gradient of their input, so their dy enter no product
    assert len(entered) == 2 * 7 - 3 and len(measured) == 14 == len(watching.sums)
    assert all(any(torch.equal(dy, t) for t in measured if t.shape == dy.shape) for dy in entered)


def test_unfused_linears_see_what_they_are_called_with(seen):
    model, dense = adapted(fused=False, backend="bf16")
    found = tensor_statistics(model, [IDS], weights=dense)
    assert not any(s.used for sites in found.layers.values() for s in sites.values())
    embedded = dense["model.embed_tokens.weight"][IDS].reshape(-1, 64)
    norm = embedded * torch.rsqrt(embedded.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert any(t.shape == norm.shape and torch.allclose(t, norm, rtol=1e-5, atol=1e-6) for t, _ in seen)


# ---------------------------------------------------------------------------------------------- nothing changes
SETTINGS = {
    "high": {},
    "balanced": {"accuracy": "balanced"},
    "paper": {"accuracy": "paper"},
    "random numbers": {"lora_dropout": 0.1, "gradients": "nvfp4_sr"},
    "attention only": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"use_dora": True},
    "bf16": {"backend": "bf16", "memory": "small"},
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "checkpointing", "reentrant"])
def test_a_measured_step_is_the_same_step(case, checkpointing):
    model, _ = adapted(torch.bfloat16, **SETTINGS[case])
    if checkpointing is not None:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss, grads = step(model)
    with Measurement(model) as watching:
        again, measured = step(model)
        after = torch.rand(3)
    assert torch.equal(loss, again) and all(torch.equal(a, b) for a, b in zip(grads, measured))
    torch.manual_seed(7)
    step_random = step(model) and torch.rand(3)
    assert torch.equal(after, step_random)  # no random number more was drawn
    found = watching.result()
    assert len(found) == 14 and all({"weight", "input", "gradient"} == sites.keys() for sites in found.values())
    assert all(s["input"].values == 32 * (176 if "down" in name else 64) for name, s in found.items())  # once, not twice
    assert all(not (m._forward_hooks or m._forward_pre_hooks) for n, m in model.named_modules() if "proj" in n)


def test_gradients_and_random_states_are_put_back():
    model, _ = adapted(lora_dropout=0.5)
    step(model)
    before = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    state = torch.get_rng_state()
    tensor_statistics(model, [IDS, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, p.grad) for a, p in zip(before, (p for p in model.parameters() if p.requires_grad)))


def test_recordings_of_steps_stay_and_are_not_used():
    model, _ = adapted()
    enable_cuda_graphs(model)
    decoder = model.get_base_model().model
    graphed = vars(decoder)["forward"]
    found = tensor_statistics(model, [IDS])
    assert len(found.of("input")) == 14
    assert vars(decoder)["forward"] is graphed and not graphed.status.reasons


def test_a_compiled_model_is_measured_uncompiled():
    model, _ = adapted()
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    with Measurement(model, sites=("input",)) as watching:
        step(compiled)
    assert not graphs and len(watching.sums) == 14


def test_some_rows_are_rows_of_all():
    model, _ = adapted(fused=False)
    some, everything = tensor_statistics(model, [IDS], rows=8), tensor_statistics(model, [IDS])
    name = "model.layers.1.mlp.down_proj"
    assert some.layers[name]["input"].values == 8 * 176 and everything.layers[name]["input"].values == 32 * 176
    assert some.layers[name]["input"].amax <= everything.layers[name]["input"].amax
    assert some.layers[name]["weight"] == everything.layers[name]["weight"]


# ---------------------------------------------------------------------------------------------- while training
class Listener(TrainerCallback):
    """What TensorBoard's callback is given."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append((state.global_step, logs))


def trained(tmp_path, callback, steps=5):
    model, _ = adapted(lora_dropout=0.1)
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(10, 1)]
    args = TrainingArguments(
        str(tmp_path), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", seed=3, learning_rate=1e-2,
    )  # fmt: skip
    listener = Listener()
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[listener])
    added = callback(trainer) if callback else None
    if added is not None:
        trainer.add_callback(added)
    trainer.train()
    weights = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return trainer, listener.logged, weights, added


def test_the_callback_logs_through_trainer(tmp_path):
    make = lambda trainer: NVFP4StatisticsCallback(trainer, every=2)
    trainer, logged, weights, callback = trained(tmp_path / "a", make)
    own = [(step, logs) for step, logs in logged if "nvfp4/input_error" in logs]
    assert [step for step, _ in own] == [1, 3, 5]
    logs = own[0][1]
    expected = {f"nvfp4/{s}_{n}" for s in ("input", "gradient") for n in ("error", "underflow", "saturation", "error_worst")}
    assert expected | {"nvfp4/gradient_amax"} <= logs.keys()
    assert 0 < logs["nvfp4/input_error"] <= logs["nvfp4/input_error_worst"] < 0.2 and all(v == v for v in logs.values())
    assert sum("nvfp4/input_error" in row for row in trainer.state.log_history) == 3
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4, 5]
    # both micro-batches of 2 x 16 tokens
    assert callback.latest.layers["model.layers.0.self_attn.q_proj"]["input"].values == 2 * 32 * 64
    assert len(callback.latest.layers) == 14
    _, _, plain, _ = trained(tmp_path / "b", None)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain))


def test_an_interrupted_step_leaves_no_hooks(tmp_path):
    model, _ = adapted()
    callback = NVFP4StatisticsCallback(object.__new__(Trainer), every=1)
    state = type("State", (), {"global_step": 0, "is_world_process_zero": True})()
    callback.on_step_begin(None, state, None, model=model)
    callback.on_train_end(None, state, None)
    assert all(not m._forward_hooks for n, m in model.named_modules() if "proj" in n) and callback.latest is None


# ---------------------------------------------------------------------------------------------- refusals, presentation
def test_refusals():
    with pytest.raises(ValueError, match="no frozen linears"):
        tensor_statistics(tiny_llama(), [IDS])
    model, _ = adapted()
    with pytest.raises(ValueError, match="unknown site 'output'"):
        tensor_statistics(model, [IDS], sites=("output",))
    with pytest.raises(ValueError, match="rows must be"):
        tensor_statistics(model, [IDS], rows=0)
    with pytest.raises(ValueError, match="returns no loss"):
        tensor_statistics(model, [{"inputs_embeds": torch.zeros(1, 4, 64)}])
    with pytest.raises(ValueError, match="every must be"):
        NVFP4StatisticsCallback(None, every=0)


def numbers(error: float | None, used: bool = True) -> TensorStatistics:
    return TensorStatistics(error, 0.5, 0.1, 3.0, 0.5, 448.0, 10, used)


def test_worst_layers_means_and_json():
    layers = {f"model.layers.{i}.mlp.up_proj": {"weight": numbers(e)} for i, e in enumerate((0.1, 0.3, None, float("nan"), 0.2))}
    found = Statistics(layers)
    assert [name.split(".")[2] for name, _, _ in found.worst(3)] == ["3", "1", "4"]
    assert found.worst(3, site="input") == [] and found.mean("input") is None
    known = Statistics({name: sites for name, sites in layers.items() if name.split(".")[2] in "014"})
    assert known.mean("weight") == pytest.approx(0.2) and known.of("weight") == {
        n: s["weight"].error for n, s in known.layers.items()
    }
    assert json.loads(json.dumps(known.as_dict()))["layers"].keys() == known.layers.keys()
    assert "worst: model.layers.1.mlp.up_proj" in str(known)


def test_heat_map_places_layers_and_towers(tmp_path):
    names = [
        f"model.{tower}layers.{i}.{p}_proj" for tower in ("text_model.", "vision_model.encoder.") for i in (0, 1) for p in "qk"
    ]
    found = Statistics({name: {"weight": numbers(i / 100)} for i, name in enumerate([*names, "model.connector.proj"])})
    rows, columns, values = found.grid("weight", "error")
    assert rows[0] == "model.text_model.layers.0" and rows[-1] == "model.connector" and columns == ["q_proj", "k_proj", "proj"]
    assert values[3][:2] == [0.06, 0.07] and values[0][2] != values[0][2]
    found.png(tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="shows one of error"):
        found.png(tmp_path / "h.png", "amax")
    with pytest.raises(ValueError, match="nothing was measured"):
        Statistics({}).png(tmp_path / "h.png")


def test_a_row_of_the_table():
    assert tools.cells("model.layers.3.mlp.up_proj", "input", numbers(None, used=False)) == (
        *("3.mlp.up_proj", "input *", "–", "50.00", "10.00", "3", "0.5–448"),
    )


# ---------------------------------------------------------------------------------------------- the command
def test_the_command_with_a_model_and_with_an_adapter(tmp_path):
    from typer.testing import CliRunner

    from peft_nvfp4 import cli

    app, folder = cli.application(), save_tiny(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"text": "the film is good and the story is not dull"}) for _ in range(4))
    )
    arguments = ["statistics", str(tmp_path / "data.jsonl"), "--limit", "3"]
    run = lambda *more: CliRunner().invoke(app, [*arguments, *map(str, more)])
    result = run("-m", folder, "--png", tmp_path / "h.png", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["layers"]) == 14 and (tmp_path / "h.png").stat().st_size > 10_000
    assert 0.05 < found["means"]["weight"]["error"] < 0.12 and found["means"]["gradient"]["underflow"] > 0
    shown = run("-m", folder, "--backend", "bf16", "--by", "underflow").stdout
    assert "the largest underflow" in shown and "not quantised by this model" in shown
    train = ["train", folder, tmp_path / "data.jsonl", "-o", tmp_path / "adapter", "--steps", "1", "--rank", "4"]
    assert CliRunner().invoke(app, [str(a) for a in train]).exit_code == 0
    result = run("--adapter", tmp_path / "adapter", "--json", "-")
    assert result.exit_code == 0, result.output
    with_adapter = json.loads(result.stdout)
    assert with_adapter["means"]["weight"] == found["means"]["weight"]  # the same dense weights, packed alike
    assert "give a model" in run().stderr and "--by must be" in run("-m", folder, "--by", "amax").stderr
