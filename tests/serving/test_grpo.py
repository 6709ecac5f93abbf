"""GRPO with a vLLM server that generates, in two processes: the server gets the adapter after each step
(examples/vllm_adapters.py), and the training process, whose base is NVFP4, learns from what it answers."""

import pytest
import torch
import trl
from _server import server
from _tiny_models import tiny_tokenizer
from conftest import tiny_llama
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer, rloo_trainer
from vllm_adapters import use_adapters

from peft_nvfp4 import NVFP4LoraConfig, dequantize_model, freeze_model

LIKED = set(range(32))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo") / "base"
    model = tiny_llama(torch.bfloat16, hidden_size=128, intermediate_size=256, vocab_size=64, pad_token_id=2, eos_token_id=2)
    model.lm_head.weight.data.mul_(3)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(words=[f"w{i}" for i in range(59)])
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(base):
    """The weights that training sees, in BF16, for the server."""
    folder = base.parent / "rounded"
    model = freeze_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), "nvfp4")
    dequantize_model(model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def share_of_liked(completion_ids, **_) -> list[float]:
    return [sum(token in LIKED for token in ids) / max(len(ids), 1) for ids in completion_ids]


def test_it_learns_from_a_server_that_gets_adapters(base, served, tmp_path, monkeypatch, record_property):
    for module in (grpo_trainer, rloo_trainer):
        monkeypatch.setattr(module, "VLLMGeneration", module.VLLMGeneration)  # put back afterwards
    use_adapters(tmp_path / "versions")
    with server(served, "--logprobs-mode=processed_logprobs") as url:
        settings = dict(
            output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=1,
            bf16=False, lr_scheduler_type="constant", gradient_checkpointing=False, save_strategy="no", report_to="none",
            use_cpu=True, seed=0, num_generations=8, max_completion_length=8, beta=0.0,
            use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=str(base),
            reward_funcs=share_of_liked,
            args=trl.GRPOConfig(**settings, model_init_kwargs={"dtype": "bfloat16"}),
            train_dataset=Dataset.from_list([{"prompt": f"w{a} w{b}"} for a in range(8) for b in range(8)]),
            peft_config=NVFP4LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", backend="nvfp4"),
        )
        trainer.train()
    log = [line for line in trainer.state.log_history if "reward" in line]
    rewards, apart = ([line[key] for line in log] for key in ("reward", "sampling/sampling_logp_difference/mean"))
    assert trainer.vllm_generation.version == 20, "one for each step"
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["19", "20"]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4, rewards
    assert max(apart) < 0.1, "the server has this step's adapter; training rounds inputs to two terms of NVFP4"
    for name, value in (("first", rewards[0]), ("last", rewards[-1]), ("apart", max(apart))):
        record_property(name, value)
