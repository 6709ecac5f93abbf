"""A projection of one training step on cards that nobody has measured this package on: RTX 5080 and 5090. NOT a measurement.

    python benchmarks/roofline.py                       # prints the tables of roofline.md

Each kernel takes the larger of its arithmetic at a rate and its bytes at a bandwidth; a step is their sum (kernels of one stream
do not overlap; the host is left out, as with CUDA graphs; nothing is found in the L2 cache). Sources of the rates:

* FP4 GEMM: the paper's own GEMMs on an RTX 5080 (PACT, Table 1: 4096 tokens, Llama-3B shapes, 678-772 TFLOP/s) and its step
  (Table 11: 15.9 TFLOP in 25.6 ms, 620 TFLOP/s, which includes smaller shapes and tails). 620 is used.
* BF16 GEMM: Table 1, 112-116 TFLOP/s; 112 is used.
* Bandwidth: 960 GB/s (RTX 5080), 1792 GB/s (RTX 5090) by data sheet, times COPY, the share of it that a device copy reaches on
  the H200 for operands of this size, times KERNELS, the share of a copy that this package's kernels reach there (ops_h200.csv).
* Attention: Table 11, 12.7 ms for 4 x 1024 tokens of Llama-1B; scaled with layers x heads x head_dim x seq.
* RTX 5090: FP4, BF16 and attention rates times 1676 / 900 (dense FP4 of the data sheets).

The last table compares the model, set to what the paper did (logits at every position, gradients quantised in a kernel of their
own), with the paper's Table 11. ``roofline.md`` says what to measure first on a card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reproduce.tables import PAPER, markdown

from peft_nvfp4.memory import ModelShape, model_shape
from peft_nvfp4.quantization.groups import ACCURACY

COPY, KERNELS = 0.85, 0.85
NVFP4 = 0.5625  # bytes a value: 4 bits and an eighth of a byte of block scale per 16


@dataclass(frozen=True)
class Card:
    name: str
    fp4: float  # TFLOP/s reached
    bf16: float
    bandwidth: float  # GB/s, data sheet
    attention: float  # ms for 4 x 1024 tokens of Llama-1B


RATIO = 1676 / 900
CARDS = (
    Card("RTX 5080", 620, 112, 960, 12.7),
    Card("RTX 5090", 620 * RATIO, 112 * RATIO, 1792, 12.7 / RATIO),
)


SHAPES = {f"Llama-{v}-{b}B": model_shape(f"llama-{b}b") for v, b in (("3.2", 1), ("3.2", 3), ("3.1", 8))}


@dataclass(frozen=True)
class Step:
    """What is trained: batch x seq tokens, ``labels`` positions with logits, LoRA rank r on all linears."""

    batch: int = 4
    seq: int = 1024
    labels: int = 4 * 32
    r: int = 16
    accuracy: str = "paper"

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


def project(card: Card, shape: ModelShape, step: Step) -> dict[str, float]:
    """Milliseconds by the categories of the paper's Table 11."""
    m, r, (norm_terms, inner_terms) = step.tokens, step.r, ACCURACY[step.accuracy].values()
    moved = card.bandwidth * 1e6 * COPY * KERNELS  # bytes a millisecond

    def gemm(rate: float, flops: float, moving: float = 0.0) -> float:
        return max(flops / (rate * 1e9), moving / (card.bandwidth * 1e6 * COPY))

    fp4 = lora = 0.0
    for p in shape.projections:
        k, n, readers = p.inputs, p.outputs, len(shape.reads(p.source))
        terms = inner_terms if p.source in ("o", "down") else norm_terms
        fp4 += gemm(card.fp4, 2 * m * k * n * terms) + gemm(card.fp4, 2 * m * k * n)
        low, high = 2 * m * r * k, 2 * m * r * n
        passes: Iterable[tuple[float, float]] = (
            (low, 2 * m * k / readers),  # h = x A', stacked
            (high, 0),  # h B', at the end of the FP4 product's loop over K
            (high, 2 * m * n),  # g = dy B
            (high, 2 * m * n),  # dB = dy' h
            (low, 2 * m * k),  # dA = g' x
            (low, 0),  # g A, at the end of the first FP4 product's loop
        )
        lora += sum(gemm(card.bf16, flops, moving) for flops, moving in passes)
    d, f, q, kv = shape.hidden, shape.intermediate, shape.q, shape.kv
    quantise = (
        2 * (2 * d + 2 * d + NVFP4 * d * norm_terms)  # RMSNorm: x; D(y), codes
        + (2 * q + NVFP4 * q * inner_terms)  # input of o
        + (4 * f + NVFP4 * f * (2 + inner_terms))  # gate, up; codes of gate, up, h
        + (2 * f + 2 * NVFP4 * f + 4 * f)  # backward of it: dh, codes; dgate, dup
        + (2 + NVFP4) * (2 * d + q + 2 * kv + 2 * f)  # gradients of all seven linears
        + 2 * (2 * d + NVFP4 * d * norm_terms + 2 * d)  # backward of RMSNorm
        + (2 + NVFP4) * (2 * d + q + f)  # D(x~) again, for dA
        + 2 * (2 * d + q + f) / 16 * norm_terms  # block scales of inputs put in the order that the GEMM reads
    )
    arranged = 2 * 2 * sum(p.inputs * p.outputs for p in shape.projections) / 16  # bytes: those of both layouts of the weights
    elementwise = 2 * (6 * d) + 2 * (6 * d) + 2 * 2 * (2 * (q + kv)) * 2  # residual sums and their gradients, RoPE both ways
    rows, weight = step.labels, 2 * shape.vocabulary * d
    head = gemm(card.bf16, 2 * rows * shape.vocabulary * d, weight) * 2 + 6 * 2 * rows * shape.vocabulary / moved
    adapters = sum(r * (p.inputs + p.outputs) for p in shape.projections) * shape.layers
    scale = shape.layers * shape.heads * shape.head_dim * step.tokens * step.seq / (16 * 32 * 64 * 4096 * 1024)
    return {
        "NVFP4 GEMMs": fp4 * shape.layers,
        "BF16 GEMMs: LoRA": lora * shape.layers,
        "BF16 GEMMs: head": head,
        "quantisation / fused kernels": (quantise * m + arranged) * shape.layers / moved,
        "attention": card.attention * scale,
        "elementwise / optimizer": elementwise * m * shape.layers / moved + adapters * 4 * 7 / moved,
    }


