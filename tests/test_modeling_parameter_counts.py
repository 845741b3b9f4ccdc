"""How many parameters the named variants have, and what each option adds."""

import pytest
import torch
from fixtures_modeling import tiny_config

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.configuration_vit_scratch import HYBRIDS, VARIANTS

# Parameters of the official checkpoints: 1000 classes at 224 pixels, 21843 classes at 224, no head at 224, and 1000
# classes at 384 (518 for patch 14). The official repository's own tests state most of them.
PARAMETERS = {
    "Ti/16": (5_717_416, 9_740_115, 5_524_416, 5_790_376),
    "S/32": (22_878_952, 30_903_507, 22_493_952, 22_915_432),
    "S/16": (22_050_664, 30_075_219, 21_665_664, 22_196_584),
    "B/32": (88_224_232, 104_252_499, 87_455_232, 88_297_192),
    "B/16": (86_567_656, 102_595_923, 85_798_656, 86_859_496),
    "B/8": (86_576_872, 102_605_139, 85_807_872, 87_744_232),
    "L/32": (306_535_400, 327_899_475, 305_510_400, 306_632_680),
    "L/16": (304_326_632, 325_690_707, 303_301_632, 304_715_752),
    "H/14": (632_045_800, 658_745_683, 630_764_800, 633_470_440),
    "g/14": (1_012_611_432, 1_041_979_219, 1_011_202_432, 1_014_178_536),
    "G/14": (1_844_440_680, 1_879_144_275, 1_842_775_680, 1_846_292_712),
    "R+Ti/16": (6_337_704, 10_360_403, 6_144_704, 6_355_944),
    "R26+S/32": (36_431_912, 44_456_467, 36_046_912, 36_468_392),
    "R26+B/32": (101_383_976, 117_412_243, 100_614_976, 101_456_936),
    "R50+B/16": (98_659_112, 114_687_379, 97_890_112, 98_950_952),
    "R50+L/32": (328_994_856, 350_358_931, 327_969_856, 329_092_136),
}
# The patches each size was released or used with.
PATCHES = {"Ti": [16], "S": [16, 32], "B": [8, 16, 32], "L": [16, 32], "H": [14], "g": [14], "G": [14]}
# Hybrids of the paper without a released checkpoint: by formula from those above.
WITHOUT_CHECKPOINT = {"R50+B/32", "R50+L/16"}
# Not an official ViT but big_vision's (D, L, MLP, heads); its models have no count that compares, so by formula.
FROM_BIG_VISION = {"So400m"}

PARAMETERS_MEAN_POOLING = {"S/16": 22_049_896, "S/32": 22_878_184, "B/16": 86_566_120, "B/32": 88_222_696}
PARAMETERS_PRE_LOGITS = {  # 21843 classes at 224 pixels
    "Ti/16": 9_777_171,
    "S/16": 30_223_059,
    "B/32": 104_843_091,
    "B/16": 103_186_515,
    "L/32": 328_949_075,
    "L/16": 326_740_307,
    "H/14": 660_385_363,
}


def count_parameters(name: str, *, head: bool = True, **fields: object) -> int:
    config = ViTScratchConfig.from_variant(name, **fields)
    with torch.device("meta"):
        model = ViTScratchForImageClassification(config) if head else ViTScratchModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


