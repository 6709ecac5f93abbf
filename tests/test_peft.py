"""The package inside PEFT: adapters on disk and stock PEFT, loading in every way PEFT has, selection of modules, other tuners.

What needs a PEFT that never saw this package runs in one subprocess for the whole file (:func:`stock`)."""

import copy
import dataclasses
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from conftest import tiny_llama
from peft import (
    AdaLoraConfig,
    AutoPeftModelForCausalLM,
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    LoraModel,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from peft_nvfp4 import FrozenLinear, NVFP4LoraConfig, attach, detach, freeze_model, frozen_bytes, register, unregister
from peft_nvfp4.config import OWN_FIELDS, SIDE_CAR
from peft_nvfp4.dataflow.attach import attached
from peft_nvfp4.freeze import frozen_layers
from peft_nvfp4.lora import FrozenLoraLinear

BACKENDS = ("nvfp4", "nf4", "bf16")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = {f"{i}.{'mlp' if p in PROJECTIONS[4:] else 'self_attn'}.{p}" for i in range(2) for p in PROJECTIONS}
IDS = torch.arange(32).reshape(2, 16) * 7 % 128
U = 2.0**-8  # largest relative error of rounding to BF16


def config(**settings) -> NVFP4LoraConfig:
    return NVFP4LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"), **settings})


def frozen_lora(model: nn.Module) -> dict[str, FrozenLoraLinear]:
    """Short name ("0.self_attn.q_proj") -> layer, of every LoRA layer over a frozen linear."""
    return {n.split("layers.")[-1]: m for n, m in model.named_modules() if isinstance(m, FrozenLoraLinear)}


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def train(model: nn.Module, steps: int = 2, lr: float = 2e-2) -> nn.Module:
    """A few steps that make every trainable tensor differ from its start, B from zero in particular."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained(model: nn.Module, **settings) -> PeftModel:
    torch.manual_seed(1)
    return train(get_peft_model(model, config(**settings)))


def adapter_tensors(model: nn.Module, name: str = "default") -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in get_peft_model_state_dict(model, adapter_name=name).items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def snapshot(model: nn.Module):
    """Everything a failed call must leave alone: module objects, parameter values and who is trainable."""
    return (
        {n: id(m) for n, m in model.named_modules()},
        {n: p.requires_grad for n, p in model.named_parameters()},
        {n: t.clone() for n, t in model.state_dict().items()},
    )


# ---------------------------------------------------------------------------------------------- stock PEFT in a subprocess


def plain_run(model) -> dict:
    """Plain LoRA on a plain model, in whatever process this runs. Only PEFT and torch are in scope (see HEADER)."""
    torch.manual_seed(7)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    model = get_peft_model(model, lora)
    ids = torch.arange(32).reshape(2, 16) * 7 % 128
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        out = model(input_ids=ids).logits
    return dict(
        classes=[(n, f"{type(m).__module__}.{type(m).__name__}") for n, m in model.named_modules()],
        tuner=type(model.base_model) is LoraModel,
        state={n: t.clone() for n, t in model.state_dict().items()},
        grads=grads,
        logits=out,
        repr=repr(model),
        model=model,
    )


def load_strictly(base: str, adapter: str, records: bool = False, **kwargs) -> dict:
    """Load a saved adapter as anybody would, turning every warning into an error."""
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    for name in ("peft", "transformers", ""):
        logging.getLogger(name).addHandler(handler)
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PEFT 0.21 itself meets a deprecation of transformers 5.24
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        model = PeftModel.from_pretrained(model, adapter, **kwargs).eval()
    calls = {}

    def record(name):
        return lambda module, args, out: calls.__setitem__(name, (args[0], out))

    for name, module in model.named_modules():
        if records and hasattr(module, "lora_A"):
            module.register_forward_hook(record(name))
    ids = torch.arange(32).reshape(2, 16) * 7 % 128
    with torch.no_grad():
        out = model(input_ids=ids).logits
    keys = sorted(get_peft_model_state_dict(model))
    return dict(logits=out, keys=keys, logged=logged, calls=calls, types=sorted({type(m).__name__ for m in model.modules()}))


def peft_state() -> dict:
    """Every name of every module of PEFT, every attribute of its classes and every entry of its tables, by object."""
    state = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "peft":
            for key, value in list(vars(module).items()):
                state[name, key] = value
                if isinstance(value, type) and value.__module__.startswith("peft."):
                    state.update({(name, key, k): v for k, v in vars(value).items()})
                if isinstance(value, dict):
                    state.update({(name, key, str(k)): v for k, v in value.items()})
    return state


HEADER = """
import logging, sys, warnings
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
root = sys.argv[1]
"""
FOOTER = """
out = {}
for backend in ("nvfp4", "nf4", "bf16"):
    out[backend, "fp32"] = load_strictly(f"{root}/base-fp32", f"{root}/{backend}-fp32")
    out[backend, "bf16"] = load_strictly(f"{root}/base-bf16", f"{root}/{backend}-bf16", records=True)
    out[backend, "bf16, BF16 adapters"] = load_strictly(
        f"{root}/base-bf16", f"{root}/{backend}-bf16", records=True, autocast_adapter_dtype=False
    )
plain = plain_run(AutoModelForCausalLM.from_pretrained(f"{root}/base-fp32"))
plain.pop("model").save_pretrained(f"{root}/stock")
out["plain"] = plain
out["modules"] = [name for name in sys.modules if name.startswith("peft_nvfp4")]
before = peft_state()
import peft_nvfp4
during = peft_state()
peft_nvfp4.unregister()
after = peft_state()
def changes(now):  # by identity; ("PeftModel", "forward") also where the attribute is new
    return sorted({k[1:] for k in before.keys() | now.keys() if (k in before or len(k) == 3) and before.get(k) is not now.get(k)})
out["hooked"], out["left behind"] = changes(during), changes(after)
torch.save(out, f"{root}/out.pt")
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """(folder, results): adapters of ours for every backend and dtype, what stock PEFT made of them in a process that never
    imported this package, and an adapter that it saved. Folder: base-fp32, base-bf16, <backend>-<dtype>, stock."""
    root = tmp_path_factory.mktemp("stock")
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        tiny_llama(dtype).save_pretrained(root / f"base-{name}")
        for backend in BACKENDS:
            base = AutoModelForCausalLM.from_pretrained(root / f"base-{name}", dtype=dtype)
            trained(base, backend=backend, accuracy="high").save_pretrained(root / f"{backend}-{name}")
    script = HEADER + "\n".join(map(inspect.getsource, (plain_run, load_strictly, peft_state))) + FOOTER
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, str(root)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return root, torch.load(root / "out.pt", weights_only=False)


def ours_on(root: Path, backend: str, dtype: str, **kwargs) -> PeftModel:
    """The adapter trained on ``backend``, loaded by us with backend="bf16" on the saved base."""
    base = AutoModelForCausalLM.from_pretrained(root / f"base-{dtype}")
    read = NVFP4LoraConfig.from_pretrained(root / f"{backend}-{dtype}")
    read.backend = "bf16"
    model = PeftModel.from_pretrained(base, root / f"{backend}-{dtype}", config=read, **kwargs).eval()
    assert len(frozen_lora(model)) == 14
    return model


def test_the_subprocess_never_saw_this_package(stock):
    assert stock[1]["modules"] == []


@by_backend
@pytest.mark.parametrize("case", ["fp32", "bf16", "bf16, BF16 adapters"])
def test_stock_peft_reads_our_adapter_without_a_warning(stock, backend, case):
    """Python warnings were errors in the subprocess; log records and keys are compared here."""
    root, out = stock
    got = out[backend, case]
    assert got["logged"] == []
    assert "Linear" in got["types"] and "FrozenLoraLinear" not in got["types"]
    expected = {f"base_model.model.model.layers.{name}.lora_{ab}.weight" for name in ALL for ab in "AB"}
    assert set(got["keys"]) == expected == set(adapter_tensors(ours_on(root, backend, case[:4])))


@by_backend
def test_stock_peft_computes_our_logits_in_fp32(stock, backend):
    """The same sums in FP32, perhaps in another order: 14 linears in sequence with K <= 176 terms each, of relative error at most
    K * 2**-24 of the sum of magnitudes. The sum of magnitudes is about sqrt(K) times the sum, and errors add in quadrature:
    sqrt(14) * sqrt(176) * 2**-24 * 10 to spare."""
    root, out = stock
    ours, theirs = logits(ours_on(root, backend, "fp32")), out[backend, "fp32"]["logits"]
    base = logits(AutoModelForCausalLM.from_pretrained(root / "base-fp32"))
    bound = 10 * (14 * 176) ** 0.5 * 2.0**-24 * theirs.abs().max()
    assert (ours - theirs).abs().max() <= bound
    assert (base - theirs).abs().max() > 1000 * bound, "the adapter does next to nothing, so the comparison would show nothing"


@by_backend
@pytest.mark.parametrize("adapters", ["fp32-adapters", "bf16-adapters"])
def test_stock_peft_computes_our_layers_in_bf16(stock, backend, adapters):
    """Layer by layer on the input that stock PEFT recorded. With FP32 adapters PEFT multiplies the branch in FP32 and rounds the
    sum once; here A and B are rounded to BF16, and so are h, the branch and its multiple by the scaling: five relative errors of
    at most U on E = s |x| |A|.T |B|.T. Both round the sum, to within U of it. With BF16 adapters PEFT rounds in the same places,
    and only a rounding that another order of summation flips may differ: two errors of one ulp, 2 U each, in h and the branch."""
    root, out = stock
    case, autocast, factor = {
        "fp32-adapters": ("bf16", True, 5),
        "bf16-adapters": ("bf16, BF16 adapters", False, 4),
    }[adapters]
    model = ours_on(root, backend, "bf16", autocast_adapter_dtype=autocast)
    calls = {n.split("layers.")[-1]: c for n, c in out[backend, case]["calls"].items()}
    layers = frozen_lora(model)
    assert calls.keys() == layers.keys() and len(calls) == 14
    for name, (x, theirs) in calls.items():
        layer = layers[name]
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        assert layer.lora_A["default"].weight.dtype == (torch.float32 if autocast else torch.bfloat16)
        magnitude = layer.scaling["default"] * (x.double().abs() @ a.abs().T @ b.abs().T)
        with torch.no_grad():
            ours = layer(x)
            without = layer.base_layer(x)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        bound = 1.1 * (factor * U * magnitude + 2 * U * theirs.double().abs())
        worst = ((ours.double() - theirs.double()).abs() / bound).max().item()
        assert worst <= 1, f"{name}: {worst:.2f} times the bound"
        assert ((without.double() - theirs.double()).abs() > bound).any(), f"{name}: the bound would not notice a missing branch"


@by_backend
@pytest.mark.parametrize("case", ["bf16", "bf16, BF16 adapters"])
def test_stock_peft_computes_our_logits_in_bf16(stock, backend, case):
    """The yardstick is BF16 itself: stock PEFT's BF16 logits are off those of the same weights in FP32 by e. Ours may be as far
    off in another direction: 2 e apart, as a norm over 4096 logits."""
    root, out = stock
    theirs = out[backend, case]["logits"].float()
    ours = logits(ours_on(root, backend, "bf16", autocast_adapter_dtype=case == "bf16")).float()
    exact = logits(ours_on(root, backend, "bf16").float())
    assert (ours - theirs).norm() <= 2 * (theirs - exact).norm()
    assert (exact - theirs).norm() < 0.05 * exact.norm()


@by_backend
def test_what_an_adapter_folder_holds(stock, backend):
    """adapter_config.json has the keys of stock PEFT's, nothing else; the side-car has our fields."""
    root, _ = stock
    ours = json.loads((root / f"{backend}-fp32" / "adapter_config.json").read_text())
    theirs = json.loads((root / "stock" / "adapter_config.json").read_text())
    assert ours.keys() == theirs.keys() and ours["peft_type"] == "LORA"
    side_car = json.loads((root / f"{backend}-fp32" / SIDE_CAR).read_text())
    assert side_car == dict(
        format_version=1,
        backend=backend,
        accuracy="high",
        weight_layouts="cached",
        gradients="nvfp4",
        activations="bf16",
        fused=True,
        recompute_mlp=False,
        recompute_attention=False,
        cuda_graphs=False,
        skip_modules=None,
        calibration=None,
        merge_aware=False,
        offload=None,
    )


def test_an_adapter_of_stock_peft_loads(stock):
    """No side-car: own fields get their defaults. With backend="bf16" its logits are stock PEFT's (bound as above)."""
    root, out = stock
    read = NVFP4LoraConfig.from_pretrained(root / "stock")
    assert read.own_fields() == NVFP4LoraConfig().own_fields()
    read.backend = "bf16"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(root / "base-fp32"), root / "stock", config=read)
    assert len(frozen_lora(model)) == 14
    theirs = out["plain"]["logits"]
    assert (logits(model) - theirs).abs().max() <= 10 * (14 * 176) ** 0.5 * 2.0**-24 * theirs.abs().max()
    saved = {n.replace(".default", ""): t for n, t in out["plain"]["state"].items() if "lora_" in n}
    assert same_tensors(adapter_tensors(model), saved)


