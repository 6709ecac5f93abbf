"""Padding is not computed: the decoder sees the tokens of all rows of a batch one after another in one row.

    rows  a b c . .        packed row   a b c d e f g h      first tokens   0 3 8
          d e f g h

A padded batch wastes the share of its tokens that is padding in every linear, norm and MLP: two thirds where lengths vary as they
do in instruction data. :func:`enable_packing` replaces the decoder's ``forward`` (on the instance). It gathers the real tokens
with their positions, runs the decoder on one row, and puts the hidden states back to where the tokens stood, zeros elsewhere.
Attention stays within sequences: the first token of each sequence travels to the attention function in the place of a mask, and
one kernel computes all sequences (FlashAttention's form with ``cu_seqlens``; on a CPU, SDPA sequence by sequence). Batches that a
collator has packed (``position_ids`` that restart, ``cu_seq_lens_q``) take the same way.

The same numbers: activations are quantised with scales of each token, so a token's codes do not depend on its neighbours. What
differs is the rounding inside attention (another kernel), and which numbers a dropout mask draws.

Not every decoder allows it. :func:`_trial` runs two short rows both ways once, at the first call: a row must not notice its
neighbour, and both ways must give the same hidden states. So convolutions over tokens, state spaces, prefix attention and own
attention code are noticed without a list of architectures. What is not packed runs as it would without, and
:func:`packing_status` says why: caches, masks of four dimensions, positions of three, labels at padding (they would be trained),
hooks inside of the decoder (they would see one row).

The file is long because the way of a batch, what turns it back and the trial that decides are read together.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from ..fusion.probe import hooked, innermost, modes_kept, special_tokens, watched
from ..nn.traversal import modules_of
from .packed_attention import TRIED, WITH_SINKS, NotPackable, attention, choose_sinks, unchoose_sinks

HIDDEN_ERROR = 0.3
"""Largest |packed - padded| / |padded| of the trial's hidden states: two attention kernels round differently, and a BF16 last
place may flip an NVFP4 code, which random weights amplify from layer to layer. A wrong mask or position gives about 1."""
SLOTS = 8
"""Numbers of sequences come in powers of this: a recorded step serves every batch with as many slots."""
IGNORED = {"use_cache", "num_items_in_batch", "max_length_q", "max_length_k", "cu_seq_lens_k", "seq_idx"}
"""Arguments of the decoder that a packed call does without."""


# ---------------------------------------------------------------------------------------------- packing a batch


class PackedBatch(NamedTuple):
    """Real tokens of a batch of B rows of T: ``tokens`` of them, then filling up to N."""

    places: Tensor | None  # (tokens,) int64 of the flattened batch; None: all
    tokens: int
    shape: tuple[int, int]  # B, T
    rows_are_full: bool  # no padding, and every row one sequence
    inputs: dict[str, Tensor]  # input_ids (1, N) or inputs_embeds (1, N, d); position_ids (1, N); attention_mask: first tokens

    def unpacked(self, hidden: Tensor) -> Tensor:
        """(1, N, d) -> (B, T, d), zeros at padding."""
        hidden = hidden[0, : self.tokens]
        if self.places is None:
            return hidden.view(*self.shape, -1)
        rows = hidden.new_zeros(self.shape[0] * self.shape[1], hidden.shape[1])
        return rows.index_copy(0, self.places, hidden).view(*self.shape, -1)


def pack(
    inputs: dict[str, Tensor], labels: Tensor | None = None, size: Callable[[int], int] = int, ignore_index: int = -100
) -> PackedBatch:
    """Gather a batch's real tokens.

    Args:
        inputs: ``input_ids`` (B, T) or ``inputs_embeds`` (B, T, d); ``attention_mask`` (B, T), ``position_ids`` (B or 1, T),
            ``cu_seq_lens_q`` (S + 1,) if there are any. Without positions a token's is its column.
        labels: (B, T); those at padding must be ``ignore_index``.
        size: number of tokens -> N, at least as many.

    Raises:
        NotPackable: an input of another shape, or labels at padding.
    """
    name = "input_ids" if "input_ids" in inputs else "inputs_embeds"
    shape, source = inputs[name].shape[:2], inputs[name].flatten(0, 1)
    places = _real_tokens(inputs.get("attention_mask"), shape)
    of_tokens = places is not None and labels is not None and labels.shape == shape  # not of rows, as a classifier's
    if of_tokens and bool(((labels != ignore_index) & (inputs["attention_mask"] == 0).to(labels.device)).any()):
        raise NotPackable("labels at padding are trained (collators mask them with -100)")
    positions, starts = _sequences(inputs, shape, places, source.device)
    source = source if places is None else source.index_select(0, places)
    tokens = len(positions)
    filling = size(tokens) - tokens
    slots = SLOTS
    while slots < len(starts) + bool(filling):
        slots *= SLOTS
    first_tokens = torch.full((slots + 1,), tokens + filling, dtype=torch.int32, device=source.device)
    first_tokens[: len(starts)] = starts
    if filling:  # a sequence of its own, at positions that the model has
        first_tokens[len(starts)] = tokens
        positions = torch.cat([positions, positions[torch.arange(filling, device=source.device) % tokens]])
        source = torch.cat([source, source[:1].detach().expand(filling, *source.shape[1:])])
    packed = {name: source[None], "position_ids": positions[None], "attention_mask": first_tokens.view(1, 1, 1, -1)}
    return PackedBatch(places, tokens, tuple(shape), places is None and len(starts) == shape[0], packed)


def _real_tokens(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Places of real tokens in the flattened batch; None: all."""
    if mask is None:
        return None
    if mask.shape != shape:
        raise NotPackable(f"attention_mask has shape {tuple(mask.shape)}")
    places = (mask.reshape(-1) != 0).nonzero().squeeze(1)
    if len(places) == 0:
        raise NotPackable("all tokens are padding")
    return None if len(places) == mask.numel() else places


