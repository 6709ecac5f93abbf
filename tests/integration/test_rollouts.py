"""Rollouts and training agree: the log-probabilities of sampled tokens that `generate` gives are those of the training forward.

Reinforcement learning takes them for the same numbers. Here they are: one frozen base, codes with a scale for each token, so
neither the batch nor the padding nor the length counts. What is left is rounding: attention over a cache, other products' shapes.
Two layers show that alone. In deep models the rounding moves some codes to their neighbour, and grows (docs/dpo-and-grpo.md).
"""

import pytest
import torch
from _assertions import unit
from conftest import tiny_llama
from peft import get_peft_model

from peft_nvfp4 import NVFP4LoraConfig, packing_status

ROWS, PROMPT, NEW = 8, 9, 16


def policy(backend, **settings):
    """With a head whose logits tell tokens apart, and an adapter that is not zero."""
    model = tiny_llama(pad_token_id=0, eos_token_id=None)
    model.lm_head.weight.data.mul_(10)
    torch.manual_seed(1)
    lora = NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, backend=backend, **settings)
    return get_peft_model(model, lora)


def rollouts(model):
    """(sequences (ROWS, PROMPT + NEW), attention mask, log-probabilities of the new tokens (ROWS, NEW)); prompts padded left."""
    ids = torch.randint(3, 128, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(PROMPT) >= torch.arange(ROWS)[:, None]).long()
    torch.manual_seed(2)
    found = model.eval().generate(
        input_ids=ids * mask, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    mask = torch.cat([mask, torch.ones(ROWS, NEW, dtype=torch.long)], 1)
    return found.sequences, mask, of_sampled(torch.stack(found.logits, 1), found.sequences)


def of_sampled(logits, sequences):
    return logits.log_softmax(-1).gather(-1, sequences[:, -NEW:, None])[..., 0]


def training_logits(model, sequences, mask):
    """As TRL's trainers call the model."""
    return model.train()(input_ids=sequences, attention_mask=mask, logits_to_keep=NEW + 1).logits[:, :-1]


@pytest.mark.parametrize("backend, accuracy", [("nvfp4", "high"), ("nvfp4", "paper"), ("nf4", "high"), ("bf16", "high")])
def test_the_training_forward_gives_the_log_probabilities_of_generate(backend, accuracy):
    """In FP32 both compute the same sums in another order: some 64 roundings of 2**-24 of the largest logit, in the token's
    logit and in the normaliser. Of nvfp4, a value within that noise of a rounding threshold (3 of 10**6) gets the neighbouring
    code, and its row is further off: one row of 8 may be."""
    if backend == "nf4":
        pytest.importorskip("bitsandbytes")
    model = policy(backend, accuracy=accuracy)
    sequences, mask, rolled = rollouts(model)
    logits = training_logits(model, sequences, mask)
    assert packing_status(model).calls == 1 and logits.requires_grad
    off = (of_sampled(logits, sequences) - rolled).abs().amax(1)
    bound = 2 * 64 * unit(torch.float32) * logits.abs().max()
    assert (off > bound).sum() <= (backend == "nvfp4"), off


def test_rollouts_of_another_base_are_off_policy():
    """What the bound above tells apart: the same adapter on the unquantised base, as a serving engine would hold it."""
    sequences, mask, rolled = rollouts(policy("bf16"))
    trained = of_sampled(training_logits(policy("nvfp4", accuracy="paper"), sequences, mask), sequences)
    assert (trained - rolled).abs().mean() > 1e-2