def test_plain_lora_is_untouched_by_the_import(stock):
    """Classes, keys, values, gradients, logits and printout as in a process that never imported this package."""
    root, out = stock
    here, there = plain_run(AutoModelForCausalLM.from_pretrained(root / "base-fp32")), out["plain"]
    assert type(here.pop("model").base_model) is LoraModel and there["tuner"] and here["tuner"]
    assert here["classes"] == there["classes"]
    assert here["repr"] == there["repr"]
    assert same_tensors(here["state"], there["state"])
    assert same_tensors(here["grads"], there["grads"]) and len(here["grads"]) == 28
    assert torch.equal(here["logits"], there["logits"])


# ---------------------------------------------------------------------------------------------- the hooks


@pytest.fixture
def unregistered():
    unregister()
    yield
    register()


def hooked_functions() -> list:
    return [LoraModel.__dict__.get(name) for name in ("_prepare_model", "_create_new_module", "_unload_and_optionally_merge")] + [
        BaseTuner.__dict__["inject_adapter"]
    ]


def test_unregister_restores_the_very_objects(stock):
    """Compared by identity over all of PEFT, in the subprocess: before the import, after it, and after unregister()."""
    methods = {key[-1] for key in stock[1]["hooked"]}
    assert methods >= {"_prepare_model", "_create_new_module", "_unload_and_optionally_merge", "inject_adapter"}
    assert {key[0] for key in stock[1]["hooked"]} <= {"LoraModel", "BaseTuner", "MixedModel", "LoraConfig"}
    assert stock[1]["left behind"] == []


