"""Generation: a step of one new token for each row is replayed from a CUDA graph, in whatever way ``generate`` is called.

A decode step is some hundred launches of a few microseconds each; Python takes ten times as long as the GPU. Here the decoder,
called without gradient with one token a row and a :class:`~transformers.DynamicCache`, replays a recording of itself. Keys and
values lie in buffers that the recording reads and extends, and the caller's cache holds views of them
(:mod:`peft_nvfp4.training.key_values`). So beams, sampling, streamers, chats and loops of one's own see what they always see.

A recording serves all lengths up to a bucket (256 tokens, then twice as many, ...): attention reads the whole bucket under a mask
of booleans, made on the device from the caller's mask and the place of the new token. That is the same sum with zeros added to
it; what differs from an ordinary step is the rounding of attention, which another kernel may compute.

A kind of step (rows, bucket, adapters, ...) that is met for the second time is recorded. Then it is computed both ways, and the
recording is used if hidden states and new keys and values agree. After that, every replay is followed by a look at the model
while the GPU computes: hooks, another adapter, disabled or merged ones, tensors that lie elsewhere. If it is not the recorded
one, the result is thrown away and the step is computed anew; the recordings of the last few states of a model are kept (a policy
and its reference). Weights that are trained keep their place, and with it their recordings.

What has no recording (windows, linear attention, encoders, caches of other kinds, several tokens at once, hooks) runs as it would
without, and the status says why.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from .decode_step import GROUPED, Step, grouped_attention, mask_of, step_of
from .graph_recording import ForwardRecording, SeedTape, Unsupported, capturing, check_devices
from .graph_state import baked_in
from .key_values import KeyValues

SHORTEST = 256
"""Tokens of the smallest bucket."""
AHEAD = 32
"""A bucket has room for so many tokens more than there are when it is chosen, and for a quarter of them."""
MAX_RECORDINGS = 16
"""Of one state of the model: those that were used last."""
MAX_STATES = 3
"""Of the model, whose recordings are kept."""
MEMORY_SHARE = 1 / 8
"""Of the device's memory, for keys and values that outlive a call."""
STEP_ERROR = 0.3
"""Largest |recorded - ordinary| / |ordinary| of hidden states, new keys and new values. Two attention kernels round differently,
and a last place may flip an NVFP4 code, which random weights amplify from layer to layer. A wrong mask gives about 1."""
FIRST_ERROR = 1e-2
"""The same of the first layer's keys and values, to which no attention has contributed: those of another position differ."""
TRIALS = 3
"""Steps that a recording may take to agree once. In a layer of few columns a single code that has flipped is seen."""


@dataclass
class DecodingStatus:
    """How the steps of generation ran.

    Attributes:
        replayed: rows and bucket -> number of replays.
        reasons: why steps ran without a recording -> how many.
        recorded: recordings made.
        discarded: recordings dropped because the model or its memory had changed.
        key_value_bytes: size of the buffers of keys and values.
    """

    replayed: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    recorded: int = 0
    discarded: int = 0
    key_value_bytes: int = 0

    def __str__(self) -> str:
        lines = [f"replayed {n} steps of generation: {kind}" for kind, n in self.replayed.items()] or ["no step of generation"]
        lines += [f"ran {n} steps of generation without a graph: {reason}" for reason, n in self.reasons.items()]
        if self.recorded:
            size = f"{self.key_value_bytes / 2**20:.0f} MiB of keys and values"
            lines.append(f"made {self.recorded} recordings of generation, discarded {self.discarded}; {size}")
        return "\n".join(lines)


def bucket_of(length: int) -> int:
    """Tokens of a recording for a sequence of so many."""
    wanted, bucket = length + length // 4 + AHEAD, SHORTEST
    while bucket < wanted:
        bucket *= 2
    return bucket


class _Recorded(NamedTuple):
    recording: Any
    tape: SeedTape
    kind: type  # of the decoder's output
    cache_field: str  # of it


class _State:
    """Recordings that were made of one state of the model."""

    def __init__(self, state: tuple, decoder: nn.Module):
        self.state = state
        self.recordings: dict[tuple, _Recorded | str] = {}  # a reason where it cannot be recorded
        tensors = (*decoder.parameters(), *decoder.buffers())
        self.memory = [(weakref.ref(t), t.data_ptr()) for t in tensors]

    def memory_is_there(self) -> bool:
        """Whether a replay would read memory that is still the model's. (References are weak: a state that has passed keeps no
        weights.)"""
        return all((t := ref()) is not None and t.data_ptr() == address for ref, address in self.memory)


