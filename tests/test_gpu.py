# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The same promises on a GPU: operators against their definitions, and a converted model end to end."""

import pytest
import torch
from transformers import AutoConfig

from hf_linattn import FAMILIES, GLAConfig, GLAForCausalLM, LatteConfig, LatteForCausalLM
from hf_linattn.kernels.gated_linear_attention import gated_linear_attention
from hf_linattn.kernels.latent_attention import latent_attention, latent_attention_reference
from hf_linattn.kernels.scan import linear_scan
from hf_linattn.kernels.sliding_window_attention import sliding_window_attention, sliding_window_attention_reference

pytestmark = pytest.mark.gpu
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


def draw(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda", dtype=torch.float64) * scale).to(dtype)


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("time", [1, 37, 200])
def test_latent_attention(dtype, tolerance, time):
    torch.manual_seed(time)
    tensors = dict(
        q=draw(2, time, 8, 16, dtype=dtype, scale=3),
        theta=draw(2, time, 4, 16, dtype=dtype, scale=3),
        v=draw(2, time, 4, 32, dtype=dtype),
        gate=draw(2, time, 8, dtype=dtype),
        gate_value=draw(2, time, 8, 32, dtype=dtype),
    )
    options = dict(use_mass=True, mass_length=20)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    exact = {n: t.double().requires_grad_() for n, t in tensors.items()}
    out, expected = latent_attention(**leaves, **options)[0], latent_attention_reference(**exact, **options)
    assert error(out, expected) < tolerance
    weight = torch.randn_like(expected)
    (out * weight.to(dtype)).sum().backward()
    (expected * weight.to(dtype).double()).sum().backward()
    for name in tensors:
        assert error(leaves[name].grad, exact[name].grad) < 3 * tolerance, name


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("time", [1, 37, 200])
def test_sliding_window_attention(dtype, tolerance, time):
    torch.manual_seed(time)
    q, k, v = draw(2, time, 8, 32, dtype=dtype), draw(2, time, 4, 32, dtype=dtype), draw(2, time, 4, 32, dtype=dtype)
    out, _, _ = sliding_window_attention(q, k, v, window=16, sinks=4, softcap=5.0)
    expected, _ = sliding_window_attention_reference(
        q.double(), k.double(), v.double(), window=16, sinks=4, softcap=5.0
    )
    assert error(out, expected) < tolerance


def test_linear_scan():
    torch.manual_seed(0)
    a, b = torch.rand(2, 300, 5, device="cuda"), torch.randn(2, 300, 5, device="cuda")
    expected, h = [], torch.zeros(2, 5, device="cuda", dtype=torch.float64)
    for t in range(300):
        h = a[:, t].double() * h + b[:, t].double()
        expected.append(h)
    assert error(linear_scan(a, b), torch.stack(expected, 1)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_converted_model(tiny_checkpoint, family):
    path = tiny_checkpoint(family)
    native = AutoConfig.from_pretrained(path).to_dict()
    ours = FAMILIES[family].config_class.from_dict(
        {k: v for k, v in native.items() if k not in ("model_type", "architectures")}
        | dict(linattn_window=8, linattn_sinks=2, linattn_latents=5, linattn_mass_length=16)
    )
    model = FAMILIES[family].causal_lm_class.from_pretrained(path, config=ours).eval().cuda()
    x = torch.randint(3, 250, (2, 40), device="cuda")
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        first = model(x[:, :17], use_cache=True)
        rest = model(x[:, 17:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), expected, rtol=0, atol=1e-4)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=2)
    greedy = model.generate(x[:1], **options)
    assert torch.equal(model.generate(x[:1], cache_implementation="static", **options), greedy)
    half = model.to(torch.bfloat16)
    with torch.no_grad():
        assert error(half(x, use_cache=False).logits, expected) < 5e-2


def decodes_as_it_reads(model):
    """Triton and PyTorch agree; prefill, decode in pieces and the compiled static cache agree with the parallel forward."""
    x = torch.randint(3, 250, (2, 150))
    with torch.no_grad():
        in_pytorch = model(x, use_cache=False).logits
        model, x = model.cuda(), x.cuda()
        expected = model(x, use_cache=False).logits
        first = model(x[:, :101], use_cache=True)
        second = model(x[:, 101:110], past_key_values=first.past_key_values)
        third = model(x[:, 110:], past_key_values=second.past_key_values).logits
    assert error(expected.cpu(), in_pytorch) < 1e-4
    torch.testing.assert_close(torch.cat([first.logits, second.logits, third], 1), expected, rtol=0, atol=1e-4)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=2)
    greedy = model.generate(x[:1], **options)
    assert torch.equal(model.generate(x[:1], cache_implementation="static", **options), greedy)


SIZES = dict(vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.1)


def test_gla_model():
    torch.manual_seed(0)
    decodes_as_it_reads(GLAForCausalLM(GLAConfig(**SIZES, eos_token_id=None)).eval())


@pytest.mark.parametrize("name", ["Latte++", "Latte-Conv-SWA++", "Latte-RGLRU-SWA++", "RGLRU-SWA++"])
def test_latte_model(name):
    torch.manual_seed(0)
    config = LatteConfig.variant(name, **SIZES, intermediate_size=512, bos_token_id=1, eos_token_id=None)
    decodes_as_it_reads(LatteForCausalLM(config).eval())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_models_may_be_spread_over_gpus():
    tensors = torch.randn(4, 1, 100, 2, 32).unbind()
    results = []
    for device in ("cuda:0", "cuda:1"):
        q, k, v, g = (x.to(device).requires_grad_() for x in tensors)
        out, state = gated_linear_attention(q, k, v, -g.abs())
        with torch.no_grad():
            step, _ = gated_linear_attention(q[:, :1], k[:, :1], v[:, :1], -g[:, :1].abs(), initial_state=state)
        results.append([out, step, *torch.autograd.grad(out.sum(), (q, k, v, g))])
    for first, second in zip(*results, strict=True):
        assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())
