"""Calibrating a vision-language model through image prompts or through text: does it matter, and for which tokens?

The model: Idefics3 (the family of SmolVLM-256M) with the real SmolLM2-135M as its text tower. No trained vision tower is in any
package, so a small random SigLIP and a random connector stand in for it, scaled so that image tokens have the size of text
tokens: real JPEGs give image tokens that differ from text and from each other, but carry no meaning for the text tower. What can
be compared is which tokens' errors a calibration makes small, not what a trained model would answer.

The text tower is calibrated three times: through prompts with an image, through as many tokens of text, and rounded to nearest.
Held out is one image with other text. Errors, at image tokens and at text tokens: of the output of every linear, given the dense
model's input; of the hidden states behind the whole tower; and the divergence of the next token's distribution.

    python benchmarks/calibrate_vlm.py --images FOLDER --device cpu        (12 prompts; 20 minutes)

Needs Pillow and two or more JPEGs, for example llamafactory's three demo images (``data/mllm_demo_data`` of the archive
that ``reproduce/sources.yaml`` names).
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import common
import texts
import torch
from common import smollm2_reviews as data
from reproduce import tables
from torch import Tensor, nn
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from peft_nvfp4.calibration.data import Batch
from peft_nvfp4.calibration.run import CalibrationOptions, calibrate

TILE, PATCH, SHUFFLE = 128, 16, 2
TOKENS = (TILE // PATCH // SHUFFLE) ** 2
"""Image tokens of a tile."""
EXTRA = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
GRID = 6
PROMPT = "<|im_start|>user\n<image>{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
QUESTIONS = ("What is in this picture?", "Describe the image.", "Continue the article that goes with this photograph.")


def build(lm: nn.Module, tokenizer: Any) -> nn.Module:
    """Idefics3 with ``lm`` as its text tower; ``tokenizer`` gets the tokens that the processor writes around images."""
    cells = [f"<row_{i}_col_{j}>" for i in range(1, GRID + 1) for j in range(1, GRID + 1)]
    tokenizer.add_tokens(EXTRA + cells, special_tokens=True)
    torch.manual_seed(0)
    lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vision = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    config = Idefics3Config(
        text_config=lm.config.to_dict(), vision_config={**vision, "image_size": TILE, "patch_size": PATCH}, scale_factor=SHUFFLE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=lm.config.tie_word_embeddings,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).to(lm.dtype).eval().requires_grad_(False)
    model.model.text_model.load_state_dict(lm.model.state_dict())
    head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
    model.lm_head.weight = model.model.text_model.embed_tokens.weight if head is embedding else head
    projection = model.model.connector.modality_projection.proj.weight
    features = model.model.get_image_features(torch.rand(1, 1, 3, TILE, TILE, dtype=lm.dtype) * 2 - 1)
    features = getattr(features, "pooler_output", features)
    size = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    projection.data *= lm.get_input_embeddings().weight.float().std() / size.float().std()
    return model


def prompts(folder: Path, processor: Any, held_out: list[str], count: int, last: bool, seed: int) -> list[Batch]:
    """Batches of the processor: random crops of all images but the last (by name), or of the last only, each with other text."""
    from PIL import Image

    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if len(paths) < 2:
        raise ValueError(f"{folder} holds {len(paths)} JPEGs; at least two are needed, the last is held out")
    rng, found = random.Random(seed), []
    for i in range(count):
        image = Image.open(paths[-1] if last else paths[i % (len(paths) - 1)]).convert("RGB")
        width, height = image.size
        share = rng.uniform(0.6, 1.0)
        left, top = rng.uniform(0, 1 - share) * width, rng.uniform(0, 1 - share) * height
        crop = image.crop((int(left), int(top), int(left + share * width), int(top + share * height)))
        answer = held_out[rng.randrange(len(held_out))][:600]
        text = PROMPT.format(question=QUESTIONS[i % len(QUESTIONS)], answer=answer)
        found.append(dict(processor(text=text, images=[crop], return_tensors="pt")))
    return found


def text_batches(texts_: list[str], tokenizer: Any, lengths: list[int], seed: int) -> list[Batch]:
    """Text of the same lengths."""
    ids = texts.token_ids(texts_, tokenizer, 1, sum(lengths), seed)[0]
    return [{"input_ids": part[None]} for part in ids.split(lengths)]


def relative(a: Tensor, b: Tensor) -> Tensor:
    """Per token, in per cent."""
    return 100 * (a - b).float().norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-30)


@torch.no_grad()
def measure(dense: nn.Module, models: dict[str, nn.Module], tests: list[Batch], device: Any) -> dict[str, dict]:
    """Calibration -> error -> kind of token -> mean."""
    errors: dict = {name: defaultdict(lambda: {"image": [], "text": []}) for name in models}
    image_id = dense.config.image_token_id
    for batch in tests:
        batch = {key: t.to(device) for key, t in batch.items()}
        image = batch["input_ids"][0] == image_id
        handles = []

        def add(label: str, key: str, error: Tensor, image: Tensor = image) -> None:
            for kind, chosen in (("image", image), ("text", ~image)):
                errors[label][key][kind].append(error[chosen].double().cpu())

        for name, linear in dense.model.text_model.named_modules():
            if isinstance(linear, nn.Linear):

                def compare(module, args, y, name=name):
                    for label, model in models.items():
                        ours = model.model.text_model.get_submodule(name)(args[0])
                        add(label, "linears' output, %", relative(ours, y)[0])

                handles.append(linear.register_forward_hook(compare))
        try:
            expected = dense(**batch, output_hidden_states=True, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        for label, model in models.items():
            got = model(**batch, output_hidden_states=True, use_cache=False)
            add(label, "last hidden state, %", relative(got.hidden_states[-1], expected.hidden_states[-1])[0])
            log_p, log_q = (out.logits[0].float().log_softmax(-1) for out in (expected, got))
            add(label, "next token's distribution, nats", (log_p.exp() * (log_p - log_q)).sum(-1))
    mean = lambda parts: {kind: torch.cat(several).mean().item() for kind, several in parts.items()}
    return {label: {key: mean(parts) for key, parts in of_label.items()} for label, of_label in errors.items()}


def markdown(args: argparse.Namespace, tokens: dict[str, int], found: dict[str, dict]) -> str:
    keys = list(next(iter(found.values())))
    title = (
        f"Idefics3 with SmolLM2-135M as text tower (real, {'all' if args.layers is None else f'the first {args.layers}'} layers) "
        f"and a random vision tower; accuracy={args.accuracy!r}, "
        f"{args.prompts} prompts of calibration ({tokens['calibration']} tokens, {tokens['image']} of an image), "
        f"{args.tests} held out; {args.device.type}. Mean error at image tokens / text tokens.\n\n"
    )
    rows = [[label, *(f"{row[k]['image']:.3f} / {row[k]['text']:.3f}" for k in keys)] for label, row in found.items()]
    return title + tables.markdown(["calibration", *keys], rows, right=False)


def run(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    lm, tokenizer = data.load_smollm2(common.DTYPES[args.dtype], layers=args.layers)
    dense = build(lm, tokenizer).to(args.device)
    del lm
    images = Idefics3ImageProcessorPil(size={"longest_edge": args.edge}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=TOKENS)
    calibration, held_out = texts.split(args.text or texts.default_paths())
    through_images = prompts(args.images, processor, calibration, args.prompts, last=False, seed=0)
    tests = prompts(args.images, processor, held_out, args.tests, last=True, seed=1)
    lengths = [b["input_ids"].shape[1] for b in through_images]
    through_text = text_batches(calibration, tokenizer, lengths, seed=0)
    tokens = {"calibration": sum(lengths)}
    tokens["image"] = sum(int((b["input_ids"] == dense.config.image_token_id).sum()) for b in through_images)
    models, seconds = {}, {}
    plans = {"image prompts": (through_images, "gptq"), "text": (through_text, "gptq"), "to nearest": (through_text, "nearest")}
    for label, (batches, method) in plans.items():
        model = copy.deepcopy(dense)
        options = CalibrationOptions(method=method, accuracy=args.accuracy, offset=args.offset, report_tokens=0)
        begin = time.perf_counter()
        calibrate(model, batches, None, options, device=args.device, progress=False)
        models[label], seconds[label] = model, time.perf_counter() - begin
        print(f"{label}: calibrated in {seconds[label]:.0f} s", flush=True)
    found = measure(dense, models, tests, args.device)
    path = args.out / f"calibrate_vlm_{args.accuracy}{'_centred' if args.offset else ''}_{args.device.type}"
    content = common.head(args) | {"tokens": tokens, "calibration_s": seconds, "errors": found}
    common.write_report(path, content | {"seconds": time.perf_counter() - start}, markdown(args, tokens, found))


def main() -> None:
    parser = common.text_parser(__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs; the last one by name is held out")
    parser.add_argument("--accuracy", default="paper", help="preset of the inputs")
    parser.add_argument("--offset", action="store_true", help="offsets, from the same batches")
    parser.add_argument("--prompts", type=int, default=12, help="of calibration")
    parser.add_argument("--tests", type=int, default=4, help="prompts held out")
    parser.add_argument("--edge", type=int, default=512, help="longest edge of an image, in tiles of 128")
    run(common.parse_texts(parser))


if __name__ == "__main__":
    main()