def _sequences(
    inputs: dict[str, Tensor], shape: torch.Size, places: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(position of every real token, places of the first token of every sequence among them)."""
    (rows, columns), positions = shape, inputs.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != columns):
        raise NotPackable(f"position_ids have shape {tuple(positions.shape)}")
    positions = torch.arange(columns, device=device)[None] if positions is None else positions
    positions = positions.expand(rows, -1).reshape(-1)
    first = torch.arange(rows * columns, device=device) % columns == 0
    if places is not None:
        row_of, positions = places // columns, positions[places]
        first = torch.cat([first[:1], row_of[1:] != row_of[:-1]])
    if "attention_mask" not in inputs:  # with one, transformers takes every row for a sequence
        if "cu_seq_lens_q" in inputs:
            first = first.index_fill(0, inputs["cu_seq_lens_q"][:-1].to(device, torch.int64), True)
        elif "position_ids" in inputs:  # as transformers recognises a batch that is packed already
            first[1:] |= positions[1:] - positions[:-1] != 1
    return positions, first.nonzero().squeeze(1)


# ---------------------------------------------------------------------------------------------- the decoder's forward


@dataclass
class PackingStatus:
    """What :func:`packing_status` returns.

    Attributes:
        calls: calls that were packed.
        tokens, places: real tokens of these calls, and tokens with padding.
        unpadded: tokens of calls that had no padding and ran as they were.
        reasons: why calls were not packed -> how many.
    """

    calls: int = 0
    tokens: int = 0
    places: int = 0
    unpadded: int = 0
    reasons: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"packed {self.calls} calls: {self.tokens} of {self.places} tokens were real"]
        return "\n".join(lines + [f"did not pack {n} calls: {reason}" for reason, n in self.reasons.items()])


_LABELS: ContextVar[Tensor | None] = ContextVar("labels", default=None)
"""Labels of this thread's last call of a whole model, until its decoder is called."""



class PackedForward:
    """The ``forward`` of a decoder, on the instance; calls ``inner`` with packed rows.

    Attributes:
        labelled: the last call was one of a model that was given labels.
        guard: calls :meth:`unguarded` in its place, again if memory was not enough; its ``close`` is called when packing ends
            (:mod:`.memory_level`).
    """

    guard: Any = None
    labelled = False

    def __init__(self, decoder: nn.Module, inner: Callable | None):
        self._decoder, self.inner, self.status = weakref.ref(decoder), inner, PackingStatus()  # no cycle: ``del model`` frees it
        self.hooks: tuple[int, str] = (-1, "")  # how many were ever made when the decoder was last searched; which it has
        self.refused: dict[Any, str] = {}  # state of autocast -> why the decoder cannot be packed in it; empty: it can
        self.__signature__ = inspect.signature(decoder.forward)
        kinds = {p.kind: p.name for p in self.__signature__.parameters.values()}
        self.catch_all = kinds.get(inspect.Parameter.VAR_KEYWORD)

    @property
    def decoder(self) -> nn.Module:
        return self._decoder()

    @property
    def unrecorded(self) -> Callable:
        """The decoder's forward without packing and without recordings."""
        inner = getattr(self.inner, "unrecorded", self.inner)
        return inner or functools.partial(type(self.decoder).forward, self.decoder)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.guard is None or torch.compiler.is_compiling():
            return self.unguarded(*args, **kwargs)
        return self.guard(self, args, kwargs)

    def unguarded(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self.inner else type(self.decoder).forward(self.decoder, *args, **kwargs)

    def __reduce__(self):
        return PackedForward, (self.decoder, self.inner), {"guard": self.guard}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        named = dict(self.__signature__.bind(*args, **kwargs).arguments)
        named |= named.pop(self.catch_all, {})
        labels = _LABELS.get()
        _LABELS.set(None)
        self.labelled = labels is not None
        cached = any(isinstance(value, Cache) for value in named.values())
        scored = labels is not None and named.get("use_cache") is None and not torch.is_grad_enabled()  # evaluation
        if cached or not (self.decoder.training or scored or named.get("use_cache") is False):
            return self.original(*args, **kwargs)  # generation keeps a cache
        try:
            tensors = self._inputs(named)
            self._check_hooks()
            self._check_decoder()
            batch = pack(tensors, labels, self._size)
        except NotPackable as reason:
            self.status.reasons[str(reason)] += 1
            return self.original(*args, **kwargs)
        by_transformers = self.decoder.config._attn_implementation != WITH_SINKS  # which writes the matrix of scores
        if batch.rows_are_full and by_transformers and not getattr(self.inner, "can_record", False):
            self.status.unpadded += batch.tokens
            return self.original(*args, **kwargs)  # nothing to gain
        self.status.calls += 1
        self.status.tokens += batch.tokens
        self.status.places += batch.shape[0] * batch.shape[1]
        output = self.original(**batch.inputs, use_cache=False)
        output.last_hidden_state = batch.unpacked(output.last_hidden_state)
        return output

    def _inputs(self, named: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors of a call, or the reason why it is not packed."""
        if self.decoder.config._attn_implementation not in ("sdpa", WITH_SINKS):
            raise NotPackable(f"attn_implementation is {self.decoder.config._attn_implementation!r}, not 'sdpa'")
        if named.get("return_dict") is False:
            raise NotPackable("it is asked for a tuple")
        ignored = IGNORED | {"return_dict"}
        named = {k: v for k, v in named.items() if v is not None and v is not False and k not in ignored}
        known = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q"}
        if others := sorted(named.keys() - known):
            raise NotPackable(f"it is called with {', '.join(others)}")
        if len(named.keys() & {"input_ids", "inputs_embeds"}) != 1:
            raise NotPackable("it is called with neither or both of input_ids and inputs_embeds")
        return named

    def _size(self, tokens: int) -> int:
        """To how many tokens a row is filled up."""
        return self.inner.recorded_size(tokens) if getattr(self.inner, "can_record", False) else tokens

    def _check_hooks(self) -> None:
        """Hooks inside of the decoder are made for rows as the model has them. A new search only if a hook was made anywhere
        since the last one, or that one found some."""
        made, names = RemovableHandle.next_id, ""
        if self.hooks != (made, ""):
            decoder = self.decoder
            inside = (m for m in modules_of(decoder) if hooked(m) and m is not decoder)
            names = ", ".join(dict.fromkeys(name for m in inside for name in watched(m)))
            self.hooks = made, names
        if names:
            raise NotPackable(f"it has hooks inside ({names})")

    def _check_decoder(self) -> None:
        parameter = next(self.decoder.parameters())
        kind = parameter.device.type
        config = vars(self.decoder.config.get_text_config())
        outputs = tuple(value for name, value in config.items() if "output_" in name or name == "return_dict")
        key = kind, parameter.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), outputs
        if key not in self.refused:
            try:
                _trial(self)
                self.refused[key] = ""
            except NotPackable as reason:
                self.refused[key] = str(reason)
            except Exception as error:  # whatever a decoder may raise on an input it does not expect: said, not hidden
                self.refused[key] = f"the trial on two short rows failed ({type(error).__name__}: {error})"
        if reason := self.refused[key]:
            raise NotPackable(reason)


def _trial(forward: PackedForward) -> None:
    """Raises NotPackable unless two short rows give the same hidden states packed as padded, and do not notice each other."""
    decoder, config = forward.decoder, forward.decoder.config.get_text_config()
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotPackable("attention in chunks is not told to the attention function")
    device = next(p.device for p in decoder.parameters() if not p.is_meta)
    special = special_tokens(decoder.config)
    words = [i for i in range(min(config.vocab_size, 64 + len(special))) if i not in special]
    if len(words) < 4:
        raise NotPackable("it has too few words for a trial")
    lengths, columns = (7, 4), 7
    ids = torch.tensor([[words[(3 * i + 5 * r + 1) % len(words)] for i in range(columns)] for r in range(2)], device=device)
    mask = torch.arange(columns, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    others = ids.clone()
    others[0] = others[0].flip(0)
    run = type(decoder).forward
    windows: list = []
    token = TRIED.set(windows)
    try:
        with modes_kept(decoder), torch.no_grad():
            decoder.eval()
            output = run(decoder, input_ids=ids, attention_mask=mask.long(), use_cache=False)
            if not isinstance(output, ModelOutput) or [k for k, v in output.items() if v is not None] != ["last_hidden_state"]:
                raise NotPackable("it returns more than the last hidden state, or a tuple")
            padded = output.last_hidden_state[mask]
            undisturbed = run(decoder, input_ids=others, attention_mask=mask.long(), use_cache=False).last_hidden_state[mask]
            packed, disturbed = (
                batch.unpacked(run(decoder, **batch.inputs, use_cache=False).last_hidden_state)[mask]
                for batch in (pack({"input_ids": i, "attention_mask": mask}) for i in (ids, others))
            )
    finally:
        TRIED.reset(token)
    calls = len(windows) // 2
    kinds = getattr(config, "layer_types", None)
    sliding = kinds.count("sliding_attention") if kinds else calls * (getattr(config, "sliding_window", None) is not None)
    if calls == 0 or sum(w is not None for w in windows[:calls]) != sliding:
        raise NotPackable("its attention does not go through the attention function, or its windows are not told to it")
    if not _error(packed, padded) < HIDDEN_ERROR:
        raise NotPackable(f"packed and padded rows differ by {_error(packed, padded):.0%}")
    noise, notice = (_error(b[lengths[0] :], a[lengths[0] :]) for a, b in ((padded, undisturbed), (packed, disturbed)))
    if not notice <= 4 * noise + 1e-6:  # noise: experts' products have other shapes if the row before has other experts
        raise NotPackable("a sequence notices the one before it")


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


# ---------------------------------------------------------------------------------------------- public


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The decoder of a (PEFT) model: what its class calls ``base_model_prefix``; None where there is none."""
    base = innermost(model)
    decoder = getattr(base, getattr(base, "base_model_prefix", "") or "model", None)
    return decoder if isinstance(decoder, nn.Module) and hasattr(decoder, "config") else None


def packed_forward(model: nn.Module) -> PackedForward | None:
    """What :func:`enable_packing` put into the decoder, if it did."""
    forward = vars(decoder).get("forward") if (decoder := decoder_of(model)) is not None else None
    return forward if isinstance(forward, PackedForward) else None


class Replicate:
    """What DataParallel calls for its replicas of a decoder, which must not compute with the original's forward."""

    def __init__(self, decoder: nn.Module):
        self.decoder = weakref.ref(decoder)

    def __reduce__(self):
        return Replicate, (self.decoder(),)

    def __call__(self) -> nn.Module:
        decoder = self.decoder()
        copy = type(decoder)._replicate_for_data_parallel(decoder)
        del copy.__dict__["forward"], copy.__dict__["_replicate_for_data_parallel"]
        return copy


def put_back(decoder: nn.Module, forward: Callable | None) -> None:
    """The decoder's forward is its class's again, or what stood on the instance before."""
    del decoder.forward
    if forward is not None:
        decoder.forward = forward
    if not hasattr(forward, "recorded_size"):
        del decoder._replicate_for_data_parallel


def enable_packing(model: nn.Module) -> None:
    """Compute no padding from now on, in training, in calls with ``use_cache=False``, and without gradient in calls with labels
    that leave ``use_cache`` open: evaluation, whose output then has no cache.

    Raises:
        ValueError: no decoder was found.
    """
    decoder, base = decoder_of(model), innermost(model)
    if decoder is None:
        raise ValueError(f"{type(model).__name__} has no decoder module of its own: packing needs a *ForCausalLM model")
    if packed_forward(model) is not None:
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention  # for good: without first tokens it is transformers' own
    choose_sinks(decoder)
    decoder.forward = PackedForward(decoder, vars(decoder).get("forward"))
    decoder._replicate_for_data_parallel = Replicate(decoder)
    base.register_forward_pre_hook(_note_labels, with_kwargs=True)


def _note_labels(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """With padding on the left, the first token of a row has nothing real before it to be predicted from: its label goes."""
    if torch.compiler.is_compiling():
        return args, kwargs
    labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
    if isinstance(labels, Tensor) and isinstance(mask, Tensor) and labels.shape == mask.shape and mask.ndim == 2:
        after_padding = (mask[:, :-1] == 0) & (mask[:, 1:] != 0)
        labels = labels.masked_fill(F.pad(after_padding, (1, 0)).to(labels.device), -100)
        kwargs = kwargs | {"labels": labels}
    _LABELS.set(labels if isinstance(labels, Tensor) else None)
    return args, kwargs


def disable_packing(model: nn.Module) -> None:
    """Put the decoder's own forward back. Nothing happens to a model without packing."""
    if (packed := packed_forward(model)) is not None:
        if packed.guard is not None:
            packed.guard.close()
        put_back(packed.decoder, packed.inner)
        unchoose_sinks(packed.decoder)
        hooks = innermost(model)._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _note_labels]:
            del hooks[key], innermost(model)._forward_pre_hooks_with_kwargs[key]


def packing_status(model: nn.Module) -> PackingStatus:
    """What was packed, and what was not and why."""
    packed = packed_forward(model)
    return PackingStatus(reasons=Counter({"not enabled": 1})) if packed is None else packed.status
