"""Generation: a step of one new token for each row is replayed from a CUDA graph, in whatever way ``generate`` is called.

A decode step is some hundred launches of a few microseconds each; Python takes ten times as long as the GPU. Here the decoder,
called without gradient with one token a row and a :class:`~transformers.DynamicCache`, replays a recording of itself. Keys and
values lie in buffers that the recording reads and extends, and the caller's cache holds views of them
(:mod:`peft_nvfp4.training.key_values`). So beams, sampling, streamers, chats and loops of one's own see what they always see.

A recording serves all lengths up to a bucket (256 tokens, then twice as many, ...): attention reads the whole bucket under a mask
of booleans, made on the device from the caller's mask and the place of the new token. That is the same sum with zeros added to
it; what differs from an ordinary step is the rounding of attention, which another kernel may compute.

A kind of step (rows, bucket, adapters, ...) that is met for the second time is recorded. Then it is computed both ways, and the
recording is used if hidden states and new keys and values agree. When recordings are thrown away:
:mod:`peft_nvfp4.training.forward_recordings`.

What has no recording (windows, linear attention, encoders, caches of other kinds, several tokens at once, hooks) runs as it would
without, and the status says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .decode_step import Step, mask_of, step_of
from .forward_recordings import ForwardRecordings, ForwardStatus, Recorded, error_of
from .graph_recording import ForwardRecording, Unsupported
from .grouped_attention import grouped_queries
from .key_values import KeyValues
from .packed_attention import WITH_SINKS

SHORTEST = 256
"""Tokens of the smallest bucket."""
AHEAD = 32
"""A bucket has room for so many tokens more than there are when it is chosen, and for a quarter of them."""
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
class DecodingStatus(ForwardStatus):
    """How the steps of generation ran.

    Attributes:
        key_value_bytes: size of the buffers of keys and values.
    """

    what: ClassVar[str] = "steps of generation"
    key_value_bytes: int = 0

    def __str__(self) -> str:
        size = f"; {self.key_value_bytes / 2**20:.0f} MiB of keys and values" if self.key_value_bytes else ""
        return super().__str__() + size


def bucket_of(length: int) -> int:
    """Tokens of a recording for a sequence of so many."""
    wanted, bucket = length + length // 4 + AHEAD, SHORTEST
    while bucket < wanted:
        bucket *= 2
    return bucket


class Decoding(ForwardRecordings):
    """Steps of generation of one decoder."""

    def __init__(self, decoder: nn.Module, recorder: Callable = ForwardRecording):
        super().__init__(decoder, DecodingStatus(), recorder)
        self.buffers: KeyValues | None = None
        self.bucket = 0  # of the last step

    def release(self) -> int:
        """Free everything; returns the bytes of keys and values."""
        freed, self.status.key_value_bytes = self.status.key_value_bytes, 0
        self.buffers = None
        self._forget()
        return freed

    def _call_of(self, named: dict[str, Any]) -> Step | None:
        step = step_of(named)
        if step is not None:
            self._check(step)
        return step

    def _run(self, step: Step, ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = self._key(step)
        if (recorded := self._last(key)) is not None and self._holds(step):
            self.buffers.set_place(step.length, step.mask)
            if (hidden := self._played(key, recorded, step.inputs)) is not None:
                return self._output(recorded, step, hidden)
        recordings = self._recordings()
        if key not in recordings:
            self._to_be_recorded(key)
            return self._record_and_try(key, step, ordinary, args, kwargs)
        if isinstance(recorded := recordings[key], str):
            raise Unsupported(recorded)
        if not self._holds(step):
            self.release()
            raise Unsupported("keys and values of an earlier step are held elsewhere")
        self.buffers.set_place(step.length, step.mask)
        self.unused.pop(key, None)
        return self._output(recorded, step, recorded.play(step.inputs))

    def _check(self, step: Step) -> None:
        config = self.decoder.config
        kinds = set(getattr(config, "layer_types", None) or ())
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        if kinds - {"full_attention"} or (not kinds and any(w is not None for w in windows)):
            raise Unsupported("its attention has windows, or is of another kind")
        if config._attn_implementation not in ("sdpa", "eager", WITH_SINKS):
            raise Unsupported(f"attn_implementation is {config._attn_implementation!r}, not 'sdpa' or 'eager'")
        for name in ("use_cache", "return_dict"):
            if step.constants.get(name) is False:
                raise Unsupported(f"it is called with {name}=False")
        self._check_inputs(step.inputs)

    def _key(self, step: Step) -> tuple:
        """What one recording serves. The bucket stays as long as the sequence fits: it was chosen with room to spare."""
        if not step.length < self.bucket <= bucket_of(step.length + 1):
            self.bucket = bucket_of(step.length + 1)
        heads = KeyValues.heads_of(step.cache.layers)
        return step.rows, self.bucket, heads, tuple(step.constants.items()), *self._settings(step.inputs)

    def _holds(self, step: Step) -> bool:
        """Whether the buffers hold the step's keys and values; they are copied if need be."""
        return self.buffers.holds(step.cache) or self.buffers.adopt(step.cache)

    def _output(self, recorded: Recorded, step: Step, hidden: Tensor) -> ModelOutput:
        self.buffers.show(step.cache, step.rows, step.length + 1)
        self.status.replayed[f"{step.rows} rows, up to {self.bucket} tokens"] += 1
        return recorded.kind(last_hidden_state=hidden, **{recorded.cache_field: step.cache})

    # -- recordings

    def _record_and_try(self, key: tuple, step: Step, ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record a step and compare it with an ordinary one, whose output is returned."""
        try:
            self._make_room(step)
            recorded = self._record_step(step, ordinary)
            hidden = self._tried(recorded, step.inputs)
        except Unsupported as reason:
            self._recordings()[key] = str(reason)
            raise
        recordings = self._recordings()
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
        first = max(map(error_of, new[:2], usual[:2]))
        error = max(map(error_of, [hidden, *new], [output.last_hidden_state, *usual]))
        if not (first < FIRST_ERROR and error < STEP_ERROR):
            self.met[key] += 1
            if self.met[key] >= 2 + TRIALS:
                recordings[key] = f"a recorded step and an ordinary one differ by {max(first, error):.0%}"
            return output
        recorded.recording.unrecorded = None
        self._keep(recordings, key, recorded._replace(kind=type(output), cache_field=fields[1]))
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
        self.buffers = old = None
        self._forget()
        try:
            with torch.inference_mode(False):
                self.buffers = KeyValues(layers, rows, length)
        except torch.OutOfMemoryError as error:
            raise Unsupported(f"there was no memory for {size / 2**30:.1f} GiB of keys and values") from error
        self.status.key_value_bytes = self.buffers.nbytes
        self.buffers.adopt(step.cache)

    def _record_step(self, step: Step, ordinary: Callable) -> Recorded:
        buffers, rows, bucket, config = self.buffers, step.rows, self.bucket, self.decoder.config
        buffers.set_place(step.length, step.mask)  # the function runs before it is replayed, and writes there

        def run(**inputs: Tensor) -> Tensor:
            cache = buffers.recorded_cache(rows, bucket)  # not kept: whoever shares the buffers' memory is counted
            mask = mask_of(buffers.visible(rows, bucket), config._attn_implementation, cache.layers[0].keys.dtype)
            with grouped_queries():
                output = ordinary(**inputs, **step.constants, **{step.cache_name: cache}, attention_mask=mask)
            if not isinstance(output, ModelOutput):
                raise Unsupported("the decoder returns a tuple")
            return output.last_hidden_state

        return self._record(run, step.inputs, buffers.tensors)
