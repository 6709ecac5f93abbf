"""Models with frozen experts: freezing and making dense, adapters on experts, their merges, and training in two processes."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from _frozen_experts import ATTENTION_DENSE, BACKEND, OPTIONS, adapted, assert_equal, experts_of, frozen, logits, loop, routed
from _mixtures import IDS, by_family, mixtral, qwen3_moe
from _two_processes import both, refusal
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from peft_nvfp4 import NVFP4LoraConfig, attach, dense_share, dequantize_model, freeze_model, frozen_bytes, inspect_adapter, merge
from peft_nvfp4.lora.fingerprint import base_record, source_fingerprint
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts, frozen_experts, linear_of
from peft_nvfp4.nn.registry import BACKENDS
from peft_nvfp4.training.offload.frozen_methods import computing


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


def test_a_model_of_which_only_experts_are_frozen():
    """As published models often are. It is a frozen base like any other: for records, further adapters and merges."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = base_record(freeze_model(mixtral(), **ATTENTION_DENSE, progress=False))
    assert record["format"] == "nvfp4"
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
    assert dense["source"] == frozen_bf16["source"]
    assert base_record(adapted(mixtral, "bf16").get_base_model())["source"] == dense["source"]
    other = make_same(mixtral)
    with torch.no_grad():
        experts_of(other).down_proj[1] += 1
    assert base_record(other)["source"] != dense["source"] == source_fingerprint(make_same(mixtral))


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
    bytes_before = copy.deepcopy(experts.packed_tensors())
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
        experts = now
        change = (experts.dequantize("down_proj", torch.float32) - dense["down_proj"]).norm() / dense["down_proj"].norm()
        assert 0 < change < 0.2
    else:
        wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[to]
        assert torch.equal(now.down_proj, dense["down_proj"].to(wanted)) and now.gate_up_proj.dtype == wanted
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]


def test_a_report_measures_where_offloaded_experts_compute(monkeypatch):
    found = []
    monkeypatch.setattr("peft_nvfp4.lora.merge.computing", lambda layer: found.append(layer) or computing(layer))
    model = adapted(mixtral, memory="smallest")
    experts = [m for _, m in frozen_experts(model)]
    plain_report = merge(adapted(mixtral), "nvfp4")[1]
    found.clear()
    report = merge(model, "nvfp4")[1]
    assert all(sum(m is layer for layer in found) == 2 for m in experts)
    assert report == plain_report


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
    return apart, "" if way == "ddp" else refusal(experts_of(model.base_model.model).merge)


@BACKEND
@pytest.mark.parametrize("way", ("ddp", "fsdp2"))
def test_two_processes(backend, way):
    """The same rows through the same products; PyTorch's mean of two equal numbers is exact."""
    for apart, message in both(distributed_step, backend, way):
        assert apart == 0 and ("sharded" in message) == (way == "fsdp2")