def test_registering_twice_is_harmless():
    before = hooked_functions()
    register()
    register()
    assert all(a is b for a, b in zip(before, hooked_functions()))
    unregister()
    try:
        for function in hooked_functions():
            code = function.__func__.__code__ if isinstance(function, staticmethod) else function and function.__code__
            assert function is None or "/peft/tuners/" in code.co_filename, "one unregister() must undo any number of register()"
    finally:
        register()


@by_backend
def test_models_made_before_unregister_still_run(llama, backend):
    model = trained(llama(), backend=backend)
    before, weights = logits(model), adapter_tensors(model)
    unregister()
    try:
        assert torch.equal(logits(model), before)
        train(model)
        assert not same_tensors(adapter_tensors(model), weights)
        merged = model.merge_and_unload()  # the LoRA layers do it themselves
        assert not any(isinstance(m, BaseTunerLayer) for m in merged.modules())
    finally:
        register()


def test_after_unregister_peft_is_stock_peft(llama, unregistered):
    model = get_peft_model(llama(), config())
    assert frozen_layers(model) == [] and frozen_lora(model) == {}
    frozen = get_peft_model(freeze_model(llama()), LoraConfig(target_modules=["q_proj"]))
    assert type(frozen.base_model.model.model.layers[0].self_attn.q_proj) is peft.tuners.lora.Linear


