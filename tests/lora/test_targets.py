"""What becomes of a model's modules is known before it is frozen: what PEFT trains in full stays dense, "all-linear" leaves out
what LoRA does not work on, towers without an adapter stay as they are, and a weight that is read past its layer is not packed."""

import warnings

import pytest
import torch
import transformers as hf
from _families import IDS, SIZES, causal, idefics3, image_for
from _peft_models import config, train
from peft import LoraConfig, get_peft_model
from torch import nn

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, detach, freeze_model, merge
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.nn.frozen_linear import FrozenLinear
from peft_nvfp4.quantization.freeze import frozen_layers

ALL = dict(r=4, target_modules="all-linear", init_lora_weights=False)


def distilbert():
    torch.manual_seed(0)
    sizes = dict(dim=64, hidden_dim=96, n_layers=2, n_heads=4, vocab_size=128, num_labels=3)
    return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**sizes))


# ---------------------------------------------------------------------------------------------- trained in full


@pytest.mark.parametrize("targets", ("all-linear", ["q_lin", "v_lin"]))
def test_what_peft_trains_in_full_stays_dense(backend, targets):
    """PEFT takes modules_to_save for plain endings: the new head "classifier" is "pre_classifier" as well."""
    model = get_peft_model(distilbert(), NVFP4LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS", backend=backend))
    for head in (model.base_model.model.pre_classifier, model.base_model.model.classifier):
        assert type(head.modules_to_save["default"]) is nn.Linear
    model(input_ids=IDS, labels=torch.tensor([0, 2])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad)
    merged, _ = merge(model, to="fp32")
    assert not frozen_layers(merged) and merged(IDS).logits.isfinite().all()


def test_a_frozen_module_that_peft_would_train_is_refused():
    model = freeze_model(distilbert(), progress=False)
    with pytest.raises(ValueError, match=r"names pre_classifier, .*skip_modules=\['pre_classifier'\]"):
        get_peft_model(model, LoraConfig(target_modules=["q_lin"], modules_to_save=["classifier"]))


# ---------------------------------------------------------------------------------------------- all-linear


def llama4():
    torch.manual_seed(0)
    layers = dict(layer_types=["full_attention"] * 2, no_rope_layers=[1, 1], moe_layers=[0, 1], num_local_experts=4)
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, head_dim=16, intermediate_size_mlp=96, **layers))


MAMBA2 = dict(mamba_num_heads=8, mamba_head_dim=16, n_groups=1, ssm_state_size=16, head_dim=16)
BLOCKS = dict(layers_block_type=["mamba", "attention"])
BAMBA = dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
FALCON = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128, mamba_n_groups=1, mamba_d_state=16, head_dim=16)
LONGCAT = dict(num_layers=1, expert_ffn_hidden_size=48, n_routed_experts=4, zero_expert_num=2, moe_topk=2, qk_head_dim=32)
LONGCAT |= dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, head_dim=16)
LEFT_OUT = {  # model, linears without an adapter, why
    "llama4": (llama4, {"router"}, "a Llama4Router is more than a linear"),
    "nemotron-h": (causal("NemotronH", **MAMBA2, **BLOCKS), {"out_proj"}, "PEFT refuses it"),
    "falcon-h1": (causal("FalconH1", **FALCON), {"out_proj"}, "PEFT refuses it"),
    "bamba": (causal("Bamba", **BAMBA), {"out_proj"}, "reads its weight"),
}


@pytest.mark.parametrize("make, left, reason", LEFT_OUT.values(), ids=LEFT_OUT)
def test_all_linear_leaves_out_what_lora_does_not_work_on(backend, make, left, reason):
    """It says so, and trains and merges; what is left out stays dense, since a kernel may read its weight."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=f"leaves out .*{reason}"):
        model = get_peft_model(make(), NVFP4LoraConfig(**ALL, backend=backend))
    linears = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n}
    without = {n.rpartition(".")[2]: m for n, m in linears.items() if "base_layer" not in n and n != "lm_head"}
    assert without.keys() == left and not any(isinstance(m, FrozenLinear) for m in without.values())
    train(model, steps=1)
    merged, _ = merge(model, to="fp32", probe=IDS)
    assert merged(IDS).logits.isfinite().all()


def test_a_plain_config_on_a_packed_model_leaves_them_out_too():
    with pytest.warns(UserWarning, match="leaves out"):
        get_peft_model(freeze_model(llama4(), progress=False), LoraConfig(**ALL))(IDS)


def test_all_linear_is_known_where_peft_replaces_it():
    """For mixtures whose experts transformers renamed, it does so before it prepares the model."""
    with pytest.warns(UserWarning, match="leaves out 1 .*classifier .the model reads its weight"):
        model = get_peft_model(causal("LongcatFlash", **LONGCAT)(), NVFP4LoraConfig(**ALL))
    names = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert "q_a_proj" in names and "classifier" not in names


def test_named_targets_are_the_users_choice():
    with pytest.raises(ValueError, match="out_proj"):
        get_peft_model(causal("FalconH1", **FALCON)(), NVFP4LoraConfig(r=4, target_modules=["out_proj"]))


def test_a_usual_model_is_targeted_as_by_peft(llama):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(leaves out|no adapter)")
        ours = get_peft_model(llama(), config()).peft_config["default"].target_modules
    assert ours == get_peft_model(llama(), LoraConfig(target_modules="all-linear")).peft_config["default"].target_modules


# ---------------------------------------------------------------------------------------------- weights that are read


def test_weights_that_are_read_past_their_layer_are_not_packed(backend):
    """WavLM hands q, k and v to a function of PyTorch's: frozen, they would be bytes there."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, conv_dim=[32], conv_kernel=[8])
    model = hf.WavLMModel(hf.WavLMConfig(**sizes, conv_stride=[4], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4))
    model = freeze_model(model.eval(), backend, progress=False)
    assert model(torch.randn(1, 400)).last_hidden_state.isfinite().all()
    names = {name.rpartition(".")[2] for name, _ in frozen_layers(model)}
    assert "intermediate_dense" in names and not names & {"q_proj", "k_proj", "v_proj", "out_proj"}


