"""One training run of an adapter: rows as tensors, the initial values of a seed, AdamW, and the learning rate's schedule.

Prompt and target are tokenised apart and joined, with padding on the right, where a causal decoder needs no mask. A model is made
once for a group of runs. :func:`reset` gives its adapters the values of a seed, so that all methods begin with the same values
and read the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .prompts import Item
from .tasks import GENERATED, Task

IGNORED = -100


@dataclass(frozen=True)
class Encoded:
    """N sequences of T tokens on the CPU, int64.

    Attributes:
        ids: (N, T).
        at: (N, L) positions whose next token is learned or scored, L being the longest target.
        labels: (N, L) those tokens; -100 where there is none.
    """

    ids: Tensor
    at: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def supervised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions with a label, in one row: place in the flattened (N * T), label, sequence; each (P,)."""
        row, column = (self.labels != IGNORED).nonzero(as_tuple=True)
        return row * self.ids.shape[1] + self.at[row, column], self.labels[row, column], row


def tokens(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids if text else []


def prompt_ids(item: Item, tokenizer: Any, room: int) -> list[int]:
    """The context loses its end and, where the question alone is too long, the question its beginning."""
    question = tokens(item.question, tokenizer)
    if len(question) >= room:
        return question[-room:]
    return tokens(item.context, tokenizer)[: room - len(question)] + question


def target_ids(text: str, tokenizer: Any, task: Task) -> list[int]:
    """A target; a generated one ends with the end-of-text token."""
    end = [tokenizer.eos_token_id] if task.kind == GENERATED else []
    return tokens(text, tokenizer) + end


def encode(pairs: Sequence[tuple[list[int], list[int]]], length: int, pad: int = 0) -> Encoded:
    """(prompt, target) pairs, each no longer than ``length`` together."""
    answer = max(len(target) for _, target in pairs)
    ids = torch.full((len(pairs), length), pad)
    at = torch.zeros(len(pairs), answer, dtype=torch.int64)
    labels = torch.full((len(pairs), answer), IGNORED)
    for row, (prompt, target) in enumerate(pairs):
        ids[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        at[row, : len(target)] = torch.arange(len(prompt) - 1, len(prompt) + len(target) - 1)
        labels[row, : len(target)] = torch.tensor(target)
    return Encoded(ids, at, labels)


def training_set(items: Sequence[Item], task: Task, tokenizer: Any) -> Encoded:
    """Prompt and right answer of every row whose target is not too long.

    Raises:
        ValueError: all targets are too long.
    """
    pairs = []
    for item in items:
        target = target_ids(item.target, tokenizer, task)
        if 0 < len(target) <= task.answer:
            pairs.append((prompt_ids(item, tokenizer, task.length - len(target)), target))
    if not pairs:
        raise ValueError(f"no row of {task.name} has a target of at most {task.answer} tokens")
    return encode(pairs, task.length)


@dataclass(frozen=True)
class Recipe:
    """One run: the same for all methods but for the learning rate.

    Attributes:
        warmup: share of the steps. Then the learning rate falls linearly to 0.
        clip: largest norm of the gradient.
        curve: keep the loss and the gradient's norm of all steps, and every so many steps the held-out loss; 0: none of it.
    """

    lr: float
    seed: int
    steps: int = 200
    batch: int = 16
    warmup: float = 0.1
    clip: float = 1.0
    curve: int = 0

    def rates(self) -> list[float]:
        """Learning rate of each step."""
        warmup = max(1, round(self.warmup * self.steps))
        shares = (min((i + 1) / warmup, (self.steps - i) / max(self.steps - warmup, 1)) for i in range(self.steps))
        return [self.lr * share for share in shares]

    def order(self, rows: int) -> Tensor:
        """(steps, batch) row numbers: whole shuffled passes, one after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        passes = -(-self.steps * self.batch // rows)
        flat = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])
        return flat[: self.steps * self.batch].view(self.steps, self.batch)


def base_model(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logits_at(model: nn.Module, ids: Tensor, place: Tensor) -> Tensor:
    """(P, vocabulary) FP32. The head, the largest matrix of a small model, runs at these positions only."""
    base = base_model(model)
    hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return base.get_output_embeddings()(hidden.flatten(0, 1)[place]).float()


def token_losses(model: nn.Module, rows: Encoded, device: Any) -> tuple[Tensor, Tensor]:
    """(negative log-likelihood of each label, sequence that it belongs to), both (P,)."""
    place, label, row = (t.to(device) for t in rows.supervised())
    return F.cross_entropy(logits_at(model, rows.ids.to(device), place), label, reduction="none"), row


def reset(model: nn.Module, seed: int) -> None:
    """Give every adapter its first values in place: A uniform in +-1/sqrt(fan-in), as PEFT draws it, and B zero. Drawn on the
    CPU, by name, so that the values depend on the seed and the shapes alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        if ".lora_A." in name:
            p.data.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * p.shape[1] ** -0.5)
        elif ".lora_B." in name:
            p.data.zero_()
        p.grad = None


def train(
    model: nn.Module,
    rows: int,
    recipe: Recipe,
    loss_of: Callable[[Tensor], Tensor],
    held_out: Callable[[], dict] | None = None,
) -> dict[str, Any]:
    """Train the adapters from their first values; what was seen on the way.

    Args:
        rows: of the training set.
        loss_of: mean loss of a batch, from its row numbers.
        held_out: needed with ``recipe.curve``: scores of the model as it is.
    """
    reset(model, recipe.seed)
    torch.manual_seed(recipe.seed)  # of stochastic rounding
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, fused=True)
    losses, norms, points = [], [], []
    for step, (lr, batch) in enumerate(zip(recipe.rates(), recipe.order(rows), strict=True)):
        if recipe.curve and step % recipe.curve == 0:
            points.append({"step": step, **held_out()})
        model.train()
        loss = loss_of(batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, recipe.clip))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seen = torch.stack(losses).cpu()
    tail = seen[-max(1, recipe.steps // 10) :]
    result = {"train_loss": tail.mean().item(), "first_loss": seen[0].item(), "finite": bool(seen.isfinite().all())}
    if recipe.curve:
        points.append({"step": recipe.steps, **held_out()})
        result["curve"] = {"loss": seen.tolist(), "gradient_norm": torch.stack(norms).tolist(), "held_out": points}
    return result
