"""The loss at supervised positions as a function: its numbers against transformers' (all logits, FP32 from there on), what it
does not allocate, and that it can be compiled and recorded in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from _assertions import by_device, by_dtype, unit
from _loss_models import EXACT, SIZES, VOCABULARY, batch, build, distance
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from peft_nvfp4.fusion import loss, loss_attach
from peft_nvfp4.fusion.lazy_logits import LazyLogits
from peft_nvfp4.fusion.loss import Transform, linear_cross_entropy
from peft_nvfp4.fusion.loss_attach import attach_loss, detach_loss


def ordinary(hidden, weight, labels, bias=None, transform=None, num_items=None, **kwargs):
    """As transformers: all logits, FP32 from there on."""
    z = F.linear(hidden, weight, bias)
    y = (transform.forward(z)[0] if transform else z).float()
    if num_items is not None:
        return F.cross_entropy(y.flatten(0, -2), labels.flatten(), reduction="sum", **kwargs) / num_items
    return F.cross_entropy(y.flatten(0, -2), labels.flatten(), **kwargs)


def case(dtype: torch.dtype = torch.float32, supervised: float = 0.3, device: str = "cpu", seed: int = 2):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
    hidden, weight, bias = draw(3, 17, 32), draw(VOCABULARY, 32), draw(VOCABULARY)
    labels = torch.randint(VOCABULARY, (3, 17), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(3, 17, generator=generator) > supervised, -100).to(device), bias


TRANSFORMS = {"none": Transform(), "scale": Transform(scale=0.3), "divisor-cap": Transform(divisor=13.0, softcap=2.0)}


@by_dtype
@by_device
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_value_and_gradients_are_the_ordinary_ones(dtype, device, transform):
    """In 16 bits dh passes the same roundings in the same order, dW is rounded once instead of in its GEMM, and FP16 has a second
    rounding (the loss scale): four units cover it. A GEMM of fewer rows may sum in another order and so flip the last bit of a
    logit: less than a unit of the mean loss. A loss scale of 2**10 keeps FP16's ordinary gradients from vanishing."""
    hidden, weight, labels, bias = case(dtype, device=device)
    bound = EXACT if dtype == torch.float32 else 4 * unit(dtype)
    expected = ordinary(hidden, weight, labels, bias, transform)
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, **transform._asdict(), chunk=4)
    assert got.dtype == torch.float32
    assert distance(got.detach(), expected.detach()) <= (EXACT if dtype == torch.float32 else unit(dtype))
    leaves = (hidden, weight, bias)
    for g, e in zip(torch.autograd.grad(1024 * got, leaves), torch.autograd.grad(1024 * expected, leaves)):
        assert g.dtype == dtype and distance(g, e) <= bound


def test_fp16_gradients_do_not_vanish_over_many_items():
    """p / n is about 1 / (331 * 1e6), below FP16's smallest number, when the loss scale has not come yet."""
    hidden, weight, labels, _ = case(torch.float16)
    got = linear_cross_entropy(hidden, 0.01 * weight, labels, num_items_in_batch=10**6)
    expected = ordinary(hidden, 0.01 * weight, labels, num_items=10**6)
    g, e = (torch.autograd.grad(2.0**20 * t, hidden)[0] for t in (got, expected))
    assert distance(g, e) <= 4 * unit(torch.float16)


@pytest.mark.parametrize("num_items", [7, torch.tensor(9), torch.tensor([9])], ids=["int", "tensor", "replica"])
def test_num_items_in_batch(num_items):
    hidden, weight, labels, _ = case()
    got = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=num_items, chunk=5)
    expected = ordinary(hidden, weight, labels, num_items=num_items)
    assert got.shape == expected.shape and distance(got.detach(), expected.detach()) <= EXACT
    assert distance(*(torch.autograd.grad(t.sum(), hidden)[0] for t in (got, expected))) <= EXACT


def test_shift_and_another_ignored_index():
    hidden, weight, labels, _ = case()
    shifted = linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:])
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, shift=True), shifted, rtol=0, atol=0)
    other = labels.masked_fill(labels == -100, 5)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, other, ignore_index=5), ordinary(hidden, weight, other, ignore_index=5)
    )


def test_without_a_supervised_position():
    """As cross_entropy: NaN of the mean, zero of a sum over items, zero gradients of both."""
    hidden, weight, labels, _ = case()
    labels = torch.full_like(labels, -100)
    for num_items in (None, 3):
        got = linear_cross_entropy(hidden, weight, labels, num_items_in_batch=num_items)
        expected = ordinary(hidden, weight, labels, num_items=num_items)
        torch.testing.assert_close(got, expected, equal_nan=True)
        for g, e in zip(*(torch.autograd.grad(t, (hidden, weight)) for t in (got, expected))):
            assert torch.equal(g, e) and not g.any()


