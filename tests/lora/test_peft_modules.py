"""Which modules train in a frozen model: those that PEFT's rules select for LoRA, new heads, modules to save, chosen tokens and
layers used twice; and PEFT's other methods, which are refused where they would have to change a frozen layer."""

import pytest
import torch
from _frozen_models import IDS
from _peft_models import ALL, adapter_tensors, by_backend, config, frozen_lora, logits, same_tensors, snapshot, train, trained
from peft import AdaLoraConfig, BOFTConfig, IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers


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


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(target_modules="all-linear", exclude_modules=["o_proj"]), {n for n in ALL if not n.endswith("o_proj")}),
        (dict(target_modules=["v_proj"], layers_to_transform=[1], layers_pattern="layers"), {"1.self_attn.v_proj"}),
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


OTHER_TUNERS = {
    "IA3": lambda: IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "BOFT": lambda: BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
    "OFT": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=["q_proj"]),
    "AdaLora": lambda: AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj"]),
    "Vera": lambda: VeraConfig(r=4, target_modules=["q_proj"]),
}
TUNERS = [pytest.param(make, False, id=name) for name, make in OTHER_TUNERS.items()]
TUNERS += [pytest.param(OTHER_TUNERS["IA3"], True, id="IA3 beside LoRA")]


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@by_backend
@pytest.mark.parametrize("make, adapted", TUNERS)
def test_other_tuners_are_refused_and_change_nothing(llama, backend, make, adapted):
    """PEFT lets a second get_peft_model stack another method onto a LoRA model (with a warning)."""
    model = trained(llama(), backend=backend) if adapted else freeze_model(llama(), backend)
    modules, trainable, tensors = snapshot(model)
    assert any(trainable.values())
    other = make()
    with pytest.raises(ValueError, match=rf"{type(other).__name__}.*model\.layers\.0\.self_attn\.q_proj.*{backend}.*LoraConfig"):
        get_peft_model(model, other)
    after = snapshot(model)
    assert after[:2] == (modules, trainable)
    assert same_tensors(after[2], tensors)
    assert hasattr(model, "peft_config") == adapted


def test_other_tuners_may_leave_frozen_layers_out(llama):
    """IA3 on a layer that was left dense works beside frozen ones."""
    model = freeze_model(llama(), skip_modules=["q_proj"])
    model = get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    train(model)
    scale = model.base_model.model.model.layers[0].self_attn.q_proj.ia3_l["default"]
    assert (scale != 1).any()


def test_target_parameters_of_a_frozen_weight(llama):
    """A linear that is packed already cannot be a target parameter; one that will be stays dense."""
    asked = dict(target_modules=[], target_parameters=["q_proj.weight"])
    with pytest.raises(ValueError, match="target_parameters.*'weight'.*nvfp4.*target_modules.*skip_modules"):
        get_peft_model(freeze_model(llama()), LoraConfig(**asked))
    dense = get_peft_model(llama(), config(**asked))
    assert type(dense.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "ParamWrapper"
    before = logits(dense)
    train(dense)
    assert not torch.equal(logits(dense), before)
