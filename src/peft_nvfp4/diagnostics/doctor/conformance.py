"""Whether this machine computes NVFP4 as it is defined: the checks of ``peft-nvfp4 doctor``.

From the bottom up, each on what the one before has shown: the reference against the formats as published (:mod:`oracle`), the
kernels against the reference (in every bit), every FP4 matrix product against exact ones (:mod:`conformance_gemm`; how a mistake
is named: :mod:`~peft_nvfp4.kernels.fp4.check`), every instance of the extension as training runs it
(:mod:`conformance_instances`), products with LoRA against the operators' definition, a training step against the
same step with the reference's products. Shapes are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from peft import get_peft_model
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from ...kernels import dispatch, implementations
from ...kernels.fp4 import check, cutlass, native
from ...lora.config import NVFP4LoraConfig
from ...numerics import reference
from ...numerics.formats import ACTIVATION, WEIGHT
from ...numerics.products import Fprop
from ...ops.core import OPERATORS
from . import oracle
from .conformance_gemm import gemm_checks, product_checks
from .conformance_instances import EMULATED_LOAD, LOAD, instance_checks
from .results import FAILED, NOT_RUN, Result, checked, require

# ---------------------------------------------------------------------------------------------- kernels


def awkward(rows: int, k: int) -> Tensor:
    """Values of all sizes, zeros of both signs, ties, a row of zeros, Inf and NaN, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator, device="cpu")
    x *= torch.randint(-30, 30, (rows, 1), generator=generator, device="cpu").float().exp2()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device="cpu").repeat(-(-k // 8))[:k]
    x[0], x[1], x[2, ::3] = 0.0, ties, -0.0
    x[3, k // 2], x[4, 0] = float("nan"), float("-inf")
    x[5, ::2] = 1e-6 * x[5].abs().max()
    return x


def _operators(device: torch.device, dtype: torch.dtype) -> dict[str, tuple]:
    """Operator -> arguments, for operators that have a kernel."""
    x = awkward(41, 1000).to(device, dtype)
    seed = torch.tensor(-6148914691236517206, device="cpu")
    q = reference.quantize(x[5:], ACTIVATION)
    w = reference.quantize(torch.randn(72, 96, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(device), WEIGHT)
    gamma = torch.linspace(-1, 2, 1000, device="cpu").to(device)
    finite = x[5:].nan_to_num(0.0, 0.0, 0.0).clamp(-100, 100)
    return {
        "quantize": (x, None, None, "max6", True, False),
        "quantize (stochastic)": (x, None, seed, "max6", True, True),
        "quantize (four over six)": (finite, None, None, "four_over_six", False, False),
        "quantize (mse)": (finite, None, None, "mse", False, False),
        "quantize_terms": (x, None, 2),
        "dequantize": (*q, dtype),
        "transpose_requantize": (*w, 1.0),
        "rmsnorm_quantize": (finite, gamma, None, 1e-6, False, 2),
        "silu_mul_quantize": (finite, finite.flip(0), None, "silu", 1, True),
        "dropout": (x, 0.3, seed),
    }


def _kernel(operator: str) -> tuple[Callable, Callable]:
    """(what runs on a GPU, the reference) of an operator."""
    op = OPERATORS[operator]
    kernel = dispatch.triton_kernel(operator) if operator in dispatch.KERNELS else op.reference
    return op.flat(kernel), op.flat(op.reference)


def _same_bits(name: str, arguments: tuple) -> str:
    """Compared with the CPU; norms and activations, which use functions a GPU rounds otherwise, with the reference on the same
    GPU."""
    operator = name.split(" ")[0]
    function, expected = _kernel(operator)
    got = [t.cpu() for t in tree_leaves(function(*arguments))]
    if operator in ("quantize", "dequantize", "transpose_requantize", "dropout"):
        arguments = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    right = [t.cpu() for t in tree_leaves(expected(*arguments))]
    torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)
    return f"{sum(t.nbytes for t in got):,} bytes equal"


def kernel_checks(device: torch.device) -> Iterator[Result]:
    """The Triton kernels."""
    if obstacle := dispatch._obstacle() or dispatch._loaded:
        yield Result("kernels", "all", NOT_RUN, obstacle)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for name, arguments in _operators(device, dtype).items():
            yield checked("kernels", _same_bits, name, arguments, name=f"{name} {str(dtype)[6:]}")


# ---------------------------------------------------------------------------------------------- products


def implementation_checks(device: torch.device) -> Iterator[Result]:
    """Every FP4 implementation that is there."""
    for name in implementations.NATIVE:
        try:
            gemms = implementations.NATIVE[name]()
        except implementations.Unavailable as reason:
            yield Result(name, "all", FAILED if reason.broken else NOT_RUN, str(reason))
            continue
        try:
            check.run(native.single(gemms), check.cases()[0], device)
        except Exception as error:  # on a GPU that it was not made for: expected of what is part of PyTorch
            implementations._check_alive(name, device, error)
            outcome = NOT_RUN if name in implementations.ANYWHERE else FAILED
            yield Result(name, "all", outcome, f"cannot run on this device ({implementations.first_line(error)})")
            continue
        yield from gemm_checks(name, gemms, device)
        if name == "cutlass":
            library = cutlass.load()
            load = EMULATED_LOAD if library.info["emulated"] == "1" else LOAD
            yield from instance_checks("cutlass", library, cutlass.gemms, device, load)


REFERENCE = implementations.Choice("reference", "", reference.fprop, reference.dgrad, {})


def chosen_checks(device: torch.device) -> Iterator[Result]:
    """What fprop and dgrad run on this device."""
    chosen = dispatch.choice(device) if device.type == "cuda" and dispatch._forced != "reference" else REFERENCE
    if chosen.implementation == "bf16":  # the same code without its rounding of inputs, which the training step looks at
        chosen = implementations.choose(device, "emulated", "")
    yield from product_checks(f"chosen products ({chosen.implementation})", chosen.fprop, chosen.dgrad, device)


# ---------------------------------------------------------------------------------------------- a training step


def _tiny_model(device: torch.device):
    torch.manual_seed(0)
    settings = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**settings, vocab_size=128)).to(device, torch.bfloat16)
    model = get_peft_model(model, NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, backend="nvfp4"))
    return model.train()


