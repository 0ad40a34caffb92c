# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Promises of Latte from scratch: computes the paper's formula, decodes as in parallel, pads, packs, generates, trains."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from hf_linattn import (
    LatteConfig,
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteModel,
)
from hf_linattn.models.latte.configuration_latte import VARIANTS

PAD, WINDOW = 2, 5
FORMS = {
    name: fields | ({"window_size": WINDOW} if fields["window_size"] else {}) for name, fields in VARIANTS.items()
}
FORMS |= {
    "rotated values in a window": dict(source="none", window_size=WINDOW, num_key_value_heads=2),
    "own sizes": dict(num_key_value_heads=1, head_dim=6, rglru_blocks=2, window_size=8, num_latents_per_head=1),
    "convolved window": dict(source="conv", window_size=1, conv_kernel_size=4, num_latents_per_head=0),
}
BEST = "Latte-RGLRU-SWA++"
BOTH = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])


def config(**fields):
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    tokens = dict(pad_token_id=PAD, bos_token_id=0, eos_token_id=1)
    # ten times the usual spread, so that layers have something to say
    return LatteConfig(**sizes | tokens | dict(num_latents_per_head=3, initializer_range=0.2) | fields)


@pytest.fixture(scope="module")
def build():
    made = {}

    def make(form=BEST, is_causal=True):
        if (form, is_causal) not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                head = LatteForCausalLM if is_causal else LatteForMaskedLM
                model = head(config(**FORMS[form], is_causal=is_causal)).eval()
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        if "norm.weight" in name:
                            p.uniform_(0.5, 2)
                        elif name.endswith(("bias", "decay", "vapor_angles")):
                            p.add_(torch.randn_like(p) * 0.3)
            made[form, is_causal] = model
        return made[form, is_causal]

    return make


