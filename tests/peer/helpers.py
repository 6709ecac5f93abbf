"""PEFT's common helpers (``PeftCommonTester._test_*``) with this package's config in place of ``LoraConfig``.

Run by ``run.py``, which puts PEFT's ``tests`` package on the path; the file's name keeps it out of the ordinary suite. A row is

* a base: ``nvfp4``, ``nf4``, ``bf16``, or ``stock`` (plain PEFT on the dense model: what fails there is nothing of ours);
* how it gets frozen: ``loaded`` (the model comes frozen, as in a QLoRA script) or ``config`` (``NVFP4LoraConfig`` freezes it);
* a model and an adapter setting.

Merging into 4 bits rounds, and a merged-and-unloaded NVFP4 layer no longer rounds its input, so the helpers that compare merged
logits cannot hold PEFT's 1e-4 to 1e-6 for dense weights there. Where one of them fails only for that, it is run again with the
criterion of PEFT's own matrix of quantised backends (``test_quantization.check_outputs_similar``: correlation at least 0.9, mean
squared error at most 1), which is reported apart.
"""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.test_custom_models import MLP
from tests.test_quantization import DEVICE, check_outputs_similar
from tests.test_quantization import TestQuantization as QuantizedMatrixOfPeft
from tests.testing_common import PeftCommonTester
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from tests import testing_common

GATED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llama": ("trl-internal-testing/tiny-random-LlamaForCausalLM", GATED),
    "qwen2": ("peft-internal-testing/tiny-dummy-qwen2", GATED),
    "opt": ("peer/tiny-opt", ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]),
    "mlp10": ("MLP", ["lin0", "lin1"]),
}
SETTINGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.1},
    "bias": {"bias": "all"},
    "adapters": {},  # a second adapter, never active, is there from the start
}

WITH_EFFECT, AS_MADE = {"init_lora_weights": False}, {}
HELPERS = {
    "model_attr": (AS_MADE, {}),
    "adapter_name": (AS_MADE, {}),
    "prepare_for_training": (AS_MADE, {}),
    "load_model_low_cpu_mem_usage": (AS_MADE, {}),
    "save_pretrained": (WITH_EFFECT, {}),
    "save_pretrained-pickle": (WITH_EFFECT, {"safe_serialization": False}),
    "save_pretrained_selected_adapters": (WITH_EFFECT, {}),
    "save_pretrained_selected_adapters-pickle": (WITH_EFFECT, {"safe_serialization": False}),
    "save_pretrained_adapter_name_substring": (AS_MADE, {}),
    "from_pretrained_config_construction": (AS_MADE, {}),
    "load_multiple_adapters": (AS_MADE, {}),
    "add_adapter_no_autocast_adapter_dtype-fp16": (AS_MADE, {"dtype": torch.float16}),
    "add_adapter_no_autocast_adapter_dtype-bf16": (AS_MADE, {"dtype": torch.bfloat16}),
    "merge_layers": (WITH_EFFECT, {}),
    "merge_layers_multi": (WITH_EFFECT, {}),
    "merge_layers_nan": (WITH_EFFECT, {}),
    "merge_layers_fp16": (AS_MADE, {}),
    "merge_layers_is_idempotent": (WITH_EFFECT, {}),
    "safe_merge": (WITH_EFFECT, {}),
    "mixed_adapter_batches": (WITH_EFFECT, {}),
    "generate_with_mixed_adapter_batches_and_beam_search": (WITH_EFFECT, {}),
    "generate": (AS_MADE, {}),
    "generate_pos_args": (AS_MADE, {"raises_err": False}),
    "generate_half_prec": (AS_MADE, {}),
    "training": (AS_MADE, {}),
    "inference_safetensors": (WITH_EFFECT, {}),
    "training_layer_indexing": (AS_MADE, {}),
    "training_gradient_checkpointing-reentrant": (AS_MADE, {"use_reentrant": True}),
    "training_gradient_checkpointing-not": (AS_MADE, {"use_reentrant": False}),
    "peft_model_device_map": (AS_MADE, {}),
    "delete_adapter": (AS_MADE, {}),
    "delete_inactive_adapter": (AS_MADE, {}),
    "delete_unknown_adapter_raises": (AS_MADE, {}),
    "adding_multiple_adapters_with_bias_raises": (AS_MADE, {}),
    "unload_adapter": (WITH_EFFECT, {}),
    "weighted_combination_of_adapters": (AS_MADE, {}),
    "disable_adapter": (WITH_EFFECT, {}),
    "passing_input_embeds_works": (AS_MADE, {}),
    "lora_conversion": (WITH_EFFECT, {}),
    "get_base_model_state_dict": (AS_MADE, {}),
}
"""Helper (after the dash: a variant) -> (settings of the adapter, arguments), as PEFT's own files call them."""

