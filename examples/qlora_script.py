"""QLoRA as scripts for it are usually written: bitsandbytes' NF4, PEFT, TRL. Nothing of this package is in it.

qlora_script_nvfp4.py is the same file with another quantization_config; `diff` the two. Offline, with packaged model and data:

    python examples/qlora_data.py qlora-data
    python examples/qlora_script.py --model qlora-data/model --data qlora-data/train.jsonl --output qlora-out
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="JSON lines with a field 'text'")
parser.add_argument("--output", default="qlora-out")
parser.add_argument("--max_steps", type=int, default=20)
args = parser.parse_args()

quantization_config = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(
    args.model, quantization_config=quantization_config, dtype=torch.bfloat16, device_map="auto"
)
model = prepare_model_for_kbit_training(model)
tokenizer = AutoTokenizer.from_pretrained(args.model)

peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
training_args = SFTConfig(
    output_dir=args.output,
    max_steps=args.max_steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=2e-4,
    max_length=128,
    logging_steps=1,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=load_dataset("json", data_files=args.data, split="train"),
    processing_class=tokenizer,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model(args.output)