# ---------------------------------------------------------------------------------------------- the configuration

VALUES = {
    "backend": ["nvfp4", "nf4", "bf16"],
    "accuracy": ["paper", "balanced", "high"],
    "weight_layouts": ["cached", "transient"],
    "gradients": ["nvfp4", "nvfp4_sr", "bf16"],
    "activations": ["bf16", "nvfp4"],
    "fused": [True, False],
    "recompute_mlp": [False, True],
    "recompute_attention": [False, True],
    "cuda_graphs": [False, True],
    "skip_modules": [None, [], ["lm_head", "layers.0.mlp"]],
    "calibration": [None, "a/folder"],
    "merge_aware": [False, True],
    "offload": [None, "cpu"],
}
by_own_field = pytest.mark.parametrize(
    "field, value", [(f, v) for f, values in VALUES.items() for v in values], ids=lambda v: str(v).replace("'", "")
)


def test_every_own_field_is_tested():
    stock_fields = {f.name for f in dataclasses.fields(LoraConfig)}
    own = {f.name for f in dataclasses.fields(NVFP4LoraConfig)} - stock_fields
    assert own == set(VALUES) == set(OWN_FIELDS)


@by_own_field
@pytest.mark.parametrize("way", ["save", "replace", "deepcopy", "pickle"])
def test_configuration_round_trip(tmp_path, field, value, way):
    dropout = 0.0 if field == "merge_aware" else 0.25  # the two do not go together
    before = config(**{field: value}, lora_dropout=dropout, rank_pattern={"q_proj": 2}, modules_to_save=["norm"])
    if way == "save":
        before.save_pretrained(str(tmp_path))
        after = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    elif way == "replace":
        after = dataclasses.replace(before, r=16)
        assert after.r == 16
        after.r = before.r
    else:
        after = copy.deepcopy(before) if way == "deepcopy" else pickle.loads(pickle.dumps(before))
    assert type(after) is NVFP4LoraConfig and getattr(after, field) == value
    assert dataclasses.asdict(after) == dataclasses.asdict(before)


def test_configuration_in_a_subfolder(tmp_path):
    config(backend="nf4").save_pretrained(str(tmp_path / "best"))
    assert NVFP4LoraConfig.from_pretrained(str(tmp_path), subfolder="best").backend == "nf4"


def test_configuration_without_a_side_car_gets_defaults(tmp_path):
    config(backend="nf4", accuracy="paper").save_pretrained(str(tmp_path))
    (tmp_path / SIDE_CAR).unlink()
    assert NVFP4LoraConfig.from_pretrained(str(tmp_path)).own_fields() == dict(
        backend="nvfp4",
        accuracy="high",
        weight_layouts="cached",
        gradients="nvfp4",
        activations="bf16",
        fused=True,
        recompute_mlp=False,
        recompute_attention=False,
        cuda_graphs=False,
        skip_modules=None,
        calibration=None,
        merge_aware=False,
        offload=None,
    )


@pytest.mark.parametrize("field", VALUES)
def test_a_side_car_from_before_a_field_existed(tmp_path, field):
    """The field gets its default."""
    defaults = NVFP4LoraConfig().own_fields()
    config(**{field: next(v for v in VALUES[field] if v != defaults[field])}).save_pretrained(str(tmp_path))
    side_car = json.loads((tmp_path / SIDE_CAR).read_text())
    del side_car[field]
    (tmp_path / SIDE_CAR).write_text(json.dumps(side_car))
    assert NVFP4LoraConfig.from_pretrained(str(tmp_path)).own_fields() == defaults


