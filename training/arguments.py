"""The fields of a recipe. A YAML line and a flag are read by the same typed parser; a flag beats the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = [
    "AugmentationArguments",
    "DataArguments",
    "EvaluateRecipe",
    "FinetuneRecipe",
    "NetworkArguments",
    "OptimizationArguments",
    "PixelArguments",
    "PretrainRecipe",
    "RunArguments",
    "StartArguments",
    "flat",
]

# Imports neither torch nor transformers, so that --help answers at once.


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _check(arguments: Any, names: str, holds: Callable[[Any], bool], condition: str) -> None:
    for name in names.split():
        value = getattr(arguments, name)
        if value is not None and not holds(value):
            raise ValueError(f"{name}={value} must be {condition}")


@dataclass(frozen=True, kw_only=True)
class NetworkArguments:
    """The network to pretrain; fields left out are the variant's."""

    variant: str | None = _option(None, "named shape such as Ti/16, S/16, B/16, L/32, H/14, R50+B/16")
    image_size: int | list[int] | None = _option(None, "pixels: one number, or height and width")
    patch_size: int | list[int] | None = _option(None, "pixels: one number, or height and width")
    num_channels: int | None = _option(None, "3 for colour, 1 for grey")
    hidden_size: int | None = _option(None, "width of the tokens")
    num_hidden_layers: int | None = _option(None, "number of layers")
    num_attention_heads: int | None = _option(None, "number of attention heads")
    intermediate_size: int | None = _option(None, "width of the MLP blocks")
    hidden_act: str | None = _option(None, "activation of the MLP blocks")
    mlp_type: Literal["mlp", "swiglu"] | None = _option(None, "two layers, or SwiGLU (with hidden_act: silu)")
    qk_norm: bool | None = _option(None, "LayerNorm on queries and keys")
    layer_scale_init: float | None = _option(None, "initial LayerScale factor; left out: no LayerScale")
    stem_depths: list[int] | None = _option(None, "units in each stage of a ResNet stem; hybrids")
    position_embedding_type: Literal["none", "learned_1d", "learned_2d", "sincos_2d", "relative", "rope_2d"] | None = (
        _option(None, "paper D.4, and rotary")
    )
    position_embedding_placement: Literal["stem", "every_layer", "every_layer_shared"] | None = _option(
        None, "where positions are added (paper D.4)"
    )
    use_class_token: bool | None = _option(None, "left out: where pooling reads it")
    num_register_tokens: int | None = _option(None, "tokens that no head reads")
    pooling: Literal["class_token", "mean", "attention", "class_token_and_mean"] | None = _option(
        None, "what the classifier reads"
    )
    final_norm: Literal["before_pooling", "after_pooling"] | None = _option(None, "where the last LayerNorm stands")
    representation_size: int | None = _option(None, "width of the tanh layer before the head (paper: hidden_size)")
    hidden_dropout_prob: float | None = _option(None, "dropout of the four sites of the paper")
    attention_probs_dropout_prob: float | None = _option(None, "dropout of the attention probabilities")
    drop_path_rate: float | None = _option(None, "stochastic depth of the last layer; linear from 0 at the first")
    patch_dropout_rate: float | None = _option(None, "share of the patches dropped in training")
    head_bias_init: float | None = _option(None, "initial bias of the classifier (paper, ImageNet-21k: -10)")
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = _option(
        None, "softmax, or one sigmoid a class as the paper's ImageNet-21k runs"
    )


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """The checkpoint a fine-tuning starts from, and what is changed of it."""

    model_name_or_path: str | None = _option(None, "checkpoint, of ours or another code: folder, file or Hub repo")
    revision: str | None = _option(None, "branch, tag or commit of a Hub checkpoint")
    image_size: int | list[int] | None = _option(None, "pixels to fine-tune at; positions are resampled")
    hidden_dropout_prob: float | None = _option(None, "dropout while fine-tuning")
    new_head: bool = _option(True, "replace the whole head by a zero-initialised linear layer (paper section 3.2)")


