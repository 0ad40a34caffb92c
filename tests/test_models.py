# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Promises of every architecture from scratch: decodes as it computes in parallel, pads, packs, generates, saves, trains."""

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

from .model_cases import ARCHITECTURES, CASES, PAD, build, case_config, close, make_config, perturbed, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

CAUSAL = [case for case in CASES if case.is_causal]
DEFAULTS = [case for case in CASES if case.variant == case.row.default]


def cases(chosen):
    return pytest.mark.parametrize("case", chosen, ids=str)


def states_are_float32(case, cache):
    names = case.row.float32_states(build(case).config)
    return all(layer.states[name].dtype == torch.float32 for layer in cache.layers for name in names)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (name, fields, message)
        for name, row in ARCHITECTURES.items()
        for fields, message in [
            (dict(num_hidden_layers=0), "num_hidden_layers must be at least 1, got 0"),
            (dict(hidden_size="wide"), "hidden_size"),
            *row.bad_configurations,
        ]
    ],
)
def test_bad_configurations(architecture, fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        make_config(architecture, **fields)


@cases(CAUSAL)
def test_every_split_of_a_prompt_equals_the_parallel_forward(case):
    model, x = build(case), tokens(2, 24)
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
    assert states_are_float32(case, cache)


@cases(CASES)
def test_padding_changes_nothing(case):
    model = build(case)
    lengths, longest = [7, 12, 1], 12
    rows = [tokens(1, n, seed=n) for n in lengths]
    with torch.no_grad():
        alone = [model(row, use_cache=False).logits[0] for row in rows]
        for side in ("left", "right"):
            spread = [(longest - n, 0) if side == "left" else (0, longest - n) for n in lengths]
            x = torch.cat([F.pad(row, pad, value=PAD) for row, pad in zip(rows, spread, strict=True)])
            mask = torch.cat([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, spread, strict=True)])
            for options in ({}, dict(use_cache=False)):
                out = model(x, attention_mask=mask, **options).logits
                for row, expected, valid in zip(out, alone, mask.bool(), strict=True):
                    close(row[valid], expected)
            for cut in (1, 4, 5, 11) if case.is_causal else ():  # also within the padding, and of nothing but padding
                first = model(x[:, :cut], attention_mask=mask[:, :cut])
                rest = model(x[:, cut:], attention_mask=mask, past_key_values=first.past_key_values)
                for i, expected in enumerate(alone):
                    close(torch.cat([first.logits[i], rest.logits[i]])[mask[i].bool()], expected)
    with pytest.raises(ValueError, match=r"attention_mask \(1, 1, 12, 12\) must be"):
        model(x[:1], attention_mask=torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match=r"attention_mask \(3, 5\) must be \(batch, 12 or more\)"):
        model(x, attention_mask=mask[:, :5])


@cases([case for case in CAUSAL if case.variant in case.row.pads_inside])
def test_a_right_padded_row_goes_on_where_its_text_ended(case):
    model, x = build(case), tokens(1, 20)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits[:, 9:]
        start = model(F.pad(x[:, :9], (0, 4), value=PAD), attention_mask=F.pad(torch.ones(1, 9), (0, 4)))
        close(model(x[:, 9:], past_key_values=start.past_key_values).logits, expected)


@cases(CASES)
def test_packed_documents_are_separate(case):
    model = build(case)
    documents = tokens(1, 24).split([9, 1, 14], 1)
    collate = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": d[0].tolist()} for d in documents])
    positions = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
    with torch.no_grad():
        expected = torch.cat([model(d, use_cache=False).logits for d in documents], 1)
        close(model(**batch).logits, expected)
        by_position = model(**positions)
        close(by_position.logits, expected)
        assert "past_key_values" not in by_position
        first = 1 if case.is_causal else 0  # a causal model predicts the next token; no model that of another document
        targets = [F.pad(d[:, 1:], (1 - first, first), value=-100) for d in documents]
        close(by_position.loss, F.cross_entropy(expected[0], torch.cat(targets, 1)[0]))
        two = model(positions["input_ids"].view(2, 12), position_ids=positions["position_ids"].view(2, 12)).logits
        cut = torch.cat([model(part).logits for part in tokens(1, 24).split([9, 1, 2, 12], 1)], 1)
        close(two.view(1, 24, -1), cut)

        mask = torch.tensor([[0] + [1] * 23])
        if case.row.pads_packed:
            shorter = torch.cat([model(documents[0][:, 1:]).logits, expected[:, 9:]], 1)
            close(model(**batch, attention_mask=mask).logits[:, 1:], shorter)
        else:
            with pytest.raises(ValueError, match="pass no cache and no attention_mask with them"):
                model(**batch, attention_mask=mask)
        if case.is_causal:
            with pytest.raises(ValueError, match="pass no cache"):
                model(**batch, past_key_values=DynamicCache(config=model.config))


