"""Linears of one input computed together (:class:`peft_nvfp4.nn.group.SharedInputGroup`): as often, with the results, and with
the side effects that they would have one by one."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, attach, detach, freeze_model
from peft_nvfp4.autograd import activation_cache, frozen_linear
from peft_nvfp4.fusion.probe import base_of
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.training.steps import slow_down_steps

NAMES = ("q_proj", "k_proj", "v_proj")
WIDTHS = (48, 32, 48)


class Three(nn.Module):
    """q, k and v of x, side by side."""

    def __init__(self):
        super().__init__()
        for name, n in zip(NAMES, WIDTHS):
            setattr(self, name, nn.Linear(64, n, bias=name != "k_proj"))
        self.between = lambda: None

    def layers(self):
        return [getattr(self, name) for name in NAMES]

    def forward(self, x):
        x = x * 1.5  # not a leaf
        q = self.q_proj(x)
        self.between()
        return torch.cat([q, self.k_proj(x), self.v_proj(x)], -1)


@pytest.fixture(autouse=True)
def empty_table():
    """Whatever the traceback of a failed test keeps alive, or a test itself."""
    yield
    activation_cache._LOCAL.table.clear()


def data(dtype=torch.float32, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 5, 64, generator=generator), torch.randn(2, 5, sum(WIDTHS), generator=generator)
    return x.to(dtype).requires_grad_(requires_grad), dy.to(dtype)


def made(*configs, dtype=torch.float32, grouped=True, **frozen):
    """A frozen Three with the given adapters, all of them active, attached or not."""
    torch.manual_seed(0)
    model = freeze_model(Three().to(dtype), **frozen)
    for i, settings in enumerate(configs):
        config = LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules=list(NAMES), init_lora_weights=False), **settings})
        if i == 0:
            model = get_peft_model(model, config)
        else:
            model.add_adapter(str(i), config)
    if len(configs) > 1:
        model.base_model.set_adapter(["default", *map(str, range(1, len(configs)))])
    if grouped:
        report = attach(model, run=lambda: model(data(dtype)[0]))
        assert [len(site) for site in report.groups] == [3] and not report.fused
    return model


def three(model):
    return next(m for m in model.modules() if isinstance(m, Three))


@pytest.fixture
def calls(monkeypatch):
    """Number of linears in every call of the Function."""
    found, function = [], frozen_linear.FrozenLinearFunction
    shim = SimpleNamespace(
        apply=lambda call, *inputs: found.append(len(call.linears)) or function.apply(call, *inputs)
    )
    monkeypatch.setattr(frozen_linear, "FrozenLinearFunction", shim)
    return found


def results(model, dtype=torch.float32, autocast=None, calls=1):
    """Output, gradient of the input, gradients of what is trained; the input is the same at every call."""
    torch.manual_seed(3)  # dropout, stochastic rounding
    x, dy = data(dtype)
    model.zero_grad()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        ys = [model(x) for _ in range(calls)]
    torch.autograd.backward(ys, [dy.to(y.dtype) for y in ys])
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert activation_cache.live() == 0
    return dict(y=ys[-1].detach(), dx=x.grad, **grads)


def assert_close(got, want, u=2**-24):
    """Sums of at most 64 (over inputs), 48 + 4 (over outputs), 10 (over tokens) and 3 terms in another order, in FP32, each with
    a relative error of u at most and a few roundings to u of results: 200 u of the largest value."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] is None) == (tensor is None), name
        if tensor is not None:
            assert got[name].dtype == tensor.dtype
            worst = (got[name] - tensor).abs().max().item() / tensor.abs().max().item()
            assert worst <= 200 * max(u, 2**-24) if u <= 2**-24 else worst <= 4 * u, f"{name}: {worst:.1e}"


ADAPTERS = {
    "one": [{}],
    "none": [],
    "dropout": [dict(lora_dropout=0.3)],
    "ranks": [dict(rank_pattern={"q_proj": 2, "v_proj": 7}, alpha_pattern={"k_proj": 3})],
    "bias": [dict(lora_bias=True)],
    "only-q": [dict(target_modules=["q_proj"])],
    "not-q": [dict(target_modules=["k_proj", "v_proj"], lora_dropout=0.3)],
    "two": [{}, dict(r=3, lora_dropout=0.2, target_modules=["k_proj"])],
    "dora": [dict(use_dora=True)],
    "dora-on-k": [dict(target_modules=["q_proj", "v_proj"]), dict(use_dora=True, target_modules=["k_proj"])],
}


