"""LoftQ and EoRA: adapters that start at the best low-rank approximation of the base's rounding error."""

import copy
import json
import warnings

import pytest
import torch
from _assertions import assert_same_bits, unit
from _lora_layers import LAYERS, D, Mlp, assert_close, assert_same_packed, formula, inputs, layer_of, packed
from conftest import tiny_llama
from peft import LoftQConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn

from peft_nvfp4 import CalibrationOptions, GPTQOptions, NVFP4LoraConfig, calibrate, freeze_model, preprocess_eora
from peft_nvfp4.lora.inits import low_rank

R, SCALING = 4, 2.0
IDS = torch.arange(24).reshape(2, 12) * 7 % 128


@pytest.fixture(params=("nvfp4", "nf4"))
def backend(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return request.param


def config(init="loftq", **settings):
    return NVFP4LoraConfig(
        **{"r": R, "lora_alpha": SCALING * R, "target_modules": list(LAYERS), "init_lora_weights": init, **settings}
    )


def update(layer):
    """s B A in FP64."""
    return SCALING * layer.lora_B["default"].weight.detach().double() @ layer.lora_A["default"].weight.detach().double()


def seen(dense, n=64):
    """Calibration inputs with a strong spectrum, and a run of the model on them; the MLP's norm is left out."""
    dense.norm = nn.Identity()
    x = torch.randn(n, D) * 0.7 ** torch.arange(D)
    return x, lambda: dense(x)


@pytest.mark.parametrize("kind", ("full", "singular"))
@pytest.mark.parametrize("shape", ((24, 40), (40, 24)))
def test_low_rank_minimises_the_output_error(shape, kind):
    """The best rank-r output error is the norm of the other singular values of R L; checked in FP64."""
    residual, x = torch.randn(shape), torch.randn(16 if kind == "singular" else 200, shape[1]) * 0.8 ** torch.arange(shape[1])
    h = x.T @ x / len(x)
    a, b = low_rank(residual, R, h)
    root = torch.linalg.eigh(h)
    root = (root.eigenvectors * root.eigenvalues.clamp_min(0).sqrt()).double()
    best = torch.linalg.svdvals(residual.double() @ root)[R:].norm()
    plain = low_rank(residual, R)
    error = lambda a, b: ((residual.double() - b.double() @ a.double()) @ root).norm()
    assert best * (1 - 1e-6) <= error(a, b) <= best * (1 + 1e-3) < error(*plain)


def test_rank_beyond_the_layer_raises():
    with pytest.raises(ValueError, match="rank 5 is more than a layer of 4 x 8 has"):
        low_rank(torch.randn(4, 8), 5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_loftq_is_the_leading_part_of_the_residual(backend, dtype):
    """The base keeps its bytes; s B A is the truncated SVD of W - D(W_f); the forward adds it."""
    dense = Mlp().to(dtype)
    base = freeze_model(copy.deepcopy(dense), backend, progress=False)
    model = get_peft_model(copy.deepcopy(dense), config(backend=backend))
    for name in LAYERS:
        layer, weight = layer_of(model, name), getattr(dense, name).weight.detach().double()
        assert_same_packed(packed(layer), packed(getattr(base, name)))
        residual = weight - layer.get_base_layer().dequantize(torch.float32).double()
        best = torch.linalg.svdvals(residual)[R:].norm()
        assert best * (1 - 1e-5) <= (residual - update(layer)).norm() <= best * (1 + 1e-4)
        assert best < 0.95 * residual.norm()
        x = inputs(layer, dtype)
        assert_close(layer(x), *formula(layer, x, ["default"]), dtype)
        assert layer.lora_A["default"].weight.dtype == torch.float32 and layer.lora_B["default"].weight.requires_grad


def test_ranks_by_pattern_scaling_and_selection():
    """The product does not depend on how it is split between s, A and B; layers that are no target hold nothing back."""
    model = get_peft_model(
        tiny_llama(), config(target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 7}, use_rslora=True, lora_alpha=3)
    )
    layers = model.base_model.model.model.layers[0]
    assert layers.mlp.up_proj.lora_A["default"].weight.shape[0] == 7 and layers.self_attn.q_proj.r["default"] == R
    for layer in (layers.mlp.up_proj, layers.self_attn.q_proj):
        s = layer.scaling["default"]
        dense = tiny_llama().model.layers[0].get_submodule("mlp.up_proj" if layer is layers.mlp.up_proj else "self_attn.q_proj")
        residual = (dense.weight - layer.get_base_layer().dequantize(torch.float32)).detach().double()
        got = s * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        best = torch.linalg.svdvals(residual)[layer.r["default"] :].norm()
        assert (residual - got).norm() <= best * (1 + 1e-4)
    assert not [m for m in model.modules() if hasattr(m, "_residual_factors")]


def test_dora_starts_from_the_corrected_weight():
    """Its magnitude is the norm of D(W) + s B A, so that the start is that sum."""
    layer = layer_of(get_peft_model(Mlp(), config(use_dora=True)))
    weight = layer.get_base_layer().dequantize(torch.float32).double() + update(layer)
    got = layer.lora_magnitude_vector["default"].weight.double()
    assert ((got - weight.norm(dim=1)).abs() <= 256 * unit(torch.float32) * weight.norm(dim=1)).all()


def test_eora_minimises_the_output_error():
    """On the calibration inputs: the best of rank r."""
    torch.manual_seed(1)
    dense = Mlp()
    x, run = seen(dense)
    plain = get_peft_model(copy.deepcopy(dense), config())
    weight = dense.up_proj.weight.detach().double()
    preprocess_eora(dense, run)
    model = get_peft_model(dense, config("eora"))
    layer = layer_of(model)
    residual = weight - layer.get_base_layer().dequantize(torch.float32).double()
    errors = {m: ((residual - update(layer_of(m))) @ x.double().T).norm() for m in (model, plain)}
    best = torch.linalg.svdvals(residual @ x.double().T)[R:].norm()
    assert best * (1 - 1e-6) <= errors[model] <= best * (1 + 1e-3)
    assert errors[model] < 0.9 * errors[plain]


def test_linears_of_one_input_share_their_moments():
    dense = tiny_llama()
    preprocess_eora(dense, lambda: dense(input_ids=IDS))
    attention = dense.model.layers[0].self_attn
    marks = [getattr(attention, f"{n}_proj")._peft_nvfp4_moments for n in "qkvo"]
    assert marks[0] is marks[1] is marks[2] is not marks[3] and marks[0].count == IDS.numel()
    assert not attention.q_proj._forward_pre_hooks
    x = dense.model.layers[0].input_layernorm(dense.model.embed_tokens(IDS)).detach().reshape(-1, 64)
    want = x.T @ x / len(x)
    assert (marks[0].h - want).abs().max() <= 256 * unit(torch.float32) * (x.abs().T @ x.abs() / len(x)).max()


def test_eora_without_statistics_raises():
    with pytest.raises(ValueError, match="none of up_proj were seen: call peft_nvfp4.preprocess_eora"):
        get_peft_model(Mlp(), config("eora"))


def test_on_a_calibrated_base(tmp_path):
    """The residual of GPTQ's weights; the base keeps the calibration's bytes."""
    options = CalibrationOptions(gptq=GPTQOptions(), samples=2, seq_len=12, report_tokens=0)
    calibrated = tiny_llama()
    calibrate(calibrated, [IDS[:1], IDS[1:]], options=options, output_dir=tmp_path, progress=False)
    dense = tiny_llama()
    model = get_peft_model(dense, config(target_modules="all-linear", calibration=tmp_path))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    base = layer.get_base_layer()
    assert_same_bits(base.weight, calibrated.model.layers[0].mlp.up_proj.weight, "codes")
    residual = (tiny_llama().model.layers[0].mlp.up_proj.weight - base.dequantize(torch.float32)).detach().double()
    best = torch.linalg.svdvals(residual)[R:].norm()
    assert (residual - update(layer)).norm() <= best * (1 + 1e-4)


def test_saved_and_loaded(tmp_path):
    """adapter_config.json says nothing that stock PEFT would repeat."""
    settings = LoftQConfig(loftq_iter=1)  # PEFT's defaults
    model = get_peft_model(tiny_llama(), config(target_modules="all-linear", loftq_config=settings)).eval()
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "lora_B"):
                layer.lora_B["default"].weight += 0.01
        logits = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["init_lora_weights"] is True and not stored["loftq_config"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoraConfig.from_pretrained(str(tmp_path))
    again = NVFP4LoraConfig.from_pretrained(tmp_path)
    assert again.init_lora_weights is True
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, config=again).eval()
    with torch.no_grad():
        assert_same_bits(loaded(input_ids=IDS).logits, logits, "logits")