@cases(CASES)
def test_packed_training_equals_padded_training(case):
    rows = [tokens(n, seed=n) for n in (5, 11, 8)]
    grads = []
    for packed in (True, False):
        model = copy.deepcopy(build(case)).train()
        if packed:
            batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": r.tolist()} for r in rows])
        else:
            x = torch.stack([F.pad(r, (0, 11 - len(r)), value=PAD) for r in rows])
            labels = x.masked_fill(x == PAD, -100)
            labels[:, 0] = -100  # as the collator has it
            batch = dict(input_ids=x, attention_mask=(x != PAD).long(), labels=labels)
        loss = model(**batch).loss
        loss.backward()
        grads.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@cases(CAUSAL)
def test_generate(case):
    model, x = build(case), tokens(1, 12)
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


@cases([case for case in CAUSAL if case.variant in case.row.compiled])
def test_compiled_decoding_step(case):
    model, x = build(case), tokens(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)

    def memory():
        return [{name: state.data_ptr() for name, state in layer.states.items()} for layer in cache.layers]

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        model(x[:, :10], past_key_values=cache)
        before = memory()
        for t in range(10, 20):
            with torch.compiler.set_stance("default" if t < 12 else "fail_on_recompile"):
                out = compiled(x[:, t : t + 1], past_key_values=cache, position_ids=torch.tensor([[t]])).logits
            close(out[:, 0], expected[:, t])
    assert memory() == before


@cases(CAUSAL)
def test_memory_per_token_does_not_grow_and_the_state_cannot_be_rewound(case):
    model = build(case)
    cache, sizes = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in tokens(2, 60).split([1, 19, 40], 1):
            model(part, past_key_values=cache)
            sizes.append(sum(t.numel() for layer in cache.layers for t in layer.states.values()))
    size = 2 * (2 * case.row.state_sizes[case.variant] + 1)  # layers x (rows x ... + length)
    assert sizes == [size] * 3
    with pytest.raises(NotImplementedError, match="rewound"):
        cache.crop(-1)
    used = DynamicCache()
    used.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="already holds"):
        model(tokens(1, 4), past_key_values=used)


@cases(CASES)
def test_save_and_load_through_auto_classes(case, tmp_path):
    row, model = case.row, build(case)
    x = tokens(
        2, 15, seed=3
    )  # where no head's output is so small that GLA's norm of it magnifies what bfloat16 rounds
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if case.is_causal else AutoModelForMaskedLM
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is case.language_model
    assert not any(info.values()), info
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is row.model
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x, output_hidden_states=True)
        close(again(x).logits, expected.logits, row.reload_tolerance)
        close(body(x).last_hidden_state, expected.hidden_states[-1], row.reload_tolerance)
        out = half(x)
    assert len(expected.hidden_states) == 3
    assert out.logits.dtype == torch.bfloat16
    assert (out.logits.float() - expected.logits).norm() < 0.1 * expected.logits.norm()
    wide = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, _ in half.named_parameters() if name.endswith(row.float32_weights)}
    if case.is_causal:
        assert states_are_float32(case, out.past_key_values)


@pytest.mark.parametrize(
    ("architecture", "fields", "spreads"),
    [(name, fields, spreads) for name, row in ARCHITECTURES.items() for fields, spreads in row.fresh],
)
def test_fresh_weights(architecture, fields, spreads):
    """Made on the meta device and filled afterwards, as `from_pretrained` does for what a checkpoint lacks."""
    row = ARCHITECTURES[architecture]
    sizes = dict(hidden_size=64, intermediate_size=96, initializer_range=0.02)
    torch.manual_seed(0)
    model = row.classifier._from_config(make_config(architecture, **sizes | fields))
    for name, p in model.named_parameters():
        name = name.removesuffix(".weight")
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif not name.endswith(row.fresh_elsewhere):
            expected = next((spread for part, spread in spreads.items() if part in name), 0.02)
            assert 0.8 * expected < p.std() < 1.2 * expected, name


