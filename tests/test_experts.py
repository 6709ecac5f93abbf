"""Frozen experts against a loop over single frozen linears, through files, adapters, merges and published checkpoints."""

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import published_checkpoints as published
import pytest
import torch
import torch.nn.functional as F
from _two_processes import both
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_moe import IDS, by_family, mixtral, qwen3_moe
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from peft_nvfp4 import (
    NVFP4LoraConfig,
    PactConfig,
    attach,
    dense_share,
    dequantize_model,
    detach,
    export_checkpoint,
    freeze_model,
    frozen_bytes,
    inspect_adapter,
    merge,
)
from peft_nvfp4.backends import BACKENDS, FrozenOptions
from peft_nvfp4.dataflow.mlp import FusedGatedMLP, recognise
from peft_nvfp4.expert_rows import SortedRows, TokenRows, by_expert
from peft_nvfp4.experts import FrozenExperts, frozen_experts, is_experts, linear_of
from peft_nvfp4.fingerprint import base_record, source_fingerprint
from peft_nvfp4.offload_layers import computing

OPTIONS = {"gate_up_proj": FrozenOptions(terms=2), "down_proj": FrozenOptions()}
BACKEND = pytest.mark.parametrize("backend", ("nvfp4", "nf4"))


def experts_of(model, layer=0):
    return model.model.layers[layer].mlp.experts


def frozen(make, backend="nvfp4", dtype=torch.float32, options=OPTIONS):
    """(dense experts' weights, the same experts frozen)."""
    original = experts_of(make()).to(dtype)
    weights = {name: p.detach().clone() for name, p in original.named_parameters()}
    return weights, FrozenExperts.quantize(original, backend, options)


def routed(tokens=12, experts=4, k=2, dtype=torch.float32, hidden=32):
    """Inputs of an experts module; the last expert gets no token."""
    index = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(tokens)])
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    return x, index, torch.rand(tokens, k, requires_grad=True)


def linears(weights, backend, options=OPTIONS):
    """A frozen linear of its own for every expert and projection."""
    cls = BACKENDS[backend]
    return {name: [cls.quantize(linear_of(each.clone()), options[name]) for each in w] for name, w in weights.items()}


def loop(layers, x, index, weights):
    """The formula, one expert after the other; sums in the order of the k experts of a token."""
    shares = x.new_zeros(*index.shape, x.shape[1])
    for e, (first, down) in enumerate(zip(layers["gate_up_proj"], layers["down_proj"])):
        token, slot = torch.where(index == e)
        if len(token):
            gate, up = first(x[token]).chunk(2, dim=-1)
            shares = shares.index_put((token, slot), down(F.silu(gate) * up))
    return (shares * weights[..., None]).sum(1).to(x.dtype)


