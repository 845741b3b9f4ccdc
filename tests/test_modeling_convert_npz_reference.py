"""The NumPy forward that npz conversions are proven against, and what the proof would catch."""

import numpy as np
import pytest
import scipy.ndimage
import torch
from fixtures_modeling import random_pixels
from fixtures_npz import POSITIONS, linen_arrays, worst, write_npz
from torch import nn
from torch.nn import functional as F

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch import convert_npz_reference_vit_scratch as reference
from modeling_vit_scratch import resnet_stem_vit_scratch as resnet_stem
from modeling_vit_scratch.convert_npz_vit_scratch import from_npz, to_npz

FIRST = "Transformer/encoderblock_0"


@pytest.fixture
def conversion(tmp_path):
    return from_npz(write_npz(tmp_path, linen_arrays(representation_size=32)))


@pytest.fixture
def hybrid(tmp_path):
    return from_npz(write_npz(tmp_path, linen_arrays(stem_depths=[1, 1], patch=1)))


def set_tensor(conversion, name, array):
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    conversion.model.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_kernel_transposed_with_its_heads_as_axes_is_caught(conversion, name):
    part = {"q_proj": "query", "o_proj": "out"}[name]
    kernel = linen_arrays()[f"{FIRST}/MultiHeadDotProductAttention_0/{part}/kernel"]
    set_tensor(conversion, f"vit.layers.0.attention.{name}.weight", kernel.T.reshape(32, 32))
    assert worst(conversion) > 1


def test_a_kernel_that_is_not_transposed_is_caught(conversion):
    kernel = linen_arrays(representation_size=32)["pre_logits/kernel"]
    set_tensor(conversion, "vit.pooler.dense.weight", kernel)
    assert worst(conversion) > 1


def test_swapped_layer_norms_are_caught(conversion):
    layer = conversion.model.vit.layers[0]
    layer.layernorm_before, layer.layernorm_after = layer.layernorm_after, layer.layernorm_before
    assert worst(conversion) > 1


@pytest.mark.parametrize("eps", [1e-12, 1e-5], ids=["transformers", "torch"])
def test_the_epsilon_of_a_peer_is_caught(conversion, eps):
    for module in conversion.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps
    assert worst(conversion) > 1


def test_the_exact_gelu_is_caught(conversion):
    for layer in conversion.model.vit.layers:
        layer.mlp.activation_fn = nn.GELU()
    assert worst(conversion) > 1


def test_a_class_token_without_its_position_is_caught(conversion):
    conversion.model.vit.embeddings.get_parameter("position_embeddings").data[:, 0] = 0
    assert worst(conversion) > 1


def test_lost_pre_logits_are_caught(conversion):
    conversion.model.vit.pooler = None
    assert worst(conversion) > 1


def test_positions_resized_as_transformers_does_are_caught(conversion):
    conversion.image_sizes = [(48, 64)]
    assert worst(conversion) < 1
    conversion.model.config.position_interpolation = "bicubic"
    assert worst(conversion) > 1


def test_the_group_norm_epsilon_of_timm_is_caught(hybrid):
    assert worst(hybrid) < 1
    for module in hybrid.model.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-5
    assert worst(hybrid) > 1


def test_weights_standardised_as_timm_does_are_caught(hybrid, monkeypatch):
    def standardise(weight):
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        return (weight - mean) / (variance + 1e-8).sqrt()

    monkeypatch.setattr(resnet_stem, "standardise", standardise)
    assert worst(hybrid) > 1


def test_symmetric_padding_is_caught(hybrid, monkeypatch):
    def pad(features, kernel_size, stride, value=0.0):
        return F.pad(features, [(kernel_size - 1) // 2] * 4, value=value)

    monkeypatch.setattr(resnet_stem, "pad_same", pad)
    assert worst(hybrid) > 1


# Grids that the official code's SciPy resamples without the rounding that zeroes a last row.
@pytest.mark.parametrize("old, new", [((14, 14), (24, 24)), ((7, 7), (12, 12)), ((3, 5), (6, 4))], ids=str)
def test_positions_are_resampled_as_by_scipy(old, new):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((*old, 3))
    zoomed = scipy.ndimage.zoom(table, (new[0] / old[0], new[1] / old[1], 1), order=1)
    network = {"pos_embedding": table.reshape(1, -1, 3), "Transformer": {}}
    added = reference._add_positions(network, np.zeros((1, *new, 3)), old)
    np.testing.assert_allclose(added, zoomed.reshape(1, -1, 3), rtol=0, atol=1e-12)


def test_fixed_positions_are_those_of_the_baselines_code():
    places = reference._sincos(2, 2, 8)
    expected = [0, 0, 1, 1, np.sin(1), np.sin(1e-4), np.cos(1), np.cos(1e-4)]
    np.testing.assert_allclose(places[1, 0], expected, rtol=0, atol=1e-15)


def test_the_reference_computes_in_the_dtype_of_the_pixels(conversion):
    single = conversion.reference(random_pixels())
    double = conversion.reference(random_pixels(dtype=torch.float64))
    assert {output.dtype for output in single.values()} == {torch.float32}
    assert {output.dtype for output in double.values()} == {torch.float64}
    torch.testing.assert_close(single["logits"].double(), double["logits"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["B/16", "R50+B/16"])
def test_a_model_of_the_papers_size_is_proven(tmp_path, variant):
    model = ViTScratchForImageClassification(ViTScratchConfig.from_variant(variant, num_labels=10)).eval()
    arrays = to_npz(model, ViTScratchImageProcessor.from_config(model.config))
    arrays[POSITIONS] += 0.1  # and a head that is not all zeros
    arrays["head/kernel"] += np.sin(np.arange(7680, dtype=np.float32)).reshape(768, 10)
    assert worst(from_npz(write_npz(tmp_path, arrays))) < 1
