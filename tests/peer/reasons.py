"""Why a helper of PEFT fails on one of our bases where stock PEFT passes it, and is right to."""

from __future__ import annotations

REASONS = (
    (
        lambda r: r["way"] == "config" and r["helper"] in ("unload_adapter", "disable_adapter"),
        "compares the model without its adapter with the dense model before get_peft_model, which has frozen (quantised) it",
    ),
    (
        lambda r: r["way"] == "config" and r["helper"] == "get_base_model_state_dict",
        "compares state dicts before and after get_peft_model, which has packed the weights",
    ),
    (
        lambda r: r["base"] == "nf4" and r["model"] == "mlp10" and r["helper"] in ("merge_layers", "safe_merge"),
        "requantised merge: correlation .999, squared error 3.5 (limit 1) of values up to 16; with stock bitsandbytes 3.5 too",
    ),
    (
        lambda r: r["helper"] == "quantization_backend_is_set_and_repr",
        "PEFT's LoRA layers do not set quantization_backend (its other methods do), those for bitsandbytes included",
    ),
)


def reason_for(row: dict[str, str]) -> str | None:
    """The first that applies; None: unexplained."""
    return next((text for applies, text in REASONS if applies(row)), None)
