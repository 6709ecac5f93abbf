"""Draws ``dataflow.svg``: python docs/draw_dataflow.py [file]"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

matplotlib.rcParams["svg.hashsalt"] = "dataflow"  # the same file each time
PLAIN, FP4, WEIGHT, LORA, KEPT = "#e8eef7", "#ffe2b8", "#f6c6c6", "#d5ecd4", "#b45309"

fig, ax = plt.subplots(figsize=(12.5, 6.6))
ax.set(xlim=(0, 125), ylim=(0, 66))
ax.axis("off")


def box(x, y, w, h, text, colour, size=9):
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.1,rounding_size=1", fc=colour, ec="#444", lw=1))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size)


def arrow(x0, y0, x1, y1, text="", kept="", below=False, colour="#333", style="->"):
    ax.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": style, "color": colour, "lw": 1.4})
    if text:
        ax.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.8, text, ha="center", va="bottom", fontsize=8)
    if kept:
        y = (y0 + y1) / 2 + (-1.2 if below else 3.2)
        ax.text((x0 + x1) / 2, y, kept, ha="center", va="top" if below else "bottom", fontsize=8, color=KEPT)


def lane(y, title, parts):
    """A row of boxes; parts: (x, width, text, colour)."""
    ax.text(1, y + 11.5, title, fontsize=10.5, weight="bold", va="bottom")
    for x, w, text, colour in parts:
        box(x, y, w, 9, text, colour)


lane(44, "Attention block, forward", [
    (2, 11, "residual\nBF16", PLAIN),
    (25, 17, "RMSNorm\n+ quantise", FP4),
    (54, 19, "q, k, v: FP4 x FP4\none input x\u0303", WEIGHT),
    (82, 15, "rotary, SDPA\nBF16", PLAIN),
    (109, 14, "o: quantise,\nFP4 x FP4", WEIGHT),
])  # fmt: skip
arrow(13, 48.5, 25, 48.5, "BF16")
arrow(42, 48.5, 54, 48.5, "codes x\u0303", "kept: 4.5 bits", below=True)
arrow(73, 48.5, 82, 48.5, "BF16")
arrow(97, 48.5, 109, 48.5, "BF16", "kept: q, k,\nv, out", below=True)
lane(24, "MLP, forward", [
    (2, 11, "residual\nBF16", PLAIN),
    (25, 17, "RMSNorm\n+ quantise", FP4),
    (54, 19, "gate, up: FP4 x FP4\none input x\u0303", WEIGHT),
    (82, 15, "SiLU(g) * u\n+ quantise", FP4),
    (109, 14, "down:\nFP4 x FP4", WEIGHT),
])  # fmt: skip
arrow(13, 28.5, 25, 28.5, "BF16")
arrow(42, 28.5, 54, 28.5, "codes x\u0303", "kept: 4.5 bits", below=True)
arrow(73, 28.5, 82, 28.5, "BF16")
arrow(97, 28.5, 109, 28.5, "codes h\u0303", "kept: gate, up\n(and h\u0303), 4.5 bits", below=True)
lane(4, "Every frozen linear", [
    (2, 22, "W_f: codes (N, K),\na scale per 16 along K", WEIGHT),
    (29, 28, "forward\ny = D(x\u0303) D(W_f)\u1d40 + s D(x\u0303) A\u1d40B\u1d40", LORA),
    (60, 30, "backward\ndx = D(Q(dy)) D(W_b)\u1d40 + s dy B A", LORA),
    (95, 28, "W_b: a scale per 16 along N;\ncached, or made from W_f", WEIGHT),
])  # fmt: skip
arrow(24, 8.5, 29, 8.5)
arrow(95, 8.5, 90, 8.5)
LEGEND = (62, FP4, "emits NVFP4"), (79, WEIGHT, "frozen, NVFP4"), (96, LORA, "trains A and B"), (113, PLAIN, "BF16")
for x, colour, text in LEGEND:
    ax.add_patch(FancyBboxPatch((x - 3, 62.5), 2, 1.8, boxstyle="round,pad=0.1", fc=colour, ec="#444"))
    ax.text(x + 0.4, 63.4, text, fontsize=8.5, va="center")
out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dataflow.svg")
fig.savefig(out, bbox_inches="tight", metadata={"Date": None} if out.suffix == ".svg" else None, dpi=110)
