"""Saving and loading: what must come from the checkpoint, what may be new, and that files are the same bytes."""

import copy
import json
import logging
import shutil

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from modeling_vit_scratch.errors_vit_scratch import InputError

EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture
def classifier(tmp_path) -> ViTScratchForImageClassification:
    """A classifier that is saved in tmp_path / "classifier"."""
    model = tiny_classifier(representation_size=16)
    model.save_pretrained(tmp_path / "classifier")
    return model


@pytest.fixture
def encoder(tmp_path) -> ViTScratchModel:
    """An encoder that is saved in tmp_path / "encoder"."""
    model = tiny_encoder()
    model.save_pretrained(tmp_path / "encoder")
    return model


def edit_weights(folder, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Round trips.


@pytest.mark.parametrize(
    "fields",
    [{}, {"pooling": "mean"}, {"representation_size": 16}, {"image_size": [32, 64], "patch_size": [4, 8]}],
    ids=["class token", "mean", "pre-logits", "not square"],
)
def test_saving_loading_and_saving_again_gives_the_same_bytes(tmp_path, fields):
    tiny_classifier(**fields).save_pretrained(tmp_path / "first")
    ViTScratchForImageClassification.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_folder_holds_config_and_weights_and_nothing_else(tmp_path):
    tiny_classifier().save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_in_shards_is_the_same_model(tmp_path):
    model = tiny_classifier()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"], ids=str)
def test_a_dtype_at_load_is_that_of_every_tensor(classifier, tmp_path, dtype):
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", dtype=dtype)
    expected = {name: tensor.bfloat16() for name, tensor in classifier.state_dict().items()}
    torch.testing.assert_close(model.state_dict(), expected, **EXACT)


@pytest.mark.parametrize("arguments", [{}, {"dtype": "auto"}], ids=str)
def test_a_checkpoint_in_bfloat16_is_loaded_in_bfloat16(tmp_path, arguments):
    tiny_classifier(dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert ViTScratchForImageClassification.from_pretrained(tmp_path, **arguments).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("auto_class", "expected"),
    [(AutoModel, ViTScratchModel), (AutoModelForImageClassification, ViTScratchForImageClassification)],
)
def test_auto_classes_know_our_models_once_the_package_is_imported(classifier, tmp_path, auto_class, expected):
    assert type(auto_class.from_pretrained(tmp_path / "classifier", trust_remote_code=False)) is expected


def test_auto_config_knows_our_config_once_the_package_is_imported(classifier, tmp_path):
    assert type(AutoConfig.from_pretrained(tmp_path / "classifier")) is ViTScratchConfig


@pytest.mark.parametrize("load", [ViTScratchForImageClassification, AutoModelForImageClassification])
def test_a_subfolder_is_found(tmp_path, load):
    model = tiny_classifier()
    model.save_pretrained(tmp_path / "inner")
    loaded = load.from_pretrained(tmp_path, subfolder="inner", revision="main", image_size=48)
    assert loaded.config.image_size == 48
    torch.testing.assert_close(loaded.classifier.state_dict(), model.classifier.state_dict(), **EXACT)


def test_a_device_map_is_obeyed(classifier, tmp_path):
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", device_map="cpu")
    torch.testing.assert_close(model(random_pixels()).logits, classifier(random_pixels()).logits, **EXACT)


# Between encoder and classifier.


def test_a_classifier_takes_the_weights_of_an_encoder(encoder, tmp_path):
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "encoder", num_labels=7)
    torch.testing.assert_close(model.vit.state_dict(), encoder.state_dict(), **EXACT)


