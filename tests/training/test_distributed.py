"""DDP and FSDP2 on two gloo processes: the numbers of one process on the same batch, and the same bytes everywhere."""

import copy

import pytest
import torch
import torch.distributed as dist
from _rehearsal import Rehearsal
from _sharded import batch, shard, tuned
from _two_processes import Failed, both, refusal
from _wire import count_bytes, count_ddp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from peft_nvfp4 import attach_loss, enable_cuda_graphs, frozen_bytes, graph_status
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.training import distributed
from peft_nvfp4.training.distributed.hooks import plain_parameters

BACKENDS = ("nvfp4 cached", "nvfp4 transient", "nf4", "bf16")

# Both sides compute the same products of the same numbers: a token's codes depend on that token alone, and the gradient of half a
# batch is twice that of the whole (a power of two, so its codes are the same). Sums of FP32 may be added in another order. A sum
# of n terms is off by about sqrt(n) * 2**-24 of its size; the longest here has 176 (the MLP's width), and 28 of them follow each
# other (2 layers, 7 products, forward and backward). One code that differed would show as 1e-3.
NOISE = 28 * 176**0.5 * 2**-24


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


def one_process(model, ids):
    """Loss and gradients of the whole batch, and the model as it was."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.item(), found


def mean_loss(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / 2


def farthest(got: dict, wanted: dict) -> float:
    assert got.keys() == wanted.keys() and len(got) == 28
    return max(((got[name] - g).abs().max() / g.abs().max()).item() for name, g in wanted.items())


def stored_bytes(model) -> dict[str, torch.Tensor]:
    """Packed tensors of the sharded or whole model."""
    found = {name: p.detach() for name, p in model.named_parameters() if not p.is_floating_point()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in found.items()}


# ---------------------------------------------------------------------------------------------- DDP
def ddp_step(rank: int, backend: str, settings: dict, accumulate: bool):
    model, ids = tuned(backend), batch()
    loss, wanted = one_process(model, ids)
    packed = stored_bytes(model)
    ddp = DDP(model, **settings)
    mine = ids[2 * rank : 2 * rank + 2]
    if accumulate:
        with ddp.no_sync():
            first = ddp(input_ids=mine[:1], labels=mine[:1]).loss / 2
            first.backward()
        second = ddp(input_ids=mine[1:], labels=mine[1:]).loss / 2
        second.backward()
        here = first + second
    else:
        here = ddp(input_ids=mine, labels=mine).loss
        here.backward()
    same = all(torch.equal(p, packed[name]) for name, p in stored_bytes(model).items())
    return loss, mean_loss(here), farthest(gradients(ddp), wanted), same and activation_cache.live() == 0


ACCUMULATE = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True})
DDP_CASES = [(backend, {}, False) for backend in BACKENDS] + [("nvfp4 cached", settings, True) for settings in ACCUMULATE]
DDP_CASES += [("nvfp4 cached", {"static_graph": True}, False), ("nvfp4 cached", {"broadcast_buffers": False}, False)]


@pytest.mark.parametrize("backend, settings, accumulate", DDP_CASES, ids=str)
def test_ddp_gives_the_gradients_of_one_process(backend, settings, accumulate):
    """Also of two micro-batches, of which the first is not synchronised."""
    for loss, here, distance, same in both(ddp_step, backend, settings, accumulate):
        assert abs(here - loss) <= NOISE * loss and distance <= NOISE and same


def ddp_wire(rank: int):
    model, ids = tuned("nvfp4 cached"), batch()
    ddp = DDP(model)
    count = count_ddp(ddp)
    ddp(input_ids=ids, labels=ids).loss.backward()
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    return count.payload["all_reduce"], trained


def test_ddp_synchronises_adapters_only():
    for sent, trained in both(ddp_wire):
        assert sent == trained


def ddp_of_different_bases(rank: int, backend: str, kind: str):
    torch.manual_seed(0)
    model = tuned(backend)
    layer = model.get_base_model().model.layers[1].mlp.up_proj.get_base_layer()
    if rank == 1:
        layer.packed_tensors()[kind].detach().flatten().view(torch.uint8)[-1] ^= 1
    message = refusal(lambda: DDP(model))
    distributed.broadcast_base(model)
    DDP(model)  # no error now
    return message


@pytest.mark.parametrize("backend, kind", [("nvfp4 cached", "weight_scales"), ("nf4", "absmax"), ("bf16", "weight")])
def test_bases_that_differ_are_named(backend, kind):
    """One bit of one tensor. DDP alone would not notice, and would not copy NF4's scales."""
    for message in both(ddp_of_different_bases, backend, kind):
        assert "first at 'base_model.model.model.layers.1.mlp.up_proj.base_layer'" in message
        assert "broadcast_base" in message