@pytest.mark.parametrize("adapters", ADAPTERS.values(), ids=ADAPTERS.keys())
@pytest.mark.parametrize("frozen", [{}, dict(accuracy="paper", gradients="nvfp4_sr", weight_layouts="transient")], ids=["", "sr"])
def test_results_are_those_of_single_linears(adapters, frozen, calls):
    """DoRA's forward is more than branches, so its linear is computed by itself. (After the others: v draws its seed for
    stochastic rounding before k, other numbers than one by one.)"""
    if adapters is ADAPTERS["dora-on-k"] and "gradients" in frozen:
        frozen = {**frozen, "gradients": "bf16"}
    single = results(made(*adapters, grouped=False, **frozen))
    assert set(calls) == {1}
    calls.clear()
    assert_close(results(made(*adapters, **frozen)), single)
    kind = next((name for name, value in ADAPTERS.items() if value is adapters), None)
    assert calls == {"dora": [1, 1, 1], "dora-on-k": [2, 1]}.get(kind, [3])


@pytest.mark.parametrize("adapters", [ADAPTERS["one"], ADAPTERS["two"]], ids=["one", "two"])
@pytest.mark.parametrize("dtype, autocast", [(torch.bfloat16, None), (torch.float32, torch.bfloat16)], ids=["bf16", "autocast"])
def test_results_in_16_bits(adapters, dtype, autocast, calls):
    """A result may be rounded the other way, to a neighbour, in each of up to four roundings: 4 u of the largest value."""
    got = results(made(*adapters, dtype=dtype), dtype, autocast)
    assert calls == [3]
    assert_close(got, results(made(*adapters, dtype=dtype, grouped=False), dtype, autocast), u=2**-8)


def test_how_often_a_model_computes(calls):
    config = dict(r=4, target_modules="all-linear")
    model = get_peft_model(tiny_llama(), NVFP4LoraConfig(**config))
    slow_down_steps(model)  # whose trials compute, too
    ids = torch.arange(8)[None]
    for _ in range(2):
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        assert calls == [3, 1, 2, 1] * 2, "q/k/v, o, gate/up, down"
    calls.clear()
    with torch.no_grad():
        model(input_ids=ids)
    assert calls == [3, 1, 2, 1] * 2 and activation_cache.live() == 0
    calls.clear()
    detach(model)(input_ids=ids)
    assert calls == [1] * 14


# ---------------------------------------------------------------------------------------------- between the calls
@pytest.mark.parametrize("double", [lambda y: y * 2, lambda y: y.mul_(2)], ids=["new", "in-place"])
@pytest.mark.parametrize("plus", [None, lambda x: (x + 1,)], ids=["same input", "another input"])
def test_hooks_of_a_linear_fire(double, plus):
    model, single, seen = made({}), made({}, grouped=False), []
    for m in (model, single):
        layer = three(m).k_proj
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()) or (plus and plus(args[0])))
        layer.register_forward_hook(lambda _, args, y: seen.append(y.detach().clone()) or double(y))
    assert_close(results(model), results(single))
    assert len(seen) == 4 and torch.equal(seen[0], seen[2])


def test_disabled_adapters(calls):
    model, bare, x = made({}), made(), data()[0].detach()
    with model.disable_adapter():
        assert torch.equal(model(x), bare(x)) and calls == [3, 3]


def test_the_same_input_twice(calls):
    """Outputs are handed out once: a second call computes anew, with a graph of its own."""
    twice = results(made({}), calls=2)
    assert calls == [3, 3]
    assert_close(twice, results(made({}, grouped=False), calls=2))


@pytest.mark.parametrize("order", [NAMES[::-1], ("k_proj", "q_proj", "v_proj"), ("q_proj", "q_proj", "k_proj")], ids=str)
def test_any_order_of_calls(order):
    outputs = []
    for grouped in (True, False):
        torch.manual_seed(3)
        model, x = three(made({}, grouped=grouped)), data()[0] * 1.5
        y = torch.cat([getattr(model, name)(x) for name in order], -1)
        outputs.append(dict(y=y.detach(), dx=torch.autograd.grad(y.square().sum(), x)[0]))
        del x, y
        assert activation_cache.live() == 0
    assert_close(*outputs)


