"""Feature maps: what they hold, what of a checkpoint they need, and one head of transformers trained on them."""

import copy
import logging
import re

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from fixtures_variants import VARIANTS, variant_classifier, variant_encoder, variant_pixels
from torch import Tensor, nn
from transformers import (
    AutoBackbone,
    DetrConfig,
    DetrForObjectDetection,
    Dinov2Backbone,
    Dinov2Config,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from modeling_vit_scratch import ViTScratchBackbone, ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.errors_vit_scratch import InputError

pytest_plugins = ["fixtures_hub"]

EXACT = {"rtol": 0, "atol": 0}
STAGES = ["stem", "stage1", "stage2"]  # of the two layers of fixtures_modeling.TINY
# Those that differ in tokens, positions, grid or norm.
KINDS = [
    "learned 1-D at every layer",
    "sin-cos at all layers",
    "relative",
    "rotary",
    "mean with the norm after it",
    "attention pooling with a class token",
    "distillation token and registers",
    "hybrid",
    "grid that is not square",
    "patches that are not square",
    "as DINOv2",
]


def backbone_of(model: nn.Module, folder, **fields) -> ViTScratchBackbone:
    """Returns a backbone with the weights of `model`, by way of a folder."""
    model.save_pretrained(folder)
    return ViTScratchBackbone.from_pretrained(folder, **fields)


def as_map(tokens: Tensor, num_prefix_tokens: int, grid_size: tuple[int, int]) -> Tensor:
    """The patch tokens of (B, T, D) as (B, D, rows, columns), one by one."""
    rows, columns = grid_size
    feature_map = torch.empty(tokens.shape[0], tokens.shape[2], rows, columns, dtype=tokens.dtype)
    for row in range(rows):
        for column in range(columns):
            feature_map[:, :, row, column] = tokens[:, num_prefix_tokens + row * columns + column]
    return feature_map


# What a feature map is.


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_feature_map_is_the_patch_tokens_of_the_encoder(tmp_path, variant):
    encoder, pixels = variant_encoder(variant), variant_pixels(variant)
    feature_maps = backbone_of(encoder, tmp_path)(pixels).feature_maps
    expected = encoder(pixels).last_hidden_state
    config = encoder.config
    torch.testing.assert_close(feature_maps, (as_map(expected, config.num_prefix_tokens, config.grid_size),), **EXACT)


@pytest.mark.parametrize("variant", KINDS)
def test_feature_maps_without_the_last_norm_are_the_hidden_states(tmp_path, variant):
    encoder, pixels = variant_encoder(variant), variant_pixels(variant)
    feature_maps = backbone_of(encoder, tmp_path, out_features=STAGES, apply_layernorm=False)(pixels).feature_maps
    hidden_states = encoder(pixels, output_hidden_states=True).hidden_states
    prefix, grid_size = encoder.config.num_prefix_tokens, encoder.config.grid_size
    expected = tuple(as_map(tokens, prefix, grid_size) for tokens in hidden_states)
    torch.testing.assert_close(feature_maps, expected, **EXACT)


def test_the_last_norm_is_applied_to_every_feature_map(tmp_path):
    encoder = tiny_encoder(num_register_tokens=3)
    feature_maps = backbone_of(encoder, tmp_path, out_features=STAGES)(random_pixels()).feature_maps
    hidden_states = encoder(random_pixels(), output_hidden_states=True).hidden_states
    expected = tuple(as_map(encoder.layernorm(tokens), 4, (4, 4)) for tokens in hidden_states)
    torch.testing.assert_close(feature_maps, expected, **EXACT)


@pytest.mark.parametrize("variant", KINDS)
def test_any_size_of_whole_patches_has_a_map_of_its_grid(variant):
    config = tiny_config(**VARIANTS[variant], out_features=STAGES)
    patch_height, patch_width = config.patch_height_width
    pixels = random_pixels(1, 3 * patch_height, 7 * patch_width, config.num_channels)
    feature_maps = ViTScratchBackbone(config).eval()(pixels).feature_maps
    assert [tuple(feature_map.shape) for feature_map in feature_maps] == [(1, 32, 3, 7)] * 3


@pytest.mark.parametrize("variant", KINDS)
def test_a_feature_map_does_not_depend_on_what_else_is_asked_for(tmp_path, variant):
    encoder, pixels = variant_encoder(variant), variant_pixels(variant)
    alone = backbone_of(encoder, tmp_path, out_features=["stage1"])(pixels).feature_maps
    among_others = backbone_of(encoder, tmp_path, out_features=STAGES)(pixels).feature_maps
    torch.testing.assert_close(alone[0], among_others[1], **EXACT)


@pytest.mark.parametrize("height, width", [(32, 32), (48, 24)])
@pytest.mark.parametrize("apply_layernorm", [True, False])
def test_feature_maps_equal_those_of_dinov2_with_the_same_weights(height, width, apply_layernorm):
    shape = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    stages = {"out_features": ["stem", "stage2", "stage3"], "apply_layernorm": apply_layernorm}
    theirs = Dinov2Backbone(Dinov2Config(**shape, **stages, mlp_ratio=2)).double().eval()
    randomize(theirs)
    fields = {"layer_scale_init": 1.0, "hidden_act": "gelu", "position_interpolation": "bicubic"}
    ours = ViTScratchBackbone(tiny_config(**shape, **stages, **fields)).double().eval()
    ours.load_state_dict(from_dinov2(theirs.state_dict(), with_norm=apply_layernorm), strict=True)
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    # Theirs resamples the positions in float32; at the grid of the weights nothing is resampled.
    tolerance = 1e-12 if height == width else 1e-5
    torch.testing.assert_close(ours(pixels).feature_maps, theirs(pixels).feature_maps, rtol=0, atol=tolerance)


def from_dinov2(tensors: dict[str, Tensor], with_norm: bool) -> dict[str, Tensor]:
    renamings = {
        r"^": "vit.",
        r"encoder\.layer\.": "layers.",
        r"attention\.attention\.(query|key|value)": lambda match: f"attention.{match[1][0]}_proj",  # before 5.24
        r"attention\.output\.dense": "attention.o_proj",
        r"norm1": "layernorm_before",
        r"norm2": "layernorm_after",
    }
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in renamings.items():
            name = re.sub(pattern, replacement, name)
        if not name.endswith("mask_token") and (with_norm or not name.startswith("vit.layernorm.")):
            renamed[name] = tensor
    return renamed


def test_hidden_states_and_attentions_come_when_asked_for(tmp_path):
    encoder = tiny_encoder()
    backbone, pixels = backbone_of(encoder, tmp_path), random_pixels()
    asked = {"output_hidden_states": True, "output_attentions": True}
    output, expected = backbone(pixels, **asked), encoder(pixels, **asked)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, **EXACT)
    torch.testing.assert_close(output.attentions, expected.attentions, **EXACT)
    assert list(backbone(pixels)) == ["feature_maps"]


