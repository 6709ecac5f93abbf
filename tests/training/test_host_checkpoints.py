"""Checkpoints on the host: the same bits as on the device, in every way of running a step; and MLPs in tiles. On a CPU the copies
are made at once; the test marked gpu checks the streams and the memory."""

import copy
import gc
import pickle

import pytest
import torch
from _offloaded import BACKENDS, batch, same, steps, tuned
from torch.utils._python_dispatch import TorchDispatchMode

from peft_nvfp4 import disable_host_checkpoints, enable_host_checkpoints, enable_offload, host_checkpoint_status
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.autograd.tiles import tiling
from peft_nvfp4.fusion import mlp as fused_mlp
from peft_nvfp4.fusion.attach import attach
from peft_nvfp4.training import checkpoint_transfers, host_checkpoints, resting_weights
from peft_nvfp4.training.cuda_graphs import GraphedForward, _graphed, enable_cuda_graphs
from peft_nvfp4.training.host_checkpoints import _watching
from peft_nvfp4.training.host_pass import CheckpointFunction, pass_goes_to_host
from peft_nvfp4.training.steps import speed_up_steps

TILE = 10
"""Tokens; a batch has 32."""


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused_mlp, "tile_rows", lambda width: TILE)
    monkeypatch.setattr(host_checkpoints, "norm_rows", lambda width: TILE)