def test_without_and_with_gradients():
    model, single = made({}), three(made({}, grouped=False))
    layers, x = three(model), data()[0] * 1.5
    with torch.no_grad():
        q = layers.q_proj(x)
    k, v = layers.k_proj(x), layers.v_proj(x)
    assert not q.requires_grad and k.requires_grad and v.requires_grad
    got = torch.autograd.grad(k.sum() + v.sum(), [x, layers.k_proj.lora_A["default"].weight])
    k, v = single.k_proj(x), single.v_proj(x)
    want = torch.autograd.grad(k.sum() + v.sum(), [x, single.k_proj.lora_A["default"].weight])
    assert_close(dict(enumerate(got)), dict(enumerate(want)))
    k = layers.k_proj(x)  # leaves q and v, with a graph
    with torch.no_grad():
        assert not layers.q_proj(x).requires_grad
    assert layers.v_proj(x).requires_grad


def edits(model, x):
    """What may change between two calls with one tensor."""
    layer = model.k_proj
    base = base_of(layer)

    def step():
        with torch.no_grad():
            layer.lora_A["default"].weight.mul_(-2)

    def replace():
        layer.lora_B["default"].weight = nn.Parameter(layer.lora_B["default"].weight.detach() * 3)

    return dict(
        step=step,
        replace=replace,
        data=lambda: setattr(layer.lora_A["default"].weight, "data", layer.lora_A["default"].weight.data * 3),
        scales=lambda: base.weight_scales.copy_(base.weight_scales.flip(0)),
        gscale=lambda: base.weight_gscale.view(torch.float32).mul_(2),
        offset=lambda: base.input_offset.view(torch.float32).add_(1),
        constant=lambda: base.output_offset.view(torch.float32).add_(1),
        scaling=lambda: layer.set_scale("default", 5.0),
        dropout=lambda: setattr(layer.lora_dropout["default"], "p", 0.0),
        requantised=lambda: base.requantize_(torch.flip(base.dequantize(torch.float32), [0])),
        centred=lambda: base.set_offset(torch.ones(64)),
        bias=lambda: setattr(base, "bias", nn.Parameter(torch.ones(32))),
        evaluation=lambda: model.eval(),
        merged=lambda: layer.merge(),
        disabled=lambda: layer.enable_adapters(False),
        input=lambda: x.mul_(-3),
    )


EDITS = "data scales gscale offset constant step replace scaling dropout requantised centred bias evaluation merged disabled"


@pytest.mark.parametrize("what", [*EDITS.split(), "input"])
def test_a_linear_that_changes_between_the_calls(what):
    """As when q was computed alone: k is what it is when it is called."""
    outputs = []
    for grouped in (True, False):
        model, x = made(dict(lora_dropout=0.3), grouped=False), data()[0].detach()
        if what in ("offset", "constant"):
            base_of(three(model).q_proj).set_offset(torch.ones(64))
            for layer in three(model).layers()[1:]:
                base_of(layer).set_offset(torch.ones(64))
                base_of(layer).input_offset = base_of(three(model).q_proj).input_offset
        if grouped:
            attach(model, run=lambda: model(data()[0]))
        model = three(model).train()
        torch.manual_seed(3)
        model.q_proj(x)
        edits(model, x)[what]()
        torch.manual_seed(4)
        outputs.append(dict(k=model.k_proj(x).detach()))
    torch.manual_seed(4)
    assert_close(*outputs)


def test_a_linear_that_is_never_called():
    """What was computed for it goes with the input."""
    model = three(made({}))
    x = data()[0] * 1.5
    y = model.q_proj(x)
    y.sum().backward()
    assert activation_cache.live() == 1
    del x
    assert activation_cache.live() == 0


