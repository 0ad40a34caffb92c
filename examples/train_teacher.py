# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Trains a small Llama or Gemma 2 from scratch, with its tokenizer: a teacher that a laptop can convert.

The code teacher that the package carries was made on one H200, 20,000 steps in 6.5 minutes, by

    python examples/train_teacher.py --family llama --data stdlib PACKAGES --output code_teacher --minutes 6.5

where PACKAGES holds the .py files of sympy, networkx, torch, numpy and scipy without their tests. The standard library
alone (3.5M tokens) is learnt by heart, and text known by heart need not be copied; there use `--weight-decay 1`.

`--copy-fraction` of the rows hold a planted copy: a span of random tokens or of another row's text, that
comes twice. Without them a model of this size does not learn to copy, and one that cannot copy cannot show what
a conversion does to recall.
"""

import argparse
import gzip
import json
import math
import platform
import sysconfig
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

SPECIALS = ["<pad>", "<s>", "</s>"]  # ids 0, 1, 2
SUFFIXES = (".py", ".txt", ".txt.gz")
NOT_LIBRARY = {"test", "tests", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
WARMUP = 200
COPY_SPAN = (32, 256)
PLANTED_SPAN, PLANTED_ROWS = 64, 64
PLANTED_DISTANCES = (256, 512, 900)


def read_documents(sources: list[str]) -> dict[str, str]:
    """Texts by name, in sorted order, of files and folders (`.py`, `.txt`, `.txt.gz`) or of "stdlib".

    "stdlib" is the running Python's standard library without its tests. Raises ValueError if nothing is found.
    """
    documents = {}
    for source in sources:
        root = Path(sysconfig.get_path("stdlib") if source == "stdlib" else source)
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            name = path.relative_to(root if source == "stdlib" else root.parent).as_posix()
            if source == "stdlib" and (path.suffix != ".py" or NOT_LIBRARY & set(Path(name).parts)):
                continue
            if path.is_file() and path.name.endswith(SUFFIXES):
                data = path.read_bytes()
                text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
                if text.strip():
                    documents[name] = text
    if not documents:
        raise ValueError(f"no text in {sources}: name a folder or files that end in {', '.join(SUFFIXES)}, or stdlib")
    return documents


def train_tokenizer(texts: list[str], vocab_size: int, length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which any text survives; `<s>` comes before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, model_max_length=length
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """(tokens,) int64: the texts one after the other, each behind its `<s>`."""
    pieces = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([token for piece in pieces for token in (tokenizer.bos_token_id, *piece)])


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if args.family == "llama":
        return LlamaConfig(**sizes)
    return Gemma2Config(**sizes, query_pre_attn_scalar=args.head_dim, sliding_window=256)  # every second layer slides


def plant_copies(rows: torch.Tensor, fraction: float, vocab_size: int) -> torch.Tensor:
    """`fraction` of the rows (B, length) get a span that comes twice: random tokens or another row's text."""
    batch, length = rows.shape

    def uniform(low: int | torch.Tensor, high: int | torch.Tensor) -> torch.Tensor:
        return low + (torch.rand(batch, 1, device=rows.device) * (high - low + 1)).long()

    longest = min(COPY_SPAN[1], length // 4)
    span = uniform(min(COPY_SPAN[0], longest), longest)
    distance = uniform(span, length - span)
    start = uniform(0, length - span - distance)
    chosen, random = (torch.rand(batch, 1, device=rows.device) < p for p in (fraction, 0.5))
    position = torch.arange(length, device=rows.device)
    first = chosen & (position >= start) & (position < start + span)
    second = chosen & (position >= start + distance) & (position < start + distance + span)
    planted = torch.where(random, torch.randint_like(rows, len(SPECIALS), vocab_size), rows.roll(1, 0))
    rows = torch.where(first, planted, rows)
    return rows.gather(1, torch.where(second, position - distance, position))


def train(model: PreTrainedModel, stream: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Trains on random rows of `stream` (tokens,) until `--steps` or `--minutes`, whichever comes first."""
    device = model.device
    stream = stream.to(device)
    window = torch.arange(args.length, device=device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    began, step, progress, loss = time.monotonic(), 0, 0.0, None
    while progress < 1:
        rate = args.lr * min(1, (step + 1) / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = stream[torch.randint(len(stream) - args.length + 1, (args.batch, 1), device=device) + window]
        rows = plant_copies(rows, args.copy_fraction, model.config.vocab_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(rows, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seconds = time.monotonic() - began
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.3f} lr {rate:.2e} {seconds:.0f} s", flush=True)
        progress = max(step / args.steps, seconds / (60 * args.minutes))
    return {
        "steps": step,
        "tokens": step * args.batch * args.length,
        "final_train_loss": round(loss.item(), 4),
        "seconds": round(time.monotonic() - began, 1),
    }


@torch.no_grad()
def row_losses(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """(B, length - 1) nats in float32 on the CPU; the first token of a row is not scored."""
    losses = []
    for part in rows.split(16):
        part = part.to(model.device)
        logits = model(part, use_cache=False).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").cpu())
    return torch.cat(losses)


def perplexity(model: PreTrainedModel, stream: torch.Tensor, length: int) -> float:
    """exp(mean nats) over the non-overlapping rows of `length` tokens."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    return math.exp(row_losses(model, rows).double().mean().item())


def planted_repeats(
    model: PreTrainedModel, stream: torch.Tensor, spans: torch.Tensor, length: int, seed: int
) -> dict[str, dict[str, float]]:
    """Nats per token by distance on a span's first and second occurrence in rows of `stream` (tokens,).

    Each row gets one span, twice: 64 tokens of `spans` (tokens,), so that the row does not foretell it.
    """
    generator = torch.Generator().manual_seed(seed)
    inside, results = torch.arange(PLANTED_SPAN), {}

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (PLANTED_ROWS, 1), generator=generator)

    for distance in (d for d in PLANTED_DISTANCES if d + PLANTED_SPAN < length):
        rows = stream[draw(0, len(stream) - length + 1) + torch.arange(length)]
        planted = spans[draw(0, len(spans) - PLANTED_SPAN + 1) + inside]
        first = draw(1, length - distance - PLANTED_SPAN + 1) + inside
        rows = rows.scatter(1, first, planted).scatter(1, first + distance, planted)
        losses = row_losses(model, rows)
        nats = [losses.gather(1, where - 1).mean().item() for where in (first, first + distance)]
        results[str(distance)] = {"first": round(nats[0], 4), "second": round(nats[1], 4)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["llama", "gemma2"], default="llama")
    parser.add_argument("--data", nargs="+", required=True, help="files, folders, or stdlib")
    parser.add_argument("--eval-data", nargs="+", help="default: every 10th file of --data, which is held out then")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", help="reuse this folder's tokenizer instead of training one")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the rate decays to fit")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--copy-fraction", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--log-every", type=int, default=500)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name a new folder")

    train_documents = read_documents(args.data)
    if args.eval_data:
        held_out = read_documents(args.eval_data)
    else:
        held_out = {name: train_documents.pop(name) for name in list(train_documents)[9::10]}
    if len(held_out) < 2:
        parser.error(f"{len(held_out)} held-out files, but planted repeats need two: name more in --eval-data")
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(list(train_documents.values()), args.vocab, args.length)
    stream = encode(tokenizer, list(train_documents.values()))
    texts = list(held_out.values())
    eval_stream, eval_rows, eval_spans = (encode(tokenizer, part) for part in (texts, texts[::2], texts[1::2]))
    for name, tokens, least in [
        ("training", stream, args.length),
        ("held-out", eval_rows, args.length),
        ("held-out", eval_spans, PLANTED_SPAN),
    ]:
        if len(tokens) < least:
            parser.error(f"{len(tokens)} {name} tokens, fewer than {least}: give more text or a smaller --length")
    print(f"{len(train_documents)} files of {len(stream)} tokens, {len(held_out)} held out of {len(eval_stream)}")

    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    attention = "eager" if args.family == "gemma2" else "sdpa"  # Gemma 2's soft-cap exists in eager attention only
    torch.manual_seed(args.seed)
    config = build_config(args, tokenizer)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)
    figures = train(model, stream, args)
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    # What is reported is the checkpoint as a user loads it, rounded to bfloat16, computed in float32.
    model = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32, attn_implementation=attention)
    model = model.to(device).eval()
    generator = torch.Generator().manual_seed(args.seed)
    random_spans = torch.randint(len(SPECIALS), len(tokenizer), (100_000,), generator=generator)
    report = {
        "parameters": model.num_parameters(),
        "perplexity": {str(args.length): round(perplexity(model, eval_stream, args.length), 4)},
        "planted_repeats": {
            "held_out_text": planted_repeats(model, eval_rows, eval_spans, args.length, args.seed),
            "random_tokens": planted_repeats(model, eval_rows, random_spans, args.length, args.seed),
        },
        **figures,
        "train_tokens": len(stream),
        "held_out_tokens": len(eval_stream),
        "held_out_files": list(held_out),
        "settings": {
            name: getattr(args, name)
            for name in ("family", "batch", "length", "lr", "weight_decay", "copy_fraction", "seed")
        }
        | {"data": [Path(source).name for source in args.data], "device": device},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (args.output / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(
        json.dumps({key: report[key] for key in ("parameters", "perplexity", "planted_repeats", "steps", "seconds")})
    )


if __name__ == "__main__":
    main()
