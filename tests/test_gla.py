# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Promises of the GLA Transformer: decodes as it computes in parallel, pads, packs, generates, saves, trains, imports."""

import copy
import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from hf_linattn import GLAConfig, GLAForCausalLM, GLAForSequenceClassification, GLAModel
from hf_linattn.kernels.gated_linear_attention import gated_linear_attention_reference
from hf_linattn.models.gla import from_fla, import_fla, map_fla_config, map_fla_state_dict

PAD = 2
FORMS = {
    "paper": {},
    "grouped": dict(num_key_value_heads=2),
    "convolution": dict(num_key_value_heads=2, use_short_conv=True),
    "retrofit": dict(num_key_value_heads=1, expand_k=1, feature_map="relu", use_output_gate=False, clamp_min=-0.05),
}


def config(**fields):
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48, pad_token_id=PAD)
    # ten times the usual spread, so that layers have something to say and decays differ
    return GLAConfig(**sizes | dict(initializer_range=0.2) | fields)


@pytest.fixture(scope="module")
def build():
    made = {}

    def make(form="grouped"):
        if form not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made[form] = GLAForCausalLM(config(**FORMS[form])).eval()
        return made[form]

    return make


def tokens(*shape, seed=0):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_defaults_are_the_papers_models():
    with torch.device("meta"):
        assert round(GLAForCausalLM(GLAConfig()).num_parameters() / 1e9, 3) == 0.342
        large = GLAForCausalLM(GLAConfig(hidden_size=2048, tie_word_embeddings=False))
    assert round(large.num_parameters() / 1e9, 3) == 1.366
    assert (large.config.intermediate_size, large.config.key_head_dim, large.config.value_head_dim) == (5632, 256, 512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_attention_heads=4, num_key_value_heads=3), "4 must be a multiple of num_key_value_heads 3"),
        (dict(hidden_size=36), "expand_k 0.5 of hidden_size 36 gives each of 4 heads 4.5 channels: choose"),
        (dict(expand_v=0.3), "expand_v 0.3 of hidden_size 32 .* choose"),
        (dict(gate_logit_normalizer=0), "gate_logit_normalizer must be above 0, got 0"),
        (dict(clamp_min=5.0), "clamp_min is a logarithm below 0, got 5.0"),
        (dict(feature_map="elu"), "feature_map must be one of .* got 'elu'"),
        (dict(hidden_act="swoosh"), "hidden_act must be .* got 'swoosh'"),
        (dict(num_hidden_layers=0), "num_hidden_layers must be at least 1, got 0"),
        (dict(hidden_size="wide"), "hidden_size"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        config(**fields)


def test_mixer_is_the_papers_formula(build):
    """Sections 2.8 and 2.9 of the specification, written out in float64 over the recurrence."""
    mixer = copy.deepcopy(build().model.layers[0].mixer)
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
        mixer.decay_up_proj.bias.normal_()
    x = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(1))
    w = {name: p.double() for name, p in mixer.named_parameters()}
    y = x.double()
    q, k, v = (y @ w[f"{name}_proj.weight"].T for name in "qkv")
    logits = y @ w["decay_down_proj.weight"].T @ w["decay_up_proj.weight"].T + w["decay_up_proj.bias"]
    k, v, g = (z.view(2, 19, 2, -1) for z in (k, v, torch.sigmoid(logits).log() / 16))
    out, _ = gated_linear_attention_reference(q.view(2, 19, 4, -1), k, v, g, scale=k.shape[-1] ** -0.5)
    out = out / (out.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["norm.weight"]
    gate = y @ w["gate_proj.weight"].T
    expected = (out.flatten(2) * gate * torch.sigmoid(gate)) @ w["o_proj.weight"].T
    with torch.no_grad():
        torch.testing.assert_close(mixer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_split_of_a_prompt_equals_the_parallel_forward(build, form):
    model, x = build(form), tokens(2, 24)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        assert expected.std() > 0.1
        for cut in range(1, 24):
            first = model(x[:, :cut])
            rest = model(x[:, cut:], past_key_values=first.past_key_values).logits
            close(torch.cat([first.logits, rest], 1), expected)
        cache = DynamicCache()  # as a user makes one who knows nothing of the model
        one_by_one = [model(part, past_key_values=cache).logits for part in x.split(1, 1)]
        close(torch.cat(one_by_one, 1), expected)
    assert cache.get_seq_length() == 24
    assert cache.layers[0].states["state"].dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing(build, form):
    model = build(form)
    lengths, longest = [7, 12, 1], 12
    rows = [tokens(1, n, seed=n) for n in lengths]
    with torch.no_grad():
        alone = [model(row, use_cache=False).logits[0] for row in rows]
        for side in ("left", "right"):
            spread = [(longest - n, 0) if side == "left" else (0, longest - n) for n in lengths]
            x = torch.cat([F.pad(row, pad, value=PAD) for row, pad in zip(rows, spread, strict=True)])
            mask = torch.cat([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, spread, strict=True)])
            out = model(x, attention_mask=mask, use_cache=False).logits
            for row, expected, valid in zip(out, alone, mask.bool(), strict=True):
                close(row[valid], expected)
            for cut in (1, 4, 5, 11):  # also within the padding, and of nothing but padding
                first = model(x[:, :cut], attention_mask=mask[:, :cut])
                rest = model(x[:, cut:], attention_mask=mask, past_key_values=first.past_key_values)
                for i, expected in enumerate(alone):
                    close(torch.cat([first.logits[i], rest.logits[i]])[mask[i].bool()], expected)
    with pytest.raises(ValueError, match=r"attention_mask \(1, 1, 12, 12\) must be"):
        model(x[:1], attention_mask=torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match=r"attention_mask \(3, 5\) must be \(batch, 12 or more\)"):
        model(x, attention_mask=mask[:, :5])


def test_a_right_padded_row_goes_on_where_its_text_ended(build):
    model, x = build(), tokens(1, 20)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits[:, 9:]
        start = model(F.pad(x[:, :9], (0, 4), value=PAD), attention_mask=F.pad(torch.ones(1, 9), (0, 4)))
        close(model(x[:, 9:], past_key_values=start.past_key_values).logits, expected)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_are_separate(build, form):
    model = build(form)
    lengths = [9, 1, 14]
    documents = tokens(1, 24).split(lengths, 1)
    collate = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": d[0].tolist()} for d in documents])
    positions = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    with torch.no_grad():
        expected = torch.cat([model(d, use_cache=False).logits for d in documents], 1)
        by_borders = model(**batch)
        by_position = model(**positions)
        close(by_borders.logits, expected)
        close(by_position.logits, expected)
        assert by_position.past_key_values is None
        targets = torch.cat([F.pad(d[:, 1:], (0, 1), value=-100) for d in documents], 1)
        close(by_position.loss, F.cross_entropy(expected[0], targets[0]))
        two = model(positions["input_ids"].view(2, 12), position_ids=positions["position_ids"].view(2, 12)).logits
        cut = torch.cat([model(part).logits for part in tokens(1, 24).split([9, 1, 2, 12], 1)], 1)
        close(two.view(1, 24, -1), cut)
        with pytest.raises(ValueError, match="pass no cache"):
            model(**batch, past_key_values=DynamicCache(config=model.config))


def test_packed_training_equals_padded_training(build):
    rows = [tokens(n, seed=n) for n in (5, 11, 8)]
    grads = []
    for packed in (True, False):
        model = copy.deepcopy(build("paper")).train()
        if packed:
            batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": r.tolist()} for r in rows])
        else:
            x = torch.stack([F.pad(r, (0, 11 - len(r)), value=PAD) for r in rows])
            batch = dict(input_ids=x, attention_mask=(x != PAD).long(), labels=x.masked_fill(x == PAD, -100))
        loss = model(**batch).loss
        loss.backward()
        grads.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_generate(build, form):
    model, x = build(form), tokens(1, 12)
    options = dict(max_new_tokens=14, do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    greedy = model.generate(x, **options)
    with torch.no_grad():
        assert torch.equal(model(greedy).logits[:, 11:-1].argmax(-1), greedy[:, 12:])
    assert torch.equal(model.generate(x, use_cache=False, **options), greedy)
    assert torch.equal(model.generate(x, cache_implementation="static", disable_compile=True, **options), greedy)
    both = torch.cat([F.pad(x, (5, 0), value=PAD), tokens(1, 17, seed=4)])
    mask = (torch.arange(17) >= torch.tensor([[5], [0]])).long()
    for cache in ("dynamic", "static"):
        out = model.generate(both, attention_mask=mask, cache_implementation=cache, **options, disable_compile=True)
        assert torch.equal(out[0, 5:], greedy[0]), cache
    beams = model.generate(x, num_beams=3, num_return_sequences=2, **options)
    assert torch.equal(model.generate(x, num_beams=3, num_return_sequences=2, use_cache=False, **options), beams)
    cache = DynamicCache(config=model.config)
    start = model.generate(x, past_key_values=cache, **options | dict(max_new_tokens=6))
    assert torch.equal(model.generate(start, past_key_values=cache, **options | dict(max_new_tokens=8)), greedy)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(x, prompt_lookup_num_tokens=3, **options)


@pytest.mark.parametrize("form", ["paper", "convolution"])
def test_compiled_decoding_step(build, form):
    model, x = build(form), tokens(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        model(x[:, :10], past_key_values=cache)
        memory = cache.layers[0].states["state"].data_ptr()
        for t in range(10, 20):
            with torch.compiler.set_stance("default" if t < 12 else "fail_on_recompile"):
                out = compiled(x[:, t : t + 1], past_key_values=cache, position_ids=torch.tensor([[t]])).logits
            close(out[:, 0], expected[:, t])
    assert cache.layers[0].states["state"].data_ptr() == memory


def test_memory_per_token_does_not_grow_and_the_state_cannot_be_rewound(build):
    model = build("convolution")
    cache, sizes = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in tokens(2, 60).split(20, 1):
            model(part, past_key_values=cache)
            sizes.append(sum(t.numel() for layer in cache.layers for t in layer.states.values()))
    assert len(set(sizes)) == 1
    state, convolution = 2 * 4 * 8, 3 * (16 + 8 + 16)  # key/value heads x key x value channels; inputs still in reach
    assert sizes[0] == 2 * (2 * (state + convolution) + 1)  # layers x (rows x ... + length)
    with pytest.raises(NotImplementedError, match="rewound"):
        cache.crop(-1)
    used = DynamicCache()
    used.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="already holds"):
        model(tokens(1, 4), past_key_values=used)


@pytest.mark.parametrize("form", FORMS)
def test_save_and_load_through_auto_classes(build, form, tmp_path):
    model, x = build(form), tokens(2, 15)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is GLAForCausalLM
    assert not any(info.values()), info
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is GLAModel
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x, output_hidden_states=True)
        assert torch.equal(again(x).logits, expected.logits)
        assert torch.equal(body(x).last_hidden_state, expected.hidden_states[-1])
        out = half(x)
    assert len(expected.hidden_states) == 3
    assert out.logits.dtype == torch.bfloat16
    assert out.past_key_values.layers[0].states["state"].dtype == torch.float32
    assert (out.logits.float() - expected.logits).norm() < 0.1 * expected.logits.norm()


def test_fresh_weights():
    """Made on the meta device and filled afterwards, as `from_pretrained` does for what a checkpoint lacks."""
    torch.manual_seed(0)
    fields = config(use_short_conv=True, initializer_range=0.02, hidden_size=64, intermediate_size=96)
    model = GLAForSequenceClassification._from_config(fields)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif "bias" in name:
            assert (p == 0).all(), name
        else:
            assert 0.015 < p.std() < 0.025, name


def test_gradient_checkpointing_and_gradients_reach_all_weights(build):
    x, grads = tokens(2, 20), []
    for checkpointing in (False, True):
        model = copy.deepcopy(build("convolution")).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert all(layer.gradient_checkpointing == checkpointing for layer in model.model.layers)
        model(x, labels=x).loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_loss_and_kept_logits(build):
    model, x = build(), tokens(2, 10)
    with torch.no_grad():
        full = model(x, labels=x)
        close(full.loss, F.cross_entropy(full.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
        close(model(x, labels=x, num_items_in_batch=9).loss, full.loss * 18 / 9)
        close(model(x, logits_to_keep=1).logits, full.logits[:, -1:])
        index = torch.tensor([0, 4])
        close(model(x, logits_to_keep=index).logits, full.logits[:, index])
        close(model(x, logits_to_keep=index[:, None]).logits, full.logits[[0, 1], index][:, None])
        chosen = torch.rand(2, 10) < 0.5
        close(model(x, logits_to_keep=chosen).logits, full.logits[chosen])
        embeds = model.get_input_embeddings()(x)
        close(model(inputs_embeds=embeds).logits, full.logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(x, inputs_embeds=embeds)


def test_embeddings_are_tied_and_resized(build):
    model = copy.deepcopy(build())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before, x = model(tokens(1, 6)).logits, tokens(1, 6)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model.lm_head.weight is model.model.embed_tokens.weight
    close(model(x).logits[..., :64], before)
    assert model(x).logits.shape[-1] == 70
    loose = GLAForCausalLM(config(tie_word_embeddings=False))
    assert loose.lm_head.weight is not loose.model.embed_tokens.weight


def test_sequence_classification_reads_the_last_token(build, tmp_path):
    torch.manual_seed(0)
    model = GLAForSequenceClassification(config(num_labels=5)).eval()
    rows = [tokens(1, n, seed=n) for n in (4, 9)]
    labels = torch.tensor([1, 3])
    with torch.no_grad():
        expected = torch.cat([model.score(model.model(row).last_hidden_state[:, -1]) for row in rows])
        for pad in ((5, 0), (0, 5)):
            x = torch.cat([F.pad(rows[0], pad, value=PAD), rows[1]])
            out = model(x, attention_mask=(x != PAD).long(), labels=labels)
            close(out.logits, expected)
            close(out.loss, F.cross_entropy(expected, labels))
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is GLAForSequenceClassification
    with torch.no_grad():
        assert torch.equal(again(x, attention_mask=(x != PAD).long()).logits, out.logits)


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()])
def test_trainer_runs(build, collator, tmp_path):
    model = copy.deepcopy(build())
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    result = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)
    assert result.train().training_loss > 0
    assert result.evaluate()["eval_loss"] > 0
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


FLA_FORMS = {
    "default": {},
    "tied": dict(tie_word_embeddings=True, clamp_min=-0.1),
    "grouped": dict(num_kv_heads=2, use_short_conv=True),
    "7B": dict(num_kv_heads=1, expand_k=1, feature_map="relu", use_output_gate=False),
}


def fla_config(**fields):
    """As flash-linear-attention 0.6.0 writes it, in the fields that matter and some that do not."""
    sizes = dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, norm_eps=1e-5, initializer_range=0.02
    )
    defaults = dict(
        num_kv_heads=None, expand_k=0.5, expand_v=1.0, hidden_ratio=4, intermediate_size=None, hidden_act="swish"
    )
    extra = dict(attn_mode="chunk", fuse_norm=True, use_gk=True, use_gv=False, attn=None, max_position_embeddings=2048)
    switches = dict(use_output_gate=True, use_short_conv=False, tie_word_embeddings=False, elementwise_affine=True)
    return dict(model_type="gla") | sizes | defaults | extra | switches | fields


