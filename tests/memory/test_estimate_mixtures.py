"""The memory estimator for mixtures of experts: against what tiny Mixtral and Qwen3-MoE models hold and what autograd keeps of
them, byte for byte, whatever the routing; and what is a bound."""

from dataclasses import replace

import pytest
import torch
from _two_processes import both
from peft import get_peft_model
from peft.tuners.lora import layer as lora_layer
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, frozen_bytes
from peft_nvfp4.fusion import rope
from peft_nvfp4.memory import Settings, activations, estimate, mixtures, model_shape, sharding, weights
from peft_nvfp4.memory.common import MERGED, ROUNDING
from peft_nvfp4.training.callbacks import settings_of
from peft_nvfp4.training.offload.enable import _owner

COMMON = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64)
WEIGHTS = ("frozen linears, forward layout", "frozen linears, backward layout")


def mixtral(layers=2, experts=4, dtype=torch.bfloat16, chosen=2, width=96, **settings):
    torch.manual_seed(0)
    sizes = dict(intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers)
    return MixtralForCausalLM(MixtralConfig(**{**COMMON, **sizes, **settings})).to(dtype)


def qwen3_moe(layers=2, experts=4, dtype=torch.bfloat16, chosen=2, width=96, **settings):
    torch.manual_seed(0)
    sizes = dict(moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=layers)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **sizes, "intermediate_size": 160, **settings})).to(dtype)


def qwen3_moe_normalised(layers=2):
    return qwen3_moe(layers, norm_topk_prob=True)


by_family = pytest.mark.parametrize("make", (mixtral, qwen3_moe))


def adapted(base, **fields):
    """(model, the estimator's settings for it)."""
    fields = {"target_modules": "all-linear", **fields}
    model = get_peft_model(base, NVFP4LoraConfig(r=4, task_type="CAUSAL_LM", **fields)).train()
    targets, parameters = fields.pop("target_modules"), fields.pop("target_parameters", ())
    targets = targets if isinstance(targets, str) else (*targets, *parameters)
    return model, Settings(rank=4, targets=targets, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


# ---------------------------------------------------------------------------------------------- what autograd keeps


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rotary embeddings in one Function, as a kernel computes them: without, a CPU keeps what they multiply with as well."""
    monkeypatch.setattr(rope, "_on_a_kernel", lambda x: True)


def storages(model, tokens: int) -> list[int]:
    """Bytes of the storages that autograd keeps of a forward, but for parameters and buffers. Indices count: a GPU holds them,
    too."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(input_ids=torch.arange(tokens)[None] % 64, logits_to_keep=1)
    del output
    return [storage.nbytes() for storage in found.values()]


FEW, MANY = 48, 96
"""Tokens."""


def growth(make, **fields) -> tuple[float, float, Settings]:
    """(bytes per token, bytes besides) of what one more layer keeps, and the settings. Every expert gets a row."""
    kept, shares = {}, []
    for depth in (2, 3):
        model, settings = adapted(make(depth), **fields)
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda m, x, y: shares.append(len(y[2].unique())))
        for tokens in (FEW, MANY):
            kept[depth, tokens] = sum(storages(model, tokens))
    assert set(shares) == {4}
    few, many = (kept[3, n] - kept[2, n] for n in (FEW, MANY))
    slope = (many - few) / (MANY - FEW)
    return slope, few - slope * FEW, settings


FACTORS = hasattr(lora_layer, "_LoraFactorsProxy")
"""PEFT from 0.21 on adds adapters to dense experts from copies of A and B in 16 bits. Before, it made all of B A, in FP32."""


def expected(base, settings: Settings) -> tuple[int, int]:
    """The same by the estimator."""
    shape = model_shape(base.config)
    fixed = mixtures.fixed(shape, settings)[MERGED] + weights.adapter_copies(shape, settings) // shape.layers
    if not FACTORS:
        dense = (p for p in shape.projections if p.of_experts and not settings.is_packed(p))
        fixed -= sum(2 * p.count * settings.rank_of(p) * (p.inputs + p.outputs) for p in dense)
    return sum(activations.layer(shape, settings).values()), fixed


