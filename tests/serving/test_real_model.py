"""SmolLM2-135M, when it was fetched (make fetch): an adapter that learned film reviews on an NVFP4 base, in vLLM on the model's
BF16 files and on the weights that training saw."""

import pytest
import smollm2_reviews as reviews
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
    new_model,
    record,
    request,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_nvfp4 import dequantize_model, freeze_model

ROWS = 20


@pytest.mark.slow
def test_an_adapter_of_film_reviews(tmp_path, record_property):
    try:
        base = str(reviews.model_folder())
        train, test = reviews.movie_reviews(n_test=ROWS)
    except FileNotFoundError as error:
        pytest.skip(f"not run: the model and the data were not fetched ({error})")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = new_model(base, backend="nvfp4")
    reviews.fine_tune(model, tokenizer, train, steps=8, batch_size=8, lr=1e-3)
    model.eval().save_pretrained(tmp_path / "adapter")
    rounded = dequantize_model(freeze_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), "nvfp4"))
    rounded.save_pretrained(tmp_path / "rounded")

    rows, adapter = [ids for ids, _ in reviews.encode(tokenizer, test)], request("reviews", 1, tmp_path / "adapter")
    for name, folder in (("on_file", base), ("on_rounded", str(tmp_path / "rounded"))):
        with lora_engine(folder, max_model_len=128) as llm:
            answers = ask(llm, rows, adapter, tokens=1)  # " negative" or " positive"
        record(record_property, name, drift(answers, model))
        found = compare(answers, in_bf16(folder, tmp_path / "adapter"), in_fp32(folder, tmp_path / "adapter"))
        assert_same_model(found)
        record(record_property, f"{name}_found", found)
    with model.disable_adapter():
        effect = torch.cat([logprobs_of(model, answer) - answer.logprobs for answer in answers]).abs().mean().item()
    record_property("effect", effect)
