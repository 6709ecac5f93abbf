"""What an operator is: schema, argument check, shapes, refused derivative and implementations, in one object.

Every operator lives in the ``torch.library`` namespace ``peft_nvfp4``; its default implementation is the plain-PyTorch
reference, so it works on every device. Kernels only *add* implementations for a device (:meth:`Operator.register`); they never
bring semantics of their own. All operators are functional (they neither change nor alias their inputs), which lets compilers
share and reorder them.

There are two ways in. ``operator(...)`` is the public one: arguments are checked. ``operator.run(...)`` is for arguments that
this package has made a moment before. Both call an implementation directly where nothing would be lost by it (a call through the
dispatcher costs tens of microseconds), and the ``torch.library`` operator, which checks, otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..numerics.formats import BLOCK, padded_k

_LIBRARY = torch.library.Library("peft_nvfp4", "DEF")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)
OPERATORS: dict[str, Operator] = {}


def first_tensor(args: tuple) -> Tensor:
    """The first of some arguments, or of the first tuples in them: where it lives, an operator runs."""
    while not isinstance(args, Tensor):
        args = args[0]
    return args


@dataclass(eq=False, repr=False)
class Operator:
    """One operator. Where its arguments or its result are not those of the schema, functions convert them."""

    name: str
    schema: str  # of the torch.library operator
    check: Callable[..., None]  # raises on arguments that the operator does not take
    reference: Callable  # the plain-PyTorch implementation
    shapes: Callable  # empty results, as the schema has them, for the arguments
    flatten: Callable[..., tuple] | None = None  # arguments -> those of the schema
    unflatten: Callable[..., tuple] | None = None  # and back
    flat_result: Callable | None = None  # result -> that of the schema
    result: Callable | None = None  # (arguments, result of the schema) -> result
    direct: dict[str, Callable] = field(default_factory=dict, init=False)  # device type -> implementation

    def __post_init__(self) -> None:
        _LIBRARY.define(f"{self.name}{self.schema}")
        torch.library.impl(f"peft_nvfp4::{self.name}", "default", self.flat(self.reference))
        torch.library.register_fake(f"peft_nvfp4::{self.name}", self._checked(self.shapes))
        torch.library.register_autograd(f"peft_nvfp4::{self.name}", self._refuse_derivative)
        self.library_operator = getattr(torch.ops.peft_nvfp4, self.name)
        OPERATORS[self.name] = self

    def __call__(self, *args):
        """Check the arguments and compute."""
        if not torch.compiler.is_compiling():  # then the shapes are computed by the operator, which checks
            self.check(*args)
        return self.run(*args)

    def run(self, *args):
        """Compute. An implementation is called directly where no compiler or fake tensor is watching and autograd is off (with
        autograd on, the ``torch.library`` operator is needed so that a derivative is refused instead of being zero)."""
        first = first_tensor(args)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(first) not in PLAIN:
            result = self.library_operator(*(args if self.flatten is None else self.flatten(*args)))
            return result if self.result is None else self.result(args, result)
        return self.direct.get(first.device.type, self.reference)(*args)

    def register(self, device_type: str, implementation: Callable) -> None:
        """Add a device's implementation: same arguments, same bits as the reference."""
        torch.library.impl(f"peft_nvfp4::{self.name}", device_type, self.flat(implementation))
        self.direct[device_type] = implementation

    def flat(self, implementation: Callable) -> Callable:
        """The implementation as ``torch.library`` calls it: arguments, which are checked, and result as the schema has them."""
        compute = self._checked(implementation)
        return compute if self.flat_result is None else lambda *flat: self.flat_result(compute(*flat))

    def _checked(self, function: Callable) -> Callable:
        def call(*flat):
            args = flat if self.unflatten is None else self.unflatten(*flat)
            self.check(*args)
            return function(*args)

        return call

    def _refuse_derivative(self, ctx, *gradients):
        """An operator without autograd would return zero gradients with no more than a warning."""
        raise RuntimeError(
            f"peft_nvfp4::{self.name} has no derivative (rounding is flat). Differentiate through a layer "
            "(NVFP4FrozenLinear) or through peft_nvfp4.autograd.frozen_linear.fake_quantize, which is straight-through."
        )


# ---------------------------------------------------------------------------------------------- checks that operators share


def check(condition: bool, message: Callable[[], str]) -> None:
    """``torch._check``, which takes microseconds, for a condition that does not hold or is symbolic."""
    if condition is not True:
        torch._check(condition, message)


def check_packed(op: str, codes: Tensor, scales: Tensor, gscale: Tensor, k: int) -> None:
    """Dtypes and shapes of one packed operand, with messages that name operator, argument, expected and got."""
    dtypes, dimensions = (torch.uint8, torch.uint8, torch.float32), (2, 2, 1)
    for name, t, dtype, ndim in zip(("codes", "scales", "gscale"), (codes, scales, gscale), dtypes, dimensions):
        check(t.dtype == dtype, lambda: f"{op}: {name} must be {dtype}, got {t.dtype}")
        check(t.ndim == ndim, lambda: f"{op}: {name} must have {ndim} dimension(s), got shape {tuple(t.shape)}")
    rows, kp = codes.shape[0], padded_k(k)
    check(
        codes.shape[1] * 2 == kp,
        lambda: f"{op}: codes of a matrix with K={k} have {kp // 2} bytes a row, got {codes.shape[1]}",
    )
    check(
        tuple(scales.shape) == (rows, kp // BLOCK),
        lambda: f"{op}: scales must be {(rows, kp // BLOCK)}, got {tuple(scales.shape)}",
    )
    check(gscale.shape[0] in (1, rows), lambda: f"{op}: gscale must hold 1 or {rows} values, got {gscale.shape[0]}")


def check_float(op: str, dtype: torch.dtype, name: str = "dtype") -> None:
    check(dtype in FLOATS, lambda: f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")


def check_matrix(op: str, name: str, t: Tensor) -> None:
    check(t.ndim == 2, lambda: f"{op}: {name} must be a matrix (M, K), got shape {tuple(t.shape)}")
    check_float(op, t.dtype, name)


def check_shape(op: str, name: str, t: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """A tensor, if it is there, has this shape and, if any are given, one of these dtypes."""
    check(
        t is None or tuple(t.shape) == shape and (not dtypes or t.dtype in dtypes),
        lambda: f"{op}: {name} must be {shape}{' or'.join(f' {d}' for d in dtypes)}, got {tuple(t.shape)} {t.dtype}",
    )


def check_seed(op: str, seed: Tensor | None) -> None:
    if seed is not None:
        check(seed.dtype == torch.int64, lambda: f"{op}: seed must be int64, got {seed.dtype}")
        check(seed.ndim == 0, lambda: f"{op}: seed must be a scalar tensor, got shape {tuple(seed.shape)}")


def check_offset(op: str, offset: Tensor | None, k: int) -> None:
    check_shape(op, "offset", offset, (k,), torch.float32)


def check_terms(op: str, terms: int) -> None:
    check(1 <= terms <= 2, lambda: f"{op}: the number of terms must be 1 or 2, got {terms}")
