"""Checkpoints of transformers' vision models as ours: the loaded peer is what ours is compared with."""

import re

import pytest
import torch
import transformers
from fixtures_convert_transformers import (
    CLASSIFIERS,
    CLOSE,
    CLOSE_TO_SINGLE,
    ENCODERS,
    WITH_FOLDED_TOKEN,
    deit,
    dinov2,
    dinov3,
    mae,
    own_pixels,
    random_peer,
    registers,
    run_encoder,
    saved_peer,
    set_config,
    siglip,
    siglip_vision,
    vit,
)
from fixtures_modeling import random_pixels
from safetensors.torch import save_file

from modeling_vit_scratch import (
    ViTScratchBackbone,
    convert_transformers_names_vit_scratch,
    convert_transformers_vit_scratch,
)
from modeling_vit_scratch.convert_proof_vit_scratch import our_outputs, prove
from modeling_vit_scratch.convert_transformers_vit_scratch import from_transformers
from modeling_vit_scratch.errors_vit_scratch import InputError

ALL = {
    **ENCODERS,
    **{f"classifier {name}": case for name, case in CLASSIFIERS.items()},
    "MAE with its decoder": ("ViTMAEForPreTraining", mae()),
}

# All that have a head after the encoder.
HEADS = {**CLASSIFIERS, "MAE with its decoder": ALL["MAE with its decoder"]}

RESAMPLED = [
    name
    for name, (class_name, config) in ENCODERS.items()
    if "Backbone" not in class_name and "1 channel" not in name and name != "ViT without square"
]

