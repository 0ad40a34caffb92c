# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Trains Latte's variants, a softmax Transformer and a window without latents on the same tokens, and compares perplexities.

    python benchmarks/latte_language_modelling.py --data books/train --eval-data books/eval/766-david-copperfield.txt \
        --tokenizer books-llama --output benchmarks/data

One process per model and seed, shared out over the GPUs (or one after the other on the CPU). Each trains on rows of --length
tokens and is measured on the same held-out tokens in rows of 1 to 8 times that length. Prints a table and writes
latte_language_modelling.json and .png; README.md beside this file says what the figures mean.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_linattn import LatteConfig, LatteForCausalLM
from hf_linattn.conversion.data import read_documents, token_stream

# In the paper's order, worse to better; then what they are compared with.
VARIANTS = ("Latte", "Latte++", "Latte-Conv++", "Latte-RGLRU++", "Latte-Conv-SWA++", "Latte-RGLRU-SWA++")
CONTROLS = ("RGLRU-SWA++", "Transformer++")
FACTORS = (1, 2, 4, 8)  # of the trained length
BYTES = "bytes"


def build(name: str, args: argparse.Namespace, vocab: int) -> torch.nn.Module:
    fields = dict(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        use_cache=False,
        tie_word_embeddings=True,
    )
    if name == "Transformer++":
        return LlamaForCausalLM(LlamaConfig(**fields, max_position_embeddings=args.length * max(FACTORS)))
    return LatteForCausalLM(LatteConfig.variant(name, **fields))


