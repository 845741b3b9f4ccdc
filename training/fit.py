"""What pretraining and fine-tuning share: open the run folder, train, evaluate, and leave everything in it."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import PartialState
from transformers import EvalPrediction, PrinterCallback, TrainingArguments

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.configuration_vit_scratch import POOLINGS_OF_CLASS_TOKEN
from modeling_vit_scratch.errors_vit_scratch import InputError
from training import checkpoints, figures, run_folder
from training.arguments import (
    FinetuneRecipe,
    PixelArguments,
    PretrainRecipe,
)
from training.callbacks import Interrupted, ProgressBar, ending_resumably
from training.conversion import CONVERSION_FILE
from training.data import ImageDataset, LabelledImages
from training.evaluation import (
    accuracy_line,
    num_decoding_processes,
    predict_logits,
    stack_images,
)
from training.image_tensors import EvaluationImages, TrainingImages
from training.metrics import class_probabilities, evaluate_predictions
from training.parsing import dump_recipe
from training.resume import changes_at_resume, check_length, check_same_data
from training.stream import micro_batch_size
from training.trainer import ViTTrainer

__all__ = ["fit", "given"]

logger = logging.getLogger(__name__)

Recipe = PretrainRecipe | FinetuneRecipe


def given(group: PixelArguments) -> dict[str, Any]:
    """Returns the fields that the recipe names."""
    return {name: value for name, value in asdict(group).items() if value is not None}


def fit(
    recipe: Recipe,
    *,
    verb: str,
    model: ViTScratchForImageClassification,
    processor: ViTScratchImageProcessor,
    dataset: ImageDataset,
    checkpoint: Path | None,
    conversion: dict[str, Any] | None = None,
) -> Path:
    """Returns the run folder, complete: the model trained, evaluated and described.

    `conversion` says what a start from another code's checkpoint was converted from; it is put into the folder.

    Raises:
        Interrupted: after SIGTERM or SIGINT; a checkpoint to resume from was saved.
    """
    folder = Path(str(recipe.run.output_dir))
    _check_splits(recipe, dataset)
    is_main = PartialState().is_main_process
    with _all_or_nothing(folder) if is_main and not recipe.run.resume else nullcontext():
        trainer = _trainer(recipe, verb, model, processor, dataset)
        if checkpoint is not None:
            check_same_data(recipe, dataset, folder)
            check_length(checkpoint, trainer.args.max_steps)
        if is_main:
            _open_folder(recipe, verb, dataset, checkpoint)
            if conversion is not None:
                run_folder.write_json(folder / CONVERSION_FILE, conversion)
        trainer.fit(None if checkpoint is None else str(checkpoint))
    if trainer.stop_requests.stopped:
        trainer.accelerator.end_training()
        raise Interrupted(
            f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}, as asked; the same command "
            f"with --resume goes on from there"
        )
    with ending_resumably("training is done; the same command with --resume evaluates and exports"):
        _finish(recipe, verb, trainer, processor, dataset, folder)
    trainer.accelerator.end_training()
    return folder


def _finish(
    recipe: Recipe,
    verb: str,
    trainer: ViTTrainer,
    processor: ViTScratchImageProcessor,
    dataset: ImageDataset,
    folder: Path,
) -> None:
    """Evaluates and exports the trained model, and puts what is known of the run beside it."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    evaluation = _evaluate(model, processor, dataset, folder, num_workers=num_decoding_processes(recipe.data))
    if not PartialState().is_main_process:
        return
    _export(model, processor, folder)
    state = asdict(trainer.state)
    if state["best_model_checkpoint"] is not None:
        state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
    run_folder.write_json(folder / run_folder.TRAINER_STATE_FILE, state)
    curves = folder / run_folder.FIGURES_FOLDER / "learning_curves.png"
    figures.draw_learning_curves(trainer.state.log_history, curves, title=verb)
    run_folder.write_json(folder / run_folder.ENVIRONMENT_FILE, run_folder.describe_environment())
    metrics = {"evaluation": evaluation, "training": trainer.training_figures()}
    run_folder.write_json(folder / run_folder.METRICS_FILE, metrics)
    if evaluation is not None:
        print(accuracy_line(evaluation))
    print(folder)