def test_arguments_are_checked():
    hidden, weight, labels, _ = case()
    with pytest.raises(ValueError, match="one label a position"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])


def test_autocast():
    """The head's product in BF16, the loss in FP32, gradients in the dtype of their tensors."""
    hidden, weight, labels, bias = case()
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels, bias=bias)
        expected = ordinary(hidden, weight, labels, bias)
    assert got.dtype == torch.float32 and distance(got.detach(), expected.detach()) <= unit(torch.bfloat16)
    for g, e in zip(*(torch.autograd.grad(t, (hidden, weight, bias)) for t in (got, expected))):
        assert g.dtype == torch.float32 and distance(g, e) <= 4 * unit(torch.bfloat16)


class Widest(TorchDispatchMode):
    """The most rows that any tensor with a vocabulary-sized last dimension has had, other than weights (of ``width`` rows)."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == VOCABULARY and t.untyped_storage().nbytes():
                self.rows = max(self.rows, t.numel() // VOCABULARY)
        return out


def test_no_tensor_of_positions_by_vocabulary():
    """hidden.T has 32 rows: that many would be a transposed weight, so there are more positions."""
    hidden, labels = torch.randn(2, 100, 32, requires_grad=True), torch.randint(VOCABULARY, (2, 100))
    weight, kept = torch.randn(VOCABULARY, 32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with Widest() as seen:
            linear_cross_entropy(hidden, weight, labels, chunk=40).backward()
        assert seen.rows == 40
        assert all(VOCABULARY not in t.shape for t in kept)
        with Widest() as seen:
            ordinary(hidden, weight, labels).backward()
    assert seen.rows == 200 and any(VOCABULARY in t.shape for t in kept)


def test_an_attached_model_computes_supervised_logits_only():
    model, inputs = build(), batch(4, 40)
    supervised = int((inputs["labels"][:, 1:] != -100).sum())
    assert 10 < supervised < 50
    attach_loss(model)
    model.get_output_embeddings().requires_grad_(False)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == max(supervised, SIZES["hidden_size"])  # W.T has as many rows as h has columns
    attach_loss(model, chunk=7)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == SIZES["hidden_size"]
    detach_loss(model)
    with Widest() as seen:
        model(**inputs).loss.backward()
    assert seen.rows == inputs["labels"].numel()


def test_without_gradients_none_is_computed(monkeypatch):
    monkeypatch.setattr(loss, "_dlogits", None)
    hidden, weight, labels, _ = case()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, labels).isfinite()


@pytest.mark.gpu
def test_recorded_in_a_cuda_graph():
    """Replayed with other labels, more of them, than it was recorded with; no call may wait for the device."""
    (hidden, weight, labels, _), (*_, others, _) = case(device="cuda"), case(supervised=0.6, device="cuda", seed=6)
    run = lambda: torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    labels.copy_(others)
    graph.replay()
    for g, e in zip(got, torch.autograd.grad(ordinary(hidden, weight, labels), (hidden, weight))):
        assert distance(g, e) <= EXACT


def test_the_function_compiles_whole():
    torch._dynamo.reset()
    hidden, weight, labels, bias = case()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    got = compiled(hidden, weight, labels, bias=bias, softcap=2.0)
    expected = ordinary(hidden, weight, labels, bias, Transform(softcap=2.0))
    assert distance(got.detach(), expected.detach()) <= EXACT
    for g, e in zip(*(torch.autograd.grad(t, (hidden, weight, bias)) for t in (got, expected))):
        assert distance(g, e) <= EXACT


@pytest.mark.parametrize("kind", ["frozen_head", "lora_on_head"])
def test_an_attached_model_compiles_whole(kind):
    """Once for all lengths but the first. A head with a forward of its own keeps the ordinary loss, as do old compilers."""
    torch._dynamo.reset()
    targets = ["q_proj"] if kind == "frozen_head" else ["q_proj", "lm_head"]
    model = get_peft_model(build(num_hidden_layers=1), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    attach_loss(model, chunk=5)
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    for length in (11, 14, 40):
        inputs = batch(3, length)
        output = compiled(**inputs, use_cache=False)
        assert distance(output.loss.detach(), model(**inputs, use_cache=False).loss.detach()) <= EXACT
        assert isinstance(output.logits, LazyLogits) == (loss_attach.TRACEABLE and kind == "frozen_head")
    assert len(graphs) == 2
    base = model.get_base_model()
    assert "forward" not in base.get_output_embeddings().__dict__ and "_loss_function" not in base.__dict__
