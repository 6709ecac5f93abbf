"""Computations in tiles of rows: the same rows as without, gradients of parameters within the bound of another order of a sum."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from peft_nvfp4.autograd.seeds import draw_seed
from peft_nvfp4.autograd.tiles import in_tiles, tiles, tiling, wanted

ROWS, MOST = 37, 8


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=g).to(dtype) for shape in ((ROWS, 6), (5, 6), (3, 5)))
    return [t.requires_grad_() for t in (x, a, b)]


def test_tiles_cover_all_rows_in_nearly_equal_parts():
    for rows, most in ((37, 8), (8, 8), (9, 8), (1, 8), (4096, 1000)):
        parts = tiles(rows, most)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
        sizes = {part.stop - part.start for part in parts}
        assert max(sizes) <= most and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_and_gradients_of_parameters_a_sum_in_another_order(dtype):
    """|d| <= 2 ROWS u sum |products|, u = 2^-24; BF16: each tile's part rounded, and the total, 2^-8 of the parts each time."""
    x, a, b = inputs(dtype)
    run = lambda part: torch.tanh(part @ a.T) @ b.T
    y = in_tiles(run, x, MOST, [a, b])
    wanted_y = torch.cat([run(x[rows]) for rows in tiles(ROWS, MOST)])
    assert torch.equal(y, wanted_y)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(y, [x, a, b], dy)
    exact = torch.autograd.grad(run(x), [x, a, b], dy)
    parts = [torch.autograd.grad(run(x[rows]), [a, b], dy[rows]) for rows in tiles(ROWS, MOST)]
    in_order = [torch.stack([part[i].float() for part in parts]) for i in range(2)]
    sums = [total[0].clone() for total in in_order]
    for i, total in enumerate(in_order):
        for part in total[1:]:
            sums[i] += part
    assert all(torch.equal(g, s.to(dtype)) for g, s in zip(got[1:], sums)), "from the first tile to the last, in FP32"
    step = 2**-8 if dtype == torch.bfloat16 else 2**-24 * 2 * ROWS
    for g, e, p in zip(got[1:], exact[1:], in_order):
        assert (g.float() - e.float()).abs().max() <= 2 * step * (p.abs().sum(0).max() + e.abs().max())
    rows = torch.cat([torch.autograd.grad(run(x[rows]), x, dy[rows])[0][rows] for rows in tiles(ROWS, MOST)])
    assert torch.equal(got[0], rows)


def test_what_is_not_trained_or_not_used_gets_no_gradient():
    x, a, b = inputs()
    unused = torch.randn(3, requires_grad=True)
    y = in_tiles(lambda part: part @ a.T @ b.T, x.detach(), MOST, [a, b, unused])
    y.sum().backward()
    assert x.grad is None and unused.grad is None and a.grad is not None
    y = in_tiles(lambda part: part @ a.detach().T, x, MOST, [])
    y.sum().backward()
    assert torch.allclose(x.grad, a.detach().sum(0).expand_as(x))
    with torch.no_grad():
        assert not in_tiles(lambda part: part @ a.T, x, MOST, [a]).requires_grad


def test_backward_finds_x_in_what_is_kept():
    x, a, _ = inputs()
    half = (x.detach() / 2).clone()
    seen = []

    def run(part, halves):
        seen.append(torch.equal(part.detach(), 2 * halves))
        return part @ a.T

    y = in_tiles(run, x, MOST, [a], [half], lambda halves: 2 * halves)
    x.data.zero_()  # backward does not look
    seen.clear()
    y.sum().backward()
    assert len(seen) == 5 and all(seen)


def test_seeds_are_drawn_again_and_the_generator_goes_on():
    x, a, _ = inputs()
    drawn = []

    def run(part):
        drawn.append(int(draw_seed()))
        return part @ a.T

    y = in_tiles(run, x, MOST, [a])
    forward, state = drawn.copy(), torch.get_rng_state()
    drawn.clear()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    y.sum().backward()
    assert drawn == forward and len(set(forward)) == 5
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(state, before)


def test_autocast_is_that_of_the_call():
    x, a, _ = inputs()
    kinds = []

    def run(part):
        y = part @ a.T
        kinds.append(y.dtype)
        return y

    with torch.autocast("cpu", torch.bfloat16):
        y = in_tiles(run, x, MOST, [a])
    y.float().sum().backward()
    assert set(kinds) == {torch.bfloat16} and len(kinds) == 10 and a.grad.dtype == torch.float32


def test_a_checkpoint_around_it_does_not_compute_it_again():
    """What is computed: every tile in forward and every tile in backward; not once more when the checkpoint is computed again."""
    x, a, b = inputs()
    calls = []

    def tile(part):
        calls.append(len(part))
        return torch.tanh(part @ a.T)

    def layer(x):
        return x[:, :5] + in_tiles(tile, torch.sin(x), MOST, [a])

    y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert len(calls) == 2 * 5
    got, a.grad, x.grad = (a.grad, x.grad), None, None
    (x[:, :5] + torch.tanh(torch.sin(x) @ a.T)).sum().backward()
    assert torch.allclose(got[0], a.grad, rtol=1e-5, atol=1e-6) and torch.allclose(got[1], x.grad, rtol=1e-5, atol=1e-6)


def test_a_graph_that_is_retained_can_be_differentiated_twice():
    x, a, _ = inputs()
    y = in_tiles(lambda part: part @ a.T, x, MOST, [a])
    first = torch.autograd.grad(y.sum(), a, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), a)[0])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(y.sum(), a)


def test_what_is_kept_goes_with_backward():
    x, a, _ = inputs()
    half = (x.detach() / 2).clone()
    kept = weakref.ref(half)
    y = in_tiles(lambda part, halves: part @ a.T, x, MOST, [a], [half], lambda halves: 2 * halves)
    del half
    assert kept() is not None
    y.sum().backward()
    gc.collect()
    assert kept() is None and y is not None


def test_tiling_is_wanted_within_its_context_only():
    assert not wanted()
    with pytest.raises(ZeroDivisionError), tiling():
        assert wanted()
        raise ZeroDivisionError
    assert not wanted()
