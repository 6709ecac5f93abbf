"""Evaluation from recordings: a decoder's forward over packed rows, without gradient and without a cache, in a CUDA graph.

What :mod:`peft_nvfp4.training.packing` packs in such a call (``Trainer.evaluate``, log-probabilities of a reference model) is one
row of some number of tokens. A number that comes up for the second time, or nearly so, is recorded, and compared once with an
ordinary call. Numbers of tokens are filled up to that of a recording that is near. Recordings of training are left alone: these
have memory of their own, which is small, for nothing is kept for a backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .forward_recordings import ForwardRecordings, ForwardStatus, Recorded, error_of
from .graph_recording import ForwardRecording, Unsupported

NEAR = 1.25
"""A number of tokens is filled up to that of a recording, or one that was met before, up to this factor."""
LARGEST = 8192
"""Tokens of a row that is recorded, at most: with more, the GPU computes for longer than Python takes to launch it, and a
recording would keep what a layer takes for a while."""
FORWARD_ERROR = 1e-2
"""Largest |recorded - ordinary| / |ordinary| of hidden states: the same kernels in the same order."""


@dataclass
class EvaluationStatus(ForwardStatus):
    """How packed calls without gradient ran."""

    what: ClassVar[str] = "calls of evaluation"


class Evaluation(ForwardRecordings):
    """Packed rows of one decoder, forward only."""

    def __init__(self, decoder: nn.Module, recorder: Callable = ForwardRecording):
        super().__init__(decoder, EvaluationStatus(), recorder)
        self.sizes: Counter = Counter()  # tokens of rows that were met
        self.largest = 0  # of those that are recorded

    def release(self) -> None:
        """Free all recordings."""
        self._forget()
        self.largest = 0

    def filled_size(self, tokens: int, rounded: int) -> int:
        """To how many a row of so many tokens is filled up: that of a recording, if one is near, or of an earlier row; else to
        ``rounded``."""
        if rounded > LARGEST:
            return tokens
        recorded = self.states[0].recordings if self.states else {}
        sizes = {key[0] for key, found in recorded.items() if isinstance(found, Recorded)}
        near = [n for n in sizes or self.sizes if tokens <= n <= NEAR * tokens]
        near = near or [n for n in self.sizes if tokens <= n <= NEAR * tokens]
        return min(near, default=rounded)

    def _call_of(self, named: dict[str, Any]) -> dict[str, Tensor] | None:
        mask = named.get("attention_mask")
        if named.get("use_cache") is not False or not isinstance(mask, Tensor) or mask.dtype != torch.int32:
            return None
        inputs = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self._check_inputs(inputs)
        return inputs

    def _run(self, inputs: dict[str, Tensor], ordinary: Callable, args: tuple, kwargs: dict[str, Any]) -> ModelOutput:
        tokens = inputs["position_ids"].shape[1]
        if tokens > LARGEST:
            raise Unsupported(f"more than {LARGEST} tokens")
        self.sizes[tokens] += 1
        key = tokens, *self._settings(inputs)
        if (recorded := self._last(key)) is not None and (hidden := self._played(key, recorded, inputs)) is not None:
            return self._output(recorded, tokens, hidden)
        recordings = self._recordings()
        if key not in recordings:
            self._to_be_recorded(key)
            return self._record_and_try(key, inputs, ordinary)
        if isinstance(recorded := recordings[key], str):
            raise Unsupported(recorded)
        self.unused.pop(key, None)
        return self._output(recorded, tokens, recorded.play(inputs))

    def _output(self, recorded: Recorded, tokens: int, hidden: Tensor) -> ModelOutput:
        self.status.replayed[f"{tokens} tokens"] += 1
        return recorded.kind(last_hidden_state=hidden)

    def _record_and_try(self, key: tuple, inputs: dict[str, Tensor], ordinary: Callable) -> ModelOutput:
        """Record a call and compare it with the ordinary one that comes before."""
        tokens, kinds = key[0], set()
        if tokens > self.largest:  # it would find no free memory of its size in the pool of the others
            self._forget()
            self.largest = tokens
        recordings = self._recordings()

        def run(**inputs: Tensor) -> Tensor:
            output = ordinary(**inputs, use_cache=False)
            if not isinstance(output, ModelOutput) or [k for k, v in output.items() if v is not None] != ["last_hidden_state"]:
                raise Unsupported("the decoder returns more than the last hidden state")
            kinds.add(type(output))
            return output.last_hidden_state

        generator = torch.get_rng_state()
        try:
            recorded = self._record(run, inputs)
            hidden = recorded.play(inputs)
            if not (error := error_of(hidden, recorded.recording.unrecorded)) < FORWARD_ERROR:
                raise Unsupported(f"a recorded call and an ordinary one differ by {error:.0%}")
        except Unsupported as reason:
            torch.set_rng_state(generator)
            recordings[key] = str(reason)
            raise
        recorded.recording.unrecorded = None
        self._keep(recordings, key, recorded._replace(kind=kinds.pop()))
        return self._output(recordings[key], tokens, hidden)
