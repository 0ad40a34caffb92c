# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Packed sequences: documents laid end to end in one row, described by `cu_seqlens` as in flash-attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

_BORDERS = WeakIdKeyDictionary()


@torch.compiler.disable
def borders_on_host(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """The borders as numbers. A tensor is read once for all layers, since that waits until its device has caught up."""
    if cu_seqlens.is_inference():  # counts no changes
        return tuple(cu_seqlens.tolist())
    version, borders = _BORDERS.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        borders = tuple(cu_seqlens.tolist())
        _BORDERS[cu_seqlens] = cu_seqlens._version, borders
    return borders


def check_packed(cu_seqlens: torch.Tensor, batch: int, time: int) -> None:
    """Refuse a `cu_seqlens` that does not describe one packed row of length `time`."""
    if batch != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1 (documents packed in one row), got a batch of {batch}")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be (documents + 1,), got a shape of {tuple(cu_seqlens.shape)}")
    ends = list(borders_on_host(cu_seqlens))
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != time or sorted(ends) != ends:
        raise ValueError(f"cu_seqlens must rise from 0 to the length {time} of the row, got {ends}")


def packed_borders(position_ids: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Borders of documents in rows laid end to end, read from positions (B or 1, T) that start again, if any do."""
    if position_ids is None or position_ids.shape[1] == 1:
        return None
    positions = position_ids.expand(batch, -1)
    starts = F.pad(positions.diff(dim=1) != 1, (1, 0))
    if not starts.any():
        return None
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=positions.numel())


def document_borders(batch: int, time: int, cu_seqlens: torch.Tensor | None) -> tuple[int, ...]:
    """Borders of the rows laid end to end, or of the documents packed in one, on the host."""
    return tuple(range(0, batch * time + 1, time)) if cu_seqlens is None else borders_on_host(cu_seqlens)


def document_index(cu_seqlens: torch.Tensor, time: int) -> torch.Tensor:
    """Number of the document of each of `time` positions, (time,)."""
    positions = torch.arange(time, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


class ChunkLayout(NamedTuple):
    """Where each position goes when every document starts at a chunk border.

    Attributes:
        target: (time,) index of each position in the padded row of `chunks * chunk` positions.
        starts: (chunks,) true where a chunk is the first of its document.
    """

    target: torch.Tensor
    starts: torch.Tensor


def chunk_layout(cu_seqlens: torch.Tensor, chunk: int) -> ChunkLayout:
    """Pad each document to whole chunks; the padded length is below `time + documents * chunk`."""
    cu_seqlens = cu_seqlens.long()
    time = int(cu_seqlens[-1])
    chunks = (cu_seqlens.diff() + chunk - 1) // chunk
    first = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
    document = document_index(cu_seqlens, time)
    positions = torch.arange(time, device=cu_seqlens.device)
    target = first[document] * chunk + positions - cu_seqlens[document]
    starts = torch.zeros(int(first[-1]), dtype=torch.bool, device=cu_seqlens.device)
    starts[first[:-1][chunks > 0]] = True
    return ChunkLayout(target, starts)


def scatter_to_chunks(x: torch.Tensor, layout: ChunkLayout, chunk: int, fill: float = 0.0) -> torch.Tensor:
    """(1, time, ...) to the padded row (1, chunks * chunk, ...), holes filled with `fill`."""
    out = x.new_full((1, layout.starts.numel() * chunk, *x.shape[2:]), fill)
    return out.index_copy(1, layout.target, x)
