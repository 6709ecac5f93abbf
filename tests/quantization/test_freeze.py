"""Freezing a model in place: what is frozen and what is not, what freezing again does, that a refused call changes nothing, and
layers that share a weight."""

import warnings

import pytest
import torch
import transformers as hf
from _frozen_models import ALL, Unchanged, by_backend, by_packed_backend, config, names, packed
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from peft_nvfp4 import BACKENDS, NVFP4LoraConfig, freeze_model, frozen_bytes
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.quantization.freeze import frozen_layers
from peft_nvfp4.quantization.linears import is_plain_linear


@by_backend
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_plain_linear_but_the_head(llama, backend, tied):
    model = llama(tie_word_embeddings=tied)
    keep = {n: p for n, p in model.named_parameters() if not any(n.startswith(a) for a in ALL)}
    freeze_model(model, backend)
    assert names(model) == ALL
    assert all(type(m) is BACKENDS[backend] and not m.weight.requires_grad for _, m in frozen_layers(model))
    assert type(model.lm_head) is nn.Linear and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    now = dict(model.named_parameters())
    assert all(now[n] is p for n, p in keep.items()), "what is not frozen keeps its very parameters"


def test_a_linear_tied_to_an_embedding_under_another_name(llama):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.unembed = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
            self.unembed.weight = self.table.weight

    model = freeze_model(Tied())
    assert names(model) == {"inner"} and model.unembed.weight is model.table.weight


@pytest.mark.parametrize("head", ["lm_head", "embed_out", "score", "classifier", "qa_outputs"])
def test_heads_by_name(head):
    model = nn.ModuleDict({"body": nn.Linear(64, 64), head: nn.Linear(64, 8)})
    assert names(freeze_model(model)) == {"body"}


def test_a_head_by_get_output_embeddings():
    """BERT's head for masked words is called cls.predictions.decoder: only the model's class knows that it is one."""
    settings = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    model = hf.BertForMaskedLM(hf.BertConfig(**settings, tie_word_embeddings=False))
    freeze_model(model)
    assert type(model.cls.predictions.decoder) is nn.Linear
    assert "cls.predictions.transform.dense" in names(model)


@pytest.mark.parametrize(
    "skip, dense",
    [
        pytest.param("model.layers.0.mlp.up_proj", {"model.layers.0.mlp.up_proj"}, id="full-name"),
        pytest.param("q_proj", {n for n in ALL if n.endswith(".q_proj")}, id="last-component"),
        pytest.param("layers.1.mlp.up_proj", {"model.layers.1.mlp.up_proj"}, id="dotted-ending"),
        pytest.param("mlp", {n for n in ALL if ".mlp." in n}, id="ancestor"),
        pytest.param("layers.0", {n for n in ALL if ".layers.0." in n}, id="dotted-ancestor"),
        pytest.param("proj", set(), id="part-of-a-component-is-no-match"),
        pytest.param("layers.0.mlp.up", set(), id="start-of-a-component-is-no-match"),
    ],
)
@pytest.mark.parametrize("way", ["freeze_model", "config"])
def test_skip_modules(llama, skip, dense, way):
    if way == "freeze_model":
        model = freeze_model(llama(), "bf16", skip_modules=[skip])
        assert names(model) == ALL - dense
    else:
        model = get_peft_model(llama(), config(backend="bf16", skip_modules=[skip])).base_model.model
        assert {n.removesuffix(".base_layer") for n in names(model)} == ALL - dense
    for name in dense:
        layer = model.get_submodule(name)
        assert type(layer.base_layer if way == "config" else layer) is nn.Linear


def test_adapters_are_never_frozen(llama):
    """A and B are nn.Linear too. They stay so when freezing runs again (PEFT calls it for every adapter)."""
    model = get_peft_model(llama(), config())
    tensors = {n: p for n, p in model.named_parameters() if "lora_" in n}
    freeze_model(model)
    model.add_adapter("second", config(r=2))
    layers = [m for m in model.modules() if isinstance(m, FrozenLoraLinear)]
    assert len(layers) == 14
    for layer in layers:
        for adapter in ("default", "second"):
            for half in (layer.lora_A[adapter], layer.lora_B[adapter]):
                assert type(half) is nn.Linear and half.weight.dtype == torch.float32
    now = dict(model.named_parameters())
    assert all(now[n] is p for n, p in tensors.items())


