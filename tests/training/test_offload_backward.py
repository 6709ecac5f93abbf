"""Offload: a backward reads the right bytes wherever it begins, in whatever order autograd comes to the layers, and two threads
never compute with each other's. The models are scrambled: bytes of the host, or of another layer, give other results."""

import threading

import pytest
import torch
from _mixtures import IDS, mixtral
from _offloaded import BACKENDS, at_rest, batch, late, same, scrambled, steps, tuned
from peft import get_peft_model
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, disable_offload, enable_offload
from peft_nvfp4.autograd import activation_cache


def kept_outputs(model, name: str) -> list[torch.Tensor]:
    """What the modules of that name return from now on, layer by layer."""
    kept = []
    for layer in model.get_base_model().model.layers:
        layer.get_submodule(name).register_forward_hook(lambda module, args, y: kept.append(y[0] if isinstance(y, tuple) else y))
    return kept


def inner(model):
    """One layer's gate_proj: its backward begins in the middle of a layer, below one that has none."""
    kept = kept_outputs(model, "mlp.gate_proj")
    model(input_ids=batch(model.device))
    return kept[-2].float().square().mean()


def upwards(model):
    """Weights make the first layers' products come last; every layer's backward begins inside of it."""
    kept = kept_outputs(model, "self_attn.o_proj")
    model(input_ids=batch(model.device))
    return sum(y.float().square().mean() for y in kept)


def detached(model):
    """The last layers' gradients end at a layer whose own come from its attention only."""
    layers, kept = model.get_base_model().model.layers, kept_outputs(model, "self_attn")
    layers[-1].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
    loss = model(input_ids=batch(model.device), labels=batch(model.device)).loss
    return loss + kept[1].float().square().mean()


def cached(model):
    """Keys and values of an earlier forward, whose last layer has no output with a gradient."""
    ids = batch(model.device)
    first = model(input_ids=ids[:, :8], use_cache=True)
    return model(input_ids=ids[:, 8:], past_key_values=first.past_key_values).logits.float().square().mean()