def plain(tensors):
    return {name: t.detach().clone() for name, t in tensors.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("layouts", ("cached", "transient"))
@by_family
def test_packed_bytes_are_those_of_every_slice_alone(make, layouts):
    options = {name: FrozenOptions(layouts) for name in OPTIONS}
    weights, experts = frozen(make, options=options)
    for name, layers in linears(weights, "nvfp4", options).items():
        stacks = experts.stacks(name)
        assert len(stacks) == (6 if layouts == "cached" else 3)
        for e, layer in enumerate(layers):
            alone = layer.packed_tensors()
            assert stacks.keys() == alone.keys()
            assert all(torch.equal(stacks[leaf][e], alone[leaf]) for leaf in alone)
    assert all(p.dtype == torch.uint8 and not p.requires_grad for p in experts.parameters())
    assert experts.elements == sum(w.numel() for w in weights.values())


@BACKEND
def test_dense_and_back(backend):
    weights, experts = frozen(mixtral, backend)
    before = plain(experts.packed_tensors())
    for name, layers in linears(weights, backend).items():
        assert torch.equal(experts.dequantize(name, torch.float32), torch.stack([x.dequantize(torch.float32) for x in layers]))
        experts.requantize_(name, experts.dequantize(name, torch.float32))
    if backend == "nvfp4":  # same-axis requantisation is idempotent
        assert_equal(before, experts.packed_tensors())
    snapshot = experts.snapshot("down_proj")
    kept = plain(experts.packed_tensors())
    experts.requantize_("down_proj", torch.randn(4, 32, 48))
    assert not torch.equal(kept["down_proj"], experts.down_proj)
    experts.restore(snapshot)
    assert_equal(kept, experts.packed_tensors())
    x, index, w = routed()
    dense = experts.to_experts()
    assert is_experts(dense) and torch.equal(dense.gate_up_proj, experts.dequantize("gate_up_proj"))
    assert dense(x, index, w).shape == x.shape


@BACKEND
def test_casts_and_copies_leave_the_bytes(backend):
    _, experts = frozen(mixtral, backend)
    before = plain(experts.packed_tensors())
    twin = copy.deepcopy(experts)
    for cast in (torch.bfloat16, torch.float16):
        experts.to(cast)
        assert experts.compute_dtype == cast and experts.dequantize("down_proj").dtype == cast
        assert_equal(before, experts.packed_tensors())
    twin.requantize_("down_proj", torch.randn(4, 32, 48))
    x, index, w = routed(dtype=torch.float16)
    expected = experts(x, index, w)
    assert_equal(before, experts.packed_tensors())
    assert not torch.equal(twin(x.float(), index, w).half(), expected)
    with torch.no_grad():  # bytes at another address: the views of the old ones are not used any more
        experts.down_proj = torch.nn.Parameter(twin.down_proj.clone(), requires_grad=False)
    assert not torch.equal(experts(x, index, w), expected)


@BACKEND
def test_a_failed_replacement_leaves_the_weights(backend):
    """The last expert's new weight is bad: the others' are not computed with either."""
    _, experts = frozen(mixtral, backend)
    x, index, w = routed()
    before, y = plain(experts.packed_tensors()), experts(x, index, w)
    spoiled = torch.randn(4, 32, 48)
    spoiled[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf"):
        experts.requantize_("down_proj", spoiled)
    assert_equal(before, experts.packed_tensors())
    assert torch.equal(experts(x, index, w), y)


@BACKEND
def test_linears_are_kept_by_the_forward_only(backend):
    """They hold the memory that they look at: of an offloaded model, a copy on the device. NF4's code books are shared."""
    _, experts = frozen(mixtral, backend)
    experts.requantize_("down_proj", torch.randn(4, 32, 48))
    experts.dequantize("down_proj")
    assert not experts._layers
    experts(*routed())
    assert experts._layers.keys() == experts.projections.keys()
    first, second = experts.layers("down_proj")[:2]
    assert first is experts._layers["down_proj"][1][0]
    if backend == "nf4":
        assert first.quant_state.code is second.quant_state.code
        assert first.quant_state.state2.code is second.quant_state.state2.code


def test_backends_that_do_not_pack_are_refused():
    with pytest.raises(ValueError, match="nvfp4 or nf4, got 'bf16'"):
        frozen(mixtral, "bf16")


# ---------------------------------------------------------------------------------------------- forward and gradient


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@by_family
def test_output_and_gradients_are_those_of_single_linears(make, dtype, backend):
    """Bit for bit: the same rows through the same products; only rows are gathered and put back. The gradient of x is a sum over
    the k = 2 experts of a token, of which the order does not matter."""
    weights, experts = frozen(make, backend, dtype)
    x, index, w = routed(dtype=dtype)
    layers = linears(weights, backend)
    results = []
    for run in (lambda: experts(x, index, w), lambda: loop(layers, x, index, w)):
        x.grad = w.grad = None
        y = run()
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    for got, expected in zip(*results):
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


class GatedMLP(torch.nn.Module):
    """One expert as a module of its own."""

    def __init__(self, first, down):
        super().__init__()
        self.gate_up_proj, self.down_proj = first, down

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("terms", (1, 2))
def test_fused_experts_are_fused_gated_mlps(dtype, terms):
    """Bit for bit, output and gradients; backward keeps less, and after unfuse() everything is as it was."""
    options = {name: FrozenOptions(terms=terms) for name in OPTIONS}
    weights, experts = frozen(mixtral, dtype=dtype, options=options)
    layers = linears(weights, "nvfp4", options)
    mlps = [GatedMLP(first, down) for first, down in zip(layers["gate_up_proj"], layers["down_proj"])]
    mlps = [FusedGatedMLP(mlp, recognise(mlp)) for mlp in mlps]
    x, index, w = routed(dtype=dtype)

    def alone(x, index, w):
        shares = x.new_zeros(*index.shape, x.shape[1])
        for e, mlp in enumerate(mlps[:3]):
            token, slot = torch.where(index == e)
            shares = shares.index_put((token, slot), mlp(x[token]))
        return (shares * w[..., None]).sum(1).to(x.dtype)

    def results(run):
        x.grad = w.grad = None
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage()) or t, lambda t: t):
            y = run(x, index, w)
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        return y.detach(), x.grad, w.grad, sum({s.data_ptr(): s.nbytes() for s in kept}.values())

    *before, size = results(experts)
    assert experts.fuse() is None and experts.act == "silu"
    *fused, smaller = results(experts)
    for got, expected in zip(fused, results(alone)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert smaller < size and not torch.equal(fused[1], before[1])
    experts.unfuse()
    assert all(torch.equal(a, b) for a, b in zip(before, results(experts)))


def test_what_is_not_fused():
    _, experts = frozen(mixtral, "nf4")
    assert "nvfp4" in experts.fuse() and experts.act is None
    _, experts = frozen(mixtral)
    experts._outside[0].act_fn = torch.nn.ReLU()
    assert "SiLU" in experts.fuse() and experts.act is None


def test_no_tokens_and_experts_of_other_processes():
    """Without rows there is nothing to run; an index past the last expert (of another process) adds nothing."""
    _, experts = frozen(mixtral)
    x, index, w = routed()
    none = experts(x[:0], index[:0], w[:0])
    assert none.shape == (0, 32)
    elsewhere = index.clone()
    elsewhere[:, 1] = 4
    expected = experts(x, index[:, :1], w[:, :1])
    torch.testing.assert_close(experts(x, elsewhere, w), expected, rtol=0, atol=0)
    assert not experts(x, torch.full_like(index, 4), w).any()


@BACKEND
def test_the_gradient_of_a_token_is_rounded_once(backend):
    """In BF16, with four experts a token: the parts of the gradient, each by itself, summed in FP32 (which is exact to 2^-24, in
    whatever order) and rounded. Added up in memory, they would be rounded three times."""
    _, experts = frozen(mixtral, backend, torch.bfloat16)
    index = torch.stack([torch.randperm(4) for _ in range(32)])
    x, _, _ = routed(32, dtype=torch.bfloat16)
    w, dy = torch.rand(32, 4), torch.randn(32, 32).bfloat16()

    def gradient(index, w):
        (dx,) = torch.autograd.grad(experts(x, index, w), x, dy)
        return dx

    parts = [gradient(index[:, j : j + 1], w[:, j : j + 1]).float() for j in range(4)]
    assert torch.equal(gradient(index, w), sum(parts).bfloat16())


def test_rows_to_experts_and_back():
    """An expert twice for one token, experts without rows, and indices of other processes."""
    index = torch.tensor([[2, 2], [0, 5], [7, 2]])
    order, counts = by_expert(index, 4)
    assert order.tolist() == [2, 0, 1, 5] and counts == [1, 0, 3, 0]
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    rows = SortedRows.apply(x, order, 2)
    assert torch.equal(rows, x[[1, 0, 0, 2]])
    back = TokenRows.apply(rows, order, 6)
    assert torch.equal(back.view(3, 2, 2), torch.stack([x[[0, 0]], torch.stack([x[1], 0 * x[1]]), torch.stack([0 * x[2], x[2]])]))
    (dx,) = torch.autograd.grad(back, x, torch.ones_like(back))
    assert dx.tolist() == [[2, 2], [1, 1], [1, 1]]
    assert by_expert(index.int(), 4)[1] == counts
    assert by_expert(torch.full((3, 2), 4), 4)[1] == [0, 0, 0, 0]


class Operations(TorchDispatchMode):
    """Names of what is computed."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_counting_rows_waits_for_the_device_once():
    """On a GPU the host waits for ``tolist``, and for the operations named here, each of which asks for a value."""
    _, index, _ = routed()
    with Operations() as operations:
        by_expert(index, 4)
    assert "sort" in operations.names
    assert not operations.names & {"bincount", "nonzero", "_local_scalar_dense", "unique", "repeat_interleave"}


@by_family
def test_the_whole_model_with_checkpointing(make):
    """Checkpointing computes experts again; losses and gradients do not change by a bit. The router stays as it was."""
    torch.manual_seed(0)
    dense = make()
    router = dense.model.layers[0].mlp.gate.weight.detach().clone()
    model = get_peft_model(dense, NVFP4LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    assert len(frozen_experts(model)) == 2
    assert torch.equal(dense.model.layers[0].mlp.gate.weight, router) and router.dtype == torch.float32
    results = []
    for reentrant in (None, True, False):
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train().zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()})
    assert all(t.norm() > 0 for t in results[0].values())
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@by_family
def test_fused_norms_fall_back_before_experts(make):
    """The norm before a router is left alone, and says why; attention is fused; both compute the same but for rounding."""
    model = freeze_model(make(), progress=False).eval()
    with torch.no_grad():
        before = model(IDS).logits
        report = attach(model)
        after = model(IDS).logits
    assert "model.layers.0.input_layernorm" in report.fused and "model.layers.0.post_attention_layernorm" in report.skipped
    assert "model.layers.0.mlp.experts" in report.fused and experts_of(model).act == "silu"
    assert experts_of(detach(model)).act is None
    # fusing changes norm outputs by FP32 rounding, which a token near a tie of its router may answer with another expert
    same = (after - before).abs().amax(-1) < 0.1 * before.abs().amax()
    assert same.float().mean() > 0.8


# ---------------------------------------------------------------------------------------------- freezing a model


def test_freezing_packs_experts_and_dequantising_gives_them_back():
    model = mixtral()
    total = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    classes = [type(experts_of(model, i)) for i in (0, 1)]
    freeze_model(model, accuracy="balanced", progress=False)
    assert sum(m.elements for _, m in frozen_experts(model)) == total
    assert not [kind for kind in dense_share(model) if "(3-D)" in kind]
    packed = sum(t.numel() for _, m in frozen_experts(model) for t in m.packed_tensors().values())
    assert frozen_bytes(model) > packed > 2 * total * 4.5 / 8  # two layouts, K padded to 32
    assert [m.options[p].terms for _, m in frozen_experts(model) for p in m.projections] == [2, 1, 2, 1]
    weights = experts_of(model).dequantize("gate_up_proj")
    dequantize_model(model)
    assert [type(experts_of(model, i)) for i in (0, 1)] == classes
    assert torch.equal(experts_of(model).gate_up_proj, weights)
    skipped = freeze_model(mixtral(), skip_modules=["experts"], progress=False)
    assert not frozen_experts(skipped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dense by choice: nothing to warn of
        assert not frozen_experts(freeze_model(mixtral(), "bf16", progress=False))


def test_freezing_twice_and_otherwise():
    model = freeze_model(mixtral(), progress=False)
    before = plain(experts_of(model).packed_tensors())
    freeze_model(model, progress=False)
    assert_equal(before, experts_of(model).packed_tensors())
    with pytest.raises(ValueError, match="already frozen as 'nvfp4'"):
        freeze_model(model, "nf4", progress=False)


def test_hooks_stay_and_shared_experts_stay_shared():
    """As of linears: the user's hooks are called (and can be removed); two layers with the same experts share packed ones."""
    model, calls = mixtral(), []
    model.model.layers[1].mlp.experts = experts_of(model)
    handle = experts_of(model).register_forward_hook(lambda module, args, y: calls.append(type(module)))
    freeze_model(model, progress=False)
    assert experts_of(model) is experts_of(model, 1)
    model(IDS)
    assert calls == [FrozenExperts] * 2
    handle.remove()
    model(IDS)
    assert len(calls) == 2
    dequantize_model(model)
    assert experts_of(model) is experts_of(model, 1) and experts_of(model).down_proj.is_floating_point()


def test_a_bad_weight_leaves_the_model_as_it_was():
    model = mixtral()
    experts_of(model, 1).down_proj.data[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj holds NaN"):
        freeze_model(model, progress=False)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear and not frozen_experts(model)


ATTENTION_DENSE = {"skip_modules": ["self_attn"]}


def test_a_model_of_which_only_experts_are_frozen():
    """As published models often are. It is a frozen base like any other: for records, further adapters and merges."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = base_record(freeze_model(mixtral(), **ATTENTION_DENSE, progress=False))
    assert record["format"] == "nvfp4" and record["linears"] == 2 * 2 * 4
    model = adapted(mixtral, **ATTENTION_DENSE)
    targets = dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with pytest.raises(ValueError, match=r"frozen already: model\.layers\.0\.mlp\.experts\.gate_up_proj is 'nvfp4'"):
        model.add_adapter("other", NVFP4LoraConfig(accuracy="paper", **targets, **ATTENTION_DENSE))
    merged, report = merge(model, "nvfp4", probe=IDS)
    assert len(frozen_experts(merged)) == 2 and report.probe.retained > 0.5
    # an adapter on a base that is there takes it as it is: attention stays dense
    base = adapted(mixtral, dense=freeze_model(mixtral(), **ATTENTION_DENSE, progress=False))
    assert type(base.base_model.model.model.layers[0].self_attn.k_proj) is torch.nn.Linear


def test_records_of_dense_mixtures_know_their_experts():
    """Dense, in bf16 and under an adapter: the same weights; other experts are another base."""
    dense, frozen_bf16 = base_record(make_same(mixtral)), base_record(freeze_model(make_same(mixtral), "bf16", progress=False))
    assert dense["source"] == frozen_bf16["source"] and dense["linears"] == frozen_bf16["linears"] == 2 * (4 + 2 * 4)
    assert base_record(adapted(mixtral, "bf16").get_base_model())["source"] == dense["source"]
    other = make_same(mixtral)
    with torch.no_grad():
        experts_of(other).down_proj[1] += 1
    assert base_record(other)["source"] != dense["source"] == source_fingerprint(make_same(mixtral))


def test_experts_of_other_kinds_stay_dense_and_are_named():
    config = GptOssConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        vocab_size=128, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"],
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"GptOssExperts\.gate_up_proj \(3-D\).*without biases"):
        model = freeze_model(GptOssForCausalLM(config), progress=False)
    assert not frozen_experts(model)


# ---------------------------------------------------------------------------------------------- adapters


def adapted(make, backend="nvfp4", dense=None, config=NVFP4LoraConfig, **settings):
    torch.manual_seed(1)
    targets = dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    own = {"backend": backend} if config is NVFP4LoraConfig else {}
    return get_peft_model(
        make() if dense is None else dense, config(**{"r": 2, "init_lora_weights": False, **targets, **own, **settings})
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@BACKEND
@by_family
def test_adapters_reach_every_projection_and_load_in_stock_peft(make, backend, tmp_path):
    """On an NF4 base, which leaves inputs as they are, the adapter on the dequantised model is the same function up to FP32
    rounding: with stock PEFT, by the file. (Two experts may swap where a router is near a tie: not with this seed.)"""
    model = adapted(make, backend)
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert sum(".experts." in n for n in grads) == 8 and all(g is not None and g.norm() > 0 for g in grads.values())
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(freeze_model(make_same(make), backend, progress=False), tmp_path)
    if backend == "nvfp4":
        attach(again)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    if backend == "nf4":
        dense = dequantize_model(freeze_model(make_same(make), backend, progress=False))
        stock = PeftModel.from_pretrained(dense, tmp_path)
        assert type(stock.base_model.model.model.layers[0].mlp.experts).__module__.startswith("peft.")
        torch.testing.assert_close(logits(stock), logits(model), rtol=1e-4, atol=1e-5)


def make_same(make):
    """The model that :func:`adapted` made."""
    torch.manual_seed(1)
    return make()


def test_the_branch_of_an_expert_is_its_part_of_the_adapter():
    """Against PEFT's own delta of the dense weight: on an NF4 base, the same function up to FP32 rounding."""
    _, experts = frozen(mixtral, "nf4")
    model = torch.nn.ModuleDict({"experts": experts})
    config = LoraConfig(
        r=3, lora_alpha=5, target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False
    )
    wrapped = get_peft_model(model, config).base_model.model["experts"]
    x, index, w = routed()
    y = wrapped(x, index, w)
    weights = {wrapper.parameter_name: wrapper.dense_with(["default"]) for wrapper in wrapped.chain()}
    expected = wrapped.chain()[0].get_delta_weight("default") + experts.dequantize("down_proj", torch.float32)
    torch.testing.assert_close(weights["down_proj"], expected)
    layers = {name: [lambda x, m=m: F.linear(x, m) for m in each] for name, each in weights.items()}
    torch.testing.assert_close(y, loop(layers, x, index, w), rtol=1e-4, atol=1e-6)


def test_what_adapters_on_experts_cannot_do():
    for settings, message in (
        ({"init_lora_weights": "pissa"}, "packed experts"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"target_parameters": ["experts.gate_up_proj_scales"]}, "no projection"),
        ({"target_modules": ["experts"], "target_parameters": None}, "name their projections in target_parameters"),
        ({"merge_aware": True}, "merge_aware=True is not supported on packed experts"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(mixtral, **settings)
    targets = dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with pytest.raises(ValueError, match="merge_aware=True is not supported on packed experts"):
        adapted(mixtral).add_adapter("second", NVFP4LoraConfig(merge_aware=True, **targets))
    with pytest.raises(ValueError, match="mixed adapter batches"):
        adapted(mixtral).eval()(input_ids=IDS, adapter_names=["default", "__base__"])


@BACKEND
def test_merging_in_place_and_back(backend):
    model = adapted(mixtral, backend)
    experts, before = experts_of(model.base_model.model).get_base_layer(), logits(model)
    bytes_before = plain(experts.packed_tensors())
    model.merge_adapter()
    assert not any(torch.equal(bytes_before[name], experts.packed_tensors()[name]) for name in experts.projections)
    model.unmerge_adapter()
    assert_equal(bytes_before, experts.packed_tensors())
    assert torch.equal(logits(model), before)
    with model.disable_adapter():
        assert not torch.equal(logits(model), before)
    next(p for n, p in model.named_parameters() if "experts.lora_A" in n).data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        experts_of(model.base_model.model).merge()
    assert_equal(bytes_before, experts.packed_tensors())


def test_merging_one_after_the_other_rounds_once():
    """Two adapters merged in turn: quantised once from the original bytes; made dense after a merge: without that rounding."""
    model = adapted(mixtral)
    targets = dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model.add_adapter("second", NVFP4LoraConfig(r=3, init_lora_weights=False, **targets))
    wrapper = experts_of(model.base_model.model)
    experts, dense = wrapper.get_base_layer(), wrapper.dense_with(["default", "second"])
    alone = BACKENDS["nvfp4"].quantize(linear_of(dense[1]), OPTIONS[wrapper.parameter_name])
    model.merge_adapter(["default"])
    once = experts.dequantize(wrapper.parameter_name)
    model.merge_adapter(["second"])
    both = experts.dequantize(wrapper.parameter_name)
    assert not torch.equal(once, both) and torch.equal(both[1], alone.dequantize())
    merged = model.merge_and_unload()
    torch.testing.assert_close(getattr(experts_of(merged), wrapper.parameter_name), dense, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("to", ("fp32", "bf16", "nvfp4"))
@by_family
def test_merge_with_a_report(make, to):
    model = adapted(make, init_lora_weights=True)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.05)
    experts, wrapper = (experts_of(model.base_model.model).get_base_layer(), experts_of(model.base_model.model))
    dense = {each.parameter_name: each.dense_with(["default"]) for each in wrapper.chain()}
    merged, report = merge(model, to, probe=IDS)
    named = {layer.name: layer for layer in report.layers}
    layer = named["model.layers.0.mlp.experts.down_proj"]
    assert layer.stored == to and layer.retained == pytest.approx(1, abs=0.2 if to == "nvfp4" else 0.01)
    now = experts_of(merged)
    assert isinstance(now, FrozenExperts) == (to == "nvfp4")
    if to == "nvfp4":
        assert layer.steps > 0
        experts = now
        change = (experts.dequantize("down_proj", torch.float32) - dense["down_proj"]).norm() / dense["down_proj"].norm()
        assert 0 < change < 0.2
    else:
        wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[to]
        assert torch.equal(now.down_proj, dense["down_proj"].to(wanted)) and now.gate_up_proj.dtype == wanted
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]


def test_a_report_measures_where_offloaded_experts_compute(monkeypatch):
    found = []
    monkeypatch.setattr("peft_nvfp4.merging.computing", lambda layer: found.append(layer) or computing(layer))
    model = adapted(mixtral, offload="cpu")
    experts = [m for _, m in frozen_experts(model)]
    plain_report = merge(adapted(mixtral), "nvfp4")[1]
    found.clear()
    report = merge(model, "nvfp4")[1]
    assert all(sum(m is layer for layer in found) == 2 for m in experts)
    assert report.as_dict() == plain_report.as_dict()


def test_experts_without_an_adapter_become_dense_in_a_merge():
    model = adapted(mixtral, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=None)
    assert frozen_experts(model)
    merged = model.merge_and_unload()
    assert not frozen_experts(merged) and experts_of(merged).gate_up_proj.is_floating_point()
    kept = adapted(mixtral).unload()
    assert len(frozen_experts(kept)) == 2


def test_generate_and_inspect(tmp_path):
    model = adapted(qwen3_moe)
    ids = IDS[:, :4]
    with torch.no_grad():
        found = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        again = found[:, :4]
        for _ in range(3):  # without a cache
            again = torch.cat((again, model(input_ids=again).logits[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, again)
    model.save_pretrained(tmp_path)
    report = inspect_adapter(freeze_model(make_same(qwen3_moe), progress=False), tmp_path)
    assert report.binds and report.logit_change > 0 and not [w for w in report.warnings if "another" in w]
    other = freeze_model(make_same(qwen3_moe), progress=False)
    experts_of(other).requantize_("down_proj", torch.randn(4, 32, 48))
    assert base_record(other)["fingerprint"] != base_record(freeze_model(make_same(qwen3_moe), progress=False))["fingerprint"]


# ---------------------------------------------------------------------------------------------- files


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", **settings)


def stored(folder):
    return {key for file in folder.glob("*.safetensors") for key in safe_open(file, "pt").keys()}


@pytest.mark.parametrize("layouts", ("cached", "transient"))
@by_family
def test_streaming_load_save_and_reload(make, layouts, tmp_path):
    """Quantised while loading from shards that split experts: the bytes of freezing in place; saved, reloaded, made dense."""
    make().to(torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="30KB")
    config = PactConfig(weight_layouts=layouts)
    streamed = loaded(tmp_path / "dense", quantization_config=config)
    in_place = freeze_model(loaded(tmp_path / "dense"), weight_layouts=layouts, progress=False)
    assert len(frozen_experts(streamed)) == 2
    assert_equal(streamed.state_dict(), in_place.state_dict())
    assert torch.equal(logits(streamed), logits(in_place))
    assert streamed.num_parameters() == loaded(tmp_path / "dense").num_parameters()
    streamed.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    names = [key for key in stored(tmp_path / "packed") if ".layers.0." in key and ".experts." in key]
    assert len(names) == 6 and not [key for key in names if "backward" in key]
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values())
    assert_equal(streamed.state_dict(), again.state_dict())
    dense = again.dequantize()
    dense.save_pretrained(tmp_path / "back")
    assert any(".experts.0." in key for key in stored(tmp_path / "back"))
    assert torch.equal(logits(loaded(tmp_path / "back")), logits(dense))


def test_only_experts_packed_through_files(tmp_path):
    mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = loaded(tmp_path / "dense", quantization_config=PactConfig(**ATTENTION_DENSE))
    assert len(frozen_experts(model)) == 2 and type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    model.save_pretrained(tmp_path / "packed")
    assert_equal(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "packed").state_dict())


@pytest.mark.parametrize("layout", ("compressed-tensors", "modelopt"))
def test_published_files_of_which_only_experts_are_packed(layout, tmp_path):
    reference, packed, _ = write_published(tmp_path / "published", qwen3_moe, layout, attention=False)
    assert all(".experts." in name for name in packed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published", quantization_config=PactConfig(), dtype="bfloat16")
    assert torch.equal(experts_of(model).dequantize("down_proj"), experts_of(reference).down_proj)
    model.save_pretrained(tmp_path / "own")
    assert_equal(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "own").state_dict())


def test_skipped_experts_stay_dense_through_files(tmp_path):
    mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = loaded(tmp_path / "dense", quantization_config=PactConfig(skip_modules=["experts"]))
    assert not frozen_experts(model)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_equal(model.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "spoil, message",
    (
        (lambda s, n: s.pop(f"{n}.down_proj_scales"), "down_proj_scales missing"),
        (lambda s, n: s.update({f"{n}.down_proj": s[f"{n}.down_proj"][:, :-1]}), "has the shape"),
        (lambda s, n: s[f"{n}.gate_up_proj_scales"].view(-1)[5:6].fill_(0x7F), "gate_up_proj_scales.*NaN or negative"),
        (lambda s, n: s[f"{n}.gate_up_proj_gscale"].fill_(0xFF), "gate_up_proj_gscale.*not finite and positive"),
        (lambda s, n: s.update({f"{n}.down_proj": s[f"{n}.down_proj"].to(torch.int32)}), "expected packed bytes"),
    ),
)
def test_corrupt_files_are_refused(spoil, message, tmp_path):
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    loaded(tmp_path / "dense", quantization_config=PactConfig()).save_pretrained(tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    state = {key: t.clone() for key, t in load_file(file).items()}
    spoil(state, "model.layers.1.mlp.experts")
    save_file({key: t.contiguous() for key, t in state.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_a_bad_weight_in_a_dense_checkpoint(tmp_path):
    model = mixtral().to(torch.bfloat16)
    experts_of(model).gate_up_proj.data[2, 3, 4] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds NaN or Inf"):
        loaded(tmp_path, quantization_config=PactConfig())


# ---------------------------------------------------------------------------------------------- other tools' files

FILE_NAMES = {"MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"), None: ("mlp", "gate_proj", "up_proj", "down_proj")}


def write_published(folder, make, layout, g=2.0**-13, up_g=None, attention=True):
    """A checkpoint with single packed experts, written in NumPy; the dense model that it stands for."""
    torch.manual_seed(0)
    model, rng = make().to(torch.bfloat16), np.random.default_rng(0)
    block, *names = FILE_NAMES.get(type(model).__name__, FILE_NAMES[None])
    packed = published.quantised(model) if attention else {}
    for name, linear in model.named_modules():
        if name in packed:
            linear.weight.data = packed[name].values().to(torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            gate, up, down = (
                published.Packed(rng, n, k, scale) for n, k, scale in ((48, 32, g), (48, 32, up_g or g), (32, 48, g))
            )
            experts.gate_up_proj.data[e] = torch.cat((gate.values(), up.values())).to(torch.bfloat16)
            experts.down_proj.data[e] = down.values().to(torch.bfloat16)
            packed |= {f"model.layers.{i}.{block}.experts.{e}.{n}": p for n, p in zip(names, (gate, up, down))}
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    state = {key: t for key, t in load_file(file).items() if key.removesuffix(".weight") not in packed}
    for name, each in packed.items():
        state |= {f"{name}.{leaf}": t.contiguous() for leaf, t in published.tensors(each, layout).items()}
    save_file(state, file, metadata={"format": "pt"})
    settings = {"modelopt": published.MODELOPT_SETTINGS, "compressed-tensors": published.CT_SETTINGS}
    published.edit_config(folder, settings[layout])
    return model, packed, state


LAYOUT = pytest.mark.parametrize("layout", ("compressed-tensors", "modelopt"))


@LAYOUT
@by_family
def test_published_experts_load_bit_for_bit(make, layout, tmp_path):
    """Codes, scales and values; then trained, and saved in this package's own layout."""
    reference, _, _ = write_published(tmp_path / "published", make, layout)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "published", quantization_config=PactConfig(), dtype="bfloat16", output_loading_info=True
    )
    assert not any(info.values())
    for i in (0, 1):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(experts_of(model, i).dequantize(name), getattr(experts_of(reference, i), name))
    again = dequantize_model(copy.deepcopy(model))
    assert torch.equal(logits(again), logits(loaded_dense(reference, tmp_path / "reference")))
    model.save_pretrained(tmp_path / "own")
    assert_equal(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "own").state_dict())
    trained = adapted(make, dense=model, config=LoraConfig)
    trained(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for n, p in trained.named_parameters() if "lora_" in n)


def loaded_dense(model, folder):
    model.save_pretrained(folder)
    return loaded(folder)


@LAYOUT
@by_family
def test_experts_are_exported_as_other_tools_have_them(make, layout, tmp_path):
    """Published, loaded, exported: the tensors of the published file, byte for byte, and the router listed as dense."""
    _, packed, state = write_published(tmp_path / "published", make, layout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published", quantization_config=PactConfig(), dtype="bfloat16")
    report = export_checkpoint(model, tmp_path / "export", layout)
    assert report.packed == len(packed) and not report.inexact
    assert {"model.layers.0.mlp.gate", "lm_head"} <= set(report.dense)
    (file,) = (tmp_path / "export").glob("*.safetensors")
    written = load_file(file)
    own = {key: t for key, t in state.items() if not key.endswith(("input_scale", "input_global_scale"))}
    assert written.keys() == own.keys()
    for key in own:
        assert written[key].dtype == own[key].dtype
        assert torch.equal(written[key].reshape(-1).view(torch.uint8), own[key].reshape(-1).view(torch.uint8)), key
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", quantization_config=PactConfig(), dtype="bfloat16")
    assert_equal(model.state_dict(), again.state_dict())


def test_published_experts_that_cannot_be_represented(tmp_path):
    write_published(tmp_path / "scales", qwen3_moe, "compressed-tensors", up_g=2.0**-14)
    with pytest.raises(ValueError, match=r"gate_proj and up_proj of model\.layers\.0\.mlp\.experts\.0 have different global"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "scales", quantization_config=PactConfig())
    _, _, state = write_published(tmp_path / "missing", qwen3_moe, "modelopt")
    (file,) = (tmp_path / "missing").glob("*.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj"
    save_file({key: t for key, t in state.items() if not key.startswith(name)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path / "missing", quantization_config=PactConfig())


def test_a_scale_that_is_no_power_of_two(tmp_path):
    """Kept as it is; the backward layout is made from the exact values."""
    reference, _, _ = write_published(tmp_path, qwen3_moe, "modelopt", g=0.1 / 2688)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PactConfig(), dtype="bfloat16")
    experts = experts_of(model)
    assert torch.equal(experts.dequantize("down_proj"), experts_of(reference).down_proj)
    assert float(experts.layers("down_proj")[0].forward_layout.gscale) == float(np.float32(0.1 / 2688))


# ---------------------------------------------------------------------------------------------- two processes


def one_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}


def distributed_step(rank: int, backend: str, way: str):
    """Both processes have the same batch: the mean of their gradients is that of one process. A second step meets the weights
    that were gathered anew. Largest difference, and what merging says."""
    model = adapted(mixtral, backend).train()
    wanted = one_step(model, IDS)
    model.zero_grad()
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    apart = 0.0
    for _ in range(2):
        found = one_step(model, IDS)
        model.zero_grad()
        apart = max(apart, *((found[n] - g).abs().max().item() / g.abs().max().item() for n, g in wanted.items()))
    if way == "ddp":
        return apart, ""
    try:
        experts_of(model.base_model.model).merge()
    except ValueError as error:
        return apart, str(error)


@BACKEND
@pytest.mark.parametrize("way", ("ddp", "fsdp2"))
def test_two_processes(backend, way):
    """The same rows through the same products; PyTorch's mean of two equal numbers is exact."""
    for apart, message in both(distributed_step, backend, way):
        assert apart == 0 and ("sharded" in message) == (way == "fsdp2")


def test_the_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import bench_experts

    words = ["--shape", "tiny", "--tokens", "24", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_experts.py", *words])
    bench_experts.main()
    rows = json.loads((tmp_path / "experts_cpu.json").read_text())["rows"]
    assert [row["case"].split(",")[0] for row in rows] == ["dense", "frozen", "frozen", "frozen"]
    assert rows[1]["equal_to_linears"] and rows[1]["weight_bytes"] < rows[0]["weight_bytes"]
