"""offload="cpu" on several processes, spread over devices, and on a GPU, whose streams the tests marked gpu check."""

import pytest
import torch
from _mixtures import mixtral
from _offloaded import BACKENDS, at_rest, batch, same, steps, tuned
from _two_processes import both, refusal
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.training.offload.enable import _owner, enable_offload, offload_status
from peft_nvfp4.training.offload.frozen_methods import computing
from peft_nvfp4.training.steps import slow_down_steps


def ddp_step(rank: int, offload: str | None):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(tuned("nvfp4 cached", offload))
    ids = batch()[rank : rank + 1]
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_ddp_is_bit_equal():
    for (loss, grads), (other, wanted) in zip(both(ddp_step, "cpu"), both(ddp_step, None)):
        assert loss == other and same(grads, wanted)


def ddp_of_experts(rank: int):
    from torch.nn.parallel import DistributedDataParallel

    config = NVFP4LoraConfig(r=2, target_modules="all-linear", memory="smallest")
    model = get_peft_model(mixtral(), config)
    wrapped = DistributedDataParallel(model)
    return sum(not p.is_floating_point() for p in model.parameters()), sum(
        not p.is_floating_point() for p in wrapped._module_parameters
    )


def test_ddp_leaves_packed_experts_alone():
    """It would send them, and refuses a model on the host and on a GPU."""
    assert all(packed > 0 and known == 0 for packed, known in both(ddp_of_experts))


def fsdp(rank: int):
    from torch.distributed.fsdp import fully_shard

    model = tuned("nvfp4 cached", "cpu")
    other = tuned("nvfp4 cached", None)
    fully_shard(other.get_base_model().model.layers[0])
    return refusal(lambda: fully_shard(model.get_base_model().model.layers[0])), refusal(lambda: enable_offload(other))


def test_fsdp_is_refused():
    assert all("FSDP" in text for messages in both(fsdp) for text in messages)


def test_a_model_cut_between_layers():
    """What accelerate's device_map does where one device ends: the next layer gets a copy. Quantised activations are found by the
    tensor, so none crosses, and none need: a layer begins with its norm."""

    def cut(model):
        for layer in model.get_base_model().model.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0].clone(), *args[1:]))
        return model

    plain, pieces = tuned("nvfp4 cached", None), cut(tuned("nvfp4 cached", None))
    wanted, found = steps(plain), steps(pieces)
    assert found[0] == wanted[0] and same(found[1], wanted[1]) and activation_cache.live() == 0


def spread(model, device_map):
    """What from_pretrained(device_map=...) does with a loaded model, also where all devices are one."""
    from accelerate import dispatch_model

    return dispatch_model(model, device_map, main_device=next(iter(device_map.values())), force_hooks=True)


def test_a_spread_model_is_fused_like_one_that_is_not():
    """accelerate asks every module's input to a device (``.to``, which changes nothing where it is there), norms' readers
    included. Once that counted as reading the norm's output: no norm was fused, and gradients differed from one device's."""

    def adapted(model):
        torch.manual_seed(0)
        model = get_peft_model(model, NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
        slow_down_steps(model)  # a head with a device hook is called, and its loss rounds otherwise
        return model

    plain, pieces = (adapted(tune(tiny_llama(num_hidden_layers=2))) for tune in (lambda m: m, lambda m: spread(m, {"": "cpu"})))
    assert hasattr(pieces.get_base_model().model.layers[0].self_attn, "_hf_hook")
    assert str(pieces.base_model.nvfp4_report) == str(plain.base_model.nvfp4_report)
    wanted, found = steps(plain), steps(pieces)
    assert found[0] == wanted[0] and same(found[1], wanted[1])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_device_map_over_two_gpus(backend, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny_llama(torch.bfloat16, num_hidden_layers=4).save_pretrained(tmp_path)
    word, _, layouts = backend.partition(" ")
    memory = "small" if layouts == "transient" else "fast"
    config = NVFP4LoraConfig(backend=word, memory=memory, r=4, target_modules="all-linear")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 0}
    places |= {"model.layers.2": 1, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}
    found = []
    for device_map in ({"": 0}, places):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map=device_map)
        model = get_peft_model(model, config).train()
        assert {p.device.index for p in model.parameters()} == set(device_map.values())
        found.append(steps(model))
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_a_gpu_is_bit_equal(backend, checkpointing):
    losses, adapters = steps(tuned(backend, None, 5, "cuda"), 3, checkpointing)
    model = tuned(backend, "cpu", 5, "cuda")
    layers = _owner(model).layers
    assert all(not p.is_cuda for layer in layers for p in layer.parameters())
    got, trained = steps(model, 3, checkpointing)
    status = offload_status(model)
    assert got == losses and same(trained, adapters) and at_rest(model)
    assert status.pinned and status.copy_ms > 0 and status.ahead == status.copies - 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_on_a_gpu(backend):
    """Besides what test_offload compares there: where weights are, and adapters that come later."""
    model = tuned(backend, "cpu", 3, "cuda")
    model(input_ids=batch("cuda"))
    model.merge_adapter()
    model.unmerge_adapter()
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    with computing(layer):
        assert layer.weight.is_cuda and layer.dequantize().is_cuda
    assert not layer.weight.is_cuda and layer.dequantize().is_cuda
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert all(p.is_cuda for n, p in model.named_parameters() if ".second." in n)


@pytest.mark.gpu
def test_memory_of_a_gpu_holds_two_layers():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = tuned("nvfp4 cached", "cpu", 8, "cuda")
    steps(model, 1)
    rest = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    status = offload_status(model)
    assert status.device_bytes * 4 == status.host_bytes
    # parameters, buffers of two layers, AdamW's state, cuBLAS workspaces (at most 3 x 32 MiB), rounding up to 512 bytes
    assert torch.cuda.memory_allocated() - before < 4 * rest + status.device_bytes + 3 * (32 << 20) + (1 << 20)
