"""Checkpoints of transformers' vision models as ours: the loaded peer is what ours is compared with."""

import json
import re
from pathlib import Path

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
    siglip_vision,
    vit,
)
from fixtures_modeling import random_pixels
from safetensors.torch import load_file, save_file

from modeling_vit_scratch import ViTScratchBackbone
from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.convert_transformers_vit_scratch import from_transformers
from modeling_vit_scratch.errors_vit_scratch import InputError

ALL = {
    **ENCODERS,
    **{f"classifier {name}": case for name, case in CLASSIFIERS.items()},
    "MAE with its decoder": ("ViTMAEForPreTraining", mae()),
}

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
    expected = theirs(pixels) if "logits" in actual else run_encoder(theirs, pixels)
    torch.testing.assert_close(actual, {name: expected[name] for name in actual}, rtol=0, atol=0)


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
    expected = {name: peer(pixels)[name] for name in conversion.reference(pixels)}
    torch.testing.assert_close(conversion.reference(pixels), expected, rtol=0, atol=0)
    ours = conversion.model.double()(pixels)
    torch.testing.assert_close({name: ours[name] for name in expected}, expected, **CLOSE)
    assert any(
        note.startswith("the distillation token, its position and its head are dropped") for note in conversion.notes
    )


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


# Refusals


def set_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "swin"}, "model_type='swin' is not converted; it must be one of vit, deit"),
        ({"architectures": ["ViTHybridModel"]}, r"architectures=\['ViTHybridModel'\] must name one of ViTModel"),
        ({"architectures": None}, r"architectures=\[\] must name one of ViTModel"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantization_config"),
        ({"hidden_size": "32"}, "transformers cannot load it: .*hidden_size"),
        ({"hidden_size": 64}, "of another shape: .*cls_token"),
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2\."),
        ({"num_hidden_layers": 1}, r"without a place: .*layers?\.1\."),
        ({"problem_type": "regression"}, "problem_type='regression' has no counterpart"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0 must be in \[0, 1\)"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused_in_one_line(tmp_path, fields, message):
    saved_peer(tmp_path, "ViTForImageClassification", vit())
    set_config(tmp_path, **fields)
    with pytest.raises(InputError, match=message) as refusal:
        from_transformers(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    ("class_name", "config", "message"),
    [
        ("ViTModel", vit(head_dim=16), "head_dim=16 is not hidden_size / num_attention_heads = 32 / 4"),
        ("ViTForImageClassification", vit(id2label={}, num_labels=0), "num_labels=0"),
        ("ViTModel", vit(pooler_act="relu"), "pooler_act='relu' has no counterpart; it must be 'tanh'"),
        ("Dinov2Model", dinov2(image_size=[32, 48]), r"image_size=\[32, 48\] .* not square"),
        ("DINOv3ViTModel", dinov3(use_gated_mlp=True), "use_gated_mlp=True with hidden_act='gelu'"),
    ],
)
def test_a_network_without_counterpart_is_refused(tmp_path, class_name, config, message):
    saved_peer(tmp_path, class_name, config)
    with pytest.raises(InputError, match=message):
        from_transformers(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("encoder.layer.0.attention.attention.query.weight", False),
        ("embeddings.cls_token", False),
        ("layernorm.bias", False),
        ("pooler.dense.weight", True),
    ],
)
def test_a_missing_tensor_is_refused_by_name_unless_nothing_reads_it(tmp_path, name, kept):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    tensors = {
        key: tensor for key, tensor in load_file(file).items() if not (key == name or (kept and "pooler" in key))
    }
    save_file(tensors, file, metadata={"format": "pt"})
    if kept:
        assert from_transformers(tmp_path).model.config.representation_size is None
        return
    with pytest.raises(InputError, match="missing: "):
        from_transformers(tmp_path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "layernorm2.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"without a place: layernorm2\.weight"):
        from_transformers(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no config\.json"):
        from_transformers(tmp_path)


def test_a_truncated_file_of_weights_is_refused(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        from_transformers(tmp_path)


def test_pickled_code_beside_the_config_is_not_run(tmp_path):
    saved_peer(tmp_path, "ViTModel", vit())
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weights": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        from_transformers(tmp_path)