# One class of each type, with every kind of tensor whose name published files spell otherwise.
FILES = {
    "ViTForImageClassification": vit(),
    "DeiTForImageClassificationWithTeacher": deit(),
    "Dinov2Model": dinov2(use_swiglu_ffn=True),
    "Dinov2WithRegistersForImageClassification": registers(),
    "DINOv3ViTModel": dinov3(),
    "SiglipVisionModel": siglip_vision(),
    "ViTMAEForPreTraining": mae(),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_tokens_and_pooled_output_of_encoders_equal_those_of_transformers(tmp_path, case):
    class_name, config = ENCODERS[case]
    theirs = saved_peer(tmp_path, class_name, config)
    ours = from_transformers(tmp_path).model.double()
    pixels = own_pixels(theirs)
    tolerance = CLOSE_TO_SINGLE if class_name in WITH_FOLDED_TOKEN else CLOSE
    actual = ours(pixels)
    if class_name.endswith("Backbone"):
        (expected,) = theirs(pixels).feature_maps
        tokens = actual.last_hidden_state[:, ours.config.num_prefix_tokens :]
        torch.testing.assert_close(tokens, expected.flatten(2).transpose(1, 2), **tolerance)
        return
    expected = run_encoder(theirs, pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **tolerance)
    if expected.get("pooler_output") is not None:
        torch.testing.assert_close(actual.pooler_output, expected.pooler_output, **tolerance)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_logits_and_tokens_of_classifiers_equal_those_of_transformers(tmp_path, case):
    class_name, config = CLASSIFIERS[case]
    theirs = saved_peer(tmp_path, class_name, config)
    ours = from_transformers(tmp_path).model.double()
    pixels = own_pixels(theirs)
    tolerance = CLOSE_TO_SINGLE if class_name in WITH_FOLDED_TOKEN else CLOSE
    torch.testing.assert_close(ours(pixels).logits, theirs(pixels).logits, **tolerance)
    expected = run_encoder(theirs, pixels).last_hidden_state
    torch.testing.assert_close(ours.vit(pixels).last_hidden_state, expected, **tolerance)


@pytest.mark.parametrize(("height", "width"), [(48, 64), (48, 48)])
@pytest.mark.parametrize("case", RESAMPLED)
def test_tokens_at_another_image_size_equal_those_of_transformers(tmp_path, case, height, width):
    class_name, config = ENCODERS[case]
    theirs = saved_peer(tmp_path, class_name, config)
    ours = from_transformers(tmp_path).model.double()
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    on_request = {} if config.model_type.startswith("dino") else {"interpolate_pos_encoding": True}
    expected = run_encoder(theirs, pixels, **on_request).last_hidden_state
    in_single = config.model_type.startswith("dinov2") or class_name in WITH_FOLDED_TOKEN
    tolerance = CLOSE_TO_SINGLE if in_single else CLOSE
    torch.testing.assert_close(ours(pixels).last_hidden_state, expected, **tolerance)


@pytest.mark.parametrize("case", ALL)
def test_the_reference_gives_transformers_outputs_bit_by_bit_and_the_proof_holds(tmp_path, case):
    class_name, config = ALL[case]
    theirs = saved_peer(tmp_path, class_name, config)
    conversion = from_transformers(tmp_path)
    assert all(difference.is_equal for difference in prove(conversion))
    if class_name in (*WITH_FOLDED_TOKEN, "ViTMAEForPreTraining") or "Backbone" in class_name:
        return  # their own tests are below
    pixels = own_pixels(theirs)
    actual = conversion.reference(pixels)
    expected = {**run_encoder(theirs, pixels), **(theirs(pixels) if "logits" in actual else {})}
    torch.testing.assert_close(actual, {name: expected[name] for name in actual}, rtol=0, atol=0)


@pytest.mark.parametrize("case", HEADS)
def test_the_proof_of_a_model_whose_head_is_zero_fails_where_its_encoder_is_destroyed(tmp_path, case):
    theirs = random_peer(*HEADS[case])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "classifier" in name or "decoder_pred" in name:
                parameter.zero_()
    theirs.save_pretrained(tmp_path)
    conversion = from_transformers(tmp_path)
    with torch.no_grad():
        conversion.model.vit.layers[0].mlp.fc1.weight.mul_(2)
    assert {found.output: found.is_equal for found in prove(conversion)} == {
        "last_hidden_state": False,
        "logits": True,
    }


def test_the_reference_refuses_a_size_at_which_transformers_misreads_its_positions(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit(image_size=[16, 64]))  # 2 x 8 patches, which it takes for 4 x 4
    reference = from_transformers(tmp_path).reference
    with pytest.raises(InputError, match="cannot resample the positions of a grid \\(2x8\\)"):
        reference(random_pixels(height=32, width=64, dtype=torch.float64))


def test_an_image_size_that_patches_do_not_fill_becomes_the_size_they_fill(tmp_path):
    theirs = saved_peer(tmp_path, "ViTModel", vit(image_size=35))
    conversion = from_transformers(tmp_path)
    pixels = random_pixels(dtype=torch.float64)
    expected = theirs(pixels, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(conversion.model.double()(pixels).last_hidden_state, expected, **CLOSE)
    torch.testing.assert_close(conversion.reference(pixels)["last_hidden_state"], expected, rtol=0, atol=0)
    assert "image_size=35 is 32 here: whole patches of 8" in conversion.notes


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("ViTModel", vit(image_size=[35, 50])),
        ("DeiTForImageClassification", deit(image_size=35)),
        ("Dinov2Model", dinov2(image_size=35)),
        ("Dinov2WithRegistersModel", registers(image_size=35)),
        ("DINOv3ViTModel", dinov3(image_size=35)),
        ("SiglipVisionModel", siglip_vision(image_size=35)),
        ("SiglipForImageClassification", siglip(image_size=35)),
        ("ViTMAEForPreTraining", mae(image_size=35)),
    ],
)
def test_sources_whose_image_size_patches_do_not_fill_convert_and_are_proven(tmp_path, class_name, config):
    saved_peer(tmp_path, class_name, config)
    size = getattr(config, "vision_config", config).image_size
    height, width = size if isinstance(size, list) else (size, size)
    transformers.ViTImageProcessor(size={"height": height, "width": width}).save_pretrained(tmp_path)
    conversion = from_transformers(tmp_path)
    assert all(difference.is_equal for difference in prove(conversion))
    assert conversion.image_processor.size == {"height": height - height % 8, "width": width - width % 8}
    assert any(f"resizes to {height}x{width} and drops" in note for note in conversion.notes)


# DeiT's distillation token


def test_a_distillation_token_without_a_head_enters_the_first_layer_bit_by_bit_as_a_register(tmp_path):
    theirs = random_peer("DeiTForImageClassification", deit())
    theirs.save_pretrained(tmp_path)
    ours = from_transformers(tmp_path).model
    pixels = random_pixels()
    tokens, _ = ours.vit.embeddings(pixels)
    assert torch.equal(tokens, theirs.deit.embeddings(pixels))
    assert ours.config.num_register_tokens == 1 and not ours.config.use_distillation_token


def test_both_heads_of_a_distilled_deit_are_kept(tmp_path):
    theirs = saved_peer(tmp_path, "DeiTForImageClassificationWithTeacher", deit())
    ours = from_transformers(tmp_path).model.double()
    pixels = own_pixels(theirs)
    tokens, expected = ours.vit(pixels).last_hidden_state, theirs(pixels)
    torch.testing.assert_close(ours.classifier(tokens[:, 0]), expected.cls_logits, **CLOSE)
    torch.testing.assert_close(ours.distillation_classifier(tokens[:, 1]), expected.distillation_logits, **CLOSE)


