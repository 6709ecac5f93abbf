"""Runs a case three times, fused, unfused and as the dense reference, and says what 'equal' means.

**Bits**, where the documentation promises them: checkpointing, offload and threads change nothing; where nf4 or bf16 keep codes
for backward, the forward pass is that of the unfused model.

**A bound**, against the reference. It computes what fused and unfused parts are documented to compute, in another order of FP32
sums and roundings (``_reference.py``), so the deviation d of a result comes from rounding to the activations' dtype alone:
errors of relative size u = 2**-8 (BF16) or 2**-21 (FP32, with sums of up to 64 products) in every norm, product and linear. To
first order d is the sum over all places of (derivative of the result) * (error); for independent errors its mean square depends
on their size alone. So a run of the reference with random errors of size u in these places is a sample of |d| with the
derivatives of this very case. What is not smooth is sampled with it: an error may move a value across a rounding threshold of
NVFP4, here as there. The bound is FACTOR times the largest of RUNS samples; where a result is beyond, of RUNS_IN_DOUBT more
with errors 8 times as large (most FP32 samples cross no threshold, a result that does needs some that do). Only an adapter's A
may see in backward an input that is an NVFP4 term away from the forward's (``kept_for_adapters``).

Which of the parts that :func:`peft_nvfp4.attach` has fused are fused in a call is the package's business: it may run the original
where somebody has intervened, and norms where it could not see an edit; or let a reader quantise anew what a fused part passes
on (with two terms, Q(D(Q(y))) is not Q(y)). So a model is right if it is near the reference with all of them fused, or with the
MLPs alone, or with such a change of those that stand in a layer with an intervention (one choice for all results), or with none.

A lost intervention changes a result by about its whole size: :func:`lost_would_show` measures that against the bound."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import threading
from collections.abc import Sequence
from unittest import mock

import torch
from _cases import Case
from _parts import NOISE
from _reference import Codes, Copies, copied, dense_reference
from _runs import Results, batch, fixed_masks, fused_model, prepared, run, settings, step
from hypothesis import reject
from hypothesis.errors import UnsatisfiedAssumption
from torch import nn

from peft_nvfp4 import detach
from peft_nvfp4.autograd import activation_cache

FACTOR, RUNS, RUNS_IN_DOUBT = 4, 2, 10
FAR = 10**4
"""Times a bound: no doubt. A crossed threshold may move a result by 2**-7 of its size, thousands of times what 2**-21 does."""
SAME_IN_PYTORCH = ("checkpoint", "reentrant", "interleaved", "retained", "functional", "saved")
"""Ways to run that may mean something else where somebody intervenes: if so for the reference, the case says nothing."""


class Wrong(AssertionError):
    """A model that does not compute what it should. ``times``: how many times what is allowed."""

    times = float("inf")


# ---------------------------------------------------------------------------------------------- comparisons


def same_bits(what: str, got: Results, expected: Results, only: tuple[str, ...] = ()) -> None:
    for name, value in expected.items():
        if only and not name.startswith(only):
            continue
        other = got.get(name)
        if (value is None) != (other is None):
            raise Wrong(f"{what}: {name} is {'None' if other is None else 'there'}, expected otherwise")
        if value is not None and not torch.equal(value, other):
            far = ((value - other).norm() / value.norm()).item()
            raise Wrong(f"{what}: {name} has other bits, {far:.2g} of its norm away")


def near(what: str, got: Results, expected: Results, allowed: dict[str, float]) -> None:
    for name, value in expected.items():
        other = got.get(name)
        if (value is None) != (other is None):
            raise Wrong(f"{what}: {name} is {'None' if other is None else 'not None'}, in the reference it is otherwise")
        if value is None:
            continue
        away = (other - value).norm().item() if other.shape == value.shape else float("inf")
        if not away <= allowed[name]:
            norm, bound = value.norm().item(), allowed[name]
            error = Wrong(f"{what}: {name} is {away:.3g} from the reference's, whose norm is {norm:.3g}; allowed {bound:.2g}")
            error.times = away / (bound + 1e-30)
            raise error
    if extra := got.keys() - expected.keys():
        raise Wrong(f"{what}: {sorted(extra)} should not be there")


def in_threads(model: nn.Module, case: Case, count: int = 2) -> None:
    """Several threads compute on one model at a time: each gets, bit for bit, what it gets alone; with offload, or an error."""
    with fixed_masks(), contextlib.ExitStack() as stack:
        model = prepared(model, case, case.run, stack)[0]
        xs = [batch(case, number) for number in range(count)]
        step(model, case, xs[0], case.run)  # what changes once has changed
        alone = [step(model, case, x, case.run) for x in xs]
        together: list = [None] * count
        barrier = threading.Barrier(count)

        def work(i: int) -> None:
            barrier.wait()
            try:
                together[i] = step(model, case, xs[i], case.run)
            except Exception as error:  # told below, by the thread that can fail the test
                together[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for expected, got in zip(alone, together):
        if case.run == "offload_threads" and "one thread at a time" in str(got):
            continue
        if isinstance(got, Exception):
            raise Wrong(f"in a thread: {type(got).__name__}: {got}")
        same_bits("in threads, against alone", got, expected)


class Reference:
    """The reference with some parts fused: its results, and how far others may be from them."""

    def __init__(self, model: Copies, case: Case, fused: dict[str, Codes], how: str = "plain"):
        self.model, self.case, self.fused, self.how = model, case, fused, how
        self.results = run(copied(model, fused), case, how)
        values = {name: value for name, value in self.results.items() if value is not None}
        largest = max((value.norm().item() for name, value in values.items() if name.startswith("grad")), default=0.0)
        self.floor = {n: 1e-5 * (largest if n.startswith("grad") else value.norm().item()) for n, value in values.items()}
        self.allowed = dict(self.floor)  # FP32 sums alone: most cases need no samples
        self.size = 2.0**-8 if case.dtype == "bfloat16" or case.mode == "autocast" else 2.0**-21

    def sample(self, count: int, size: float) -> None:
        """Raise the bounds to FACTOR times the largest of ``count`` samples."""
        for i in range(count):
            torch.manual_seed(int(1 / size) + i)
            with mock.patch.object(NOISE, "size", size):
                sample = run(copied(self.model, self.fused), self.case, self.how)
            for name, floor in self.floor.items():
                far = FACTOR * (sample[name] - self.results[name]).norm().item() + floor
                self.allowed[name] = max(far, self.allowed[name])

    def nearby(self, what: str, got: Results) -> Reference:
        """Itself. Raises :class:`Wrong` if ``got`` is beyond the bounds."""
        for count, size in ((0, 0.0), (RUNS, self.size), (RUNS_IN_DOUBT, 8 * self.size)):
            self.sample(count, size)
            try:
                near(what, got, self.results, self.allowed)
                return self
            except Wrong as error:
                wrong = error
            if wrong.times > FAR and count or wrong.times == float("inf"):
                break
        raise wrong


MOST_CHOICES, LIKELIEST, NEAREST = 250, 6, 6


def choices(case: Case, parts: dict[str, Codes]):
    """What the parts may be in a call: all fused, or the MLPs alone, or none; those in layers with interventions each fused,
    fused with readers that quantise anew, or not fused. What changes least first."""
    layers = {act.place.split(".")[1] for act in case.acts}
    if case.run not in ("plain", "offload", "threads", "offload_threads"):
        layers.add("0")
    everywhere = case.around == "" or case.edited or any(act.kind == "global" for act in case.acts)
    touched = [name for name in parts if everywhere or name.split(".")[1] in layers]
    changes = [dict(zip(touched, states)) for states in itertools.product((0, 1, 2), repeat=min(len(touched), 6))]
    changes.sort(key=lambda states: sum(map(bool, states.values())))
    seen = []
    for states in changes[:MOST_CHOICES]:
        for fused in (parts, {name: codes for name, codes in parts.items() if "norm" not in name}, {}):
            chosen = {
                name: dataclasses.replace(codes, handed=states.get(name) != 1)
                for name, codes in fused.items()
                if states.get(name) != 2
            }
            if chosen not in seen:
                seen.append(chosen)
                yield chosen


def attached_parts(case: Case, model: nn.Module) -> dict[str, Codes]:
    """Dotted name -> what the part emits, of the norms and MLPs that are fused."""
    inside = {"high": 2}.get(case.accuracy, 1)
    at_norm = 1 if case.accuracy == "paper" else 2
    report = getattr(model.base_model, "nvfp4_report", None)
    if report and "(model)" in report.skipped:
        raise RuntimeError(report.skipped["(model)"])  # the case would say nothing of fused norms
    names = [name for name in report.fused if name.startswith("layers")] if report else []
    if case.reader and case.residual == "pre":  # a norm that others read must not be fused
        names = [name for name in names if not name.endswith("norm1")]
    if case.backend != "nvfp4":
        return {name: Codes(0) for name in names}
    return {name: Codes(at_norm if "norm" in name else inside) for name in names}


def check(case: Case, power: bool = False) -> list[bool]:
    """Raises :class:`Wrong` if a model computes something else than the reference; ``reject()`` where the reference itself
    cannot (PyTorch refuses an edit of what backward needs, say) or does not mean the same when it is run that way. Returns, if
    asked for ``power``, of every intervention whether its loss would show."""
    before = activation_cache.live()
    fused = fused_model(case)
    dense = dense_reference(case, fused, settings(case))
    try:
        unfused_reference = Reference(dense, case, {})
        if case.run in SAME_IN_PYTORCH:
            same_bits("", run(copied(dense, {}), case, case.run), unfused_reference.results)
    except Exception:  # PyTorch's reasons are of many types; nightly.py counts how many cases end here
        reject()
    parts = attached_parts(case, fused)
    plain = attempt("fused", copy.deepcopy(fused), case, "plain")
    reference = near_one_of(case, dense, parts, "fused", plain) if parts else unfused_reference
    unfused = attempt("unfused", detach(copy.deepcopy(fused)), case, "plain") if parts else plain
    unfused_reference.nearby("unfused", unfused)
    if case.backend != "nvfp4":
        same_bits("the forward pass, against the unfused one", plain, unfused, ("output",))
    if case.run == "compile":
        torch._dynamo.reset()
        near_one_of(case, dense, parts, "compiled", attempt("compiled", copy.deepcopy(fused), case, "compile"))
    elif case.run in ("threads", "offload_threads"):
        in_threads(copy.deepcopy(fused), case)
    elif case.run != "plain":
        changed = attempt(case.run, copy.deepcopy(fused), case, case.run)
        inside = case.around != "layers.0" or any(act.kind in ("checkpointed", "wrapped") for act in case.acts)
        # a part that is run again gets its input as a new tensor; where that is a leaf, linears are computed together or not
        if case.run in ("checkpoint", "reentrant") and (inside or case.leaf):
            near_one_of(case, dense, parts, f"with {case.run}", changed, case.run)
        else:
            same_bits(f"with {case.run}", changed, plain)
    del fused, plain, unfused
    if activation_cache.live() > before and gc.collect() and activation_cache.live() > before:
        raise Wrong(f"{activation_cache.live() - before} entries of the activation cache stay")
    return lost_would_show(case, reference) if power else []


def near_one_of(case: Case, dense: Copies, parts: dict[str, Codes], what: str, got: Results, how="plain") -> Reference:
    """The reference, run as ``how`` says, that ``got`` is near to. Samples of errors take long: they are taken of the likeliest
    choices, of those that agree in most results, and at last of those that are nearest."""
    first, rest = None, []
    for number, fused in enumerate(choices(case, parts)):
        try:
            reference = Reference(dense, case, fused, how)
        except RuntimeError:  # an edit that PyTorch refuses with these parts as Functions
            continue
        away = distances(got, reference.results)
        if number >= LIKELIEST and sum(far > FACTOR * reference.size for far in away) > len(away) / 2:
            rest.append((sum(away), number, reference))
            continue
        try:
            return reference.nearby(what, got)
        except Wrong as error:
            first = first or error
    for _, _, reference in sorted(rest)[:NEAREST]:
        try:
            return reference.nearby(what, got)
        except Wrong as error:
            first = first or error
    raise first


def distances(got: Results, expected: Results) -> list[float]:
    """The relative distances of results."""
    away = []
    for name, value in expected.items():
        other = got.get(name)
        if value is not None and other is not None and value.shape == other.shape:
            away.append(((other - value).norm() / (value.norm() + 1e-30)).item())
        elif value is not None or other is not None:
            away.append(float("inf"))
    return away


def lost_would_show(case: Case, reference: Reference) -> list[bool]:
    """Of every intervention: whether leaving it out moves a result of the reference beyond ten times the bound."""
    seen = []
    reference.sample(RUNS, reference.size)
    for i, act in enumerate(case.acts):
        backward = act.kind in ("backward", "backward_pre", "tensor", "trained") and not case.trains
        if act.kind == "checkpointed" or act.how == "reentrant" or backward:  # changes nothing
            continue
        without = dataclasses.replace(case, acts=case.acts[:i] + case.acts[i + 1 :])
        try:
            results = run(copied(reference.model, reference.fused), without)
            near("", results, reference.results, {name: 10 * bound for name, bound in reference.allowed.items()})
            seen.append(False)
        except Wrong:
            seen.append(True)
    return seen


def fails(case: Case) -> str | None:
    """What is wrong, or None."""
    try:
        check(case)
    except Wrong as error:
        return str(error)
    except UnsatisfiedAssumption:
        pass
    return None


def simplest(case: Case, known: Sequence[frozenset[str]] = ()) -> tuple[Case, str]:
    """Drop interventions and set fields to their simplest values, one at a time, while the case still fails and needs not all
    that a known failure needs; and what is wrong with it then."""
    reason, again = fails(case) or "it failed once", True
    while again:
        again = False
        smaller = [dataclasses.replace(case, acts=case.acts[:i] + case.acts[i + 1 :]) for i in range(len(case.acts))]
        changed = (f for f in dataclasses.fields(Case) if f.name != "acts" and getattr(case, f.name) != f.default)
        for candidate in [*smaller, *(dataclasses.replace(case, **{f.name: f.default}) for f in changed)]:
            try:
                wrong = None if any(needs <= candidate.tokens for needs in known) else fails(candidate)
            except (AttributeError, IndexError):  # a place that a simpler decoder has not
                continue
            if wrong:
                case, reason, again = candidate, wrong, True
                break
    return case, reason


def attempt(what: str, model: nn.Module, case: Case, how: str) -> Results:
    """A run in which the reference raised nothing."""
    try:
        return run(model, case, how)
    except Exception as error:
        if "modified by an inplace operation" in str(error):  # loud, as on a dense model whose adapter keeps its input
            reject()
        # loud, and documented: the first run computed an output that it threw away
        if case.rescaled and "number of tensors was saved" in str(error):
            reject()
        raise Wrong(f"{what}: {type(error).__name__}: {error}") from error
