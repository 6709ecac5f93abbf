"""What calibration collects from: data of every kind that is taken (texts, token ids, batches, images), and the parts of a model,
found and run one layer at a time."""

import pytest
import torch
from _calibrations import FAST, IDS, Words, bits
from _families import IMAGE, causal, idefics3
from conftest import tiny_llama
from torch import nn

from peft_nvfp4.calibration.data import batches
from peft_nvfp4.calibration.run import calibrate
from peft_nvfp4.calibration.structure import capture, find_stack, linear_groups
from peft_nvfp4.quantization.freeze import frozen_layers, plan

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
CPU = torch.device("cpu")


def test_texts_become_sequences_of_one_length():
    texts = [f"{'a' * (i % 9 + 1)} " * 7 for i in range(20)]
    found = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=1)
    assert [b["input_ids"].shape for b in found] == [(2, 10), (1, 10)]
    joined = torch.cat([b["input_ids"].flatten() for b in found]).tolist()
    assert joined[7] == 0 == joined[15] and len(set(joined[:7])) == 1  # a text, its end, the next text
    again = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=1)
    other = batches(texts, Words(), samples=3, seq_len=10, batch_size=2, seed=2)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, again))
    assert not torch.equal(found[0]["input_ids"], other[0]["input_ids"])
    assert batches(["a bb"], Words(), seq_len=10)[0]["input_ids"].tolist() == [[1, 2, 0]]  # less than one sequence


def gemma3():
    """Sliding and full attention in turn, each with its own mask and rotary embedding."""
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return causal("Gemma3", "Gemma3Text", head_dim=16, num_hidden_layers=3, sliding_window=6, layer_types=types)()


PADDED = [
    {"input_ids": IDS[:2], "attention_mask": (torch.arange(24) < torch.tensor([[24], [15]])).long()},
    {"input_ids": IDS[2:4]},
]


@pytest.mark.parametrize("make", [tiny_llama, gemma3])
def test_layers_alone_compute_what_the_model_does(make):
    model = make().eval()
    name = find_stack(model, plan(model, "nvfp4", ()))
    assert name == "model.layers"
    stack = capture(model, name, PADDED, CPU)
    with torch.no_grad():
        for i, batch in enumerate(PADDED):
            expected = model(**batch, output_hidden_states=True).hidden_states
            hidden = stack.hidden[i]
            for index in range(len(stack.layers)):  # the last layer's output is not there without the final norm
                assert torch.equal(hidden, expected[index]), index
                hidden = stack.run(index, i, hidden)


def test_groups_are_linears_of_one_input():
    model = tiny_llama()
    stack = capture(model, "model.layers", [{"input_ids": IDS}], CPU)
    linears = [n for n, m in model.model.layers[0].named_modules() if isinstance(m, nn.Linear)]
    assert linear_groups(stack, 0, stack.hidden[0], linears) == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]


def test_structure_refusals():
    model = tiny_llama()
    with pytest.raises(ValueError, match="'encoder' names 0.*model.layers"):
        find_stack(model, [], "encoder")
    with pytest.raises(ValueError, match="no list of layers"):
        find_stack(nn.Sequential(nn.Linear(4, 4)), [])

    class Between(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.layers = inner, inner.model.layers
            inner.model.forward = self.body

        def body(self, input_ids, **kwargs):
            hidden = self.inner.model.embed_tokens(input_ids)
            rotary = self.inner.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary) * 2.0
            return hidden

        def forward(self, input_ids):
            return self.body(input_ids)

    with pytest.raises(ValueError, match="before layer 1 of layers"):
        capture(Between(tiny_llama()), "layers", [{"input_ids": IDS}], CPU)


def vision_model():
    torch.manual_seed(0)
    return idefics3()


def image_batches(count: int = 4):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(IMAGE + 1, 120, (count, 1, 12), generator=g)
    ids[:, :, 2:6] = IMAGE  # 16 / 4 = 4 x 4 patches, of which 2 x 2 make a token
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "pixel_values": torch.randn(1, 1, 3, 16, 16, generator=g)}
        for i in ids
    ]


def test_image_prompts():
    model = vision_model()
    report = calibrate(model, image_batches(), **FAST)
    assert list(report.layers) == ["model.text_model.layers.0", "model.text_model.layers.1"]
    assert any("vision_model" in n for n in report.dense) and not any("vision" in n for n, _ in frozen_layers(model))
    other = vision_model()
    text = [{"input_ids": b["input_ids"].clamp(min=IMAGE + 1), "attention_mask": b["attention_mask"]} for b in image_batches()]
    calibrate(other, text, **FAST)
    a, b = bits(model), bits(other)
    assert any(not torch.equal(a[name], b[name]) for name in a)  # the images mattered
    both = vision_model()
    report = calibrate(both, image_batches(), layers=["vision_model.encoder.layers", "text_model.layers"], **FAST)
    assert list(report.layers) == [
        f"model.{kind}_model.{rest}.{i}" for kind, rest in (("vision", "encoder.layers"), ("text", "layers")) for i in (0, 1)
    ]
    with torch.no_grad():
        assert torch.isfinite(both(**image_batches(1)[0]).logits).all()