def gradients(model, loss_of, checkpointing=None, times: int = 1):
    """By name, after ``times`` backwards of one graph."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    torch.manual_seed(2)
    loss = loss_of(model)
    for i in range(times):
        loss.backward(retain_graph=i < times - 1)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_of", [inner, upwards, detached, cached])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_begins_anywhere(backend, loss_of):
    model = late(scrambled(tuned(backend, "cpu", 4, lora_dropout=0.1)))
    found, wanted = gradients(model, loss_of, times=2), gradients(tuned(backend, None, 4, lora_dropout=0.1), loss_of, times=2)
    assert wanted and same(found, wanted) and at_rest(model) and activation_cache.live() == 0


def inside_a_checkpoint(model):
    """All layers are one checkpoint, or two: the recomputation leaves the last layer's bytes where the first one's are needed."""
    decoder = model.get_base_model().model
    reentrant = model.reentrant
    x = decoder.embed_tokens(batch(model.device)).requires_grad_()
    rotary = decoder.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    half = len(decoder.layers) - 3

    def several(x, layers):
        for layer in layers:
            x = layer(x, position_embeddings=rotary)
        return x

    for part in (decoder.layers[:half], decoder.layers[half:]):
        x = checkpoint(several, x, part, use_reentrant=reentrant)
    return x.float().square().mean()


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpointing", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_of_several_layers(backend, reentrant):
    models = late(scrambled(tuned(backend, "cpu", 4))), tuned(backend, None, 4)
    for model in models:
        model.reentrant = reentrant
    assert same(*(gradients(model, inside_a_checkpoint) for model in models))


@pytest.mark.parametrize("backend", ["nvfp4", "nf4"])
@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "checkpointing"])
def test_losses_inside_layers_of_experts(backend, checkpointing):
    def made():
        torch.manual_seed(0)
        config = NVFP4LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        config.backend, config.init_lora_weights = backend, False
        return get_peft_model(mixtral(), config).train()

    def loss_of(model):
        kept = kept_outputs(model, "mlp")
        model(input_ids=IDS)
        return kept[0].square().mean()

    offloaded = made()
    enable_offload(offloaded)
    offloaded = late(scrambled(offloaded))
    assert same(gradients(offloaded, loss_of, checkpointing), gradients(made(), loss_of, checkpointing))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_linear_that_is_called_by_itself(backend):
    """Not within its layer's forward: the bytes of the layer that ran last are in its place."""
    found = []
    for model in (late(scrambled(tuned(backend, "cpu"))), tuned(backend, None)):
        model(input_ids=batch())
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = model.get_base_model().model.layers[0].mlp.up_proj(x)
        model(input_ids=batch())
        y.square().sum().backward()
        found.append({"y": y, "dx": x.grad})
    assert same(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", ["merge", "disable"])
def test_weights_that_are_arranged_anew_before_backward(backend, change):
    model = tuned(backend, "cpu")
    loss = model(input_ids=batch(), labels=batch()).loss
    model.merge_adapter() if change == "merge" else disable_offload(model)
    with pytest.raises(RuntimeError, match="between forward and backward.*run the forward again"):
        model(input_ids=batch())
        loss.backward()


def test_a_bf16_weight_that_is_written_to_before_backward():
    model = tuned("bf16", "cpu")
    loss = model(input_ids=batch(), labels=batch()).loss
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation|changed in place"):
        loss.backward()


# ---------------------------------------------------------------------------------------------- threads


def in_threads(function, count: int) -> list:
    """What ``function(i)`` returns, or raises, in threads of their own."""
    results = [None] * count

    def call(i):
        try:
            results[i] = function(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), name=f"thread-{i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def test_a_second_thread_is_refused_while_a_layer_runs():
    model = scrambled(tuned("nf4", "cpu").eval())
    with torch.no_grad():
        wanted = model(input_ids=batch()).logits
    inside, done = threading.Event(), threading.Event()

    def pause(*args):
        if threading.current_thread().name == "thread-0":
            inside.set()
            assert done.wait(60)

    handle = model.get_base_model().model.layers[1].mlp.register_forward_hook(pause)

    @torch.no_grad()
    def call(i):
        try:
            assert i == 0 or inside.wait(60)
            return model(input_ids=batch()).logits if i < 2 else model.state_dict()
        finally:
            if i == 1:
                done.set()

    first, second = in_threads(call, 2)
    assert torch.equal(first, wanted)
    assert isinstance(second, RuntimeError) and all(word in str(second) for word in ("thread", "Lock", "disable_offload"))
    handle.remove()
    assert at_rest(model) and torch.equal(in_threads(call, 1)[0], wanted), "a thread that has ended is in nobody's way"


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_compute_rightly_or_not_at_all(backend):
    model = scrambled(tuned(backend, "cpu"))
    wanted = tuned(backend, None)(input_ids=batch()).logits.detach()

    def call(i):
        found = []
        for _ in range(6):
            try:
                x = model(input_ids=batch()).logits
                first = next(p for p in model.parameters() if p.requires_grad)
                found.append((x.detach(), *torch.autograd.grad(x.float().square().mean(), [first])))
            except RuntimeError as error:
                assert "one thread at a time" in str(error)
        return found

    results = in_threads(call, 3)
    (_, dx), *_ = call(0)
    assert all(isinstance(found, list) for found in results)
    assert all(torch.equal(x, wanted) and torch.equal(d, dx) for found in results for x, d in found)
    assert steps(model, 1)[0] == steps(tuned(backend, None), 1)[0]


def test_an_interrupted_forward_is_forgotten_by_the_next():
    """Hooks that always run do not run for KeyboardInterrupt."""
    model = tuned("nvfp4 cached", "cpu").eval()

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.get_base_model().model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=batch())
    handle.remove()
    wanted = model(input_ids=batch()).logits
    (found,) = in_threads(lambda i: model(input_ids=batch()).logits, 1)
    assert torch.equal(found, wanted)


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("loss_of", [inner, upwards, detached])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_begins_anywhere_on_a_gpu(backend, loss_of, checkpointing):
    model = tuned(backend, "cpu", 5, "cuda")
    wanted = gradients(tuned(backend, None, 5, "cuda"), loss_of, checkpointing)
    assert wanted and same(gradients(model, loss_of, checkpointing), wanted) and at_rest(model)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_of_the_caller(backend):
    """Forwards on two streams, by turns, and their backwards: a copy waits for whoever has read the buffer, on any stream."""
    found = []
    for model in (tuned(backend, "cpu", 5, "cuda"), tuned(backend, None, 5, "cuda")):
        streams, losses, ids = [torch.cuda.Stream() for _ in range(2)], [], batch("cuda")
        torch.cuda.synchronize()
        for i in range(6):
            with torch.cuda.stream(streams[i % 2]):
                losses.append(model(input_ids=ids, labels=ids).loss)
        torch.cuda.synchronize()
        sum(loss.to("cuda") for loss in losses[::2]).backward()
        torch.cuda.synchronize()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(*found)
