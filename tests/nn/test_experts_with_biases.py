"""Experts as gpt-oss has them: weights transposed, gate and up in turn, biases, a clamped gate of its own. What is packed are the
matrices of linears, and results are those of frozen linears with these biases."""

import json

import pytest
import torch
from _frozen_experts import BACKEND, OPTIONS, adapted, assert_equal, experts_of, logits, plain, routed
from _mixtures import COMMON, IDS, gpt_oss
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from peft_nvfp4 import PactConfig, dequantize_model, freeze_model, merge
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts, frozen_experts, linear_of
from peft_nvfp4.nn.registry import BACKENDS
from peft_nvfp4.numerics.formats import E2M1_GRID
from peft_nvfp4.training.steps import slow_down_steps


def dense_experts(dtype=torch.float32):
    """With biases that are not zero."""
    torch.manual_seed(0)
    experts = experts_of(gpt_oss()).to(dtype)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return experts


def linears(dense, name):
    """A frozen linear with its bias for every expert."""
    made = []
    for weight, bias in zip(getattr(dense, name).detach().clone(), getattr(dense, f"{name}_bias").detach().clone()):
        linear = linear_of(weight.T.contiguous())
        linear.bias = torch.nn.Parameter(bias)
        made.append(BACKENDS["nvfp4"].quantize(linear, OPTIONS[name]))
    return made


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_output_and_gradients_are_those_of_single_linears(dtype):
    """Bit for bit, as of experts without biases."""
    dense = dense_experts(dtype)
    first, down = linears(dense, "gate_up_proj"), linears(dense, "down_proj")
    experts = FrozenExperts.quantize(dense, "nvfp4", OPTIONS)
    assert experts.projections == {"gate_up_proj": (96, 32), "down_proj": (32, 48)}
    assert all(p.dtype == torch.uint8 for p in experts.packed_tensors().values())
    x, index, w = routed(dtype=dtype)

    def alone():
        shares = x.new_zeros(*index.shape, x.shape[1])
        for e in range(3):
            token, slot = torch.where(index == e)
            shares = shares.index_put((token, slot), down[e](dense._apply_gate(first[e](x[token]))))
        return (shares * w[..., None]).sum(1).to(x.dtype)

    results = []
    for run in (lambda: experts(x, index, w), alone):
        x.grad = w.grad = None
        y = run()
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    for got, expected in zip(*results):
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@BACKEND
def test_dense_again(backend):
    """Weights in their own order, biases as they were."""
    dense = dense_experts()
    before = plain(dict(dense.named_parameters()))
    again = FrozenExperts.quantize(dense, backend, OPTIONS).to_experts()
    for name, p in again.named_parameters():
        assert p.shape == before[name].shape
        if "bias" in name:
            assert torch.equal(p, before[name])
        else:
            assert 0 < (p - before[name]).norm() / before[name].norm() < 0.12  # of either 4-bit format
    assert again(*routed()).shape == (12, 32)


@BACKEND
def test_adapters_are_those_of_stock_peft(backend, tmp_path):
    """By the file, on the model made dense: in NF4, which leaves inputs as they are, the same function up to FP32 rounding."""
    model = adapted(gpt_oss, backend)
    assert len(frozen_experts(model)) == 2
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert sum(".experts." in n for n in grads) == 8 and all(g is not None and g.norm() > 0 for g in grads.values())
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    again = PeftModel.from_pretrained(freeze_model(gpt_oss(), backend, progress=False), tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    if backend == "nf4":
        torch.manual_seed(1)
        dense = dequantize_model(freeze_model(gpt_oss(), backend, progress=False))
        stock = PeftModel.from_pretrained(dense, tmp_path)
        torch.testing.assert_close(logits(stock), logits(model), rtol=1e-4, atol=1e-5)


def test_merging():
    model = adapted(gpt_oss)
    merged, report = merge(model, "nvfp4", probe=IDS)
    assert len(frozen_experts(merged)) == 2 and report.probe.retained > 0.5
    model = adapted(gpt_oss, "nf4")
    before = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=1e-4, atol=1e-5)


def test_loading_and_saving(tmp_path):
    """Quantised while loading: the bytes of freeze_model. Saved and loaded again: the same model."""
    torch.manual_seed(2)
    dense = gpt_oss()
    for name, p in dense.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p, std=0.1)
    dense.save_pretrained(tmp_path / "dense")
    loaded = type(dense).from_pretrained(tmp_path / "dense", quantization_config=PactConfig())
    frozen = freeze_model(dense, progress=False)
    for i in (0, 1):
        assert_equal(dict(experts_of(loaded, i).named_parameters()), dict(experts_of(frozen, i).named_parameters()))
    loaded.save_pretrained(tmp_path / "packed")
    again = type(dense).from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again), logits(loaded))


def test_offloaded():
    """Biases stay where they are computed with; losses and gradients are those without offload."""
    results = []
    for memory in ("fast", "smallest"):
        model = adapted(gpt_oss, memory=memory).train()
        slow_down_steps(model)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()})
    assert_equal(*results)