@dataclass(frozen=True, kw_only=True)
class PixelArguments:
    """What the image processor does; fields left out are the processor's, or its defaults."""

    resize_mode: Literal["squash", "shorter", "pad", "none"] | None = _option(None, "how an image gets its size")
    crop_pct: float | None = _option(None, "share of the resized image that the centre crop of `shorter` keeps")
    image_mean: list[float] | None = _option(None, "a channel, of pixels in 0..1")
    image_std: list[float] | None = _option(None, "a channel, of pixels in 0..1")


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Where the images come from and how they are split."""

    dataset_name: str | None = _option(None, "digits, or the id of a dataset on the Hub")
    dataset_config_name: str | None = _option(None, "configuration of a Hub dataset")
    dataset_revision: str | None = _option(None, "branch, tag or commit of a Hub dataset")
    data_dir: str | None = _option(None, "folder of images in class folders, or of idx files (MNIST format)")
    image_column: str | None = _option(None, "column of a Hub dataset; inferred if there is one image column")
    label_column: str | None = _option(None, "column of a Hub dataset; inferred if there is one label column")
    classes: list[str] | None = _option(None, "keep these classes only, in this order")
    validation_fraction: float = _option(0.0, "share of the training images held out if no validation split is given")
    test_fraction: float = _option(0.0, "share of the given training images held out if no test split is given")
    split_seed: int = _option(0, "seed of the splits; apart from `seed`, so that seeds can be compared")
    on_broken_image: Literal["raise", "skip"] = _option("raise", "what happens to files that cannot be decoded")
    dataloader_num_workers: int | None = _option(None, "processes that decode; default: one a core")

    def __post_init__(self) -> None:
        _check(self, "validation_fraction test_fraction", lambda value: 0 <= value < 1, "in [0, 1)")
        _check(self, "split_seed", lambda value: 0 <= value < 2**32, "in 0..2**32-1")
        _check(self, "dataloader_num_workers", lambda value: value >= 0, "0 or more")
        if self.dataset_name is not None and self.data_dir is not None:
            raise ValueError(f"dataset_name={self.dataset_name} and data_dir={self.data_dir}: give one of the two")


@dataclass(frozen=True, kw_only=True)
class AugmentationArguments:
    """Random changes of the training images; a function of seed, epoch and sample id alone."""

    crop_scale_min: float | None = _option(None, "smallest area of the random resized crop (paper: 0.05)")
    crop_padding: int | None = _option(None, "pixels to pad before a random crop of the full size")
    horizontal_flip: bool = _option(False, "mirror half of the images")
    rotation_degrees: float = _option(0.0, "largest rotation; 0 for none")
    randaugment_num_layers: int = _option(0, "operations of RandAugment an image; 0 for none")
    randaugment_magnitude: int = _option(10, "strength of RandAugment, 0..30")
    random_erasing: float = _option(0.0, "probability of erasing a random rectangle; 0 for none")

    def __post_init__(self) -> None:
        _check(self, "crop_scale_min", lambda value: 0 < value <= 1, "in (0, 1]")
        _check(self, "crop_padding", lambda value: value >= 0, "0 or more")
        _check(self, "randaugment_num_layers rotation_degrees", lambda value: value >= 0, "0 or more")
        _check(self, "randaugment_magnitude", lambda value: 0 <= value <= 30, "in 0..30")
        _check(self, "random_erasing", lambda value: 0 <= value <= 1, "in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class OptimizationArguments:
    """Optimizer, schedule and length. The global batch size is the recipe's; devices and accumulation follow."""

    optimizer: Literal["adamw", "sgd"] = _option("adamw", "adamw, or sgd with momentum (paper fine-tuning)")
    learning_rate: float = _option(1e-3, "peak learning rate")
    weight_decay: float = _option(0.0, "decoupled, times the learning rate; on matrices only")
    adam_beta1: float = _option(0.9, "decay of AdamW's first moment")
    adam_beta2: float = _option(0.999, "decay of AdamW's second moment")
    momentum: float = _option(0.9, "momentum of SGD")
    max_grad_norm: float | None = _option(None, "clip the global gradient norm to this; none: no clipping")
    lr_scheduler_type: Literal["cosine", "linear"] = _option("cosine", "decay to 0, or linearly to 1e-5 (paper)")
    warmup_steps: int = _option(0, "steps of linear warm-up")
    max_steps: int | None = _option(None, "length in steps; or give num_train_epochs")
    num_train_epochs: float | None = _option(None, "length in passes over the training images; or give max_steps")
    global_batch_size: int = _option(512, "images a step, over all devices")
    per_device_batch_size: int | None = _option(None, "most images a device takes at once; the rest is accumulated")
    activation_checkpointing: bool = _option(False, "recompute activations in the backward pass to save memory")
    bf16: bool = _option(False, "autocast to bfloat16; weights stay in float32")
    seed: int = _option(0, "seed of initialisation, order, augmentation and dropout")

    def __post_init__(self) -> None:
        _check(self, "learning_rate", lambda value: value > 0, "above 0")
        _check(self, "weight_decay warmup_steps", lambda value: value >= 0, "0 or more")
        _check(self, "seed", lambda value: 0 <= value < 2**32, "in 0..2**32-1")
        _check(self, "adam_beta1 adam_beta2 momentum", lambda value: 0 <= value < 1, "in [0, 1)")
        _check(self, "max_grad_norm num_train_epochs", lambda value: value > 0, "above 0, or none")
        _check(self, "max_steps global_batch_size per_device_batch_size", lambda value: value >= 1, "1 or more")
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise ValueError("the length of training is missing or given twice: set max_steps or num_train_epochs")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Where the run goes, what it keeps, and how it goes on."""

    output_dir: str | None = _option(None, "the run folder")
    resume: bool = _option(False, "go on from the newest checkpoint in output_dir")
    allow_changed: list[str] | None = _option(None, "fields that may differ from the run that is resumed")
    logging_steps: int = _option(10, "steps between log lines")
    eval_steps: int | None = _option(None, "steps between evaluations on the validation split; none: no evaluation")
    save_steps: int = _option(500, "steps between checkpoints")
    save_total_limit: int = _option(2, "checkpoints kept")
    load_best_model_at_end: bool = _option(False, "end with the checkpoint of the best validation accuracy")

    def __post_init__(self) -> None:
        _check(self, "logging_steps eval_steps save_steps save_total_limit", lambda value: value >= 1, "1 or more")
        if self.load_best_model_at_end and (self.eval_steps is None or self.save_steps % self.eval_steps):
            raise ValueError(
                f"load_best_model_at_end needs eval_steps, and save_steps={self.save_steps} a multiple of "
                f"eval_steps={self.eval_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class PretrainRecipe:
    """A network from its initialisation."""

    network: NetworkArguments
    pixels: PixelArguments
    data: DataArguments
    augmentation: AugmentationArguments
    optimization: OptimizationArguments
    run: RunArguments


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """A checkpoint on other images, classes or resolution."""

    start: StartArguments
    pixels: PixelArguments
    data: DataArguments
    augmentation: AugmentationArguments
    optimization: OptimizationArguments
    run: RunArguments


@dataclass(frozen=True, kw_only=True)
class EvaluationArguments:
    """What is evaluated, and where the figures go."""

    model_name_or_path: str | None = _option(None, "model, of ours or another code: folder, file or Hub repo")
    revision: str | None = _option(None, "branch, tag or commit of a Hub model")
    split: Literal["train", "validation", "test"] = _option("test", "split to evaluate on")
    batch_size: int = _option(64, "images at once")
    output_dir: str | None = _option(None, "folder for metrics.json and predictions.parquet; none: print only")

    def __post_init__(self) -> None:
        _check(self, "batch_size", lambda value: value >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class EvaluateRecipe:
    """A model on a split of a dataset."""

    evaluation: EvaluationArguments
    data: DataArguments


def flat(recipe: Any) -> dict[str, Any]:
    """Returns all fields of a recipe by name."""
    return {
        option.name: getattr(getattr(recipe, group.name), option.name)
        for group in fields(recipe)
        for option in fields(getattr(recipe, group.name))
    }
