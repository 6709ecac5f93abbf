"""Recordings of a decoder's forward alone, without backward: steps of generation, and evaluation.

What both share: for which states of the model there are recordings, when they are thrown away, how one is made and replayed.
:mod:`peft_nvfp4.training.decoding` and :mod:`peft_nvfp4.training.evaluation` say what is recorded.

A replay is launched first, and the model is looked at while the GPU computes: hooks, another adapter, disabled or merged ones,
tensors that lie elsewhere. If it is not the model that was recorded, the result is thrown away and the call computed anew.
Recordings of the last few states are kept (a policy and its reference). Weights that are trained keep their place, and with it
their recordings.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .graph_recording import ForwardRecording, SeedTape, Unsupported, capturing, check_devices
from .graph_state import baked_in

MAX_RECORDINGS = 16
"""Of one state of the model: those that were made last."""
MAX_STATES = 4
"""Of the model, whose recordings are kept: a policy and its reference, in training mode and not."""
MAX_UNUSED = 2 * MAX_STATES
"""Recordings of one kind of call in a row that were never replayed, for the model was another one each time: no more are made."""


@dataclass
class ForwardStatus:
    """How calls without gradient ran.

    Attributes:
        replayed: kind of call -> number of replays.
        reasons: why calls ran without a recording -> how many.
        recorded: recordings made.
        discarded: recordings dropped because the model or its memory had changed.
    """

    what: ClassVar[str] = "calls"
    replayed: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    recorded: int = 0
    discarded: int = 0

    def __str__(self) -> str:
        lines = [f"replayed {n} {self.what}: {kind}" for kind, n in self.replayed.items()] or [f"replayed no {self.what}"]
        lines += [f"ran {n} {self.what} without a graph: {reason}" for reason, n in self.reasons.items()]
        if self.recorded:
            lines.append(f"made {self.recorded} recordings of {self.what}, discarded {self.discarded}")
        return "\n".join(lines)


class Recorded(NamedTuple):
    recording: Any
    tape: SeedTape
    kind: type | None = None  # of the decoder's output
    cache_field: str = ""  # of it

    def play(self, inputs: dict[str, Tensor]) -> Tensor:
        self.tape.refill()
        return self.recording.forward(inputs)


class State:
    """Recordings that were made of one state of the model."""

    def __init__(self, state: tuple, decoder: nn.Module):
        self.state = state
        self.recordings: dict[tuple, Recorded | str] = {}  # a reason where it cannot be recorded
        tensors = (*decoder.parameters(), *decoder.buffers())
        self.memory = [(weakref.ref(t), t.data_ptr()) for t in tensors]

    def memory_is_there(self) -> bool:
        """Whether a replay would read memory that is still the model's. (References are weak: a state that has passed keeps no
        weights.)"""
        return all((t := ref()) is not None and t.data_ptr() == address for ref, address in self.memory)

    @property
    def count(self) -> int:
        return sum(isinstance(r, Recorded) for r in self.recordings.values())


class ForwardRecordings:
    """Recordings of one decoder's forward.

    Args:
        recorder: makes a recording of (function, inputs, pool of memory).
    """

    def __init__(self, decoder: nn.Module, status: ForwardStatus, recorder: Callable = ForwardRecording):
        self._decoder, self.recorder, self.status = weakref.ref(decoder), recorder, status
        self.states: list[State] = []  # the one of the last call first
        self.pool: Any = None
        self.met: Counter = Counter()  # kinds of calls
        self.unused: Counter = Counter()  # recordings of a kind since the last one that was replayed
        self.lock = threading.RLock()  # one thread at a time: its step may read what another one's would overwrite

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    def __call__(self, ordinary: Callable, args: tuple, kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
        """The decoder's output: replayed, or what ``ordinary(*args, **kwargs)`` returns. ``named``: the arguments by name."""
        with self.lock:
            try:
                if (call := self._call_of(named)) is not None:
                    return self._run(call, ordinary, args, kwargs)
            except Unsupported as reason:
                self.status.reasons[str(reason)] += 1
            return ordinary(*args, **kwargs)

    def _call_of(self, named: dict[str, Any]) -> Any:
        """What these arguments ask for; None: nothing that is recorded here. Raises Unsupported with the reason why not."""
        raise NotImplementedError

    def _run(self, call: Any, ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
        if self.recorder is ForwardRecording:
            for name, tensor in inputs.items():
                if not tensor.is_cuda:
                    raise Unsupported(f"{name} is on the {tensor.device.type}")
            if torch.cuda.is_current_stream_capturing():
                raise Unsupported("it is being recorded by somebody else")

    def _settings(self, inputs: dict[str, Tensor]) -> tuple:
        """What a recording has baked in besides the model."""
        config = vars(self.decoder.config.get_text_config())
        return (
            tuple((name, tuple(t.shape), t.dtype) for name, t in inputs.items()),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple(value for name, value in config.items() if "output_" in name or name == "return_dict"),
        )

    # -- replays

    def _last(self, key: tuple) -> Recorded | None:
        """A recording of the state of the last call, if its memory is still there."""
        recorded = self.states[0].recordings.get(key) if self.states and self.states[0].memory_is_there() else None
        return recorded if isinstance(recorded, Recorded) else None

    def _played(self, key: tuple, recorded: Recorded, inputs: dict[str, Tensor]) -> Tensor | None:
        """Replay a recording of the last call's state, and see meanwhile whether the model is in that state; None if not."""
        generator, same = torch.get_rng_state(), False
        hidden = recorded.play(inputs)
        try:
            same = baked_in(self.decoder) == self.states[0].state
        finally:
            if not same:
                torch.set_rng_state(generator)
        if same:
            self.unused.pop(key, None)
        return hidden if same else None

    # -- recordings

    def _to_be_recorded(self, key: tuple) -> None:
        """Note that a kind of call without a recording was met. Raises Unsupported unless it is to be recorded now."""
        self.met[key] += 1
        if self.met[key] < 2:
            raise Unsupported(f"{self.status.what} of its kind were not met before")
        if self.unused[key] >= MAX_UNUSED:
            raise Unsupported("the model is another one in every call")

    def _recordings(self) -> dict[tuple, Recorded | str]:
        """Those of the model as it is now."""
        state = baked_in(self.decoder)
        self._discard([s for s in self.states if not s.memory_is_there()])
        found = next((s for s in self.states if s.state == state), None) or State(state, self.decoder)
        self._discard([s for s in self.states if s is not found][MAX_STATES - 1 :])
        self.states = [found, *(s for s in self.states if s is not found)]
        return found.recordings

    def _discard(self, states: Iterable[State]) -> None:
        states = list(states)
        self.status.discarded += sum(s.count for s in states)
        self.states = [s for s in self.states if s not in states]
        if not any(s.count for s in self.states):  # a pool of which something is still held cannot be recorded into
            self.pool = None

    def _forget(self) -> None:
        """Discard all, and give their memory back."""
        held = any(s.count for s in self.states)
        self._discard(self.states)
        if held and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _record(self, run: Callable[..., Tensor], inputs: dict[str, Tensor], others: Iterable[Tensor] = ()) -> Recorded:
        """A recording of ``run(**inputs)``, which reads and writes ``others`` as well."""
        device = next(iter(inputs.values())).device
        if device.type == "cuda":
            check_devices((*self.decoder.parameters(), *others, *inputs.values()))
            self.pool = self.pool or torch.cuda.graph_pool_handle()
        tape = SeedTape(device)

        def seeded(**inputs: Tensor) -> Tensor:
            tape.places.clear()
            return run(**inputs)

        # what is recorded in inference mode must be played out of it as well
        with torch.inference_mode(False), torch.no_grad(), capturing(device, tape):
            return Recorded(self.recorder(seeded, inputs, self.pool), tape)

    def _tried(self, recorded: Recorded, inputs: dict[str, Tensor]) -> Tensor:
        """What a new recording gives; random numbers are put back for the ordinary call that it is compared with."""
        device = next(iter(inputs.values())).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return recorded.play(inputs)

    def _keep(self, recordings: dict[tuple, Recorded | str], key: tuple, recorded: Recorded) -> None:
        present = [k for k, r in recordings.items() if isinstance(r, Recorded)]
        for oldest in present[: len(present) + 1 - MAX_RECORDINGS]:
            del recordings[oldest]
        recordings[key] = recorded
        self.unused[key] += 1
        self.status.recorded += 1


def error_of(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.float() - b.float()).norm() / b.float().norm())
