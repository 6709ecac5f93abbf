"""The memory estimator against models: what tiny Llama, Qwen3, Mixtral and Qwen3-MoE models hold and what autograd keeps of them,
byte for byte, whatever the routing; what they move to the host, and what FSDP2 cuts and gathers of them."""

from dataclasses import replace

import pytest
import torch
from _estimates import (
    ATTENTION,
    FACTORS,
    MANY,
    WEIGHTS,
    adapted,
    as_on_a_gpu,
    by_family,
    gpt_oss,
    growth,
    llama,
    mixtral,
    qwen3,
    qwen3_moe,
    storages,
)
from _two_processes import both
from _wire import count_bytes
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peft_nvfp4 import NVFP4LoraConfig, frozen_bytes
from peft_nvfp4.memory import Settings, estimate, kept, model_shape, run
from peft_nvfp4.training.callbacks import settings_of
from peft_nvfp4.training.offload.enable import _owner

__all__ = ["as_on_a_gpu"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*stay dense")


def expected(base, settings: Settings) -> tuple[int, int]:
    """(bytes per token, bytes besides) of one layer, by the estimator."""
    shape = model_shape(base.config)
    fixed = kept.per_layer(shape, settings).get(kept.MERGED, 0) + kept.adapter_copies(shape, settings) // shape.layers
    if not FACTORS:
        dense = (p for p in shape.projections if p.of_experts and not settings.is_packed(p))
        fixed -= sum(2 * settings.adapter_of(p) for p in dense)
    return sum(kept.layer(shape, settings).values()), fixed


ONLY_FIRST = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
ONLY_DOWN = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
CASES = {
    "balanced": {"accuracy": "balanced"},
    "paper": {"accuracy": "paper"},
    "high": {"accuracy": "high"},
    "small": {"memory": "small"},
    "attention only": ATTENTION,
    "bf16": {"backend": "bf16"},
    "bf16, attention only": {"backend": "bf16", **ATTENTION},
}
DENSE_CASES = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "bf16, MLP only": {"backend": "bf16", "target_modules": ["up_proj"]},
    "bf16 small": {"backend": "bf16", "memory": "small"},
}
MIXTURE_CASES = {
    "gate and up": ONLY_FIRST,
    "down": ONLY_DOWN,
    "nf4": {"backend": "nf4"},
    "nf4 small": {"backend": "nf4", "memory": "small"},
    "nf4, attention only": {"backend": "nf4", **ATTENTION},
    "bf16 small, down": {"backend": "bf16", "memory": "small", **ONLY_DOWN},
    "dense experts": {"skip_modules": ["experts"]},
}
BOTH = [(make, case, fields) for make in (llama, qwen3) for case, fields in (CASES | DENSE_CASES).items()]
BOTH += [(make, case, fields) for make in (mixtral, qwen3_moe) for case, fields in (CASES | MIXTURE_CASES).items()]
ADAPTED = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
KINDS = [{"backend": backend, "memory": memory, **ADAPTED} for backend in ("nvfp4", "nf4") for memory in ("fast", "small")]
BOTH += [(gpt_oss, f"{fields['backend']} {fields['memory']}", fields) for fields in KINDS]
BOTH += [(gpt_oss, "attention only", ATTENTION), (gpt_oss, "down", ONLY_DOWN)]


@pytest.mark.parametrize("make, case, fields", BOTH, ids=[f"{make.__name__}-{case}" for make, case, _ in BOTH])
def test_what_autograd_keeps(make, case, fields, as_on_a_gpu):
    _, settings = adapted(make(1), **fields)
    assert growth(lambda layers: adapted(make(layers), **fields)[0]) == expected(make(), settings)


def test_what_autograd_keeps_of_stock_peft():
    def make(layers):
        return get_peft_model(llama(layers), LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=False)

    assert growth(make) == expected(llama(), Settings(rank=4, backend="bf16", adapter_bytes=2))


def test_what_autograd_keeps_of_a_router_that_normalises_in_16_bits(as_on_a_gpu):
    normalised = lambda layers=2: qwen3_moe(layers, norm_topk_prob=True)
    _, settings = adapted(normalised(), accuracy="paper")
    found = growth(lambda layers: adapted(normalised(layers), accuracy="paper")[0])
    assert found == expected(normalised(), settings)
    # the chosen probabilities and their sum, in FP32: two of one token, and one
    assert found[0] == expected(qwen3_moe(), settings)[0] + 4 * (2 + 1)


@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
def test_what_is_kept_does_not_depend_on_the_routing(backend, as_on_a_gpu):
    """All tokens to two of four experts: the same bytes. In NF4, where experts run one by one, but for the copies of the other
    experts' adapters."""
    sizes = {}
    for one_sided in (False, True):
        model, _ = adapted(mixtral(), backend=backend, **ONLY_FIRST)
        if one_sided:
            for module in model.modules():
                if type(module).__name__.endswith("TopKRouter"):
                    module.register_forward_hook(lambda m, x, y: (y[0], y[1], y[2] % 1 + torch.arange(2)))
        sizes[one_sided] = sum(storages(model, MANY))
    # 2 layers, 2 experts without a row: A (4, 64) and B (192, 4) in BF16 each
    assert sizes[False] - sizes[True] == (0 if backend == "nvfp4" else 2 * 2 * 2 * 4 * (64 + 192))


