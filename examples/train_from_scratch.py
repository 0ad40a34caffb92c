# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Trains a GLA or Latte language model from scratch with `Trainer`, and its tokenizer.

    python examples/train_from_scratch.py --architecture gla --data TEXT --output my-gla
    python examples/train_from_scratch.py --architecture latte --data TEXT --output my-latte

TEXT is what `hf-linattn convert --data` takes: text files, folders of them, JSON lines, each plain or gzipped, or the name of
a dataset. The default shape trains in minutes without a GPU. The papers' models, GLA of 340M parameters (on as many devices as
make a batch of 256 rows) and Latte Macchiato of 156M (80 rows):

    accelerate launch examples/train_from_scratch.py --architecture gla --data TEXT --output my-gla --vocab 32000 \
        --hidden 1024 --layers 24 --length 2048 --batch 32 --lr 3e-4 --steps 28600
    accelerate launch examples/train_from_scratch.py --architecture latte --data TEXT --output my-latte --vocab 50257 \
        --hidden 768 --layers 12 --heads 8 --length 1024 --batch 80 --lr 6e-4 --steps 100000

The result loads with `AutoModelForCausalLM` after `import hf_linattn`.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from train_teacher import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, Trainer, TrainingArguments, set_seed

from hf_linattn import GLAConfig, LatteConfig
from hf_linattn.conversion.data import read_documents, rows, token_stream

FEW = 20  # documents: of so many or more one in twenty is held out, of fewer the last twentieth of each
EVAL_ROWS = 256  # measured at most


def hold_out(documents: list[str]) -> tuple[list[str], list[str]]:
    """Splits documents into those to train on and a twentieth to measure on."""
    if len(documents) >= FEW:
        return [text for i, text in enumerate(documents, 1) if i % FEW], documents[FEW - 1 :: FEW]
    ends = [len(text) - len(text) // FEW for text in documents]
    cut = list(zip(documents, ends, strict=True))
    return [text[:end] for text, end in cut], [text[end:] for text, end in cut]


def make_config(args: argparse.Namespace, tokenizer) -> PreTrainedConfig:
    """The configuration of the architecture and shape that were asked for."""
    fields = dict(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if args.architecture == "gla":
        return GLAConfig(**fields)
    return LatteConfig.variant(args.variant, intermediate_size=4 * args.hidden, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=("gla", "latte"), required=True)
    parser.add_argument(
        "--variant", default="Latte-RGLRU-SWA++", help="of Latte, a name that LatteConfig.variant knows"
    )
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--eval-data", nargs="+", help="default: a twentieth of --data, which is held out then")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", help="reuse this one instead of training one")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="rows per device")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name a new folder")
    set_seed(args.seed)
    texts = [text for source in args.data for text in read_documents(source)]
    if args.eval_data:
        held_out = [text for source in args.eval_data for text in read_documents(source)]
    else:
        texts, held_out = hold_out(texts)
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(texts, args.vocab, args.length)
    train_rows, eval_rows = (
        [{"input_ids": row, "labels": row} for row in rows(token_stream(part, tokenizer), args.length)[:most]]
        for part, most in ((texts, None), (held_out, EVAL_ROWS))
    )
    model = AutoModelForCausalLM.from_config(make_config(args, tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(train_rows)} rows to train on, {len(eval_rows)} held out")

    arguments = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        learning_rate=args.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.steps // 30,
        weight_decay=0.01,
        adam_beta2=0.95,
        bf16=torch.cuda.is_available(),
        dataloader_drop_last=True,
        logging_steps=max(1, args.steps // 10),
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(model, arguments, train_dataset=train_rows, eval_dataset=eval_rows, processing_class=tokenizer)
    before = math.exp(trainer.evaluate()["eval_loss"])
    figures = trainer.train().metrics
    after = math.exp(trainer.evaluate()["eval_loss"])
    trainer.save_model()  # and the tokenizer
    report = {
        "perplexity_before": round(before, 2),
        "perplexity": round(after, 2),
        "seconds": figures["train_runtime"],
    }
    print(json.dumps(report))

    prompt = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    sample = model.eval().generate(
        prompt.input_ids, attention_mask=prompt.attention_mask, max_new_tokens=80, do_sample=True, top_p=0.9
    )
    print(tokenizer.decode(sample[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
