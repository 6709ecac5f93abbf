"""More than one process: what DDP, FSDP2, accelerate and Trainer need to know about a frozen base, which is little.

There is no engine here. Models are distributed by the tools people have; importing this module makes a few places of them right
for packed weights (:mod:`peft_nvfp4.training.distributed.hooks`, undone by :func:`unregister`).

**DDP.** Adapters are trainable parameters like any others: DDP averages their gradients, and nothing else crosses the wire in a
step. Frozen weights have to be the same on every process from the start. DDP would copy rank 0's parameters to the others, but
not what bitsandbytes keeps beside a parameter (the scales of NF4), so a difference would end in weights that belong to nobody.
Therefore a checksum of every module is compared when the model is wrapped (:func:`check_same_base` names the first module that
differs), and DDP is told to leave the packed bytes alone. :func:`broadcast_base` takes rank 0's bytes where quantising is not
reproducible (calibration on different GPUs). The side table and CUDA graphs belong to a process; gradients of a replayed graph
reach DDP through the same parameters, at once at the end of backward.

**FSDP2** (``fully_shard``). A packed weight is a ``uint8`` parameter with one row per output (``weight`` (N, Kp/2),
``weight_scales`` (N, Kp/16), the backward layout (K, Np/2) and (K, Np/16)). FSDP2 cuts dimension 0, so a shard is whole rows:
whole blocks of 16 with their scales, padded by FSDP2 where the rows do not divide. Scales are stored unswizzled and a kernel
arranges them when it loads them, after the all-gather: the 128-row tile of that arrangement never meets a shard's edge. What
travels is what is stored, 4.5 bits a weight and layout, not 16. With ``memory="small"`` one layout travels and is
kept; with ``"cached"`` both, which saves the time of remaking one and costs twice the bytes. NF4 goes the same way: its codes are
a column of bytes; their scales (0.13 bits a weight) stay whole on every process. Adapters are sharded as FSDP2 shards any
parameter: optimizers, sharded and full checkpoints and ``clip_grad_norm_`` are FSDP2's own.

* Wrap decoder layers. FSDP2 hands a unit a copy of its input, and what a norm has quantised is found by the tensor it returned: a
  unit that has the linears without the norm raises. (accelerate and Trainer wrap decoder layers.)
* PyTorch before 2.13 cannot shard parameters that are not floating point, and with a mixed-precision policy casts bytes to BF16
  for the wire: two methods are mended there.
* accelerate leaves bitsandbytes' 4-bit parameters out of the sharding (each process would hold all of them), by the name of their
  class. The hook gives it plain parameters instead.
* ``cpu_ram_efficient_loading``: rank 0's weights are sent to the others, whose own are placeholders, so there is nothing to
  compare; NF4's scales are sent as well.

**Resuming** on another number of processes, or under another strategy: :func:`make_resumable`.

**FSDP1** flattens parameters of one floating dtype into one; packed bytes do not survive that. It is refused with the way out.

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
