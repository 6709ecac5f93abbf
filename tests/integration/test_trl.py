"""TRL's trainers of preferences and of reinforcement learning: DPO, ORPO, KTO, a reward model, GRPO, RLOO.

What is asked: ``backend="bf16"`` trains what stock PEFT trains; ``nvfp4`` learns; the reference model is the frozen base, bit for
bit; nothing grows over 200 steps. TRL sees a plain PEFT model, and puts a forward of its own on it (a fused output head).
"""

import gc
import importlib
from collections import Counter

import pytest
import torch
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama
from peft import LoraConfig
from transformers import LlamaForSequenceClassification, TrainerCallback

from peft_nvfp4 import NVFP4LoraConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

GOOD, BAD = ("good", "fine", "great"), ("bad", "awful", "dull")
KINDS = ("DPO", "ORPO", "KTO", "Reward", "GRPO", "RLOO")
by_kind = pytest.mark.parametrize("kind", KINDS)


def rows(kind):
    prompts = [f"the {a} is {b}" for a in ("film", "story", "question", "answer") for b in ("a", "the", "what", "?")]
    pairs = [{"prompt": p, "chosen": f" {GOOD[i % 3]} film", "rejected": f" {BAD[i % 3]} film"} for i, p in enumerate(prompts)]
    if kind in ("GRPO", "RLOO"):
        pairs = [{"prompt": p} for p in prompts]
    if kind == "KTO":
        words = [pair["chosen" if i % 2 else "rejected"] for i, pair in enumerate(pairs)]
        pairs = [{"prompt": p, "completion": w, "label": i % 2 == 1} for i, (p, w) in enumerate(zip(prompts, words))]
    return datasets.Dataset.from_list(pairs)


def share_of_long_words(completions, **_):
    return [sum(len(word) > 3 for word in completion.split()) / 4 for completion in completions]


def base_model(**overrides):
    """With a head whose logits tell words apart: the one of a fresh model gives no word more than a few percent."""
    model = tiny_llama(vocab_size=64, pad_token_id=2, eos_token_id=2, bos_token_id=1, **overrides)
    model.lm_head.weight.data.mul_(10)
    return model


def trainer_of(kind, lora, steps, folder, rate=1e-3, model=None, **options):
    """A trainer on a tiny Llama, its adapter made by the trainer (after it has set its seed)."""
    source = importlib.import_module("trl.experimental.orpo") if kind == "ORPO" else trl
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "</s>"
    model = base_model() if model is None else model
    if kind == "Reward":
        model.config.num_labels = 1
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(model.config)
    if kind in ("GRPO", "RLOO"):
        options = dict(num_generations=4, max_completion_length=4, beta=0.02) | options
    settings = dict(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=rate, logging_steps=1, bf16=False,
        lr_scheduler_type="constant", gradient_checkpointing=False, save_strategy="no", report_to="none", use_cpu=True, seed=0,
        disable_tqdm=True,
    )  # fmt: skip
    reward = dict(reward_funcs=share_of_long_words) if kind in ("GRPO", "RLOO") else {}
    arguments = getattr(source, f"{kind}Config")(**settings | options)
    return getattr(source, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=rows(kind), processing_class=tokenizer, peft_config=lora, **reward
    )


def settings_of(kind):
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    return dict(r=4, lora_alpha=8, target_modules="all-linear", task_type=task)


def trained(kind, lora, steps, folder, **options):
    """(trainer, logged numbers of every step)."""
    trainer = trainer_of(kind, lora, steps, folder, **options)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]


def against_stock(kind, folder):
    """Logged number -> largest difference over 5 steps between a bf16 base and stock PEFT, relative to numbers above 1."""
    _, stock = trained(kind, LoraConfig(**settings_of(kind)), 5, folder)
    trainer, ours = trained(kind, NVFP4LoraConfig(**settings_of(kind), backend="bf16"), 5, folder)
    assert {layer.backend for _, layer in frozen_layers(trainer.model)} == {"bf16"}
    assert len(stock) == len(ours) == 5 and stock[0]["grad_norm"] > 0 and len({entry["loss"] for entry in stock}) > 1
    names = [name for name in stock[0] if isinstance(stock[0][name], float) and "time" not in name]
    return {name: max(abs(a[name] - b[name]) / max(abs(a[name]), 1.0) for a, b in zip(stock, ours)) for name in names}


@by_kind
def test_bf16_trains_what_stock_peft_trains(kind, tmp_path):
    """In FP32 both compute the same sums in another order: some 64 roundings of 2**-24 on the way, 4e-6 of a loss or gradient.
    Adam moves a parameter whose gradient is smaller than that noise by the rate in either direction: of 10**4 parameters and
    gradients below 1, 5 steps change a number by less than 5 * 10**4 * 4e-6 * 1e-3 = 2e-4."""
    differences = against_stock(kind, tmp_path)
    assert {"loss", "grad_norm"} <= set(differences)
    assert max(differences.values()) < 2e-4, differences


def learned(kind, folder):
    """First and last loss (of reinforcement learning: reward, means of 5 steps) of 30 steps on an nvfp4 base."""
    reinforced = kind in ("GRPO", "RLOO")
    trainer, log = trained(kind, NVFP4LoraConfig(**settings_of(kind)), 30, folder, rate=1e-2)
    assert {layer.backend for _, layer in frozen_layers(trainer.model)} == {"nvfp4"}
    values = [entry["reward" if reinforced else "loss"] for entry in log]
    return (sum(values[:5]) / 5, sum(values[-5:]) / 5) if reinforced else (values[0], values[-1])


@by_kind
def test_nvfp4_learns(kind, tmp_path):
    first, last = learned(kind, tmp_path)
    assert last > first + 0.1 if kind in ("GRPO", "RLOO") else last < 0.9 * first, (first, last)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("word", ["nvfp4", "bf16"])
def test_the_reference_is_the_frozen_base(kind, word, tmp_path):
    """With the adapter switched off, after training, the log-probabilities are those of the base alone, bit for bit."""
    trainer, _ = trained(kind, NVFP4LoraConfig(**settings_of(kind), backend=word), 3, tmp_path, rate=1e-2)
    assert trainer.ref_model is None
    model = trainer.model.eval()
    base = freeze_model(base_model(), backend=word).eval()
    ids, mask = torch.randint(5, 30, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[1, 6:] = mask[2, 3:] = 0
    with torch.no_grad():
        adapted = model(input_ids=ids, attention_mask=mask).logits
        with model.disable_adapter():
            reference = model(input_ids=ids, attention_mask=mask).logits
        expected = base(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    assert not torch.equal(adapted[real], expected[real])
    assert torch.equal(reference[real].log_softmax(-1), expected[real].log_softmax(-1))


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_nothing_grows(kind, tmp_path):
    """200 steps: as many tensors live at the end of a step, and of the same sizes, as after 20."""
    counts = {}

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (20, 200):
                gc.collect()
                tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]  # no compiler's
                counts[state.global_step] = Counter(tuple(t.shape) for t in tensors)

    less = dict(logging_steps=100, per_device_train_batch_size=4, model=base_model(num_hidden_layers=1))
    less |= dict(max_completion_length=2) if kind == "GRPO" else {}
    trainer = trainer_of(kind, NVFP4LoraConfig(**settings_of(kind)), 200, tmp_path, **less)
    trainer.add_callback(Count())
    trainer.train()
    assert sum(counts[200].values()) <= sum(counts[20].values()) + 8, counts[200] - counts[20]
