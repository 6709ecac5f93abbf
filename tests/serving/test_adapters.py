"""Adapters of this package, as they are saved, in vLLM's LoRA: the same model as here, several at once, and how far an adapter
that was trained on an NVFP4 base drifts when it is served on another one."""

import pytest
import torch
from _engines import (
    ask,
    assert_same_model,
    compare,
    drift,
    in_bf16,
    in_fp32,
    logprobs_of,
    lora_engine,
    prompts,
    record,
    request,
    save_base,
    train_adapter,
)
from transformers import AutoModelForCausalLM

from peft_nvfp4 import dequantize_model, freeze_model

STEPS = (1, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base(folders):
    return save_base(folders / "base")


@pytest.fixture(scope="module")
def trained(base, folders):
    """Step of counting -> the model with its adapter, on a BF16 base."""
    return {step: train_adapter(base, folders / f"bf16-{step}", step) for step in STEPS}


@pytest.fixture(scope="module")
def trained_in_nvfp4(base, folders):
    return train_adapter(base, folders / "nvfp4", 3, backend="nvfp4")


@pytest.fixture(scope="module")
def llm(base):
    with lora_engine(base) as llm:
        yield llm


def test_greedy_answers_are_those_of_the_trained_model(llm, base, folders, trained, record_property):
    answers = ask(llm, prompts(), request("one", 1, folders / "bf16-1"))
    found = compare(answers, trained[1], in_fp32(base, folders / "bf16-1"))
    assert_same_model(found)
    record(record_property, "found", found)
    with trained[1].disable_adapter():  # the bound would show an adapter that is not there
        apart = max((answer.logprobs - logprobs_of(trained[1], answer)).abs().max().item() for answer in answers)
    assert apart > 100 * found.bf16
    counted = sum(token == answer.prompt[-1] + 1 for answer in answers for token in answer.tokens[:1])
    assert counted > 25, "it learned to count"


def test_several_adapters_and_the_base_in_one_batch(llm, base, folders, trained):
    """Each prompt is answered by its own; the same prompts for all, so that an adapter of another prompt would show."""
    rows = prompts(17)
    adapters = {step: request(f"count-{step}", step + 10, folders / f"bf16-{step}") for step in STEPS}
    everyone = [(row, name) for row in rows for name in (*STEPS, None)]
    answers = ask(llm, [row for row, _ in everyone], [adapters.get(name) for _, name in everyone])
    for name in (*STEPS, None):
        own = [answer for answer, (_, asked) in zip(answers, everyone, strict=True) if asked == name]
        model = trained[name] if name else in_bf16(base)
        assert_same_model(compare(own, model, in_fp32(base, folders / f"bf16-{name}" if name else None)))


def test_an_adapter_that_was_trained_on_an_nvfp4_base(llm, base, folders, trained_in_nvfp4, record_property):
    """Its training saw the base's weights rounded to NVFP4, and inputs of two terms. Served on the weights of the file it drifts
    by the first; on the rounded weights, saved in BF16, only by the second."""
    adapter = request("nvfp4", 20, folders / "nvfp4")
    answers = ask(llm, prompts(), adapter)
    assert_same_model(compare(answers, in_bf16(base, folders / "nvfp4"), in_fp32(base, folders / "nvfp4")))
    on_file = drift(answers, trained_in_nvfp4)
    frozen = freeze_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), "nvfp4")
    dequantize_model(frozen).save_pretrained(folders / "rounded")
    with lora_engine(folders / "rounded") as rounded:
        answers = ask(rounded, prompts(), adapter)
    on_rounded = drift(answers, trained_in_nvfp4)
    record(record_property, "on_file", on_file)
    record(record_property, "on_rounded", on_rounded)
    assert on_rounded.mean < 0.5 * on_file.mean and on_rounded.agree >= on_file.agree
