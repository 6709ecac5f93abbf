"""Offload: the same bits as without, in every way of running a model, and clear refusals. On a CPU the copies are made at
once; the tests marked gpu check the streams."""

import copy
import io
import json
from pathlib import Path

import _steps
import pytest
import torch
from _low_level import adapted_model
from _two_processes import both
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, enable_cuda_graphs, frozen_bytes, kernels
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.training.offload.enable import (
    _owner,
    computing,
    disable_offload,
    enable_offload,
    find_layers,
    offload_status,
    offloaded,
)
from peft_nvfp4.training.offload.layers import ATTRIBUTE

BACKENDS = ("nvfp4 cached", "nvfp4 transient", "nf4", "bf16")


def tuned(backend: str, offload: str | None, layers: int = 3, device: str = "cpu", **settings):
    word, _, layouts = backend.partition(" ")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tiny_llama(dtype, num_hidden_layers=layers)
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, weight_layouts=layouts or "cached") | settings
    torch.manual_seed(0)
    model = adapted_model(model, backend=word, **settings)
    if offload:
        enable_offload(model)
    return model.train().to(device)


def batch(device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)


def steps(model, count: int = 2, checkpointing: bool | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the adapters after ``count`` steps. ``checkpointing``: reentrant or not; None: without."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    ids = batch(model.device)
    torch.manual_seed(3)
    losses = _steps.steps(model, ids, count)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def packed(model) -> dict[str, torch.Tensor]:
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, FrozenLinear))
    return {f"{n}.{key}": t.cpu().clone() for n, m in layers for key, t in m.packed_tensors().items()}


def at_rest(model) -> bool:
    """All parameters point to the host's bytes."""
    owner = _owner(model)
    return all(p.data_ptr() == home.data_ptr() for layer in owner.layers for p, home, _ in layer.places)


def scrambled(model):
    """On a CPU the host's bytes are as good as the buffers'. Here they are not: every bit pattern is another one until it is
    copied, so whatever computed with them would show."""
    owner, load = _owner(model), _owner(model)._load
    for layer in owner.layers:
        layer.host.data ^= 0x5A

    def loaded(layer, ahead):
        before = owner.status.copies
        load(layer, ahead)
        if owner.status.copies > before:
            owner._slot(layer).data[: layer.size] ^= 0x5A

    owner._load = loaded
    return model


def late(model):
    """A copy on a CPU is there at once, the earliest that a GPU's may be: it must destroy nothing that is needed. Here it also
    comes as late as a GPU's may: when a layer waits for it."""
    owner, load, wait, coming = _owner(model), _owner(model)._load, _owner(model)._wait, {}

    def loaded(layer, ahead):
        before = owner.status.copies
        load(layer, ahead)
        if owner.status.copies > before:
            slot = owner._slot(layer)
            coming[slot] = slot.data.clone()
            slot.data.fill_(0x5A)

    def waited(slot):
        if slot in coming:
            slot.data.copy_(coming.pop(slot))
        wait(slot)

    owner._load, owner._wait = loaded, waited
    return model


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_bit_equal(backend, checkpointing):
    losses, adapters = steps(tuned(backend, None, lora_dropout=0.1), checkpointing=checkpointing)
    model = late(scrambled(tuned(backend, "cpu", lora_dropout=0.1)))
    got, trained = steps(model, checkpointing=checkpointing)
    assert got == losses and same(trained, adapters)
    assert at_rest(model) and activation_cache.live() == 0
    for layer in _owner(model).layers:
        layer.host.data ^= 0x5A
    assert same(packed(model), packed(tuned(backend, None)))


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_any_number_of_layers(layers):
    assert steps(tuned("nvfp4 cached", "cpu", layers))[0] == steps(tuned("nvfp4 cached", None, layers))[0]


