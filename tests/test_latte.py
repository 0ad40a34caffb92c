# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What is Latte's alone, beside tests/test_models.py: the paper's formula and variants, directions, dropout, fresh decays."""

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from hf_linattn import (
    LatteConfig,
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteModel,
)

from .model_cases import CASES, Case, build, case_config, close, make_config, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BEST = "Latte-RGLRU-SWA++"
LATTES = [case for case in CASES if case.architecture == "latte"]


@pytest.mark.parametrize(
    ("name", "millions"),  # sections 12 (rows 2 and 4) and 3.5 of the specification
    [
        ("Latte", 111.7),
        ("Latte++", 140.1),
        ("Latte-Conv++", 140.1),
        ("Latte-RGLRU++", 141.8),
        ("Latte-Conv-SWA++", 154.2),
        (BEST, 156.0),
        ("RGLRU-SWA++", 153.6),
    ],
)
def test_variants_have_the_papers_size(name, millions):
    with torch.device("meta"):
        model = LatteForCausalLM(LatteConfig.variant(name))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=2e-3)


def test_variants_by_name():
    assert LatteConfig.variant(BEST).to_dict() == LatteConfig().to_dict()
    assert LatteConfig.variant("Latte++").vapor and not LatteConfig.variant("Latte-Conv++").vapor
    both = LatteConfig.variant("Latte", is_causal=False, hidden_size=64)
    assert (both.is_causal, both.use_cache, both.gated_mlp, both.head_dim) == (False, False, False, 8)
    with pytest.raises(ValueError, match=r"unknown variant 'Latte\+': choose one of Latte, Latte\+\+, "):
        LatteConfig.variant("Latte+")


def test_only_rotated_heads_must_be_even():
    assert make_config("latte", head_dim=5, window_size=None).head_dim == 5


def test_heads_refuse_the_wrong_direction():
    with pytest.raises(ValueError, match="LatteForCausalLM needs is_causal=True"):
        LatteForCausalLM(make_config("latte", is_causal=False))
    with pytest.raises(ValueError, match="LatteForMaskedLM needs is_causal=False"):
        LatteForMaskedLM(make_config("latte"))
    model = build(Case("latte", BEST, is_causal=False))
    assert "past_key_values" not in model(tokens(1, 4))
    for options in (dict(use_cache=True), dict(past_key_values=DynamicCache(config=model.config))):
        with pytest.raises(ValueError, match="has no state to carry on: pass neither use_cache"):
            model.model(tokens(1, 4), **options)


def run_source(mixer, w, x, direction):
    """One direction of the source, step by step."""
    prefix, (batch, time, width) = f"sources.{direction}.", x.shape
    outputs, h = [], 0
    for t in range(time):
        if f"{prefix}decay" not in w:
            taps = w[prefix + "weight"]
            outputs.append(sum(taps[:, k] * x[:, t - k] for k in range(taps.shape[1]) if t >= k))
            continue
        gates = w[prefix + "weight"]
        split = x[:, t].view(batch, gates.shape[1], -1)
        r, i = (
            torch.sigmoid(torch.stack([split[:, b] @ g[b] for b in range(len(g))], 1).view(batch, width) + bias)
            for g, bias in zip(gates, w[prefix + "bias"], strict=True)
        )
        a = torch.exp(-8 * r * F.softplus(w[prefix + "decay"]))
        h = a * h + (1 if t == 0 else torch.sqrt(1 - a * a)) * i * x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


