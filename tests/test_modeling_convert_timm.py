"""timm's networks become ViTScratch networks that compute the same; timm itself is the reference."""

import json
import sys

import numpy as np
import PIL.Image
import pytest
import torch
from fixtures_modeling import random_pixels, randomize
from safetensors.torch import load_file

from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor
from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.convert_timm_network_vit_scratch import HEADS
from modeling_vit_scratch.convert_timm_vit_scratch import from_timm, read_timm_config
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

pytestmark = pytest.mark.peer
timm = pytest.importorskip("timm", reason="needs timm")

# In float64 rounding is about 1e-15; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}

ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
PLAIN, SWIGLU, DISTILLED = "vit_base_patch16_224", "vit_giant_patch14_dinov2", "deit_base_distilled_patch16_224"
NO_CLASS_TOKEN = {"class_token": False, "global_pool": "avg"}
NETWORKS = {
    "class token": (PLAIN, {}),
    "class token, positions of patches only": (PLAIN, {"no_embed_class": True}),
    "mean after the norm": (PLAIN, {**NO_CLASS_TOKEN, "fc_norm": False}),
    "mean before the norm": (PLAIN, NO_CLASS_TOKEN),
    "mean of the patches beside a class token": (PLAIN, {"global_pool": "avg"}),
    "attention pooling": (PLAIN, {"class_token": False, "global_pool": "map", "act_layer": "gelu_tanh"}),
    "attention pooling beside registers": (
        PLAIN,
        {"class_token": False, "global_pool": "map", "reg_tokens": 2, "no_embed_class": True},
    ),
    "registers": (PLAIN, {"reg_tokens": 3, "no_embed_class": True}),
    "LayerScale, QK-norm": (PLAIN, {"init_values": 1e-5, "qk_norm": True}),
    "SwiGLU": (SWIGLU, {"mlp_ratio": 4}),
    "distilled": (DISTILLED, {}),
    "no positions, no bias": (PLAIN, {"pos_embed": "none", "qkv_bias": False}),
    "eps 1e-5": ("vit_base_patch16_clip_224", {"pre_norm": False}),
    "quick GELU, odd MLP": (PLAIN, {"act_layer": "quick_gelu", "mlp_ratio": 45.5 / 32}),
    "not square, 1 channel": (PLAIN, {"img_size": [16, 48], "patch_size": [8, 16], "in_chans": 1}),
}
# Told by no tensor: pool_include_prefix, activation, eps; and without positions the image size.
NOT_IN_TENSORS = {
    "attention pooling",
    "attention pooling beside registers",
    "no positions, no bias",
    "eps 1e-5",
    "quick GELU, odd MLP",
}


def network_of(architecture=PLAIN, num_classes=7, **arguments):
    """Returns timm's network in float64, every tensor drawn anew."""
    network = timm.create_model(architecture, num_classes=num_classes, **{**ARGS, **arguments})
    randomize(network)
    return network.double().eval()


def converted(network, architecture=PLAIN, pretrained_cfg=None, **arguments):
    model_args = {**ARGS, **arguments}
    return from_timm(
        network.state_dict(),
        source="weights",
        architecture=architecture,
        pretrained_cfg=pretrained_cfg,
        model_args=model_args,
    )


def pixels_for(network):
    (height, width), channels = network.patch_embed.img_size, network.patch_embed.proj.in_channels
    return random_pixels(height=height, width=width, channels=channels, dtype=torch.float64)


@pytest.mark.parametrize(("architecture", "arguments"), NETWORKS.values(), ids=NETWORKS)
def test_logits_equal_those_of_timm(architecture, arguments):
    network = network_of(architecture, **arguments)
    model = converted(network, architecture, **arguments).model
    pixels = pixels_for(network)
    torch.testing.assert_close(model(pixels).logits, network(pixels), **CLOSE)