def _check_splits(recipe: Recipe, dataset: ImageDataset) -> None:
    name = dataset.description["dataset"]
    if dataset.train is None:
        raise InputError(f"{name} has no training split")
    if recipe.run.eval_steps is not None and dataset.validation is None:
        raise InputError(
            f"eval_steps={recipe.run.eval_steps}: {name} has no validation split; carve one with validation_fraction, "
            f"or leave eval_steps out"
        )


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """Makes the run folder, and takes back what is put there if the run fails before there is a checkpoint."""
    existed = folder.exists()
    run_folder.prepare_output_dir(folder)
    try:
        yield
    except BaseException:
        if folder.is_dir() and not any(folder.glob("checkpoint-*")):
            for name in (run_folder.RECIPE_FILE, run_folder.DATA_FILE, CONVERSION_FILE):
                (folder / name).unlink(missing_ok=True)
            for empty in (folder / run_folder.FIGURES_FOLDER, *([] if existed else [folder])):
                with suppress(OSError):
                    empty.rmdir()
        raise


def _open_folder(recipe: Recipe, verb: str, dataset: ImageDataset, checkpoint: Path | None) -> None:
    """Writes and prints the effective recipe; that of a resumed run says what was changed, and when."""
    folder = Path(str(recipe.run.output_dir))
    recipe_file = folder / run_folder.RECIPE_FILE
    notes: list[str] = []
    if recipe.run.resume:
        notes = [line for line in recipe_file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        step = "the start" if checkpoint is None else checkpoint.name
        notes += [f"# changed at {step}: {change}" for change in changes_at_resume(recipe, recipe_file, verb).values()]
    (folder / run_folder.FIGURES_FOLDER).mkdir(exist_ok=True)
    settled = replace(recipe, run=replace(recipe.run, resume=False, allow_changed=None))
    text = "".join(f"{line}\n" for line in notes) + f"verb: {verb}\n{dump_recipe(settled)}"
    print(text, end="", file=sys.stderr)
    with run_folder.replace_file(recipe_file) as incomplete:
        incomplete.write_text(text, encoding="utf-8")
    run_folder.write_json(folder / run_folder.DATA_FILE, dataset.description)


def _trainer(
    recipe: Recipe,
    verb: str,
    model: ViTScratchForImageClassification,
    processor: ViTScratchImageProcessor,
    dataset: ImageDataset,
) -> ViTTrainer:
    optimization, train = recipe.optimization, cast(LabelledImages, dataset.train)
    if optimization.activation_checkpointing:
        # By the method: it was renamed within transformers 5, and the field of TrainingArguments with it.
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    trainer = ViTTrainer(
        model=model,
        args=_training_arguments(recipe, num_samples=len(train)),
        optimization=optimization,
        train_dataset=TrainingImages(train, processor, recipe.augmentation, seed=optimization.seed),
        eval_dataset=None if dataset.validation is None else EvaluationImages(dataset.validation, processor),
        processing_class=processor,
        data_collator=stack_images,
        compute_metrics=_validation_metrics,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressBar(verb))
    return trainer


def _num_steps(recipe: Recipe, num_samples: int) -> int:
    optimization = recipe.optimization
    if optimization.max_steps is not None:
        return optimization.max_steps
    num_epochs = cast(float, optimization.num_train_epochs)  # one of the two is given
    return math.ceil(num_epochs * num_samples / optimization.global_batch_size)


def _training_arguments(recipe: Recipe, *, num_samples: int) -> TrainingArguments:
    optimization, run = recipe.optimization, recipe.run
    max_steps = _num_steps(recipe, num_samples)
    if optimization.warmup_steps >= max_steps:
        logger.warning(
            "warmup_steps=%d: the learning rate never reaches its peak in %d steps",
            optimization.warmup_steps,
            max_steps,
        )
    world_size = PartialState().num_processes
    micro_batch = micro_batch_size(optimization.global_batch_size, world_size, optimization.per_device_batch_size)
    return TrainingArguments(
        output_dir=str(run.output_dir),
        max_steps=max_steps,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=optimization.global_batch_size // (micro_batch * world_size),
        learning_rate=optimization.learning_rate,
        max_grad_norm=optimization.max_grad_norm or 0.0,
        bf16=optimization.bf16,
        seed=optimization.seed,
        logging_steps=run.logging_steps,
        logging_nan_inf_filter=False,  # it hides what the update gate must see, and waits for the device twice a step
        eval_strategy="no" if run.eval_steps is None else "steps",
        eval_steps=run.eval_steps,
        save_strategy="steps",
        save_steps=run.save_steps,
        save_total_limit=run.save_total_limit,
        load_best_model_at_end=run.load_best_model_at_end,
        metric_for_best_model="accuracy",
        dataloader_num_workers=num_decoding_processes(recipe.data),
        remove_unused_columns=False,
        disable_tqdm=True,  # ProgressBar is ours
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )


def _validation_metrics(prediction: EvalPrediction) -> dict[str, float]:
    logits = np.asarray(prediction.predictions)
    return {"accuracy": float((logits.argmax(axis=1) == prediction.label_ids).mean())}


def _evaluate(
    model: ViTScratchForImageClassification,
    processor: ViTScratchImageProcessor,
    dataset: ImageDataset,
    folder: Path,
    *,
    num_workers: int,
) -> dict[str, Any] | None:
    """The "evaluation" block of metrics.json; predictions and pictures go to the run folder."""
    images = dataset.test if dataset.test is not None else dataset.validation
    if images is None:
        logger.warning("no test split and no validation split: the model is not evaluated")
        return None
    logits = predict_logits(model, processor, images, batch_size=64, num_workers=num_workers)
    if not PartialState().is_main_process:
        return None
    probabilities = class_probabilities(logits, model.config.problem_type)
    evaluation = evaluate_predictions(
        logits,
        images.labels,
        dataset.class_names,
        problem_type=model.config.problem_type,
        split=images.name,
    )
    run_folder.write_predictions(
        folder / run_folder.PREDICTIONS_FILE,
        sample_ids=images.sample_ids,
        labels=images.labels,
        probabilities=probabilities,
    )
    figures_folder = folder / run_folder.FIGURES_FOLDER
    figures.draw_confusion_matrix(
        evaluation["confusion_matrix"], dataset.class_names, figures_folder / "confusion_matrix.png"
    )
    gallery = figures_folder / "attention_rollout.png"
    _draw_gallery(model, processor, images, probabilities, dataset.class_names, gallery)
    return evaluation


def _export(model: ViTScratchForImageClassification, processor: ViTScratchImageProcessor, folder: Path) -> None:
    """Puts the model and its processor at the top of the run folder, each file whole or not at all."""
    aside = folder / "unfinished-export"
    with checkpoints.writing_to_disk(aside):
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside)
        processor.save_pretrained(aside)
        for path in sorted(aside.iterdir()):
            os.replace(path, folder / path.name)
        aside.rmdir()