def a_foreign_scale_on_the_source(rank: int):
    model = tuned("nvfp4 cached")
    layer = model.get_base_model().model.layers[0].mlp.up_proj.get_base_layer()
    if rank == 0:
        w = layer.forward_layout
        layer._store(w._replace(gscale=w.gscale * 1.25))
    before = layer.scale_factor
    distributed.broadcast_base(model)
    return before, layer.scale_factor


def test_what_was_known_of_bytes_that_are_replaced_is_found_out_again():
    assert both(a_foreign_scale_on_the_source) == [(1.25, 1.25), (1.0, 1.25)]


def other_settings(rank: int):
    return refusal(lambda: DDP(tuned("nvfp4 transient" if rank else "nvfp4 cached")))


def test_bases_of_other_settings_are_named():
    assert all("q_proj.base_layer" in message for message in both(other_settings))


def ddp_graphs(rank: int, graphed: bool):
    """Three steps of SGD; recordings are rehearsed, as on any CPU."""
    model, ids = tuned("nvfp4 cached", lora_dropout=0.1), batch()
    if graphed:
        enable_cuda_graphs(model)
        model.get_base_model().model.forward.recorder = Rehearsal
    ddp = DDP(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for step in range(3):
        mine = ids[2 * rank : 2 * rank + 2].roll(step, 1)
        with ddp.no_sync():
            ddp(input_ids=mine[:1], labels=mine[:1]).loss.backward()
        loss = ddp(input_ids=mine[1:], labels=mine[1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    replays = sum(graph_status(model).graphs.values()) if graphed else 6
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, replays


def test_ddp_replays_recordings_with_the_same_numbers():
    for eager, graphed in zip(both(ddp_graphs, False), both(ddp_graphs, True)):
        assert eager[0] == graphed[0] and graphed[2] == 6
        assert all(torch.equal(eager[1][name], graphed[1][name]) for name in eager[1])


# ---------------------------------------------------------------------------------------------- FSDP2
def fsdp_step(rank: int, backend: str, checkpointing: bool, supervised: bool, width: int = 176):
    model, ids = tuned(backend, width=width), batch()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if supervised:
        assert attach_loss(model).attached
    loss, wanted = one_process(model, ids)
    packed, seen = stored_bytes(model), {}
    size = sum(p.nbytes for p in model.parameters())
    shard(model)
    part = sum(p.to_local().nbytes for p in model.parameters())
    for name, module in model.named_modules():  # what a layer computes with
        if name.endswith("up_proj"):
            name = f"{name}.base_layer.weight"
            module.register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.base_layer.weight.detach().clone()}))
    mine = ids[2 * rank : 2 * rank + 2]
    with count_bytes() as wire:
        here = model(input_ids=mine, labels=mine).loss
        here.backward()
    same = all(torch.equal(p, packed[name]) for name, p in stored_bytes(model).items())
    same &= len(seen) == 2 and all(torch.equal(w, packed.get(name, w)) for name, w in seen.items())
    layers = sum(p.nbytes for p in model.get_base_model().model.layers.parameters())
    expected = 2 * layers + size - layers  # layers twice (forward, backward), the rest stays gathered
    return loss, mean_loss(here), farthest(gradients(model), wanted), same, part / size, wire.payload["all_gather"] / expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp2_gives_the_gradients_of_one_process(backend):
    for loss, here, distance, same, part, gathered in both(fsdp_step, backend, False, False):
        assert abs(here - loss) <= NOISE * loss and distance <= NOISE and same
        assert part == 0.5, "each process keeps half of every tensor"
        assert gathered == 1, "what is stored is what travels: packed bytes, once forward and once backward"


@pytest.mark.parametrize(
    "case",
    [("nvfp4 transient", True, True), ("nvfp4 cached", False, False, 99)],
    ids=["checkpointing, loss at supervised positions", "rows that two processes cannot share evenly"],
)
def test_fsdp2_together_with(case):
    for loss, here, distance, same, *_ in both(fsdp_step, *case):
        assert abs(here - loss) <= NOISE * loss and distance <= NOISE and same