@pytest.mark.parametrize("called", [["q_proj"], ["v_proj", "k_proj"]], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_linear_whose_output_is_not_used_has_no_gradient(called, dropout):
    """Not zeros: an optimizer with weight decay would move its adapter. The others' gradients are those of single linears."""
    outcomes = []
    for grouped in (True, False):
        model = made(dict(lora_dropout=dropout), grouped=grouped)
        torch.manual_seed(3)
        x, dy = data()
        h = x * 1.5
        with torch.random.fork_rng():  # the group draws seeds for all its members
            ys = {name: getattr(three(model), name)(h) for name in (called if dropout == 0 else NAMES)}
        torch.autograd.backward([ys[name] for name in called], [dy[..., : ys[name].shape[-1]] for name in called])
        outcomes.append(dict(dx=x.grad, **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
        assert all((gradient is None) == (name not in called) for name, gradient in grads_by_linear(outcomes[-1]))
    assert_close(*outcomes)


def grads_by_linear(outcome):
    return [(next(n for n in NAMES if n in name), gradient) for name, gradient in outcome.items() if "lora" in name]


@pytest.mark.parametrize("backward", [True, False])
def test_an_input_that_is_never_freed_keeps_no_graph(backward):
    """A hook of x that refers to x keeps x for ever (PyTorch does not find the cycle), and with it x's entry, but not the outputs
    that wait there: a backward pass ends that, or the next input. The last one's are kept, at most."""
    model = three(made({}))
    for _ in range(5):
        x = data()[0] * 1.5
        x.register_hook(lambda gradient, x=x: gradient / x.norm())
        y = model.q_proj(x) + model.v_proj(x).sum() + model.v_proj(x).sum()  # k_proj is never called
        if backward:
            y.sum().backward()
        del x, y
    waiting = [len(entry.outputs) for entry in activation_cache._LOCAL.table.values()]
    assert waiting == [0, 0, 0, 0, 0 if backward else 2]  # of the last call of v_proj, which computes them once more


def test_a_linear_that_is_called_after_a_backward_pass():
    """Its output had been computed in the graph that backward has freed."""
    model, single = three(made({})), three(made({}, grouped=False))
    outcomes = []
    for layers in (model, single):
        x = data(requires_grad=False)[0]
        layers.q_proj(x).sum().backward()
        k = layers.k_proj(x)
        k.sum().backward()
        outcomes.append(dict(y=k.detach(), a=layers.k_proj.lora_A["default"].weight.grad))
    assert_close(*outcomes)


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_leaf_is_not_kept_alive(ndim, autocast):
    """By outputs that wait for their linears: their graph ends in the leaf that is differentiated, the key of their own entry."""
    model, x = three(made({})), data()[0]
    x = x.detach().flatten(0, 3 - ndim).requires_grad_()
    assert x.ndim == ndim
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model.q_proj(x)
    y.sum().backward()
    del x, y
    assert activation_cache.live() == 0


def test_inference_mode(calls):
    """Tensors without a version are not entered in the table: one by one."""
    model, x = made({}), data()[0].detach()
    expected = model(x).detach()
    with torch.inference_mode():
        calls.clear()
        y = model(x.clone())
        assert calls == [1, 1, 1]
        y2 = model(x.clone())
    assert_close(dict(y=y.clone()), dict(y=expected))
    assert torch.equal(y, y2) and activation_cache.live() == 0


# ---------------------------------------------------------------------------------------------- checkpointing
@pytest.mark.parametrize("unit", ["all", "each"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(unit, reentrant):
    """The whole module recomputed, or every linear by itself: then each computes for the others in vain, who would have drawn
    other masks."""
    outcomes, dropout = [], 0.0 if unit == "each" and not reentrant else 0.3
    for grouped in (True, False):
        model = three(made(dict(lora_dropout=dropout), grouped=grouped))
        torch.manual_seed(3)
        x, dy = data()
        model.zero_grad()
        if unit == "all":
            y = checkpoint(model, x, use_reentrant=reentrant)
        else:
            x2 = x * 1.5
            y = torch.cat([checkpoint(layer, x2, use_reentrant=reentrant) for layer in model.layers()], -1)
        y.backward(dy)
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        outcomes.append(dict(y=y.detach(), dx=x.grad, **grads))
        if unit == "each":
            del x2
        del y
        assert activation_cache.live() == 0
    assert_close(*outcomes)


@pytest.mark.parametrize("order", ["qkkv", "qkvv", "kv", "vqq"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("leaf", [False, True])
def test_the_second_run_of_a_checkpointed_part_takes_nothing_from_the_first(order, depth, leaf):
    """The input is outside of the part: both runs read the same tensor object, in whose entry outputs that nobody came for wait.
    Of the second run's tensors each goes to the node that saved it in the first. (Backward of tanh asks for the second run.)"""
    outcomes = []
    for checkpoints in (0, depth):
        model = three(made({}))

        def part(x):
            return torch.cat([model.get_submodule(f"{letter}_proj")(x) for letter in order], -1).tanh()

        for _ in range(checkpoints):
            part = partial(checkpoint, part, use_reentrant=False)
        x = data()[0]
        h = x if leaf else x * 1.5
        y = part(h)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        outcomes.append(dict(y=y.detach(), dx=x.grad, **grads))
        del h, x, y
        assert activation_cache.live() == 0
    for name, tensor in outcomes[0].items():
        assert tensor is outcomes[1][name] or torch.equal(tensor, outcomes[1][name]), name


def test_reentrant_checkpointing_computes_together_what_is_so_without(calls):
    """Its second run hands the part a leaf. Bits: the input gradients of q, k and v are summed in one product, rounded once."""
    outcomes = []
    for checkpoints in (False, True):
        model = three(made({}, dtype=torch.bfloat16))
        part = lambda x: torch.cat([layer(x) for layer in model.layers()], -1)  # noqa: B023, E731
        x, dy = data(torch.bfloat16)
        h = x * 1.5
        calls.clear()
        y = checkpoint(part, h, use_reentrant=True) if checkpoints else part(h)
        y.backward(dy.to(y.dtype))
        assert calls == [3, 3][: 1 + checkpoints]
        del h, y
        assert activation_cache.live() == 0
        outcomes.append(x.grad)
    assert torch.equal(*outcomes)


# ---------------------------------------------------------------------------------------------- copies
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_independent(way):
    model = made({})
    three(model).between = None
    again = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    three(model).between = three(again).between = int
    expected = results(model)
    sites = {id(base_of(layer).group) for layer in three(again).layers()}
    assert len(sites) == 1 and base_of(three(again).q_proj).group.members == three(again).layers()
    assert_close(results(again), expected)
    with torch.no_grad():
        for p in again.parameters():
            if p.requires_grad:
                p.mul_(3)
    assert not torch.equal(results(again)["y"], expected["y"])
    assert_close(results(model), expected)


def test_replicas_compute_for_themselves(calls):
    """As DataParallel makes them: shallow copies with their own parameters, which still point to the original's site."""
    model, x = three(made({})), data()[0].detach()
    other = three(made({}))
    expected = torch.cat([layer(x) for layer in other.layers()], -1)
    replicas = []
    for layer, source in zip(model.layers(), other.layers()):
        replica = layer._replicate_for_data_parallel()
        replica._modules["base_layer"] = base = base_of(layer)._replicate_for_data_parallel()
        base._parameters = dict(base_of(source)._parameters)
        replica._modules["lora_A"], replica._modules["lora_B"] = source.lora_A, source.lora_B
        assert base.group is base_of(layer).group
        replicas.append(replica)
    calls.clear()
    y = torch.cat([replica(x) for replica in replicas], -1)
    assert calls == [1, 1, 1]
    assert_close(dict(y=y.detach()), dict(y=expected.detach()))


# ---------------------------------------------------------------------------------------------- who belongs to a site
def test_an_adapter_that_comes_later(calls):
    """Attached without adapters, then one on q, then another on k: the linears of a site are found with what they have."""
    model = three(made())
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    wrapped.add_adapter("b", LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
    wrapped.base_model.set_adapter(["default", "b"])
    assert base_of(model.q_proj).group.members == model.layers()
    assert [isinstance(m, FrozenLoraLinear) for m in model.layers()] == [True, True, False]
    calls.clear()
    got = results(wrapped)
    assert calls == [3]
    detach(wrapped)
    assert_close(got, results(wrapped))


class Pair(nn.Module):
    """Two attentions over one memory, and a linear whose module reads it twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Three() for _ in range(2))
        self.twice = nn.ModuleDict({"a": nn.Linear(64, 16), "b": nn.Linear(64, 16)})

    def forward(self, x):
        outs = [m(x) for layer in self.layers for m in layer.layers()]
        return torch.cat([*outs, self.twice["a"](x), self.twice["a"](x), self.twice["b"](x)], -1)


def test_sites_do_not_cross_modules(calls):
    """Cross-attention of several layers reads one tensor, but each layer may be checkpointed by itself. A linear that is called
    twice is in no site."""
    torch.manual_seed(0)
    model, x = freeze_model(Pair()), data()[0].detach()
    expected = model(x)
    calls.clear()
    report = attach(model, run=lambda: model(x))
    assert report.groups == [[f"layers.{i}.{name}" for name in NAMES] for i in (0, 1)]
    assert torch.equal(model(x), expected) and calls == [3, 3, 1, 1, 1]
    detach(model)
    assert all(base_of(m).group is None for layer in model.layers for m in layer.layers())


def test_linears_that_quantise_differently_are_no_site():
    model, x = made(grouped=False), data()[0].detach()
    base_of(model.v_proj).set_offset(torch.ones(64))
    assert attach(model, run=lambda: model(x)).groups == []
    dense = freeze_model(Three(), skip_modules=["k_proj"])
    assert attach(dense, run=lambda: dense(x)).groups == [["q_proj", "v_proj"]]
