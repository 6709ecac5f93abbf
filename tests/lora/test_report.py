"""The report of a merge: its figures against their definitions, and what it warns of."""

import pytest
import torch

from peft_nvfp4.lora.merge import _warnings
from peft_nvfp4.lora.report import LayerReport, MergeReport, ProbeReport, as_batches, compare_logits, measure_layer, weighted


def test_measures_are_their_definitions():
    """Against a slow loop, on a small matrix; and on ones where the answer is known."""
    before, dense = torch.randn(4, 32), torch.randn(4, 32)
    after = torch.randn(4, 32)
    after[:2] = before[:2]
    got = measure_layer("x", "nvfp4", before, dense, after)
    d, s = (dense - before).double(), (after - before).double()
    along = sum(a * b for a, b in zip(s.flatten().tolist(), d.flatten().tolist()))
    size = sum(v * v for v in d.flatten().tolist())
    assert got.retained == pytest.approx(along / size, rel=1e-6)
    assert got.error == pytest.approx(((after - dense).double().norm() / d.norm()).item(), rel=1e-6)
    assert got.effect == pytest.approx((d.norm() / before.double().norm()).item(), rel=1e-6)
    assert got.changed == 0.5
    lost = measure_layer("x", "nvfp4", before, dense, before)
    assert (lost.retained, lost.changed) == (0, 0) and lost.error == pytest.approx(1)
    nothing = measure_layer("x", "nvfp4", before, before, before)
    assert (nothing.retained, nothing.error, nothing.effect) == (1, 0, 0)
    whole = weighted([got, lost, nothing])
    assert whole["retained"] == pytest.approx(along / (2 * size), rel=1e-6)
    error = (after - dense).double().square().sum().item() + size
    assert whole["error"] == pytest.approx((error / (2 * size)) ** 0.5, rel=1e-6)


def test_report_on_logits():
    base, adapter = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 1]]), torch.tensor([[0.0, 1, 0], [0, 2, 0], [3, 0, 1]])
    merged = torch.tensor([[0.0, 1, 0], [0, 2, 0], [0, 0, 1]])  # the first position's effect survived, the last one's did not
    got = compare_logits([base], [adapter], [merged])
    assert got.positions == 3 and got.effect == pytest.approx((11 / 6) ** 0.5)
    assert got.retained == pytest.approx(2 / 11) and got.error == pytest.approx((9 / 11) ** 0.5)
    assert (got.same_choice, got.changed_choice) == (2 / 3, 2 / 3)
    assert compare_logits([base[:1], base[1:]], [adapter[:1], adapter[1:]], [merged[:1], merged[1:]]) == got


def test_batches():
    ids = torch.zeros(1, 2)
    assert len(as_batches(ids)) == len(as_batches({"input_ids": ids})) == 1 and len(as_batches((ids, ids))) == 2
    for wrong in ([], ["text"]):
        with pytest.raises(ValueError, match="probe is"):
            as_batches(wrong)


def told(to, retained, error, on_logits=None, aware=False, stored=None):
    """A report of one layer with these figures."""
    layer = LayerReport("x", stored or to, changed=1.0, size=1.0, effect=0.1, retained=retained, error=error)
    figures = dict(size=1.0, effect=0.1, retained=on_logits, error=0.0)
    probe = None if on_logits is None else ProbeReport(positions=8, same_choice=1.0, changed_choice=0.0, **figures)
    return MergeReport(to, ["default"], [layer], retained, error, aware, probe)


@pytest.mark.parametrize(
    "to, retained, error, on_logits, words",
    (
        ("bf16", 1.0, 0.0, None, None),
        ("bf16", 0.5, 0.0, None, None),
        ("bf16", 0.49, 0.0, None, "near no-op"),
        ("bf16", 1.0, 1.0, None, None),
        ("bf16", 1.0, 1.5, None, "adds 1.5 times as much"),
        ("bf16", 0.4, 1.5, None, "near no-op"),  # one of the two
        ("bf16", 1.0, 0.0, 0.1, "keeps 10%"),  # the logits decide
        ("nvfp4", 1.0, 0.0, None, None),
        ("nvfp4", 1.0, 0.0, 0.5, None),
        ("nvfp4", 1.0, 0.0, 0.49, "keeps 49%"),
        ("nvfp4", 1.0, 1.5, 0.9, "adds 1.5 times as much"),
    ),
)
def test_what_is_warned_of(to, retained, error, on_logits, words):
    """Less than half kept, or more error than adapter; the limits themselves are fine. Merge-aware, the rounded sum is what was
    trained, and nothing is lost; what the logits say counts for both."""
    for aware in (False, True):
        found = _warnings(told(to, retained, error, on_logits, aware))
        assert len(found) == bool(words and (not aware or words.startswith("keeps"))) and (not found or words in found[0])


def test_dense_layers_of_a_model_in_nvfp4_are_warned_of_in_their_own_words():
    """An adapter of dense layers only is merged into their dtype."""
    for retained, error, words in ((0.4, 0.0, "rounding to bf16 leaves 40%"), (1.0, 1.5, "rounding to bf16 adds 1.5 times")):
        (found,) = _warnings(told("nvfp4", retained, error, stored="bf16"))
        assert words in found and "Merge to 'fp32'" in found


def test_unequal_scales_are_warned_of():
    report = told("nvfp4", 1.0, 0.0)
    report.unequal_scales = [["a.q_proj", "a.k_proj"], ["b.q_proj", "b.k_proj"]]
    (found,) = _warnings(report)
    assert found.startswith("2 groups of linears of one input (the first: a.q_proj, a.k_proj) have different global scales")
