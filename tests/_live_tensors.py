"""What a GPU's allocator would count of a step that runs on a CPU."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from peft_nvfp4.autograd import frozen_linear, lora
from peft_nvfp4.ops.core import OPERATORS


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, but for those of a model, as a GPU's allocator would. What an operator of this
    package makes for itself on a CPU does not count: kernels have it in registers.

    Attributes:
        peak: the most so far; ``peaks``: by what ``moment`` was at the time.
    """

    def __init__(self, model):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.live, self.now, self.moment, self.peaks = {}, 0, "", Counter()

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def count_operators(self, monkeypatch):
        """Within the test, operators of the package count as what they return."""
        for operator in OPERATORS.values():
            monkeypatch.setattr(operator, "run", self.as_one(operator.run))
        for module, name in ((lora, "mm"), (frozen_linear, "mm"), (frozen_linear, "add_mm")):  # through FP32 on a CPU
            monkeypatch.setattr(module, name, self.as_one(getattr(module, name)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.counted(func(*args, **(kwargs or {})))

    def counted(self, output):
        for t in tree_leaves(output):
            where = t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) else None
            if where and where not in self.known and where not in self.live:
                self.live[where] = -(-t.untyped_storage().nbytes() // 512) * 512
                weakref.finalize(t.untyped_storage(), self.gone, where)
                self.now += self.live[where]
                self.peaks[self.moment] = max(self.peaks[self.moment], self.now)
        return output

    def gone(self, where: int):
        self.now -= self.live.pop(where)

    def as_one(self, function):
        def call(*args):
            with _disable_current_modes():
                output = function(*args)
            return self.counted(output)

        return call