@pytest.mark.parametrize(
    "class_name", ["DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"]
)
def test_a_dropped_distillation_token_leaves_the_vit_of_the_other_tensors(tmp_path, class_name):
    theirs = saved_peer(tmp_path, class_name, deit())
    conversion = from_transformers(tmp_path, keep_distillation=False)
    state_dict = {name.replace("deit.", "vit."): tensor for name, tensor in theirs.state_dict().items()}
    state_dict = {name.removeprefix("cls_"): tensor for name, tensor in state_dict.items() if "distill" not in name}
    positions = next(name for name in state_dict if name.endswith("position_embeddings"))
    state_dict[positions] = state_dict[positions][:, [0, *range(2, 18)]]
    peer_class = transformers.ViTModel if class_name == "DeiTModel" else transformers.ViTForImageClassification
    peer = peer_class(vit()).double().eval()
    peer.load_state_dict(state_dict, strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected = {**peer.base_model(pixels), **peer(pixels)}
    actual = conversion.reference(pixels)
    torch.testing.assert_close(actual, {name: expected[name] for name in actual}, rtol=0, atol=0)
    ours = conversion.model.double()
    torch.testing.assert_close(our_outputs(ours, pixels, actual), actual, **CLOSE)
    assert any(
        note.startswith("the distillation token, its position and its head are dropped") for note in conversion.notes
    )


@pytest.mark.parametrize("class_name", ["DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"])
@pytest.mark.parametrize("wrong", ["class token", "position"])
def test_the_proof_without_a_distillation_token_compares_with_the_deit(tmp_path, monkeypatch, class_name, wrong):
    def without_token_but_wrong(tensors, **_):
        kept = convert_transformers_names_vit_scratch.without_distillation(tensors, as_register=False)
        if wrong == "class token":
            kept["embeddings.cls_token"] = torch.zeros_like(kept["embeddings.cls_token"])
        else:  # that of the distillation token instead of the class token's
            kept["embeddings.position_embeddings"] = tensors["embeddings.position_embeddings"][:, 1:]
        return kept

    saved_peer(tmp_path, class_name, deit())
    monkeypatch.setattr(convert_transformers_vit_scratch, "without_distillation", without_token_but_wrong)
    conversion = from_transformers(tmp_path, keep_distillation=False)
    assert not any(difference.is_equal for difference in prove(conversion))


def test_the_note_on_a_token_that_became_a_register_says_that_the_original_is_rounded_alike(tmp_path):
    saved_peer(tmp_path, "DeiTModel", deit())
    [note] = from_transformers(tmp_path).notes[:1]
    assert note.endswith("in the dtype of the checkpoint; the original is compared with the same rounding")


# MAE and backbones


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_reconstruction_mask_and_loss_of_mae_equal_those_of_transformers(tmp_path, norm_pix_loss):
    theirs = saved_peer(tmp_path, "ViTMAEForPreTraining", mae(norm_pix_loss=norm_pix_loss, mask_ratio=0.6))
    ours = from_transformers(tmp_path).model.double()
    pixels = own_pixels(theirs)
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(3))
    actual, expected = ours(pixels, noise=noise), theirs(pixels, noise=noise)
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(actual.mask, expected.mask.bool(), rtol=0, atol=0)
    torch.testing.assert_close(actual.loss, expected.loss, **CLOSE)


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("Dinov2Backbone", dinov2(out_features=["stem", "stage1"])),
        ("Dinov2WithRegistersBackbone", registers(out_indices=[1, 2], apply_layernorm=False)),
        ("DINOv3ViTBackbone", dinov3(out_indices=[0, 2])),
    ],
)
def test_feature_maps_of_backbones_equal_those_of_transformers(tmp_path, class_name, config):
    theirs = saved_peer(tmp_path / "theirs", class_name, config)
    from_transformers(tmp_path / "theirs").model.save_pretrained(tmp_path / "ours")
    ours = ViTScratchBackbone.from_pretrained(tmp_path / "ours").double().eval()
    pixels = own_pixels(theirs)
    torch.testing.assert_close(ours(pixels).feature_maps, theirs(pixels).feature_maps, **CLOSE)


# Files


