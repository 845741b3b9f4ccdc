"""Position embeddings of every kind: closed forms, missing and reordered patches, other grids."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fixtures_modeling import TINY, random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch import modeling_vit_scratch as modeling
from modeling_vit_scratch.positions_vit_scratch import resize_positions

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

# Every kind of position at every place it can have.
KINDS: dict[str, dict[str, Any]] = {
    "none": {"position_embedding_type": "none"},
    "learned_1d": {},
    "learned_1d without the class token's": {"class_token_position": False},
    "learned_1d at every layer": {"position_embedding_placement": "every_layer"},
    "learned_1d shared": {"position_embedding_placement": "every_layer_shared"},
    "learned_2d": {"position_embedding_type": "learned_2d"},
    "learned_2d at every layer": {
        "position_embedding_type": "learned_2d",
        "position_embedding_placement": "every_layer",
    },
    "learned_2d shared": {
        "position_embedding_type": "learned_2d",
        "position_embedding_placement": "every_layer_shared",
    },
    "sincos_2d": {"position_embedding_type": "sincos_2d"},
    "sincos_2d shared": {
        "position_embedding_type": "sincos_2d",
        "position_embedding_placement": "every_layer_shared",
    },
    "relative": {"position_embedding_type": "relative"},
    "rope_2d": {"position_embedding_type": "rope_2d"},
}
# The same with registers, on a grid that is not square: where rows and columns could be confused.
CASES = {name: {"image_size": [32, 48], "num_register_tokens": 2, **fields} for name, fields in KINDS.items()}


def stem_positions(model: ViTScratchModel, height: int = 32, width: int = 32) -> Tensor:
    """Returns what is added to the tokens of an image, (T, D): the embeddings of a model that sees nothing."""
    with torch.no_grad():
        for name, parameter in model.embeddings.named_parameters():
            if "position_embeddings" not in name:
                parameter.zero_()
    dtype = model.embeddings.patch_embeddings.projection.weight.dtype
    return model.embeddings(random_pixels(height=height, width=width, dtype=dtype))[0][0].detach()


def patches_in_order(pixels: Tensor, order: Tensor, patch: int = 8) -> Tensor:
    """Images whose patches stand in another order."""
    rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
    patches = F.unfold(pixels, patch, stride=patch)[:, :, order]
    return F.fold(patches, (rows * patch, columns * patch), patch, stride=patch)


# Fixed sines and cosines.


def closed_form(row: int, column: int, hidden_size: int) -> list[float]:
    """[sin xw, cos xw, sin yw, cos yw] with w = 10000 ** (-k / (D / 4 - 1)), x the column and y the row."""
    quarter = hidden_size // 4
    frequencies = [10000 ** (-k / (quarter - 1)) for k in range(quarter)]
    parts = [(column, math.sin), (column, math.cos), (row, math.sin), (row, math.cos)]
    return [function(place * frequency) for place, function in parts for frequency in frequencies]


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 32), (16, 40), (8, 72)])
def test_sine_cosine_positions_are_the_closed_form_on_any_grid(height, width):
    model = tiny_encoder(dtype=torch.float64, position_embedding_type="sincos_2d", pooling="mean")
    expected = [closed_form(row, column, 32) for row in range(height // 8) for column in range(width // 8)]
    torch.testing.assert_close(
        stem_positions(model, height, width), torch.tensor(expected, dtype=torch.float64), **CLOSE
    )


def test_sine_cosine_positions_of_eight_channels_are_those_written_out():
    model = tiny_encoder(hidden_size=8, position_embedding_type="sincos_2d", pooling="mean", dtype=torch.float64)
    row_1_column_0 = [0, 0, 1, 1, math.sin(1), math.sin(1e-4), math.cos(1), math.cos(1e-4)]
    expected = torch.tensor(row_1_column_0, dtype=torch.float64)
    torch.testing.assert_close(stem_positions(model)[4], expected, **CLOSE)


def test_sine_cosine_positions_in_float32_are_as_close_as_its_angles():
    model = tiny_encoder(image_size=256, position_embedding_type="sincos_2d", pooling="mean")
    expected = torch.tensor([closed_form(row, column, 32) for row in range(32) for column in range(32)])
    # An angle of up to 31 is known to 2 ** -24 of itself, and to as much again from the exponent's rounding.
    torch.testing.assert_close(stem_positions(model, 256, 256), expected, rtol=0, atol=2e-5)


def test_sine_cosine_positions_are_neither_parameter_nor_stored():
    names = tiny_encoder(position_embedding_type="sincos_2d").state_dict()
    assert [name for name in names if "position" in name] == []


@pytest.mark.parametrize("kind", ["sincos_2d", "learned_2d"])
def test_class_token_and_registers_have_no_two_dimensional_position(kind):
    model = tiny_encoder(position_embedding_type=kind, num_register_tokens=2)
    positions = stem_positions(model)
    assert not positions[:3].any()
    assert positions[3:].any(dim=1).all()


# Learned.


def test_learned_2d_joins_the_vector_of_the_column_and_that_of_the_row():
    model = tiny_encoder(position_embedding_type="learned_2d", image_size=[32, 48])
    x, y = model.embeddings.position_embeddings_x.detach(), model.embeddings.position_embeddings_y.detach()
    assert (tuple(x.shape), tuple(y.shape)) == ((6, 16), (4, 16))
    expected = [torch.cat((x[column], y[row])) for row in range(4) for column in range(6)]
    torch.testing.assert_close(stem_positions(model, 32, 48)[1:], torch.stack(expected), **EXACT)


def test_learned_2d_resamples_each_axis_by_itself_for_another_grid():
    model = tiny_encoder(position_embedding_type="learned_2d", image_size=[32, 48], dtype=torch.float64)
    x, y = (
        np.stack([np.interp(np.linspace(0, len(old) - 1, new), np.arange(len(old)), line) for line in old.T], axis=1)
        for old, new in (
            (model.embeddings.position_embeddings_x.detach().numpy(), 3),
            (model.embeddings.position_embeddings_y.detach().numpy(), 7),
        )
    )
    expected = np.stack([np.concatenate((x[column], y[row])) for row in range(7) for column in range(3)])
    torch.testing.assert_close(stem_positions(model, 56, 24)[1:], torch.from_numpy(expected), **CLOSE)


def test_learned_1d_has_a_row_for_the_class_token_and_one_for_each_patch_in_raster_order():
    model = tiny_encoder(image_size=[32, 48])
    table = model.embeddings.position_embeddings.detach()
    assert table.shape == (1, 25, 32)
    torch.testing.assert_close(stem_positions(model, 32, 48), table[0], **EXACT)


def test_registers_never_have_a_position():
    model = tiny_encoder(num_register_tokens=3)
    table = model.embeddings.position_embeddings.detach()[0]
    assert len(table) == 17
    expected = torch.cat((table[:1], torch.zeros(3, 32), table[1:]))
    torch.testing.assert_close(stem_positions(model), expected, **EXACT)


@pytest.mark.parametrize("placement", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("tokens", [{}, {"use_distillation_token": True}, {"num_register_tokens": 2}], ids=str)
def test_no_position_for_the_class_token_is_a_row_of_zeros(placement, tokens):
    fields = {"position_embedding_placement": placement, **tokens}
    without = tiny_encoder(class_token_position=False, **fields)
    with_row = tiny_encoder(**fields)
    state = with_row.state_dict()
    for name, tensor in without.state_dict().items():
        num_missing = state[name].shape[1] - tensor.shape[1] if "position_embeddings" in name else 0
        zeros = tensor.new_zeros(1, num_missing, 32)
        state[name] = torch.cat((zeros, tensor), dim=1) if "position_embeddings" in name else tensor
    with_row.load_state_dict(state)
    actual, expected = without(random_pixels()), with_row(random_pixels())
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **EXACT)


# None.


def test_without_positions_the_class_token_sees_a_bag_of_patches():
    model, pixels = (
        tiny_classifier(dtype=torch.float64, position_embedding_type="none"),
        random_pixels(dtype=torch.float64),
    )
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(patches_in_order(pixels, order)).logits, model(pixels).logits, **CLOSE)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "none"])
def test_with_positions_the_order_of_the_patches_matters(kind):
    model, pixels = tiny_classifier(**KINDS[kind]), random_pixels()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert (model(patches_in_order(pixels, order)).logits - model(pixels).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_reads_the_class_token_of_the_full_last_layer(kind):
    model, pixels = tiny_classifier(dtype=torch.float64, **KINDS[kind]), random_pixels(dtype=torch.float64)
    torch.testing.assert_close(model(pixels).logits, model.classifier(model.vit(pixels).pooler_output), **CLOSE)


# At every layer.


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 56)])
@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("learned_1d", "every_layer"),
        ("learned_1d", "every_layer_shared"),
        ("learned_2d", "every_layer"),
        ("learned_2d", "every_layer_shared"),
        ("sincos_2d", "every_layer_shared"),
    ],
)
def test_positions_of_a_layer_are_added_to_its_input(kind, placement, height, width):
    fields = {"position_embedding_type": kind, "num_hidden_layers": 3}
    model = tiny_encoder(**fields, position_embedding_placement=placement)
    pixels = random_pixels(height=height, width=width)
    tables = list(model.layer_positions.tables)
    assert len(tables) == (3 if placement == "every_layer" else 1)
    patches = model.embeddings.patch_embeddings(pixels)
    tokens = torch.cat((model.embeddings.cls_token.expand(2, 1, -1), patches), dim=1)
    for index, layer in enumerate(model.layers):
        # The positions of a stem that holds this table: tested above.
        at_stem = ViTScratchModel(tiny_config(**fields))
        at_stem.embeddings.load_state_dict(tables[index % len(tables)].state_dict(), strict=False)
        tokens, _ = layer(tokens + stem_positions(at_stem, height, width))
    torch.testing.assert_close(model(pixels).last_hidden_state, model.layernorm(tokens), **EXACT)


def test_one_table_for_all_layers_equals_equal_tables():
    shared = tiny_encoder(position_embedding_placement="every_layer_shared")
    own = tiny_encoder(position_embedding_placement="every_layer")
    state = shared.state_dict()
    table = state["layer_positions.tables.0.position_embeddings"]
    own.load_state_dict({**state, "layer_positions.tables.1.position_embeddings": table})
    actual, expected = shared(random_pixels()), own(random_pixels())
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **EXACT)


def test_a_shared_table_is_trained_by_every_layer():
    shared = tiny_encoder(position_embedding_placement="every_layer_shared", dtype=torch.float64)
    own = tiny_encoder(position_embedding_placement="every_layer", dtype=torch.float64)
    state = shared.state_dict()
    table = state["layer_positions.tables.0.position_embeddings"]
    own.load_state_dict({**state, "layer_positions.tables.1.position_embeddings": table})
    for model in (shared, own):
        model(random_pixels(dtype=torch.float64)).last_hidden_state.square().sum().backward()
    of_layers = [table.position_embeddings.grad for table in own.layer_positions.tables]
    actual = shared.layer_positions.tables[0].position_embeddings.grad
    torch.testing.assert_close(actual, of_layers[0] + of_layers[1], rtol=1e-12, atol=1e-12)


# Positions go with their patches.


@pytest.mark.parametrize("kind", CASES)
def test_patches_in_another_order_give_the_same_tokens(kind):
    model, pixels = tiny_encoder(dtype=torch.float64, **CASES[kind]), random_pixels(2, 32, 48, dtype=torch.float64)
    order = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)])
    tokens, expected = model(pixels, visible_patches=order).last_hidden_state, model(pixels).last_hidden_state
    torch.testing.assert_close(tokens[:, :3], expected[:, :3], **CLOSE)
    in_order = expected[:, 3:].gather(1, order.unsqueeze(2).expand(-1, -1, 32))
    torch.testing.assert_close(tokens[:, 3:], in_order, **CLOSE)


@pytest.mark.parametrize("kind", CASES)
def test_visible_patches_are_those_that_a_mask_over_all_would_leave(kind, monkeypatch):
    model = tiny_encoder(dtype=torch.float64, attn_implementation="eager", **CASES[kind])
    pixels, visible = random_pixels(2, 32, 48, dtype=torch.float64), torch.tensor([[0, 7, 8, 23], [3, 5, 9, 11]])
    tokens = model(pixels, visible_patches=visible).last_hidden_state

    mask = torch.full((2, 27), -torch.inf, dtype=torch.float64)
    mask[:, :3] = 0
    mask.scatter_(1, visible + 3, 0)
    original = modeling.eager_attention_forward

    def masked(module, query, key, value, attention_mask, **kwargs):
        added = mask[:, None, None] if attention_mask is None else attention_mask + mask[:, None, None]
        return original(module, query, key, value, added, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", masked)
    every = model(pixels).last_hidden_state
    expected = torch.cat((every[:, :3], every[:, 3:].gather(1, visible.unsqueeze(2).expand(-1, -1, 32))), dim=1)
    torch.testing.assert_close(tokens, expected, **CLOSE)


@pytest.mark.parametrize("kind", CASES)
def test_visible_patches_keep_their_places_on_another_grid(kind):
    model, pixels = tiny_encoder(dtype=torch.float64, **CASES[kind]), random_pixels(1, 40, 24, dtype=torch.float64)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))[None]
    tokens, expected = model(pixels, visible_patches=order).last_hidden_state, model(pixels).last_hidden_state
    torch.testing.assert_close(tokens[:, :3], expected[:, :3], **CLOSE)


# Another grid.


LEARNED = [kind for kind in CASES if kind.startswith(("learned", "relative"))]
RESAMPLED = [(kind, name) for kind in LEARNED for name in ("bilinear_corners", "bicubic", "bicubic_antialias")]


@pytest.mark.parametrize(
    ("kind", "interpolation"), [*RESAMPLED, *((kind, "bilinear_corners") for kind in CASES if kind not in LEARNED)]
)
def test_a_model_resized_in_place_computes_what_it_computed_at_that_grid(kind, interpolation):
    model = tiny_classifier(**CASES[kind], position_interpolation=interpolation)
    pixels = random_pixels(1, 56, 24)
    expected = model(pixels).logits
    model.resize_input(image_size=[56, 24])
    assert model.config.grid_size == (7, 3)
    torch.testing.assert_close(model(pixels).logits, expected, **EXACT)


@pytest.mark.parametrize("kind", CASES)
def test_another_image_size_at_load_resamples_the_positions(kind, tmp_path):
    model, pixels = tiny_classifier(**CASES[kind]), random_pixels(1, 56, 24)
    model.save_pretrained(tmp_path)
    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path, image_size=[56, 24])
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits, **EXACT)


@pytest.mark.parametrize("kind", CASES)
def test_another_grid_at_run_time_edits_no_weight(kind):
    model = tiny_encoder(**CASES[kind])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(random_pixels(1, 56, 24))
    torch.testing.assert_close(model.state_dict(), before, **EXACT)


@pytest.mark.parametrize("kind", LEARNED)
def test_learned_positions_are_trained_at_another_grid(kind):
    model = tiny_encoder(**CASES[kind])
    model(random_pixels(1, 56, 24)).last_hidden_state.square().sum().backward()
    tables = {name: table for name, table in model.named_parameters() if "position" in name}
    assert tables
    assert [name for name, table in tables.items() if not table.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("new_grid", [(7, 5), (2, 3), (4, 8)])
def test_bicubic_antialias_is_that_of_dinov2_with_registers(new_grid):
    config = transformers.Dinov2WithRegistersConfig(**TINY)
    theirs = transformers.Dinov2WithRegistersModel(config).embeddings
    nn.init.normal_(theirs.position_embeddings)
    expected = theirs.interpolate_pos_encoding(torch.empty(1, 1 + math.prod(new_grid), 32), *(8 * n for n in new_grid))
    actual = resize_positions(
        theirs.position_embeddings, (4, 4), new_grid, num_prefix_tokens=1, interpolation="bicubic_antialias"
    )
    torch.testing.assert_close(actual, expected, **EXACT)


# timm


@pytest.mark.peer
@pytest.mark.parametrize("new_grid", [(7, 5), (2, 3), (4, 8)])
def test_bicubic_antialias_is_that_of_timm(new_grid):
    layers = pytest.importorskip("timm.layers", reason="needs timm")
    positions = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(0))
    expected = layers.resample_abs_pos_embed(positions, new_size=new_grid, old_size=(4, 4), num_prefix_tokens=1)
    actual = resize_positions(positions, (4, 4), new_grid, num_prefix_tokens=1, interpolation="bicubic_antialias")
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.peer
@pytest.mark.parametrize("num_register_tokens", [0, 2])
def test_positions_without_the_class_token_equal_those_of_timm(num_register_tokens):
    timm = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    fields = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4, "mlp_ratio": 2}
    theirs = timm.VisionTransformer(**fields, reg_tokens=num_register_tokens, no_embed_class=True).eval()
    ours = tiny_encoder(class_token_position=False, num_register_tokens=num_register_tokens)
    randomize(theirs)
    embeddings = ours.embeddings
    embeddings.patch_embeddings.projection.load_state_dict(theirs.patch_embed.proj.state_dict())
    with torch.no_grad():
        embeddings.position_embeddings.copy_(theirs.pos_embed)
        embeddings.cls_token.copy_(theirs.cls_token)
        if num_register_tokens:
            embeddings.register_tokens.copy_(theirs.reg_token)
    expected = theirs._pos_embed(theirs.patch_embed(random_pixels()))
    torch.testing.assert_close(embeddings(random_pixels())[0], expected, **EXACT)
