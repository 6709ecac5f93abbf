"""What is taken for a known function: samples of every magnitude, modules that are set up with a limit, and who reads a norm."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from _wrappers import PassesOn
from peft import get_peft_model
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts, Glm5NextTextMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.hy_v4.modeling_hy_v4 import HYV4MLP, HYV4Experts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

from peft_nvfp4 import NVFP4LoraConfig, attach, freeze_model
from peft_nvfp4.nn.experts.frozen_experts import FrozenExperts
from peft_nvfp4.nn.frozen_linear import FrozenOptions

CONFIG = dict(hidden_size=64, intermediate_size=2048, mlp_bias=False, hidden_act="silu", num_local_experts=2)
CONFIG |= dict(moe_intermediate_size=48, num_experts=2, n_routed_experts=2, swiglu_alpha=1.702)


def made(kind, limit, *args, **changes):
    """A module of transformers' class, with random weights. ``limit`` is what its config's names for one say."""
    torch.manual_seed(0)
    config = SimpleNamespace(**CONFIG, swiglu_limit=limit, swiglu_limits_shared=[limit, 0.0])
    vars(config).update(changes)
    module = kind(config, *args)
    for p in module.parameters():
        p.data.normal_(0, 0.6)  # products of two such matrices pass a limit of 10
    return module


class Model(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, input_ids=None, x=None):
        return self.mlp(torch.randn(1, 2, 64) if x is None else x)


class Clamped(nn.Module):
    """A SwiGLU that clamps where no attribute says so."""

    def __init__(self, clamp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.bound = clamp

    def forward(self, x):
        bound = self.bound
        return self.down_proj(F.silu(self.gate_proj(x).clamp(max=bound)) * self.up_proj(x).clamp(-bound, bound))


class ByDtype(Clamped):
    """Clamps in 16 bits only."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate) * (up if up.dtype == torch.float32 else up.clamp(-100, 100)))


MLPS = {  # name -> (module, whether it is fused)
    "deepseek-v4": (made(DeepseekV4MLP, 10.0), False),
    "deepseek-v4 without": (made(DeepseekV4MLP, float("inf")), True),
    "glm5-next": (made(Glm5NextTextMLP, 10), False),
    "hy-v4": (made(HYV4MLP, None), True),
    "step-3.7": (made(Step3p7MLP, 16.0, 0), False),
    "step-3.7 without": (made(Step3p7MLP, 16.0, 1), True),
    "a limit that is never met": (made(DeepseekV4MLP, 1e30), False),
    **{f"clamps at {bound}": (Clamped(bound), False) for bound in (1e-3, 10.0, 100.0, 5e3)},
    "clamps in BF16": (ByDtype(0.0).bfloat16(), False),
}


@pytest.mark.parametrize("mlp, fused", MLPS.values(), ids=MLPS)
def test_a_clamped_mlp_is_left_alone(mlp, fused):
    dtype = next(mlp.parameters()).dtype
    model = Model(mlp)
    x = torch.randn(1, 8, 64).to(dtype)
    expected = mlp(x).detach().float()
    settings = NVFP4LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], accuracy="paper")
    model = get_peft_model(model, settings)
    report = model.base_model.nvfp4_report
    assert ("mlp" in report.fused) == fused == ("mlp" not in report.skipped)
    error = (model(x=x).float() - expected).norm() / expected.norm()
    assert error < 0.3  # three products of two 4-bit factors each: 0.1 * sqrt(6)


EXPERTS = {
    "deepseek-v4": (DeepseekV4Experts, 10.0, False),
    "glm5-next": (Glm5NextTextExperts, 10, False),
    "hy-v4": (HYV4Experts, 7.0, False),
    "gpt-oss": (GptOssExperts, 7.0, False),
    "step-3.7": (Step3p7Experts, None, True),
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "by samples"])
@pytest.mark.parametrize("kind, limit, fused", EXPERTS.values(), ids=EXPERTS)
def test_clamped_experts_are_left_alone(kind, limit, fused, named, monkeypatch):
    original = made(kind, limit)
    if not named:
        monkeypatch.setattr("peft_nvfp4.nn.experts.frozen_experts.limit_of", lambda module: None, raising=False)
    experts = FrozenExperts.quantize(original, "nvfp4", dict.fromkeys(("gate_up_proj", "down_proj"), FrozenOptions()))
    reason = experts.fuse()
    assert (reason is None) == fused == (experts.act == "silu")
    assert fused or ("cut values off" in reason) == named


# ---------------------------------------------------------------------------------------------- norms


class Norm(nn.Module):
    """An RMSNorm but for ``change``, which is applied to the normalised values."""

    def __init__(self, change=lambda y: y, weight=1.0, read=None):
        super().__init__()
        self.weight, self.eps, self.change = nn.Parameter(torch.full((64,), weight)), 1e-6, change

    def forward(self, x):
        return self.weight * self.change(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Reader(nn.Module):
    """q and k read a norm; so does ``read``."""

    def __init__(self, norm, read=lambda h: 0.0):
        super().__init__()
        self.norm, self.q, self.k, self.read = norm, nn.Linear(64, 64), nn.Linear(64, 64), read

    def forward(self, x):
        h = self.norm(x)
        return self.q(h) + self.k(h) + self.read(h)


def report_of(model):
    return attach(freeze_model(model), run=lambda: model(torch.randn(1, 5, 64)))


@pytest.mark.parametrize("fused, norm", [(True, Norm()), (False, Norm(lambda y: y.clamp(-5, 5))), (False, Norm(torch.tanh, 0.0))])
def test_a_norm_is_checked_with_values_that_show_its_formula(fused, norm):
    """Large values show a clamp; a weight of 0 would hide everything."""
    assert ("norm" in report_of(Reader(norm)).fused) == fused


READERS = {
    "mT": lambda h: h.mT.sum(),
    "mH": lambda h: h.mH.sum(),
    "data": lambda h: h.data.sum(),
    "real": lambda h: h.real.sum(),
    "T": lambda h: h.view(5, 64).T.sum(),
    "data_ptr": lambda h: 0.0 * h.data_ptr(),
    "shape": lambda h: h.shape[0] * h.ndim * h.dtype.itemsize + h.size(0) + h.requires_grad,
}


class Wrapper(PassesOn):
    """Passes attributes on, and reads its input itself."""

    def forward(self, x):
        return self.inner(x) + x.mean()


def test_a_wrapper_around_a_reader_reads():
    model = freeze_model(Reader(Norm()))
    model = get_peft_model(model, NVFP4LoraConfig(target_modules=["q", "k"])).base_model.model
    model.q = Wrapper(model.q)
    report = attach(model, run=lambda: model(torch.randn(1, 5, 64)))
    assert report.skipped["norm"] == "its output is read by mean" and report.groups == []


@pytest.mark.parametrize("name", READERS)
def test_properties_that_are_tensors_read(name):
    report = report_of(Reader(Norm(), READERS[name]))
    assert ("norm" in report.fused) == (name == "shape")
    assert name in ("shape", "T") or name in report.skipped["norm"]
