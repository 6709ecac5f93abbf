"""TRL's SFTTrainer with ``packing`` and ``padding_free``: samples in one row are trained as each by itself.

TRL warns that this needs flash attention. Here it does not: packed rows have positions that start again, and attention stays
within sequences (:mod:`peft_nvfp4.training.packing`).
"""

import pytest
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama

from peft_nvfp4 import NVFP4LoraConfig, packing_status

trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

PAIRS = {
    "prompt": ["the film was ", "question ", "a b c ", "what is a story ", "red blue ", "the "],
    "completion": ["good and fine", "answer red blue", "dull", "bad film ? bad film", "green", "great great great"],
}


def logged(folder, backend, rows, **packing):
    """Loss, gradient norm and accuracy of 3 steps that see all samples."""
    settings = trl.SFTConfig(
        str(folder), max_steps=3, per_device_train_batch_size=rows, logging_steps=1, use_cpu=True, learning_rate=0.05,
        optim="sgd", report_to=[], disable_tqdm=True, save_strategy="no", bf16=False, gradient_checkpointing=False, **packing,
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "</s>"
    lora = NVFP4LoraConfig(r=4, target_modules="all-linear", backend=backend, task_type="CAUSAL_LM")
    data = datasets.Dataset.from_dict(PAIRS)
    model = tiny_llama(vocab_size=64)
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    assert packing_status(trainer.model).calls >= 3, packing_status(trainer.model)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 3 and log[0]["grad_norm"] > 0
    return {name: [entry[name] for entry in log] for name in ("loss", "grad_norm", "mean_token_accuracy")}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["nvfp4", "bf16"])
def test_packed_samples_are_trained_as_each_by_itself(backend, tmp_path):
    """The same tokens in FP32, summed in another order: some 64 roundings of 2**-24, 4e-6 of a logged number; codes are of each
    token. Three steps of SGD at 0.05 keep that. Samples that saw each other would be percents off."""
    padded = logged(tmp_path, backend, rows=6)
    for rows, packing in ((6, dict(padding_free=True, max_length=None)), (1, dict(packing=True, max_length=64))):
        found = logged(tmp_path, backend, rows, **packing)
        for name, values in padded.items():
            assert found[name] == pytest.approx(values, rel=1e-5), (packing, name)