def test_no_variant_is_missing_from_the_table_of_parameter_counts():
    plain = {f"{size}/{patch}" for size, patches in PATCHES.items() for patch in patches}
    assert set(PARAMETERS) | WITHOUT_CHECKPOINT == plain | set(HYBRIDS)
    assert set(PATCHES) | FROM_BIG_VISION == set(VARIANTS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_with_1000_classes(name):
    assert count_parameters(name, num_labels=1000) == PARAMETERS[name][0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_with_21843_classes(name):
    assert count_parameters(name, num_labels=21843) == PARAMETERS[name][1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_without_a_head(name):
    assert count_parameters(name, head=False) == PARAMETERS[name][2]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_variant_has_the_official_number_of_parameters_at_the_higher_resolution(name):
    image_size = 518 if name.endswith("/14") else 384
    assert count_parameters(name, num_labels=1000, image_size=image_size) == PARAMETERS[name][3]


@pytest.mark.parametrize("name", PARAMETERS_MEAN_POOLING)
def test_mean_pooling_has_neither_class_token_nor_its_position(name):
    assert count_parameters(name, num_labels=1000, pooling="mean") == PARAMETERS_MEAN_POOLING[name]


def test_mean_pooling_and_fixed_positions_give_the_number_of_a_reproduction_of_better_plain_baselines():
    # "Better plain ViT baselines" (arXiv 2205.01580) with a linear head, as reproduced in PyTorch (EIFY/mup-vit).
    fields = {"num_labels": 1000, "pooling": "mean", "position_embedding_type": "sincos_2d"}
    assert count_parameters("S/16", **fields) == 21_974_632


@pytest.mark.parametrize("name", PARAMETERS_PRE_LOGITS)
def test_the_pre_logits_layer_adds_the_official_number_of_parameters(name):
    hidden_size = ViTScratchConfig.from_variant(name).hidden_size
    num_parameters = count_parameters(name, num_labels=21843, representation_size=hidden_size)
    assert num_parameters == PARAMETERS_PRE_LOGITS[name]


def around_the_stem(size: str, channels: int, num_patches: int) -> int:
    """Parameters of a hybrid with 1000 classes but for its ResNet, whose features have so many channels."""
    dim, depth, mlp, _ = VARIANTS[size]
    embeddings = channels * dim + dim + (num_patches + 1) * dim + dim
    layer = 4 * (dim * dim + dim) + 2 * dim * mlp + mlp + dim + 4 * dim
    return embeddings + depth * layer + 2 * dim + 1000 * (dim + 1)


@pytest.mark.parametrize(
    ("name", "size", "twin", "size_of_twin", "channels", "num_patches"),
    [("R50+B/32", "B", "R50+L/32", "L", 2048, 49), ("R50+L/16", "L", "R50+B/16", "B", 1024, 196)],
)
def test_a_hybrid_without_checkpoint_has_the_stem_of_its_twin(name, size, twin, size_of_twin, channels, num_patches):
    stem = PARAMETERS[twin][0] - around_the_stem(size_of_twin, channels, num_patches)
    assert count_parameters(name, num_labels=1000) == stem + around_the_stem(size, channels, num_patches)


@pytest.mark.parametrize("num_labels", [1000, 21843])
def test_so400m_has_the_number_of_parameters_of_the_formula(num_labels):
    dim, depth, mlp, patch, num_patches = 1152, 27, 4304, 14, (224 // 14) ** 2
    embeddings = patch * patch * 3 * dim + dim + (num_patches + 1) * dim + dim
    layer = 4 * (dim * dim + dim) + 2 * dim * mlp + mlp + dim + 4 * dim
    expected = embeddings + depth * layer + 2 * dim + num_labels * (dim + 1)
    assert count_parameters("So400m/14", num_labels=num_labels) == expected


@pytest.mark.parametrize(
    ("size", "head_dim"),
    [("Ti", 64), ("S", 64), ("B", 64), ("L", 64), ("H", 80), ("g", 88), ("G", 104), ("So400m", 72)],
)
def test_a_variant_has_the_head_width_of_its_paper(size, head_dim):
    assert ViTScratchConfig.from_variant(f"{size}/16").head_dim == head_dim


@pytest.mark.parametrize(("name", "stride"), [("R+Ti/16", 4), ("R26+S/32", 32), ("R50+B/16", 16), ("R50+L/32", 32)])
def test_the_patches_of_a_hybrid_are_cut_from_features_of_this_stride(name, stride):
    assert ViTScratchConfig.from_variant(name).stem_stride == stride


@pytest.mark.parametrize(("name", "grid_size"), [("R+Ti/16", (7, 7)), ("R26+B/32", (7, 7)), ("R50+L/16", (14, 14))])
def test_the_grid_of_a_hybrid_at_224_pixels_is_that_of_the_official_code(name, grid_size):
    assert ViTScratchConfig.from_variant(name).grid_size == grid_size


# What an option adds to 2 layers of width 32, 4 heads of 8, MLP 64, 17 tokens and 7 classes.

HEAD, POSITIONS = 7 * 33, 17 * 32
ADDED = [
    ({"qkv_bias": False}, -2 * 3 * 32),
    ({"qk_norm": True}, 2 * 2 * 2 * 8),
    ({"mlp_type": "swiglu", "hidden_act": "silu"}, 2 * (32 * 64 + 64)),
    ({"layer_scale_init": 0.1}, 2 * 2 * 32),
    ({"drop_path_rate": 0.1, "patch_dropout_rate": 0.5}, 0),
    ({"position_embedding_type": "none"}, -POSITIONS),
    ({"position_embedding_type": "learned_2d"}, (4 + 4) * 16 - POSITIONS),
    ({"position_embedding_type": "sincos_2d"}, -POSITIONS),
    ({"position_embedding_type": "relative"}, 2 * (2 * 17 - 1) * 8 - POSITIONS),
    ({"position_embedding_type": "rope_2d"}, -POSITIONS),
    ({"position_embedding_placement": "every_layer"}, POSITIONS),
    ({"position_embedding_placement": "every_layer_shared"}, 0),
    ({"class_token_position": False}, -32),
    ({"use_distillation_token": True}, 2 * 32 + HEAD),
    ({"num_register_tokens": 3}, 3 * 32),
    ({"pooling": "mean"}, -2 * 32),
    ({"pooling": "mean", "use_class_token": True}, 0),
    ({"pooling": "mean", "final_norm": "after_pooling"}, -2 * 32),
    ({"pooling": "class_token_and_mean"}, 7 * 32),
    ({"pooling": "attention"}, -2 * 32 + 32 + 4 * (32 * 32 + 32) + 2 * 32 + 2 * 32 * 64 + 64 + 32),
    ({"representation_size": 16}, 32 * 16 + 16 - 7 * 16),
    # The root of 9,536, a kernel of 2 x 2 on its 64 channels in the place of 8 x 8 on 3.
    ({"stem_depths": []}, 9_536 + 32 * (2 * 2 * 64 - 8 * 8 * 3)),
]


@pytest.mark.parametrize(("fields", "num_added"), ADDED, ids=str)
def test_an_option_adds_the_parameters_of_its_definition(fields, num_added):
    def count(**fields: object) -> int:
        model = ViTScratchForImageClassification(tiny_config(**fields))
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(**fields) - count() == num_added
