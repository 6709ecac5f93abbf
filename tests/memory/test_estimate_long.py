"""The estimator on long sequences: checkpoints on the host, MLPs in tiles."""

from dataclasses import replace

import pytest

from peft_nvfp4.autograd import long_attention
from peft_nvfp4.fusion import mlp
from peft_nvfp4.memory import Settings, estimate, long_sequences, longest_context, model_shape, room
from peft_nvfp4.training import host_checkpoints

LONG = Settings(memory="small", rank=32, checkpointing=True, host_checkpoints=True, sequence=40960)
GIB = 1 << 30


def test_constants_are_those_of_what_computes():
    assert long_sequences.TILE_VALUES == mlp.TILE_VALUES and long_sequences.GROUPS == long_attention.GROUPS
    assert long_sequences.NORM_VALUES == host_checkpoints.NORM_VALUES
    assert all(long_sequences.groups(heads) == long_attention.groups(heads) for heads in (1, 2, 3, 8, 10, 32))
    assert all(long_sequences.tile_rows(width) == mlp.tile_rows(width) for width in (176, 8192, 14336, 1 << 20))


def test_what_grows_with_the_tokens_is_one_layer():
    """From 80k to 120k tokens: 70 kB each, at most 80, of any number of layers; and 262 kB a token on the host."""
    shape = model_shape("llama-8b")
    short, long = (estimate(shape, replace(LONG, sequence=n)) for n in (81920, 122880))
    assert 65_000 < (long.peak - short.peak) / 40960 < 80_000 and long.at in ("attention", "recomputation")
    deeper = replace(shape, layers=64)
    more = [estimate(deeper, replace(LONG, sequence=n)).peak for n in (81920, 122880)]
    assert more[1] - more[0] == long.peak - short.peak
    assert long.checkpoints == 122880 * 32 * 8192 and short.as_dict()["checkpoint_bytes"] == 81920 * 32 * 8192
    here = estimate(shape, replace(LONG, host_checkpoints=False, sequence=81920))
    assert here.checkpoints == 0 and here.peak > short.peak + 81920 * 30 * 8192


@pytest.mark.parametrize("memory, cap", [("smallest", 8), ("small", 12), ("small", 16), ("fast", 24)])
def test_longest_context_is_the_longest(memory, cap):
    settings = replace(LONG, memory=memory, checkpointing=False, host_checkpoints=False, batch=4)
    longest = longest_context("llama-8b", settings, cap * GIB)
    assert longest.settings.batch == 1 and longest.settings.checkpointing and longest.settings.sequence % 256 == 0
    assert longest.peak <= room(settings, cap * GIB)
    longer = replace(longest.settings, sequence=longest.settings.sequence + 256)
    assert estimate("llama-8b", longer).peak > room(settings, cap * GIB)


def test_forward_and_backward_as_derived():
    """Bytes a token of Llama-8B, two terms: hidden state and queries 8192, keys 2048, codes 2 * (2304 + 4)."""
    of = lambda n: estimate("llama-8b", replace(LONG, sequence=n)).moments
    slope = {name: (sum(of(122880)[name].values()) - sum(of(81920)[name].values())) / 40960 for name in of(81920)}
    hidden = 2 * 32 * 7 + 4 * 32  # adapters' hidden values, log-sum-exp
    assert slope["forward"] == 4 * 8192 + 2 * 8192 + 2 * 2048 + 2 * 4616 + 4 + hidden
    assert slope["recomputation"] == slope["forward"] + 8192
    group = (5 * 8192 + 4 * 4096) // 8
    assert slope["attention"] == 2 * 8192 + 2 * (2 * 8192 + 2 * 2048) + 4616 + 4 + hidden + group


def test_what_fits_nowhere():
    assert longest_context("llama-8b", LONG, 6 * GIB) is None


def test_other_backends_keep_a_layer_in_full():
    """Their MLPs do not compute in tiles: only the checkpoints go."""
    for backend in ("nf4", "bf16"):
        with_, without = (
            estimate("llama-1b", replace(LONG, backend=backend, host_checkpoints=host, sequence=4096)) for host in (True, False)
        )
        less = sum(without.moments["layer"].values()) - sum(with_.moments["layer"].values())
        assert less == 14 * 4096 * 4096 and not long_sequences.in_tiles(with_.shape, with_.settings)


def test_checkpoints_need_checkpointing():
    with pytest.raises(ValueError, match="needs checkpointing"):
        Settings(host_checkpoints=True)