def test_configuration_from_the_hub(tmp_path):
    """A repository in the Hub's cache layout, read offline: the side-car is found there like adapter_config.json."""
    revision = "0" * 40
    repo = tmp_path / "models--someone--adapter"
    config(backend="nf4", gradients="bf16").save_pretrained(str(repo / "snapshots" / revision))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    read = NVFP4LoraConfig.from_pretrained("someone/adapter", cache_dir=str(tmp_path))
    assert read.r == 4 and (read.backend, read.gradients) == ("nf4", "bf16")


@pytest.mark.parametrize(
    "content, reason",
    [
        pytest.param("{", "not a valid", id="truncated"),
        pytest.param("", "not a valid", id="empty"),
        pytest.param("{}", "format_version", id="no-version"),
        pytest.param("[1, 2]", "not a valid", id="a-list"),
        pytest.param("null", "not a valid", id="null"),
        pytest.param(b"\xff\xfe\x00", "not a valid", id="not-text"),
        pytest.param('{"format_version": "one"}', "", id="version-is-a-word"),
        pytest.param('{"format_version": 2, "backend": "nvfp4"}', "version 2.*upgrade", id="newer-version"),
        pytest.param('{"format_version": 1, "backend": "nvfp4", "flavour": "sweet"}', "unknown.*flavour", id="unknown-field"),
        pytest.param('{"format_version": 1, "backend": "mxfp4"}', "mxfp4", id="unknown-backend"),
        pytest.param('{"format_version": 1, "skip_modules": "lm_head"}', "skip_modules", id="wrong-type"),
    ],
)
def test_a_bad_side_car_is_refused_by_name(tmp_path, content, reason):
    config().save_pretrained(str(tmp_path))
    (tmp_path / SIDE_CAR).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"(?s){SIDE_CAR}.*{reason}"):
        NVFP4LoraConfig.from_pretrained(str(tmp_path))


def test_a_configuration_of_another_method_is_refused(tmp_path):
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="IA3.*not LoRA"):
        NVFP4LoraConfig.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    "settings, known",
    [
        pytest.param(dict(backend="int4"), "bf16, nf4, nvfp4", id="backend"),
        pytest.param(dict(accuracy="best"), "paper, balanced, high", id="accuracy"),
        pytest.param(dict(weight_layouts="none"), "cached, transient", id="weight_layouts"),
        pytest.param(dict(gradients="fp8"), "nvfp4, nvfp4_sr, bf16", id="gradients"),
        pytest.param(dict(activations="fp8"), "bf16, nvfp4", id="activations"),
    ],
)
def test_an_unknown_word_lists_the_known_ones(settings, known):
    with pytest.raises(ValueError, match=f"{known}.*") as error:
        config(**settings)
    assert next(iter(settings.values())) in str(error.value)


# ---------------------------------------------------------------------------------------------- loading


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["config", "plain-on-frozen", "load_adapter"])
def test_reload_is_bit_equal(llama, tmp_path, backend, dtype, way):
    """config: a dense model is frozen again from the side-car. plain-on-frozen: a base frozen before, PEFT makes the plain
    LoraConfig of adapter_config.json; nobody asked for fusing, so the model computes what ours does when detached, and what ours
    does once it is attached. load_adapter: the same as a second adapter."""
    model = trained(llama(dtype), backend=backend)
    expected, weights = logits(model), adapter_tensors(model)
    model.save_pretrained(str(tmp_path))
    name = "default"
    if way == "config":
        read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
        again = PeftModel.from_pretrained(llama(dtype), str(tmp_path), config=read)
    elif way == "plain-on-frozen":
        again = PeftModel.from_pretrained(freeze_model(llama(dtype), backend), str(tmp_path))
        assert type(again.peft_config["default"]) is LoraConfig and not attached(again)
        assert torch.equal(logits(again), logits(detach(model)))
        attach(again)
    else:
        again, name = get_peft_model(llama(dtype), config(backend=backend, r=2)), "second"
        first = logits(again)
        again.load_adapter(str(tmp_path), adapter_name=name)
        assert torch.equal(logits(again), first), "loading must not activate the second adapter"
        again.set_adapter(name)
    layers = frozen_lora(again)
    assert len(layers) == 14 and all(type(m.get_base_layer()).backend == backend for m in layers.values())
    assert same_tensors(adapter_tensors(again, name), weights)
    assert attached(again) == (backend == "nvfp4")
    assert torch.equal(logits(again), expected)
    if way == "load_adapter":
        again.set_adapter("default")
        assert torch.equal(logits(again), first)