def fsdp_mixed(rank: int, backend: str):
    """BF16 model, FP32 adapters, adapters cast to BF16 for the wire."""
    model, ids = tuned(backend, torch.bfloat16), batch()
    packed, seen = stored_bytes(model), {}
    shard(model, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.base_layer.weight.detach().clone()}))
    model(input_ids=ids, labels=ids).loss.backward()
    finite = all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients(model).values())
    return finite and all(torch.equal(w, packed[f"{name}.base_layer.weight"]) for name, w in seen.items()) and len(seen) == 2


@pytest.mark.parametrize("backend", ["nvfp4 cached", "nf4"])
def test_fsdp2_casts_no_bytes(backend):
    assert both(fsdp_mixed, backend) == [True, True]


def fsdp_checkpoint(rank: int, folder: str, backend: str):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model, ids = shard(tuned(backend)), batch()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    logits = model.eval()(input_ids=ids).logits
    torch.manual_seed(1)
    other = shard(tuned(backend))
    with torch.no_grad():
        for p in other.parameters():
            p.to_local().zero_()
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    sharded = torch.equal(other.eval()(input_ids=ids).logits, logits)
    other.reshard()
    with torch.no_grad():
        for p in other.parameters():
            p.to_local().zero_()
    set_model_state_dict(other, copy.deepcopy(full), options=StateDictOptions(full_state_dict=True))
    return (
        sharded,
        torch.equal(other(input_ids=ids).logits, logits),
        all(torch.equal(a, full[n]) for n, a in stored_bytes(other).items()),
    )


@pytest.mark.parametrize("backend", ["nvfp4 cached", "nf4"])
def test_fsdp2_checkpoints_sharded_and_full(tmp_path, backend):
    assert both(fsdp_checkpoint, str(tmp_path / "dcp"), backend) == [(True, True, True)] * 2


def fsdp1(rank: int):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return refusal(lambda: FullyShardedDataParallel(tuned("nf4"), device_id=torch.device("cpu")))


def test_fsdp1_is_refused_with_the_way_out():
    assert all("fsdp_version: 2" in message and "q_proj.base_layer" in message for message in both(fsdp1))


def too_small(rank: int, backend: str, name: str):
    return refusal(lambda: fully_shard(tuned(backend).get_base_model().model.layers[0].get_submodule(name)))


@pytest.mark.parametrize("name", ["mlp.down_proj.base_layer", "self_attn.q_proj", "self_attn", "mlp"])
def test_units_smaller_than_a_decoder_layer_are_refused(name):
    """Without that, the loss of units of one attention is off in the fourth digit: q, k and v quantise their input again."""
    assert all("Shard decoder layers" in message for message in both(too_small, "nvfp4 transient", name))


def test_other_backends_may_have_small_units():
    assert both(too_small, "bf16", "self_attn.q_proj") == both(too_small, "nf4", "mlp") == ["", ""]


# ---------------------------------------------------------------------------------------------- layers and recordings
def sharded_model(rank: int):
    model, ids = tuned("nvfp4 transient"), batch()
    whole = frozen_bytes(model)
    enable_cuda_graphs(model)
    model.get_base_model().model.forward.recorder = None  # nothing may be recorded
    shard(model)
    model(input_ids=ids, labels=ids).loss.backward()
    reasons = list(graph_status(model).reasons)
    return reasons, refusal(model.merge_adapter), frozen_bytes(model) / whole


def test_what_cannot_be_done_while_sharded_is_said():
    for reasons, message, share in both(sharded_model):
        assert reasons == ["the parameters are sharded (FSDP2), and each step gathers them anew"]
        assert "merge there" in message and share == 0.5


def test_nf4_layer_with_a_plain_parameter():
    model = tuned("nf4").get_base_model()
    layer = model.model.layers[0].mlp.up_proj.base_layer
    before, x = layer.dequantize(), torch.randn(3, 64)
    y, snapshot = layer(x), layer.packed_tensors()
    assert len(plain_parameters(layer, torch.device("cpu"))) == 5 and type(layer.weight) is torch.nn.Parameter
    assert torch.equal(layer.dequantize(), before) and torch.equal(layer(x), y)
    assert all(torch.equal(t, snapshot[name]) for name, t in layer.packed_tensors().items())
    layer.requantize_(torch.zeros(layer.out_features, layer.in_features))
    assert not layer.dequantize().any()


def fails(rank: int):
    if rank == 1:
        raise ValueError("on purpose")


def test_failures_of_a_process_are_seen():
    with pytest.raises(Failed, match="on purpose"):
        both(fails)
