"""Settings of PyTorch's matrix products on a GPU, as context managers."""

from __future__ import annotations

import torch


class exact_matmul:
    """Within the context FP32 products on a GPU are FP32 products, whatever the user allows elsewhere (TF32 has 10 bits)."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        if self._before != "highest":
            torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exc) -> None:
        if self._before != "highest":
            torch.set_float32_matmul_precision(self._before)
