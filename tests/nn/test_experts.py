"""Frozen experts as a module: the bytes that they store, and their output and gradients against a loop over single frozen
linears; also inside a whole model, checkpointed or with fused norms."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from _frozen_experts import BACKEND, OPTIONS, assert_equal, experts_of, frozen, loop, plain, routed
from _mixtures import IDS, by_family, mixtral
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model
from peft_nvfp4.fusion.mlp import FusedGatedMLP, recognise
from peft_nvfp4.nn.experts.frozen_experts import frozen_experts, is_experts, linear_of
from peft_nvfp4.nn.frozen_linear import FrozenOptions
from peft_nvfp4.nn.registry import BACKENDS
from peft_nvfp4.numerics.grouped import route


def linears(weights, backend, options=OPTIONS):
    """A frozen linear of its own for every expert and projection."""
    cls = BACKENDS[backend]
    return {name: [cls.quantize(linear_of(each.clone()), options[name]) for each in w] for name, w in weights.items()}


@pytest.mark.parametrize("layouts", ("cached", "transient"))
@by_family
def test_packed_bytes_are_those_of_every_slice_alone(make, layouts):
    options = {name: FrozenOptions(layouts) for name in OPTIONS}
    weights, experts = frozen(make, options=options)
    for name, layers in linears(weights, "nvfp4", options).items():
        stacks = experts.stacks(name)
        assert len(stacks) == (6 if layouts == "cached" else 3)
        for e, layer in enumerate(layers):
            alone = layer.packed_tensors()
            assert stacks.keys() == alone.keys()
            assert all(torch.equal(stacks[leaf][e], alone[leaf]) for leaf in alone)
    assert all(p.dtype == torch.uint8 and not p.requires_grad for p in experts.parameters())
    assert experts.elements == sum(w.numel() for w in weights.values())


@BACKEND
def test_dense_and_back(backend):
    weights, experts = frozen(mixtral, backend)
    before = plain(experts.packed_tensors())
    for name, layers in linears(weights, backend).items():
        assert torch.equal(experts.dequantize(name, torch.float32), torch.stack([x.dequantize(torch.float32) for x in layers]))
        experts.requantize_(name, experts.dequantize(name, torch.float32))
    if backend == "nvfp4":  # same-axis requantisation is idempotent
        assert_equal(before, experts.packed_tensors())
    snapshot = experts.snapshot("down_proj")
    kept = plain(experts.packed_tensors())
    experts.requantize_("down_proj", torch.randn(4, 32, 48))
    assert not torch.equal(kept["down_proj"], experts.down_proj)
    experts.restore(snapshot)
    assert_equal(kept, experts.packed_tensors())
    x, index, w = routed()
    dense = experts.to_experts()
    assert is_experts(dense) and torch.equal(dense.gate_up_proj, experts.dequantize("gate_up_proj"))
    assert dense(x, index, w).shape == x.shape


@BACKEND
def test_casts_and_copies_leave_the_bytes(backend):
    _, experts = frozen(mixtral, backend)
    before = plain(experts.packed_tensors())
    twin = copy.deepcopy(experts)
    for cast in (torch.bfloat16, torch.float16):
        experts.to(cast)
        assert experts.compute_dtype == cast and experts.dequantize("down_proj").dtype == cast
        assert_equal(before, experts.packed_tensors())
    twin.requantize_("down_proj", torch.randn(4, 32, 48))
    x, index, w = routed(dtype=torch.float16)
    expected = experts(x, index, w)
    assert_equal(before, experts.packed_tensors())
    assert not torch.equal(twin(x.float(), index, w).half(), expected)
    with torch.no_grad():  # bytes at another address: the views of the old ones are not used any more
        experts.down_proj = torch.nn.Parameter(twin.down_proj.clone(), requires_grad=False)
    assert not torch.equal(experts(x, index, w), expected)


@BACKEND
def test_a_failed_replacement_leaves_the_weights(backend):
    """The last expert's new weight is bad: the others' are not computed with either."""
    _, experts = frozen(mixtral, backend)
    x, index, w = routed()
    before, y = plain(experts.packed_tensors()), experts(x, index, w)
    spoiled = torch.randn(4, 32, 48)
    spoiled[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf"):
        experts.requantize_("down_proj", spoiled)
    assert_equal(before, experts.packed_tensors())
    assert torch.equal(experts(x, index, w), y)


def test_linears_are_kept_by_the_forward_only():
    """They hold the memory that they look at: of an offloaded model, a copy on the device. NF4's code books are shared."""
    _, experts = frozen(mixtral, "nf4")
    experts.requantize_("down_proj", torch.randn(4, 32, 48))
    experts.dequantize("down_proj")
    assert not experts._layers
    experts(*routed())
    assert experts._layers.keys() == experts.projections.keys()
    first, second = experts.layers("down_proj")[:2]
    assert first is experts._layers["down_proj"][1][0]
    assert first.quant_state.code is second.quant_state.code
    assert first.quant_state.state2.code is second.quant_state.state2.code