def test_gradient_accumulation_and_two_forwards_before_backward():
    def gradients(model):
        ids = batch()
        first, second = (model(input_ids=part, labels=part).loss for part in (ids[:1], ids[1:]))
        second.backward()
        first.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert same(gradients(tuned("nvfp4 cached", "cpu")), gradients(tuned("nvfp4 cached", None)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_and_generation_are_bit_equal(backend):
    with_, without = tuned(backend, "cpu").eval(), tuned(backend, None).eval()
    ids = batch()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(with_(input_ids=ids).logits, without(input_ids=ids).logits)
    made = [m.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for m in (with_, without)]
    assert torch.equal(*made)
    assert steps(with_.train())[0] == steps(without.train())[0], "after inference mode, training goes on"


def test_every_layer_but_the_first_is_fetched_ahead():
    model = tuned("nvfp4 cached", "cpu", 4)
    steps(model, 1)
    status = offload_status(model)
    # forward: 0, then 1, 2, 3 ahead. Backward: 3 and 2 are there; 1 and 0 ahead
    assert (status.copies, status.ahead) == (6, 5)
    assert status.layers == 4 and status.moved_bytes * 4 == status.host_bytes * 6 and status.device_bytes * 2 == status.host_bytes
    assert frozen_bytes(model) <= status.host_bytes < frozen_bytes(model) + 4 * 7 * 6 * 256
    steps(model, 1)
    assert offload_status(model).copies - status.copies == 4, "0 and 1 were there: 2, 3, and 1, 0 on the way back"
    assert "4 layers" in str(status) and "ahead" in str(status)


def test_buffers_are_what_layers_compute_with():
    """Bytes that change in a buffer change the result: nothing computes with the host's."""
    model = tuned("nvfp4 cached", "cpu", 2)
    ids = batch()
    before = model(input_ids=ids).logits
    _owner(model).slots[0].data.zero_()
    assert not torch.equal(model(input_ids=ids).logits, before)


# ---------------------------------------------------------------------------------------------- everything else


def test_state_dict_reads_the_host():
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    steps(model, 1), steps(plain, 1)
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_and_unmerging(backend):
    model, plain = tuned(backend, "cpu"), tuned(backend, None)
    before = packed(model)
    ids = batch()
    for m in (model, plain):
        m.merge_adapter()
    assert same(packed(model), packed(plain))
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits), "what is fetched is what was merged"
    model.unmerge_adapter(), plain.unmerge_adapter()
    assert same(packed(model), before)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    dense, wanted = model.merge_and_unload(), plain.merge_and_unload()
    assert same(dict(dense.named_parameters()), dict(wanted.named_parameters())) and not offloaded(dense)
    assert torch.equal(dense(input_ids=ids).logits, wanted(input_ids=ids).logits)


def test_disabling_adapters_of_a_merged_model_unmerges_within_forward():
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    found = []
    for m in (model, plain):
        m.merge_adapter()
        with m.disable_adapter(), torch.no_grad():
            found.append(m(input_ids=batch()).logits)
    assert torch.equal(*found) and same(packed(model), packed(plain))
    assert steps(model)[0] == steps(plain)[0]


def test_unloading_keeps_the_base_on_the_host():
    base = tuned("nvfp4 transient", "cpu").unload()
    assert offloaded(base) and torch.equal(base(batch()).logits, tuned("nvfp4 transient", None).unload()(batch()).logits)


def test_casts_leave_packed_bytes_and_reach_the_rest():
    model, plain = tuned("nvfp4 cached", "cpu").to(torch.bfloat16), tuned("nvfp4 cached", None).to(torch.bfloat16)
    assert same(packed(model), packed(plain)) and torch.equal(model(input_ids=batch()).logits, plain(input_ids=batch()).logits)
    model, plain = tuned("bf16", "cpu").to(torch.bfloat16), tuned("bf16", None).to(torch.bfloat16)
    assert same(packed(model), packed(plain)) and torch.equal(model(input_ids=batch()).logits, plain(input_ids=batch()).logits)


def test_moving_does_not_touch_the_host():
    """To "meta", a device that holds nothing: what follows is everything but the packed bytes."""
    model = tuned("nvfp4 cached", "cpu")
    before = packed(model)
    model.to("meta")
    owner = _owner(model)
    assert owner.device.type == "meta" and not any(p.is_meta for layer in owner.layers for p in layer.parameters())
    assert model.get_base_model().lm_head.weight.is_meta
    assert same(packed(model), before)


def test_a_second_adapter_and_plain_lora():
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    for m in (model, plain):
        torch.manual_seed(5)
        m.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        m.set_adapter("second")
    assert steps(model)[0] == steps(plain)[0] and at_rest(model)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_buffers_of_their_own(way):
    model = tuned("nvfp4 cached", "cpu")
    losses = steps(model, 1)[0]
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    ids = batch()
    wanted = model(input_ids=ids).logits
    del losses, model
    assert torch.equal(other(input_ids=ids).logits, wanted) and at_rest(other)
    owner = _owner(other)
    assert all(vars(layer.module)[ATTRIBUTE] is layer for layer in owner.layers)
    assert {id(layer.module) for layer in owner.layers} == {id(m) for m in other.get_base_model().model.layers}


def test_an_exception_in_a_layer_leaves_nothing_behind():
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    layer = model.get_base_model().model.layers[1].mlp
    forward, layer.forward = layer.forward, None
    with pytest.raises(TypeError):
        model(input_ids=batch())
    layer.forward = forward
    assert at_rest(model) and steps(model)[0] == steps(plain)[0]


def test_disabling_brings_everything_back():
    model = tuned("nvfp4 cached", "cpu")
    disable_offload(model)
    assert not offloaded(model) and offload_status(model).layers == 0 and str(offload_status(model))
    layer = model.get_base_model().model.layers[0]
    assert not layer._forward_pre_hooks and not layer._forward_hooks
    assert "dequantize" not in vars(layer.mlp.up_proj.base_layer) and "_apply" not in vars(layer.mlp.up_proj.base_layer)
    assert steps(model)[0] == steps(tuned("nvfp4 cached", None))[0]
    disable_offload(model)  # nothing to do
    enable_offload(model)
    assert offload_status(model).layers == 3


def test_what_is_written_to_the_host_is_copied_again():
    """A buffer that holds a layer is no reason not to fetch it, once other bytes were loaded into the model."""
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    with torch.no_grad():
        model(input_ids=batch())  # layers 2 and 1 are in the buffers
    copies = offload_status(model).copies
    values = {name: t.clone() for name, t in plain.state_dict().items()}
    for name in (n for n in values if ".layers.1." in n and n.endswith("base_layer.weight")):
        values[name] = values[name].flip(0)
    model.load_state_dict(values), plain.load_state_dict(values)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch()).logits, plain(input_ids=batch()).logits)
    assert offload_status(model).copies - copies == 3, "0, 1 and 2; each once"


