"""Implementations of the operators on GPUs, and the choice between them.

    dispatch.py          what runs: the table of Triton kernels, the first call of an operator
    implementations.py   the ways to compute the two products of a training step (fprop, dgrad), and which of them works here
    report.py            what :func:`status` returns
    emulated.py          the products by BF16 GEMMs of dequantised operands
    triton/              Triton kernels
    fp4/                 the products on FP4 tensor cores

:func:`status` says per operator what runs and, where it is not the best there is, why.

The environment variable ``PEFT_NVFP4_KERNELS``, read by :func:`load`, forces a choice: ``cutlass``, ``scaled_mm`` or
``emulated`` that implementation of the two products (the first product on a GPU raises if it does not work there), ``reference``
plain PyTorch for everything.

>>> print(kernels.status())
"""

from .dispatch import load
from .report import status

__all__ = ["load", "status"]