def test_fusing_is_decided_once_for_all_adapters(llama):
    """Of a model, not of an adapter: a first config that does not want it may be followed by one that does, but not undone."""
    model = get_peft_model(llama(), config(fused=False))
    assert not attached(model)
    model.add_adapter("b", config())
    assert attached(model) and len(model.base_model.nvfp4_report.sites) == 4
    with pytest.warns(UserWarning, match="fused already.*detach"):
        model.add_adapter("c", config(fused=False))
    assert attached(model) and not attached(get_peft_model(llama(), config(backend="bf16")))


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "inference"])
def test_is_trainable(llama, tmp_path, trainable):
    model = trained(llama(), backend="nvfp4")
    model.save_pretrained(str(tmp_path))
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(llama(), str(tmp_path), config=read, is_trainable=trainable)
    wanted = {n for n, _ in again.named_parameters() if "lora_" in n} if trainable else set()
    assert {n for n, p in again.named_parameters() if p.requires_grad} == wanted
    if trainable:
        train(again)
        assert not same_tensors(adapter_tensors(again), adapter_tensors(model))


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["config", "plain-on-frozen"])
def test_low_cpu_mem_usage(llama, tmp_path, backend, dtype, way):
    """PEFT makes new modules on the meta device here, which must not reach the base, nor what a fused module holds of it. It may
    round the adapter to the base's compute dtype on this path (it does so for any BF16 LoRA): exact for FP32, within U for
    BF16."""
    model = trained(llama(dtype), backend=backend)
    model.save_pretrained(str(tmp_path))
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path)) if way == "config" else None
    base = llama(dtype) if way == "config" else freeze_model(llama(dtype), backend)
    again = PeftModel.from_pretrained(base, str(tmp_path), config=read, low_cpu_mem_usage=True)
    assert [n for n, p in again.named_parameters() if p.is_meta] == []
    assert attached(again) == (way == "config" and backend == "nvfp4")
    if way == "config" and backend == "nvfp4":
        assert again.base_model.nvfp4_report == model.base_model.nvfp4_report
    saved, loaded = adapter_tensors(model), adapter_tensors(again)
    assert saved.keys() == loaded.keys() and len(saved) == 28
    for key, value in saved.items():
        assert loaded[key].dtype == torch.float32
        slack = 0.0 if dtype == torch.float32 else U
        assert ((loaded[key] - value).abs() <= slack * value.abs()).all(), key
    if dtype == torch.float32:
        assert torch.equal(logits(again), logits(model))


@by_backend
def test_hotswap(llama, tmp_path, backend):
    first, second = trained(llama(), backend=backend), get_peft_model(llama(), config(backend=backend))
    train(second, steps=3, lr=5e-2)
    for name, model in (("a", first), ("b", second)):
        model.save_pretrained(str(tmp_path / name))
    swapped = PeftModel.from_pretrained(freeze_model(llama(), backend), str(tmp_path / "a"))
    assert torch.equal(logits(swapped), logits(first))
    hotswap_adapter(swapped, str(tmp_path / "b"), adapter_name="default", torch_device="cpu")
    assert torch.equal(logits(swapped), logits(second))
    assert not torch.equal(logits(first), logits(second))


def test_auto_model(stock):
    """AutoPeftModelForCausalLM finds the base by the local path in adapter_config.json; with our configuration it is frozen."""
    root, _ = stock
    folder = root / "nvfp4-fp32"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(root / "base-fp32")
    model = AutoPeftModelForCausalLM.from_pretrained(folder, config=NVFP4LoraConfig.from_pretrained(folder))
    assert len(frozen_lora(model)) == 14
    expected = PeftModel.from_pretrained(
        freeze_model(AutoModelForCausalLM.from_pretrained(root / "base-fp32"), accuracy="high"), folder
    )
    assert torch.equal(logits(model), logits(expected))


@by_backend
def test_load_adapter_of_transformers(llama, tmp_path, backend):
    """transformers' own integration injects the layers without a PeftModel around the model."""
    model = trained(llama(), backend=backend)
    model.save_pretrained(str(tmp_path))
    again = freeze_model(llama(), backend)
    again.load_adapter(str(tmp_path))
    assert len(frozen_lora(again)) == 14
    assert torch.equal(logits(again), logits(model))


