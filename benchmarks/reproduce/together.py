"""Several training runs of one frozen model at once, as one training run of a wide adapter.

Runs that differ in their seed, learning rate and rows share the frozen base, so its products can be computed once for the tokens
of all of them. The adapters of S runs of rank r are the S parts of one adapter of rank S * r:

    A = [A_1; ...; A_S] (S * r, K)      B = [B_1 ... B_S] (N, S * r)

Of h = D(x~) A^T (M, S * r), a token keeps the r columns of its own run, and zeros elsewhere; likewise of g = dy (s B), of which
dA and dx are made. So y, dx, dA and dB of every run are those of a run by itself, by the product's own operators: products are
exact, what is added is zeros, and activations and gradients are quantised with scales of each token. What differs is the order of
FP32 sums. The zeros cost time (at 12 runs, about as much as the frozen products), which is little beside what they save.

No padding is computed (:mod:`peft_nvfp4.training.packing` says how), since rows of different runs have no length in common.
:func:`train_together` is :func:`reproduce.training.train` for several recipes: the same first values, rows, clipping (of every
run's gradient by itself), AdamW and rates.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peft_nvfp4.autograd import frozen_linear, lora
from peft_nvfp4.autograd.frozen_linear import Adapters, HiddenGradients
from peft_nvfp4.fusion.probe import innermost
from peft_nvfp4.fusion.rope import attach_rope
from peft_nvfp4.kernels import dispatch
from peft_nvfp4.lora.layer import FrozenLoraLinear
from peft_nvfp4.nn.bf16 import DenseFrozenLinear
from peft_nvfp4.numerics.reference import mm
from peft_nvfp4.training import packed_attention
from peft_nvfp4.training.steps import slow_down_steps

from .training import IGNORED, Encoded, Recipe, base_model

ADAPTER = "default"

# ---------------------------------------------------------------------------------------------- whose token it is


class _Owners:
    """Whose columns a token keeps.

    Attributes:
        runs: S.
        of_token: (M,) the run of every token of the pass that is computed now; None: S equal parts, in order.
        longest: tokens of the longest sequence of that pass.
    """

    def __init__(self, runs: int):
        self.runs, self.longest = runs, 0
        self.of_token: Tensor | None = None
        self._others: dict[int, Tensor] = {}

    def set(self, of_token: Tensor | None, longest: int = 0) -> None:
        self.of_token, self.longest = of_token, longest
        self._others.clear()

    def keep_own_(self, h: Tensor) -> Tensor:
        """h (M, S * r) with zeros in the columns of other runs."""
        count = len(h)
        if count not in self._others:
            if self.of_token is None and count % self.runs:
                raise ValueError(f"{count} tokens are not {self.runs} equal parts")
            if self.of_token is not None and len(self.of_token) != count:
                raise ValueError(f"{count} tokens, and the owners of {len(self.of_token)}")
            owner = self.of_token
            if owner is None:
                owner = torch.arange(count, device=h.device) // (count // self.runs)
            self._others = {count: owner[:, None] != torch.arange(self.runs, device=h.device)}
        h.unflatten(1, (self.runs, -1)).masked_fill_(self._others[count][:, :, None], 0.0)
        return h


_STACK: list[_Owners] = []
"""Of the contexts that are open. (No context variable: on a GPU, autograd runs backward in a thread of its own.)"""


def _hidden_of(xd: Tensor, adapters: Adapters) -> list[Tensor]:
    """:func:`peft_nvfp4.autograd.frozen_linear.hidden_of`; a token keeps what is its run's."""
    owners = _STACK[-1]
    return [owners.keep_own_(h) for h in _PLAIN_HIDDEN(xd, adapters)]


_PLAIN_HIDDEN = frozen_linear.hidden_of


