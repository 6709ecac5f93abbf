"""CUDA graphs for training: the decoder's forward and backward as two recorded launches instead of thousands.

A training step of a small model on a fast GPU is bound by Python and by kernel launches. Here the decoder (everything between
token ids and the last hidden state; the loss stays outside) replays recordings of itself:

>>> model = get_peft_model(model, NVFP4LoraConfig(...))
>>> enable_cuda_graphs(model)
>>> Trainer(model=model, ...).train()
>>> print(graph_status(model))

A recording is made for each combination of input shapes, at its first use, and holds its memory until something that is baked
into it has changed (an adapter switched, merged, frozen or added, a scaling, a dropout probability, a parameter that lives
elsewhere), or :func:`disable_cuda_graphs`. Whatever a recording cannot do (hidden states of all layers, packed
sequences, a second forward before the backward of the first) runs as it would without, and the status says why. Generation and
evaluation have recordings of their own (:mod:`peft_nvfp4.training.decoding`, :mod:`peft_nvfp4.training.evaluation`).

Same numbers: dropout masks are drawn from seeds (:func:`peft_nvfp4.autograd.seeds.draw_seed`), and before each replay the seeds
are drawn from PyTorch's CPU generator as eager code would, in the same order. Warm-up and recording put the generators back.

Rejected: recording the optimizer, too (Trainer owns it), or each decoder layer by itself (every layer's input would have to stay
in memory between its replays; the residual stream is what NVFP4 activations just got rid of).
``torch.cuda.make_graphed_callables`` does not handle keyword inputs, shapes that vary, seeds, or gradients accumulated over
several backwards.

The file is long because what is replayed, what is recorded and what gives way are one state.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from .decoding import Decoding, DecodingStatus
from .evaluation import Evaluation, EvaluationStatus
from .graph_recording import (
    CudaRecording,
    ForwardRecording,
    Replay,
    SeedTape,
    SharedMemory,
    Ticket,
    Unsupported,
    capturing,
    check_devices,
    recordable_checkpoints,
    substituted,
)
from .graph_state import baked_in
from .host_pass import pass_goes_to_host, pass_is_short_of_memory
from .offload.layers import ATTRIBUTE
from .packing import PackedForward, Replicate, decoder_of, packed_forward, put_back
from .recorded_sizes import RecordedSizes, rounded_up

CAUSAL = "peft_nvfp4_causal"
"""SDPA without transformers' mask code, which under capture makes a dense mask (and loses flash attention) even where all tokens
are real. An attention function without an entry in transformers' table of mask functions gets no mask."""
DROPPED = {"num_items_in_batch", "use_cache"}
"""Keyword arguments that the decoder ignores in training, and that may change from step to step."""


@dataclass
class GraphStatus:
    """What :func:`graph_status` returns."""

    graphs: dict[str, int] = field(default_factory=dict)  # input shapes -> number of replays
    reasons: Counter = field(default_factory=Counter)  # why calls ran without a graph -> how many did
    discarded: int = 0  # recordings that were dropped because the model had changed

    def __str__(self) -> str:
        lines = [f"replayed {n} times: {shapes}" for shapes, n in self.graphs.items()] or ["no recording"]
        lines += [f"ran {n} times without a graph: {reason}" for reason, n in self.reasons.items()]
        return "\n".join(lines + ([f"discarded {self.discarded} recordings: the model had changed"] if self.discarded else []))


# ---------------------------------------------------------------------------------------------- the decoder's forward


@dataclass
class _Entry:
    recording: Any
    tape: SeedTape
    kind: type  # of the decoder's output
    parameters: list[Tensor]
    tokens: int
    memory: list[Tensor]  # parameters and buffers of the decoder; held, so that a replay never reads memory that was given back
    addresses: list[int]


def _addresses(memory: list[Tensor]) -> list[int]:
    return [t.data_ptr() for t in memory]


def _tokens(tensors: dict[str, Tensor]) -> int:
    """Tokens of a batch, padding counts."""
    return next((t.shape[0] * t.shape[1] for name, t in tensors.items() if name in ("input_ids", "inputs_embeds")), 0)