def test_mixed_model_over_a_frozen_base(llama):
    """mixed=True makes another tuner class (MixedModel), which asks LoraModel for its layers."""
    torch.manual_seed(3)
    model = get_peft_model(freeze_model(llama()), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), mixed=True)
    torch.manual_seed(3)
    usual = get_peft_model(freeze_model(llama()), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert len(frozen_lora(model)) == 2
    assert torch.equal(logits(model), logits(usual))


def test_mixed_model_freezes_a_dense_base(llama):
    model = get_peft_model(llama(), config(), mixed=True)
    assert len(frozen_lora(model)) == 14, "backend='nvfp4' was asked for"


@by_backend
def test_inject_adapter_in_model(llama, backend):
    """The model itself stays the outermost module, and computes what get_peft_model's does."""
    torch.manual_seed(3)
    model = inject_adapter_in_model(config(backend=backend, init_lora_weights=False), llama())
    torch.manual_seed(3)
    usual = get_peft_model(llama(), config(backend=backend, init_lora_weights=False))
    assert not isinstance(model, PeftModel) and len(frozen_lora(model)) == 14
    assert torch.equal(logits(model), logits(usual))
    train(model)
    assert not torch.equal(logits(model), logits(usual))


# ---------------------------------------------------------------------------------------------- heads and modules to save


def tiny_classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    settings = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForSequenceClassification(LlamaConfig(**settings, vocab_size=128, num_labels=3, pad_token_id=0))


@by_backend
def test_sequence_classification(tmp_path, backend):
    """PEFT trains the new head "score" and saves it with the adapter, so it must stay dense."""
    settings = dict(r=4, target_modules="all-linear", task_type="SEQ_CLS", backend=backend)
    model = get_peft_model(tiny_classifier(), NVFP4LoraConfig(**settings))
    score = model.base_model.model.score.modules_to_save["default"]
    assert type(score) is nn.Linear and score.weight.requires_grad and score.weight.dtype == torch.float32
    before = score.weight.clone()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    for _ in range(2):
        model(input_ids=IDS, labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(score.weight, before)
    model.save_pretrained(str(tmp_path))
    assert torch.equal(adapter_tensors(model)["base_model.model.score.weight"], score.weight)
    torch.manual_seed(99)
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_classifier(), str(tmp_path), config=read)
    assert torch.equal(logits(again), logits(model))


@by_backend
@pytest.mark.parametrize("saved", ["lm_head", "down_proj", "mlp"])
def test_modules_to_save_stay_dense_and_train(llama, tmp_path, backend, saved):
    model = get_peft_model(llama(), config(backend=backend, target_modules=["q_proj", "o_proj"], modules_to_save=[saved]))
    wrapped = [(n, m) for n, m in model.named_modules() if n.endswith(saved) and hasattr(m, "modules_to_save")]
    assert len(wrapped) == (1 if saved == "lm_head" else 2)
    start = {n: p.clone() for n, p in model.named_parameters()}
    for name, module in wrapped:
        linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
        assert linears and all(type(m) is nn.Linear for m in linears), name
    train(model)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {n for n in start if "lora_" in n or "modules_to_save" in n}
    model.save_pretrained(str(tmp_path))
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), str(tmp_path), config=read)), logits(model))


@pytest.mark.parametrize("kind", [LoraConfig, NVFP4LoraConfig], ids=lambda k: k.__name__)
def test_modules_to_save_of_a_frozen_module_is_explained(llama, kind):
    """Packed bytes cannot be trained. The error must name the module and the way out, not PyTorch's complaint about dtypes."""
    model = freeze_model(llama())
    with pytest.raises(ValueError, match="(?s)down_proj.*(skip_modules|dequantize)"):
        get_peft_model(model, kind(target_modules=["q_proj"], modules_to_save=["down_proj"]))


@by_backend
def test_trainable_tokens(llama, tmp_path, backend):
    """Chosen rows of the embedding train beside the adapter; the other rows do not move."""
    assert {14, 21} <= set(IDS.flatten().tolist())
    model = trained(llama(), backend=backend, trainable_token_indices=[14, 21])
    rows = model.get_input_embeddings().token_adapter.get_merged_weights(["default"])
    changed = (rows != llama().model.embed_tokens.weight).any(1).nonzero().flatten().tolist()
    assert changed == [14, 21]
    model.save_pretrained(str(tmp_path))
    read = NVFP4LoraConfig.from_pretrained(str(tmp_path))
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), str(tmp_path), config=read)), logits(model))


@by_backend
def test_layer_replication_shares_the_packed_weights(llama, backend):
    """Layers 0 and 1, twice: four layers over the storage of two, each with an adapter of its own."""
    plain = freeze_model(llama(), backend)
    model = get_peft_model(llama(), config(backend=backend, layer_replication=[[0, 2], [0, 2]]))
    layers = model.base_model.model.model.layers
    assert len(layers) == 4 and len(frozen_lora(model)) == 28
    assert frozen_bytes(model) == frozen_bytes(plain)
    for i in (0, 1):
        a, b = layers[i].mlp.up_proj, layers[i + 2].mlp.up_proj
        shared = a.base_layer.packed_tensors()
        assert all(t.data_ptr() == b.base_layer.packed_tensors()[n].data_ptr() for n, t in shared.items())
        assert a.lora_A["default"].weight.data_ptr() != b.lora_A["default"].weight.data_ptr()
    train(model)
    assert all(m.lora_B["default"].weight.abs().max() > 0 for m in frozen_lora(model).values())


# ---------------------------------------------------------------------------------------------- selection of modules