@pytest.mark.parametrize(("architecture", "arguments"), NETWORKS.values(), ids=NETWORKS)
def test_features_of_networks_without_head_equal_those_of_timm(architecture, arguments):
    network = network_of(architecture, num_classes=0, **arguments)
    outputs = converted(network, architecture, **arguments).model(pixels_for(network))
    features = network.forward_features(pixels_for(network))
    torch.testing.assert_close(outputs.last_hidden_state, features, **CLOSE)
    if architecture != DISTILLED:  # which pools its two tokens' mean
        torch.testing.assert_close(outputs.pooler_output, network(pixels_for(network)), **CLOSE)


def test_the_proof_compares_with_what_timm_computes():
    network = network_of()
    conversion = converted(network)
    pixels = pixels_for(network)
    assert torch.equal(conversion.reference(pixels)["logits"], network(pixels))
    assert all(difference.is_equal for difference in prove(conversion))


def test_the_proof_fails_where_one_weight_differs():
    conversion = converted(network_of())
    with torch.no_grad():
        conversion.model.vit.layers[1].mlp.fc1.bias[3] += 1e-3
    assert not any(difference.is_equal for difference in prove(conversion))


def test_register_positions_are_folded_into_the_tokens():
    network = network_of(reg_tokens=3)
    conversion = converted(network, reg_tokens=3)
    pixels = pixels_for(network)
    torch.testing.assert_close(conversion.model(pixels).logits, network(pixels), **CLOSE)
    assert "positions of the register tokens" in conversion.notes[0]


@pytest.mark.parametrize("size", [(48, 48), (24, 40)])
def test_positions_at_another_size_equal_those_of_timm_with_dynamic_img_size(size):
    network = network_of(dynamic_img_size=True)
    model = converted(network).model
    pixels = random_pixels(height=size[0], width=size[1], dtype=torch.float64)
    # timm resamples in float32, ours in float64.
    torch.testing.assert_close(model(pixels).logits, network(pixels), rtol=0, atol=1e-5)


def test_weights_keep_their_dtype():
    network = network_of().to(torch.bfloat16)
    assert {tensor.dtype for tensor in converted(network).model.state_dict().values()} == {torch.bfloat16}


def test_dropout_and_stochastic_depth_come_along():
    rates = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.2, "patch_drop_rate": 0.3}
    config = converted(network_of(), **rates, drop_path_rate=0.4).model.config
    found = (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.patch_dropout_rate)
    assert (*found, config.drop_path_rate) == (0.1, 0.2, 0.3, pytest.approx(0.4))


def test_label_names_become_the_classes():
    names = [f"kind {index}" for index in range(7)]
    config = converted(network_of(), pretrained_cfg={"label_names": names}).model.config
    assert config.id2label == dict(enumerate(names))


def test_label_names_of_another_head_are_left_out_and_noted():
    conversion = converted(network_of(), pretrained_cfg={"label_names": ["cat", "dog"]})
    assert conversion.model.config.num_labels == 7
    assert conversion.notes == ["label_names are left out: 2 different ones for 7 classes"]


def test_one_class_is_a_sigmoid():
    assert converted(network_of(num_classes=1)).model.config.problem_type == "multi_label_classification"


# What does not fit