def mxfp4(n: int, k: int, lowest: int) -> torch.Tensor:
    """Weights (n, k) of random MXFP4: E2M1 codes, and for 32 of them a power of two from 2**lowest to 1."""
    grid = torch.tensor(E2M1_GRID + tuple(-v for v in E2M1_GRID))
    scales = torch.exp2(torch.randint(lowest, 1, (n, k // 32, 1)).float())
    scales[0, 0], scales[1] = 1.0, 2.0**lowest
    codes = torch.randint(0, 16, (n, k // 32, 32))
    for i in range(1, 8):  # a block with each largest magnitude, under the smallest scale
        codes[1, i] = torch.where(codes[1, i] % 8 > i, i, codes[1, i])
    return (grid[codes] * scales).view(n, k)


def test_weights_in_mxfp4_are_taken_over_exactly():
    """As gpt-oss is published, dequantised by transformers. The searching rule finds a scale without an error: with the largest
    magnitude m of 16 codes, 2**e for m = 4, 6, and 2**e / 2, / 4, ... for smaller ones, whose multiples are on the grid as well,
    and which lie among the scales tried. The powers of two of E4M3 are 2**-9 to 2**8, and the largest block takes one from 2**7
    up: so e may be down to -14 where m is 0.5, which takes 2**e / 8. Smaller blocks may be rounded."""
    torch.manual_seed(0)
    for lowest, exact in ((-14, True), (-24, False)):
        weight = mxfp4(64, 256, lowest)
        found = BACKENDS["nvfp4"].quantize(linear_of(weight.bfloat16())).dequantize(torch.float32)
        wrong = (found != weight).view(64, -1, 16).any(-1)
        assert bool(wrong.any()) != exact
        largest = weight.view(64, -1, 16).abs().amax(-1)
        assert bool((largest[wrong] < 2.0**-14).all())


def save_in_mxfp4(folder) -> None:
    """A tiny gpt-oss with its experts as they are published: two codes a byte, an exponent of 8 bits for 32 of them."""
    torch.manual_seed(0)
    sizes = dict(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    config = GptOssConfig(**COMMON, **sizes, layer_types=["full_attention", "sliding_attention"])
    tensors = dict(GptOssForCausalLM(config).bfloat16().state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(127 - 14, 127, (experts, n, k // 32), dtype=torch.uint8)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    method = {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | method))


def dequantised(folder):
    """As transformers does: all of it dense first."""
    settings = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.bfloat16)


def test_logits_are_those_of_the_published_weights(tmp_path):
    """With the weights that are stored: the bits of transformers' dequantised model. Packed, inputs are rounded as well: two
    terms of NVFP4 are as 8 bits, and 0.02 to 0.03 of the logits are left through two layers of random weights."""
    save_in_mxfp4(tmp_path)
    model = dequantised(tmp_path)
    published = logits(model)
    freeze_model(model, skip_modules=["self_attn"], progress=False)
    packed = logits(model)
    assert 0 < (packed - published).float().norm() < 0.06 * published.float().norm()
    assert torch.equal(logits(dequantize_model(model)), published)


@pytest.mark.parametrize("skip", ([], ["experts"]), ids=["packed", "dense"])
def test_published_weights_are_read_a_projection_at_a_time(skip, tmp_path):
    """The bytes of freezing the dequantised model; saved, and loaded again, the same."""
    (folder := tmp_path / "published").mkdir()
    save_in_mxfp4(folder)
    config = PactConfig(skip_modules=skip)
    streamed = GptOssForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    assert len(frozen_experts(streamed)) == (0 if skip else 2)
    expected = freeze_model(dequantised(folder), skip_modules=skip, progress=False)
    assert_equal(streamed.state_dict(), expected.state_dict())
    assert torch.equal(logits(streamed), logits(expected))
    streamed.save_pretrained(tmp_path / "packed")
    again = GptOssForCausalLM.from_pretrained(tmp_path / "packed")
    assert_equal(streamed.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("down_proj_scales", None, "down_proj_blocks and _scales do not belong together, or one of them is not in the files"),
        ("down_proj_scales", lambda t: t[:, 1:], "down_proj_blocks and _scales do not belong together"),
        ("down_proj_scales", lambda t: t.fill_(255), "down_proj.* holds NaN or Inf"),
        ("gate_up_proj_blocks", lambda t: t[:3], "gate_up_proj_blocks and _scales do not belong together"),
    ],
    ids=["missing", "another shape", "exponents of NaN", "fewer experts"],
)
def test_published_weights_that_are_damaged(name, change, message, tmp_path):
    save_in_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    t = tensors.pop(f"model.layers.1.mlp.experts.{name}")
    if change is not None:
        tensors[f"model.layers.1.mlp.experts.{name}"] = change(t).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        GptOssForCausalLM.from_pretrained(tmp_path, quantization_config=PactConfig(), dtype=torch.bfloat16)