def checkpointed(backend="nvfp4 cached", host=True, reentrant=False, layers=3, **settings):
    model = tuned(backend, None, layers, **settings)
    attach(model)
    if host:
        enable_host_checkpoints(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def gradients(model, ids=None):
    model.zero_grad()
    ids = batch() if ids is None else ids
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_bit_equal(backend, reentrant):
    losses, adapters = steps(tuned(backend, None, lora_dropout=0.1), checkpointing=reentrant)
    model = tuned(backend, None, lora_dropout=0.1)
    enable_host_checkpoints(model)  # before checkpointing itself, as get_peft_model does
    got, trained = steps(model, checkpointing=reentrant)
    assert got == losses and same(trained, adapters) and activation_cache.live() == 0
    status = host_checkpoint_status(model)
    assert status.passes == 2 and status.last_bytes == 3 * 32 * 64 * 4 and status.host_bytes >= status.last_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_packed_rows(small_tiles, reentrant):
    """Padding is left out of what goes to the host, whose buffers have room for it. MLPs in tiles are on both sides."""
    ids, real = batch(), torch.ones(2, 16, dtype=torch.long)
    real[1, 5:] = 0
    labels, found = ids.masked_fill(real == 0, -100), []
    for host in (False, True):
        model = checkpointed(host=host, reentrant=reentrant)
        report = speed_up_steps(model, recordings=False)
        with tiling():
            loss = model(input_ids=ids, attention_mask=real, labels=labels).loss
            loss.backward()
        assert (report.packing.calls, report.packing.tokens) == (1, 21) and report.checkpoints.passes == host
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert report.checkpoints.last_bytes == 3 * 32 * 64 * 4
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def test_offload_and_host_checkpoints_together():
    losses, adapters = steps(tuned("nvfp4 cached", None), checkpointing=False)
    model = tuned("nvfp4 cached", None)
    enable_offload(model), enable_host_checkpoints(model)
    got, trained = steps(model, checkpointing=False)
    assert got == losses and same(trained, adapters) and host_checkpoint_status(model).passes == 2


@pytest.mark.parametrize("accuracy", ["paper", "high"])
@pytest.mark.parametrize("recompute", [False, True])
def test_mlps_in_tiles(small_tiles, accuracy, recompute):
    """Loss, dx and so the gradients of attention's adapters are the same. Those of an MLP are sums over 32 tokens in another
    order: 2 * 32 * 2^-24 of the sum of magnitudes, which is 32 times the largest product at most; a thousandth part of the
    largest gradient is far more, and far less than what a wrong tile would change."""
    models = [checkpointed(host=host, accuracy=accuracy) for host in (False, True)]
    for model in models:
        attach(model, recompute_mlp=recompute)
    (loss, exact), (got_loss, got) = map(gradients, models)
    assert got_loss == loss and got.keys() == exact.keys() and activation_cache.live() == 0
    for name, g in exact.items():
        if ".mlp." in name:
            assert (got[name] - g).abs().max() <= 1e-5 * g.abs().max(), name
        else:
            assert torch.equal(got[name], g), name


class Largest(TorchDispatchMode):
    """The most numbers that one tensor holds which an operator makes for a batch (weights and copies of them apart)."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.ndim == 2 and t.shape[1] == self.width and t.is_floating_point():
                self.rows = max(self.rows, t.shape[0])
        return out


def test_nothing_of_all_tokens_is_as_wide_as_an_mlp(small_tiles):
    rows = {}
    for host in (False, True):
        model = checkpointed(host=host)
        with Largest(176) as seen:
            gradients(model, batch().repeat(4, 1))
        rows[host] = seen.rows
    weight = 64  # of down: (64, 176)
    assert rows == {False: 128, True: weight}


def test_a_tile_is_computed_once_forward_and_once_backward(small_tiles, monkeypatch):
    calls, plain = [], fused_mlp.FusedGatedMLP._compute

    def counted(self, x, down):
        calls.append(len(x))
        return plain(self, x, down)

    monkeypatch.setattr(fused_mlp.FusedGatedMLP, "_compute", counted)
    gradients(checkpointed(layers=3))
    assert len(calls) == 2 * 3 * 4 and max(calls) <= TILE


def test_dropout_is_the_same_in_forward_and_backward(small_tiles):
    """The loss is linear in down's B, whose gradient is then that of the forward's own mask: dL/ds of B -> (1 + s) B."""
    model = checkpointed(lora_dropout=0.5, layers=1)
    b = model.base_model.model.model.layers[0].mlp.down_proj.lora_B["default"].weight
    direction = torch.randn(b.shape, generator=torch.Generator().manual_seed(0))

    def loss(step, backward=False):
        torch.manual_seed(11)
        with torch.no_grad():
            b.add_(direction, alpha=step)
        value = gradients(model)[0]
        with torch.no_grad():
            b.sub_(direction, alpha=step)
        return value

    loss(0.0)
    slope = (b.grad * direction).sum().item()
    step = 1e-2
    difference = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx(difference, rel=0.05), "another mask would give another slope"


def test_hooks_inside_an_mlp_see_all_tokens_once(small_tiles):
    model, seen = checkpointed(layers=1), []
    mlp = model.base_model.model.model.layers[0].mlp
    mlp.down_proj.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    gradients(model)
    assert seen[0] == (2, 16, 64) and len(set(seen)) == 1


def test_the_gradient_of_embeddings_that_nobody_asked_for_is_not_made():
    """transformers marks them for the reentrant kind of checkpointing, which would not notice adapters otherwise."""
    model, plain, made = checkpointed(), checkpointed(host=False), []
    for m in (model, plain):
        m.enable_input_require_grads()
        layer = m.base_model.model.model.layers[0]
        layer.register_forward_pre_hook(lambda module, args: made.append(args[0]))
    assert gradients(model)[0] == gradients(plain)[0]
    assert made[0].grad is None and made[1].grad is not None
    embeddings = made[1].detach().clone().requires_grad_()
    model(inputs_embeds=embeddings, labels=batch()).loss.backward()
    assert torch.equal(embeddings.grad, made[1].grad), "of one's own they are made"


def test_what_backward_reads_comes_from_the_host():
    model = checkpointed()
    loss, exact = gradients(model)
    ids = batch()
    model.zero_grad()
    again = model(input_ids=ids, labels=ids).loss
    for buffer in _watching(model).buffers.all:
        buffer.data.zero_()
    again.backward()
    assert again.item() == loss
    changed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not any(torch.equal(changed[name], exact[name]) for name in exact if "lora_B" in name and "layers.1" in name)


def test_buffers_serve_every_step_and_go_when_they_are_let_go():
    model = checkpointed()
    gradients(model)
    buffers = _watching(model).buffers
    first = {id(buffer) for buffer in buffers.all}
    assert len(buffers.free) == len(first) == 3
    ids = batch()
    kept = model(input_ids=ids[:, :15], labels=ids[:, :15]).loss  # a graph that nobody differentiates
    assert {id(buffer) for buffer in buffers.all} == first and not buffers.free
    del kept
    gc.collect()
    assert len(buffers.free) == 3
    longer = torch.cat([ids, ids], 1)
    gradients(model, longer)
    assert len(buffers.all) == 3 and not first & {id(buffer) for buffer in buffers.all}
    disable_host_checkpoints(model)
    assert host_checkpoint_status(model).host_bytes == 0 and "stay on the device" in str(host_checkpoint_status(model))
    assert not any(isinstance(vars(m).get("_gradient_checkpointing_func"), CheckpointFunction) for m in model.modules())
    gradients(model)


def test_two_forwards_before_backward_and_graphs_that_are_retained():
    model, plain = checkpointed(), checkpointed(host=False)
    ids, found = batch(), []
    for m in (model, plain):
        first, second = (m(input_ids=part, labels=part).loss for part in (ids[:1], ids[1:]))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        found.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert same(*found)
    with pytest.raises(RuntimeError, match=r"retain_graph=True|second time"):
        first = model(input_ids=ids, labels=ids).loss
        first.backward()
        first.backward()


def test_an_exception_in_forward_leaves_nothing_behind(small_tiles):
    model = checkpointed()
    loss, exact = gradients(model)
    layer = model.base_model.model.model.layers[1]
    handle = layer.mlp.register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model)
    handle.remove()
    assert not pass_goes_to_host() and "forward" not in vars(model.base_model.model.model.norm)
    got_loss, got = gradients(model)
    gc.collect()
    assert got_loss == loss and same(got, exact) and len(_watching(model).buffers.free) == 3


@pytest.fixture
def short_host(monkeypatch):
    monkeypatch.setattr(checkpoint_transfers, "free_host_bytes", lambda: (1 << 30) + 20_000)


def test_a_host_without_memory_is_an_error_before_anything_is_computed(short_host):
    model = checkpointed()
    with pytest.raises(host_checkpoints.HostMemoryShort, match=r"3 layers.*shorter sequences.*disable_host_checkpoints"):
        gradients(model)
    assert not any(p.grad is not None for p in model.parameters()) and not _watching(model).buffers.all
    disable_host_checkpoints(model)
    assert same(gradients(model)[1], gradients(checkpointed(host=False))[1])


def test_automatic_stays_on_the_device_without_host_memory_and_says_so(short_host, monkeypatch):
    monkeypatch.setattr(host_checkpoints, "_device_memory", lambda device: 1000)
    model = checkpointed(host=False)
    enable_host_checkpoints(model, automatic=True)
    gradients(model)
    status = host_checkpoint_status(model)
    assert status.passes == 0 and "host's memory" in str(status)


@pytest.mark.parametrize("memory, passes", [(8 * 3 * 32 * 64 * 4, 0), (8 * 3 * 32 * 64 * 4 - 8, 1)])
def test_automatic_asks_how_much_of_the_device_checkpoints_take(monkeypatch, memory, passes):
    monkeypatch.setattr(host_checkpoints, "_device_memory", lambda device: memory)
    model = checkpointed(host=False)
    report = speed_up_steps(model, recordings=False)
    gradients(model)
    assert report.checkpoints.passes == passes and report.checkpoints.enabled == "automatic"
    enable_host_checkpoints(model)  # asked for
    gradients(model)
    assert report.checkpoints.passes == passes + 1 and "always" in str(report)


def test_automatic_leaves_a_cpu_alone():
    model = checkpointed(host=False)
    enable_host_checkpoints(model, automatic=True)
    gradients(model)
    assert host_checkpoint_status(model).passes == 0 and host_checkpoint_status(model).reason == ""


def test_without_checkpointing_and_without_training_nothing_goes_to_the_host():
    model = checkpointed()
    model.gradient_checkpointing_disable()
    gradients(model)
    model.gradient_checkpointing_enable()
    with torch.no_grad():
        model(input_ids=batch(), labels=batch())
    model.eval().generate(input_ids=batch(), max_new_tokens=2, do_sample=False)
    assert host_checkpoint_status(model).passes == 0


def test_another_checkpoint_function_is_left_alone():
    model = checkpointed(layers=1)
    layer, called = model.base_model.model.model.layers[0], []
    layer._gradient_checkpointing_func = lambda function, *args: called.append(1) or function(*args)
    gradients(model)
    assert called and host_checkpoint_status(model).passes == 0 and "something else" in host_checkpoint_status(model).reason


def test_sharded_weights_keep_checkpoints_on_the_device(monkeypatch):
    model = checkpointed(layers=1)
    parameter = next(model.get_base_model().model.parameters())
    parameter.device_mesh = "of four"
    gradients(model)
    assert host_checkpoint_status(model).passes == 0 and "sharded" in str(host_checkpoint_status(model))


def test_copies_have_buffers_of_their_own():
    model = checkpointed()
    loss, exact = gradients(model)
    other = copy.deepcopy(model)
    assert _watching(other) is not _watching(model) and not _watching(other).buffers.all
    got_loss, got = gradients(other)
    assert got_loss == loss and same(got, exact)
    assert host_checkpoint_status(other).passes == host_checkpoint_status(model).passes == 1
    assert pickle.loads(pickle.dumps(_watching(model))).buffers.all == []


def test_such_a_step_is_not_recorded():
    """Short ones are: the recorder here is one that fails, which is as good as being asked."""
    model = checkpointed(layers=1)
    enable_cuda_graphs(model, loud=False)
    graphed: GraphedForward = _graphed(model)
    graphed.recorder = lambda *args: 1 / 0
    gradients(model)
    assert list(graphed.status.reasons) == ["its checkpoints go to the host"]
    disable_host_checkpoints(model)
    gradients(model)
    assert any("recording failed" in reason for reason in graphed.status.reasons)


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_recordings_of_other_steps_go_where_memory_is_short(monkeypatch, free):
    monkeypatch.setattr(resting_weights, "free_bytes", lambda device: free)
    model, forgotten = checkpointed(layers=1), []
    enable_cuda_graphs(model, loud=False)
    monkeypatch.setattr(GraphedForward, "forget", lambda self: forgotten.append(1))
    gradients(model)
    assert len(forgotten) == (free == 0)


def test_a_model_without_checkpointed_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no decoder"):
        enable_host_checkpoints(torch.nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_gradients_are_the_same_and_memory_does_not_grow_with_layers():
    """2 and 6 layers of a sequence of 16k tokens take the same activations: their inputs are not there. Products of fewer rows,
    in tiles, sum in another order, so results differ in last places, which codes make larger. How much larger, a step of which
    one embedding in a hundred is a unit of BF16 away shows: results differ by no more than a few times that, most of it in
    queries and keys. A copy that is late would change everything."""

    def step(layers, host, nudged=False):
        model = tuned("nvfp4 cached", None, layers, device="cuda")
        attach(model)
        model.gradient_checkpointing_enable()
        if host:
            enable_host_checkpoints(model)
        if nudged:
            weight = model.get_input_embeddings().weight
            weight.data.view(torch.int16).view(-1)[::100] ^= 1
        ids = torch.randint(0, 128, (1, 16384), generator=torch.Generator().manual_seed(1)).cuda()
        gradients(model, ids)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = gradients(model, ids)
        assert not host or host_checkpoint_status(model).pinned
        return torch.cuda.max_memory_allocated() - before, *found

    (_, loss, plain), (_, _, nudged), (two, got_loss, got) = step(2, False), step(2, False, True), step(2, True)
    assert got_loss == pytest.approx(loss, rel=1e-4)
    plain, nudged, got = (found | {"all": torch.cat([g.flatten() for g in found.values()])} for found in (plain, nudged, got))
    for name, g in plain.items():
        noise, far = (nudged[name] - g).norm(), (got[name] - g).norm()
        assert far <= max(4 * noise, 2**-6 * g.norm()), f"{name}: {far}, {noise}, {g.norm()}"
    assert far <= 0.2 * g.norm(), "of all of them"
    six, stream = step(6, True)[0], 16384 * 64 * 2
    assert six - two < 2 * stream