@pytest.mark.parametrize(
    ("architecture", "arguments", "part"),
    [
        (PLAIN, {"pre_norm": True}, "norm_pre"),
        (PLAIN, {"norm_layer": "rmsnorm"}, "RmsNorm"),
        (PLAIN, {"final_norm": False}, "final_norm=False"),
        (PLAIN, {"fc_norm": True}, "fc_norm=True with global_pool='token'"),
        (PLAIN, {"global_pool": "max"}, "global_pool='max'"),
        (PLAIN, {"global_pool": "map", "pool_include_prefix": True}, "pool_include_prefix=True"),
        (PLAIN, {"global_pool": "avg", "pool_include_prefix": True}, "pool_include_prefix=True"),
        (PLAIN, {"scale_attn_norm": True}, "scale_attn_norm"),
        (PLAIN, {"scale_mlp_norm": True}, "scale_mlp_norm"),
        (PLAIN, {"proj_bias": False}, "proj_bias=False"),
        (PLAIN, {"attn_layer": "diff"}, "attn_layer=DiffAttention"),
        (PLAIN, {"act_layer": "mish"}, "act_layer=Mish"),
        (SWIGLU, {"class_token": False, "global_pool": "map"}, "global_pool='map' beside SwiGLUPacked"),
        (DISTILLED, {"no_embed_class": True}, "no_embed_class beside a dist_token"),
        ("vit_small_patch16_18x2_224", {}, "block_fn=ParallelThingsBlock"),
        ("vit_base_patch16_xp_224", {}, "block_fn=ParallelScalingBlock"),
        ("vit_small_r26_s32_224", {"patch_size": 1}, "patch_embed.backbone"),
    ],
)
def test_what_has_no_place_is_refused_by_timms_name_for_it(architecture, arguments, part):
    with pytest.raises(InputError, match=part) as caught:
        from_timm({}, source="weights", architecture=architecture, model_args={**ARGS, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "arguments", "message"),
    [
        ("vit_enormous", {}, "architecture='vit_enormous' is none that timm"),
        ("resnet18", {}, "does not build resnet18 as a VisionTransformer"),
        (PLAIN, {"img_sise": 32}, "img_sise"),
        (PLAIN, {"norm_layer": "none such"}, "does not build"),
        (PLAIN, {"checkpoint_path": "pickled.pth"}, "model_args names checkpoint_path, no argument of a network"),
    ],
)
def test_an_architecture_timm_does_not_build_is_refused(architecture, arguments, message):
    state = timm.create_model(PLAIN, depth=1, img_size=32, patch_size=14).state_dict()
    with pytest.raises(InputError, match=message) as caught:
        from_timm(state, source="weights", architecture=architecture, model_args={"depth": 1, **arguments})
    assert "\n" not in str(caught.value)


def test_a_missing_and_a_foreign_tensor_are_named():
    state = network_of().state_dict()
    state["extra"] = state.pop("blocks.1.attn.qkv.bias")
    with pytest.raises(InputError, match=r"weights does not hold.*blocks\.1\.attn\.qkv\.bias.*extra") as caught:
        from_timm(state, source="weights", architecture=PLAIN, model_args=ARGS)
    assert "\n" not in str(caught.value)


def test_without_timm_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(EnvironmentFault, match="pip install timm"):
        from_timm({}, source="weights", architecture=PLAIN)


# State dicts without architecture


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - NOT_IN_TENSORS))
def test_names_and_shapes_tell_the_network(name):
    architecture, arguments = NETWORKS[name]
    network = network_of(architecture, **arguments)
    size = {"image_size": arguments["img_size"]} if "img_size" in arguments else {}
    conversion = from_timm(network.state_dict(), source="weights", num_attention_heads=4, **size)
    pixels = pixels_for(network)
    torch.testing.assert_close(conversion.model(pixels).logits, network(pixels), **CLOSE)


def test_attention_pooling_is_told_by_its_tensors():
    network = network_of(class_token=False, global_pool="map")
    conversion = from_timm(network.state_dict(), source="weights", num_attention_heads=4)
    pixels = pixels_for(network)
    torch.testing.assert_close(conversion.model(pixels).logits, network(pixels), **CLOSE)


@pytest.mark.parametrize("num_registers", [0, 3])
@pytest.mark.parametrize("mlp", ["mlp", "swiglu"])
def test_a_dinov2_release_equals_timm_with_timms_own_conversion(mlp, num_registers):
    arguments = {**ARGS, "init_values": 1e-5, "reg_tokens": num_registers, "no_embed_class": num_registers > 0}
    architecture = SWIGLU if mlp == "swiglu" else PLAIN
    network = timm.create_model(architecture, num_classes=0, **arguments).double().eval()
    release = dinov2_release(network.state_dict(), num_registers)
    network.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(release), network), strict=True)
    conversion = from_timm(release, source="weights", num_attention_heads=4)
    pixels = random_pixels(dtype=torch.float64)
    actual, expected = conversion.model(pixels), network.forward_features(pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected, **CLOSE)


