"""Adapters that start out making up for the rounding of their base: ``init_lora_weights="loftq"`` and ``"eora"``.

Freezing W (N, K) leaves a residual R = W - D(W_f). The adapter starts at its best approximation of rank r, s * B A = U U.T R,
with U (N, r) the leading left singular vectors of

    R            "loftq": the smallest |R - s B A|
    R H^(1/2)    "eora":  the smallest E|(R - s B A) x|^2 for inputs with second moments H = E[x x.T] (:func:`preprocess_eora`)

(for the second, too, the best A is U.T R: H cancels). LoftQ's further rounds (``loftq_iter``), which take turns between the base,
Q(W - s B A), and the adapter, are refused: the base would be another one, which only this adapter fits.

R exists while the dense weight does: factors are computed when a linear is frozen, layer by layer, and wait on the frozen layer
until an adapter is made. On disk such an adapter is like any other (``init_lora_weights`` is true), but it belongs to its base:
on a dense base it would add R once more. (PiSSA and OLoRA take the leading part of W itself and requantise what is left; they
work on a base that is frozen already.)

Sources: Li et al., "LoftQ" (2023); Liu et al., "EoRA" (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from ..calibration.moments import Moments
from ..nn.frozen_linear import FrozenLinear
from ..numerics.matmul import exact_matmul
from ..quantization.freeze import plan
from ..quantization.groups import fused_siblings

if TYPE_CHECKING:
    from .layer import FrozenLoraLinear

RESIDUAL_INITS = ("loftq", "eora")

_FACTORS = "_residual_factors"
_MOMENTS = "_peft_nvfp4_moments"


def check_loftq(config: LoraConfig) -> None:
    """Raise on a ``loftq_config`` that asks for more than 4 bits and one round.

    Raises:
        ValueError: naming the setting.
    """
    settings = config.loftq_config or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    for name, supported in (("loftq_bits", 4), ("loftq_iter", 1)):
        if settings.get(name, supported) != supported:
            raise ValueError(f"{name}={settings[name]} is not supported: the base is frozen once, in 4 bits. Leave it out")


# ---------------------------------------------------------------------------------------------- factors


def low_rank(residual: Tensor, rank: int, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(A (rank, K), B (N, rank)), balanced, whose product is the best approximation of ``residual`` (N, K) float32 for inputs
    with second moments h (K, K); all directions alike by default.

    Through an eigenproblem of the smaller side. A is U.T R, so B A is a projection of R whatever the accuracy of U.
    """
    n, k = residual.shape
    if rank > min(n, k):
        raise ValueError(f"rank {rank} is more than a layer of {n} x {k} has")
    with exact_matmul():
        weighted = residual if h is None else residual @ _root(h)
        if n <= k:
            u = torch.linalg.eigh(weighted @ weighted.T).eigenvectors[:, -rank:]
        else:
            v = torch.linalg.eigh(weighted.T @ weighted).eigenvectors[:, -rank:]
            u = torch.linalg.qr(weighted @ v).Q
        a = u.T @ residual
        balance = a.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
        return (a / balance[:, None]).contiguous(), (u * balance).contiguous()


def _root(h: Tensor) -> Tensor:
    """A factor L of H = L L.T, for a symmetric H that may be singular."""
    values, vectors = torch.linalg.eigh(h)
    return vectors * values.clamp_min(0).sqrt()


@torch.no_grad()
def leave_factors(config: LoraConfig, name: str, linear: nn.Linear, frozen: FrozenLinear) -> None:
    """For a linear that is about to be ``frozen``: leave the factors of its residual there, for an adapter of this config."""
    weight, targets = linear.weight, config.target_modules
    wanted = not targets or targets == "all-linear" or check_target_module_exists(config, name)
    if not wanted or not weight.is_floating_point() or hasattr(weight, "quant_state"):
        return  # the last two: adopted from bitsandbytes; making the adapter will say so
    h = None
    if config.init_lora_weights == "eora":
        moments = getattr(linear, _MOMENTS, None)
        if moments is None or not moments.count:
            raise ValueError(
                f"init_lora_weights='eora' weighs rounding errors by a layer's inputs, and none of {name} were seen: call "
                "peft_nvfp4.preprocess_eora(model, run_model) before, or use init_lora_weights='loftq'"
            )
        h = moments.h.to(weight.device)
    ranks = config.rank_pattern or {}
    rank = ranks.get(get_pattern_key(ranks.keys(), name), config.r)
    setattr(frozen, _FACTORS, low_rank(weight.float() - frozen.dequantize(torch.float32), rank, h))


# ---------------------------------------------------------------------------------------------- making an adapter


def take(base: FrozenLinear, r: int, init: str) -> tuple[Tensor, Tensor]:
    """The factors that wait on a frozen layer; they serve one adapter.

    Raises:
        ValueError: there are none.
    """
    factors = getattr(base, _FACTORS, None)
    if factors is None or factors[0].shape[0] != r:
        raise ValueError(
            f"init_lora_weights={init!r} starts from what rounding a dense weight left over, and this {base.backend} base was "
            "frozen before (or has served another adapter). Give the dense model to get_peft_model; on a frozen base, "
            "init_lora_weights='pissa' or 'olora' works"
        )
    delattr(base, _FACTORS)
    return factors


@torch.no_grad()
def fill(layer: FrozenLoraLinear, adapter: str, factors: tuple[Tensor, Tensor]) -> None:
    """Put factors into an adapter, so that s * B A is their product."""
    share = abs(layer.scaling[adapter]) ** -0.5
    sign = 1.0 if layer.scaling[adapter] > 0 else -1.0
    for module, value in ((layer.lora_A[adapter], factors[0] * share), (layer.lora_B[adapter], factors[1] * share * sign)):
        if not module.weight.is_meta:  # a checkpoint is about to fill it
            module.weight.copy_(value)


# ---------------------------------------------------------------------------------------------- statistics for "eora"


def preprocess_eora(model: nn.Module, run_model: Callable[[], Any], *, device: Any = None) -> None:
    """Collect the second moments of the inputs of a dense model's linears, for ``init_lora_weights="eora"``.

    Args:
        model: dense, before ``get_peft_model``.
        run_model: calls the model on calibration data (padding counts as input).
        device: where the moments are kept (4 K^2 bytes for K inputs: 67 MB for 4096); by default that of the weights.

    Raises:
        ValueError: no linear of the model would be frozen.
    """
    names = plan(model, "bf16", ())
    if not names:
        raise ValueError("no linear layer of this model can be frozen")
    moments: dict[str, Moments] = {}
    handles = []
    for name in names:
        linear = model.get_submodule(name)
        leader = next(n for n in fused_siblings(name) if n in names)  # linears of one input share its moments
        if leader not in moments:
            moments[leader] = Moments(linear.in_features, device or linear.weight.device)
            add = moments[leader].add
            handles.append(linear.register_forward_pre_hook(lambda module, args, add=add: add(args[0].detach().float())))
        setattr(linear, _MOMENTS, moments[leader])
    try:
        with torch.no_grad():
            run_model()
    finally:
        for handle in handles:
            handle.remove()
