"""NF4 frozen linear: QLoRA's projection, computed by bitsandbytes.

The layer *is* a ``bitsandbytes.nn.Linear4bit`` (NF4, blocks of 64, absmax quantised again: "double quantisation"), so that
optimizers, checkpoints and transformers treat it as one. A model loaded with ``BitsAndBytesConfig`` is adopted: the new layer
shares the old one's ``Params4bit``, nothing is copied.

A trap that is closed here: on CPUs with AVX512-BF16, bitsandbytes 0.50 repacks the weight in place at the first forward whose
input needs no gradient. Afterwards dequantising returns garbage and input gradients are missing (only a warning says so), so
evaluating before training or merging breaks the model. ``support_avx512bf16_for_cpu = False`` keeps the plain layout.

A fault that is avoided here: NF4's blocks of 64 lie in the flattened weight and go on from row to row. The AVX-512 kernel of
bitsandbytes (0.50.0 to 0.50.2, widths that are a multiple of 16) takes the scale of column c of row r from block
r * (in_features // 64) + c // 64 instead of (r * in_features + c) // 64. Where in_features is no multiple of 64 these differ, and
the values get the scales of others (12 instead of 20 dB). So the first use of a width on the CPU asks for known answers
(:func:`_rows_are_right`); where they come out wrong the weight is read as rows of one block each, which all kernels agree on.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd.frozen_linear import autocast_input
from ..autograd.hosted import FrozenProduct
from .frozen_linear import FrozenLinear, FrozenOptions, unsafe_view
from .registry import register_backend

try:
    import bitsandbytes as bnb
except ImportError as error:
    raise ImportError("backend='nf4' needs bitsandbytes: pip install 'bitsandbytes>=0.50'") from error


@contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """bitsandbytes' quantising kernels take no stream and run on the default one, whatever the current stream is; what it does
    between them (the mean of the block scales is taken off before these are quantised again) runs on the current one. So the
    default stream is the current one within the context; it begins after what the other has been asked for, and that one goes on
    after it."""
    current = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if current is None or current == (default := torch.cuda.default_stream(device)):
        yield
        return
    default.wait_stream(current)
    with torch.cuda.stream(default):
        yield
    current.wait_stream(default)


def _in_blocks(shape: torch.Size, block: int) -> torch.Size:
    """The shape of rows of one block each, or of one row where the last block is not full."""
    size = shape.numel()
    return torch.Size((1, size) if size % block else (size // block, block))


def _read_as(state: bnb.functional.QuantState, shape: torch.Size, dtype: torch.dtype) -> bnb.functional.QuantState:
    """The same weight in another shape and dtype. (Not by ``copy``, which compilers of older PyTorch do not trace.)"""
    return bnb.functional.QuantState(
        state.absmax, shape, state.code, state.blocksize, state.quant_type, dtype, state.offset, state.state2
    )


@functools.cache
def _rows_are_right(k: int, dtype: torch.dtype, blocksize: int) -> bool:
    """Whether bitsandbytes dequantises rows of ``k`` values to ``dtype`` rightly on this CPU, by known answers.

    Raises:
        RuntimeError: it does not, and not in whole blocks either.
    """
    rows = 4 * -(-blocksize // k)  # four blocks or more
    flat = torch.arange(rows * k, device="cpu")
    codes, absmax = flat * 7 % 16, torch.exp2((flat[: -(-rows * k // blocksize)] % 7).float())  # neighbours differ in scale
    table = bnb.functional.get_4bit_type("nf4", device="cpu")
    expected = table[codes] * absmax[flat // blocksize]
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    state = bnb.functional.QuantState(absmax, torch.Size((rows, k)), table, blocksize, "nf4", dtype)

    def right(state: bnb.functional.QuantState) -> bool:
        return torch.allclose(bnb.functional.dequantize_4bit(packed, state).flatten().float(), expected, rtol=0.01)

    if right(state):
        return True
    fault = f"bitsandbytes {bnb.__version__} dequantises NF4 wrongly on this CPU"
    if not right(_read_as(state, _in_blocks(state.shape, blocksize), dtype)):
        raise RuntimeError(f"{fault} ({dtype}, rows of {k}): backend='nf4' needs a GPU or another version of bitsandbytes here")
    warnings.warn(f"{fault} where in_features is no multiple of {blocksize}; peft_nvfp4 reads such weights rightly", stacklevel=2)
    return False


@torch.compiler.assume_constant_result
def _avoids_rows(device: str, k: int, dtype: torch.dtype, blocksize: int) -> bool:
    return device == "cpu" and not _rows_are_right(k, dtype, blocksize)


def _dequantize(packed: Tensor, state: bnb.functional.QuantState, dtype: torch.dtype) -> Tensor:
    """The weight, shape ``state.shape``, computed by bitsandbytes in ``dtype`` and in a shape that it reads rightly."""
    avoids_rows = _avoids_rows(packed.device.type, state.shape[1], dtype, state.blocksize)
    shape = _in_blocks(state.shape, state.blocksize) if avoids_rows else state.shape
    return bnb.functional.dequantize_4bit(packed, _read_as(state, shape, dtype)).view(state.shape)


class _MatmulInBlocks(torch.autograd.Function):
    """``x @ W.T + bias`` for ``x`` (T, in_features) around :func:`_dequantize`. As in bitsandbytes' own, the dense weight lives
    within each pass only."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, bias: Tensor | None, state: bnb.functional.QuantState) -> Tensor:
        ctx.packed, ctx.state = packed, state
        return F.linear(x, _dequantize(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        dx = dy @ _dequantize(ctx.packed, ctx.state, ctx.state.dtype).to(dy.dtype) if needs_x else None
        return dx, None, dy.sum(0) if needs_bias else None, None


@register_backend("nf4")
class NF4FrozenLinear(FrozenLinear, bnb.nn.Linear4bit):
    """Frozen linear in NF4 with double quantisation, W4A16."""

    def __init__(
        self, in_features: int, out_features: int, bias: Tensor | None, compute_dtype: torch.dtype, options: FrozenOptions
    ):
        super().__init__(in_features, out_features, bias, compute_dtype, options)
        self.compute_type_is_set = False  # the input's dtype decides, as in bitsandbytes; an adopted layer keeps its setting
        self.quant_state = None
        self.quant_storage = torch.uint8
        self.support_avx512bf16_for_cpu = False

    @classmethod
    def quantize(
        cls, linear: nn.Linear, options: FrozenOptions | None = None, *, gscale: Tensor | None = None
    ) -> NF4FrozenLinear:
        if isinstance(linear, bnb.nn.Linear4bit):
            return cls._adopt(linear, options or FrozenOptions())
        weight = linear.weight.detach()
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or Inf; a quantised layer cannot represent them")
        layer = cls(linear.in_features, linear.out_features, linear.bias, weight.dtype, options or FrozenOptions())
        layer._store(weight)
        return layer.train(linear.training)

    @classmethod
    def _adopt(cls, linear: bnb.nn.Linear4bit, options: FrozenOptions) -> NF4FrozenLinear:
        """Take over a layer of a model loaded with BitsAndBytesConfig, sharing its weight."""
        state = linear.weight.quant_state
        if linear.weight.quant_type != "nf4":
            raise ValueError(
                f"this Linear4bit holds {linear.weight.quant_type}, not NF4; load the model with bnb_4bit_quant_type='nf4'"
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                "bitsandbytes has repacked this weight for AVX512-BF16 (it does so at the first forward in eval mode), which "
                "breaks training. Wrap the model before running it, or set module.support_avx512bf16_for_cpu = False on every "
                "Linear4bit right after loading."
            )
        dtype = linear.compute_dtype or (state.dtype if state is not None else torch.bfloat16)
        layer = cls(linear.in_features, linear.out_features, linear.bias, dtype, options)
        layer.weight, layer.quant_state, layer.quant_storage = linear.weight, linear.quant_state, linear.quant_storage
        layer.compute_type_is_set = linear.compute_type_is_set
        layer.weight.module = layer
        layer.dense_dtype = state.dtype if state is not None else None
        return layer.train(linear.training)

    def _store(self, weight: Tensor) -> None:
        parameter = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=self)
        with _on_default_stream(weight.device):
            self.weight = parameter.to(weight.device)  # bitsandbytes quantises on this call, also where nothing moves
        self.quant_state = self.weight.quant_state
        if weight.is_cuda:  # its memory is the default stream's, which must not have it back while another one is at work with it
            for tensor in self.packed_tensors().values():
                tensor.record_stream(torch.cuda.current_stream(weight.device))

    @property
    def _state(self) -> bnb.functional.QuantState:
        """Scales and layout: with the parameter, or, where FSDP2 has put its own in place, with the layer."""
        return getattr(self.weight, "quant_state", None) or self.quant_state

    def packed_tensors(self) -> dict[str, Tensor]:
        state = self._state
        tensors = {"weight": self.weight.data, "absmax": state.absmax, "code": state.code}
        if state.nested:
            tensors.update(nested_absmax=state.state2.absmax, nested_code=state.state2.code, offset=state.offset)
        return tensors

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Codes come with their scales: bitsandbytes writes them beside the weight, and does not read them again."""
        inside, after = f"{prefix}weight.", len(prefix) + len("weight.")
        stats = {key[after:]: state_dict.pop(key) for key in [key for key in state_dict if key.startswith(inside)]}
        weight = state_dict.get(f"{prefix}weight")
        if stats and weight is not None and weight.shape == self.weight.shape:
            state = bnb.functional.QuantState.from_dict(stats, self.weight.device)
            if state.shape != self._state.shape:
                shapes = tuple(state.shape), tuple(self._state.shape)
                raise ValueError(f"{prefix}weight is packed from {shapes[0]}, and this layer's from {shapes[1]}")
            self.weight.quant_state = self.quant_state = state
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def snapshot(self) -> dict:
        return {"weight": self.weight, "bias": None if self.bias is None else self.bias.data.clone()}

    def restore(self, snapshot: dict) -> None:
        device = self.weight.device
        self.weight = snapshot["weight"] if snapshot["weight"].device == device else snapshot["weight"].to(device)
        self.quant_state = self._state
        if self.bias is not None:
            self.bias.data = snapshot["bias"].to(device, self.bias.dtype, copy=True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return _dequantize(self.weight.data, self._state, self._state.dtype).to(dtype or self.compute_dtype)

    def requantize_(self, weight: Tensor) -> None:
        self._check_dense(weight)
        self._store(weight.detach().to(self.weight.device, self._state.dtype).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        # bitsandbytes' own forward, without its side effects: repacking for AVX512, casting the bias in place, a new parameter
        # in the place of FSDP2's
        self._refuse_integers(x)
        x = autocast_input(x)
        follows_input = not self.compute_type_is_set and x.dtype in (torch.float32, torch.bfloat16)
        # given FP64, bitsandbytes 0.50 reads it as bytes of another type and returns garbage
        wanted = torch.float32 if self.compute_dtype == torch.float64 else self.compute_dtype
        compute = x.to(x.dtype if follows_input else wanted)
        bias = None if self.bias is None else self.bias.to(compute.dtype)
        state = self._state
        if state.absmax.device != x.device:  # FSDP2 has moved the parameter only
            state.to(x.device)
        rows = compute.reshape(-1, self.in_features)  # of more dimensions, PyTorch's product is a view: no edit in place then
        if self.hosted is not None:
            y = self._hosted_product(rows, bias, state)
        elif _avoids_rows(x.device.type, self.in_features, compute.dtype, state.blocksize):
            y = _MatmulInBlocks.apply(rows, self.weight, bias, state)
        else:
            y = bnb.matmul_4bit(rows, self.weight, bias=bias, quant_state=state)
        return unsafe_view(y, (*x.shape[:-1], self.out_features)).to(x.dtype)

    def _hosted_product(self, x: Tensor, bias: Tensor | None, state: bnb.functional.QuantState) -> Tensor:
        """As above, with the packed weight fetched again for backward. (bitsandbytes' own reads it whenever autograd comes.)"""
        there, weight = self.hosted.fetch(), self.weight
        in_blocks = _avoids_rows(x.device.type, self.in_features, x.dtype, state.blocksize)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            if in_blocks:
                return F.linear(x, _dequantize(weight, state, x.dtype), bias)
            return bnb.matmul_4bit(x, weight, bias=bias, quant_state=state)

        def dense(dtype: torch.dtype) -> Tensor:
            return _dequantize(weight, state, state.dtype).to(dtype)

        return FrozenProduct.apply(x, bias, weight, product, dense, there)
