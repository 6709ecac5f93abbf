"""Training of an adapter that is made once and started anew in place for every run.

A run of 200 steps of a 135M model takes seconds, and freezing a base, finding its fused sites and recording a step takes as
long. So a :class:`Trainee` keeps one frozen model with one adapter; :func:`reset` gives the adapter the values that a fresh one
of that seed would have, and :class:`Step` is a whole step (rows, forward, loss, backward, clipping, AdamW) over tensors that stay
where they are, so that it can be recorded once (:mod:`reproduce.recording`). Nothing in a step waits for the device.

Everything that takes time is a generator that yields after each piece of work, so that one Python thread can drive several
trainees on several CUDA streams (:mod:`reproduce.worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peft_nvfp4.training.cuda_graphs import GraphedForward, disable_cuda_graphs, enable_cuda_graphs, graph_status
from peft_nvfp4.training.graph_recording import SeedTape

from .encoding import IGNORED, Encoded, order
from .recording import Piece, Throttle, arrived

CAUSAL = "reproduce_causal"
"""SDPA by a name for which transformers makes no mask (and, under capture, no dense one in the place of none)."""


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

    def rates(self) -> Tensor:
        """(steps,) FP32: the optimizer's kernel takes it from the device in that precision."""
        warmup = max(1, round(self.warmup * self.steps))
        shares = [min((i + 1) / warmup, (self.steps - i) / max(self.steps - warmup, 1)) for i in range(self.steps)]
        return torch.tensor([self.lr * share for share in shares])


@dataclass
class Trainee:
    """A frozen model with one adapter.

    Attributes:
        description: what of it was fused.
        graphs: record what can be recorded.
        step: the recorded step, of one shape.
        pieces: recorded forward passes, by shape (:mod:`reproduce.scoring`).
    """

    model: nn.Module
    tokenizer: Any
    description: str = ""
    graphs: bool = False
    step: Step | None = None
    pieces: dict[tuple, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def replays(self) -> int:
        """Of whole steps, or where these could not be recorded of the decoder."""
        return (self.step.piece.played if self.step else 0) + sum(graph_status(self.model).graphs.values())

    def forget_recordings(self) -> None:
        """Free the memory of recordings; the next run makes new ones."""
        self.step = None
        self.pieces.clear()
        if (graphed := graphed_forward(self.model)) is not None:
            graphed.entries.clear()

    def release(self) -> None:
        """Free the recordings: the model refers to itself through them."""
        self.forget_recordings()
        disable_cuda_graphs(self.model)


def base_model(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def maskless(model: nn.Module) -> Iterator[None]:
    """Causal attention without a mask: all padding is on the right."""
    config = base_model(model).config
    before = config._attn_implementation
    if before == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(CAUSAL, sdpa_attention_forward)
        config._attn_implementation = CAUSAL
    try:
        yield
    finally:
        config._attn_implementation = before


def logits_at(model: nn.Module, ids: Tensor, place: Tensor) -> Tensor:
    """(P, vocabulary) FP32. The head, the largest matrix of a small model, runs at these positions only."""
    base = base_model(model)
    # the decoder's own recording takes care of masks by itself, and compares what it knows of the model with what is set here
    if graphed_forward(model) is not None and torch.is_grad_enabled():
        hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
    else:
        with maskless(model):
            hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return base.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, place)).float()


def token_losses(model: nn.Module, ids: Tensor, place: Tensor, label: Tensor) -> Tensor:
    """(P,) FP32 negative log-likelihoods of the labels; 0 where there is none."""
    return F.cross_entropy(logits_at(model, ids, place), label, reduction="none", ignore_index=IGNORED)


def reset(model: nn.Module, seed: int) -> None:
    """Give every adapter its first values in place: A uniform in +-1/sqrt(fan-in), as PEFT draws it, and B zero. Drawn on the
    CPU, by name, so that the values depend on the seed and the shapes alone; all at once to the device."""
    generator = torch.Generator().manual_seed(seed)
    a, values, b = [], [], []
    for name, p in sorted(model.named_parameters()):
        if ".lora_A." in name:
            a.append(p.data)
            values.append((2 * torch.rand(p.shape, generator=generator) - 1).flatten() * p.shape[1] ** -0.5)
        elif ".lora_B." in name:
            b.append(p.data)
        p.grad = None
    if a:
        drawn = torch.cat(values).to(a[0].device)
        torch._foreach_copy_(a, [v.view(p.shape) for v, p in zip(drawn.split([p.numel() for p in a]), a)])
        torch._foreach_zero_(b)


