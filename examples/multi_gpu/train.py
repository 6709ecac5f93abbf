"""LoRA on a frozen NVFP4 base on several GPUs with transformers' Trainer. The script is that of one GPU: the launcher decides.

accelerate launch --config_file examples/multi_gpu/ddp.yaml examples/multi_gpu/train.py --model MODEL --data train.jsonl
accelerate launch --config_file examples/multi_gpu/fsdp2.yaml examples/multi_gpu/train.py --model MODEL --data train.jsonl \\
    --memory small
torchrun --nproc-per-node 2 examples/multi_gpu/train.py --model MODEL --data train.jsonl         # DDP as well

(MODEL and train.jsonl: python examples/qlora_data.py FOLDER writes FOLDER/model and FOLDER/train.jsonl.)

DDP where a model fits on each card, FSDP2 where it does not. Under FSDP2 memory="small" keeps and sends one layout of
the weights instead of two. A run that was interrupted goes on with --resume, on as many processes as there are: exactly, if batch
times processes times accumulate stays what it was. If a process dies, the launcher ends the others; on several hosts, where it
cannot see all of them, they end after --timeout seconds of waiting.
"""

import argparse

import torch
from datasets import load_dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig
from peft_nvfp4.training.callbacks import StopOnNonFinite, memory_advice
from peft_nvfp4.training.distributed import make_resumable

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="JSON lines with a field 'text'")
parser.add_argument("--output", default="multi-gpu-out")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--memory", default="fast", choices=["fast", "small"])
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--max_length", type=int, default=128)
parser.add_argument("--batch", type=int, default=2, help="sequences per process and micro-batch")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--timeout", type=int, default=600, help="seconds that a process waits for another")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
training_args = TrainingArguments(  # before the model is loaded: it sets up the processes
    output_dir=args.output,
    max_steps=args.max_steps,
    save_steps=args.save_steps,
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=args.accumulate,
    learning_rate=2e-4,
    lr_scheduler_type="constant",
    logging_steps=1,
    report_to="none",
    bf16=on_gpu,
    use_cpu=not on_gpu,
    ddp_timeout=args.timeout,
    ddp_find_unused_parameters=False,
    ddp_broadcast_buffers=False,  # nothing in the buffers changes
)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if on_gpu else torch.float32)
config = NVFP4LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules="all-linear",
    task_type="CAUSAL_LM",
    backend=args.backend,
    memory=args.memory,
)
model = get_peft_model(model, config)
data = load_dataset("json", data_files=args.data, split="train")


def encode(row):  # every text ends in the end-of-text token, so that the model learns to stop
    ids = tokenizer(row["text"] + tokenizer.eos_token, truncation=True, max_length=args.max_length).input_ids
    return {"input_ids": ids, "labels": ids}  # given, because a collator that makes them leaves out every padding token


data = data.map(encode, remove_columns=data.column_names)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    callbacks=[StopOnNonFinite()],
)
with memory_advice(trainer):
    trainer.train(resume_from_checkpoint=make_resumable(trainer) if args.resume else None)
trainer.save_model(args.output)
