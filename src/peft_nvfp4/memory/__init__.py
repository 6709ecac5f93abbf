"""How much GPU memory a training step takes, from a model's ``config.json`` alone.

>>> from peft_nvfp4.memory import Settings, estimate, largest_batch, card
>>> print(estimate("llama-1b", Settings(batch=4, sequence=1024)))
>>> largest_batch("path/to/model", Settings(), card("RTX 5080").memory)

Nothing is built and no GPU is asked. The parts: :mod:`~peft_nvfp4.memory.shapes` (the model), ``settings`` (how it is trained,
and on what GPU), ``kept`` (weights, and what a layer keeps for backward), ``moments`` (where the peak is; of long sequences
``long_sequences``), ``run`` (the answers); beside them ``device``, the GPU that is here.
"""

from .run import LEVELS, Estimate, Plan, estimate, fit, largest_batch, longest_context, room
from .settings import CARDS, Card, Settings, card, parse_bytes, usable
from .shapes import BUILTIN, ModelShape, model_shape

__all__ = [
    "BUILTIN",
    "CARDS",
    "Card",
    "Estimate",
    "LEVELS",
    "ModelShape",
    "Plan",
    "Settings",
    "card",
    "estimate",
    "fit",
    "largest_batch",
    "longest_context",
    "model_shape",
    "parse_bytes",
    "room",
    "usable",
]