def fla_weights(fields):
    """Random weights with the names and shapes of its modules."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=g) * 0.2

    width, inner = fields["hidden_size"], 256
    keys, values = int(width * fields["expand_k"]), int(width * fields["expand_v"])
    share = fields["num_heads"] // (fields["num_kv_heads"] or fields["num_heads"])
    weights = {"model.embeddings.weight": draw(fields["vocab_size"], width), "model.norm.weight": draw(width)}
    if not fields["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(fields["vocab_size"], width)
    for i in range(fields["num_hidden_layers"]):
        layer = {
            "attn_norm.weight": draw(width),
            "attn.q_proj.weight": draw(keys, width),
            "attn.k_proj.weight": draw(keys // share, width),
            "attn.v_proj.weight": draw(values // share, width),
            "attn.gk_proj.0.weight": draw(16, width),
            "attn.gk_proj.1.weight": draw(keys // share, 16),
            "attn.gk_proj.1.bias": draw(keys // share),
            "attn.o_proj.weight": draw(width, values),
            "mlp_norm.weight": draw(width),
            "mlp.gate_proj.weight": draw(inner, width),
            "mlp.up_proj.weight": draw(inner, width),
            "mlp.down_proj.weight": draw(width, inner),
        }
        norm = "g_norm_swish_gate" if fields["use_output_gate"] else "g_norm"
        layer[f"attn.{norm}.weight"] = draw(values // fields["num_heads"])
        if fields["use_output_gate"]:
            layer["attn.g_proj.weight"] = draw(values, width)
        if fields["use_short_conv"]:
            for name, size in (("q", keys), ("k", keys // share), ("v", values // share)):
                layer[f"attn.{name}_conv1d.weight"] = draw(size, 1, 4)
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return weights


def save_fla(folder, fields, weights):
    (folder / "config.json").write_text(json.dumps(fields))
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, folder / f"model-0000{number + 1}-of-00002.safetensors")


@pytest.mark.parametrize("form", FLA_FORMS)
def test_import_from_fla(form, tmp_path):
    fields = fla_config(**FLA_FORMS[form])
    weights = fla_weights(fields)
    save_fla(tmp_path, fields, weights)
    model = from_fla(tmp_path)
    assert (model.config.rms_norm_eps, model.config.intermediate_size) == (1e-5, 256)
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embeddings.weight"])
    mixer, prefix = model.model.layers[1].mixer, "model.layers.1.attn."
    assert torch.equal(mixer.decay_up_proj.bias, weights[prefix + "gk_proj.1.bias"])
    assert torch.equal(mixer.k_proj.weight, weights[prefix + "k_proj.weight"])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (form == "tied")
    assert model.num_parameters() == sum(w.numel() for w in weights.values())  # each has its place
    if form == "grouped":
        x = torch.randn(1, 9, 16 + 8 + 16)
        expected = [
            F.silu(
                F.conv1d(F.pad(part.mT, (3, 0)), weights[f"{prefix}{name}_conv1d.weight"], groups=part.shape[-1])
            ).mT
            for name, part in zip("qkv", x.split([16, 8, 16], -1), strict=True)
        ]
        close(mixer.conv(x)[0], torch.cat(expected, -1))
    with torch.no_grad():
        logits = model(tokens(1, 10)).logits
        model.save_pretrained(tmp_path / "ours")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(tokens(1, 10)).logits, logits)
        half = from_fla(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {half.config.dtype} == {torch.bfloat16}


def test_import_from_the_hub(tmp_path, monkeypatch):
    fields = fla_config()
    save_fla(tmp_path, fields, fla_weights(fields))
    asked = {}
    monkeypatch.setattr(
        import_fla, "snapshot_download", lambda name, **kwargs: asked.update(kwargs, name=name) or tmp_path
    )
    model = from_fla("somebody/gla", revision="v1")
    assert type(model) is GLAForCausalLM
    assert (asked["name"], asked["revision"]) == ("somebody/gla", "v1")
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_fla_defaults_are_theirs():
    model = map_fla_config({"model_type": "gla"})
    assert (model.hidden_size, model.intermediate_size, model.tie_word_embeddings) == (2048, 5632, False)
    assert (model.num_hidden_layers, model.vocab_size, model.num_attention_heads) == (24, 32000, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(model_type="gsa"), "expected .* 'gla'.*, got 'gsa'"),
        (dict(use_gv=True), "use_gv True is not supported: only False"),
        (dict(attn={"layers": [0], "num_heads": 2}), "attn {'layers'.*} is not supported"),
        (dict(hidden_act="powlu"), "hidden_act 'powlu' is not supported: only 'swish' and 'silu'"),
        (dict(elementwise_affine=False), "elementwise_affine False"),
        (dict(attnres_block_size=4), "attnres_block_size 4"),
    ],
)
def test_fla_configurations_that_cannot_be_imported(fields, message):
    with pytest.raises(ValueError, match=message):
        map_fla_config(fla_config(**fields))


def test_fla_checkpoints_that_cannot_be_imported(tmp_path):
    fields = fla_config()
    weights = fla_weights(fields)
    with pytest.raises(ValueError, match="needs config.json and .*pickled weights are refused"):
        from_fla(tmp_path)
    with pytest.raises(ValueError, match="1 weights have no place .*: model.layers.0.attn.gv_proj.weight"):
        map_fla_state_dict(weights | {"model.layers.0.attn.gv_proj.weight": torch.zeros(1)})
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_fla(tmp_path, fields, weights)
    with pytest.raises(ValueError, match=r"1 weights .* \(model.layers.1.mlp.up_proj.weight: missing\)"):
        from_fla(tmp_path)
    save_fla(tmp_path, fields | dict(hidden_ratio=20), fla_weights(fields))
    with pytest.raises(ValueError, match=r"6 weights .* \(256, 32\), expected \(512, 32\)"):
        from_fla(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FLA_FORMS)
def test_import_computes_what_fla_computes(form, tmp_path):
    """Against the package itself: up to 64 tokens it runs token by token, beyond in chunks with TF32 products."""
    fla = pytest.importorskip("fla.models")
    # a large eps, as the norm of a small output would magnify TF32 errors
    sizes = dict(
        vocab_size=128, hidden_size=256, num_hidden_layers=2, num_heads=2, initializer_range=0.1, norm_eps=1e-2
    )
    fields = sizes | dict(fuse_cross_entropy=False) | FLA_FORMS[form]
    if "num_kv_heads" in fields:
        fields |= dict(num_heads=4)
    torch.manual_seed(0)
    theirs = fla.GLAForCausalLM(fla.GLAConfig(**fields))
    with torch.no_grad():
        for p in theirs.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
    theirs.save_pretrained(tmp_path)
    theirs, ours = theirs.cuda(), from_fla(tmp_path).cuda()

    def error(a, b):
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    for time, tolerance in ((50, 1e-4), (300, 5e-3)):
        x = torch.randint(3, 128, (2, time), device="cuda")
        grads = []
        for model in (theirs, ours):
            model.zero_grad()
            logits = model(x, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
            grads.append((logits, {name: p.grad for name, p in model.named_parameters()}))
        (expected, their_grads), (logits, our_grads) = grads
        assert error(logits, expected) < tolerance
        mapped = map_fla_state_dict(their_grads)
        for name, grad in our_grads.items():
            assert error(grad, mapped[name]) < 4 * tolerance, (time, name)
        with torch.no_grad():
            half = [copy.deepcopy(model).bfloat16()(x, use_cache=False).logits for model in (ours, theirs)]
        assert error(*half) < 5e-2