def _gradients_of_a(
    dys: Sequence[Tensor], xd: Tensor | None, adapters: Adapters, dtypes: Sequence[torch.dtype | None], needs_x: bool
) -> tuple[list[Tensor | None], HiddenGradients]:
    """:func:`peft_nvfp4.autograd.frozen_linear.gradients_of_a` of adapters without dropout; a token keeps what is its run's."""
    owners, ranks = _STACK[-1], [item.rank for item in adapters.items]
    parts = [owners.keep_own_(mm(dy, item.up)) for dy, item in zip(dys, adapters.items)]
    g = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    dtype = next((dtype for dtype in dtypes if dtype), None)
    if dtype is None:
        return [None] * len(ranks), HiddenGradients(g, {})
    return list(mm(g.T, xd, dtype).split_with_sizes(ranks)), HiddenGradients(g, {})


class FlashAttnRowsFunc(packed_attention.FlashAttnVarlenFunc):
    """With the length of the longest sequence, which is known here: the kernel's grid is as large as that times the number of
    sequences, and the product, which leaves lengths on the device, has to say that of all tokens."""

    @staticmethod
    def forward(ctx, q, k, v, first_tokens, scale, window, sinks):
        if window is not None or sinks is not None:
            raise packed_attention.NotPackable("runs together have neither windows nor sinks")
        ctx.longest, ctx.options = _STACK[-1].longest, dict(scale=scale)
        output, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, first_tokens, first_tokens, ctx.longest, ctx.longest, 0.0, True, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, output, logsumexp, first_tokens, seed, offset, None)
        return output


def _as_for_one_run() -> AbstractContextManager:
    """Emulated FP4 products of many tokens are made in pieces, to save memory; here in one, as those of one run's tokens are. Few
    tokens (of a step of generation) take the way of many, too: the kernel for few is not made for wide adapters."""
    if not torch.cuda.is_available():
        return nullcontext()
    emulated = importlib.import_module("peft_nvfp4.kernels.emulated")
    return patch.multiple(emulated, OPERAND_BYTES=1 << 30, SMALL_ROWS=0)


@contextmanager
def together(runs: int) -> Iterator[_Owners]:
    """Within the context the adapters of every frozen linear are those of ``runs`` runs."""
    owners = _Owners(runs)
    _STACK.append(owners)
    try:
        with (
            patch.multiple(frozen_linear, hidden_of=_hidden_of, gradients_of_a=_gradients_of_a),
            patch.multiple(lora, hidden_of=_hidden_of, gradients_of_a=_gradients_of_a),
            # shortcuts that compute h by themselves
            patch.object(frozen_linear, "dequantized_input_is_needed", lambda call: any(item.branches for item in call.linears)),
            patch.object(dispatch, "few_rows_module", lambda x: None),
            patch.object(packed_attention, "FlashAttnVarlenFunc", FlashAttnRowsFunc),
            _as_for_one_run(),
        ):
            yield owners
    finally:
        _STACK.pop()


# ---------------------------------------------------------------------------------------------- the wide adapter


