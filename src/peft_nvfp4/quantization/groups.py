"""Which linears share an input, what feeds them, which are left out: the little that must be known about a model by name.

A *shared-input group* is one producer of activations and the linears it feeds. Two facts about it matter before a model has run:

* Linears of one group should share their weight's global scale, because serving engines fuse them into one GEMM (q/k/v, gate/up),
  which has one.
* A linear fed by a norm deserves two NVFP4 terms more than one fed by attention or by the MLP's product: quantising norm
  outputs costs most of what 4-bit activations cost (in a simulation on a 135M model; two thirds at the input of gate/up).

Names are the common ones of transformers; an unknown linear counts as norm-fed, the accurate choice.
"""

from __future__ import annotations

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # latent attention
    ("in_proj_qkv", "in_proj_z"),  # linear attention
    ("in_proj_b", "in_proj_a"),
)
"""Sibling linears that read the same input, and that engines compute as one matrix."""

INTERIOR = frozenset(
    "o_proj out_proj down_proj dense_4h_to_h fc2 fc_out c_proj w2 wo to_out o proj attn_out ff_out "
    "output.dense attention.dense self_attention.dense".split()
)
"""Linears (by the last one or two components of their names) that read the output of attention or of the MLP's inner part."""

ACCURACY: dict[str, dict[str, int]] = {
    "paper": {"norm": 1, "interior": 1},
    "balanced": {"norm": 2, "interior": 1},
    "high": {"norm": 2, "interior": 2},
}
"""Preset -> NVFP4 terms of the input by kind of group."""


def check_accuracy(accuracy: str) -> None:
    """Raises ValueError for a word that is no preset."""
    if not isinstance(accuracy, str) or accuracy not in ACCURACY:
        raise ValueError(f"accuracy must be one of {', '.join(ACCURACY)}, got {accuracy!r}")


def input_terms(module_name: str, accuracy: str) -> int:
    """NVFP4 terms (1 or 2) of the input of the linear with this dotted name."""
    parts = module_name.split(".")
    kind = "interior" if parts[-1] in INTERIOR or ".".join(parts[-2:]) in INTERIOR else "norm"
    return ACCURACY[accuracy][kind]


def fused_siblings(module_name: str) -> tuple[str, ...]:
    """Dotted names of the linears that share this one's input (itself included); they may or may not exist."""
    parent, _, name = module_name.rpartition(".")
    for group in FUSED:
        if name in group:
            return tuple(f"{parent}.{sibling}" if parent else sibling for sibling in group)
    return (module_name,)


def skipped(name: str, skip_modules: tuple[str, ...]) -> bool:
    """Whether a dotted name, or one of its ancestors, equals or ends with one of the given names."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(p == s or p.endswith("." + s) for s in skip_modules for p in prefixes)
