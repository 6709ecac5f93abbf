"""Models of a case, and one run of a model: its output, its gradients, and what hooks have captured, by name."""

import contextlib
from unittest import mock

import torch
from _cases import Case
from _interventions import apply
from _parts import HIDDEN, decoder
from peft import get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from peft_nvfp4 import NVFP4LoraConfig, enable_offload
from peft_nvfp4.autograd import frozen_linear, lora
from peft_nvfp4.ops import fused

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"]

Results = dict[str, Tensor | None]


# ---------------------------------------------------------------------------------------------- models


def settings(case: Case) -> dict:
    return dict(r=4, lora_alpha=8, target_modules=TARGETS, lora_dropout=case.dropout, init_lora_weights=False)


def fused_model(case: Case) -> nn.Module:
    own = dict(backend=case.backend, accuracy=case.accuracy, memory=case.memory, skip_modules=["lm_head"])
    dense = decoder(case)
    torch.manual_seed(case.seed + 1)
    model = get_peft_model(dense, NVFP4LoraConfig(**settings(case), **own))
    if case.adapters > 1:
        model.add_adapter("second", NVFP4LoraConfig(**settings(case), **own))
        model.base_model.set_adapter(["default", "second"])
    return model


# ---------------------------------------------------------------------------------------------- a run


def batch(case: Case, number: int = 0) -> Tensor:
    """Embedded tokens (2, 5, HIDDEN) with a channel of outlying size, as the embedding makes them."""
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(100 * case.seed + number))
    x[..., 3] *= 12
    return x.to(getattr(torch, case.dtype))


def probe(t: Tensor) -> Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(t.numel())) / t.numel() ** 0.5


def unwrapped(module: nn.Module) -> nn.Module:
    return getattr(module, "wrapped", module)


def prepared(model: nn.Module, case: Case, run: str, stack: contextlib.ExitStack) -> tuple[nn.Module, dict]:
    """The model with the interventions of the case, and what they will capture; ``stack`` takes back what is not the model's."""
    decoder, captured = model.base_model.model, {}
    if run.startswith("offload"):
        enable_offload(model)
    model.train(case.mode in ("train", "autocast"))
    for act in case.acts:
        if (handle := apply(decoder, act, captured)) is not None:
            stack.callback(handle.remove)
    for layer in map(unwrapped, decoder.layers):
        layer.edited = case.edited
        if layer.attn is not None:
            attention = unwrapped(layer.attn)
            for name in ("uncalled", "twice", "edited", "rescaled"):
                setattr(attention, name, getattr(case, name))
    if run in ("checkpoint", "reentrant"):
        owner, _, part = case.around.rpartition(".")
        holder = decoder if case.around == "layers.0" else unwrapped(decoder.get_submodule(owner))
        holder.checkpointed = {case.around if holder is decoder else part: run == "reentrant"}
    if run == "compile" and case.around:
        decoder.get_submodule(case.around).compile(backend="aot_eager")
    elif run == "compile":
        model = torch.compile(model, backend="aot_eager")
    return model, captured


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    # all threads share one cache of cast weights, which whoever leaves autocast empties: gradients are then added in other dtypes
    "autocast in threads": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


def mode(case: Case, how: str) -> contextlib.AbstractContextManager:
    in_threads = case.mode == "autocast" and how in ("threads", "offload_threads")
    return MODES.get("autocast in threads" if in_threads else case.mode, contextlib.nullcontext)()


def step(model: nn.Module, case: Case, x: Tensor, how: str = "plain") -> Results:
    """One forward, and one backward where the mode has gradients; in threads, without touching ``.grad``."""
    layer = unwrapped(getattr(model, "_orig_mod", model).base_model.model.layers[0])
    x = x.clone().requires_grad_(case.trains)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    if how == "functional":
        parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in parameters.items()}
    layer.inner = {} if case.loss != "output" else None
    saved = saved_tensors_hooks(torch.clone, lambda t: t) if how == "saved" else contextlib.nullcontext()
    with mode(case, how), saved:
        seen = x if case.leaf else x.clone()
        y = functional_call(model, parameters, (), {"x": seen}) if how == "functional" else model(x=seen)
    results: Results = {"output": y.detach().float()}
    if not case.trains:
        return results
    loss = 0.0
    if case.loss != "inner":
        loss = (y.float() * probe(y)).sum()
    if case.loss != "output":
        loss = loss + (layer.inner[case.inner].float() * probe(layer.inner[case.inner])).sum()
    layer.inner = None
    if how == "interleaved":  # another step begins, and something is generated, before this one's backward
        with mode(case, how):
            other = model(x=2 * x.detach())
        with torch.inference_mode():
            model(x=x.detach().clone())
        del other
    leaves = {"x": x} | {name: p for name, p in parameters.items() if p.requires_grad}
    if how in ("threads", "offload_threads"):
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    else:
        if how == "retained":
            loss.backward(retain_graph=True)
        for leaf in leaves.values():
            leaf.grad = None
        loss.backward()
        gradients = [leaf.grad for leaf in leaves.values()]
    return results | {f"gradient of {name}": None if g is None else g.detach().float() for name, g in zip(leaves, gradients)}


def seed() -> Tensor:
    return torch.tensor(1234)


def dropout(self: nn.Dropout, x: Tensor) -> Tensor:
    """With the package's mask for that seed."""
    if not self.training:
        return x
    ones = torch.ones(x.reshape(-1, x.shape[-1]).shape)
    return x * fused.dropout.run(ones, self.p, seed()).view(x.shape).to(x.dtype)


@contextlib.contextmanager
def fixed_masks():
    """Dropout's masks are functions of their shapes alone, whatever the order of calls."""
    with (
        mock.patch.object(frozen_linear, "draw_seed", seed),
        mock.patch.object(lora, "draw_seed", seed),
        mock.patch.object(nn.Dropout, "forward", dropout),
    ):
        yield


def run(model: nn.Module, case: Case, how: str = "plain") -> Results:
    """Results of the case on a model that nobody has touched yet."""
    with fixed_masks(), contextlib.ExitStack() as stack:
        model, captured = prepared(model, case, how, stack)
        return step(model, case, batch(case), how) | captured