@by_backend
def test_subclasses_of_linear_keep_their_own_forward(backend):
    """nn.MultiheadAttention reads out_proj.weight itself, so its out_proj (a subclass of nn.Linear) must stay dense."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 64)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model, x = Block(), torch.randn(2, 5, 64)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most of this model stays dense, and that is said
        freeze_model(model, backend)
    assert names(model) == {"out"}
    assert torch.equal(model(x), expected)


@by_backend
def test_a_subclass_that_computes_a_linear_is_frozen(backend):
    """Falcon's: the same product, written out. DeepSeek 4's is another product."""
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64, bias=True)
    model, ids = hf.FalconForCausalLM(hf.FalconConfig(**sizes)).eval(), torch.arange(12)[None]
    expected = model(ids).logits
    linears = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    freeze_model(model, backend)
    assert names(model) == {f"transformer.h.0.{name}" for name in linears}
    error = (model(ids).logits - expected).norm() / expected.norm()
    assert error < (1e-6 if backend == "bf16" else 0.2) and (backend == "bf16" or error > 1e-4)
    assert not is_plain_linear(DeepseekV4GroupedLinear(16, 32, n_groups=2))


def test_a_bare_linear_is_refused():
    """It has no parent to be replaced in; anything but an error would leave it dense or break it."""
    layer = nn.Linear(32, 32)
    with Unchanged(layer), pytest.raises(ValueError):
        freeze_model(layer)


@by_backend
def test_freezing_again_changes_nothing(llama, backend):
    model = freeze_model(llama(), backend)
    with Unchanged(model):
        assert freeze_model(model, backend) is model


@by_backend
def test_a_second_adapter_does_not_quantise_again(llama, backend):
    model = get_peft_model(llama(), config(backend=backend))
    before = {n: (t.data_ptr(), t.clone()) for n, t in packed(model).items()}
    model.add_adapter("second", config(backend=backend, r=2))
    after = packed(model)
    assert after.keys() == before.keys() and len(before) >= 14
    for name, tensor in after.items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1]), name


@pytest.mark.parametrize("first, second", [("nvfp4", "nf4"), ("nf4", "bf16"), ("bf16", "nvfp4")])
@pytest.mark.parametrize("way", ["freeze_model", "second-adapter", "new-adapter"])
def test_one_model_has_one_backend(llama, first, second, way):
    if way == "second-adapter":
        model = get_peft_model(llama(), config(backend=first))
        call = lambda: model.add_adapter("second", config(backend=second))
    else:
        model = freeze_model(llama(), first)
        call = (
            (lambda: freeze_model(model, second))
            if way == "freeze_model"
            else lambda: get_peft_model(model, config(backend=second))
        )
    with Unchanged(model), pytest.raises(ValueError, match=f"q_proj.*{first}.*{second}"):
        call()


@by_backend
def test_a_dense_base_under_an_adapter_is_not_replaced(llama, backend):
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    with Unchanged(model), pytest.raises(ValueError, match="q_proj.*already carries an adapter.*freeze_model"):
        model.add_adapter("second", NVFP4LoraConfig(r=4, target_modules=["q_proj"], backend=backend))
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("factor", [1e-3, 1.0, 3000.0], ids=lambda f: f"k-times-{f:g}")
def test_a_sibling_frozen_later_is_not_clipped(llama, factor):
    """q/k/v share a global scale, which must hold the largest of them. q and v frozen first have theirs alone; k, frozen in a
    second call, must not be squeezed into it: its error stays what it is when all are frozen at once, up to a factor 1.5 for
    another global scale (block scales are E4M3, so a scale that fits costs at most their rounding)."""

    def model():
        m = llama()
        with torch.no_grad():
            m.model.layers[0].self_attn.k_proj.weight.mul_(factor)
        return m

    def error(m):
        k, w = m.model.layers[0].self_attn.k_proj.dequantize(), original
        return ((k - w).norm() / w.norm()).item()

    original = model().model.layers[0].self_attn.k_proj.weight.detach()
    later = freeze_model(freeze_model(model(), skip_modules=["k_proj"]))
    assert error(later) <= 1.5 * error(freeze_model(model()))


@by_packed_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("way", ["freeze_model", "get_peft_model"])
def test_a_bad_weight_in_the_last_layer(llama, backend, bad, way):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = bad
    with Unchanged(model), pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj.*NaN or Inf"):
        freeze_model(model, backend) if way == "freeze_model" else get_peft_model(model, config(backend=backend))
    assert names(model) == set()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = 0.0
    assert names(freeze_model(model, backend)) == ALL, "and the repaired model can be frozen"


@by_backend
def test_weights_that_are_not_loaded(backend):
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(tiny_llama().config)
    model.model.layers[0] = tiny_llama().model.layers[0]  # the first layers are there, so the walk has begun
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj.*(meta|not loaded)"):
        freeze_model(model, backend)
    assert names(model) == set()


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param(dict(backend="int8"), "int8.*bf16, nf4, nvfp4", id="backend"),
        pytest.param(dict(weight_layouts="none"), "cached, transient.*none", id="weight_layouts"),
        pytest.param(dict(gradients="fp8"), "nvfp4, nvfp4_sr, bf16.*fp8", id="gradients"),
    ],
)
def test_unknown_words(llama, settings, message):
    model = llama()
    with Unchanged(model), pytest.raises(ValueError, match=message):
        freeze_model(model, **settings)


@by_backend
def test_two_linears_share_one_weight(backend):
    """One packed weight, two layers, each with its own bias."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    biases = {n: m.bias.detach().clone() for n, m in model.items()}
    freeze_model(model, backend)
    a, b, c = model["a"], model["b"], model["c"]
    assert all(
        t is b.packed_tensors()[n] or t.data_ptr() == b.packed_tensors()[n].data_ptr() for n, t in a.packed_tensors().items()
    )
    assert a.weight.data_ptr() != c.weight.data_ptr()
    assert all(torch.equal(model[n].bias, bias) for n, bias in biases.items())
    assert frozen_bytes(model) == a.frozen_bytes() + c.frozen_bytes()
    x = torch.randn(4, 64)
    assert torch.allclose(a(x) - a.bias, b(x) - b.bias, atol=1e-5)  # |y| < 8: five roundings of 2**-24 |y|, and cancellation


@pytest.mark.parametrize(
    "freeze",
    [
        lambda model, names: freeze_model(model, skip_modules=names),
        lambda model, names: get_peft_model(model, NVFP4LoraConfig(target_modules=["q_proj"], skip_modules=names)),
    ],
    ids=["freeze_model", "get_peft_model"],
)
def test_warnings_point_at_the_callers_line(llama, freeze):
    """Not at a line of this package, of PEFT or of what wraps its functions."""
    model = llama()
    model.model.table = nn.ParameterList([nn.Parameter(torch.zeros(1000, 1000))])
    with pytest.warns(UserWarning) as caught:
        freeze(model, ["typo"])
    places = {str(w.message).partition(": ")[0]: w.filename for w in caught}
    assert places.pop("skip_modules matches no module") == __file__
    assert [place for message, place in places.items() if "stay dense" in message] == [__file__]
