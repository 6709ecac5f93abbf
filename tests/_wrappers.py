"""Modules of a user's around others."""

from torch import nn


class PassesOn(nn.Module):
    """Around ``inner``, whose attributes are found on it, too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)
