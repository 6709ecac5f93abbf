"""What ``peft-nvfp4 merge`` writes, served by vLLM with its tokenizer: tied embeddings, added tokens and a resized vocabulary,
and an adapter that trained the new tokens beside the linears, or the head."""

import pytest
import torch
from _engines import (
    VOCABULARY,
    ask,
    assert_same_model,
    compare,
    count_in_steps,
    engine,
    in_bf16,
    in_fp32,
    logprobs_of,
    new_model,
    record,
    save_base,
)
from _tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from peft_nvfp4 import cli

ADDED = ["<call>", "<result>", "<end>"]
BESIDE = {
    "tokens": dict(trainable_token_indices=[*range(VOCABULARY, VOCABULARY + len(ADDED))]),
    "head": dict(target_modules=["q_proj", "down_proj", "lm_head"]),  # of its own after the merge, no longer tied
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """131 embeddings, tied, and a tokenizer that knows three more words."""
    folder = tmp_path_factory.mktemp("resized") / "base"
    save_base(folder, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = tiny_tokenizer(words=[f"w{i}" for i in range(VOCABULARY - 5)])
    tokenizer.add_tokens(ADDED)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("beside", BESIDE)
def test_a_merged_model(base, tmp_path, beside, record_property):
    model = new_model(base, backend="nvfp4", **BESIDE[beside])
    count_in_steps(model, 3)
    model.save_pretrained(tmp_path / "adapter")
    words = ["merge", tmp_path / "adapter", "-o", tmp_path / "merged", "--to", "bf16"]
    result = CliRunner().invoke(cli.application(), [*map(str, words)])
    assert result.exit_code == 0, result.output
    assert AutoConfig.from_pretrained(tmp_path / "merged").tie_word_embeddings == (beside == "tokens")

    rows = [f"w1 {word} w{number}" for word in ADDED for number in range(0, 100, 9)]
    with engine(tmp_path / "merged", skip_tokenizer_init=False) as llm:
        answers = ask(llm, rows)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert [answer.prompt for answer in answers] == [tokenizer(row).input_ids for row in rows]
    assert {answer.prompt[1] for answer in answers} == {VOCABULARY, VOCABULARY + 1, VOCABULARY + 2}
    assert answers[0].logprobs.shape[1] == VOCABULARY + len(ADDED), "without the rows that vLLM pads a vocabulary with"
    merged = tmp_path / "merged"
    found = compare(answers, in_bf16(merged), in_fp32(merged))
    assert_same_model(found)
    record(record_property, beside, found)
    apart = torch.cat([answer.logprobs - logprobs_of(model, answer) for answer in answers]).abs().mean().item()
    with model.disable_adapter():
        without = torch.cat([answer.logprobs - logprobs_of(model, answer) for answer in answers]).abs().mean().item()
    assert apart < 0.02 * without, "inputs of two terms, and one rounding of the sum to BF16"