TEXT_ONLY = """
prepare_for_training mixed_adapter_batches generate_with_mixed_adapter_batches_and_beam_search generate generate_pos_args
generate_half_prec training_layer_indexing training_gradient_checkpointing-reentrant training_gradient_checkpointing-not
passing_input_embeds_works lora_conversion save_pretrained_selected_adapters save_pretrained_selected_adapters-pickle
merge_layers_multi merge_layers_nan weighted_combination_of_adapters disable_adapter
""".split()
"""Not called for the MLP by PEFT either: tokens, decoder layers or a model with a config are needed."""

MERGED = ("merge_layers", "merge_layers_multi", "merge_layers_nan", "safe_merge")


def rows() -> list:
    found = []
    for base in ("nvfp4", "nf4", "bf16", "stock"):
        for model in MODELS:
            for setting in SETTINGS:
                both = base != "stock" and (setting == "plain" or model == "llama")
                ways = ["loaded", "config"] if both else ["loaded"]
                found += [
                    pytest.param(base, way, model, setting, helper, id=f"{base}-{way}-{model}-{setting}-{helper}")
                    for way in ways
                    for helper in HELPERS
                    if not (model == "mlp10" and helper in TEXT_ONLY)
                ]
    return found


class Tester(PeftCommonTester):
    """PEFT's tester for one model; what it calls ``transformers_class`` is :class:`Loader`."""

    def __init__(self, model: str, base: str, way: str) -> None:
        self.model, self.transformers_class = model, Loader(base, way)

    def prepare_inputs_for_testing(self) -> dict[str, torch.Tensor]:
        if self.model == "mlp10":
            inputs = {"X": torch.arange(90).view(9, 10)}
        else:
            inputs = {"input_ids": torch.tensor([[1, 1, 1], [1, 2, 1]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}
        return {name: tensor.to(self.torch_device) for name, tensor in inputs.items()}


class Loader:
    """The base model, the same at every call. A folder is what a test has saved: a dense model."""

    def __init__(self, base: str, way: str) -> None:
        self.backend = None if base == "stock" or way == "config" else base

    def from_pretrained(self, name: str, dtype: torch.dtype | None = None, **kwargs: object) -> torch.nn.Module:
        if name in {known for known, _ in MODELS.values()} and not kwargs:
            return copy.deepcopy(made(self.backend, name, dtype or torch.float32))
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype or torch.float32, **kwargs)


@functools.cache
def made(backend: str | None, name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A base model that is only copied from: quantising it takes longer than most of the tests."""
    if name == "MLP":
        torch.manual_seed(0)
        model = MLP().to(dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return freeze_model(model, backend, progress=False) if backend else model


class OwnLoading(PeftModel):
    """``PeftModel`` that reads an adapter's side-car: how an adapter is loaded onto a dense model that it shall freeze."""

    @classmethod
    def from_pretrained(cls, model, folder, *args, config=None, **kwargs):
        config = config or NVFP4LoraConfig.from_pretrained(folder)
        return PeftModel.from_pretrained(model, folder, *args, config=config, **kwargs)


class Similar:
    """PEFT's criterion for quantised weights in place of ``allclose``: what has to differ must differ by it as well."""

    def __init__(self, helper: str) -> None:
        self.exactly, self.allclose = helper == "safe_merge", torch.allclose  # which first asks whether an adapter does anything

    def __call__(self, x: torch.Tensor, y: torch.Tensor, **tolerances: float) -> bool:
        exactly, self.exactly = self.exactly or tolerances.get("atol") == 1e-10, False
        if exactly:
            return self.allclose(x, y, **tolerances)
        try:
            check_outputs_similar(x.float(), y.float())
        except AssertionError:
            return False
        return True


def with_bystander(model, config, adapter_name="default", **kwargs):
    peft_model = get_peft_model(model, config, adapter_name=adapter_name, **kwargs)
    own = {"backend": config.backend} if isinstance(config, NVFP4LoraConfig) else {}
    peft_model.add_adapter("bystander", type(config)(r=4, target_modules=config.target_modules, **own))
    return peft_model


@contextlib.contextmanager
def patched(base: str, way: str, setting: str):
    """Names in PEFT's module that the row gives another meaning."""
    with contextlib.ExitStack() as stack:
        if base != "stock":  # some helpers ask "is it LoraConfig itself"
            stack.enter_context(mock.patch.object(testing_common, "LoraConfig", NVFP4LoraConfig))
        if way == "config":
            stack.enter_context(mock.patch.object(testing_common, "PeftModel", OwnLoading))
        if setting == "adapters":
            stack.enter_context(mock.patch.object(testing_common, "get_peft_model", with_bystander))
        yield


@pytest.mark.parametrize("base, way, model, setting, helper", rows())
def test_helper(base, way, model, setting, helper, record_property):
    name, targets = MODELS[model]
    initial, arguments = HELPERS[helper]
    own = {} if base == "stock" else {"backend": base}
    kind = LoraConfig if base == "stock" else NVFP4LoraConfig
    task = {} if model == "mlp10" else {"task_type": "CAUSAL_LM"}
    first = ("",) if helper == "passing_input_embeds_works" else ()

    def call() -> None:
        torch.manual_seed(0)
        kwargs = {"target_modules": list(targets), "r": 8, **task, **SETTINGS[setting], **initial, **own}
        method = getattr(Tester(model, base, way), "_test_" + helper.partition("-")[0])
        with patched(base, way, setting):
            method(*first, name, kind, kwargs, **arguments)

    if base not in ("nvfp4", "nf4") or helper not in MERGED:
        return call()
    try:
        call()
    except AssertionError:
        with mock.patch.object(torch, "allclose", Similar(helper)):
            call()
        record_property("criterion", "quantised")


# ---------------------------------------------------------------------------------------------- matrix of quantised backends
class Quantised:
    """One of our bases as a row of ``test_quantization``."""

    supports_merge = supports_non_quantized_comparison = True
    model_id = "peft-internal-testing/opt-125m"
    expected_layer_count = 24  # q_proj and v_proj of 12 layers

    def __init__(self, backend: str) -> None:
        self.name = backend

    def load_model(self) -> torch.nn.Module:
        return freeze_model(AutoModelForCausalLM.from_pretrained(self.model_id).to(DEVICE), self.name, progress=False)


@pytest.mark.parametrize("setting", ["plain", "rslora", "dora"])
@pytest.mark.parametrize(
    "method",
    [
        "quantization_backend_is_set_and_repr",
        "forward_changes_output",
        "quantized_output_similar_to_non_quantized",
        "merge_unmerge_unload",
    ],
)
@pytest.mark.parametrize("base", ["nvfp4", "nf4", "bf16"])
def test_matrix(base, method, setting):
    torch.manual_seed(0)
    settings = {"r": 8, "target_modules": ["q_proj", "v_proj"], **SETTINGS[setting]}
    inputs = () if method.startswith("quantization_backend") else (torch.arange(10).view(1, -1).to(DEVICE),)
    getattr(QuantizedMatrixOfPeft(), f"test_{method}")(LoraConfig, settings, Quantised(base), *inputs)