def test_a_tuple_has_the_feature_maps_first():
    backbone, pixels = ViTScratchBackbone(tiny_config()).eval(), random_pixels()
    as_tuple = backbone(pixels, output_hidden_states=True, return_dict=False)
    output = backbone(pixels, output_hidden_states=True)
    torch.testing.assert_close(as_tuple, (output.feature_maps, output.hidden_states), **EXACT)


def test_training_keeps_every_patch_of_a_model_with_patch_dropout(tmp_path):
    encoder = tiny_encoder(patch_dropout_rate=0.5)
    backbone, pixels = backbone_of(encoder, tmp_path).train(), random_pixels()
    expected = as_map(encoder(pixels).last_hidden_state, 1, (4, 4))
    torch.testing.assert_close(backbone(pixels).feature_maps[0], expected, **EXACT)


# What exists of the network, and what a checkpoint may have beyond it.


def without_gradient(backbone: ViTScratchBackbone, pixels: Tensor) -> list[str]:
    sum(feature_map.sum() for feature_map in backbone.train()(pixels).feature_maps).backward()
    return [name for name, parameter in backbone.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant):
    backbone = ViTScratchBackbone(tiny_config(**VARIANTS[variant], out_features=["stage1"]))
    assert without_gradient(backbone, variant_pixels(variant)) == []