class WideAdapters:
    """The adapters of a model, as those of several runs.

    Attributes:
        layers: the LoRA layers, by name.
        starts: name of a parameter -> its first value, where the method has one; else it is drawn from the run's seed.
    """

    def __init__(self, model: nn.Module, drawn: bool = True):
        """``drawn``: A is drawn and B is zero at first; else adapters start as they are now."""
        for layer in [m for m in model.modules() if isinstance(m, Linear) and not isinstance(m, FrozenLoraLinear)]:
            _as_frozen(layer)
        slow_down_steps(model)  # recordings and packing of single runs
        ALL_ATTENTION_FUNCTIONS["sdpa"] = packed_attention.attention
        attach_rope(innermost(model))  # one kernel, transformers' bits; the nvfp4 backend has it already
        self.model, self.runs = model, 1
        self.layers = [layer for _, layer in sorted(model.named_modules()) if isinstance(layer, FrozenLoraLinear)]
        self.rank = self.layers[0].r[ADAPTER]
        self.starts = None if drawn else [p.detach().clone() for p in self.parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A of all layers, then B of all."""
        return [getattr(layer, kind)[ADAPTER].weight for kind in ("lora_A", "lora_B") for layer in self.layers]

    def reset(self, seeds: Sequence[int]) -> None:
        """Adapters for so many runs, at the first values that :func:`reproduce.training.reset` gives a run of a seed."""
        self.runs, number = len(seeds), len(self.layers)
        for i, layer in enumerate(self.layers):
            a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
            if self.starts is None:
                new_a, new_b = a.weight.new_zeros(self.runs * self.rank, a.weight.shape[1]), None
            else:
                new_a, new_b = self.starts[i].repeat(self.runs, 1), self.starts[number + i].repeat(1, self.runs)
            if new_b is None:
                new_b = b.weight.new_zeros(b.weight.shape[0], self.runs * self.rank)
            a.weight, b.weight = nn.Parameter(new_a), nn.Parameter(new_b)
        if self.starts is None:
            for run, seed in enumerate(seeds):
                self._draw(run, torch.Generator().manual_seed(seed))

    def _draw(self, run: int, generator: torch.Generator) -> None:
        for name, p in sorted(self.model.named_parameters()):
            if ".lora_A." in name:
                values = (2 * torch.rand(self.rank, p.shape[1], generator=generator) - 1) * p.shape[1] ** -0.5
                p.data[run * self.rank : (run + 1) * self.rank] = values.to(p.device)

    def by_run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views (S, ...) of values or gradients in the order of ``parameters``."""
        number = len(self.layers)
        parts_of_a = [t.unflatten(0, (self.runs, self.rank)) for t in tensors[:number]]
        return parts_of_a + [t.unflatten(1, (self.runs, self.rank)).transpose(0, 1) for t in tensors[number:]]

    def of_run(self, run: int) -> list[Tensor]:
        """A (r, K) and B (N, r) of all layers of one run."""
        return [t[run] for t in self.by_run([p.detach() for p in self.parameters])]


def _as_frozen(layer: Linear) -> None:
    """PEFT's own layer over a linear that was left dense becomes this package's over a bf16 base, which is the same function."""
    layer.base_layer = DenseFrozenLinear.quantize(layer.base_layer)
    layer.__class__ = FrozenLoraLinear


class RunsAdamW:
    """AdamW without decay, each run with its own rate and its own clipping: ``torch.optim.AdamW`` and ``clip_grad_norm_`` on one
    matrix (S, values of a run).

    Args:
        ratio: rate of B over that of A (LoRA+).
    """

    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, adapters: WideAdapters, ratio: float = 1.0):
        self.adapters, self.ratio = adapters, ratio
        self.views = adapters.by_run([p.data for p in adapters.parameters])
        self.values = _flat(self.views)
        self.mean, self.square = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self.steps = 0
        self.first_of_b = sum(view[0].numel() for view in self.views[: len(adapters.layers)])

    def step(self, rates: Tensor, clip: float) -> Tensor:
        """One step with the rates (S,) and the gradients that the parameters have; the gradients' norms (S,) before clipping."""
        parameters, (beta1, beta2) = self.adapters.parameters, self.BETAS
        gradient = _flat(self.adapters.by_run([p.grad for p in parameters]))
        norm = torch.linalg.vector_norm(gradient, dim=1)
        gradient *= (clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        self.steps += 1
        self.mean.lerp_(gradient, 1 - beta1)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (self.square.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.EPSILON)
        update = (self.mean / root).mul_((rates / (1 - beta1**self.steps))[:, None])
        if self.ratio != 1.0:
            update[:, self.first_of_b :] *= self.ratio
        self.values -= update
        sizes = [view[0].numel() for view in self.views]
        torch._foreach_copy_(self.views, [part.view(v.shape) for part, v in zip(self.values.split(sizes, 1), self.views)])
        for p in parameters:
            p.grad = None
        return norm


def _flat(views: Sequence[Tensor]) -> Tensor:
    return torch.cat([view.flatten(1) for view in views], dim=1)


# ---------------------------------------------------------------------------------------------- a step of all runs


class Rows(NamedTuple):
    """Rows of all runs, run after run, one after another without padding: N tokens in R sequences, P of them with a label."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,)
    first_tokens: Tensor  # (R + 1,) int32
    run: Tensor  # (N,)
    place: Tensor  # (P,) among the N tokens
    label: Tensor  # (P,)
    run_of_label: Tensor  # (P,)
    share: Tensor  # (P,) of a label in the mean over its run's labels
    longest: int

    def to(self, device: Any) -> Rows:
        return Rows(*(t.to(device, non_blocking=True) for t in self[:-1]), self.longest)


def rows_of(data: Encoded, index: Tensor) -> Rows:
    """The rows ``index`` (S, batch) of every run. What follows the last position with a label is not needed."""
    batch, flat = index.shape[1], index.flatten()
    at, labels = data.at[flat], data.labels[flat]
    labelled = labels != IGNORED
    lengths = (at + 1).masked_fill(~labelled, 0).amax(1)
    columns = torch.arange(data.ids.shape[1])
    real = columns < lengths[:, None]
    starts = F.pad(lengths.cumsum(0), (1, 0))
    row, column = labelled.nonzero(as_tuple=True)
    run_of_label = row // batch
    return Rows(
        data.ids[flat][real],
        columns.expand_as(real)[real],
        starts.int(),
        (torch.arange(len(flat)) // batch).repeat_interleave(lengths),
        starts[row] + at[row, column],
        labels[row, column],
        run_of_label,
        1 / torch.bincount(run_of_label)[run_of_label],
        int(lengths.max()),
    )


def run_losses(model: nn.Module, rows: Rows, owners: _Owners) -> Tensor:
    """(S,) mean loss of every run's batch."""
    owners.set(rows.run, rows.longest)
    decoder = base_model(model)
    hidden = decoder.base_model(
        input_ids=rows.ids[None],
        position_ids=rows.positions[None],
        attention_mask=rows.first_tokens.view(1, 1, 1, -1),
        use_cache=False,
    ).last_hidden_state[0]
    logits = decoder.get_output_embeddings()(hidden[rows.place]).float()
    losses = F.cross_entropy(logits, rows.label, reduction="none")
    return losses.new_zeros(owners.runs).index_add(0, rows.run_of_label, losses * rows.share)


class Diverged(FloatingPointError):
    """A loss is not finite."""


def train_together(
    adapters: WideAdapters, data: Encoded, recipes: Sequence[Recipe], device: Any, ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Train one adapter for every recipe (of one number of steps, one batch and one clipping), from its first values; what was
    seen on the way. Afterwards the model holds all of them. ``ratio``: see :class:`RunsAdamW`.

    Raises:
        Diverged: some loss is not finite. Which run it began with cannot be told (zeros times NaN): train fewer together.
    """
    model, first = adapters.model, recipes[0]
    adapters.reset([recipe.seed for recipe in recipes])
    torch.manual_seed(first.seed)
    optimizer = RunsAdamW(adapters, ratio)
    rates = torch.tensor([recipe.rates() for recipe in recipes], device=device)
    orders = torch.stack([recipe.order(len(data)) for recipe in recipes], dim=1)  # (steps, S, batch)
    losses = []
    with together(len(recipes)) as owners:
        model.train()
        for step, index in enumerate(orders):
            loss = run_losses(model, rows_of(data, index).to(device), owners)
            loss.sum().backward()
            optimizer.step(rates[:, step], first.clip)
            losses.append(loss.detach())
    seen = torch.stack(losses, dim=1).cpu()
    if not seen.isfinite().all():
        raise Diverged(f"the loss is not finite, of {len(recipes)} runs with rates {[recipe.lr for recipe in recipes]}")
    tail = max(1, first.steps // 10)
    return [{"train_loss": s[-tail:].mean().item(), "first_loss": s[0].item(), "finite": True} for s in seen]
