"""Fine-tune a sequence classifier: positive and negative film reviews. Reload the adapter and check that it is the trained model.

    python examples/smollm2_reviews.py fetch                       # once: the packaged model and film reviews, from PyPI
    python examples/finetune_classification.py --backend nvfp4     # or nf4 (QLoRA), or bf16 (plain LoRA): the only change

The decoder is frozen and gets adapters. The classifier on top (`score`) is new: it stays dense, is trained whole, and is saved
with the adapter. Put your own rows where `train, test` are made, and their number of classes in `num_labels`.
"""

import argparse

import smollm2_reviews as data
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

from peft_nvfp4 import NVFP4LoraConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a name on the Hub (the packaged SmolLM2-135M)")
parser.add_argument("--backend", default="nvfp4", choices=["nvfp4", "nf4", "bf16"])
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--held_out", type=int, default=200, help="reviews to score after training, an even number")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--out", default="classification-out")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # most CPUs multiply BF16 slowly
name = args.model or str(data.model_folder())
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


def load_base():
    torch.manual_seed(0)  # the classifier's start
    settings = dict(num_labels=2, pad_token_id=tokenizer.pad_token_id)
    return AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype, device_map=device, **settings)


def encode(reviews):
    rows = tokenizer([row.text for row in reviews], truncation=True, max_length=128).input_ids
    return [{"input_ids": ids, "labels": row.label} for ids, row in zip(rows, reviews, strict=True)]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


lora = NVFP4LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="SEQ_CLS", backend=args.backend
)
model = get_peft_model(load_base(), lora)

train, test = map(encode, data.movie_reviews(n_test=args.held_out))
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
        report_to="none",
        use_cpu=device == "cpu",
    ),
    train_dataset=train,
    eval_dataset=test,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=accuracy,
)
trainer.train()
print(f"accuracy on {len(test)} held-out reviews: {trainer.evaluate()['eval_accuracy']:.1%}")
trainer.save_model(args.out)  # the adapter and the classifier

again = PeftModel.from_pretrained(load_base(), args.out, config=NVFP4LoraConfig.from_pretrained(args.out))
inputs = tokenizer.pad(test[:4], return_tensors="pt").to(device)
with torch.no_grad():
    difference = (model.eval()(**inputs).logits - again.eval()(**inputs).logits).abs().max().item()
print(f"reloaded from {args.out}: largest difference of the logits {difference}")
