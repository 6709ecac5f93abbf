"""FSDP of accelerate on CPUs, for tests: accelerate itself takes FSDP's settings on accelerators only (with
gloo it falls back to DDP). Everything after that one decision is its own code.
"""

import functools

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpu() -> None:
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or vars(self).get("fsdp_plugin")  # the state is shared: a later instance has no plugin of its own
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = init
