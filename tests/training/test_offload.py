"""Offload: the same bits as without, in every way of running a model, and clear refusals. On a CPU the copies are made at
once; the tests marked gpu check the streams."""

import json

import pytest
import torch
from _assertions import COPIES, by_device
from _offloaded import BACKENDS, at_rest, batch, late, load_other_weights, packed, same, scrambled, steps, tuned
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, enable_cuda_graphs, frozen_bytes
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.fusion.loss_attach import loss_report
from peft_nvfp4.training.offload.enable import _owner, disable_offload, enable_offload, find_layers, offload_status, offloaded
from peft_nvfp4.training.offload.layers import ATTRIBUTE
from peft_nvfp4.training.steps import slow_down_steps


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
    slow_down_steps(model)  # whose trials run the layers, too
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


def test_state_dict_reads_the_host():
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    steps(model, 1), steps(plain, 1)
    assert same(model.state_dict(), plain.state_dict())


@by_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_and_unmerging(backend, device):
    model, plain = tuned(backend, "cpu", device=device), tuned(backend, None, device=device)
    before = packed(model)
    ids = batch(device)
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


def test_moving_does_not_touch_the_host_and_lets_go_of_buffers():
    """To "meta", a device that holds nothing: what follows is everything but the packed bytes."""
    model = tuned("nvfp4 cached", "cpu")
    steps(model, 1)
    assert offload_status(model).device_bytes
    before = packed(model)
    model.to("meta")
    owner = _owner(model)
    assert offload_status(model).device_bytes == 0 and not any(layer.views for layer in owner.layers)
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


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_copies_have_buffers_of_their_own(way):
    model = tuned("nvfp4 cached", "cpu")
    losses = steps(model, 1)[0]
    other = COPIES[way](model)
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
    load_other_weights(model, plain)
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
    """Hidden states and attention of every layer have gradients of their own."""
    found = []
    for model in (tuned(backend, None), scrambled(tuned(backend, "cpu"))):
        model.get_base_model().set_attn_implementation("eager")
        output = model(input_ids=batch(), output_hidden_states=True, output_attentions=True)
        assert len(output.attentions) == 3
        loss = sum(h.float().square().mean() for h in output.hidden_states)
        (loss + sum(a.float().square().sum() for a in output.attentions)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(*found)


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


def test_rows_are_packed_and_the_loss_is_at_labels_as_without():
    """The hooks that fetch a layer are no reason to do without."""

    def step(memory):
        torch.manual_seed(0)
        lora = NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", memory=memory)
        model = get_peft_model(tiny_llama(torch.float32), lora).train()
        ids, mask = batch(), torch.ones(2, 16, dtype=torch.long)
        mask[1, 5:] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        return model, loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (model, loss, found), (_, expected, gradients) = step("smallest"), step("small")
    assert offloaded(model) and loss == expected and same(found, gradients)
    assert loss_report(model).reason == "from the head's weight"
    assert "packed 1 calls: 21 of 32 tokens were real" in str(model.base_model.nvfp4_steps)