def _step(model, device: torch.device) -> tuple[float, Tensor]:
    """(loss, all gradients) of 96 tokens: more than the rows up to which a product is left to the Triton kernel."""
    ids = torch.randint(0, 128, (3, 32), generator=torch.Generator("cpu").manual_seed(3), device="cpu").to(device)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad.flatten().double().cpu() for p in model.parameters() if p.requires_grad]
    return loss.item(), torch.cat(grads)


def summed_gemms(terms, weights, *, constants, adds, low_ranks=None, outs=None, dtype=torch.bfloat16) -> list[Tensor]:
    """The reference's products, joined as the extension joins them (:mod:`peft_nvfp4.kernels.fp4.native`): the low-rank part is
    summed with the rest, and dgrad adds linear by linear."""
    ys = []
    for w, constant, add, low_rank in zip(weights, constants, adds, low_ranks or [None] * len(weights)):
        y = reference.matmul(terms, w, constant, torch.float32)
        y = y if low_rank is None else y + low_rank.hidden.float() @ low_rank.up.float().T
        ys.append((y if add is None else y + add.float()).to(dtype))
    return ys if outs is None else [y if out is None else out.copy_(y) for y, out in zip(ys, outs)]


def separate_gemms(terms, weights, *, adds, low_ranks=None, dtype=torch.bfloat16, **others) -> list[Tensor]:
    """The same for an implementation that makes the low-rank part before: it comes rounded."""
    return summed_gemms(terms, weights, adds=native.with_products(adds, low_ranks, dtype), dtype=dtype, **others)


SUMMED, SEPARATE = (
    replace(REFERENCE, fprop=partial(native.fprop, gemms), dgrad=partial(native.dgrad, gemms))
    for gemms in (summed_gemms, separate_gemms)
)


def fprop_of_rounded_inputs(p: Fprop) -> list[Tensor]:
    """The reference's, of an input that is rounded to BF16 (:mod:`peft_nvfp4.kernels.emulated`)."""
    return reference.fprop(p._replace(values=reference.dequantize_terms(p.terms, None, p.dtype)))


EXPECTED = {
    "cutlass": SUMMED,
    "scaled_mm": SEPARATE,
    "bf16": replace(REFERENCE, fprop=fprop_of_rounded_inputs),
}
"""Implementation -> the reference with its roundings; others have none."""


def a_lora_step_of_a_tiny_llama(device: torch.device) -> str:
    """The step with the chosen implementation against the one with the reference's products, rounded where the implementation
    rounds: a value moved by one rounding to BF16 moves a few over a rounding to 4 bits, which later layers see (rounding the
    low-rank part or not alone turns this model's gradients to a cosine of 0.984). What is left is the order of the sums within a
    product."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = _tiny_model(device)
        loss, grads = _step(model, device)
        require(bool(grads.isfinite().all()) and loss == loss, f"loss {loss}, gradients finite: {bool(grads.isfinite().all())}")
        if device.type != "cuda" or dispatch._forced == "reference":
            return f"loss {loss:.4f} (only the reference runs here)"
        chosen = dispatch.choice(device).implementation
        with patch.dict(dispatch._choices, {device: EXPECTED.get(chosen, REFERENCE)}):
            return _agree(chosen, (loss, grads), _step(model, device))


def _agree(implementation: str, got: tuple[float, Tensor], right: tuple[float, Tensor]) -> str:
    """Sums in another order change about one BF16 output in 10,000, and 4-bit codes of a few of those: 0.999."""
    cosine = torch.nn.functional.cosine_similarity(got[1], right[1], dim=0).item()
    detail = f"{implementation}: loss {got[0]:.5f}, reference {right[0]:.5f}; cosine of all gradients {cosine:.6f}"
    require(abs(got[0] - right[0]) <= 1e-3 * right[0] and cosine >= 0.999, detail)
    return detail


def all_checks(device: torch.device) -> Iterator[Result]:
    """In the order in which a failure explains those after it."""
    for compare in oracle.CHECKS:
        yield checked("reference", compare)
    if device.type != "cuda":
        yield from (Result(group, "all", NOT_RUN, "no CUDA device") for group in ("kernels", *implementations.NATIVE))
    on_gpu = (kernel_checks, implementation_checks) if device.type == "cuda" else ()
    for checks in (*on_gpu, chosen_checks):
        try:
            yield from checks(device)
        except RuntimeError as error:  # the GPU cannot be used any more: nothing after this would mean anything
            yield Result(checks.__name__, "all", FAILED, str(error))
            return
    yield checked("training", a_lora_step_of_a_tiny_llama, device)