ONLY_FIRST = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
ONLY_DOWN = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
CASES = {
    "balanced": {"accuracy": "balanced"},
    "paper": {"accuracy": "paper"},
    "high": {"accuracy": "high"},
    "small": {"memory": "small"},
    "attention only": ATTENTION,
    "gate and up": ONLY_FIRST,
    "down": ONLY_DOWN,
    "nf4": {"backend": "nf4"},
    "nf4 small": {"backend": "nf4", "memory": "small"},
    "nf4, attention only": {"backend": "nf4", **ATTENTION},
    "bf16": {"backend": "bf16"},
    "bf16 small, down": {"backend": "bf16", "memory": "small", **ONLY_DOWN},
    "bf16, attention only": {"backend": "bf16", **ATTENTION},
    "dense experts": {"skip_modules": ["experts"]},
}


@pytest.mark.filterwarnings("ignore:.*stay dense")
@by_family
@pytest.mark.parametrize("case", CASES)
def test_what_autograd_keeps(case, make, as_on_a_gpu):
    fields = CASES[case]
    if fields.get("backend") == "nf4":
        pytest.importorskip("bitsandbytes")
    slope, besides, settings = growth(make, **fields)
    assert (slope, besides) == expected(make(), settings)


def test_what_autograd_keeps_of_a_router_that_normalises_in_16_bits(as_on_a_gpu):
    slope, besides, settings = growth(qwen3_moe_normalised, accuracy="paper")
    assert (slope, besides) == expected(qwen3_moe_normalised(), settings)
    # the chosen probabilities and their sum, in FP32: two of one token, and one
    assert slope == expected(qwen3_moe(), settings)[0] + 4 * (2 + 1)


@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
def test_what_is_kept_does_not_depend_on_the_routing(backend, as_on_a_gpu):
    """All tokens to two of four experts: the same bytes but for the copies of the other experts' adapters."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    kept = {}
    for one_sided in (False, True):
        model, _ = adapted(mixtral(), backend=backend, **ONLY_FIRST)
        if one_sided:
            for module in model.modules():
                if type(module).__name__.endswith("TopKRouter"):
                    module.register_forward_hook(lambda m, x, y: (y[0], y[1], y[2] % 1 + torch.arange(2)))
        kept[one_sided] = sum(storages(model, MANY))
    # 2 layers, 2 experts without a row: A (4, 64) and B (192, 4) in BF16 each
    assert kept[False] - kept[True] == 2 * 2 * 2 * 4 * (64 + 192)


TENSORS = (
    ("nvfp4", {}),
    ("nvfp4", {"accuracy": "high"}),
    ("nf4", {}),
    ("nf4", {"memory": "small"}),
)


@pytest.mark.parametrize("backend, fields", TENSORS)
def test_tensors_that_the_allocator_rounds_up(backend, fields, as_on_a_gpu):
    """Twice the experts: so many more tensors, of which each may be 511 bytes larger in an allocator that deals in 512."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    counts, bounds = {}, {}
    for experts in (4, 8):
        base = mixtral(1, experts)
        shape = model_shape(base.config)
        model, settings = adapted(base, backend=backend, **fields)
        found = storages(model, 128)
        counts[experts] = len(found)
        bounds[experts] = mixtures.fixed(shape, replace(settings, sequence=128))[ROUNDING]
        assert sum(-n % 512 for n in found) <= bounds[experts] + 511 * 40  # fewer than 40 tensors are not an expert's
    assert 511 * (counts[8] - counts[4]) == bounds[8] - bounds[4] == bounds[4]


# ---------------------------------------------------------------------------------------------- what is always there


@by_family
@pytest.mark.filterwarnings("ignore:.*stay dense")
@pytest.mark.parametrize(
    "fields",
    [{}, {"memory": "small"}, {"backend": "nf4"}, {"backend": "bf16"}, {"skip_modules": ["experts"]}, ONLY_DOWN],
    ids=["fast", "small", "nf4", "bf16", "dense experts", "down"],
)
def test_static_bytes_are_those_of_a_real_model(fields, make):
    if fields.get("backend") == "nf4":
        pytest.importorskip("bitsandbytes")
    base = make()
    shape = model_shape(base.config)
    model, settings = adapted(base, **fields)
    found = weights.static(shape, settings)
    assert found[WEIGHTS[0]] + found[WEIGHTS[1]] == frozen_bytes(model)
    sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert found["adapters"] == sum(sizes[n] for n in trained) == 4 * weights.adapter_parameters(shape, settings)
    norms = sum(size for n, size in sizes.items() if "norm" in n)
    assert found["norms and biases"] == norms
    assert found["embedding and head"] == sum(size for n, size in sizes.items() if "embed" in n or "lm_head" in n)
    everything = frozen_bytes(model) + found["adapters"] + norms + found["embedding and head"] + found[weights.DENSE]
    assert everything == sum(sizes.values()) + (nf4_beside(model) if settings.format == "nf4" else 0)


