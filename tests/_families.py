"""Tiny models of many families, of transformers' own classes, and batches with text and with an image."""

import functools

import torch
import transformers as hf

SIZES = dict(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
IDS = 16 + torch.arange(24).view(2, 12) * 5 % 112
IMAGE, ROUND = 3, 7  # tokens: a piece of an image (the first that is not padding, start or end); what is around one
WITH_IMAGE = torch.tensor([[20, ROUND, IMAGE, IMAGE, IMAGE, IMAGE, ROUND + 1, 30, 40]])


def causal(family, config=None, **settings):
    return lambda: getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{config or family}Config")(**{**SIZES, **settings}))


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2))


def opt(layers=2, embedding=64):
    sizes = dict(hidden_size=64, ffn_dim=96, num_attention_heads=4, vocab_size=128)
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, num_hidden_layers=layers, word_embed_proj_dim=embedding))


def t5():
    sizes = dict(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, feed_forward_proj="gated-gelu"))


def qwen2_5_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4)
    vision |= dict(spatial_merge_size=2, window_size=16, fullatt_block_indexes=[1], temporal_patch_size=2)
    tokens = dict(image_token_id=IMAGE, video_token_id=6, vision_start_token_id=ROUND, vision_end_token_id=ROUND + 1)
    config = hf.Qwen2_5_VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision, **tokens)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def idefics3(family="Idefics3"):
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
    config = getattr(hf, f"{family}Config")(
        text_config=dict(**SIZES, model_type="llama"), vision_config=vision, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )
    return getattr(hf, f"{family}ForConditionalGeneration")(config)


def text():
    return dict(input_ids=IDS, labels=IDS)


def image_for(make):
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    if make is qwen2_5_vl:
        pixels = dict(pixel_values=random(16, 96), image_grid_thw=torch.tensor([[1, 4, 4]]))
    else:
        pixels = dict(pixel_values=random(1, 1, 3, 16, 16))
    return dict(input_ids=WITH_IMAGE, labels=WITH_IMAGE, **pixels)