@pytest.mark.parametrize("placement", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("stages", [["stem"], ["stage2"], STAGES], ids="-".join)
@pytest.mark.parametrize("apply_layernorm", [True, False])
def test_every_parameter_gets_a_gradient_from_any_stage(stages, placement, apply_layernorm):
    config = tiny_config(out_features=stages, position_embedding_placement=placement, apply_layernorm=apply_layernorm)
    assert without_gradient(ViTScratchBackbone(config), random_pixels()) == []


def test_layers_behind_the_last_stage_do_not_exist():
    backbone = ViTScratchBackbone(tiny_config(num_hidden_layers=5, out_features=["stage1", "stage3"]))
    assert (len(backbone.vit.layers), backbone.channels) == (3, [32, 32])


def test_layers_in_front_skip_as_many_images_as_in_the_whole_network():
    whole = ViTScratchModel(tiny_config(num_hidden_layers=5, drop_path_rate=0.4))
    part = ViTScratchBackbone(tiny_config(num_hidden_layers=5, drop_path_rate=0.4, out_features=["stage3"]))
    rates = [layer.drop_path_rate for layer in whole.layers]
    assert [layer.drop_path_rate for layer in part.vit.layers] == rates[:3]


def test_a_stage_behind_those_that_were_built_is_refused():
    backbone = ViTScratchBackbone(tiny_config(out_features=["stage1"]))
    backbone.out_features = ["stage2"]
    with pytest.raises(InputError, match=r"out_features=\['stage2'\] goes beyond the 1 layers"):
        backbone(random_pixels())


@pytest.mark.parametrize("make", [variant_classifier, variant_encoder])
@pytest.mark.parametrize("variant", KINDS)
def test_every_tensor_of_a_backbone_comes_from_the_checkpoint(tmp_path, variant, make):
    model = make(variant)
    backbone = backbone_of(model, tmp_path, out_features=["stage1"])
    expected = {name: model.base_model.state_dict()[name] for name in backbone.vit.state_dict()}
    torch.testing.assert_close(dict(backbone.vit.state_dict()), expected, **EXACT)


@pytest.mark.parametrize("make", [tiny_classifier, tiny_encoder])
def test_what_is_left_out_of_a_checkpoint_is_named(tmp_path, caplog, make):
    model = make(position_embedding_placement="every_layer", num_hidden_layers=3)
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        backbone_of(model, tmp_path, out_features=["stage1"], apply_layernorm=False)
    names = ["layers.1", "layers.2", "layer_positions.tables.1", "layer_positions.tables.2", "layernorm"]
    prefix = "vit." if make is tiny_classifier else ""
    assert f"no output depends on them: {', '.join(prefix + name for name in names)}\n" in caplog.text


def test_a_checkpoint_without_a_layer_that_is_asked_for_is_refused(tmp_path):
    tiny_encoder(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"missing or of another shape \['vit\.layers\.1\."):
        ViTScratchBackbone.from_pretrained(tmp_path, num_hidden_layers=2)


def test_a_checkpoint_with_a_tensor_of_no_model_of_ours_is_refused(tmp_path):
    encoder = tiny_encoder()
    encoder.layers[0].extra = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"unexpected \['layers\.0\.extra\.bias'"):
        backbone_of(encoder, tmp_path, out_features=["stage1"])


def test_a_saved_backbone_loads_as_it_was(tmp_path):
    backbone = backbone_of(tiny_classifier(pooling="attention"), tmp_path / "first", out_features=["stem", "stage1"])
    backbone.save_pretrained(tmp_path / "second")
    loaded = ViTScratchBackbone.from_pretrained(tmp_path / "second")
    assert loaded.out_features == ["stem", "stage1"]
    torch.testing.assert_close(loaded.state_dict(), backbone.state_dict(), **EXACT)