@torch.inference_mode()
def _draw_gallery(
    model: ViTScratchForImageClassification,
    processor: ViTScratchImageProcessor,
    images: LabelledImages,
    probabilities: np.ndarray,
    class_names: list[str],
    path: Path,
) -> None:
    rows = figures.choose_gallery_rows(images.labels, probabilities)
    pixel_values = torch.stack([EvaluationImages(images, processor)[row]["pixel_values"] for row in rows])
    outputs = model(pixel_values=pixel_values.to(model.device), output_attentions=True)
    patch_height, patch_width = model.config.patch_height_width
    maps = figures.attention_rollout(
        outputs.attentions,
        num_prefix_tokens=model.config.num_prefix_tokens,
        grid_size=(pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width),
        from_class_token=model.config.pooling in POOLINGS_OF_CLASS_TOKEN,
    )
    captions = [
        figures.Caption(
            truth=class_names[images.labels[row]],
            prediction=class_names[probabilities[row].argmax()],
            probability=float(probabilities[row].max()),
        )
        for row in rows
    ]
    shown = [_displayed(processor, images.read(row)) for row in rows]
    figures.draw_attention_rollout(shown, list(maps.cpu().numpy()), captions, path)


def _displayed(processor: ViTScratchImageProcessor, image: Any) -> np.ndarray:
    """The image (H, W, 3) uint8 as the model saw it, before normalisation."""
    pixels = processor.resize(processor.decode(image))
    if pixels.is_floating_point():
        pixels = (pixels * 255).round().to(torch.uint8)
    return pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()