class GraphedForward:
    """The ``forward`` of a decoder, on the instance."""

    def __init__(self, decoder: nn.Module, plain: Callable | None = None, recorder: Callable = CudaRecording):
        self._decoder, self.recorder = weakref.ref(decoder), recorder  # no cycle: ``del model`` frees it
        self.loud = True  # the user has asked for recordings
        self.needs_memory = False  # a caller can free some: recordings that find too little raise, and are not done without
        self.plain = plain  # somebody else's hook on the instance
        self.status, self.shared = GraphStatus(), SharedMemory()
        self.entries: dict[tuple, _Entry | str] = {}  # a reason where it cannot be recorded
        self.sizes = RecordedSizes()
        self.state: tuple = ()  # of the model that they were made of
        self.pending: weakref.ref[Ticket] | None = None
        self.decoding, self.evaluation = Decoding(decoder), Evaluation(decoder)
        self.__signature__ = inspect.signature(decoder.forward)
        kinds = {p.kind: p.name for p in self.__signature__.parameters.values()}
        self.catch_all = kinds.get(inspect.Parameter.VAR_KEYWORD)  # the name of **kwargs

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    @property
    def unrecorded(self) -> Callable:
        return self.original

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.plain is not None:
            return self.plain(*args, **kwargs)
        return type(self.decoder).forward(self.decoder, *args, **kwargs)

    def __reduce__(self):
        """Copies (and pickles) begin without recordings."""
        return GraphedForward, (self.decoder, None, self.recorder), {"plain": self.plain, "loud": self.loud}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled():
            named = self._named(args, kwargs)
            recordings = self.evaluation if named.get("use_cache") is False else self.decoding
            return recordings(self.original, args, kwargs, named)
        if not self.decoder.training:
            return self.original(*args, **kwargs)
        try:
            return self._replay(args, kwargs)
        except Unsupported as reason:
            if self.loud and str(reason) not in self.status.reasons:
                warnings.warn(f"this step runs without a CUDA graph: {reason}", stacklevel=3)
            self.status.reasons[str(reason)] += 1
        return self.original(*args, **kwargs)  # not above, where the frames of the error hold what a failed recording had made

    def _replay(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.pending is not None and (ticket := self.pending()) is not None and ticket.open:
            raise Unsupported("the backward of an earlier forward is still to come")
        if pass_goes_to_host():
            if pass_is_short_of_memory() and self.forget():
                torch.cuda.empty_cache()
            raise Unsupported("its checkpoints go to the host")
        tensors, constants = self._inputs(args, kwargs)
        key = (
            tuple((name, tuple(t.shape), t.dtype, t.device) for name, t in tensors.items()),
            tuple(constants.items()),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )
        entry = self.entries.get(key)
        if self.state and isinstance(entry, _Entry) and entry.addresses == _addresses(entry.memory):
            generator, same = torch.get_rng_state(), False
            output = self._play(entry, tensors)  # the rest of the model is looked at while the GPU computes
            try:
                same = baked_in(self.decoder) == self.state
            finally:
                if not same:
                    torch.set_rng_state(generator)
                    self.state = ()
            if same:
                return self._counted(key, tensors, output)
            del output
        if (state := baked_in(self.decoder)) != self.state:
            self.status.discarded += bool(self._recorded())
            self.entries, self.state = {}, state
            self.sizes.forget_recordings()
        if key not in self.entries:
            self._make_room(key, _tokens(tensors))
            try:
                self.entries[key] = self._record(tensors, constants)
            except Unsupported as reason:
                if not self._recorded():
                    self.shared = SharedMemory()  # gradients that nothing will be written to
                if self.needs_memory and isinstance(reason.__cause__, torch.OutOfMemoryError):
                    raise reason.__cause__ from None
                self.entries[key] = str(reason)
        if isinstance(entry := self.entries[key], str):
            raise Unsupported(entry)
        return self._counted(key, tensors, self._play(entry, tensors))

    def _counted(self, key: tuple, tensors: dict[str, Tensor], output: ModelOutput) -> ModelOutput:
        self.sizes.met[key] += 1
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        self.status.graphs[shapes] = self.status.graphs.get(shapes, 0) + 1
        return output

    def _play(self, entry: _Entry, tensors: dict[str, Tensor]) -> ModelOutput:
        entry.tape.refill()
        ticket = Ticket()
        hidden = Replay.apply(entry.recording, tensors, ticket, *entry.parameters)
        self.pending = weakref.ref(ticket)
        return entry.kind(last_hidden_state=hidden)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        named = dict(self.__signature__.bind(*args, **kwargs).arguments)
        return named | named.pop(self.catch_all, {})

    def _inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and constants of a call, or the reason why it cannot be replayed."""
        named = self._named(args, kwargs)
        tensors = {k: v for k, v in named.items() if isinstance(v, Tensor) and k not in DROPPED}
        constants = {k: v for k, v in named.items() if v is not None and k not in tensors and k not in DROPPED}
        for name, value in constants.items():
            if not isinstance(value, bool | int | float | str):
                raise Unsupported(f"the decoder is called with {name} ({type(value).__name__})")
        if "position_ids" in tensors and "attention_mask" not in tensors:
            raise Unsupported("position_ids without attention_mask may mean packed sequences")
        for name, t in tensors.items():
            if t.requires_grad:
                raise Unsupported(f"{name} requires a gradient")
            if not t.is_cuda and self.recorder is CudaRecording:
                raise Unsupported(f"{name} is on the {t.device.type}")
        mask = tensors.get("attention_mask")
        # transformers looks into the mask, too, and waits for the device as well
        if mask is not None and mask.ndim == 2 and self._maskless(tensors) and bool(mask.all()):
            del tensors["attention_mask"]
        return tensors, constants

    # -- recording

    def forget(self) -> bool:
        """Free all recordings, of generation and evaluation as well; they are made anew where they are met again. Returns whether
        there were any."""
        freed = bool(self._recorded() or self.decoding.states or self.evaluation.states)
        self.decoding.release()
        self.evaluation.release()
        self.entries, self.state, self.shared = {}, (), SharedMemory()
        self.sizes.forget_recordings()
        return freed

    @property
    def can_record(self) -> bool:
        """Whether the decoder is on a GPU, and the pass that runs now is one that can be recorded: of training, or without
        gradient."""
        training = torch.is_grad_enabled()
        if training and (pass_goes_to_host() or not self.decoder.training):
            return False
        of_gpu = (self.recorder if training else self.evaluation.recorder) in (CudaRecording, ForwardRecording)
        return not of_gpu or next(self.decoder.parameters()).device.type == "cuda"

    def recorded_size(self, tokens: int) -> int:
        """To how many a packed row of so many tokens is filled up."""
        if not torch.is_grad_enabled():
            return self.evaluation.filled_size(tokens, rounded_up(tokens))
        return self.sizes.filled_size(tokens, self._recorded())

    def _recorded(self) -> dict[tuple, int]:
        """Of every recording its number of tokens."""
        return {key: entry.tokens for key, entry in self.entries.items() if isinstance(entry, _Entry)}

    def _make_room(self, key: tuple, tokens: int) -> None:
        """For one more recording."""
        recorded, largest = self._recorded(), self.sizes.largest
        for k in self.sizes.giving_way(key, tokens, recorded):
            del self.entries[k]
        if recorded and self.sizes.largest > largest and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the pool of the recordings that were dropped

    def _record(self, tensors: dict[str, Tensor], constants: dict[str, Any]) -> _Entry:
        parameters = [p for p in self.decoder.parameters() if p.requires_grad]
        if not parameters:
            raise Unsupported("nothing of the decoder is trained")
        aliases = [nn.Parameter(p.detach()) for p in parameters]
        device = parameters[0].device
        if device.type == "cuda":
            check_devices((*self.decoder.parameters(), *tensors.values()))
        tape, kinds = SeedTape(device), set()
        no_cache = {"use_cache": False} if "use_cache" in self.__signature__.parameters or self.catch_all else {}

        def run(**inputs: Tensor) -> Tensor:
            tape.places.clear()
            with self._attention(inputs), recordable_checkpoints(self.decoder), substituted(self.decoder, parameters, aliases):
                output = self.original(**inputs, **constants, **no_cache)
            if not isinstance(output, ModelOutput) or [k for k, v in output.items() if v is not None] != ["last_hidden_state"]:
                raise Unsupported("the decoder returns more than the last hidden state")
            kinds.add(type(output))
            return output.last_hidden_state

        first = not self._recorded()
        if first:
            # not the pool of discarded ones: PyTorch gives up while something of it is still held (the last step's loss does
            # that), and then cannot draw random numbers on the device any more
            self.shared = SharedMemory(torch.cuda.graph_pool_handle() if device.type == "cuda" else None)
        reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        with capturing(device, tape), substituted(self.decoder, parameters, aliases):
            recording = self.recorder(run, tensors, aliases, self.shared)
        if first and device.type == "cuda":
            self.sizes.pool_bytes = max(0, torch.cuda.memory_reserved(device) - reserved)
        memory = [*self.decoder.parameters(), *self.decoder.buffers()]
        return _Entry(recording, tape, kinds.pop(), parameters, _tokens(tensors), memory, _addresses(memory))

    def _maskless(self, inputs: dict[str, Tensor]) -> bool:
        """Whether causal attention needs no mask if all tokens are real. A config with sub-configs keeps its windows elsewhere,
        and inputs such as token_type_ids may shape the mask (Gemma 3's images)."""
        config = self.decoder.config
        length = next((t.shape[1] for t in inputs.values()), 0)
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        short = any(window is not None and window < length for window in windows)
        plain = inputs.keys() <= {"input_ids", "inputs_embeds", "position_ids", "attention_mask"}
        return plain and not short and not getattr(config, "sub_configs", None) and config._attn_implementation == "sdpa"

    @contextmanager
    def _attention(self, inputs: dict[str, Tensor]) -> Iterator[None]:
        """Without a mask among the inputs, and if no layer looks back less far than the sequence is long: no mask at all."""
        config = self.decoder.config
        if "attention_mask" in inputs or not self._maskless(inputs):
            yield
            return
        ALL_ATTENTION_FUNCTIONS.register(CAUSAL, sdpa_attention_forward)
        config._attn_implementation = CAUSAL
        try:
            yield
        finally:
            config._attn_implementation = "sdpa"


def _graphed(model: nn.Module) -> GraphedForward | None:
    forward = vars(decoder).get("forward") if (decoder := decoder_of(model)) is not None else None
    if (packed := packed_forward(model)) is not None:
        forward = packed.inner
    return forward if isinstance(forward, GraphedForward) else None


def enable_cuda_graphs(model: nn.Module, loud: bool = True) -> None:
    """Record the decoder's training steps in CUDA graphs from now on. On a machine without CUDA every step runs without, and
    :func:`graph_status` says so.

    Args:
        loud: a step that runs without a recording warns, once for each reason.

    Raises:
        ValueError: no decoder was found, or its layers cannot be recorded: their weights are on the host, or adapters are trained
            with ``merge_aware=True``.
    """
    decoder = decoder_of(model)
    if decoder is None:
        raise ValueError(f"{type(model).__name__} has no decoder module of its own: CUDA graphs need a *ForCausalLM model")
    if any(ATTRIBUTE in vars(m) for m in decoder.modules()):
        raise ValueError("CUDA graphs and offload exclude each other: disable_offload(model) first")
    if any(getattr(m, "merge_aware_adapters", None) for m in decoder.modules()):
        raise ValueError("CUDA graphs do not go with merge_aware=True, which makes the merged weights anew in every pass")
    if (graphed := _graphed(model)) is not None:
        graphed.loud |= loud
    else:
        packed = packed_forward(model)
        if packed is not None:
            packed.inner = GraphedForward(decoder, packed.inner)
        else:
            decoder.forward = GraphedForward(decoder, vars(decoder).get("forward"))
        _graphed(model).loud = loud
        decoder._replicate_for_data_parallel = Replicate(decoder)


def records_steps(model: nn.Module) -> bool:
    """Whether somebody has asked for recordings of the model (:func:`enable_cuda_graphs`), or of one inside of it."""
    forwards = [vars(m).get("forward") for m in model.modules()]
    forwards = [f.inner if isinstance(f, PackedForward) else f for f in forwards]
    return any(isinstance(f, GraphedForward) and f.loud for f in forwards)


def disable_cuda_graphs(model: nn.Module) -> None:
    """Put the decoder's own forward back and free the recordings (deleting the model frees them at the next garbage collection
    only: it refers to itself). Nothing happens to a model without graphs."""
    if (graphed := _graphed(model)) is not None:
        if (packed := packed_forward(model)) is not None:
            packed.inner = graphed.plain
        else:
            put_back(graphed.decoder, graphed.plain)


def graph_status(model: nn.Module) -> GraphStatus:
    """What was replayed, and what was not and why."""
    graphed = _graphed(model)
    return GraphStatus(reasons=Counter({"not enabled": 1})) if graphed is None else graphed.status


def recording_bytes(model: nn.Module) -> int:
    """Bytes of the pool that the recordings of training steps share, as the largest of them left it."""
    graphed = _graphed(model)
    return 0 if graphed is None else graphed.sizes.pool_bytes


def decoding_status(model: nn.Module) -> DecodingStatus:
    """Which steps of generation were replayed, and which were not and why."""
    graphed = _graphed(model)
    return DecodingStatus(reasons=Counter({"not enabled": 1})) if graphed is None else graphed.decoding.status


def evaluation_status(model: nn.Module) -> EvaluationStatus:
    """Which calls without gradient were replayed, and which were not and why."""
    graphed = _graphed(model)
    return EvaluationStatus(reasons=Counter({"not enabled": 1})) if graphed is None else graphed.evaluation.status


def release_forward_recordings(model: nn.Module) -> int:
    """Free the recordings of generation, with their keys and values, and of evaluation, until they are made anew. Caches that
    hold views of these keys and values keep them alive.

    Returns:
        Bytes of keys and values that are not held here any more.
    """
    if (graphed := _graphed(model)) is None:
        return 0
    graphed.evaluation.release()
    return graphed.decoding.release()