def test_backends_that_do_not_pack_are_refused():
    with pytest.raises(ValueError, match="nvfp4 or nf4, got 'bf16'"):
        frozen(mixtral, "bf16")


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@by_family
def test_output_and_gradients_are_those_of_single_linears(make, dtype, backend):
    """Bit for bit: the same rows through the same products; only rows are gathered and put back. The gradient of x is a sum over
    the k = 2 experts of a token, of which the order does not matter."""
    weights, experts = frozen(make, backend, dtype)
    x, index, w = routed(dtype=dtype)
    layers = linears(weights, backend)
    results = []
    for run in (lambda: experts(x, index, w), lambda: loop(layers, x, index, w)):
        x.grad = w.grad = None
        y = run()
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    for got, expected in zip(*results):
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


class GatedMLP(torch.nn.Module):
    """One expert as a module of its own."""

    def __init__(self, first, down):
        super().__init__()
        self.gate_up_proj, self.down_proj = first, down

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("terms", (1, 2))
def test_fused_experts_are_fused_gated_mlps(dtype, terms):
    """Bit for bit, output and gradients; backward keeps less, and after unfuse() everything is as it was."""
    options = {name: FrozenOptions(terms=terms) for name in OPTIONS}
    weights, experts = frozen(mixtral, dtype=dtype, options=options)
    layers = linears(weights, "nvfp4", options)
    mlps = [GatedMLP(first, down) for first, down in zip(layers["gate_up_proj"], layers["down_proj"])]
    mlps = [FusedGatedMLP(mlp, recognise(mlp)) for mlp in mlps]
    x, index, w = routed(dtype=dtype)

    def alone(x, index, w):
        shares = x.new_zeros(*index.shape, x.shape[1])
        for e, mlp in enumerate(mlps[:3]):
            token, slot = torch.where(index == e)
            shares = shares.index_put((token, slot), mlp(x[token]))
        return (shares * w[..., None]).sum(1).to(x.dtype)

    def results(run):
        x.grad = w.grad = None
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage()) or t, lambda t: t):
            y = run(x, index, w)
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        return y.detach(), x.grad, w.grad, sum({s.data_ptr(): s.nbytes() for s in kept}.values())

    *before, size = results(experts)
    assert experts.fuse() is None and experts.act == "silu"
    *fused, smaller = results(experts)
    for got, expected in zip(fused, results(alone)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert smaller < size and not torch.equal(fused[1], before[1])
    experts.unfuse()
    assert all(torch.equal(a, b) for a, b in zip(before, results(experts)))


def test_what_is_not_fused():
    _, experts = frozen(mixtral, "nf4")
    assert "nvfp4" in experts.fuse() and experts.act is None
    _, experts = frozen(mixtral)
    experts._outside[0].act_fn = torch.nn.ReLU()
    assert "SiLU" in experts.fuse() and experts.act is None


@pytest.mark.parametrize("index", ([[0, 1]], [[2, 2]] * 9, [[3, 0]] * 40), ids=["one token", "one expert", "two experts"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_uneven_routing(dtype, index):
    """Fewer tokens than experts, and all tokens to the same ones: bit for bit as a loop over single linears."""
    weights, experts = frozen(mixtral, dtype=dtype)
    layers, index = linears(weights, "nvfp4"), torch.tensor(index)
    x, _, w = routed(len(index), dtype=dtype)
    results = []
    for run in (lambda: experts(x, index, w), lambda: loop(layers, x, index, w)):
        x.grad = w.grad = None
        y = run()
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(got, expected) and got.abs().sum() > 0 for got, expected in zip(*results))


def test_a_token_that_is_not_finite_spoils_no_other():
    """Its input or, out of a router that met NaN, its weights."""
    _, experts = frozen(mixtral)
    x, index, w = routed()
    expected = experts(x, index, w)
    for spoiled in (x, w):
        arguments = {id(x): x, id(w): w}
        arguments[id(spoiled)] = spoiled.detach().clone()
        arguments[id(spoiled)][5] = float("nan")
        y = experts(arguments[id(x)], index, arguments[id(w)])
        others = torch.arange(len(x)) != 5
        assert y[5].isnan().all() and torch.equal(y[others], expected[others])


def test_no_tokens_and_experts_of_other_processes():
    """Without rows there is nothing to run; an index past the last expert (of another process) adds nothing."""
    _, experts = frozen(mixtral)
    x, index, w = routed()
    none = experts(x[:0], index[:0], w[:0])
    assert none.shape == (0, 32)
    elsewhere = index.clone()
    elsewhere[:, 1] = 4
    expected = experts(x, index[:, :1], w[:, :1])
    torch.testing.assert_close(experts(x, elsewhere, w), expected, rtol=0, atol=0)
    assert not experts(x, torch.full_like(index, 4), w).any()


@BACKEND
def test_the_gradient_of_a_token_is_rounded_once(backend):
    """In BF16, with four experts a token: the parts of the gradient, each by itself, summed in FP32 (which is exact to 2^-24, in
    whatever order) and rounded. Added up in memory, they would be rounded three times."""
    _, experts = frozen(mixtral, backend, torch.bfloat16)
    index = torch.stack([torch.randperm(4) for _ in range(32)])
    x, _, _ = routed(32, dtype=torch.bfloat16)
    w, dy = torch.rand(32, 4), torch.randn(32, 32).bfloat16()

    def gradient(index, w):
        (dx,) = torch.autograd.grad(experts(x, index, w), x, dy)
        return dx

    parts = [gradient(index[:, j : j + 1], w[:, j : j + 1]).float() for j in range(4)]
    assert torch.equal(gradient(index, w), sum(parts).bfloat16())


class Operations(TorchDispatchMode):
    """Names of what is computed."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_routing_waits_for_nothing():
    """On a GPU the host waits for the operations named here, each of which asks for a value."""
    _, index, _ = routed()
    with Operations() as operations:
        route(index, 4)
    assert "sort" in operations.names
    assert not operations.names & {"bincount", "nonzero", "_local_scalar_dense", "unique", "repeat_interleave"}


def test_rows_by_expert():
    """Every expert's rows are those of its tokens, in their order; experts of other processes have no place."""
    index = torch.tensor([[2, 0], [5, 2], [0, 3]])  # 5: of another process
    order, places, ends = route(index, 4)
    assert ends.tolist() == [2, 2, 4, 5] and ends.dtype == torch.int32
    assert order.tolist() == [1, 4, 0, 3, 5, 2] and places.tolist() == [[2, 0], [-1, 3], [1, 4]]


@by_family
def test_the_whole_model_with_checkpointing(make):
    """Checkpointing computes experts again; losses and gradients do not change by a bit. The router stays as it was."""
    torch.manual_seed(0)
    dense = make()
    router = dense.model.layers[0].mlp.gate.weight.detach().clone()
    model = get_peft_model(dense, NVFP4LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    assert len(frozen_experts(model)) == 2
    assert torch.equal(dense.model.layers[0].mlp.gate.weight, router) and router.dtype == torch.float32
    results = []
    for reentrant in (None, True, False):
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train().zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()})
    assert all(t.norm() > 0 for t in results[0].values())
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@by_family
def test_fused_norms_fall_back_before_experts(make):
    """The norm before a router is left alone, and says why; attention is fused; both compute the same but for rounding."""
    model = freeze_model(make(), progress=False).eval()
    with torch.no_grad():
        before = model(IDS).logits
        report = attach(model)
        after = model(IDS).logits
    assert "model.layers.0.input_layernorm" in report.fused and "model.layers.0.post_attention_layernorm" in report.skipped
    assert "model.layers.0.mlp.experts" in report.fused and experts_of(model).act == "silu"
    assert experts_of(detach(model)).act is None
    # fusing changes norm outputs by FP32 rounding, which a token near a tie of its router may answer with another expert
    same = (after - before).abs().amax(-1) < 0.1 * before.abs().amax()
    assert same.float().mean() > 0.8


def test_the_benchmark_runs(tmp_path, monkeypatch):
    import bench_experts

    words = ["--shape", "tiny", "--tokens", "24", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_experts.py", *words])
    bench_experts.main()
    rows = json.loads((tmp_path / "experts_cpu_tiny.json").read_text())["rows"]
    assert [row["case"].split(",")[0] for row in rows] == ["dense", "dense", "frozen", "frozen", "frozen"]
    assert rows[2]["weight_bytes"] < rows[0]["weight_bytes"]
