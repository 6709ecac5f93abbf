"""More than one process: what DDP, FSDP2, accelerate and Trainer need to know about a frozen base, which is little.

Models are distributed by the tools people have; :mod:`peft_nvfp4.training.distributed.hooks` makes a few places of them right for
packed weights. What is wrapped how, and what is refused: docs/several-gpus.md.

**DDP.** Frozen weights have to be the same on every process from the start. DDP would copy rank 0's parameters to the others, but
not what bitsandbytes keeps beside a parameter (the scales of NF4), so a difference would end in weights that belong to nobody.
Therefore a checksum of every module is compared when the model is wrapped, and DDP is told to leave the packed bytes alone.
:func:`broadcast_base` takes rank 0's bytes where quantising is not reproducible (calibration on different GPUs).

**FSDP2** (``fully_shard``). A packed weight is a ``uint8`` parameter with one row per output. FSDP2 cuts dimension 0, so a shard
is whole rows: whole blocks of 16 with their scales. Scales are stored unswizzled and a kernel arranges them when it loads them,
after the all-gather: the 128-row tile of that arrangement never meets a shard's edge. NF4's codes are a column of bytes; their
scales stay whole on every process.

Rejected: keeping the bytes in a parameter that claims to be BF16 (bitsandbytes' ``quant_storage``): some bytes then spell NaN,
and whatever computes on them may change them. A tensor subclass with ``fsdp_pre_all_gather``: nothing needs to happen there.
"""

import torch.distributed

if torch.distributed.is_available():
    from .base import base_checksums, broadcast_base, check_same_base
    from .hooks import install
    from .resume import last_checkpoint, make_resumable

    __all__ = ["base_checksums", "broadcast_base", "check_same_base", "install", "last_checkpoint", "make_resumable"]
else:  # PyTorch was built without: there is one process

    def install() -> None:
        """Nothing to wrap."""
