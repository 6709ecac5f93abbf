"""What 4 bits cost SmolLM2 on held-out real text, and what gives it back: weights by weights, inputs by inputs.

A row is a set of weights (BF16, NF4, NVFP4 rounded to nearest, NVFP4 from GPTQ) with a treatment of the linears' inputs: exact
(W4A16), or NVFP4 (W4A4) with one or two terms and with or without an offset at each of the four kinds of site. It says how many
nats per token the model loses against BF16 (± standard error of the paired difference over sequences), its perplexity, and the
FP4 multiplications that its second terms add to those of the forward pass (backward has one term in any case: of a training
step's products half of that share).

Rows that differ in their inputs only share one set of weights where they say so ("GPTQ for paper, centred"); presets also get
weights that were calibrated for them.

    python benchmarks/perplexity.py --calib 12 --eval 8 --device cpu --recipes balanced      (10 minutes)
    python benchmarks/perplexity.py --device cuda --out OUT                                  all, most important first
    python benchmarks/perplexity.py --device cuda --out OUT --rotate 0                       off the shipped 4-bit grid

``--rotate`` applies a rotation of the residual stream that leaves the function as it is (:mod:`rotation`), because the packaged
weights are 4-bit already. The model and the texts come from `smollm2_reviews.data_dir` (:mod:`texts` says how).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import rotation
import texts
import torch
import torch.nn.functional as F
from common import smollm2_reviews as data
from input_specs import ALL, NORMS, SITES, Inputs, added_work, exact_inputs, offsets_of, rounded_inputs, set_inputs
from reproduce import tables
from torch import Tensor, nn

from peft_nvfp4 import freeze_model
from peft_nvfp4.calibration.gptq import GPTQOptions
from peft_nvfp4.calibration.run import CalibrationOptions, calibrate

PRESETS = {"paper": Inputs(), "balanced": Inputs(NORMS), "high": Inputs(ALL)}
PER_SITE = {
    "paper, centred at all sites": Inputs(centred=ALL),
    "one term, no offset (paper)": Inputs(),
    **{f"two terms at {site}": Inputs((site,)) for site in SITES},
    **{f"centred at {site}": Inputs(centred=(site,)) for site in SITES},
    "two terms at q/k/v and gate/up (balanced)": Inputs(NORMS),
    "centred at q/k/v and gate/up": Inputs(centred=NORMS),
    "balanced, centred at o and down": Inputs(NORMS, ("o", "down")),
    "two terms at gate/up, centred elsewhere": Inputs(("gate/up",), ("q/k/v", "o", "down")),
    "two terms in the last layer": Inputs(ALL, last=True),
    "two terms in the last layer, centred elsewhere": Inputs(ALL, ALL, last=True),
    "two terms at the last layer's gate/up, centred elsewhere": Inputs(("gate/up",), ALL, last=True),
    "two terms at all sites (high)": Inputs(ALL),
}
RECIPES: dict[str, dict[str, Any]] = {  # what a set of GPTQ weights is calibrated for, most important first
    "balanced": dict(accuracy="balanced"),
    "paper": dict(accuracy="paper"),
    "paper, centred": dict(accuracy="paper", offset=True),
    "high": dict(accuracy="high"),
    "a budget of 0.33": dict(budget=0.33),
    "balanced, centred": dict(accuracy="balanced", offset=True),
    "paper, centred, asymmetric target": dict(accuracy="paper", offset=True, gptq=GPTQOptions(asymmetric=True)),
    "balanced, plain GPTQ": dict(accuracy="balanced", gptq=GPTQOptions("max6", act_order=False)),
}


class Run:
    """One set of weights, shipped or rotated."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.start = args, time.perf_counter()
        self.rows: list[dict] = []
        self.offsets: dict[str, Tensor] = {}
        self.works: dict[str, float] = {}
        self.base, tokenizer = data.load_smollm2(torch.float32, layers=args.layers)
        self.base.eval().requires_grad_(False)
        calibration, held_out = texts.split(args.text or texts.default_paths())
        self.calibration = texts.token_ids(calibration, tokenizer, args.calib, args.length, args.seed)
        self.held_out = texts.token_ids(held_out, tokenizer, args.eval, args.length, args.seed)
        self.rotated: dict[str, Any] | None = None
        self.base.to(args.device)
        if args.rotate is not None:
            self._rotate()
        self.base.to(common.DTYPES[args.dtype])
        self.reference = self.nll(self.base)
        self.row("BF16", "exact", self.reference, work=0.0)

    def _rotate(self) -> None:
        original = copy.deepcopy(self.base)
        rotation.rotate_(self.base, self.args.rotate)
        error = rotation.check(original, self.base, self.held_out[:2])
        self.rotated = {"seed": self.args.rotate, "kind": "full", "fp32_logits_difference": error}

    @torch.no_grad()
    def nll(self, model: nn.Module) -> Tensor:
        """Nats per token of every held-out sequence, float64."""
        found = []
        for ids in self.held_out.to(self.args.device).split(self.args.batch):
            logits = model(ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            found.append(loss.view(len(ids), -1).double().mean(1).cpu())
        return torch.cat(found)

    def row(self, weights: str, inputs: str, nll: Tensor, work: float, **more: Any) -> None:
        d = nll - self.reference
        row = {"weights": weights, "inputs": inputs, "dnll": d.mean().item(), "se": (d.std() / len(d) ** 0.5).item()}
        row |= {"perplexity": nll.mean().exp().item(), "added_work": work, "at_s": time.perf_counter() - self.start, **more}
        self.rows.append(row)
        print(f"{weights:34s} {inputs:56s} {row['dnll']:.4f} ± {row['se']:.4f}  {row['at_s']:.0f} s", flush=True)

    def measure(self, weights: str, inputs: str, model: nn.Module, **more: Any) -> None:
        self.row(weights, inputs, self.nll(model), added_work(model), **more)

    def measure_exact(self, weights: str, model: nn.Module) -> None:
        with exact_inputs(model):
            self.row(weights, "exact", self.nll(model), 0.0)

    def nf4(self) -> None:
        model = freeze_model(copy.deepcopy(self.base), "nf4", progress=False)
        self.row("NF4", "exact", self.nll(model), 0.0)

    def nearest(self) -> None:
        model = freeze_model(copy.deepcopy(self.base), accuracy="paper", progress=False)
        self.measure_exact("to nearest", model)
        for name, inputs in PRESETS.items():
            set_inputs(model, inputs)
            self.measure("to nearest", name, model)
            self.works[name] = added_work(model)

    def dense(self) -> None:
        for name, inputs in PRESETS.items():
            with rounded_inputs(self.base, inputs):
                self.row("BF16", name, self.nll(self.base), self.works[name])

    def centred(self) -> None:
        """With the offsets that a GPTQ run has found: needs one."""
        inputs, name = Inputs(centred=ALL), "paper, centred at all sites"
        model = freeze_model(copy.deepcopy(self.base), accuracy="paper", progress=False)
        set_inputs(model, inputs, self.offsets)
        self.measure("to nearest", name, model)
        with rounded_inputs(self.base, inputs, self.offsets):
            self.row("BF16", name, self.nll(self.base), 0.0)

    def recipe(self, name: str) -> None:
        args = self.args
        model = copy.deepcopy(self.base)
        shape = dict(samples=args.calib, seq_len=args.length, batch_size=args.batch, report_tokens=512)
        start = time.perf_counter()
        report = calibrate(
            model, self.calibration, None, CalibrationOptions(**shape, **RECIPES[name]), device=args.device, progress=False
        )
        seconds = time.perf_counter() - start
        label = f"GPTQ for {name}"
        self.measure(label, "as calibrated", model, calibration_s=seconds, errors_percent=report.means())
        self.measure_exact(label, model)
        if name == "paper, centred":
            self.offsets = offsets_of(model)
            for its_name, inputs in list(PER_SITE.items())[1:]:
                set_inputs(model, inputs, self.offsets)
                self.measure(label, its_name, model)
            self.centred()

    def steps(self) -> list[Callable[[], None]]:
        return [self.nf4, self.nearest, self.dense, *(partial(self.recipe, name) for name in self.args.recipes or RECIPES)]

    def run(self) -> None:
        """All steps, most important first; results are on disk after each."""
        for step in self.steps():
            step()
            self.write()

    def found(self, weights: str, inputs: str) -> float | None:
        return next((r["dnll"] for r in self.rows if (r["weights"], r["inputs"]) == (weights, inputs)), None)

    def findings(self) -> dict[str, float]:
        """Shares that answer: how much of a loss does a recipe give back?"""
        get, own = self.found, "as calibrated"
        paper, balanced, high = (get(f"GPTQ for {name}", own) for name in ("paper", "balanced", "high"))
        nearest, centred = get("to nearest", "paper"), get("GPTQ for paper, centred", own)
        a16, high_a16, nf4, activations = (get(w, i) for w, i in (
            ("GPTQ for balanced", "exact"), ("GPTQ for high", "exact"), ("NF4", "exact"), ("BF16", "paper")
        ))  # fmt: skip
        formulas: dict[str, Callable[[], float]] = {
            "share of the loss of W4A4 to nearest that GPTQ gives back": lambda: 1 - paper / nearest,
            "the same, of what the activations alone do not cost": lambda: (nearest - paper) / (nearest - activations),
            "the same, GPTQ and offsets": lambda: 1 - centred / nearest,
            "the same, GPTQ and the balanced preset": lambda: 1 - balanced / nearest,
            "share of one-term W4A4's loss against W4A16 that balanced gives back": lambda: (paper - balanced) / (paper - a16),
            "balanced minus NF4, nats": lambda: balanced - nf4,
            "high minus W4A16, nats": lambda: high - high_a16,
        }
        result = {}
        for name, formula in formulas.items():
            try:
                result[name] = formula()
            except TypeError:  # of a row that was not run
                continue
        return result

    def write(self) -> None:
        args = self.args
        kind = "shipped" if args.rotate is None else "rotated_full"
        path = args.out / f"perplexity_{kind}_{args.device.type}"
        content = common.head(args) | {"rotated": self.rotated, "findings": self.findings()}
        content |= {"seconds": time.perf_counter() - self.start, "rows": self.rows}
        common.write_json(path.with_suffix(".json"), content)
        path.with_suffix(".md").write_text(self.markdown(kind) + "\n")

    def markdown(self, kind: str) -> str:
        args = self.args
        title = (
            f"SmolLM2-135M-Instruct, {kind} weights; {args.calib} x {args.length} tokens of calibration, {args.eval} x "
            f"{args.length} held out; {args.dtype} on {args.device.type}. "
            "Nats per token above BF16 ± standard error over sequences.\n\n"
        )
        head, lines = ["weights", "inputs", "nats above BF16", "perplexity", "FP4 work added, forward"], []
        for r in self.rows:
            loss, work = f"{r['dnll']:.3f} ± {r['se']:.3f}", f"{100 * r['added_work']:.0f} %"
            lines.append([r["weights"], r["inputs"], loss, f"{r['perplexity']:.2f}", work])
        findings = "".join(f"\n- {name}: {value:.3f}" for name, value in self.findings().items())
        return f"{title}{tables.markdown(head, lines, right=False)}\n{findings}"


def main() -> None:
    parser = common.text_parser(__doc__)
    parser.add_argument("--calib", type=int, default=128, help="sequences of calibration")
    parser.add_argument("--eval", type=int, default=60, help="sequences held out")
    parser.add_argument("--rotate", type=int, metavar="SEED", help="measure a rotated model")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, help="of GPTQ, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    Run(common.parse_texts(parser)).run()


if __name__ == "__main__":
    main()