def test_a_frozen_base_is_refused_and_unchanged():
    model = freeze_model(Mlp(), progress=False)
    modules = dict(model.named_modules())
    for make in (lambda: config(), lambda: _plain_loftq()):
        with pytest.raises(ValueError, match="init_lora_weights='loftq' starts from what rounding a dense weight left over"):
            get_peft_model(model, make())
        assert dict(model.named_modules()) == modules
    model = get_peft_model(Mlp(), config())
    with pytest.raises(ValueError, match="starts from what rounding"):
        model.add_adapter("second", config())


def _plain_loftq():
    made = LoraConfig(r=R, target_modules=list(LAYERS))
    made.init_lora_weights, made.loftq_config = "loftq", {"loftq_bits": 4, "loftq_iter": 1}  # the constructor wants scipy
    return made


@pytest.mark.parametrize("init", ("loftq", "eora"))
def test_a_bf16_base_is_refused(init):
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' starts from the rounding error .* a bf16 base has none"):
        get_peft_model(Mlp(), config(init, backend="bf16"))


def test_wrong_settings_are_refused():
    for settings, message in (
        (dict(loftq_config={"loftq_bits": 2}), "loftq_bits=2"),
        (dict(loftq_config={"loftq_iter": 2}), "loftq_iter=2 is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**settings)