def test_an_interrupted_backward():
    """Its end is never announced. A state dict is the host's all the same, and what is loaded then is kept."""
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    hook = model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=batch(), labels=batch()).loss.backward()
    hook.remove()
    model.zero_grad()
    assert not at_rest(model)
    values = model.state_dict()
    assert at_rest(model) and same(values, plain.state_dict())
    assert steps(model)[0] == steps(plain)[0] and at_rest(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_on_what_layers_return_beside(backend):
    """Hidden states and attention of every layer have gradients of their own: their hooks come in the order of the layers."""
    found = []
    for model in (tuned(backend, None), scrambled(tuned(backend, "cpu"))):
        model.get_base_model().set_attn_implementation("eager")
        output = model(input_ids=batch(), output_hidden_states=True, output_attentions=True)
        assert len(output.attentions) == 3
        loss = sum(h.float().square().mean() for h in output.hidden_states)
        (loss + sum(a.float().square().sum() for a in output.attentions)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(*found)


def test_gradients_through_a_cache_are_refused():
    """Keys of an earlier forward: its last layer computes in backward without any output that has a gradient."""
    model, ids = tuned("nvfp4 cached", "cpu"), batch()
    with torch.no_grad():
        first = model(input_ids=ids[:, :8], use_cache=True)
    model(input_ids=ids[:, 8:], past_key_values=first.past_key_values).logits.sum().backward()
    first = model(input_ids=ids[:, :8], use_cache=True)
    with pytest.raises(RuntimeError, match="cache of keys and values"):
        model(input_ids=ids[:, 8:], past_key_values=first.past_key_values)
    with torch.no_grad():
        model(input_ids=ids[:, 8:], past_key_values=first.past_key_values)


def test_moving_lets_go_of_buffers():
    model = tuned("nvfp4 cached", "cpu")
    steps(model, 1)
    assert offload_status(model).device_bytes
    model.to("meta")
    assert offload_status(model).device_bytes == 0 and not any(layer.views for layer in _owner(model).layers)


# ---------------------------------------------------------------------------------------------- refusals


def test_what_excludes_it_is_said():
    with pytest.raises(ValueError, match="disable_offload"):
        enable_cuda_graphs(tuned("nvfp4 cached", "cpu"))
    model = tuned("nvfp4 cached", None)
    enable_cuda_graphs(model)
    with pytest.raises(ValueError, match="disable_cuda_graphs"):
        enable_offload(model)
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        enable_offload(torch.nn.Linear(2, 2))
    assert find_layers(torch.nn.Linear(2, 2)) == []
    model = tuned("nvfp4 cached", None)
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": 0}
    with pytest.raises(ValueError, match="without device_map"):
        enable_offload(model)


@pytest.mark.parametrize("part", ["equal", "tiny"])
def test_the_benchmark_runs(part, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_offload

    words = ["--parts", part, "--equal-shape", "tiny", "--device", "cpu", "--seq", "40", "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_offload.py", *words])
    bench_offload.main()
    (row,) = json.loads((tmp_path / "offload_cpu.json").read_text())["rows"]
    assert "error" not in row and (row["bit_equal"] if part == "equal" else row["moved_bytes"] > 0)


def test_layers_that_share_weights():
    with pytest.raises(ValueError, match="layer_replication"):
        tuned("nvfp4 cached", "cpu", 2, layer_replication=[[0, 2], [1, 2]])


def test_replicas_are_refused():
    layer = tuned("nvfp4 cached", "cpu").get_base_model().model.layers[0]
    with pytest.raises(RuntimeError, match="one process per GPU"):
        layer._replicate_for_data_parallel()(torch.zeros(1, 2, 64))


def test_copies_of_weights_are_refused():
    model = tuned("nvfp4 cached", "cpu")
    kernels.cache_weights(1 << 20)
    try:
        with pytest.raises(RuntimeError, match="cache_weights"):
            model(input_ids=batch())
    finally:
        kernels.cache_weights(0)


# ---------------------------------------------------------------------------------------------- several processes and devices


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
    from test_moe import mixtral
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

    messages = []
    model = tuned("nvfp4 cached", "cpu")
    other = tuned("nvfp4 cached", None)
    fully_shard(other.get_base_model().model.layers[0])
    for step in (lambda: fully_shard(model.get_base_model().model.layers[0]), lambda: enable_offload(other)):
        try:
            step()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_fsdp_is_refused():
    assert all(len(messages) == 2 and all("FSDP" in text for text in messages) for messages in both(fsdp))


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
        return get_peft_model(model, NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()

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


# ---------------------------------------------------------------------------------------------- on a GPU


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
    model, plain = tuned(backend, "cpu", 3, "cuda"), tuned(backend, None, 3, "cuda")
    ids = batch("cuda")
    model(input_ids=ids)
    for m in (model, plain):
        m.merge_adapter()
    assert same(packed(model), packed(plain))
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    model.unmerge_adapter(), plain.unmerge_adapter()
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    with computing(layer):
        assert layer.weight.is_cuda and layer.dequantize().is_cuda
    assert not layer.weight.is_cuda and layer.dequantize().is_cuda
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert all(p.is_cuda for n, p in model.named_parameters() if ".second." in n)
    dense, wanted = model.merge_and_unload(), plain.merge_and_unload()
    assert torch.equal(dense(input_ids=ids).logits, wanted(input_ids=ids).logits)


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