def published_names(state_dict: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a loaded model (transformers 5) as published files name them (transformers 4)."""
    attention = (
        (r"attention\.q_proj", "attention.attention.query"),
        (r"attention\.k_proj", "attention.attention.key"),
        (r"attention\.v_proj", "attention.attention.value"),
        (r"attention\.o_proj", "attention.output.dense"),
    )
    renamings = {
        "dinov2": (*attention, (r"mlp\.down_proj", "mlp.weights_out")),
        "dinov2_with_registers": attention,
        "dinov3_vit": ((r"^model\.layer\.", "layer."),),
        "siglip_vision_model": ((r"^", "vision_model."),),
    }
    of_vit = (
        (r"(^|\.)layers\.", r"\1encoder.layer."),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    )
    published = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in renamings.get(model_type, (*attention, *of_vit)):
            name = re.sub(pattern, replacement, name)
        published[name] = tensor.clone()
    for name in [name for name in published if "mlp.gate_proj" in name and model_type == "dinov2"]:
        halves = (published.pop(name), published.pop(name.replace("gate_proj", "up_proj")))
        published[name.replace("gate_proj", "weights_in")] = torch.cat(halves)
    return published


@pytest.mark.parametrize("names", ["published", "loaded"])
@pytest.mark.parametrize("class_name", FILES)
def test_published_and_current_tensor_names_give_the_same_tensors(tmp_path, class_name, names):
    theirs = random_peer(class_name, FILES[class_name])
    theirs.save_pretrained(tmp_path)  # save_original_format: as it would be published
    expected = from_transformers(tmp_path).model.state_dict()
    state_dict = theirs.state_dict()
    if names == "published":
        state_dict = published_names(state_dict, theirs.config.model_type)
    save_file(state_dict, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(from_transformers(tmp_path).model.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_of_the_file_is_kept_whatever_its_config_says(tmp_path, dtype):
    theirs = random_peer("ViTModel", vit()).to(dtype)
    theirs.save_pretrained(tmp_path)
    set_config(tmp_path, dtype="float32")
    torch.testing.assert_close(from_transformers(tmp_path).model.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_weights_in_several_files_are_read(tmp_path):
    theirs = random_peer("ViTModel", vit())
    theirs.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(from_transformers(tmp_path).model.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_weights_of_torch_save_are_read(tmp_path):
    theirs = random_peer("ViTModel", vit())
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(from_transformers(tmp_path).model.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_a_vit_saved_without_its_pooler_has_none(tmp_path):
    theirs = transformers.ViTModel(vit(), add_pooling_layer=False)
    theirs.save_pretrained(tmp_path)
    conversion = from_transformers(tmp_path)
    assert conversion.model.config.representation_size is None
    assert list(conversion.reference(random_pixels(dtype=torch.float64))) == ["last_hidden_state"]


# Labels and training


def test_labels_and_objective_come_along(tmp_path):
    saved_peer(tmp_path, "ViTForImageClassification", vit(problem_type="multi_label_classification"))
    config = from_transformers(tmp_path).model.config
    assert config.id2label == {index: f"kind {index}" for index in range(7)}
    assert config.problem_type == "multi_label_classification"


def test_class_names_that_stand_twice_get_their_number(tmp_path):
    saved_peer(tmp_path, "ViTForImageClassification", vit(id2label={0: "crane", 1: "cat", 2: "crane"}))
    conversion = from_transformers(tmp_path)  # as in ImageNet: the bird and the machine
    assert conversion.model.config.id2label == {0: "crane (0)", 1: "cat", 2: "crane (2)"}
    assert "class names that stand more than once got their number: crane" in conversion.notes


def test_one_class_is_a_sigmoid(tmp_path):
    saved_peer(tmp_path, "ViTForImageClassification", vit(id2label={0: "cat"}))
    assert from_transformers(tmp_path).model.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize(
    ("class_name", "config", "ours", "note"),
    [
        ("ViTModel", vit(hidden_dropout_prob=0.1), {"hidden_dropout_prob": 0.1}, "no dropout there"),
        ("ViTModel", vit(attention_probs_dropout_prob=0.1), {"attention_probs_dropout_prob": 0.1}, None),
        ("Dinov2Model", dinov2(hidden_dropout_prob=0.1), {"hidden_dropout_prob": 0.0}, "on the embeddings alone"),
        ("Dinov2Model", dinov2(drop_path_rate=0.2), {"drop_path_rate": 0.2}, "the same in every layer"),
        ("DINOv3ViTModel", dinov3(attention_dropout=0.1), {"attention_probs_dropout_prob": 0.1}, None),
        ("DINOv3ViTModel", dinov3(pos_embed_shift=0.5), {}, "pos_embed_shift=0.5, pos_embed_rescale=2.0: coordinates"),
        ("SiglipVisionModel", siglip_vision(attention_dropout=0.1), {"attention_probs_dropout_prob": 0.1}, None),
        ("Dinov2Backbone", dinov2(reshape_hidden_states=False), {}, "feature maps are maps here"),
        ("DINOv3ViTBackbone", dinov3(apply_layernorm=False), {"apply_layernorm": False}, "norms the last feature map"),
    ],
)
def test_fields_of_training_come_along_or_are_noted(tmp_path, class_name, config, ours, note):
    saved_peer(tmp_path, class_name, config)
    conversion = from_transformers(tmp_path)
    assert {name: getattr(conversion.model.config, name) for name in ours} == ours
    assert note is None or any(note in found for found in conversion.notes)