def tokens(*shape, seed=0):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_attention_heads=4, num_key_value_heads=3), "4 must be a multiple of num_key_value_heads 3"),
        (dict(source="lstm"), "source must be one of 'none', 'conv', 'rglru', got 'lstm'"),
        (dict(num_latents_per_head=0, window_size=None), "num_latents_per_head 0 and window_size None leave nothing"),
        (dict(num_latents_per_head=-1), "num_latents_per_head must be at least 0, got -1"),
        (dict(window_size=0), "window_size must be at least 1, or None for no window, got 0"),
        (dict(head_dim=5), "head_dim 5 must be even"),
        (dict(head_dim=5, window_size=None, vapor=True), "head_dim 5 must be even"),
        (dict(rglru_blocks=5), "hidden_size 32 must be a multiple of rglru_blocks 5"),
        (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (dict(is_causal=False, use_cache=True), "use_cache True needs is_causal True"),
        (dict(num_attention_heads=0), "num_attention_heads must be at least 1, got 0"),
        (dict(conv_kernel_size=0), "conv_kernel_size must be at least 1, got 0"),
        (dict(hidden_size="wide"), "hidden_size"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        config(**fields)
    assert config(head_dim=5, window_size=None).head_dim == 5  # nothing is rotated


def test_heads_refuse_the_wrong_direction(build):
    with pytest.raises(ValueError, match="LatteForCausalLM needs is_causal=True"):
        LatteForCausalLM(config(is_causal=False))
    with pytest.raises(ValueError, match="LatteForMaskedLM needs is_causal=False"):
        LatteForMaskedLM(config())
    model = build(is_causal=False)
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


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_mixer_is_the_papers_formula(build, form, is_causal):
    model = build(form, is_causal)
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


@pytest.mark.parametrize("form", FORMS)
def test_every_split_of_a_prompt_equals_the_parallel_forward(build, form):
    model, x = build(form), tokens(2, 18)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        assert expected.std() > 0.1
        for cut in range(1, 18):
            first = model(x[:, :cut])
            rest = model(x[:, cut:], past_key_values=first.past_key_values).logits
            close(torch.cat([first.logits, rest], 1), expected)
        cache = DynamicCache()  # as a user makes one who knows nothing of the model
        one_by_one = [model(part, past_key_values=cache).logits for part in x.split(1, 1)]
        close(torch.cat(one_by_one, 1), expected)
    assert cache.get_seq_length() == 18


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing(build, form, is_causal):
    model = build(form, is_causal)
    lengths, longest = [7, 12, 1], 12
    rows = [tokens(1, n, seed=n) for n in lengths]
    with torch.no_grad():
        alone = [model(row).logits[0] for row in rows]
        for side in ("left", "right"):
            spread = [(longest - n, 0) if side == "left" else (0, longest - n) for n in lengths]
            x = torch.cat([F.pad(row, pad, value=PAD) for row, pad in zip(rows, spread, strict=True)])
            mask = torch.cat([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, spread, strict=True)])
            out = model(x, attention_mask=mask).logits
            for row, expected, valid in zip(out, alone, mask.bool(), strict=True):
                close(row[valid], expected)
            for cut in (1, 5, 11) if is_causal else ():  # also within the padding, and of nothing but padding
                first = model(x[:, :cut], attention_mask=mask[:, :cut])
                rest = model(x[:, cut:], attention_mask=mask, past_key_values=first.past_key_values)
                for i, expected in enumerate(alone):
                    close(torch.cat([first.logits[i], rest.logits[i]])[mask[i].bool()], expected)
    with pytest.raises(ValueError, match=r"attention_mask \(3, 5\) must be \(batch, 12 or more\)"):
        model(x, attention_mask=mask[:, :5])


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_are_separate(build, form, is_causal):
    model = build(form, is_causal)
    documents = tokens(1, 24).split([9, 1, 14], 1)
    collate = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": d[0].tolist()} for d in documents])
    positions = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    with torch.no_grad():
        expected = torch.cat([model(d).logits for d in documents], 1)
        close(model(**batch).logits, expected)
        by_position = model(**positions)
        close(by_position.logits, expected)
        assert "past_key_values" not in by_position
        two = model(positions["input_ids"].view(2, 12), position_ids=positions["position_ids"].view(2, 12)).logits
        cut = torch.cat([model(part).logits for part in tokens(1, 24).split([9, 1, 2, 12], 1)], 1)
        close(two.view(1, 24, -1), cut)
        with pytest.raises(ValueError, match="pass no cache and no attention_mask with them"):
            model(**batch, attention_mask=torch.tensor([[0] + [1] * 23]))
        if is_causal:
            with pytest.raises(ValueError, match="pass no cache"):
                model(**batch, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("form", FORMS)
def test_generate(build, form):
    model, x = build(form), tokens(1, 12)
    options = dict(max_new_tokens=14, do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    greedy = model.generate(x, **options)
    with torch.no_grad():
        assert torch.equal(model(greedy).logits[:, 11:-1].argmax(-1), greedy[:, 12:])
    both = torch.cat([F.pad(x, (5, 0), value=PAD), tokens(1, 17, seed=4)])
    mask = (torch.arange(17) >= torch.tensor([[5], [0]])).long()
    for cache in ("dynamic", "static"):
        out = model.generate(both, attention_mask=mask, cache_implementation=cache, **options, disable_compile=True)
        assert torch.equal(out[0, 5:], greedy[0]), cache
    options |= dict(max_new_tokens=8)
    beams = model.generate(x, num_beams=3, num_return_sequences=2, **options)
    assert torch.equal(model.generate(x, num_beams=3, num_return_sequences=2, use_cache=False, **options), beams)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(x, prompt_lookup_num_tokens=3, **options)


@pytest.mark.parametrize("form", ["Latte++", BEST])
def test_compiled_decoding_step(build, form):
    model, x = build(form), tokens(1, 14)
    cache = StaticCache(config=model.config, max_cache_len=32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        model(x[:, :10], past_key_values=cache)
        memory = cache.layers[0].states["mean"].data_ptr()
        for t in range(10, 14):
            with torch.compiler.set_stance("default" if t < 12 else "fail_on_recompile"):
                out = compiled(x[:, t : t + 1], past_key_values=cache, position_ids=torch.tensor([[t]])).logits
            close(out[:, 0], expected[:, t])
    assert cache.layers[0].states["mean"].data_ptr() == memory


def test_memory_per_token_does_not_grow_and_the_state_cannot_be_rewound(build):
    model = build()
    cache, sizes = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in tokens(2, 24).split(8, 1):
            model(part, past_key_values=cache)
            sizes.append(sum(t.numel() for layer in cache.layers for t in layer.states.values()))
    assert len(set(sizes)) == 1
    latents, window, source = 4 * 3 * (8 + 1), WINDOW * (2 * 4 * 8 + 1), 32 + 1  # each slot and source with a flag
    assert sizes[0] == 2 * (2 * (latents + window + source) + 1)  # layers x (rows x ... + length)
    with pytest.raises(NotImplementedError, match="rewound"):
        cache.crop(-1)
    used = DynamicCache()
    used.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="already holds"):
        model(tokens(1, 4), past_key_values=used)


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_save_and_load_through_auto_classes(build, form, is_causal, tmp_path):
    model, x = build(form, is_causal), tokens(2, 15)
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is (LatteForCausalLM if is_causal else LatteForMaskedLM)
    assert not any(info.values()), info
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is LatteModel
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x, output_hidden_states=True)
        close(again(x).logits, expected.logits)  # to the bit only where tensors happen to lie alike in memory
        close(body(x).last_hidden_state, expected.hidden_states[-1])
        out = half(x)
    assert len(expected.hidden_states) == 3
    assert out.logits.dtype == torch.bfloat16
    assert (out.logits.float() - expected.logits).norm() < 0.15 * expected.logits.norm()
    wide = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, _ in half.named_parameters() if "vapor" in name}
    if is_causal:
        states = out.past_key_values.layers[0].states
        assert {states[name].dtype for name in states.keys() & {"mass", "mean"}} <= {torch.float32}
        assert "source" not in states or model.config.source == "conv" or states["source"].dtype == torch.float32


def test_fresh_weights():
    """Made on the meta device and filled afterwards, as `from_pretrained` does for what a checkpoint lacks."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, initializer_range=0.02, is_causal=False)
    for fields in (dict(vapor=True), dict(source="conv", window_size=None, gated_mlp=False)):
        model = LatteForSequenceClassification._from_config(config(**sizes | fields))
        for name, p in model.named_parameters():
            name = name.removesuffix(".weight")
            if "norm" in name and not name.endswith("bias"):
                assert (p == 1).all(), name
            elif name.endswith("bias"):
                assert (p == 0).all(), name
            elif name.endswith("decay"):
                squared = torch.exp(-2 * F.softplus(p))
                assert 0.8 < squared.min() and squared.max() < 0.999 and squared.std() > 0.03
            elif name.endswith("vapor_angles"):
                torch.testing.assert_close(p, 10000.0 ** (-torch.arange(8) / 8))
            else:
                std = {
                    "latent": 64**-0.5,
                    "o_proj": 0.01,
                    "down_proj": 0.01,
                    "sources": 3**-0.5 if fields.get("source") else 0.25,
                }
                expected = next((value for part, value in std.items() if part in name), 0.02)
                assert 0.8 * expected < p.std() < 1.2 * expected, name


@BOTH
@pytest.mark.parametrize("form", ["Latte", BEST, "Latte-Conv++", "rotated values in a window"])
def test_gradient_checkpointing_and_gradients_reach_all_weights(build, form, is_causal):
    x, grads = tokens(2, 20), []
    for checkpointing in (False, True):
        model = copy.deepcopy(build(form, is_causal)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert all(layer.gradient_checkpointing == checkpointing for layer in model.model.layers)
        model(x, labels=x).loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_mixed_precision_training(build, form, is_causal):
    model, x = copy.deepcopy(build(form, is_causal)).train(), tokens(1, 20)
    borders = torch.tensor([0, 7, 20], dtype=torch.int32)
    for options in ({}, dict(cu_seq_lens_q=borders)):
        expected = model(x, labels=x, **options)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, labels=x, **options)
        out.loss.backward()
        assert (out.logits.float() - expected.logits).norm() < 0.1 * expected.logits.norm()
        if "past_key_values" in out and "mean" in out.past_key_values.layers[0].states:
            assert out.past_key_values.layers[0].states["mean"].dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("form", ["Latte++", BEST])
def test_dropout(form):
    torch.manual_seed(0)
    model = LatteModel(config(**FORMS[form], dropout=0.25))
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


def test_losses_and_kept_logits(build):
    model, x = build(), tokens(2, 10)
    with torch.no_grad():
        full = model(x, labels=x)
        close(full.loss, F.cross_entropy(full.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
        close(model(x, labels=x, num_items_in_batch=9).loss, full.loss * 18 / 9)
        close(model(x, logits_to_keep=1).logits, full.logits[:, -1:])
        embeds = model.get_input_embeddings()(x)
        close(model(inputs_embeds=embeds).logits, full.logits)
        masked = build(is_causal=False)
        labels = torch.where(torch.rand(2, 10) < 0.3, x, -100)
        out = masked(x, labels=labels)
        close(out.loss, F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(x, inputs_embeds=embeds)
    for head in (model, masked):
        assert head.lm_head.weight is head.model.embed_tokens.weight
    loose = LatteForMaskedLM(config(is_causal=False, tie_word_embeddings=False))
    assert loose.lm_head.weight is not loose.model.embed_tokens.weight


@pytest.mark.parametrize("form", FORMS)
def test_bidirectional_models_see_both_sides_and_tell_them_apart(build, form):
    model, x = build(form, False), tokens(1, 16)
    changed = x.clone()
    changed[:, 8] = changed[:, 8] % 60 + 3
    with torch.no_grad():
        before = model(x).logits
        difference = (model(changed).logits - before).abs().amax(-1)[0]
        # what is masked is predicted from the left and from the right
        reach = slice(None) if model.config.num_latents_per_head else slice(7, 10)
        if form != "convolved window":  # which is one token wide
            assert (difference[reach] > 1e-4).all()
        if form != "convolved window":
            assert (model(x.flip(1)).logits.flip(1) - before).abs().max() > 0.01


@BOTH
@pytest.mark.parametrize("form", ["Latte", BEST])
def test_sequence_classification_reads_the_mean(form, is_causal, tmp_path):
    torch.manual_seed(0)
    model = LatteForSequenceClassification(config(**FORMS[form], is_causal=is_causal, num_labels=5)).eval()
    rows = [tokens(1, n, seed=n) for n in (4, 9)]
    labels = torch.tensor([1, 3])
    with torch.no_grad():
        expected = torch.cat([model.score(model.model(row).last_hidden_state.mean(1)) for row in rows])
        close(model(rows[0]).logits, expected[:1])
        for pad in ((5, 0), (0, 5)):
            x = torch.cat([F.pad(rows[0], pad, value=PAD), rows[1]])
            out = model(x, attention_mask=(x != PAD).long(), labels=labels)
            close(out.logits, expected)
            close(out.loss, F.cross_entropy(expected, labels))
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is LatteForSequenceClassification
    with torch.no_grad():
        close(again(x, attention_mask=(x != PAD).long()).logits, out.logits)


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()])
@BOTH
def test_trainer_runs(build, is_causal, collator, tmp_path):
    model = copy.deepcopy(build(is_causal=is_causal))
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    result = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)
    assert result.train().training_loss > 0
    assert result.evaluate()["eval_loss"] > 0
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