def nf4_beside(model) -> int:
    """What bitsandbytes holds of linears outside of parameters."""
    layers = [m for m in model.modules() if type(m).__name__ == "NF4FrozenLinear"]
    return sum(t.numel() * t.element_size() for m in layers for name, t in m.packed_tensors().items() if name != "weight")


@by_family
def test_parameters(make):
    model = make()
    head_norms = sum(p.numel() for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n)
    assert model_shape(model.config).parameters == sum(p.numel() for p in model.parameters()) - head_norms


OLD = {mixtral: ["w1", "w3", "w2"], qwen3_moe: ["gate_proj", "up_proj", "down_proj"]}


@by_family
def test_targets_are_what_peft_makes_of_them(make):
    """By the names of old, gate and up get one adapter of twice the rank; "all-linear" means those, and the router."""
    new = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}
    for fields in (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", *OLD[make]]},
        {"target_modules": ["gate", "o_proj"]},
        {"target_modules": ["k_proj", OLD[make][2]]},
        new,
    ):
        model, settings = adapted(make(), **fields)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert weights.adapter_parameters(model_shape(make().config), settings) == trained, fields
    with pytest.raises(ValueError, match=r"are fused|are one parameter"):
        adapted(make(), target_modules=["q_proj", OLD[make][0]])
    with pytest.raises(ValueError, match=f"{OLD[make][0]} and {OLD[make][1]} are one parameter, gate_up_proj"):
        estimate(make().config, Settings(targets=("q_proj", OLD[make][0])))


@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_bytes_on_the_host_are_those_of_a_model(backend):
    """Packed experts move with their layer; dense ones stay on the GPU."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    base = mixtral(5)
    shape = model_shape(base.config)
    model = get_peft_model(base, NVFP4LoraConfig(backend=backend, memory="smallest", target_modules="all-linear"))
    settings = settings_of(model, sequence=16)
    found, without = estimate(shape, settings), estimate(shape, replace(settings, memory="small"))
    assert found.offloaded == sum(p.nbytes for layer in _owner(model).layers for p in layer.parameters())
    here, there = (sum(e.static[name] for name in WEIGHTS) for e in (found, without))
    assert there - here == found.offloaded * 3 // 5


# ---------------------------------------------------------------------------------------------- several GPUs


def sharded(rank: int, memory: str) -> tuple[int, int]:
    """Bytes of this process's shares, and of one layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = adapted(mixtral(dtype=torch.float32), memory=memory)
    base = model.get_base_model()
    layer_bytes = sum(p.numel() * p.element_size() for p in base.model.layers[0].parameters())
    mesh = init_device_mesh("cpu", (2,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return sum(p.to_local().numel() * p.element_size() for p in model.parameters()), layer_bytes


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_shares_are_those_of_fsdp2(memory):
    (shares, layer_bytes), _ = both(sharded, memory)
    shape = replace(model_shape(mixtral().config), dtype_bytes=4)
    settings = Settings(rank=4, memory=memory, cards=2, strategy="fsdp2")
    alone = weights.static(shape, settings)
    assert shares == sum(n for name, n in estimate(shape, settings).static.items() if name != "optimizer")
    # the last norm is the root's, the estimate spreads it over two layers
    assert layer_bytes == sharding.layer_bytes(shape, settings, alone) - 64 * 4 // 2


def test_nothing_of_experts_in_nf4_stays_whole():
    one, four = (estimate(LARGE, Settings(backend="nf4", cards=n, strategy="fsdp2")) for n in (1, 4))
    beside = sharding.beside_codes(one.shape, one.settings)
    assert four.static[WEIGHTS[0]] == beside + -(-(one.static[WEIGHTS[0]] - beside) // 4)
    assert beside < one.static[WEIGHTS[0]] // 100  # attention is a small part


# ---------------------------------------------------------------------------------------------- answers


LARGE = {  # Qwen3-30B-A3B's config.json, what matters of it
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "vocab_size": 151936, "norm_topk_prob": True},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False},
}
MIXTRAL = {  # Mixtral-8x7B's
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"tie_word_embeddings": False},
}