@pytest.mark.parametrize("family", ("Rwkv", "LayoutLMv3"))
def test_weights_that_a_parent_or_a_helper_reads_are_not_packed(backend, family):
    """RWKV rescales those of its blocks, LayoutLMv3 looks up positions in one that it hands to a method."""
    rwkv = lambda: hf.RwkvModel(hf.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128, rescale_every=1))
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    layout = lambda: hf.LayoutLMv3Model(hf.LayoutLMv3Config(**sizes, visual_embed=False, coordinate_size=8, shape_size=16))
    model = freeze_model({"Rwkv": rwkv, "LayoutLMv3": layout}[family]().eval(), backend, progress=False)
    with torch.no_grad():
        assert model(IDS).last_hidden_state.isfinite().all() and frozen_layers(model)


@pytest.mark.parametrize("family", ("Llama", "Bloom", "Umt5"))
def test_weights_that_are_not_read_are_packed(family):
    """Bloom reads some where it repeats the rounding of its pretraining, T5's kin ask for a dtype."""
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0)
    makes = {"Llama": causal("Llama"), "Bloom": causal("Bloom", n_layer=1, n_head=4)}
    make = makes.get(family) or (lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**sizes)))
    packed = {n.rpartition(".")[2] for n, _ in frozen_layers(freeze_model(make(), progress=False))}
    assert packed >= {"Llama": {"q_proj", "down_proj"}, "Bloom": {"dense", "dense_4h_to_h"}, "Umt5": {"q", "wi_0"}}[family]


# ---------------------------------------------------------------------------------------------- towers


TOWER = "model.vision_model"


@pytest.mark.parametrize(
    "targets",
    (dict(exclude_modules=r".*vision_model.*"), dict(target_modules=r".*text_model.*_proj"), dict(exclude_modules=[])),
    ids=("excluded", "not-named", "adapted"),
)
def test_a_tower_without_adapter_stays_dense(backend, targets):
    """It computes what it did, to the bit; with an adapter it is packed like the rest."""
    torch.manual_seed(0)
    settings = NVFP4LoraConfig(**{**ALL, **targets}, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(idefics3(), settings)
    adapted = targets.get("exclude_modules") == []
    inside = [n for n, _ in frozen_layers(model) if TOWER in n]
    said = [w for w in caught if f"{TOWER} gets no adapter and stays dense" in str(w.message)]
    assert bool(inside) == adapted and bool(said) != adapted
    assert any("text_model" in n for n, _ in frozen_layers(model))
    model(**image_for(idefics3)).loss.backward()
    if not adapted:
        torch.manual_seed(0)
        pixels = image_for(idefics3)["pixel_values"][0]
        tower = lambda whole: whole.get_submodule(TOWER)(pixels).last_hidden_state
        assert torch.equal(tower(detach(model).base_model.model), tower(idefics3()))


def test_a_tower_stays_packed_where_it_was_packed_before():
    """Freezing is the user's word, by freeze_model or a PactConfig; adapters follow."""
    model = freeze_model(idefics3(), progress=False)
    model = get_peft_model(model, NVFP4LoraConfig(**ALL, exclude_modules=r".*vision_model.*"))
    towers = [m for n, m in model.named_modules() if TOWER in n and isinstance(m, FrozenLinear)]
    assert towers and not any(TOWER in n for n, m in model.named_modules() if isinstance(m, FrozenLoraLinear))


def test_skip_modules_of_a_pact_config_leaves_a_tower_dense(tmp_path):
    idefics3().save_pretrained(tmp_path)
    settings = PactConfig(skip_modules=["vision_model"])
    model = hf.Idefics3ForConditionalGeneration.from_pretrained(tmp_path, quantization_config=settings)
    assert frozen_layers(model) and not [n for n, _ in frozen_layers(model) if TOWER in n]


def test_a_linear_that_is_a_target_parameter_stays_dense(backend, llama):
    """PEFT makes target parameters of some routers by itself; such an adapter adds to the dense weight."""
    settings = dict(target_modules=["q_proj"], target_parameters=["mlp.down_proj.weight"])
    model = get_peft_model(llama(), NVFP4LoraConfig(r=4, init_lora_weights=False, backend=backend, **settings))
    assert type(model.base_model.model.model.layers[0].mlp.down_proj.get_base_layer()) is nn.Linear
    train(model, steps=1)
    assert merge(model, to="fp32", probe=IDS)[0](IDS).logits.isfinite().all()
