"""Settings of PyTorch's matrix products on a GPU, as context managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Within the context FP32 products on a GPU are FP32 products, whatever the user allows elsewhere (TF32 has 10 bits)."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class full_precision_sums:  # noqa: N801  a context manager, written as a function is
    """cuBLAS may split K and add the parts in BF16 (seen on an H200 at M=3, K=1000: rounded twice). Not within this context. (A
    class: every product enters it, and a generator takes half as long again.)"""

    def __enter__(self) -> None:
        self.backend = torch.backends.cuda.matmul
        self.before = self.backend.allow_bf16_reduced_precision_reduction
        if self.before:
            self.backend.allow_bf16_reduced_precision_reduction = False

    def __exit__(self, *error: object) -> None:
        if self.before:
            self.backend.allow_bf16_reduced_precision_reduction = self.before