@pytest.mark.parametrize(
    "settings, expected",
    [
        pytest.param(dict(target_modules="all-linear"), ALL, id="all-linear"),
        pytest.param(dict(target_modules=["q_proj", "down_proj"]), {n for n in ALL if n[-6:] in ("q_proj", "n_proj")}, id="list"),
        pytest.param(dict(target_modules=r".*layers\.1\.mlp\.(up|gate)_proj"), {"1.mlp.up_proj", "1.mlp.gate_proj"}, id="regex"),
        pytest.param(
            dict(target_modules="all-linear", exclude_modules=["o_proj", "mlp.up_proj"]),
            {n for n in ALL if not n.endswith(("o_proj", "up_proj"))},
            id="exclude_modules",
        ),
        pytest.param(
            dict(target_modules=["v_proj"], layers_to_transform=[1], layers_pattern="layers"),
            {"1.self_attn.v_proj"},
            id="layers_to_transform",
        ),
    ],
)
def test_selection(llama, settings, expected):
    """The adapter goes where PEFT's rules say; everything is frozen whether it gets one or not."""
    model = get_peft_model(llama(), config(**settings))
    assert set(frozen_lora(model)) == expected
    assert len(frozen_layers(model)) == 14
    assert type(model.base_model.model.lm_head) is nn.Linear
    trainable = {n.split("layers.")[-1].split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == expected


def test_rank_and_alpha_patterns(llama):
    settings = dict(rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8}, alpha_pattern={"q_proj": 32}, use_rslora=True)
    layers = frozen_lora(get_peft_model(llama(), config(**settings)))
    ranks = {n: m.r["default"] for n, m in layers.items()}
    assert ranks == {n: 2 if "q_proj" in n else 8 if n == "1.mlp.up_proj" else 4 for n in ALL}
    assert layers["0.self_attn.q_proj"].scaling["default"] == 32 / 2**0.5
    assert layers["0.self_attn.k_proj"].scaling["default"] == 8 / 2


# ---------------------------------------------------------------------------------------------- other methods

OTHER_TUNERS = {
    "IA3": lambda: IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "BOFT": lambda: BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
    "OFT": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=["q_proj"]),
    "AdaLora": lambda: AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj"]),
    "Vera": lambda: VeraConfig(r=4, target_modules=["q_proj"]),
}
by_tuner = pytest.mark.parametrize("make", OTHER_TUNERS.values(), ids=OTHER_TUNERS.keys())


@by_backend
@by_tuner
def test_other_tuners_are_refused_and_change_nothing(llama, backend, make):
    model = freeze_model(llama(), backend)
    modules, trainable, tensors = snapshot(model)
    other = make()
    with pytest.raises(ValueError, match=rf"{type(other).__name__}.*model\.layers\.0\.self_attn\.q_proj.*{backend}.*LoraConfig"):
        get_peft_model(model, other)
    after = snapshot(model)
    assert after[0] == modules
    assert same_tensors(after[2], tensors)
    assert not hasattr(model, "peft_config")


def test_a_refused_tuner_does_not_freeze_the_rest_of_the_model(llama):
    """Norms, embeddings and the head train or do not train as before the failed call."""
    model = freeze_model(llama())
    before = snapshot(model)[1]
    assert any(before.values())
    with pytest.raises(ValueError, match="IA3Config"):
        get_peft_model(model, OTHER_TUNERS["IA3"]())
    assert snapshot(model)[1] == before


def test_a_refused_tuner_leaves_existing_adapters_alone(llama):
    """PEFT lets a second get_peft_model stack another method onto a LoRA model (with a warning)."""
    model = trained(llama())
    modules, _, tensors = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="IA3Config"):
            get_peft_model(model, OTHER_TUNERS["IA3"]())
    after = snapshot(model)
    assert after[0] == modules
    assert same_tensors(after[2], tensors)


def test_other_tuners_may_leave_frozen_layers_out(llama):
    """IA3 on a layer that was left dense works beside frozen ones."""
    model = freeze_model(llama(), skip_modules=["q_proj"])
    model = get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    train(model)
    scale = model.base_model.model.model.layers[0].self_attn.q_proj.ia3_l["default"]
    assert (scale != 1).any()


@by_backend
def test_prompt_tuning_over_a_frozen_base(llama, backend):
    model = get_peft_model(freeze_model(llama(), backend), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert len(frozen_layers(model)) == 14 and all(isinstance(m, FrozenLinear) for _, m in frozen_layers(model))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["prompt_encoder.default.embedding.weight"]
    losses = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("made_by", ["LoraConfig", "NVFP4LoraConfig"])
def test_target_parameters_of_a_frozen_weight(llama, made_by):
    model = llama()
    if made_by == "LoraConfig":
        freeze_model(model)
        lora = LoraConfig(target_modules=[], target_parameters=["q_proj.weight"])
    else:
        lora = config(target_modules=[], target_parameters=["q_proj.weight"])
    with pytest.raises(ValueError, match="target_parameters.*'weight'.*nvfp4.*target_modules.*skip_modules"):
        get_peft_model(model, lora)
    dense = get_peft_model(llama(), config(target_modules=[], target_parameters=["q_proj.weight"], skip_modules=["q_proj"]))
    assert type(dense.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "ParamWrapper"
    before = logits(dense)
    train(dense)
    assert not torch.equal(logits(dense), before)