def projection(card: Card) -> str:
    """Steps of all shapes and presets on a card."""
    rows = []
    for title, shape in SHAPES.items():
        for accuracy in ACCURACY:
            times = project(card, shape, Step(accuracy=accuracy))
            total = sum(times.values())
            cells = [*(f"{t:.1f}" for t in times.values()), f"**{total:.0f}**", f"{4096 / total:.1f}k"]
            rows.append([f"{title}, {accuracy}", *cells])
    return markdown(["", *times, "step", "tokens/s"], rows)


def like_for_like() -> dict[str, tuple[float, float]]:
    """Category -> milliseconds (of the model, of the paper's Table 11): Llama-1B on the RTX 5080 with logits at all positions."""
    found = project(CARDS[0], SHAPES["Llama-3.2-1B"], Step(labels=4096))
    found["BF16 GEMMs"] = found["BF16 GEMMs: LoRA"] + found["BF16 GEMMs: head"]
    found["elementwise"] = found["elementwise / optimizer"]
    names = ("BF16 GEMMs", "NVFP4 GEMMs", "quantisation / fused kernels", "attention", "elementwise")
    paper = {name: pact for name, (_, pact, _) in zip(names, PAPER["breakdown"].values())}
    return {name: (found[name], paper[name]) for name in paper}


def sums() -> tuple[float, float]:
    """Milliseconds of a whole step: of the model, of the paper's rows."""
    model, paper = zip(*like_for_like().values())
    return sum(model), sum(paper)


def against_the_paper() -> str:
    """:func:`like_for_like` as a table."""
    rows = [[name, f"{model:.1f}", f"{paper:.1f}"] for name, (model, paper) in like_for_like().items()]
    model, paper = sums()
    return markdown(["ms", "model", "paper"], [*rows, ["sum", f"{model:.1f}", f"{paper:.1f} (the paper's own sum: 130.1)"]])


def main() -> None:
    for card in CARDS:
        print(f"{card.name}\n\n{projection(card)}\n")
    print(against_the_paper())


if __name__ == "__main__":
    main()
