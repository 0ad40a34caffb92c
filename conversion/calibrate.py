# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Place the latents of a converted model by k-means on the teacher's own keys: useful before any training."""

import math

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_linattn.kernels.rotary_embedding import rotate
from hf_linattn.mixers.latte import LatteMixer

ITERATIONS = 25
LEAST_VARIANCE = 1e-6
FIT_TOKENS = 2048
VARIANCE_SHARES = (1.0, 0.3, 0.1, 0.0)
BIASES = (0.0, -0.5, -1.0, -2.0, -3.0, -5.0, -50.0)  # the last one switches the long-range path of a head off


def kmeans(keys: torch.Tensor, clusters: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Lloyd's algorithm for several heads at once.

    Args:
        keys: (heads, tokens, d).
        clusters: number of centres, at most the tokens.
        generator: on the CPU, picks the first centres.

    Returns:
        Centres (heads, clusters, d) and the centre of each key (heads, tokens).
    """
    heads, tokens, dim = keys.shape
    if clusters > tokens:
        raise ValueError(
            f"{clusters} latents need at least as many calibration tokens, got {tokens}: raise the tokens"
        )
    first = torch.stack([torch.randperm(tokens, generator=generator)[:clusters] for _ in range(heads)]).to(keys.device)
    centres = torch.gather(keys, 1, first[..., None].expand(-1, -1, dim))
    for _ in range(ITERATIONS):
        nearest, distance = _nearest(keys, centres)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest[..., None].expand(-1, -1, dim), keys)
        counts = torch.zeros(heads, clusters, device=keys.device).scatter_add_(1, nearest, torch.ones_like(distance))
        # Centres that lost all keys start again at the keys that are worst served.
        worst = torch.gather(keys, 1, distance.topk(clusters, dim=1).indices[..., None].expand(-1, -1, dim))
        centres = torch.where(counts[..., None] > 0, sums / counts[..., None].clamp(min=1), worst)
    return centres, _nearest(keys, centres)[0]


def _nearest(keys: torch.Tensor, centres: torch.Tensor, piece: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    best, distances = [], []
    for part in keys.split(piece, dim=1):
        distance, index = torch.cdist(part, centres).min(dim=-1)
        best.append(index)
        distances.append(distance)
    return torch.cat(best, 1), torch.cat(distances, 1)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, stream: torch.Tensor, *, length: int, seed: int = 0, progress: bool = True
) -> None:
    """Set the latents of each converted layer from the keys that the teacher computes on a text.

    Keys are clustered before rotation, the first ones of each row (sinks) left out. Each latent gets the mean and the
    variance of its cluster; keys are assigned by distance, in units of the mean variance inside clusters. Meeting all far
    keys at one position overrates some heads' far mass, so each head then gets the bias, and each key/value head the share
    of the variance, that bring its output nearest to the teacher's on a few rows.

    Args:
        model: converted model with `linattn_init="data"`.
        stream: token ids, (N,).
        length: tokens per row; at most the length that the teacher was trained for.
        seed: of the first centres.
        progress: show a progress bar.

    Raises:
        ValueError: if there are fewer usable tokens than latents.
    """
    config = model.config
    length = min(length, len(stream))
    data = stream[: len(stream) // length * length].view(-1, length).to(model.device)
    layers = [model.model.layers[i].self_attn.linattn for i in config.converted_layers]
    collected: dict[torch.nn.Module, list[torch.Tensor]] = {layer: [] for layer in layers}

    def record(layer, args):
        key, (cos, sin) = args[1], args[4]
        collected[layer].append(rotate(key.float(), cos.float(), -sin.float())[:, config.linattn_sinks :].cpu())

    calls: dict[torch.nn.Module, tuple] = {}

    def remember(layer, args, kwargs, output):
        calls.setdefault(layer, (args, kwargs, output[0].float()))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    hooks += [layer.register_forward_hook(remember, with_kwargs=True) for layer in layers]
    batch = max(1, FIT_TOKENS // length)
    try:
        with model.linattn_variant(window=length, sinks=0, latents=False):  # as wide as the text: the teacher itself
            for rows in tqdm(data.split(batch), desc="calibrate: keys", disable=not progress):
                model.model(rows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    generator = torch.Generator().manual_seed(seed)
    for layer in tqdm(layers, desc="calibrate: k-means", disable=not progress):
        keys = torch.cat([k.flatten(0, 1) for k in collected.pop(layer)]).transpose(0, 1).to(model.device)
        centres, nearest = kmeans(keys, config.linattn_latents, generator)
        index = nearest[..., None].expand_as(keys)
        counts = torch.zeros_like(centres).scatter_add_(1, index, torch.ones_like(keys)).clamp(min=1)
        squares = (keys - torch.gather(centres, 1, index)) ** 2
        variance = torch.zeros_like(centres).scatter_add_(1, index, squares) / counts
        width = squares.mean(dim=(1, 2))[:, None]
        layer.latent_key.copy_(centres)
        layer.latent_log_variance.copy_(variance.clamp(min=LEAST_VARIANCE).log())
        layer.assign_weight.copy_(centres / width[..., None])
        layer.assign_bias.copy_(-centres.pow(2).sum(-1) / (2 * width))
        _fit_heads(layer, calls.pop(layer), model.model.variant_arguments())


def _fit_heads(layer: LatteMixer, call: tuple, arguments: dict) -> None:
    """Choose the variance's share of each key/value head and the latents' bias of each head by the error they leave."""
    args, kwargs, target = call
    args = (*args[:5], arguments["linattn_offsets"], arguments["linattn_variant"])
    variance = layer.latent_log_variance.clone()
    least = math.log(LEAST_VARIANCE)
    errors = []
    for share in VARIANCE_SHARES:
        layer.latent_log_variance.copy_((variance + math.log(share)).clamp(min=least) if share else least)
        for bias in BIASES:
            layer.latent_bias.fill_(bias)
            errors.append((layer(*args, **kwargs)[0].float() - target).pow(2).sum(dim=(0, 1, 3)))
    errors = torch.stack(errors).view(len(VARIANCE_SHARES), len(BIASES), layer.kv_heads, -1)
    error, bias = errors.min(dim=1)  # (shares, kv heads, group)
    share = error.sum(-1).argmin(dim=0)  # (kv heads,)
    heads = torch.arange(layer.kv_heads, device=share.device)
    chosen = bias[share, heads].flatten()
    layer.latent_bias.copy_(torch.tensor(BIASES, device=chosen.device)[chosen][:, None].expand_as(layer.latent_bias))
    shares = torch.tensor(VARIANCE_SHARES, device=share.device).clamp(min=LEAST_VARIANCE)[share]
    layer.latent_log_variance.copy_((variance + shares.log()[:, None, None]).clamp(min=least))
