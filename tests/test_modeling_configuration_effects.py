"""No field of the config is without effect: for each, two values and what they change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_config
from torch import Tensor, nn

from modeling_vit_scratch import (
    ViTScratchBackbone,
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedAutoencoding,
    ViTScratchForMaskedPatchPrediction,
    ViTScratchModel,
)

Observation = Callable[[ViTScratchConfig], Any]


def numbers(tensor: Tensor) -> list[float]:
    return tensor.detach().flatten().tolist()


def seeded(model: nn.Module, training: bool = False) -> nn.Module:
    """Returns the model with `randomize`d weights, about to draw the same numbers."""
    randomize(model)
    torch.manual_seed(0)
    return model.train(training)


def model_output(config: ViTScratchConfig) -> list[float]:
    """On another grid than the config's."""
    return numbers(seeded(ViTScratchModel(config))(random_pixels(height=64)).pooler_output)


def training_output(config: ViTScratchConfig) -> list[float]:
    return numbers(seeded(ViTScratchModel(config), training=True)(random_pixels()).pooler_output)


def weight_shape(name: str, model_class: type[nn.Module] = ViTScratchForImageClassification) -> Observation:
    def shape(config: ViTScratchConfig) -> list[int] | None:
        weight = model_class(config).state_dict().get(name)
        return None if weight is None else list(weight.shape)

    return shape


def loss(config: ViTScratchConfig) -> float:
    return ViTScratchForImageClassification(config)(random_pixels(), labels=torch.tensor([0, 3])).loss.item()


def num_attention_maps(config: ViTScratchConfig) -> int:
    return ViTScratchModel(config)(random_pixels(), output_attentions=True).attentions[0].shape[1]


def num_hidden_states(config: ViTScratchConfig) -> int:
    return len(ViTScratchModel(config)(random_pixels(), output_hidden_states=True).hidden_states)


def num_tokens(config: ViTScratchConfig) -> int:
    return ViTScratchModel(config)(random_pixels()).last_hidden_state.shape[1]


def num_tokens_in_training(config: ViTScratchConfig) -> int:
    return ViTScratchModel(config).train()(random_pixels()).last_hidden_state.shape[1]


def fresh_logits(config: ViTScratchConfig) -> list[float]:
    return numbers(ViTScratchForImageClassification(config)(random_pixels()).logits)


def first_layer_scale(config: ViTScratchConfig) -> list[float] | None:
    scale = ViTScratchModel(config).layers[0].layer_scale1
    return None if isinstance(scale, nn.Identity) else numbers(scale.lambda1)[:2]


def num_corrupted_patches(config: ViTScratchConfig) -> int:
    return int(ViTScratchForMaskedPatchPrediction(config)(random_pixels()).mask[0].sum())


def patch_prediction_shape(config: ViTScratchConfig) -> list[int]:
    return list(ViTScratchForMaskedPatchPrediction(config)(random_pixels()).logits.shape)


def patch_prediction_loss(config: ViTScratchConfig) -> float:
    return seeded(ViTScratchForMaskedPatchPrediction(config))(random_pixels()).loss.item()


def num_patches_encoded(config: ViTScratchConfig) -> int:
    outputs = ViTScratchForMaskedAutoencoding(config)(random_pixels(), output_hidden_states=True)
    return outputs.hidden_states[0].shape[1] - 1


def autoencoding_loss(config: ViTScratchConfig) -> float:
    return seeded(ViTScratchForMaskedAutoencoding(config))(random_pixels()).loss.item()


def num_decoder_layers(config: ViTScratchConfig) -> int:
    return len(ViTScratchForMaskedAutoencoding(config).decoder.layers)


def feature_maps(config: ViTScratchConfig) -> list[float]:
    return numbers(torch.cat(seeded(ViTScratchBackbone(config))(random_pixels()).feature_maps))


def num_feature_maps(config: ViTScratchConfig) -> int:
    return len(ViTScratchBackbone(config)(random_pixels()).feature_maps)


PROJECTION = "vit.embeddings.patch_embeddings.projection.weight"
POSITIONS = "vit.embeddings.position_embeddings"
SMALL_DECODER = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
decoder_shape = weight_shape("decoder.layers.0.mlp.fc1.weight", ViTScratchForMaskedAutoencoding)
COLORS = ([0.2, 0.2, 0.2], [0.8, 0.8, 0.8])