def test_a_whole_backbone_hands_its_encoder_to_a_classifier(tmp_path):
    backbone = ViTScratchBackbone(tiny_config())
    randomize(backbone)
    backbone.save_pretrained(tmp_path)
    classifier = ViTScratchForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(classifier.vit.state_dict(), backbone.vit.state_dict(), **EXACT)


def test_another_input_size_at_load_is_that_of_the_encoder(tmp_path):
    encoder = tiny_encoder()
    backbone = backbone_of(encoder, tmp_path, image_size=[48, 64])
    encoder.resize_input(image_size=[48, 64])
    pixels = random_pixels(height=48, width=64)
    expected = as_map(encoder(pixels).last_hidden_state, 1, (6, 8))
    torch.testing.assert_close(backbone(pixels).feature_maps, (expected,), **EXACT)


# In transformers.


def test_auto_backbone_builds_ours_from_a_config():
    backbone = AutoBackbone.from_config(tiny_config(out_indices=[0, -1]))
    assert (type(backbone), backbone.out_features) == (ViTScratchBackbone, ["stem", "stage2"])


@pytest.mark.e2e
def test_auto_backbone_loads_ours_from_a_hub_repo(tmp_path, online):
    tiny_classifier().save_pretrained(tmp_path / "tiny")
    online.create("alice/tiny")
    online.write("alice/tiny", {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()})
    backbone = AutoBackbone.from_pretrained("alice/tiny", out_features=["stage1"])
    expected = ViTScratchBackbone.from_pretrained(tmp_path / "tiny", out_features=["stage1"])
    torch.testing.assert_close(backbone.state_dict(), expected.state_dict(), **EXACT)


BACKGROUND, SQUARE, CIRCLE = 0, 1, 2


def draw_shapes(num_images: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Returns images (B, 3, size, size) of one square and one circle in random colours, and their classes a pixel."""
    generator = torch.Generator().manual_seed(seed)
    pixels = 0.1 * torch.randn(num_images, 3, size, size, generator=generator)
    labels = torch.full((num_images, size, size), BACKGROUND)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for image, label in zip(pixels, labels, strict=True):
        for shape in (SQUARE, CIRCLE):
            row, column = torch.randint(6, size - 6, (2,), generator=generator)
            radius = torch.randint(4, 7, (), generator=generator)
            far = torch.maximum((rows - row).abs(), (columns - column).abs())
            if shape == CIRCLE:
                far = ((rows - row) ** 2 + (columns - column) ** 2).sqrt()
            image[:, far <= radius] = torch.rand(3, 1, generator=generator) + (0.5 if shape == CIRCLE else -1.5)
            label[far <= radius] = shape
    return pixels, labels


@pytest.mark.e2e
def test_a_segmentation_head_of_transformers_learns_shapes_on_it():
    torch.manual_seed(0)
    config = tiny_config(patch_size=4, num_hidden_layers=4, out_features=["stage1", "stage2", "stage3", "stage4"])
    head = {"hidden_size": 32, "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 3}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=config, **head)).train()
    assert type(model.backbone) is ViTScratchBackbone
    before = copy.deepcopy(model.backbone.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        pixels, labels = draw_shapes(num_images=8, seed=step)
        loss = model(pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    shares = torch.bincount(labels.flatten(), minlength=3) / labels.numel()
    guess = -(shares * shares.log()).sum().item()  # the loss of who knows how much each class covers, but not where
    assert max(losses[-3:]) < min(losses[0], guess) / 2
    still = [name for name, tensor in model.backbone.state_dict().items() if torch.equal(tensor, before[name])]
    assert still == []


def test_a_detection_head_of_transformers_reaches_every_parameter():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = DetrConfig(backbone_config=tiny_config(), num_queries=5, **sizes, **layers, **heads)
    boxes = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.25, 0.25]])}] * 2
    model = DetrForObjectDetection(config)
    assert type(model.model.backbone.model) is ViTScratchBackbone
    model(random_pixels(), labels=boxes).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