def train(model: torch.nn.Module, tokens: torch.Tensor, args: argparse.Namespace, seed: int) -> float:
    """AdamW, linear warmup, cosine to 0; the last loss, averaged over a twentieth of the steps."""
    device = tokens.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    model.train()
    for step in range(args.steps):
        share = min((step + 1) / args.warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share
        starts = torch.randint(len(tokens) - args.length - 1, (args.batch, 1), generator=generator)
        batch = tokens[(starts + torch.arange(args.length + 1)).to(device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses[-max(1, args.steps // 20) :]).mean().item()


@torch.no_grad()
def perplexity(model: torch.nn.Module, tokens: torch.Tensor, length: int, batch: int) -> float:
    """exp of the mean loss of every token but each row's first, over rows of `length` tokens."""
    model.eval()
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    total = 0.0
    for part in rows.split(max(1, batch)):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            logits = model(part).logits
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (rows.numel() - len(rows)))


def read_tokens(args: argparse.Namespace) -> dict:
    """Tokens to train on and to be measured on, and how many different ones there may be."""
    texts = [[t for d in data for t in read_documents(d)] for data in (args.data, args.eval_data)]
    if args.tokenizer == BYTES:
        streams, vocabulary = [as_bytes(t) for t in texts], 256
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        streams, vocabulary = [token_stream(t, tokenizer) for t in texts], len(tokenizer)
    return {"text": streams[0], "held_out": streams[1][: args.eval_tokens], "vocabulary": vocabulary}


def as_bytes(documents: list[str]) -> torch.Tensor:
    """UTF-8, a zero between documents."""
    return torch.frombuffer(bytearray("\0".join(documents).encode()), dtype=torch.uint8).long()


def run(name: str, seed: int, tokens: str, args: argparse.Namespace) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    read = torch.load(tokens)
    text, held_out = read["text"].to(device), read["held_out"].to(device)
    torch.manual_seed(seed)
    model = build(name, args, read["vocabulary"]).to(device)
    start = time.perf_counter()
    loss = train(model, text, args, seed)
    seconds = time.perf_counter() - start
    found = {
        factor * args.length: perplexity(model, held_out, factor * args.length, args.batch // factor)
        for factor in FACTORS
        if factor * args.length <= len(held_out)
    }
    return {
        "model": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": round(loss, 4),
        "seconds": round(seconds, 1),
        "perplexity": {length: round(value, 3) for length, value in found.items()},
    }


def table(results: list[dict]) -> str:
    """Mean over seeds of each model's perplexities, and the seeds' own at the trained length."""
    lengths = list(results[0]["perplexity"])
    lines = [
        "| model | parameters | " + " | ".join(f"at {n}" for n in lengths) + " | seeds |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    for name in dict.fromkeys(r["model"] for r in results):
        mine = [r for r in results if r["model"] == name]
        means = [statistics.mean(r["perplexity"][n] for r in mine) for n in lengths]
        seeds = ", ".join(f"{r['perplexity'][lengths[0]]:.2f}" for r in mine)
        lines.append(
            f"| {name} | {mine[0]['parameters'] / 1e6:.2f}M | "
            + " | ".join(f"{m:.2f}" for m in means)
            + f" | {seeds} |"
        )
    return "\n".join(lines)


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in dict.fromkeys(r["model"] for r in results):
        mine = [r["perplexity"] for r in results if r["model"] == name]
        lengths = [int(n) for n in mine[0]]
        means = [statistics.mean(p[n] for p in mine) for n in mine[0]]
        axes.plot(lengths, means, marker="o", label=name, linestyle="--" if name in CONTROLS else "-")
    axes.set(xscale="log", yscale="log", xlabel="tokens in a row", ylabel="held-out perplexity")
    axes.set_xticks(lengths, lengths)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    marks = [m * 10**n for n in range(-1, 5) for m in (1, 1.5, 2, 3, 4, 5, 7) if low <= m * 10**n <= high]
    axes.set_yticks(marks, [f"{x:g}" for x in marks])
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def write(report: dict, folder: Path) -> None:
    (folder / "latte_language_modelling.json").write_text(json.dumps(report, indent=1) + "\n")


def finish(report: dict, folder: Path) -> None:
    """Write, draw and print, models in the order of the paper."""
    order = [*VARIANTS, *CONTROLS]
    report["results"].sort(key=lambda r: (order.index(r["model"]), r["seed"]))
    write(report, folder)
    plot(report["results"], folder / "latte_language_modelling.png")
    print(table(report["results"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+")
    parser.add_argument("--eval-data", nargs="+")
    parser.add_argument("--tokenizer", help=f'folder or name on the Hub, or "{BYTES}"')
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=[*VARIANTS, *CONTROLS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-tokens", type=int, default=1 << 18)
    parser.add_argument(
        "--plot", nargs="+", type=Path, metavar="JSON", help="train nothing; join and draw these files of one setting"
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "SEED", "TOKENS"), help=argparse.SUPPRESS
    )  # a process of this program
    args = parser.parse_args(arguments)
    if args.one:
        name, seed, tokens = args.one
        print(json.dumps(run(name, int(seed), tokens, args)), flush=True)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    if args.plot:
        reports = [json.loads(file.read_text()) for file in args.plot]
        files = ", ".join(map(str, args.plot))
        if any(r["setting"] != reports[0]["setting"] for r in reports):
            parser.error(f"--plot: {files} are of different settings: join those of one")
        results = {(x["model"], x["seed"]): x for r in reports for x in r["results"]}
        if len(results) < sum(len(r["results"]) for r in reports):
            parser.error(f"--plot: {files} hold the same model and seed more than once: leave one of them out")
        finish(reports[0] | {"results": list(results.values())}, args.output)
        return 0
    if missing := [f"--{n.replace('_', '-')}" for n in ("data", "eval_data", "tokenizer") if not getattr(args, n)]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    folder = tempfile.TemporaryDirectory()
    tokens = Path(folder.name, "tokens.pt")
    torch.save(read_tokens(args), tokens)
    jobs = list(itertools.product(args.models, args.seeds))
    devices = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
    command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]

    def start(number: int) -> dict | None:
        name, seed = jobs[number]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }  # whatever this process imports
        environment |= {"CUDA_VISIBLE_DEVICES": visible[number % devices]} if devices else {}
        one = [*command, "--one", name, str(seed), str(tokens)]
        done = subprocess.run(one, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            print(f"{name} with seed {seed} failed with exit code {done.returncode}", file=sys.stderr)
            return None
        return json.loads(done.stdout.splitlines()[-1])

    kept = ("hidden", "layers", "heads", "length", "batch", "steps", "warmup", "lr", "eval_tokens")
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if devices else "cpu",
        "torch": torch.__version__,
        "setting": {"tokenizer": Path(args.tokenizer).name, **{name: getattr(args, name) for name in kept}},
    }
    results = {}
    with ThreadPoolExecutor(len(jobs) if devices else 1) as pool:
        waiting = {pool.submit(start, number): number for number in range(len(jobs))}
        for future in as_completed(waiting):
            if future.result() is not None:
                results[waiting[future]] = future.result()
                report["results"] = [results[number] for number in sorted(results)]
                write(report, args.output)
                print(future.result(), file=sys.stderr)
    folder.cleanup()
    if not results:
        return 1
    finish(report, args.output)
    return int(len(results) < len(jobs))


if __name__ == "__main__":
    sys.exit(main())