@pytest.mark.parametrize(
    "fields",
    [{}, {"accuracy": "high"}, {"backend": "nf4"}, {"backend": "nf4", "memory": "small"}],
    ids=["nvfp4", "high", "nf4", "nf4 small"],
)
def test_tensors_that_the_allocator_rounds_up(fields, as_on_a_gpu):
    """Twice the experts: so many more tensors, of which each may be 511 bytes larger in an allocator that deals in 512."""
    counts, bounds = {}, {}
    for experts in (4, 8):
        base = mixtral(1, experts)
        shape = model_shape(base.config)
        model, settings = adapted(base, **fields)
        found = storages(model, 128)
        counts[experts] = len(found)
        bounds[experts] = kept.per_layer(shape, replace(settings, sequence=128))[kept.ROUNDING]
        assert sum(-n % 512 for n in found) <= bounds[experts] + 511 * 40  # fewer than 40 tensors are not an expert's
    assert 511 * (counts[8] - counts[4]) == bounds[8] - bounds[4] == bounds[4]


FIELDS = [{}, {"memory": "small"}, {"backend": "nf4"}, {"backend": "bf16"}]
HELD = [(make, fields) for make in (llama, mixtral, qwen3_moe) for fields in FIELDS]
HELD += [(make, fields) for make in (mixtral, qwen3_moe) for fields in ({"skip_modules": ["experts"]}, ONLY_DOWN)]
HELD += [(gpt_oss, fields) for fields in KINDS]


@pytest.mark.parametrize("make, fields", HELD, ids=lambda value: getattr(value, "__name__", str(value)))
def test_static_bytes_are_those_of_a_real_model(make, fields):
    base = make(tie_word_embeddings=False)
    shape = model_shape(base.config)
    model, settings = adapted(base, **fields)
    found = kept.static(shape, settings)
    assert found[WEIGHTS[0]] + found[WEIGHTS[1]] == frozen_bytes(model)
    sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert found["adapters"] == sum(sizes[n] for n in trained) == 4 * kept.adapter_parameters(shape, settings)
    assert found["optimizer"] == 2 * found["adapters"]
    norms = sum(size for n, size in sizes.items() if "norm" in n or n.endswith(("bias", "sinks")))
    assert found["norms and biases"] == norms
    assert found["embedding and head"] == sum(size for n, size in sizes.items() if "embed" in n or "lm_head" in n)
    everything = frozen_bytes(model) + found["adapters"] + norms + found["embedding and head"] + found.get(kept.DENSE, 0)
    assert everything == sum(sizes.values()) + (beside_nf4(model) if settings.format == "nf4" else 0)


def beside_nf4(model) -> int:
    """What bitsandbytes holds of linears outside of parameters."""
    layers = [m for m in model.modules() if type(m).__name__ == "NF4FrozenLinear"]
    return sum(t.numel() * t.element_size() for m in layers for name, t in m.packed_tensors().items() if name != "weight")


@pytest.mark.parametrize("make", [qwen3, mixtral, qwen3_moe, gpt_oss])
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
        assert kept.adapter_parameters(model_shape(make().config), settings) == trained, fields
    with pytest.raises(ValueError, match=r"are fused|are one parameter"):
        adapted(make(), target_modules=["q_proj", OLD[make][0]])
    with pytest.raises(ValueError, match=f"{OLD[make][0]} and {OLD[make][1]} are one parameter, gate_up_proj"):
        estimate(make().config, Settings(targets=("q_proj", OLD[make][0])))


ON_THE_HOST = [(make, backend) for make in (llama, mixtral) for backend in ("nvfp4", "nf4", "bf16")] + [(gpt_oss, "nvfp4")]


@pytest.mark.parametrize("make, backend", ON_THE_HOST)
def test_bytes_on_the_host_are_those_of_a_model(make, backend):
    """Packed experts move with their layer; dense ones stay on the GPU."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    base = make(5)
    shape = model_shape(base.config)
    model = get_peft_model(base, NVFP4LoraConfig(backend=backend, memory="smallest", target_modules="all-linear"))
    settings = settings_of(model, sequence=16)
    assert settings.offload
    found, without = estimate(shape, settings), estimate(shape, replace(settings, memory="small"))
    assert found.offloaded == sum(p.nbytes for layer in _owner(model).layers for p in layer.parameters())
    here, there = (sum(e.static[name] for name in WEIGHTS) for e in (found, without))
    assert there - here == found.offloaded * 3 // 5 and without.offloaded == 0
    assert found.as_dict()["offloaded_bytes"] == found.offloaded


def dense_and_experts(memory: str):
    """Models in FP32, whose rows are even in number, with adapters."""
    bases = (llama(dtype=torch.float32, tie_word_embeddings=False, intermediate_size=192), mixtral(dtype=torch.float32))
    return [(model_shape(base.config), adapted(base, memory=memory)[0]) for base in bases]


def sharded(rank: int, memory: str) -> list[tuple[int, int, int]]:
    """Of each model: bytes of this process's shares, of one layer, and of what a step gathers."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for _, model in dense_and_experts(memory):
        layers = model.get_base_model().model.layers
        layer_bytes = sum(p.numel() * p.element_size() for p in layers[0].parameters())
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        shares = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
        with count_bytes() as count:
            model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        found.append((shares, layer_bytes, count.payload["all_gather"]))
    return found


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_shares_and_gathered_bytes_are_those_of_fsdp2(memory):
    measured, _ = both(sharded, memory)
    settings = Settings(rank=4, memory=memory, cards=2, strategy="fsdp2")
    for (shares, layer_bytes, gathered), (shape, _) in zip(measured, dense_and_experts(memory)):
        shape = replace(shape, dtype_bytes=4)
        alone = kept.static(shape, settings)
        # global scales of 4 bytes are cut in two as well
        assert shares == sum(n for name, n in estimate(shape, settings).static.items() if name != "optimizer")
        # the last norm is the root's, the estimate spreads it over two layers
        assert layer_bytes == run.layer_bytes(shape, settings, alone) - 64 * 4 // 2
        # forward and backward gather each layer once, the root once
        assert gathered == 2 * 2 * layer_bytes + alone["embedding and head"] + 64 * 4
