"""Modeling files that cast to the dtype of a linear's weight, which is ``uint8`` where the weight is packed: known ones find a
dense linear, others an error, never a result."""

import pytest
import torch
import transformers as hf
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, freeze_model


def siglip2():
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_patches=16, patch_size=8)
    torch.manual_seed(0)
    return hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**sizes)).eval()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "patch_embedding"]])
@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_what_a_model_casts_to_stays_dense(backend, targets):
    """SigLIP 2 casts pixels to the dtype of its patch embedding's weight."""
    pixels = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(1))
    x = dict(pixel_values=pixels, pixel_attention_mask=torch.ones(2, 16, dtype=torch.long), spatial_shapes=torch.full((2, 2), 4))
    model = get_peft_model(siglip2(), NVFP4LoraConfig(target_modules=targets, backend=backend)).eval()
    error = model(**x).last_hidden_state - siglip2()(**x).last_hidden_state
    assert error.norm() < 0.3 * siglip2()(**x).last_hidden_state.norm()
    dense = [name.removesuffix(".base_layer") for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert any(name.endswith("patch_embedding") for name in dense)


class Reader(torch.nn.Module):
    """Reads dtypes in several ways."""

    def __init__(self):
        super().__init__()
        self.cast_to, self.asked, self.guarded, self.other = (torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        x = self.cast_to(x.to(self.cast_to.weight.dtype))
        if (dtype := self.asked.weight.dtype).is_floating_point:
            x = self.asked(x.to(dtype))
        if self.guarded.weight.dtype != torch.uint8:
            x = self.guarded(x.to(self.guarded.weight.dtype))
        weight = self.other.weight
        return self.other(x.to(weight.dtype))


@pytest.mark.parametrize("backend", ["nvfp4", "nf4", "bf16"])
def test_readers_of_a_dtype(backend):
    model = freeze_model(torch.nn.Sequential(Reader()), backend, progress=False)
    reader, x = model[0], torch.randn(2, 32)
    assert [name for name, m in reader.named_children() if type(m) is torch.nn.Linear] == ["cast_to", "other"]
    assert model(x).is_floating_point()
    for x in (torch.ones(2, 32, dtype=torch.uint8), torch.ones(2, 32, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="skip_modules"), torch.autocast("cpu", torch.bfloat16):
            reader.guarded(x)
