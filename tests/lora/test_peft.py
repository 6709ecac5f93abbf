"""The package beside stock PEFT: adapters that one saves and the other loads, plain LoRA as in a process that imported only PEFT,
and the hooks in PEFT's classes, which can be taken out again.

What needs a PEFT that never saw this package runs in one subprocess for the whole file (:func:`stock`)."""

import inspect
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from _peft_models import (
    ALL,
    BACKENDS,
    DEFAULTS,
    U,
    adapter_tensors,
    by_backend,
    config,
    frozen_lora,
    logits,
    same_tensors,
    train,
    trained,
)
from conftest import tiny_llama
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, modeling_utils

from peft_nvfp4 import NVFP4LoraConfig, freeze_model, register, unregister
from peft_nvfp4.lora.config import SIDE_CAR
from peft_nvfp4.quantization.freeze import frozen_layers


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
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=120)
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
    case, autocast, factor = {"fp32-adapters": ("bf16", True, 5), "bf16-adapters": ("bf16, BF16 adapters", False, 4)}[adapters]
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
def test_what_an_adapter_folder_holds(stock, backend):
    """adapter_config.json has the keys of stock PEFT's, nothing else; the side-car has our fields."""
    root, _ = stock
    ours = json.loads((root / f"{backend}-fp32" / "adapter_config.json").read_text())
    theirs = json.loads((root / "stock" / "adapter_config.json").read_text())
    assert ours.keys() == theirs.keys() and ours["peft_type"] == "LORA"
    side_car = json.loads((root / f"{backend}-fp32" / SIDE_CAR).read_text())
    assert side_car == {"format_version": 1, **DEFAULTS, "backend": backend}


def test_an_adapter_of_stock_peft_loads(stock):
    """No side-car: own fields get their defaults. With backend="bf16" its logits are stock PEFT's (bound as above)."""
    root, out = stock
    read = NVFP4LoraConfig.from_pretrained(root / "stock")
    assert read.options == NVFP4LoraConfig().options
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
    owners = {"LoraModel", "BaseTuner", "MixedModel", "PeftModel", "LoraConfig", "PeftConfigMixin"}
    assert {key[0] for key in stock[1]["hooked"]} <= owners
    assert stock[1]["left behind"] == []


@pytest.mark.parametrize("owner, name", [(modeling_utils, "get_hf_quantizer"), (DistributedDataParallel, "__init__")])
def test_hooks_outside_of_peft_come_off(owner, name):
    hooked = getattr(owner, name)
    unregister()
    try:
        assert getattr(owner, name) is hooked.__wrapped__
    finally:
        register()
    register()
    assert getattr(owner, name).__wrapped__ is hooked.__wrapped__, "one layer of wrapping"


def test_registering_twice_is_harmless():
    before = hooked_functions()
    register()
    register()
    assert all(a is b for a, b in zip(before, hooked_functions()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config()
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
    with pytest.warns(UserWarning, match="not registered"):
        lora = config()
    model = get_peft_model(llama(), lora)
    assert frozen_layers(model) == [] and frozen_lora(model) == {}
    frozen = get_peft_model(freeze_model(llama()), LoraConfig(target_modules=["q_proj"]))
    assert type(frozen.base_model.model.model.layers[0].self_attn.q_proj) is peft.tuners.lora.Linear
