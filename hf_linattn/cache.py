# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The layer that holds our states inside the caches that Transformers ships."""

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin


class StateLayer(CacheLayerMixin):
    """A fixed-size state per sequence, as named tensors whose first dimension is the batch (or scalars).

    It stands in the place of a stock layer of a `DynamicCache` or `StaticCache`. The state does not grow with the text and
    cannot be rewound.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, is_compileable: bool = False, in_place: bool = False):
        super().__init__()
        self.is_compileable = is_compileable
        self.in_place = in_place
        self.states: dict[str, torch.Tensor] = {}
        self.device: torch.device | None = None  # where the states belong while they are offloaded

    def store(self, states: dict[str, torch.Tensor]) -> None:
        """Keep new states; in a static cache in the same memory, so that captured graphs stay valid."""
        if self.in_place and self.is_initialized:
            for name, value in states.items():
                self.states[name].copy_(value)
        else:
            self.states = {name: value.clone() for name, value in states.items()} if self.in_place else states
            self.is_initialized = True
        self.device = states["length"].device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do before the first `store`."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("this cache layer holds a recurrent state, not keys and values; use store()")

    def get_seq_length(self) -> int | torch.Tensor:
        return self.states["length"] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "the state of a linear-attention layer cannot be rewound (crop, assisted decoding); keep a copy of the cache"
            )

    def reset(self) -> None:
        self.states, self.is_initialized = {}, False

    def offload(self) -> None:
        self.states = {name: value.to("cpu", non_blocking=True) for name, value in self.states.items()}

    def prefetch(self) -> None:
        self.states = {name: value.to(self.device, non_blocking=True) for name, value in self.states.items()}

    def _map(self, function) -> None:
        self.states = {name: function(value) if value.dim() else value for name, value in self.states.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda value: value.index_select(0, beam_idx.to(value.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda value: value.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda value: value[indices])


def ensure_state_layers(cache: Cache | None, layers: list[int], num_hidden_layers: int) -> None:
    """Put a `StateLayer` in the place of each of `layers`, before the cache is first used."""
    if cache is None:
        return
    while len(cache.layers) < num_hidden_layers and getattr(cache, "layer_class_to_replicate", None) is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    for index in layers:
        stock = cache.layers[index]
        if isinstance(stock, StateLayer):
            continue
        if isinstance(stock, LinearAttentionCacheLayerMixin):
            used = any(stock.has_previous_state.values())
        else:
            used = stock.is_initialized and stock.get_seq_length() > 0
        if used:
            raise ValueError(f"layer {index} of the cache already holds what another model saw; pass a new cache")
        cache.layers[index] = StateLayer(stock.is_compileable, in_place=not isinstance(cache, DynamicCache))


def state_bytes(config: PreTrainedConfig, context_length: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """Bytes that one sequence's cache holds at a context length.

    Returns:
        `converted`: this model; `teacher`: the KV cache of the base; `equal_window`: the window (in tokens) that, without
        latents, makes the converted layers' state as large.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    pair = 2 * kv_heads * dim * dtype.itemsize  # a key and a value
    latents = kv_heads * config.linattn_latents * (dim + 1) * 4
    if config.linattn_source == "conv":
        latents += 3 * config.hidden_size * dtype.itemsize
    if config.linattn_source == "rglru":
        latents += config.hidden_size * 4
    if config.linattn_gate == "lse" and (config.linattn_source != "none" or config.linattn_init == "random"):
        latents += config.linattn_window * kv_heads * config.linattn_latents * 4
    converted_layer = (config.linattn_window + config.linattn_sinks) * pair + latents
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    native = [
        pair * (min(context_length, config.sliding_window) if kind == "sliding_attention" else context_length)
        for kind in types
    ]
    converted = set(config.converted_layers)
    return {
        "converted": sum(converted_layer if i in converted else size for i, size in enumerate(native)),
        "teacher": sum(native),
        "equal_window": config.linattn_window + -(-latents // pair),
    }
