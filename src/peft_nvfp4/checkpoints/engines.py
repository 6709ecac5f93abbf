"""What serving engines ask of an NVFP4 checkpoint beyond its layout. Read in vLLM 0.32; ModelOpt and llm-compressor write by the
same rules.

* Some linears are taken dense only, whatever the settings say: gates that choose or weigh experts, and what stands before the
  decoder of a model with images or sound (towers, projectors). An export writes those dense.
* Linears of one input (q/k/v, gate/up) become one matrix. So all of them must be packed or none, and under one global scale: of
  different ones the engine takes one, and the others' weights come out multiplied by the quotient.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from torch import nn

from ..nn.nvfp4 import NVFP4FrozenLinear
from ..quantization.groups import fused_siblings

GATES = frozenset({"gate", "router", "shared_expert_gate"})
"""Last component of the names of such gates."""


def taken_dense(model: nn.Module, names: Collection[str]) -> list[str]:
    """Those of the linears of these dotted names that engines take dense only."""
    decoder = _decoder_name(model)
    outside = () if decoder is None else (n for n in names if not n.startswith(f"{decoder}."))
    return [*dict.fromkeys([*(n for n in names if n.rpartition(".")[2] in GATES), *outside])]


def _decoder_name(model: nn.Module) -> str | None:
    """Dotted name of the language model's decoder in a model that has more than a language model; else None."""
    if getattr(model.config, "text_config", None) is None:
        return None
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if name and module is decoder), None)


def warn_of_fused(layers: Mapping[str, NVFP4FrozenLinear], packed: Collection[str], dense: Collection[str]) -> None:
    """Warn of linears that engines compute as one matrix and that are not packed alike."""
    mixed, unequal = [], []
    for siblings in dict.fromkeys(map(fused_siblings, packed)):
        own = [name for name in siblings if name in packed]
        if any(name in dense for name in siblings):
            mixed.append(next(name for name in siblings if name in dense))
        elif len({layers[name].forward_layout.gscale.item() for name in own}) > 1:
            unequal.append(", ".join(own))
    if mixed:
        warnings.warn(
            f"{mixed[0]} (of {len(mixed)} such groups) is dense, and linears of the same input are packed. Serving engines "
            "compute them as one matrix and refuse this: name all of them in skip_modules, or none",
            stacklevel=3,
        )
    if unequal:
        warnings.warn(
            f"{unequal[0]} (of {len(unequal)} such groups) read the same input and have different global scales. Serving engines "
            "compute them as one matrix, under one of these scales, and so with wrong weights: freeze them in one call",
            stacklevel=3,
        )
