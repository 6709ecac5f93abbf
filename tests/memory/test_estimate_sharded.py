"""The estimator for several GPUs: its arithmetic. Against FSDP2 itself: test_estimate_kept."""

from dataclasses import replace

import pytest

from peft_nvfp4.memory import Settings, card, estimate, fit, kept, largest_batch, room, run, usable

LARGE = {  # Llama 3.1 70B's config.json, what matters of it
    **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False},
}
ALONE = Settings(batch=1, sequence=2048, memory="small", checkpointing=True)
FOUR = replace(ALONE, cards=4, strategy="fsdp2")
WEIGHTS = ("frozen linears, forward layout", "frozen linears, backward layout")


def test_two_layers_are_gathered_in_the_layouts_that_are_kept():
    """A layer of 70B has 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 weights, .5625 bytes each in one layout."""
    n = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    adapters = 4 * 16 * (2 * 2 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    layer = n * 9 // 16 + 7 * 4 + 2 * 2 * 8192 + adapters  # + global scales, norms
    for memory, more in (("small", 0), ("fast", n * 9 // 16 + 7 * 4)):
        found = estimate(LARGE, replace(FOUR, memory=memory))
        # the last norm, of 2 * 8192 bytes, is spread over the layers: less than 1 KiB each
        assert found.moments["layer"][run.LAYER] == pytest.approx(2 * (layer + more), abs=1024)
        assert found.moments["final norm"][run.LAYER] == pytest.approx(layer + more, abs=512)
    assert found.moments["layer"][run.ROOT] == 2 * 2 * 128256 * 8192


def test_scales_of_nf4_stay_whole():
    alone, four = (estimate(LARGE, replace(s, backend="nf4")) for s in (ALONE, FOUR))
    n = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) * 80
    whole = alone.static[WEIGHTS[0]] - n // 2
    assert four.static[WEIGHTS[0]] == whole + n // 2 // 4
    assert whole == n // 64 + 4 * n // (64 * 256) + 7 * 80 * 4 * (16 + 256 + 1)  # a byte for 64, four for 256 of those, tables
    assert four.moments["layer"][run.LAYER] < 2 * (alone.static[WEIGHTS[0]] // 80 + alone.static["adapters"] // 80 + 2**15)


def test_ddp_holds_everything_and_its_buckets():
    alone, two = estimate("llama-8b", Settings()), estimate("llama-8b", Settings(cards=2))
    assert two.peak == alone.peak + kept.gradients(two.shape, two.settings)
    assert two.groups()["adapters and optimizer"] > alone.groups()["adapters and optimizer"]
    assert estimate("llama-8b", Settings(cards=2)).peak == estimate("llama-8b", Settings(cards=8)).peak


def test_70b_fits_on_cards_that_are_many_enough():
    memory = card("RTX 5090").memory
    batches = [largest_batch(LARGE, replace(FOUR, cards=n), memory) for n in (1, 2, 4, 8)]
    assert batches[0] == batches[1] == 0 < batches[2] < batches[3]
    assert estimate(LARGE, replace(FOUR, batch=batches[2])).peak <= room(FOUR, memory) < usable(memory)
    plan = fit(LARGE, replace(FOUR, checkpointing=False, memory="fast"), memory, 8)
    assert plan.settings.cards == 4 and plan.estimate.peak <= room(FOUR, memory)
    with pytest.raises(ValueError, match="one row of 2048 tokens takes"):
        fit(LARGE, replace(FOUR, cards=2), memory, 8)


def test_paged_state_on_the_host_is_shared():
    paged = replace(FOUR, optimizer="paged_adamw")
    assert estimate(LARGE, paged).host == estimate(LARGE, replace(paged, cards=1)).host // 4
    assert estimate(LARGE, replace(paged, strategy="ddp")).host == estimate(LARGE, replace(paged, cards=1)).host
