"""Keys and values in memory that stays where it is, so that a recorded decode step can read and extend them.

A :class:`~transformers.DynamicCache` holds tensors of exactly its length and makes new ones in every step. A recording bakes
addresses in. So the keys and values of the sequences that are being decoded lie in :class:`KeyValues`, longer than needed, and
the user's cache holds views of the part that is filled:

    buffer    k0 k1 k2 k3 .. .. .. ..     length 8
    view      k0 k1 k2 k3                 ``cache.layers[i].keys``

The cache stays true after every step, whatever is done with it: returned, handed in again for a chat's next turn, cropped. What
gives it other tensors (beam search reorders them, an ordinary forward appends) is noticed, and they are copied in again.

Before what somebody may still look at is overwritten, they get copies: :meth:`KeyValues.adopt`.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from .graph_recording import Unsupported


class RecordedLayer(StaticLayer):
    """One layer's keys and values as a recording sees them: (rows, heads, length, dimensions), all of it. The new token's go to
    ``cumulative_length``, which is a tensor on the device, as in the static caches of transformers: models that ask for the
    length compute with it."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, place
        self.device, self.dtype, self.is_initialized = keys.device, keys.dtype, True
        self.batch_size = self.max_batch_size = keys.shape[0]
        self.num_heads = keys.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != 1:
            raise Unsupported(f"a decode step appends {key_states.shape[2]} keys")
        self.keys.index_copy_(2, self.cumulative_length.view(1), key_states)
        self.values.index_copy_(2, self.cumulative_length.view(1), value_states)
        return self.keys, self.values


def layers_of(cache: Cache) -> list[DynamicLayer]:
    """The layers of a cache whose steps can be recorded.

    Raises:
        Unsupported: the cache is of another kind, or somewhere else.
    """
    if type(cache) is not DynamicCache:
        raise Unsupported(f"its cache is a {type(cache).__name__}")
    if cache.offloading:
        raise Unsupported("its cache is offloaded")
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise Unsupported(f"its cache has a {type(layer).__name__}")
        if not layer.is_initialized or layer.keys.ndim != 4:
            raise Unsupported("its cache has a layer without keys")
    return cache.layers


def _users(tensor: Tensor) -> int:
    """Tensors that share this one's memory, and a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class KeyValues:
    """Buffers for the keys and values of ``rows`` sequences of up to ``length`` tokens.

    Args:
        layers: what the buffers are made for; shapes and dtypes of heads are taken from them.
    """

    def __init__(self, layers: list[DynamicLayer], rows: int, length: int):
        self.rows, self.length = rows, length
        self.place = torch.zeros((), dtype=torch.int64, device=layers[0].keys.device)
        self.heads = self.heads_of(layers)
        # zeros: what was never written is masked, but 0 times NaN is NaN
        self.tensors = [
            torch.zeros(rows, t.shape[1], length, t.shape[3], dtype=t.dtype, device=t.device)
            for layer in layers
            for t in (layer.keys, layer.values)
        ]
        self._mask = torch.ones(rows, length, dtype=torch.bool, device=self.place.device)  # the caller's, up to the place
        self._alone = [_users(t) for t in self.tensors]
        self._owner: weakref.ref[DynamicCache] | None = None
        self._views: list[Tensor] = []  # what the owner's layers hold

    @staticmethod
    def heads_of(layers: list[DynamicLayer]) -> tuple:
        """What has to be the same in caches that share buffers."""
        return tuple((t.shape[1], t.shape[3], t.dtype, t.device) for layer in layers for t in (layer.keys, layer.values))

    @staticmethod
    def bytes_of(layers: list[DynamicLayer], rows: int, length: int) -> int:
        tensors = [t for layer in layers for t in (layer.keys, layer.values)]
        return sum(rows * length * t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def recorded_cache(self, rows: int, length: int) -> Cache:
        """The first rows and tokens of the buffers, as a recording's cache."""
        parts = [t[:rows, :, :length] for t in self.tensors]
        return Cache(layers=[RecordedLayer(k, v, self.place) for k, v in zip(parts[::2], parts[1::2])])

    def set_place(self, place: int, mask: Tensor | None) -> None:
        """Where the next token goes, and which of the ``place + 1`` tokens are real: (rows, place + 1); None: all."""
        self.place.fill_(place)
        if mask is None:
            self._mask.fill_(True)
        else:
            self._mask[: mask.shape[0], : place + 1].copy_(mask)

    def visible(self, rows: int, length: int) -> Tensor:
        """(rows, length): what the new token may look at."""
        return self._mask[:rows, :length] & (torch.arange(length, device=self.place.device) <= self.place)

    def holds(self, cache: DynamicCache) -> bool:
        """Whether the cache's tensors are the views that it was given after the last step."""
        if self._owner is None or self._owner() is not cache or len(self._views) != 2 * len(cache.layers):
            return False
        keys, values = self._views[::2], self._views[1::2]
        return all(layer.keys is k and layer.values is v for layer, k, v in zip(cache.layers, keys, values))

    def adopt(self, cache: DynamicCache) -> bool:
        """Copy a cache's keys and values into the buffers. Caches that hold views of what is overwritten get copies before.

        Returns:
            False, and nothing has happened to the buffers, where somebody else holds such views: then new ones are needed.
        """
        previous = self._owner() if self._owner is not None else None
        for other in (cache,) if previous is None else (cache, previous):
            self._give_copies(other)
        self._views, self._owner = [], None
        if [_users(t) for t in self.tensors] != self._alone:
            return False
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        torch._foreach_copy_([b[: t.shape[0], :, : t.shape[2]] for b, t in zip(self.tensors, tensors)], tensors)
        return True

    def agrees_with(self, cache: DynamicCache) -> bool:
        """Whether the buffers hold the same numbers as the cache, as far as that goes."""
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return all(torch.equal(b[: t.shape[0], :, : t.shape[2]], t) for b, t in zip(self.tensors, tensors))

    def _give_copies(self, cache: DynamicCache) -> None:
        mine = {t.untyped_storage().data_ptr() for t in self.tensors}
        for layer in cache.layers:
            for name in ("keys", "values"):
                tensor = getattr(layer, name, None)
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in mine:
                    setattr(layer, name, tensor.clone())

    def show(self, cache: DynamicCache, rows: int, length: int) -> None:
        """Give the cache views of what is filled."""
        self._views = [t[:rows, :, :length] for t in self.tensors]
        self._owner = weakref.ref(cache)
        for layer, keys, values in zip(cache.layers, self._views[::2], self._views[1::2]):
            layer.keys, layer.values = keys, values