class Decoding:
    """Steps of generation of one decoder.

    Args:
        recorder: makes a recording of (function, inputs, pool of memory).
    """

    def __init__(self, decoder: nn.Module, recorder: Callable = ForwardRecording):
        self._decoder, self.recorder = weakref.ref(decoder), recorder
        self.status = DecodingStatus()
        self.states: list[_State] = []  # the one of the last step first
        self.buffers: KeyValues | None = None
        self.pool: Any = None
        self.bucket = 0  # of the last step
        self.met: Counter = Counter()  # kinds of steps
        self.lock = threading.Lock()  # one thread at a time has the buffers

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    def release(self) -> int:
        """Free everything; returns the bytes of keys and values."""
        freed, self.status.key_value_bytes = self.status.key_value_bytes, 0
        self._discard(self.states)
        self.buffers = None
        return freed

    def __call__(self, ordinary: Callable, args: tuple, kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
        """The decoder's output: replayed, or what ``ordinary(*args, **kwargs)`` returns. ``named``: the arguments by name."""
        if not self.lock.acquire(blocking=False):  # another thread's step is being computed
            return ordinary(*args, **kwargs)
        try:
            if (step := step_of(named)) is not None:
                return self._step(step, ordinary, args, kwargs)
        except Unsupported as reason:
            self.status.reasons[str(reason)] += 1
        finally:
            self.lock.release()
        return ordinary(*args, **kwargs)

    # -- a step

    def _step(self, step: Step, ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._check(step)
        key = self._key(step)
        if (output := self._replay_and_look(key, step)) is not None:
            return output
        recordings = self._recordings()
        if key not in recordings:
            self.met[key] += 1
            if self.met[key] < 2:
                raise Unsupported("a step of its kind was met for the first time")
            return self._record_and_try(key, step, ordinary, args, kwargs)
        if isinstance(recorded := recordings[key], str):
            raise Unsupported(recorded)
        if not self._holds(step):
            self._discard(self.states)
            self.buffers = None
            raise Unsupported("keys and values of an earlier step are held elsewhere")
        return self._output(recorded, step, self._play(recorded, step))

    def _replay_and_look(self, key: tuple, step: Step) -> ModelOutput | None:
        """Replay the recording of the last step's state, and see meanwhile whether the model is in that state; None if not, or if
        there is no such recording."""
        if not self.states or not self.states[0].memory_is_there():
            return None
        recorded = self.states[0].recordings.get(key)
        if not isinstance(recorded, _Recorded) or not self._holds(step):
            return None
        generator, same = torch.get_rng_state(), False
        hidden = self._play(recorded, step)
        try:
            same = baked_in(self.decoder) == self.states[0].state
        finally:
            if not same:
                torch.set_rng_state(generator)
        return self._output(recorded, step, hidden) if same else None

    def _check(self, step: Step) -> None:
        config = self.decoder.config
        kinds = set(getattr(config, "layer_types", None) or ())
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        if kinds - {"full_attention"} or (not kinds and any(w is not None for w in windows)):
            raise Unsupported("its attention has windows, or is of another kind")
        if config._attn_implementation not in ("sdpa", "eager"):
            raise Unsupported(f"attn_implementation is {config._attn_implementation!r}, not 'sdpa' or 'eager'")
        for name in ("use_cache", "return_dict"):
            if step.constants.get(name) is False:
                raise Unsupported(f"it is called with {name}=False")
        if self.recorder is ForwardRecording:
            for name, tensor in step.inputs.items():
                if not tensor.is_cuda:
                    raise Unsupported(f"{name} is on the {tensor.device.type}")
            if torch.cuda.is_current_stream_capturing():
                raise Unsupported("it is being recorded by somebody else")

    def _key(self, step: Step) -> tuple:
        """What one recording serves. The bucket stays as long as the sequence fits: it was chosen with room to spare."""
        if not step.length < self.bucket <= bucket_of(step.length + 1):
            self.bucket = bucket_of(step.length + 1)
        config = vars(self.decoder.config.get_text_config())
        return (
            step.rows,
            self.bucket,
            tuple((name, tuple(t.shape), t.dtype) for name, t in step.inputs.items()),
            tuple(step.constants.items()),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple(value for name, value in config.items() if "output_" in name or name == "return_dict"),
            KeyValues.heads_of(step.cache.layers),
        )

    def _holds(self, step: Step) -> bool:
        """Whether the buffers hold the step's keys and values; they are copied if need be."""
        return self.buffers.holds(step.cache) or self.buffers.adopt(step.cache)

    def _play(self, recorded: _Recorded, step: Step) -> Tensor:
        self.buffers.set_place(step.length, step.mask)
        recorded.tape.refill()
        return recorded.recording.forward(step.inputs)

    def _output(self, recorded: _Recorded, step: Step, hidden: Tensor) -> ModelOutput:
        self.buffers.show(step.cache, step.rows, step.length + 1)
        self.status.replayed[f"{step.rows} rows, up to {self.bucket} tokens"] += 1
        return recorded.kind(last_hidden_state=hidden, **{recorded.cache_field: step.cache})

    # -- recordings

    def _recordings(self) -> dict[tuple, _Recorded | str]:
        """Those of the model as it is now."""
        state = baked_in(self.decoder)
        self._discard([s for s in self.states if not s.memory_is_there()])
        found = next((s for s in self.states if s.state == state), None) or _State(state, self.decoder)
        self._discard([s for s in self.states if s is not found][MAX_STATES - 1 :])
        self.states = [found, *(s for s in self.states if s is not found)]
        return found.recordings

    def _discard(self, states: list[_State]) -> None:
        self.status.discarded += sum(isinstance(r, _Recorded) for s in states for r in s.recordings.values())
        self.states = [s for s in self.states if s not in states]
        if not self.states:  # a pool of which something is still held cannot be recorded into
            self.pool = None

    def _record_and_try(self, key: tuple, step: Step, ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record a step and compare it with an ordinary one, whose output is returned."""
        self._make_room(step)
        recordings = self._recordings()
        try:
            recorded = self._record(step, ordinary)
            with torch.random.fork_rng([step.cache.layers[0].keys.device] if torch.cuda.is_available() else []):
                hidden = self._play(recorded, step)
        except Unsupported as reason:
            recordings[key] = str(reason)
            raise
        if not self.buffers.agrees_with(step.cache):
            recordings[key] = "a recorded step changes earlier keys or values"
            raise Unsupported(recordings[key])
        place = slice(step.length, step.length + 1)
        new = [t[: step.rows, :, place].clone() for t in self.buffers.tensors]
        output = ordinary(*args, **kwargs)
        fields = [name for name, value in output.items() if value is not None] if isinstance(output, ModelOutput) else []
        if fields[:1] != ["last_hidden_state"] or len(fields) != 2 or output[fields[1]] is not step.cache:
            recordings[key] = "the decoder returns more than the last hidden state and its cache"
            return output
        usual = [t[:, :, place] for layer in step.cache.layers for t in (layer.keys, layer.values)]
        first, error = max(map(_error, new[:2], usual[:2])), max(map(_error, [hidden, *new], [output.last_hidden_state, *usual]))
        if not (first < FIRST_ERROR and error < STEP_ERROR):
            self.met[key] += 1
            if self.met[key] >= 2 + TRIALS:
                recordings[key] = f"a recorded step and an ordinary one differ by {max(first, error):.0%}"
            return output
        present = [k for k, r in recordings.items() if isinstance(r, _Recorded)]
        for oldest in present[: len(present) + 1 - MAX_RECORDINGS]:
            del recordings[oldest]
        recordings[key] = recorded._replace(kind=type(output), cache_field=fields[1])
        self.status.recorded += 1
        return output

    def _make_room(self, step: Step) -> None:
        """Buffers that are large enough, filled with the step's keys and values. New ones come without recordings."""
        layers, old = step.cache.layers, self.buffers
        rows, length, heads = step.rows, self.bucket, KeyValues.heads_of(layers)
        if old is not None and old.heads == heads:
            if rows <= old.rows and length <= old.length and self._holds(step):
                return
            grown = max(rows, old.rows), max(length, old.length)
            if KeyValues.bytes_of(layers, *grown) <= 2 * (old.nbytes + KeyValues.bytes_of(layers, rows, length)):
                rows, length = grown
        size, device = KeyValues.bytes_of(layers, rows, length), layers[0].keys.device
        if device.type == "cuda" and size > MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory:
            raise Unsupported(f"its keys and values would take {size / 2**30:.1f} GiB")
        self._discard(self.states)
        self.buffers = old = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pool of the recordings that were dropped
        try:
            with torch.inference_mode(False):
                self.buffers = KeyValues(layers, rows, length)
        except torch.OutOfMemoryError as error:
            raise Unsupported(f"there was no memory for {size / 2**30:.1f} GiB of keys and values") from error
        self.status.key_value_bytes = self.buffers.nbytes
        self.buffers.adopt(step.cache)

    def _record(self, step: Step, ordinary: Callable) -> _Recorded:
        buffers, rows, bucket, config = self.buffers, step.rows, self.bucket, self.decoder.config
        device = buffers.place.device
        if device.type == "cuda":
            check_devices((*self.decoder.parameters(), *buffers.tensors, *step.inputs.values()))
            self.pool = self.pool or torch.cuda.graph_pool_handle()
        buffers.set_place(step.length, step.mask)  # the function runs before it is replayed, and writes there
        tape = SeedTape(device)

        def run(**inputs: Tensor) -> Tensor:
            tape.places.clear()
            cache = buffers.recorded_cache(rows, bucket)  # not kept: whoever shares the buffers' memory is counted
            mask = mask_of(buffers.visible(rows, bucket), config._attn_implementation, cache.layers[0].keys.dtype)
            with self._attention():
                output = ordinary(**inputs, **step.constants, **{step.cache_name: cache}, attention_mask=mask)
            if not isinstance(output, ModelOutput):
                raise Unsupported("the decoder returns a tuple")
            return output.last_hidden_state

        with torch.inference_mode(False), torch.no_grad(), capturing(device, tape):
            recording = self.recorder(run, step.inputs, self.pool)
        return _Recorded(recording, tape, ModelOutput, "")

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """SDPA with grouped heads as queries. A config with sub-configs keeps the name of its attention elsewhere, too."""
        config = self.decoder.config
        if config._attn_implementation != "sdpa" or getattr(config, "sub_configs", None):
            yield
            return
        ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
        config._attn_implementation = GROUPED
        try:
            yield
        finally:
            config._attn_implementation = "sdpa"


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())
