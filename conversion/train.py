# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Train only the new weights of a converted model: layer by layer against the teacher, then end to end."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_linattn.models.retrofit.modeling_retrofit import build_teacher

from .recipe import Align, Distil

NEW_WEIGHTS = "new_weights.safetensors"
WARMUP = 0.05  # share of the steps
SAVES = 5  # checkpoints in a stage


class _Bar(TrainerCallback):
    """One progress bar on standard error; standard output belongs to results."""

    def __init__(self, name: str, show: bool):
        self.name, self.show = name, show

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.name, disable=not self.show)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(1)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.4f}")

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class _NewWeightsTrainer(Trainer):
    """A `Trainer` whose checkpoints hold the new weights only; subclasses say what the loss is."""

    name: str

    def __init__(self, model: PreTrainedModel, settings: Align | Distil, **kwargs):
        super().__init__(model=model, **kwargs)
        self.settings = settings
        self.teacher = build_teacher(model)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: p.detach().cpu() for name, p in self.accelerator.unwrap_model(self.model).new_parameters().items()
        }
        save_file(weights, folder / NEW_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        parameters = self.accelerator.unwrap_model(model or self.model).new_parameters()
        with torch.no_grad():
            for name, value in load_file(Path(resume_from_checkpoint) / NEW_WEIGHTS).items():
                parameters[name].copy_(value)


class AlignTrainer(_NewWeightsTrainer):
    """Each converted layer against the teacher's own output of that layer, on the teacher's own inputs to it."""

    name = "align"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        body = self.accelerator.unwrap_model(model).model
        seen: dict[int, tuple[dict, torch.Tensor]] = {}

        def remember(index: int):
            def hook(module, args, kwargs, output):
                seen[index] = kwargs, output[0]

            return hook

        layers = self.model.config.converted_layers
        hooks = [
            self.teacher.model.layers[i].self_attn.register_forward_hook(remember(i), with_kwargs=True) for i in layers
        ]
        with torch.no_grad():
            self.teacher.model(inputs["input_ids"], use_cache=False)
        for hook in hooks:
            hook.remove()
        # A smaller window at random: the long-range path has to supply what the window otherwise explains.
        window = self.model.config.linattn_window
        if float(torch.rand(())) < self.settings.window_dropout:
            window = int(torch.randint(1, window + 1, ()))
        losses = []
        with self.accelerator.unwrap_model(model).linattn_variant(window=window):
            arguments = body.variant_arguments()
            for index, (call, target) in seen.items():
                output, _ = body.layers[index].self_attn(**{**call, "attention_mask": None}, **arguments)
                difference = (output - target).float().pow(2).mean()
                losses.append(difference / target.float().pow(2).mean().clamp(min=1e-12))
        loss = torch.stack(losses).mean()
        return (loss, {}) if return_outputs else loss


class DistilTrainer(_NewWeightsTrainer):
    """Divergence from the teacher's next-token distribution, and the next-token loss itself."""

    name = "distil"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = inputs["input_ids"]
        logits = model(tokens, use_cache=False).logits[:, :-1].float()
        student = F.log_softmax(logits, dim=-1).flatten(0, 1)
        loss = student.new_zeros(())
        if self.settings.kl_weight:
            with torch.no_grad():
                target = F.log_softmax(self.teacher(tokens, use_cache=False).logits[:, :-1].float(), dim=-1).flatten(
                    0, 1
                )
            loss = loss + self.settings.kl_weight * F.kl_div(student, target, log_target=True, reduction="batchmean")
        if self.settings.lm_weight:
            loss = loss + self.settings.lm_weight * F.nll_loss(student, tokens[:, 1:].flatten())
        return (loss, {}) if return_outputs else loss


def freeze_base(model: PreTrainedModel) -> None:
    """Leave only the new weights trainable."""
    model.requires_grad_(False)
    for parameter in model.new_parameters().values():
        parameter.requires_grad_(True)


def _last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint; `trainer_state.json` is written last, so a killed save lacks a whole one."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]), reverse=True):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
            return str(checkpoint)
        except (OSError, ValueError):
            continue
    return None


def _train(trainer_class, model, stream, settings, folder, seed, progress, resume) -> dict:
    if settings.steps == 0:
        return {"steps": 0, "tokens": 0, "loss": None}
    length = min(settings.length, len(stream))
    rows = stream[: len(stream) // length * length].view(-1, length)
    folder = Path(folder)
    freeze_base(model)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, int(settings.steps * WARMUP)),
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=max(1, settings.steps // SAVES),
        save_total_limit=2,
        logging_steps=max(1, settings.steps // 50),
        report_to="none",
        use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=model.device.type != "cpu",
        seed=seed,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model,
        settings,
        args=arguments,
        train_dataset=TensorDataset(rows),
        data_collator=lambda batch: {"input_ids": torch.stack([row for (row,) in batch])},
    )
    trainer.add_callback(_Bar(trainer.name, progress))
    was_training = model.training
    result = trainer.train(resume_from_checkpoint=_last_checkpoint(folder) if resume else None)
    model.train(was_training)
    steps = trainer.state.global_step
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": steps,
        "tokens": steps * settings.batch * length * max(1, arguments.world_size),
        "loss": result.training_loss,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
    }


def align(
    model: PreTrainedModel,
    stream: torch.Tensor,
    settings: Align,
    folder: str | Path,
    *,
    seed: int = 0,
    progress: bool = True,
    resume: bool = False,
) -> dict:
    """Fit each converted layer to the teacher's own output of that layer, all layers in one pass.

    The loss is the squared error relative to the output's size, averaged over layers, on the teacher's hidden states. In a
    share `window_dropout` of the steps the window is smaller, so that latents learn what the window otherwise explains.

    Args:
        model: converted model; its new weights are trained in place, everything else is frozen.
        stream: token ids, (N,).
        settings: steps, batch, length, learning rate, window dropout.
        folder: where checkpoints go.
        seed: of the order of rows and the windows.
        progress: show a progress bar.
        resume: go on from the last complete checkpoint in `folder`.

    Returns:
        Steps, tokens and losses.
    """
    return _train(AlignTrainer, model, stream, settings, folder, seed, progress, resume)


def distil(
    model: PreTrainedModel,
    stream: torch.Tensor,
    settings: Distil,
    folder: str | Path,
    *,
    seed: int = 0,
    progress: bool = True,
    resume: bool = False,
) -> dict:
    """Fit the whole model to the teacher's next-token distribution (and the text), new weights only.

    Arguments and result as in `align`; `settings` holds the weights of both losses.
    """
    return _train(DistilTrainer, model, stream, settings, folder, seed, progress, resume)
