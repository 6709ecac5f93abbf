"""Vision-language models for Table 4: loading one, freezing its text decoder, and what follows a prompt with a picture.

Any model of transformers' image-text-to-text class whose processor has a chat template will do (Idefics3, SmolVLM, Qwen2.5-VL).
Everything outside the text decoder (vision tower, connector, head) stays dense in BF16 and gets no adapter, for all methods; what
is at hand of the paper does not say how it treats them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import smollm2_reviews as data
from peft import get_peft_model
from torch import Tensor, nn

from peft_nvfp4 import NVFP4LoraConfig

from .image_tasks import LETTERS, Pictured
from .methods import TARGETS, Method
from .training import Trainee, base_model

MISSING = """No vision-language model: {why}
  --model FOLDER or, where a hub is reached, --model NAME (Qwen/Qwen2.5-VL-3B-Instruct is the paper's; a small one is
  HuggingFaceTB/SmolVLM-256M-Instruct); --stand-in does without a trained one, see --help."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---------------------------------------------------------------------------------------------- models


def stand_in(folder: Path) -> Path:
    """Save the packaged language model under a random vision tower, with a processor, in the folder.

    Raises:
        SystemExit: the packaged model was not fetched.
    """
    import calibrate_vlm
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    if not (folder / "processor_config.json").is_file():  # what is written last
        try:
            lm, tokenizer = data.load_smollm2()
        except FileNotFoundError as error:
            raise SystemExit(MISSING.format(why=error)) from error
        model = calibrate_vlm.build(lm, tokenizer)
        model.save_pretrained(folder)
        size = {"longest_edge": calibrate_vlm.TILE}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        processor = Idefics3Processor(images, tokenizer, image_seq_len=calibrate_vlm.TOKENS, chat_template=CHAT)
        processor.save_pretrained(folder)
    return folder


def load_processor(name: str) -> Any:
    """
    Raises:
        SystemExit: there is none, or it is not one of images and text; the message says what to give.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(MISSING.format(why=f"{name}: {' '.join(str(error).split())[:300]}")) from error
    if not hasattr(processor, "image_processor"):
        raise SystemExit(MISSING.format(why=f"{name} reads text only"))
    processor.tokenizer.padding_side = "right"
    return processor


def load_model(name: str, device: str) -> nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16).to(device).requires_grad_(False)


def decoder_and_rest(model: nn.Module) -> tuple[str, list[str]]:
    """The text decoder's name, and the largest modules that hold nothing of it: vision tower, connector, head.

    Raises:
        ValueError: the model does not say which its decoder is.
    """
    decoder = model.get_decoder()
    name = next(n for n, m in model.named_modules() if m is decoder)
    if not name:
        raise ValueError(f"{type(model).__name__} has no text decoder of its own")
    rest, parts = [], name.split(".")
    for i, part in enumerate(parts):
        parent = ".".join(parts[:i])
        rest += [f"{parent}.{n}".lstrip(".") for n, _ in model.get_submodule(parent).named_children() if n != part]
    return name, rest


def adapt(model: nn.Module, processor: Any, method: Method, calibration: Path | None) -> Trainee:
    """The decoder frozen with an adapter, as the method wants it; everything else dense."""
    decoder, rest = decoder_and_rest(model)
    targets = rf"{re.escape(decoder)}\..*\.({'|'.join(TARGETS)})"
    own = dict(method.config) | ({} if calibration is None else {"calibration": str(calibration)})
    shared = dict(r=method.rank, lora_alpha=2 * method.rank, target_modules=targets, skip_modules=rest, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, NVFP4LoraConfig(**shared, **own))
    return Trainee(adapted, processor, str(getattr(adapted.base_model, "nvfp4_report", "")))


# ---------------------------------------------------------------------------------------------- batches


def prompt(item: Pictured, processor: Any) -> str:
    text = "\n".join(part for part in (item.context, item.question) if part)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)


def batch_of(items: Sequence[Pictured], processor: Any, device: Any) -> dict[str, Tensor]:
    """What a model takes, padded on the right. The chat's form has all special tokens."""
    texts, images = [prompt(item, processor) for item in items], [[item.image()] for item in items]
    found = processor(text=texts, images=images, padding=True, add_special_tokens=False, return_tensors="pt")
    return {key: value.to(device) for key, value in found.items()}


def letter_tokens(processor: Any) -> list[int]:
    """The token of each letter behind a prompt.

    Raises:
        ValueError: a letter is not one token there, or two letters are the same one.
    """
    head = prompt(Pictured("", "?", ""), processor)
    space = "" if head[-1:].isspace() else " "
    ids = lambda text: processor.tokenizer(text, add_special_tokens=False).input_ids
    found = [ids(head + space + letter) for letter in LETTERS]
    if any(f[:-1] != ids(head) for f in found) or len({f[-1] for f in found}) < len(LETTERS):
        raise ValueError(f"the letters {', '.join(LETTERS)} are not tokens of their own behind {head[-20:]!r}")
    return [f[-1] for f in found]


def answer_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """(B, vocabulary) FP32 of what follows each prompt: the head runs at these positions only."""
    base = base_model(model)
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
    last = inputs["attention_mask"].sum(1) - 1
    return base.get_output_embeddings()(hidden[torch.arange(len(last), device=last.device), last]).float()
