"""Every option of the network as a small model: each variant is what it changes in fixtures_modeling.TINY."""

from typing import Any

from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from torch import Tensor

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel

SWIGLU = {"mlp_type": "swiglu", "hidden_act": "silu"}

POSITIONS: dict[str, dict[str, Any]] = {
    "no positions": {"position_embedding_type": "none"},
    "learned 1-D": {},
    "learned 1-D without class token rows": {"class_token_position": False},
    "learned 1-D at every layer": {"position_embedding_placement": "every_layer"},
    "learned 1-D shared by all layers": {"position_embedding_placement": "every_layer_shared"},
    "learned 2-D": {"position_embedding_type": "learned_2d"},
    "learned 2-D at every layer": {
        "position_embedding_type": "learned_2d",
        "position_embedding_placement": "every_layer",
    },
    "learned 2-D shared by all layers": {
        "position_embedding_type": "learned_2d",
        "position_embedding_placement": "every_layer_shared",
    },
    "sin-cos": {"position_embedding_type": "sincos_2d"},
    "sin-cos at all layers": {
        "position_embedding_type": "sincos_2d",
        "position_embedding_placement": "every_layer_shared",
    },
    "relative": {"position_embedding_type": "relative"},
    "rotary": {"position_embedding_type": "rope_2d"},
    "rotary of another wavelength": {"position_embedding_type": "rope_2d", "rope_theta": 10.0},
    "bicubic positions": {"position_interpolation": "bicubic"},
    "bicubic positions with antialiasing": {"position_interpolation": "bicubic_antialias"},
}

HEADS: dict[str, dict[str, Any]] = {
    "pre-logits": {"representation_size": 16},
    "mean": {"pooling": "mean"},
    "mean beside a class token": {"pooling": "mean", "use_class_token": True},
    "mean with the norm after it": {"pooling": "mean", "final_norm": "after_pooling"},
    "attention pooling": {"pooling": "attention"},
    "attention pooling with a class token": {"pooling": "attention", "use_class_token": True},
    "class token and mean": {"pooling": "class_token_and_mean"},
    "sigmoid": {"problem_type": "multi_label_classification", "head_bias_init": -2.0},
}

TOKENS: dict[str, dict[str, Any]] = {
    "registers": {"num_register_tokens": 3},
    "distillation token": {"use_distillation_token": True},
    "distillation token and registers": {"use_distillation_token": True, "num_register_tokens": 2},
}

LAYERS: dict[str, dict[str, Any]] = {
    "no qkv bias": {"qkv_bias": False},
    "QK-norm": {"qk_norm": True},
    "SwiGLU": SWIGLU,
    "LayerScale": {"layer_scale_init": 0.1},
    "dropout": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "stochastic depth": {"drop_path_rate": 0.4},
    "patch dropout": {"patch_dropout_rate": 0.5},
}

INPUTS: dict[str, dict[str, Any]] = {
    "hybrid": {"stem_depths": [1, 1]},
    "root of a ResNet alone": {"stem_depths": []},
    "wider hybrid": {"stem_depths": [1], "stem_width_factor": 2},
    "grid that is not square": {"image_size": [32, 48]},
    "patches that are not square": {"patch_size": [8, 4]},
    "one channel": {"num_channels": 1},
}

COMBINATIONS: dict[str, dict[str, Any]] = {
    "registers and attention pooling": {"num_register_tokens": 3, "pooling": "attention"},
    "SwiGLU and QK-norm": {**SWIGLU, "qk_norm": True},
    "stochastic depth, patch dropout and relative positions": {
        "drop_path_rate": 0.4,
        "patch_dropout_rate": 0.5,
        "position_embedding_type": "relative",
    },
    "as DINOv2": {
        "layer_scale_init": 0.1,
        "num_register_tokens": 3,
        "pooling": "class_token_and_mean",
        "position_interpolation": "bicubic_antialias",
        "drop_path_rate": 0.4,
        **SWIGLU,
    },
    "as DINOv3": {
        "position_embedding_type": "rope_2d",
        "layer_scale_init": 0.1,
        "num_register_tokens": 3,
        "drop_path_rate": 0.4,
        "patch_dropout_rate": 0.5,
        "image_size": [32, 48],
    },
    "as AugReg's hybrid": {"stem_depths": [], "drop_path_rate": 0.4, "hidden_dropout_prob": 0.1},
}

VARIANTS = {**POSITIONS, **HEADS, **TOKENS, **LAYERS, **INPUTS, **COMBINATIONS}


def variant_classifier(name: str, **fields: Any) -> ViTScratchForImageClassification:
    """Returns the classifier of this variant, in evaluation mode, with randomized weights."""
    return tiny_classifier(**{**VARIANTS[name], **fields})


def variant_encoder(name: str, **fields: Any) -> ViTScratchModel:
    """Returns the encoder of this variant, in evaluation mode, with randomized weights."""
    return tiny_encoder(**{**VARIANTS[name], **fields})


def variant_pixels(name: str, batch: int = 2) -> Tensor:
    """Returns (batch, C, H, W) of the variant's own size."""
    config = tiny_config(**VARIANTS[name])
    height, width = config.image_height_width
    return random_pixels(batch, height, width, config.num_channels)