def test_a_new_head_is_named_in_the_log(encoder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        ViTScratchForImageClassification.from_pretrained(tmp_path / "encoder", num_labels=7)
    assert "newly initialised, so train before use: classifier.bias, classifier.weight" in caplog.text


def test_an_encoder_takes_its_weights_from_a_classifier(classifier, tmp_path):
    model = ViTScratchModel.from_pretrained(tmp_path / "classifier")
    torch.testing.assert_close(model.state_dict(), classifier.vit.state_dict(), **EXACT)


def test_a_head_that_is_left_out_is_named_in_the_log(classifier, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        ViTScratchModel.from_pretrained(tmp_path / "classifier")
    assert "no such head: classifier.bias, classifier.weight" in caplog.text


def test_fine_tuning_may_leave_out_the_pre_logits_layer(classifier, tmp_path):
    model = ViTScratchForImageClassification.from_pretrained(
        tmp_path / "classifier", representation_size=None, num_labels=5, ignore_mismatched_sizes=True
    )
    expected = {name: tensor for name, tensor in classifier.vit.state_dict().items() if "pooler" not in name}
    torch.testing.assert_close(model.vit.state_dict(), expected, **EXACT)
    assert not model.classifier.weight.any()


def test_a_head_of_another_size_is_refused_unless_it_may_be_new(classifier, tmp_path):
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", num_labels=5)


@pytest.mark.parametrize("load", [ViTScratchForImageClassification, AutoModelForImageClassification])
def test_a_head_of_another_size_may_be_new_and_is_named_in_the_log(tmp_path, caplog, load):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="modeling_vit_scratch"):
        loaded = load.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    torch.testing.assert_close(loaded.vit.state_dict(), model.vit.state_dict(), **EXACT)
    assert tuple(loaded.classifier.weight.shape) == (5, 32)
    assert not loaded.classifier.weight.any()
    assert "newly initialised, so train before use: classifier.bias, classifier.weight" in caplog.text


# What a checkpoint must hold.


@pytest.mark.parametrize("load", [ViTScratchForImageClassification, ViTScratchModel, AutoModel])
def test_a_missing_tensor_of_the_encoder_is_refused_by_name(classifier, tmp_path, load):
    edit_weights(tmp_path / "classifier", lambda weights: weights.pop("vit.layers.1.attention.k_proj.bias"))
    with pytest.raises(InputError, match=r"classifier.*missing.*layers\.1\.attention\.k_proj\.bias"):
        load.from_pretrained(tmp_path / "classifier")


def test_a_missing_tensor_of_the_encoder_is_refused_when_the_head_is_new(encoder, tmp_path):
    edit_weights(tmp_path / "encoder", lambda weights: weights.pop("layers.0.mlp.fc1.weight"))
    with pytest.raises(InputError, match=r"vit\.layers\.0\.mlp\.fc1\.weight"):
        ViTScratchForImageClassification.from_pretrained(tmp_path / "encoder")


@pytest.mark.parametrize("load", [ViTScratchForImageClassification, ViTScratchModel])
def test_a_tensor_that_belongs_nowhere_is_refused_by_name(classifier, tmp_path, load):
    edit_weights(tmp_path / "classifier", lambda weights: weights.update({"vit.layers.2.scale": torch.ones(1)}))
    with pytest.raises(InputError, match=r"unexpected.*layers\.2\.scale"):
        load.from_pretrained(tmp_path / "classifier")


@pytest.mark.parametrize("num_hidden_layers", [1, 3])
def test_another_depth_is_refused(classifier, tmp_path, num_hidden_layers):
    with pytest.raises(InputError, match=r"vit\.layers"):
        ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", num_hidden_layers=num_hidden_layers)


def test_an_encoder_of_another_shape_is_refused_even_if_sizes_may_differ(classifier, tmp_path):
    with pytest.raises(InputError, match=r"of another shape.*vit\.layers\.0\.mlp\.fc1\.weight"):
        ViTScratchForImageClassification.from_pretrained(
            tmp_path / "classifier", intermediate_size=48, ignore_mismatched_sizes=True
        )


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    save_file({"conv1.weight": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"unexpected \['conv1\.weight'\]"):
        ViTScratchForImageClassification.from_pretrained(tmp_path)


def test_an_empty_state_dict_is_an_initialisation():
    model = ViTScratchForImageClassification.from_pretrained(None, config=tiny_config(), state_dict={})
    assert model.vit.layers[0].attention.q_proj.weight.std() > 0.05


def test_a_state_dict_given_as_such_is_loaded():
    model = tiny_classifier()
    loaded = ViTScratchForImageClassification.from_pretrained(
        None, config=tiny_config(), state_dict=copy.deepcopy(model.state_dict())
    )
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), **EXACT)


def test_a_state_dict_given_as_such_must_be_whole():
    state = copy.deepcopy(tiny_classifier().state_dict())
    del state["vit.embeddings.cls_token"]
    with pytest.raises(InputError, match=r"the state dict.*vit\.embeddings\.cls_token"):
        ViTScratchForImageClassification.from_pretrained(None, config=tiny_config(), state_dict=state)


def test_loading_info_is_returned_when_asked_for(encoder, tmp_path):
    model, info = ViTScratchForImageClassification.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert isinstance(model, ViTScratchForImageClassification)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}


# Configs given by hand.


def test_a_config_given_by_hand_decides_what_is_not_in_the_weights(classifier, tmp_path):
    config = copy.deepcopy(classifier.config)
    config.hidden_dropout_prob = 0.25
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", config=config)
    assert model.vit.layers[0].dropout.p == 0.25


def test_a_config_given_by_hand_is_not_edited(classifier, tmp_path):
    config = ViTScratchConfig.from_pretrained(tmp_path / "classifier", image_size=64)
    before = config.to_dict()
    ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", config=config)
    assert config.to_dict() == before


def test_a_config_given_by_hand_serves_a_folder_without_one(classifier, tmp_path):
    (tmp_path / "classifier" / "config.json").unlink()
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "classifier", config=classifier.config)
    torch.testing.assert_close(model.state_dict(), classifier.state_dict(), **EXACT)


def test_a_config_given_as_a_folder_is_read(classifier, tmp_path):
    shutil.copytree(tmp_path / "classifier", tmp_path / "weights")
    (tmp_path / "weights" / "config.json").unlink()
    model = ViTScratchForImageClassification.from_pretrained(tmp_path / "weights", config=str(tmp_path / "classifier"))
    torch.testing.assert_close(model.state_dict(), classifier.state_dict(), **EXACT)


def test_a_config_file_that_leaves_out_a_default_loads_like_one_that_states_it(tmp_path):
    model = tiny_classifier()
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["num_channels"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, num_channels=1)
    expected = model.vit.embeddings.patch_embeddings.projection.weight.sum(1, keepdim=True)
    torch.testing.assert_close(loaded.vit.embeddings.patch_embeddings.projection.weight.detach(), expected.detach())


# Labels.


def test_names_of_the_classes_survive(tmp_path):
    tiny_classifier(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    config = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert (config.id2label, config.label2id) == ({0: "cat", 1: "dog"}, {"cat": 0, "dog": 1})


def test_other_names_at_load_make_a_head_of_their_number(encoder, tmp_path):
    names = {"0": "cat", "1": "dog", "2": "bird"}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "encoder", id2label=names)
    model.save_pretrained(tmp_path / "again")  # where the labels are checked
    assert tuple(model.classifier.weight.shape) == (3, 32)
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "bird"}
