"""A few optimizer steps on one batch, and their losses."""

import torch
from torch import Tensor, nn


def steps(model: nn.Module, ids: Tensor, count: int, lr: float = 1e-2, optimizer: type = torch.optim.AdamW) -> list[float]:
    """Losses of ``count`` steps of ``optimizer`` on whatever requires a gradient; the model's mode is left alone."""
    chosen = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return losses
