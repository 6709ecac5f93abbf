"""Answers marked good or bad, without pairs: KTO with TRL's KTOTrainer.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/kto.py --backend nvfp4                         # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/kto.py --model meta-llama/Llama-3.2-1B-Instruct --data marked.jsonl

The reference is the same frozen base with the adapter switched off. A row holds "prompt", "completion" and "label" (true: a
good answer). A step needs at least two rows: the KL term is estimated on answers of other rows.
"""

import argparse

import smollm2_reviews as reviews
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--data", help="a .json or .jsonl file of rows as above (film reviews)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--out", default="kto-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(reviews.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

if args.data:
    rows = load_dataset("json", data_files=args.data, split="train")
else:  # right and wrong answers about film reviews, in turn
    marked = [(row, i % 2 == 0) for i, row in enumerate(reviews.movie_reviews(n_test=2)[0])]
    answer = lambda row, good: reviews.LABELS[row.label if good else 1 - row.label]
    rows = [{"prompt": row.text + reviews.PROMPT, "completion": answer(row, good), "label": good} for row, good in marked]
    rows = Dataset.from_list(rows)
trainer = KTOTrainer(
    model=AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device),
    args=KTOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-4,
        max_length=256,
        logging_steps=1,
        bf16=device == "cuda",
        report_to="none",
        use_cpu=device == "cpu",
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend),
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it