# field: (one value, another, what is observed, what is seen with the one, with the other); None: just that they differ
EFFECTS: dict[str, tuple[Any, Any, Observation, Any, Any]] = {
    "image_size": (32, 64, weight_shape(POSITIONS), [1, 17, 32], [1, 65, 32]),
    "patch_size": (8, [4, 16], weight_shape(PROJECTION), [32, 3, 8, 8], [32, 3, 4, 16]),
    "num_channels": (3, 1, weight_shape(PROJECTION), [32, 3, 8, 8], [32, 1, 8, 8]),
    "hidden_size": (32, 64, weight_shape("vit.layernorm.weight"), [32], [64]),
    "num_hidden_layers": (2, 3, num_hidden_states, 3, 4),
    "num_attention_heads": (4, 8, num_attention_maps, 4, 8),
    "intermediate_size": (64, 48, weight_shape("vit.layers.1.mlp.fc1.weight"), [64, 32], [48, 32]),
    "hidden_act": ("gelu_pytorch_tanh", "relu", model_output, None, None),
    "layer_norm_eps": (1e-6, 1e-2, model_output, None, None),
    "hidden_dropout_prob": (0.0, 0.5, training_output, None, None),
    "attention_probs_dropout_prob": (0.0, 0.5, training_output, None, None),
    "qkv_bias": (True, False, weight_shape("vit.layers.0.attention.k_proj.bias"), [32], None),
    "qk_norm": (False, True, weight_shape("vit.layers.0.attention.k_norm.weight"), None, [8]),
    "mlp_type": ("mlp", "swiglu", weight_shape("vit.layers.0.mlp.gate_proj.weight"), None, [64, 32]),
    "layer_scale_init": (None, 0.5, first_layer_scale, None, [0.5, 0.5]),
    "drop_path_rate": (0.0, 0.5, training_output, None, None),
    "patch_dropout_rate": (0.0, 0.5, num_tokens_in_training, 17, 9),
    "position_embedding_type": ("learned_1d", "learned_2d", weight_shape(f"{POSITIONS}_x"), None, [4, 16]),
    "position_embedding_placement": (
        "stem",
        "every_layer",
        weight_shape("vit.layer_positions.tables.1.position_embeddings"),
        None,
        [1, 17, 32],
    ),
    "class_token_position": (True, False, weight_shape(POSITIONS), [1, 17, 32], [1, 16, 32]),
    "rope_theta": (100.0, 10, model_output, None, None),
    "use_class_token": (None, True, num_tokens, 16, 17),
    "use_distillation_token": (False, True, num_tokens, 17, 18),
    "num_register_tokens": (0, 3, num_tokens, 17, 20),
    "pooling": ("class_token", "mean", weight_shape("vit.embeddings.cls_token"), [1, 1, 32], None),
    "final_norm": ("before_pooling", "after_pooling", model_output, None, None),
    "representation_size": (None, 16, weight_shape("classifier.weight"), [7, 32], [7, 16]),
    "head_bias_init": (0.0, -10, fresh_logits, [0.0] * 14, [-10.0] * 14),
    "position_interpolation": ("bilinear_corners", "bicubic", model_output, None, None),
    "stem_depths": (None, [], weight_shape(PROJECTION), [32, 3, 8, 8], [32, 64, 2, 2]),
    "stem_width_factor": (1, 2, weight_shape(PROJECTION), [32, 64, 2, 2], [32, 128, 2, 2]),
    "corruption_ratio": (0.5, 0.25, num_corrupted_patches, 8, 4),
    "prediction_target": ("mean_color", "pixels", patch_prediction_shape, [2, 16, 512], [2, 16, 192]),
    "image_mean": (*COLORS, patch_prediction_loss, None, None),
    "image_std": (*COLORS, patch_prediction_loss, None, None),
    "mask_ratio": (0.75, 0.5, num_patches_encoded, 4, 8),
    "norm_pix_loss": (True, False, autoencoding_loss, None, None),
    "decoder_hidden_size": (32, 48, decoder_shape, [64, 32], [64, 48]),
    "decoder_num_hidden_layers": (1, 2, num_decoder_layers, 1, 2),
    "decoder_num_attention_heads": (4, 8, autoencoding_loss, None, None),
    "decoder_intermediate_size": (64, 16, decoder_shape, [64, 32], [16, 32]),
    "apply_layernorm": (True, False, feature_maps, None, None),
    "_out_features": (None, ["stem", "stage1"], num_feature_maps, 1, 2),
    "_out_indices": (None, [0, 1, 2], num_feature_maps, 1, 3),
    "problem_type": ("single_label_classification", "multi_label_classification", loss, None, None),
}

# What a field needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "mlp_type": {"hidden_act": "silu"},
    "rope_theta": {"position_embedding_type": "rope_2d"},
    "use_class_token": {"pooling": "mean"},
    "final_norm": {"pooling": "mean"},
    "stem_width_factor": {"stem_depths": []},
    "image_mean": {"image_std": [0.5, 0.5, 0.5]},
    "image_std": {"image_mean": [0.5, 0.5, 0.5]},
    "decoder_num_attention_heads": {"decoder_intermediate_size": 16},
    "decoder_hidden_size": {"decoder_intermediate_size": 64},
}


def test_every_field_of_the_config_has_a_case_above():
    assert set(EFFECTS) == set(ViTScratchConfig.__annotations__)


@pytest.mark.parametrize("field", EFFECTS)
def test_two_values_of_a_field_give_two_behaviours(field):
    one, other, observe, seen_with_one, seen_with_other = EFFECTS[field]
    name, beside = field.lstrip("_"), {**SMALL_DECODER, **BESIDE.get(field, {})}
    with_one, with_other = (observe(tiny_config(**{**beside, name: value})) for value in (one, other))
    assert with_one != with_other
    assert seen_with_one is None or with_one == seen_with_one
    assert seen_with_other is None or with_other == seen_with_other