# ---------------------------------------------------------------------------------------------- a step


class Step:
    """One step of training over tensors that stay where they are. ``at``, a counter on the device, says which rows, learning rate
    and seeds are the next ones, and where loss and norm are noted.

    All positions that could have a label are in every batch; those without one count nothing.
    """

    def __init__(self, trainee: Trainee, shape: tuple[int, int, int], capacity: int, clip: float):
        batch, length, answer = shape
        self.trainee, self.shape, self.capacity, self.clip = trainee, shape, capacity, clip
        device, self.parameters = trainee.device, trainee.parameters
        zeros = lambda *size, dtype=torch.int64: torch.zeros(size, dtype=dtype, device=device)
        self.ids, self.at = zeros(capacity, batch, length), zeros(1)
        self.place, self.label = zeros(capacity, batch * answer), zeros(capacity, batch * answer)
        self.rates, self.losses, self.norms = (zeros(capacity, dtype=torch.float32) for _ in range(3))
        self.lr = zeros(dtype=torch.float32)
        self.tape = SeedTape(device)
        self.seeds: Tensor | None = None  # (capacity, seeds of a step), once it is known how many
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.lr, weight_decay=0.0, fused=True, capturable=cuda)
        self.piece = self._record()

    def _record(self) -> Piece:
        """All that a step changes is put back by :meth:`begin`."""
        self.trainee.model.train()
        self.optimizer.zero_grad()  # gradients get memory of the recording's own
        wanted = self.trainee.graphs
        with torch.random.fork_rng([]), self.tape.recording():
            piece = Piece(self._run, self.trainee.device, wanted)
        if piece.recording is None:
            self.seeds = None
            if wanted and self.trainee.device.type == "cuda":
                self.optimizer.zero_grad()
                enable_cuda_graphs(self.trainee.model)  # the second best: the decoder alone
        return piece

    def _forward_backward(self) -> Tensor:
        self.tape.places.clear()
        ids, place, label = (t.index_select(0, self.at)[0] for t in (self.ids, self.place, self.label))
        if self.seeds is not None:
            self.tape.buffer[: self.seeds.shape[1]].copy_(self.seeds.index_select(0, self.at)[0])
        loss = token_losses(self.trainee.model, ids, place, label).sum() / (label != IGNORED).sum()
        loss.backward()
        if self.seeds is None and self.tape.places:  # in the warm-up
            self.seeds = torch.zeros(self.capacity, len(self.tape.places), dtype=torch.int64, device=self.ids.device)
        return loss.detach()

    def _run(self) -> None:
        loss = self._forward_backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.lr.copy_(self.rates.index_select(0, self.at)[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.index_copy_(0, self.at, loss.view(1))
        self.norms.index_copy_(0, self.at, norm.view(1))
        self.at.add_(1)

    def fits(self, shape: tuple[int, int, int], recipe: Recipe) -> bool:
        return self.shape == shape and self.capacity >= recipe.steps and self.clip == recipe.clip

    def begin(self, data: Encoded, recipe: Recipe) -> None:
        """Everything that the steps of a run read, before the first one."""
        reset(self.trainee.model, recipe.seed)
        if moments := [t for state in self.optimizer.state.values() for t in state.values()]:  # none before the first step
            torch._foreach_zero_(moments)
        self.trainee.model.train()
        rows = order(len(data), recipe.steps, recipe.batch, recipe.seed)
        n, length = recipe.steps, data.ids.shape[1]
        place = data.at[rows] + (torch.arange(recipe.batch) * length)[:, None]
        self.ids[:n].copy_(data.ids[rows])
        self.place[:n].copy_(place.flatten(1))
        self.label[:n].copy_(data.labels[rows].flatten(1))
        self.rates[:n].copy_(recipe.rates())
        self.at.zero_()
        torch.manual_seed(recipe.seed)  # stochastic rounding
        if self.seeds is not None:  # those that a step by step would draw
            self.seeds[:n].copy_(torch.randint(-(2**62), 2**62, (n, self.seeds.shape[1]), dtype=torch.int64))
        _settle(self.trainee.model, (recipe.batch, length))

    def __call__(self) -> None:
        self.piece()

    def _changing(self) -> list[Tensor]:
        """What a step changes: put back, the run goes on as if it had never stopped."""
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*(p.data for p in self.parameters), *moments, self.at, self.losses, self.norms]

    def save(self, path: Path, done: int, points: list[dict]) -> None:
        """What :meth:`go_on` needs after :meth:`begin` of the same run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        values = [t.cpu() for t in self._changing()]
        torch.save({"done": done, "points": points, "values": values, "random": torch.get_rng_state()}, part)
        part.replace(path)

    def go_on(self, path: Path) -> tuple[int, list[dict]]:
        """(steps that were made before, what had been noted)."""
        found = torch.load(path, weights_only=True)
        if not self.optimizer.state:
            self()  # makes the moments
        for tensor, value in zip(self._changing(), found["values"], strict=True):
            tensor.copy_(value)
        torch.set_rng_state(found["random"])
        return found["done"], found["points"]


def graphed_forward(model: nn.Module) -> GraphedForward | None:
    forward = base_model(model).base_model.__dict__.get("forward")
    return forward if isinstance(forward, GraphedForward) else None


def _settle(model: nn.Module, shape: tuple[int, int]) -> None:
    """Where only the decoder is recorded: let it compare the model's state once for the run to come, which changes nothing of it;
    in every step, that would take most of the step's Python."""
    graphed = graphed_forward(model)
    if graphed is None or not next(model.parameters()).is_cuda:
        return
    graphed.__dict__.pop("_model_state", None)
    if all(tuple(e.recording.inputs["input_ids"].shape) != shape for e in graphed.entries.values()):
        graphed.entries.clear()  # another task's
    state = graphed._model_state()
    graphed._model_state = lambda: state


# ---------------------------------------------------------------------------------------------- a run

CAPACITY = 256
"""Steps that a recording has room for at least."""


def prepared(trainee: Trainee, data: Encoded, recipe: Recipe) -> Step:
    """The step of this shape, recorded if the trainee has none yet."""
    shape = (recipe.batch, data.ids.shape[1], data.at.shape[1])
    if trainee.step is None or not trainee.step.fits(shape, recipe):
        trainee.step = None
        trainee.step = Step(trainee, shape, max(CAPACITY, recipe.steps), recipe.clip)
    return trainee.step


@dataclass(frozen=True)
class Pause:
    """When a run stops before its end, and the file from which it goes on."""

    late: Callable[[], bool]
    path: Path


def train(
    trainee: Trainee,
    data: Encoded,
    recipe: Recipe,
    held_out: Callable[[Trainee], Generator] | None = None,
    pause: Pause | None = None,
) -> Generator[bool | None, None, dict]:
    """Fine-tune from the adapter's first values; the result says what was seen on the way.

    Args:
        held_out: of ``recipe.curve``: a generator function of the trainee, whose result is noted.
        pause: ``result["steps"]`` says how many there were; all of them once nothing has been left.
    """
    step = prepared(trainee, data, recipe)
    yield
    step.begin(data, recipe)
    throttle, points, done = Throttle(trainee.device), [], 0
    if pause and pause.path.is_file():
        done, points = step.go_on(pause.path)
    while done < recipe.steps and not (pause and pause.late()):
        if recipe.curve and done % recipe.curve == 0 and all(point["step"] != done for point in points):
            points.append({"step": done, **(yield from held_out(trainee))})
            trainee.model.train()
        step()
        done += 1
        yield from throttle.step()
    yield from arrived(trainee.device)
    if done < recipe.steps:
        step.save(pause.path, done, points)
    seen, norms = step.losses[:done].cpu(), step.norms[:done].cpu()
    tail = seen[-max(1, done // 10) :]
    result = {"steps": done, "finite": bool(torch.isfinite(seen).all())}
    if done:
        result |= {"train_loss": tail.mean().item(), "first_loss": seen[0].item()}
    if recipe.curve:
        if done == recipe.steps:
            points.append({"step": done, **(yield from held_out(trainee))})
        result["curve"] = {"loss": seen.tolist(), "gradient_norm": norms.tolist(), "held_out": points}
    return result


def finish(work: Generator[bool | None, None, Any]) -> Any:
    """Run such a generator to its end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value
