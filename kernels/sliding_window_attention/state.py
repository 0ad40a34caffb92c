# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What sliding-window attention carries between calls, and which tokens fall out of the window."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..packing import document_index


@dataclass(frozen=True)
class WindowState:
    """The last `window` tokens and the first tokens (sinks) of each sequence of a batch.

    Attributes:
        key, value: (B, window, H_kv, d), oldest first.
        valid: (B, window), false where a slot is empty or held padding.
        sink_key, sink_value: (B, sinks, H_kv, d).
        sink_index: (B, sinks) position of each sink, counted from the first call; -1 while there is none.
        length: () positions seen, padding included.
    """

    key: torch.Tensor
    value: torch.Tensor
    valid: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    sink_index: torch.Tensor
    length: torch.Tensor

    @classmethod
    def empty(cls, like: torch.Tensor, window: int, sinks: int) -> "WindowState":
        """The state before any token, for keys like `like` (B, T, H_kv, d)."""
        batch, _, heads, dim = like.shape
        slots, first = like.new_zeros(batch, window, heads, dim), like.new_zeros(batch, sinks, heads, dim)
        none = torch.zeros(batch, window, dtype=torch.bool, device=like.device)
        index = torch.full((batch, sinks), -1, dtype=torch.long, device=like.device)
        return cls(slots, slots, none, first, first, index, torch.zeros((), dtype=torch.long, device=like.device))

    @classmethod
    def of_whole_rows(
        cls, k: torch.Tensor, v: torch.Tensor, k_sink: torch.Tensor, window: int, sinks: int
    ) -> "WindowState":
        """`empty` after `with_sinks` and `advance` over rows without padding, in a fraction of the operations."""
        batch, time = k.shape[:2]
        before, missing = max(window - time, 0), max(sinks - time, 0)
        slots, index = torch.arange(window, device=k.device), torch.arange(sinks, device=k.device)
        key, value = (F.pad(x[:, -window:], (0, 0, 0, 0, before, 0)) for x in (k, v))
        sink_key, sink_value = (F.pad(x[:, :sinks], (0, 0, 0, 0, 0, missing)) for x in (k_sink, v))
        index = index.masked_fill(index >= time, -1)
        length = torch.full((), time, dtype=torch.long, device=k.device)
        return cls(
            key, value, (slots >= before).repeat(batch, 1), sink_key, sink_value, index.repeat(batch, 1), length
        )

    def with_sinks(self, k_sink: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> "WindowState":
        """Take the first valid tokens into the sinks that are still empty."""
        sinks = self.sink_index.shape[1]
        before = (self.sink_index >= 0).sum(1, keepdim=True)
        rank = before + valid.cumsum(1) - 1
        chosen = valid[..., None] & (rank[..., None] == torch.arange(sinks, device=v.device))
        found, at = chosen.any(1), chosen.int().argmax(1)  # (B, sinks)

        def taken(x: torch.Tensor) -> torch.Tensor:
            return torch.where(found[..., None, None], x.take_along_dim(at[..., None, None], 1), 0)

        return replace(
            self,
            sink_key=self.sink_key + taken(k_sink),
            sink_value=self.sink_value + taken(v),
            sink_index=torch.where(found, self.length + at, self.sink_index),
        )

    def advance(self, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> "WindowState":
        """Slide the window over new tokens."""
        window = self.key.shape[1]
        return replace(
            self,
            key=torch.cat([self.key, k[:, -window:]], 1)[:, -window:],
            value=torch.cat([self.value, v[:, -window:]], 1)[:, -window:],
            valid=torch.cat([self.valid, valid[:, -window:]], 1)[:, -window:],
            length=self.length + k.shape[1],
        )


def leaving_window(
    tokens: tuple[torch.Tensor, ...],
    held: tuple[torch.Tensor, ...],
    valid: torch.Tensor,
    state: WindowState,
    sink_index: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The tokens that drop out of the window at each step, `window` positions late, and which of them count.

    Args:
        tokens: tensors (B, T, ...) of the new tokens.
        held: the same quantities of the tokens in the window, (B, window, ...).
        valid: (B, T) validity of the new tokens.
        state: the window's state before the new tokens.
        sink_index: (B, sinks) positions of the sinks, those among the new tokens included.
        cu_seqlens: document borders of a packed row.

    Returns:
        The delayed tensors (B, T, ...), and (B, T) true where the delayed token exists, is no sink and is of the same
        document as the step at which it leaves.
    """
    window, time, sinks = state.valid.shape[1], valid.shape[1], sink_index.shape[1]
    delayed = tuple(torch.cat([old, new], 1)[:, :time] for old, new in zip(held, tokens, strict=True))
    leaves = torch.cat([state.valid, valid], 1)[:, :time]
    index = torch.arange(time, device=valid.device) - window
    if cu_seqlens is not None:
        document = document_index(cu_seqlens, time)
        same = F.pad(document, (window, 0), value=-1)[:time] == document
        return delayed, leaves & same & (index >= cu_seqlens.long()[:-1][document] + sinks)
    if sinks:
        is_sink = (sink_index[:, None] == (state.length + index)[:, None]) & (sink_index >= 0)[:, None]
        leaves = leaves & ~is_sink.any(-1)
    return delayed, leaves
