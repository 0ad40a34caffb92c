# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What is GLA's alone, beside tests/test_models.py: the paper's formula and models, import from flash-linear-attention."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hf_linattn import GLAConfig, GLAForCausalLM
from hf_linattn.kernels.gated_linear_attention import gated_linear_attention_reference
from hf_linattn.models.gla import from_fla, import_fla, map_fla_config, map_fla_state_dict

from .model_cases import Case, build, close, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def test_defaults_are_the_papers_models():
    with torch.device("meta"):
        assert round(GLAForCausalLM(GLAConfig()).num_parameters() / 1e9, 3) == 0.342
        large = GLAForCausalLM(GLAConfig(hidden_size=2048, tie_word_embeddings=False))
    assert round(large.num_parameters() / 1e9, 3) == 1.366
    assert (large.config.intermediate_size, large.config.key_head_dim, large.config.value_head_dim) == (5632, 256, 512)


def test_mixer_is_the_papers_formula():
    """Sections 2.8 and 2.9 of the specification, written out in float64 over the recurrence."""
    mixer = copy.deepcopy(build(Case("gla", "grouped")).model.layers[0].mixer)
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


@pytest.fixture
def no_search(monkeypatch):
    """Triton's autotuners take the first of their configurations: that package's search for the fastest takes minutes."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    search = autotuner.run

    def run(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return search(self, *args, **kwargs)

    monkeypatch.setattr(autotuner, "run", run)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FLA_FORMS)
def test_import_computes_what_fla_computes(form, tmp_path, no_search):
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