def dinov2_release(state, num_registers):
    """Returns random tensors in the names and shapes of a DINOv2 release."""
    generator = torch.Generator().manual_seed(2)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    shapes["mask_token"] = [1, 32]
    shapes["pos_embed"] = [1, 17, 32]
    if num_registers:
        shapes["register_tokens"] = shapes.pop("reg_token")
    if shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]:
        renamed = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
        shapes = {rename(name, renamed): shape for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def rename(name, renamed):
    for old, new in renamed.items():
        name = name.replace(old, new)
    return name


def test_a_dinov2_release_has_the_preprocessing_of_its_paper():
    release = dinov2_release(network_of(num_classes=0, reg_tokens=3).state_dict(), 3)
    conversion = from_timm(release, source="weights", num_attention_heads=4)
    processor = conversion.image_processor
    assert (processor.image_mean, processor.resample, processor.crop_pct) == ([0.485, 0.456, 0.406], 3, 0.875)
    assert any("preprocessing" in note for note in conversion.notes)


def test_the_heads_of_a_known_width_are_known_and_noted():
    network = network_of(embed_dim=192, num_heads=3)
    conversion = from_timm(network.state_dict(), source="weights")
    pixels = pixels_for(network)
    torch.testing.assert_close(conversion.model(pixels).logits, network(pixels), **CLOSE)
    assert any("3 heads, as timm's networks of width 192" in note for note in conversion.notes)


def test_qk_norm_tells_the_heads():
    conversion = from_timm(network_of(qk_norm=True).state_dict(), source="weights")
    assert conversion.model.config.num_attention_heads == 4


def test_the_heads_of_an_unknown_width_are_asked_for():
    with pytest.raises(InputError, match=r"width of 32; give num_attention_heads=\.\.\."):
        from_timm(network_of().state_dict(), source="weights")


@pytest.mark.parametrize("num_attention_heads", [0, 3])
def test_heads_that_do_not_divide_the_width_are_refused(num_attention_heads):
    with pytest.raises(InputError, match=f"num_attention_heads={num_attention_heads} does not divide the width of 32"):
        from_timm(network_of().state_dict(), source="weights", num_attention_heads=num_attention_heads)


def test_tokens_that_do_not_go_together_are_refused():
    state = network_of(DISTILLED).state_dict()
    state = {name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: state[name] for name in state}
    with pytest.raises(InputError, match="no VisionTransformer of timm has these tensors"):
        from_timm(state, source="weights", num_attention_heads=4)


def test_the_table_of_heads_is_that_of_timms_registered_networks(monkeypatch):
    found = {}
    for module in (timm.models.vision_transformer, timm.models.deit):

        def build(network, variant, *_, **arguments):
            found[variant] = (arguments.get("embed_dim", 768), arguments.get("num_heads", 12))

        monkeypatch.setattr(module, "build_model_with_cfg", build)
        for name in timm.list_models(module=module.__name__.rpartition(".")[2]):
            timm.model_entrypoint(name)()
    exceptions = {"vit_base_patch16_gap_224"} | {name for name in found if name.startswith(("aimv2", "vit_giantopt"))}
    compared = {shape for name, shape in found.items() if name not in exceptions and not name.startswith("test_")}
    assert compared == set(HEADS.items())


@pytest.mark.parametrize("image_size", [None, 32])
def test_a_grid_that_is_no_square_is_asked_for(image_size):
    state = network_of(img_size=[16, 48], patch_size=8).state_dict()
    with pytest.raises(InputError, match=r"pos_embed (of 13 rows does not tell the grid|has 13 rows)"):
        from_timm(state, source="weights", num_attention_heads=4, image_size=image_size)


@pytest.mark.parametrize("missing", ["patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"])
def test_tensors_of_something_else_are_refused_by_the_one_that_is_missing(missing):
    state = network_of().state_dict()
    del state[missing]
    with pytest.raises(InputError, match=f"{missing} is missing, so this is no ViT"):
        from_timm(state, source="weights", num_attention_heads=4)


def test_a_hybrid_is_refused_by_the_eps_that_differ():
    with pytest.raises(InputError, match=r"sqrt\(var \+ 1e-8\).*eps 1e-5.*official \.npz"):
        from_timm({"patch_embed.backbone.conv.weight": torch.zeros(1)}, source="weights")


# Preprocessing


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "fields",
    [{"crop_pct": 0.875}, {"crop_pct": 0.95}, {"crop_pct": 1.0}, {"crop_pct": 1.0, "crop_mode": "squash"}],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_pixel_values_equal_those_of_timms_transform(fields, interpolation):
    pretrained_cfg = {
        "input_size": (3, 32, 32),
        "interpolation": interpolation,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        **fields,
    }
    processor = converted(network_of(), pretrained_cfg=pretrained_cfg).image_processor
    values = np.random.default_rng(0).integers(0, 256, (90, 61, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(values).resize((61, 90), PIL.Image.Resampling.BILINEAR, box=(0, 0, 20, 30))
    config = timm.data.resolve_data_config(pretrained_cfg=pretrained_cfg)
    expected = timm.data.create_transform(**config)(image)
    # Pillow's and torch's resizing of 8-bit images, in two passes, differ by rounding: 2 steps of 1/255, over std.
    torch.testing.assert_close(processor(image).pixel_values[0], expected, rtol=0, atol=2.01 / 255 / 0.224)


def test_a_border_becomes_padding_of_timms_colour():
    pretrained_cfg = {"input_size": (3, 32, 32), "crop_mode": "border", "crop_pct": 1.0, "mean": (0.2, 0.4, 0.6)}
    processor = converted(network_of(), pretrained_cfg=pretrained_cfg).image_processor
    assert (processor.resize_mode, processor.alpha_background) == ("pad", [51, 102, 153])


@pytest.mark.parametrize(
    ("pretrained_cfg", "note"),
    [
        ({"crop_mode": "squash", "crop_pct": 0.95}, "crop_pct=0.95 is left out"),
        ({"interpolation": "lanczos"}, "interpolation='lanczos' is no filter here"),
    ],
)
def test_preprocessing_that_has_no_place_is_noted(pretrained_cfg, note):
    assert any(note in line for line in converted(network_of(), pretrained_cfg=pretrained_cfg).notes)


def test_a_folder_that_timm_saved_equals_its_network(tmp_path):
    network = network_of(DISTILLED)
    timm.models.save_for_hf(network, tmp_path, model_args=ARGS, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    conversion = from_timm(load_file(tmp_path / "model.safetensors"), source="folder", **read_timm_config(config))
    pixels = pixels_for(network)
    torch.testing.assert_close(conversion.model(pixels).logits, network(pixels), **CLOSE)
    assert conversion.image_processor.size == {"height": 32, "width": 32}


@pytest.mark.parametrize(("dynamic", "size"), [(False, 32), (True, 48)])
def test_the_processor_has_the_networks_size_unless_timm_takes_any(dynamic, size):
    network = network_of(dynamic_img_size=dynamic)
    conversion = converted(network, pretrained_cfg={"input_size": [3, 48, 48]}, dynamic_img_size=dynamic)
    assert conversion.image_processor.size == {"height": size, "width": size}
    assert conversion.model.config.image_size == 32


def test_a_repos_config_is_read_in_both_forms():
    pixels = {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3]}
    new = {"architecture": PLAIN, "label_names": ["a", "b"], "model_args": ARGS, "pretrained_cfg": pixels}
    old = {"labels": ["a", "b"], "architecture": PLAIN, **pixels}
    read_new, read_old = read_timm_config(new), read_timm_config(old)
    assert read_timm_config({"pretrained_cfg": {"architecture": PLAIN}})["architecture"] == PLAIN
    assert (read_new["architecture"], read_new["model_args"]) == (PLAIN, ARGS)
    assert read_new["pretrained_cfg"] == {**pixels, "label_names": ["a", "b"]}
    assert read_old["pretrained_cfg"].items() >= read_new["pretrained_cfg"].items()


def test_the_result_is_one_of_our_classifiers_with_a_processor_of_its_size():
    conversion = converted(network_of())
    assert isinstance(conversion.model, ViTScratchForImageClassification)
    assert isinstance(conversion.image_processor, ViTScratchImageProcessor)
    assert conversion.image_processor.size == {"height": 32, "width": 32}