def formula(mixer, fields, x):
    """Sections 2.2, 2.7 and 2.8 of the specification: every weight of every pair of tokens written out, in float64."""
    w = {name: p.double() for name, p in mixer.named_parameters()}
    x, (batch, time, _) = x.double(), x.shape
    heads, group = fields.num_attention_heads, fields.num_attention_heads // fields.num_key_value_heads
    dim, latents, causal = fields.head_dim, fields.num_latents_per_head, fields.is_causal
    y = x
    if fields.source != "none":
        y = run_source(mixer, w, x, 0)
        if not causal:
            y = (y + run_source(mixer, w, x.flip(1), 1).flip(1)) / 2
    if fields.source == "rglru":
        y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["source_norm.weight"]
    distance = torch.arange(time)[:, None] - torch.arange(time)
    past = (distance >= 0) if causal else torch.ones(time, time, dtype=torch.bool)

    def by_head(z, size):  # (B, heads, T, size)
        z = z.view(batch, time, -1, size)
        return z.repeat_interleave(heads // z.shape[2], 2).transpose(1, 2)

    def turned(z):  # the pairs of channels that are rotated, as complex numbers
        return torch.complex(z[..., : dim // 2], z[..., dim // 2 :])

    states = []  # p(s | l, t), (B, heads, T, T) for the window, then for each latent
    if fields.window_size is not None:
        seen = y if latents == 0 else x
        q, k = (turned(by_head(seen @ w[f"{name}_proj.weight"].T, dim)) for name in "qk")
        turn = torch.exp(1j * distance[..., None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim))
        scores = torch.einsum("bhtj,bhsj,tsj->bhts", q, k.conj(), turn).real / dim**0.5
        near = distance < fields.window_size if causal else distance.abs() <= fields.window_size // 2
        states.append(scores.masked_fill(~(past & near), -torch.inf).softmax(-1))
    posterior = torch.ones(batch, heads, time, 1, dtype=torch.float64)
    if latents:
        logits = y @ w["q_latent.weight"].T
        theta = by_head(y @ w["k_latent.weight"].T, latents)
        for latent in range(latents):
            row = theta[..., None, :, latent].expand(-1, -1, time, -1)
            states.append(row.masked_fill(~past, -torch.inf).softmax(-1))
        logits, gates = logits[..., : heads * latents], logits[..., heads * latents :]
        posterior = by_head(logits, latents)
        if fields.window_size is not None:
            posterior = torch.cat([by_head(gates, 1), posterior], -1)
        posterior = posterior.softmax(-1)
    weights = torch.einsum("bhtl,lbhts->bhts", posterior, torch.stack(states))
    v = by_head(x @ w["v_proj.weight"].T, dim)
    if fields.vapor:
        turn = torch.exp(1j * distance[..., None] * w["vapor_angles"])
        out = torch.einsum("bhts,tsj,bhsj->bhtj", weights.to(turn.dtype), turn, turned(v))
        out = torch.cat([out.real, out.imag], -1)
    else:
        out = weights @ v
    assert v.shape[1] == heads and group * fields.num_key_value_heads == heads
    return out.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("case", LATTES, ids=str)
def test_mixer_is_the_papers_formula(case):
    model = build(case)
    x = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(1))
    seen = {}
    mixer = model.model.layers[0].mixer
    hook = mixer.register_forward_hook(lambda module, args, out: seen.update(x=args[0], out=out))
    with torch.no_grad():
        model.model(inputs_embeds=x)
        hook.remove()
        expected = formula(mixer, model.config, seen["x"])
    assert expected.std() > 0.1
    torch.testing.assert_close(seen["out"].double(), expected, rtol=1e-5, atol=1e-5)


def test_fresh_decays_and_angles():
    torch.manual_seed(0)
    model = LatteForSequenceClassification._from_config(
        make_config("latte", hidden_size=64, is_causal=False, vapor=True)
    )
    for layer in model.model.layers:
        for source in layer.mixer.sources:
            squared = torch.exp(-2 * F.softplus(source.decay))
            assert 0.8 < squared.min() and squared.max() < 0.999 and squared.std() > 0.03
        torch.testing.assert_close(layer.mixer.vapor_angles, 10000.0 ** (-torch.arange(8) / 8))


@pytest.mark.parametrize("variant", ["Latte++", BEST])
def test_dropout(variant):
    torch.manual_seed(0)
    model = LatteModel(case_config(Case("latte", variant), dropout=0.25))
    x = tokens(2, 20)
    with torch.no_grad():
        close(model.eval()(x).last_hidden_state, model(x).last_hidden_state)
        first, second = (model.train()(x).last_hidden_state for _ in range(2))
        assert first.isfinite().all() and (first - second).abs().mean() > 0.01
    # the weights of the mixture are dropped as by nn.Dropout, and not normalised again
    mixer = model.layers[0].mixer
    q, gate = torch.randn(2, 50, 4, 3), torch.randn(2, 50, 4) if mixer.window else None
    dropped_q, dropped_gate, kept = mixer._drop(q, gate)
    plain, dropped = q, dropped_q
    if gate is not None:
        plain, dropped = torch.cat([gate[..., None], q], -1), torch.cat([dropped_gate[..., None], dropped_q], -1)
    ratio = dropped.softmax(-1) * kept / plain.softmax(-1)
    zero = ratio == 0
    assert 0.2 < zero.float().mean() < 0.3
    torch.testing.assert_close(ratio[~zero], torch.full_like(ratio[~zero], 1 / 0.75))


@pytest.mark.parametrize("case", [case for case in LATTES if not case.is_causal], ids=str)
def test_bidirectional_models_see_both_sides_and_tell_them_apart(case):
    model, x = build(case), tokens(1, 16)
    changed = x.clone()
    changed[:, 8] = changed[:, 8] % 60 + 3
    with torch.no_grad():
        before = model(x).logits
        difference = (model(changed).logits - before).abs().amax(-1)[0]
        # what is masked is predicted from the left and from the right
        reach = slice(None) if model.config.num_latents_per_head else slice(7, 10)
        if case.variant != "convolved window":  # which is one token wide
            assert (difference[reach] > 1e-4).all()
            assert (model(x.flip(1)).logits.flip(1) - before).abs().max() > 0.01
