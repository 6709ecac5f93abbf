"""Stop and resume, save and reload: every kind of base, stock Trainer and TRL's SFTTrainer, activation checkpointing on and off.

Each cell trains four steps in one go, then two, a checkpoint and two more in a model made anew, with dropout and shuffled rows.
The adapters must have the same bits, and the saved adapter on a new base the same logits.
"""

import functools

import pytest
import torch
import transformers as hf
from _peft_models import adapter_tensors, logits
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, freeze_model
from peft_nvfp4.quantization.freeze import frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LORA = dict(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
BASES = {
    "fast": dict(backend="nvfp4"),
    "small": dict(backend="nvfp4", memory="small"),
    "stochastic": dict(backend="nvfp4"),  # gradients' rounding draws random numbers
    "nf4": dict(backend="nf4"),
    "bf16": dict(backend="bf16"),
    "pact": {},  # quantised while loading, plain LoraConfig
}
STEPS, STOP = 4, 2


@pytest.fixture(scope="module", autouse=True)
def saved_base(tmp_path_factory):
    """The folder of the dense model, for what quantises while loading."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cells(saved_base, tmp_path_factory):
    """(base, trainer, checkpointing) -> the trainer after four steps, each run once."""
    return functools.cache(lambda *cell: trained(saved_base, tmp_path_factory.mktemp("whole"), *cell))


def make_base(folder, base):
    if base == "stochastic":
        return freeze_model(hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), gradients="nvfp4_sr")
    kwargs = {"quantization_config": PactConfig()} if base == "pact" else {}
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)


def lora_config(base):
    return NVFP4LoraConfig(**LORA, **BASES[base]) if BASES.get(base) else LoraConfig(**LORA)


class StopAt(hf.TrainerCallback):
    """What a time limit does: a checkpoint after this step, and no more steps."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STOP:
            control.should_save = control.should_training_stop = True


def rows():
    ids = torch.randint(2, 128, (12, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row[: 6 + i % 7]} for i, row in enumerate(ids)]  # of unequal lengths


def make_trainer(folder, out, base, trainer, checkpointing, seed=1, **kwargs):
    """A trainer over a new model whose adapter starts from ``seed``. The adapter stays in FP32: over a base that was loaded in 4
    bits TRL makes it BF16, PEFT reads it from a checkpoint as FP32, and the run would not go on bit for bit."""
    settings = dict(max_steps=STEPS, per_device_train_batch_size=3, learning_rate=1e-2, logging_steps=1, save_strategy="no")
    settings |= dict(output_dir=str(out), use_cpu=True, report_to=[], seed=3, disable_tqdm=True, bf16=False)
    settings |= dict(gradient_checkpointing=checkpointing)
    model, config = make_base(folder, base), lora_config(base)
    torch.manual_seed(seed)
    if trainer == "Trainer":
        model = get_peft_model(model, config)
        collate = functools.partial(pad, labels=True)
        return hf.Trainer(model, hf.TrainingArguments(**settings), train_dataset=rows(), data_collator=collate, **kwargs)
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    arguments = trl.SFTConfig(**settings, max_length=16)
    data = datasets.Dataset.from_list(rows())
    made = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tiny_tokenizer(), peft_config=config, **kwargs)
    for p in made.model.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    return made


def pad(rows, labels):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def trained(folder, out, *cell):
    trainer = make_trainer(folder, out, *cell)
    trainer.train()
    return trainer


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


by_base = pytest.mark.parametrize("base", BASES)
by_trainer = pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
by_checkpointing = pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])


@by_checkpointing
@by_trainer
@by_base
def test_resumes_and_reloads_bit_equally(cells, saved_base, tmp_path, base, trainer, checkpointing):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    cell = (base, trainer, checkpointing)
    whole = cells(*cell)
    assert whole.model.training and whole.state.global_step == STEPS

    make_trainer(saved_base, tmp_path, *cell, callbacks=[StopAt()]).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{STOP}"]
    resumed = make_trainer(saved_base, tmp_path, *cell, seed=77)  # another start, which the checkpoint replaces
    start = adapter_tensors(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert not same(adapter_tensors(resumed.model), start)
    assert same(adapter_tensors(resumed.model), adapter_tensors(whole.model))

    resumed.save_model(tmp_path / "adapter")
    config = None if base == "pact" else NVFP4LoraConfig.from_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(make_base(saved_base, base), tmp_path / "adapter", config=config)
    assert all(layer.backend == BASES[base].get("backend", "nvfp4") for _, layer in frozen_layers(again))
    assert torch.equal(logits(again), logits(whole.model))


@by_trainer
@by_base
def test_checkpointing_trains_the_same_adapter(cells, base, trainer):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    assert same(adapter_tensors(cells(base, trainer, True).model), adapter_tensors(cells(base, trainer, False).model))