@pytest.mark.parametrize("config, billions", [(LARGE, 30.5), (MIXTRAL, 46.7)])
def test_published_sizes(config, billions):
    assert model_shape(config).parameters / 1e9 == pytest.approx(billions, abs=0.05)
    packed = estimate(config, Settings(memory="small", checkpointing=True)).static[WEIGHTS[0]]
    assert packed == pytest.approx(billions * 1e9 * 4.5 / 8, rel=0.03)  # embedding and head are not packed


@pytest.mark.parametrize("config", [LARGE, MIXTRAL])
def test_memory_grows_with_what_it_should(config):
    base = Settings(batch=4, accuracy="balanced")
    peak = estimate(config, base).peak
    for more in ({"batch": 8}, {"rank": 64}, {"padded": True}, {"accuracy": "high"}, {"backend": "bf16"}):
        assert estimate(config, replace(base, **more)).peak > peak, more
    for less in ({"checkpointing": True}, {"memory": "small"}, {"targets": ("q_proj",)}, {"accuracy": "paper"}):
        assert estimate(config, replace(base, **less)).peak < peak, less


@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_categories_add_up_to_the_peak(backend, checkpointing):
    for config in (LARGE, MIXTRAL):
        found = estimate(config, Settings(batch=2, backend=backend, checkpointing=checkpointing))
        assert found.peak == sum(found.categories().values()) == sum(found.groups().values())
        assert all(n >= 0 for parts in found.moments.values() for n in parts.values())
        assert found.as_dict()["notes"] == list(found.notes) != []


def test_adapters_on_dense_experts_keep_the_experts_again():
    """PEFT adds them to all weights of a layer: as much as the experts themselves, in every layer."""
    dense = estimate(MIXTRAL, Settings(backend="bf16"))
    without = estimate(MIXTRAL, Settings(backend="bf16", targets=("q_proj",)))
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert dense.moments["loss"][MERGED] - without.moments["loss"][MERGED] == experts + 32 * 2 * 8 * 4096  # and the routers
    assert any("autograd keeps the sums" in note for note in dense.notes)
    assert not any("autograd keeps the sums" in note for note in without.notes)
    once = estimate(MIXTRAL, Settings(backend="bf16", checkpointing=True))
    assert once.moments["loss"].get(MERGED, 0) == 0 < once.moments["recomputation"][MERGED] < experts // 31


def test_what_does_not_concern_experts():
    settings = Settings(batch=2)
    assert estimate(LARGE, replace(settings, cuda_graphs=True)).peak == estimate(LARGE, settings).peak
    fast, small = (estimate(LARGE, replace(settings, memory=memory)) for memory in ("fast", "small"))
    assert small.saved_per_token_and_layer == fast.saved_per_token_and_layer and small.peak < fast.peak
    assert any("memory='small' recomputes nothing of experts" in note for note in small.notes)
    assert estimate(MIXTRAL, Settings(backend="bf16", cuda_graphs=True)).peak > estimate(MIXTRAL, Settings(backend="bf16")).peak


def test_the_text_of_a_multimodal_mixture():
    text = {**LARGE, "model_type": "qwen3_vl_moe_text"}
    del text["norm_topk_prob"]
    shape = model_shape({"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}})
    assert shape.mixture == model_shape(LARGE).mixture and shape.head_norms and "other towers" in shape.notes[0]
    # PEFT knows no old names of it: "all-linear" is attention alone
    assert weights.adapter_parameters(shape, Settings()) == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mlp_only_layers": [0]}, "dense MLP"),
        ({"decoder_sparse_step": 2}, "dense MLP"),
        ({"model_type": "deepseek_v3"}, "mixtral, qwen3_moe, .* are estimated, and not this kind"),
        ({"moe_intermediate_size": None}, "no moe_intermediate_size"),
        ({"num_experts_per_tok": None}, "no num_experts_per_tok"),
    ],
)
def test_what_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        model_shape({**LARGE, **change})


def test_baselines_with_other_kernels_are_refused():
    with pytest.raises(ValueError, match="bf16-liger is not estimated for mixtures"):
        estimate(LARGE, Settings(backend="bf16-liger"))
    with pytest.raises(
        ValueError, match="it has q_proj, k_proj, v_proj, o_proj, gate, gate_up_proj, gate_proj, up_proj, down_proj"
    ):
        estimate(LARGE, Settings(targets=("w1",)))
