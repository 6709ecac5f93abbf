"""torch.compile: the frozen layers and their adapters are captured whole, with the numbers of eager execution, and once."""

import copy
import shutil

import pytest
import torch
from conftest import tiny_llama
from low_level import adapted_model
from peft import get_peft_model
from torch import nn
from torch._dynamo.backends.debugging import ExplainWithBackend
from torch._dynamo.utils import counters

from peft_nvfp4 import NVFP4LoraConfig

BACKENDS = ("nvfp4", "nf4", "bf16")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_dropout = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no-dropout", "dropout"])
IDS = torch.arange(32).reshape(2, 16) * 7 % 128
# Of a Llama with LoRA on every linear, observed with torch 2.13, transformers 5.24, bitsandbytes 0.50. bitsandbytes' own forward
# would compile nf4 twice: its first call sets Linear4bit.compute_type_is_set, which the first graph is guarded on.
GRAPH_BREAKS = {"nvfp4": 0, "nf4": 0, "bf16": 0}

# A compiler may only reorder FP32 sums: 2**-24 a term, a few hundred terms. With NVFP4 such a difference can carry a value
# across a rounding threshold: at most one code in a thousand, each off by a tenth of its value.
TOLERANCE = {"nvfp4": 5e-3, "nf4": 1e-5, "bf16": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # no pool of worker processes for two small graphs
        yield
    torch._dynamo.reset()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.up_proj(x)))


def mlp(**settings) -> nn.Module:
    torch.manual_seed(0)
    usual = dict(r=4, lora_alpha=8, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    return adapted_model(MLP(), **{**usual, **settings}).train()


def llama(**settings) -> nn.Module:
    base = tiny_llama(num_hidden_layers=1)
    usual = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, NVFP4LoraConfig(**{**usual, **settings})).train()


def batch() -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(1))


def mlp_step(model: nn.Module, call, seed: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients) of the adapters and of the input, with every random number from ``seed``."""
    x = batch().requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    loss = call(x).square().mean()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), {**grads, "x": x.grad}


def llama_step(model: nn.Module, call, seed: int = 5) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = call(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_close(got, expected, bound: float) -> None:
    """Losses relative to each other, gradients by the norm of their difference."""
    assert abs(got[0] - expected[0]) <= bound * abs(expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert grad.norm() > 0, name
        assert (got[1][name] - grad).norm() <= bound * grad.norm(), name


def nudge(model: nn.Module) -> None:
    """Values change as in training, shapes do not."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)


@by_backend
def test_a_model_is_captured_whole_and_once(backend, capsys):
    """aot_eager: forward and backward are traced and run as graphs of PyTorch's own kernels. Loss and gradients of three steps
    against eager ones on a twin; number of graphs and breaks as torch._dynamo.explain counts them; no new graph after the
    first step."""
    model = llama(backend=backend)
    twin = copy.deepcopy(model)
    explained = ExplainWithBackend("aot_eager")
    compiled = torch.compile(model, backend=explained)
    graphs, breaks = [], []
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got = llama_step(model, compiled, seed=step)
        assert_close(got, llama_step(twin, twin, seed=step), TOLERANCE[backend])
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(sum(counters["graph_break"].values()))
        nudge(model)
        nudge(twin)
    report = explained.output()
    with capsys.disabled():
        print(f"\n{backend}: graphs after each step {graphs}, graph breaks {breaks}, operators {report.op_count}")
    assert breaks[0] <= GRAPH_BREAKS[backend], [str(reason.reason) for reason in report.break_reasons]
    assert graphs[0] == GRAPH_BREAKS[backend] + 1 and report.op_count > 50
    assert graphs == [graphs[0]] * 3 and breaks == [breaks[0]] * 3


@by_backend
@by_dropout
def test_aot_eager(backend, dropout):
    """fullgraph=True raises at the first break. Dropout masks come from PyTorch's generator: a new one at every step (a seed that
    was compiled in would repeat it), the same one from the same state."""
    model = mlp(backend=backend, lora_dropout=dropout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    first = mlp_step(model, compiled, seed=1)
    assert_close(first, mlp_step(model, model, seed=1), TOLERANCE[backend])
    losses = [mlp_step(model, compiled, seed)[0] for seed in (2, 1)]
    assert losses[1] == first[0]
    assert (losses[0] == first[0]) == (dropout == 0.0)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(weight_layouts="transient", accuracy="paper"), id="transient-paper"),
        pytest.param(dict(weight_layouts="transient", accuracy="high"), id="transient-high"),
        pytest.param(dict(gradients="bf16", accuracy="high"), id="bf16-gradients-high"),
    ],
)
def test_options_of_nvfp4(settings):
    model = mlp(**settings, lora_dropout=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(mlp_step(model, compiled), mlp_step(model, model), TOLERANCE["nvfp4"])


def test_stochastic_gradients():
    """A compiler may draw the rounding's seed when backward comes to it, so the numbers are not those of eager execution: the
    same loss, and gradients as far from eager ones as eager ones with two seeds are from each other (twice that, at most). Where
    no rounded gradient takes part, in the last layer, they are equal. One seed, one result."""
    model = mlp(gradients="nvfp4_sr")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, again = mlp_step(model, compiled), mlp_step(model, compiled)
    one, two = mlp_step(model, model), mlp_step(model, model, seed=6)
    assert got[0].item() == pytest.approx(one[0].item(), rel=TOLERANCE["nvfp4"])
    for name, grad in one[1].items():
        assert torch.equal(got[1][name], again[1][name]), name
        if "down_proj" in name:
            assert (got[1][name] - grad).norm() <= TOLERANCE["nvfp4"] * grad.norm(), name
        else:
            spread = (two[1][name] - grad).norm()
            assert 0 < (got[1][name] - grad).norm() <= 2 * spread < 0.5 * grad.norm(), name


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="not run: inductor needs a C++ compiler (g++)")


@needs_compiler
@by_backend
def test_inductor(backend):
    """Generated C++ loops. ``fallback_random`` makes inductor draw the random numbers of eager execution."""
    model = mlp(backend=backend, lora_dropout=0.1)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    with torch._inductor.config.patch(fallback_random=True):
        got = mlp_step(model, compiled)
    assert_close(got, mlp_step(model, model), TOLERANCE[backend])


@needs_compiler
@pytest.mark.parametrize("backend", ["nvfp4", "bf16"])
def test_inductor_draws_one_mask_for_forward_and_backward(backend):
    """With inductor's own random numbers there is no eager run to compare with. The gradient must be that of the loss all the
    same: along the gradient of the last layer's adapter (behind all rounding of activations) the loss is a polynomial, so the
    central difference at 1 % of the parameters' norm is off by its third-order term, below 1e-3, and by FP32 rounding over the
    step. A backward mask of its own would be wrong in half of all places."""
    model = mlp(backend=backend, lora_dropout=0.5)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    _, grads = mlp_step(model, compiled)
    last = {n: p for n, p in model.named_parameters() if "down_proj.lora_" in n}
    start = {n: p.detach().clone() for n, p in last.items()}
    norm = torch.stack([p.norm() for p in start.values()]).norm()
    slope = torch.stack([grads[n].norm() for n in last]).norm()
    step = 0.01 * norm / slope

    def loss_at(signed_step: torch.Tensor) -> float:
        with torch.no_grad():
            for name, parameter in last.items():
                parameter.copy_(start[name] + signed_step * grads[name])
        return mlp_step(model, compiled)[0].double().item()

    measured = (loss_at(step) - loss_at(-step)) / (2 * step.item())
    assert measured == pytest.approx(slope.item() ** 2, rel=1e-2)
