"""Implementations of the operators on GPUs, and the choice between them.

    dispatch.py          what runs: the table of Triton kernels, the first call of an operator, :func:`status`
    implementations.py   the ways to compute the two products of a training step (fprop, dgrad), and which of them works here
    emulated.py          the products by BF16 GEMMs of dequantised operands
    grouped.py           the products of a mixture's experts
    triton/              Triton kernels
    fp4/                 the products on FP4 tensor cores

The environment variable ``PEFT_NVFP4_KERNELS``, read by :func:`load`, forces a choice: ``cutlass``, ``scaled_mm`` or
``emulated`` that implementation of the two products (the first product on a GPU raises if it does not work there), ``reference``
plain PyTorch for everything.
"""

from .dispatch import load, status

__all__ = ["load", "status"]
