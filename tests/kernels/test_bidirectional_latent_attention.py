# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_linattn.kernels.latent_attention import EMPTY, latent_attention
from hf_linattn.kernels.latent_attention.bidirectional import bidirectional_latent_attention


def inputs(batch, time, heads, kv_heads, latents, dim, *, gated=False, scale=1.0, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    tensors = dict(
        q=draw(batch, time, heads, latents) * scale,
        theta=draw(batch, time, kv_heads, latents) * scale,
        v=draw(batch, time, kv_heads, dim),
    )
    if gated:
        tensors |= dict(gate=draw(batch, time, heads) * scale, gate_value=draw(batch, time, heads, dim))
    return tensors


def definition(q, theta, v, gate=None, gate_value=None, attention_mask=None):
    """softmax over latents of q, times softmax over time of theta, times v; one head after the other."""
    group = q.shape[2] // v.shape[2]
    out = []
    for head in range(q.shape[2]):
        logits, values = theta[:, :, head // group], v[:, :, head // group]
        absorbed = logits > EMPTY / 2
        if attention_mask is not None:
            absorbed = absorbed & attention_mask.bool()[..., None]
            values = torch.where(attention_mask.bool()[..., None], values, 0)
        means = logits.masked_fill(~absorbed, -torch.inf).softmax(1).nan_to_num().mT @ values
        choice = q[:, :, head].masked_fill(~absorbed.any(1, keepdim=True), -torch.inf)
        if gate is not None:
            choice = torch.cat([choice, gate[:, :, head, None]], -1)
        share = choice.softmax(-1).nan_to_num()
        mixed = share[..., : q.shape[-1]] @ means
        out.append(mixed if gate is None else mixed + share[..., -1:] * gate_value[:, :, head])
    return torch.stack(out, 2)


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("time", [1, 2, 37, 150])
def test_matches_the_definition(time, gated):
    tensors = inputs(2, time, 6, 2, 5, 3, gated=gated)
    torch.testing.assert_close(
        bidirectional_latent_attention(**tensors), definition(**tensors), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("gated", [False, True])
def test_masks_and_latents_that_hold_nothing(gated):
    tensors = inputs(3, 40, 4, 2, 5, 3, gated=gated)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1, :7] = False  # left padding
    mask[2] = False  # nothing but padding
    tensors["theta"][:2, :, 0, 1] = EMPTY
    tensors["theta"][0, ~mask[0]] = 1e4  # what padding holds stays out, below the maximum too
    tensors["v"][~mask] = torch.nan
    out = bidirectional_latent_attention(**tensors, attention_mask=mask)
    torch.testing.assert_close(out, definition(**tensors, attention_mask=mask), rtol=1e-10, atol=1e-10)
    if not gated:
        assert (out[2] == 0).all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_documents_are_separate(gated, masked):
    tensors = inputs(1, 200, 4, 2, 3, 5, gated=gated, scale=20)
    borders = [0, 1, 1, 66, 130, 200]  # one of a token, one empty, one over several chunks of products
    mask = torch.rand(1, 200, generator=torch.Generator().manual_seed(2)) < 0.7 if masked else None
    out = bidirectional_latent_attention(**tensors, attention_mask=mask, cu_seqlens=torch.tensor(borders))
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        if start < end:
            part = {name: x[:, start:end] for name, x in tensors.items()}
            alone = definition(**part, attention_mask=None if mask is None else mask[:, start:end])
            torch.testing.assert_close(out[:, start:end], alone, rtol=1e-10, atol=1e-10)


def test_the_last_position_is_the_causal_one():
    tensors = inputs(2, 33, 4, 2, 5, 3, gated=True)
    causal, _ = latent_attention(**tensors)
    torch.testing.assert_close(bidirectional_latent_attention(**tensors)[:, -1], causal[:, -1])


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    tensors = inputs(1, 7, 2, 1, 2, 3, gated=True)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    borders = torch.tensor([0, 4, 7]) if packed else None
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}

    def run(*values):
        options = dict(zip(leaves, values, strict=True))
        return bidirectional_latent_attention(**options, attention_mask=mask, cu_seqlens=borders)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


@pytest.mark.parametrize("scale", [1, 100, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_large_logits_in_float32(scale, packed):
    tensors = inputs(1, 130, 2, 1, 8, 4, gated=True, scale=scale, dtype=torch.float32)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    borders = torch.tensor([0, 130]) if packed else None
    out = bidirectional_latent_attention(**leaves, cu_seqlens=borders)
    expected = definition(**{name: x.detach().double() for name, x in tensors.items()})
    assert error(out, expected) < 1e-6 * scale + 1e-5
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves.values())


def test_half_precision_is_summed_in_float32():
    tensors = inputs(1, 3000, 2, 1, 4, 8, dtype=torch.bfloat16)
    tensors["v"] += 3
    out = bidirectional_latent_attention(**tensors)
    assert out.dtype == torch.bfloat16
    assert error(out, definition(**{name: x.double() for name, x in tensors.items()})) < 3e-3


def test_bad_arguments():
    tensors = inputs(2, 5, 4, 2, 3, 2, gated=True)
    with pytest.raises(ValueError, match="H a multiple of H_kv"):
        bidirectional_latent_attention(**tensors | dict(theta=tensors["theta"][..., :2]))
    with pytest.raises(ValueError, match="gate and gate_value belong together"):
        bidirectional_latent_attention(**tensors | dict(gate=None))
    with pytest.raises(ValueError, match="a batch of 1"):
        bidirectional_latent_attention(**tensors, cu_seqlens=torch.tensor([0, 5]))
