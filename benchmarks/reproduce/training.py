"""Training of an adapter that is made once and started anew in place for every run.

A run of 200 steps of a 135M model takes seconds, and freezing a base, finding its fused sites and recording CUDA graphs takes as
long. So a :class:`Trainee` keeps one frozen model with one adapter; :func:`reset` gives the adapter the values that a fresh one
of that seed would have, and each run gets an optimizer of its own. Nothing in a step waits for the device.

Everything that takes time is a generator that yields after each piece of work, so that one Python thread can drive several
trainees on several CUDA streams (:mod:`reproduce.worker`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peft_nvfp4.graphs import GraphedForward, disable_cuda_graphs, graph_status

from .encoding import Encoded, Supervised, order, supervised


@dataclass(frozen=True)
class Recipe:
    """One run: the same for all methods but for the learning rate.

    Attributes:
        warmup: share of the steps. Then the learning rate falls linearly to 0.
        curve: note the loss, the gradient's norm and, every so many steps, the held-out loss; 0 for none of it.
    """

    lr: float
    seed: int
    steps: int = 200
    batch: int = 16
    warmup: float = 0.1
    clip: float = 1.0
    curve: int = 0


@dataclass
class Trainee:
    """A frozen model with one adapter; ``description``: what of it was fused."""

    model: nn.Module
    tokenizer: Any
    description: str = ""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def replays(self) -> int:
        return sum(graph_status(self.model).graphs.values())

    def forget_recordings(self) -> None:
        """Free the memory of recordings; the next run makes a new one."""
        if (graphed := graphed_forward(self.model)) is not None:
            graphed.entries.clear()

    def release(self) -> None:
        """Free the recordings: the model refers to itself through them."""
        disable_cuda_graphs(self.model)


def base_model(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def token_losses(model: nn.Module, ids: Tensor, at: Supervised) -> Tensor:
    """(P,) FP32 negative log-likelihoods of the labels."""
    return F.cross_entropy(logits_at(model, ids, at.place), at.label, reduction="none")


def logits_at(model: nn.Module, ids: Tensor, place: Tensor) -> Tensor:
    """(P, vocabulary) FP32. The head, the largest matrix of a small model, runs at these positions only."""
    model = base_model(model)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, place)).float()


def reset(model: nn.Module, seed: int) -> None:
    """Give every adapter its first values in place: A uniform in +-1/sqrt(fan-in), as PEFT draws it, and B zero. Drawn on the
    CPU, by name, so that the values depend on the seed and the shapes alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        if ".lora_A." in name:
            bound = p.shape[1] ** -0.5
            p.data.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * bound)
        elif ".lora_B." in name:
            p.data.zero_()
        p.grad = None


def graphed_forward(model: nn.Module) -> GraphedForward | None:
    forward = base_model(model).base_model.__dict__.get("forward")
    return forward if isinstance(forward, GraphedForward) else None


def _settle(model: nn.Module, shape: tuple[int, int]) -> None:
    """Let the graphs compare the model's state once for the run to come, which changes nothing of it: in every step, that would
    take most of the step's Python."""
    graphed = graphed_forward(model)
    if graphed is None or not next(model.parameters()).is_cuda:
        return
    graphed.__dict__.pop("_model_state", None)
    if all(tuple(e.recording.inputs["input_ids"].shape) != shape for e in graphed.entries.values()):
        graphed.entries.clear()  # another task's
    state = graphed._model_state()
    graphed._model_state = lambda: state


def _batches(data: Encoded, rows: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Supervised]]:
    """Inputs of every step. All are on the device before the first one: a copy in every step would wait for it."""
    steps, batch = rows.shape
    length = data.ids.shape[1]
    ids = data.ids[rows].to(device)  # (steps, batch, T)
    flat = supervised(data.at[rows].flatten(0, 1), data.labels[rows].flatten(0, 1), length)
    counts = torch.bincount(flat.owner // batch, minlength=steps).tolist()
    within = flat._replace(place=flat.place % (batch * length), owner=flat.owner % batch).to(device)
    parts = zip(*(t.split(counts) for t in within))
    return ((ids[step], Supervised(*part)) for step, part in enumerate(parts))


def train(trainee: Trainee, data: Encoded, recipe: Recipe, held_out: Any = None) -> Generator[None, None, dict]:
    """Fine-tune from the adapter's first values; the result says what was seen on the way.

    Args:
        held_out: of ``recipe.curve``: a generator function of the trainee, whose result is noted.
    """
    model, parameters, device = trainee.model, trainee.parameters, trainee.device
    reset(model, recipe.seed)
    torch.manual_seed(recipe.seed)  # stochastic rounding
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=0.0, fused=device.type == "cuda")
    steps, warmup = recipe.steps, max(1, round(recipe.warmup * recipe.steps))
    batches = _batches(data, order(len(data), steps, recipe.batch, recipe.seed), device)
    model.train()
    _settle(model, (recipe.batch, data.ids.shape[1]))
    losses, norms, points = [], [], []
    for step, (ids, at) in enumerate(batches):
        if recipe.curve and step % recipe.curve == 0:
            points.append({"step": step, **(yield from held_out(trainee))})
            model.train()
        optimizer.param_groups[0]["lr"] = recipe.lr * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
        loss = token_losses(model, ids, at).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        yield
    seen = torch.stack(losses).float().cpu()
    tail = seen[-max(1, steps // 10) :]
    result = {"train_loss": tail.mean().item(), "first_loss": seen[0].item(), "finite": bool(torch.isfinite(seen).all())}
    if recipe.curve:
        points.append({"step": steps, **(yield from held_out(trainee))})
        curve = {"loss": seen.tolist(), "gradient_norm": torch.stack(norms).float().cpu().tolist(), "held_out": points}
        result["curve"] = curve
    return result


def finish(work: Generator[None, None, Any]) -> Any:
    """Run such a generator to its end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value