@cases(CASES)
def test_gradient_checkpointing_and_gradients_reach_all_weights(case):
    x, grads = tokens(2, 20), []
    for checkpointing in (False, True):
        model = copy.deepcopy(build(case)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert all(layer.gradient_checkpointing == checkpointing for layer in model.model.layers)
        model(x, labels=x).loss.backward()
        idle = {name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0}
        parts = case.row.idle_weights.get(case.variant, ())
        assert idle == {name for name, _ in model.named_parameters() if any(part in name for part in parts)}
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@cases(CASES)
def test_mixed_precision_training(case):
    model, x = copy.deepcopy(build(case)).train(), tokens(1, 20)
    borders = torch.tensor([0, 7, 20], dtype=torch.int32)
    for options in ({}, dict(cu_seq_lens_q=borders)):
        expected = model(x, labels=x, **options)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, labels=x, **options)
        out.loss.backward()
        assert (out.logits.float() - expected.logits).norm() < 0.1 * expected.logits.norm()
        if "past_key_values" in out:
            assert states_are_float32(case, out.past_key_values)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


@cases(DEFAULTS)
def test_loss_and_kept_logits(case):
    model, x = build(case), tokens(2, 10)
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(2, 10, generator=g) < 0.5
    with torch.no_grad():
        full = model(x, labels=x)
        if case.is_causal:
            close(full.loss, F.cross_entropy(full.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
            close(model(x, labels=x, num_items_in_batch=9).loss, full.loss * 18 / 9)
            close(model(x, logits_to_keep=1).logits, full.logits[:, -1:])
            index = torch.tensor([0, 4])
            close(model(x, logits_to_keep=index).logits, full.logits[:, index])
            close(model(x, logits_to_keep=index[:, None]).logits, full.logits[[0, 1], index][:, None])
            close(model(x, logits_to_keep=chosen).logits, full.logits[chosen])
        else:
            out = model(x, labels=x.masked_fill(~chosen, -100))
            close(out.loss, F.cross_entropy(out.logits[chosen], x[chosen]))
        embeds = model.get_input_embeddings()(x)
        close(model(inputs_embeds=embeds).logits, full.logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(x, inputs_embeds=embeds)


@cases(DEFAULTS)
def test_embeddings_are_tied_and_resized(case):
    model, x = copy.deepcopy(build(case)), tokens(1, 6)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model(x).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model.lm_head.weight is model.model.embed_tokens.weight
    close(model(x).logits[..., :64], before)
    assert model(x).logits.shape[-1] == 70
    loose = perturbed(type(model), case_config(case, tie_word_embeddings=False))
    assert loose.lm_head.weight is not loose.model.embed_tokens.weight


@cases(CASES)
def test_sequence_classification(case, tmp_path):
    row = case.row
    model = perturbed(row.classifier, case_config(case, num_labels=5))
    rows = [tokens(1, n, seed=n) for n in (4, 9)]
    labels = torch.tensor([1, 3])
    with torch.no_grad():
        expected = torch.cat([model.score(row.pooled(model.model(x).last_hidden_state)) for x in rows])
        close(model(rows[0]).logits, expected[:1])
        for pad in ((5, 0), (0, 5)):
            x = torch.cat([F.pad(rows[0], pad, value=PAD), rows[1]])
            out = model(x, attention_mask=(x != PAD).long(), labels=labels)
            close(out.logits, expected)
            close(out.loss, F.cross_entropy(expected, labels))
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is row.classifier
    with torch.no_grad():
        close(again(x, attention_mask=(x != PAD).long()).logits, out.logits, row.reload_tolerance)


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()], ids=["rows", "packed"])
@cases(DEFAULTS)
def test_trainer_runs(case, collator, tmp_path):
    model = copy.deepcopy(build(case))
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True
    )
    result = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)
    assert result.train().training_loss > 0
    assert result.evaluate()["eval_loss"] > 0
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
