"""vLLM's own loader on exported NVFP4 checkpoints of several families: it makes the parameters that the settings ask for and
fills them from the files. Nothing is computed: experts in NVFP4, and images, need a GPU or packages that are not here.

Every tensor of vLLM's model is then compared with the frozen model: q/k/v and gate/up are one matrix there, experts one tensor.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from _families import SIZES, idefics3
from _vllm import vllm  # noqa: F401
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_w4a4_nvfp4
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_scales
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from peft_nvfp4 import export_checkpoint, freeze_model

LAYOUTS = ("compressed-tensors", "modelopt")
WIDE = SIZES | dict(hidden_size=128, intermediate_size=256)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=64)


def qwen2():
    """Biases of q/k/v, tied embeddings."""
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**WIDE, tie_word_embeddings=True))


def qwen3_moe():
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**WIDE, **EXPERTS, num_experts=4, head_dim=32))


def mixtral():
    """Other names in the files than in transformers' model: block_sparse_moe, w1, w3."""
    return hf.MixtralForCausalLM(hf.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2))


def deepseek_v3():
    """Latent attention, a dense layer before the experts, shared experts."""
    latent = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32)
    experts = EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, topk_method="noaux_tc", first_k_dense_replace=1)
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**WIDE, **latent, **experts))


def qwen3_next():
    """Linear attention in three of four layers, a gate for the shared expert. (Published ones have an MTP layer, which
    transformers does not load and so does not save.)"""
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
    experts = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=64)
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**WIDE | {"num_hidden_layers": 4}, **linear, **experts, head_dim=32))


FAMILIES = {make.__name__: make for make in (qwen2, qwen3_moe, mixtral, deepseek_v3, qwen3_next, idefics3)}


@pytest.fixture
def kernels(monkeypatch):
    """vLLM chooses the kernels that it would on a GPU without FP4 tensor cores."""
    monkeypatch.setattr(MarlinNvFp4LinearKernel, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    for module in (modelopt, compressed_tensors_moe_w4a4_nvfp4):
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda **_: (NvFp4MoeBackend.MARLIN, None))
    yield
    cleanup_dist_env_and_memory()


def load_in_vllm(folder: Path) -> torch.nn.Module:
    """vLLM's model with the tensors of the files, before kernels repack them. What was not loaded is NaN."""
    settings = EngineArgs(str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    config = settings.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel()
        model = initialize_model(vllm_config=config)
        for p in model.parameters():
            if p.is_floating_point():
                p.data.view(torch.uint8 if p.itemsize == 1 else p.dtype).fill_(0x7F if p.itemsize == 1 else float("nan"))
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def rows(pairs) -> list[bytes]:
    """Rows of codes with the block scales that belong to them, sorted, of (codes (..., N, K / 2), scales (..., N, K / 16))."""
    found = []
    for codes, scales in pairs:
        joined = torch.cat([codes.flatten(0, -2), scales.view(torch.uint8).flatten(0, -2)], -1)
        found += [row.numpy().tobytes() for row in joined]
    return sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_loaded(tmp_path, kernels, family, layout):
    torch.manual_seed(0)
    frozen = freeze_model(FAMILIES[family]().bfloat16(), "nvfp4", progress=False)
    export_checkpoint(frozen, tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    served = {name: p.detach() for name, p in load_in_vllm(tmp_path).named_parameters()}
    codes = "weight_packed" if layout == "compressed-tensors" else "weight"
    gscale = "weight_global_scale" if layout == "compressed-tensors" else "weight_scale_2"

    def pairs(tensors):
        names = [name.removesuffix(codes) for name, t in tensors.items() if name.endswith(codes) and t.dtype == torch.uint8]
        return [(tensors[name + codes], tensors[f"{name}weight_scale"]) for name in names]

    assert rows(pairs(served)) == rows(pairs(stored))
    for name, t in served.items():
        if name.endswith(gscale):
            one_matrix = t[:, None] if ".w2_" in name else t  # (experts,): each has its own
            assert t.isfinite().all() and (one_matrix.amin(-1) == one_matrix.amax(-1)).all(), name
        elif t.dtype == torch.bfloat16 and not name.endswith(("_scale", "zero_point")):  # of inputs, keys, values: in no file
            assert not t.isnan().any(), name


def test_no_block_is_lost_where_the_gpu_kernel_rewrites_the_scales(tmp_path):
    """Marlin takes E4M3 scales in another format, in which those below 2^-6 are zero."""
    export_checkpoint(freeze_model(qwen2().bfloat16(), "nvfp4", progress=False), tmp_path)
    for name, scales in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("weight_scale"):
            rewritten, factor = nvfp4_marlin_process_scales(scales.T.contiguous().bfloat16())
            assert factor == 1 and (rewritten.view(torch.uint8) == 0).sum() == (scales.float() == 0).sum(), name
