"""Positions inside the attention: rotary ones against transformers' DINOv3, relative ones against a slow loop."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fixtures_modeling import TINY, random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import Tensor, nn
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding, apply_rotary_pos_emb

from modeling_vit_scratch import ViTScratchModel
from modeling_vit_scratch.errors_vit_scratch import InputError
from modeling_vit_scratch.positions_vit_scratch import (
    TokenPlaces,
    ViTScratchRotaryPositions,
    positions_for_attention,
)

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

# Rotary: DINOv3's.


def dinov3_to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "model.layer.": "layers.",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "patch_embeddings.": "patch_embeddings.projection.",
    }
    ours = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        ours["layer" + name if name.startswith("norm.") else name] = tensor
    del ours["embeddings.mask_token"]
    return ours


def dinov3_and_ours(**fields: Any) -> tuple[nn.Module, ViTScratchModel]:
    """Returns transformers' DINOv3 and our encoder with the same weights, in float64."""
    shape = {**TINY, "num_register_tokens": 2, **fields}
    theirs = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**shape, key_bias=True, hidden_act="gelu"))
    ours = ViTScratchModel(
        tiny_config(
            **shape, position_embedding_type="rope_2d", layer_scale_init=1.0, layer_norm_eps=1e-5, hidden_act="gelu"
        )
    )
    randomize(theirs)
    ours.load_state_dict(dinov3_to_ours(theirs.state_dict()), strict=True)
    return theirs.double().eval(), ours.double().eval()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 24), (8, 64)])
@pytest.mark.parametrize("fields", [{}, {"rope_theta": 10.0}, {"num_attention_heads": 2}])
def test_the_encoder_with_rotary_positions_equals_dinov3(fields, height, width):
    theirs, ours = dinov3_and_ours(**fields)
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    expected, actual = theirs(pixels), ours(pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **CLOSE)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 24)])
def test_rotated_queries_and_keys_equal_those_of_dinov3_to_the_last_bit(height, width, dtype):
    config = tiny_config(position_embedding_type="rope_2d")
    num_tokens = 3 + height // 8 * (width // 8)
    query, key = torch.randn(2, 2, 4, num_tokens, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    rope = DINOv3ViTRopePositionEmbedding(transformers.DINOv3ViTConfig(**TINY)).eval()
    expected = apply_rotary_pos_emb(query, key, *rope(random_pixels(height=height, width=width).to(dtype)))
    where = positions_for_attention(config, TokenPlaces((height // 8, width // 8)), like=query)
    actual = ViTScratchRotaryPositions()(query, key, where)
    torch.testing.assert_close(actual[:2], expected, **EXACT)
    assert actual[2] is None


def test_tokens_before_the_patches_are_not_rotated():
    config = tiny_config(position_embedding_type="rope_2d")
    query, key = torch.randn(2, 2, 4, 19, 8, generator=torch.Generator().manual_seed(0))
    where = positions_for_attention(config, TokenPlaces((4, 4)), like=query)
    for tokens, rotated in zip((query, key), ViTScratchRotaryPositions()(query, key, where), strict=False):
        torch.testing.assert_close(rotated[:, :, :3], tokens[:, :, :3], **EXACT)
        assert (rotated[:, :, 3:] != tokens[:, :, 3:]).any(dim=3).all()


def test_a_rotation_keeps_the_length_of_a_query():
    config = tiny_config(position_embedding_type="rope_2d")
    query = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    where = positions_for_attention(config, TokenPlaces((4, 4)), like=query)
    rotated = ViTScratchRotaryPositions()(query, query, where)[0]
    torch.testing.assert_close(rotated.norm(dim=3), query.norm(dim=3), **CLOSE)


# Relative.


def slow_relative_attentions(model: ViTScratchModel, hidden_states: Tensor, num_offsets: int) -> Tensor:
    """Attentions of the first layer, (B, A, T, T), one logit at a time."""
    layer = model.layers[0]
    normed = layer.layernorm_before(hidden_states).detach()
    query, key = layer.attention.q_proj(normed).detach().numpy(), layer.attention.k_proj(normed).detach().numpy()
    old = layer.attention.positions.table.detach().numpy()
    steps = np.linspace(0, len(old) - 1, num_offsets)  # as it is, or stretched from end to end
    table = np.stack([np.interp(steps, np.arange(len(old)), column) for column in old.T], axis=1)
    num_images, num_tokens, _ = query.shape
    logits = np.empty((num_images, 4, num_tokens, num_tokens))
    for image in range(num_images):
        for head in range(4):
            for q in range(num_tokens):
                for k in range(num_tokens):
                    of_query = query[image, q, 8 * head : 8 * head + 8]
                    content = of_query @ key[image, k, 8 * head : 8 * head + 8]
                    position = of_query @ table[q - k + num_tokens - 1]  # one table for all heads
                    logits[image, head, q, k] = (content + position) / math.sqrt(8)
    weights = np.exp(logits)
    return torch.from_numpy(weights / weights.sum(axis=3, keepdims=True))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 24)])
@pytest.mark.parametrize("num_register_tokens", [0, 2])
def test_relative_positions_add_the_product_of_query_and_offset_to_the_logits(num_register_tokens, height, width):
    fields = {"position_embedding_type": "relative", "num_register_tokens": num_register_tokens}
    model = tiny_encoder(dtype=torch.float64, **fields)
    num_tokens = 1 + num_register_tokens + height // 8 * (width // 8)
    pixels = random_pixels(1, height, width, dtype=torch.float64)
    output = model(pixels, output_attentions=True, output_hidden_states=True)
    expected = slow_relative_attentions(model, output.hidden_states[0], 2 * num_tokens - 1)
    torch.testing.assert_close(output.attentions[0], expected, **CLOSE)


def test_relative_positions_have_a_vector_of_a_head_for_each_offset_of_the_sequence():
    state = tiny_encoder(position_embedding_type="relative", num_register_tokens=2).state_dict()
    tables = {name: tuple(tensor.shape) for name, tensor in state.items() if "position" in name}
    assert tables == {f"layers.{index}.attention.positions.table": (2 * 19 - 1, 8) for index in (0, 1)}


def test_relative_positions_give_the_same_under_sdpa_as_written_out():
    pixels = random_pixels(dtype=torch.float64)
    models = [
        tiny_classifier(dtype=torch.float64, position_embedding_type="relative", attn_implementation=name)
        for name in ("eager", "sdpa", None)
    ]
    eager, sdpa, by_rule = (model(pixels).logits for model in models)
    torch.testing.assert_close(sdpa, eager, **CLOSE)
    torch.testing.assert_close(by_rule, eager, **CLOSE)


@pytest.mark.parametrize("attn_implementation", ["flex_attention", "flash_attention_2"])
def test_an_attention_that_takes_no_matrix_a_head_is_refused_with_relative_positions(attn_implementation):
    model = tiny_encoder(position_embedding_type="relative")
    with pytest.raises(InputError, match=r"position_embedding_type='relative'.*use one of .*eager, sdpa"):
        model.set_attn_implementation(attn_implementation)


def test_such_an_attention_is_refused_at_construction_too():
    with pytest.raises(InputError, match=r"position_embedding_type='relative'.*'flex_attention' cannot"):
        tiny_encoder(position_embedding_type="relative", attn_implementation="flex_attention")
