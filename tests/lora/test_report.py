"""The report of a merge: its figures against their definitions, and what it warns of."""

import pytest
import torch

from peft_nvfp4 import ops
from peft_nvfp4.lora.merge import _warnings
from peft_nvfp4.lora.report import (
    LayerReport,
    MergeReport,
    ProbeReport,
    Retention,
    as_batches,
    compare_logits,
    measure_layer,
    rounding_step,
)
from peft_nvfp4.numerics.formats import E2M1_GRID, WEIGHT

# ---------------------------------------------------------------------------------------------- figures


def test_measures_are_their_definitions():
    """Against a slow loop, on a small matrix; and on ones where the answer is known."""
    before, dense = torch.randn(4, 32), torch.randn(4, 32)
    after = torch.randn(4, 32)
    after[:2] = before[:2]
    got = measure_layer("x", "nvfp4", before, dense, after, torch.ones(4, 32))
    d, s = (dense - before).double(), (after - before).double()
    along = sum(a * b for a, b in zip(s.flatten().tolist(), d.flatten().tolist()))
    size = sum(v * v for v in d.flatten().tolist())
    assert got.retained == pytest.approx(along / size, rel=1e-6)
    assert got.error == pytest.approx(((after - dense).double().norm() / d.norm()).item(), rel=1e-6)
    assert got.effect == pytest.approx((d.norm() / before.double().norm()).item(), rel=1e-6)
    assert got.changed == 0.5 and got.steps == pytest.approx((size / 128) ** 0.5, rel=1e-6)
    lost = measure_layer("x", "nvfp4", before, dense, before, None)
    assert (lost.retained, lost.changed) == (0, 0) and lost.error == pytest.approx(1)
    nothing = measure_layer("x", "nvfp4", before, before, before, None)
    assert (nothing.retained, nothing.error, nothing.effect) == (1, 0, 0)
    whole = sum((got, lost, nothing), Retention())
    assert whole.retained == pytest.approx(along / (2 * size), rel=1e-6)


def test_rounding_step_is_the_distance_of_neighbours():
    w = torch.randn(8, 48) * torch.logspace(-3, 2, 8)[:, None]
    w[3] = 0
    q = ops.quantize_weight(w, WEIGHT)
    values = ops.dequantize(q)
    step = rounding_step(q, values)
    scale = (q.scales.view(torch.float8_e4m3fn).float() * q.gscale).repeat_interleave(16, 1)[:, :48]
    for at in [(i, j) for i in range(8) for j in range(0, 48, 5)]:
        magnitude, s = values[at].abs().item(), scale[at].item()
        if s == 0:
            assert step[at] == 0
            continue
        code = E2M1_GRID.index(pytest.approx(magnitude / s, rel=1e-6))
        low = min(code, 6)
        assert step[at].item() == pytest.approx(s * (E2M1_GRID[low + 1] - E2M1_GRID[low]), rel=1e-6)


def test_report_on_logits():
    base, adapter = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 1]]), torch.tensor([[0.0, 1, 0], [0, 2, 0], [3, 0, 1]])
    merged = torch.tensor([[0.0, 1, 0], [0, 2, 0], [0, 0, 1]])  # the first position's effect survived, the last one's did not
    got = compare_logits([base], [adapter], [merged])
    assert got.positions == 3 and got.effect == pytest.approx((11 / 6) ** 0.5)
    assert got.retained == pytest.approx(2 / 11) and got.error == pytest.approx((9 / 11) ** 0.5)
    assert (got.same_choice, got.changed_choice, got.kept_choice) == (2 / 3, 2 / 3, 0.5)
    assert compare_logits([base], [base], [base]).kept_choice is None


def test_batches():
    ids = torch.zeros(1, 2)
    assert len(as_batches(ids)) == len(as_batches({"input_ids": ids})) == 1 and len(as_batches((ids, ids))) == 2
    for wrong in ([], ["text"]):
        with pytest.raises(ValueError, match="probe is"):
            as_batches(wrong)


# ---------------------------------------------------------------------------------------------- warnings


def told(to, retained, error, on_logits=None, aware=False, stored=None):
    """A report of one layer with these figures."""
    steps = 0.3 if stored is None else None
    layer = LayerReport(retained, 1.0, error**2, 100.0, name="x", stored=stored or to, changed=1.0, steps=steps)
    choices = dict(positions=8, same_choice=1.0, changed_choice=0.0, kept_choice=None)
    probe = None if on_logits is None else ProbeReport(on_logits, 1.0, 0.0, 100.0, **choices)
    return MergeReport(to, ["default"], aware, [layer], probe)


@pytest.mark.parametrize(
    "to, retained, error, on_logits, words",
    (
        ("bf16", 1.0, 0.0, None, None),
        ("bf16", 0.5, 0.0, None, None),
        ("bf16", 0.49, 0.0, None, "near no-op"),
        ("bf16", 1.0, 1.0, None, None),
        ("bf16", 1.0, 1.5, None, "adds 1.5 times as much"),
        ("bf16", 0.4, 1.5, None, "near no-op"),  # one of the two
        ("bf16", 1.0, 0.0, 0.1, None),  # on logits, BF16 is not judged
        ("nvfp4", 1.0, 0.0, None, None),
        ("nvfp4", 1.0, 0.0, 0.5, None),
        ("nvfp4", 1.0, 0.0, 0.49, "near no-op"),
        ("nvfp4", 1.0, 1.5, 0.9, "adds 1.5 times as much"),
    ),
)
def test_what_is_warned_of(to, retained, error, on_logits, words):
    """Less than half kept, or more error than adapter; the limits themselves are fine. Merge-aware, the rounded sum is what was
    trained, and nothing is lost."""
    for aware in (False, True):
        found = _warnings(told(to, retained, error, on_logits, aware))
        assert len(found) == bool(words and not aware) and (not found or words in found[0])


def test_dense_layers_of_a_model_in_nvfp4_are_warned_of_in_their_own_words():
    """An adapter of dense layers only is merged into their dtype."""
    for retained, error, words in ((0.4, 0.0, "smaller than bf16 can resolve"), (1.0, 1.5, "rounding to bf16 adds 1.5 times")):
        (found,) = _warnings(told("nvfp4", retained, error, stored="bf16"))
        assert words in found and "Merge to 'fp32'" in found


def test_unequal_scales_are_warned_of():
    report = told("nvfp4", 1.0, 0.0)
    report.unequal_scales = [["a.q_proj", "a.k_proj"], ["b.q_proj", "b.k_proj"]]
    (found,) = _warnings(report)
    assert found.startswith("2 groups of linears of one input (the first: a.q_proj, a.k_proj) have different global scales")
