"""The same network as transformers' ViT and, tested where it is installed, timm's."""

import pytest
import torch
import transformers
from fixtures_modeling import TINY, random_pixels, randomize

from modeling_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel

# What transformers' ViT does where it differs from the official code.
AS_TRANSFORMERS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_interpolation": "bicubic"}
# In float64 rounding is about 1e-15; a difference of meaning is larger by many orders. transformers' eager attention
# takes its softmax in float32 whatever the model's dtype, ours in the model's.
CLOSE = {"rtol": 0, "atol": 1e-12}
TOLERANCE = {"sdpa": CLOSE, "eager": {"rtol": 1e-6, "atol": 2e-6}}


def classifiers(attn_implementation: str, **fields):
    """Returns transformers' classifier and ours with the same weights, in float64."""
    shape = {**TINY, "num_labels": 7, "attn_implementation": attn_implementation, **fields}
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(**shape, problem_type="single_label_classification")
    )
    ours = ViTScratchForImageClassification(ViTScratchConfig(**shape, **AS_TRANSFORMERS))
    randomize(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.double().eval(), ours.double().eval()


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_logits_equal_those_of_transformers(attn_implementation, qkv_bias):
    theirs, ours = classifiers(attn_implementation, qkv_bias=qkv_bias)
    pixels = random_pixels(dtype=torch.float64)
    torch.testing.assert_close(ours(pixels).logits, theirs(pixels).logits, **TOLERANCE[attn_implementation])


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_loss_and_gradients_of_all_parameters_equal_those_of_transformers(attn_implementation):
    theirs, ours = classifiers(attn_implementation)
    pixels, labels = random_pixels(dtype=torch.float64), torch.tensor([1, 5])
    their_loss, our_loss = theirs(pixels, labels=labels).loss, ours(pixels, labels=labels).loss
    their_loss.backward()
    our_loss.backward()
    torch.testing.assert_close(our_loss, their_loss, **TOLERANCE[attn_implementation])
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    actual = {name: parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(actual, expected, **TOLERANCE[attn_implementation])


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_hidden_states_equal_those_of_transformers(attn_implementation):
    theirs, ours = classifiers(attn_implementation)
    pixels = random_pixels(dtype=torch.float64)
    expected = theirs(pixels, output_hidden_states=True).hidden_states
    actual = ours(pixels, output_hidden_states=True).hidden_states
    torch.testing.assert_close(actual, expected, **TOLERANCE[attn_implementation])


def test_attentions_equal_those_of_transformers():
    theirs, ours = classifiers("eager")
    pixels = random_pixels(dtype=torch.float64)
    expected = theirs(pixels, output_attentions=True).attentions
    actual = ours(pixels, output_attentions=True).attentions
    torch.testing.assert_close(actual, expected, **TOLERANCE["eager"])


def test_the_encoder_with_its_tanh_pooler_equals_that_of_transformers():
    theirs = transformers.ViTModel(transformers.ViTConfig(**TINY))
    ours = ViTScratchModel(ViTScratchConfig(**TINY, **AS_TRANSFORMERS, representation_size=TINY["hidden_size"]))
    randomize(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels), ours.double().eval()(pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **CLOSE)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, **CLOSE)


@pytest.mark.parametrize(("height", "width"), [(48, 48), (16, 16), (48, 64), (24, 32)])
def test_a_runtime_grid_equals_the_bicubic_positions_of_transformers(height, width):
    theirs, ours = classifiers("sdpa")
    pixels = random_pixels(height=height, width=width, dtype=torch.float64)
    expected = theirs(pixels, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(ours(pixels).logits, expected, **CLOSE)


# timm


def timm_to_ours(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "blocks": "vit.layers",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "pos_embed": "vit.embeddings.position_embeddings",
        "cls_token": "vit.embeddings.cls_token",
        "head.": "classifier.",
    }
    ours = {}
    for name, tensor in state.items():
        if "attn.qkv" in name:
            layer, kind = name.replace("blocks", "vit.layers").split(".attn.qkv.")
            for projection, part in zip("qkv", tensor.chunk(3), strict=True):
                ours[f"{layer}.attention.{projection}_proj.{kind}"] = part
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        ours["vit.layer" + name if name.startswith("norm.") else name] = tensor
    return ours


@pytest.mark.peer
@pytest.mark.parametrize(
    ("pooling", "timm_fields"),
    [("class_token", {}), ("mean", {"global_pool": "avg", "class_token": False, "fc_norm": False})],
)
def test_logits_equal_those_of_timm(pooling, timm_fields):
    timm = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    theirs = timm.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, num_classes=7, **timm_fields
    )
    ours = ViTScratchForImageClassification(ViTScratchConfig(**TINY, num_labels=7, hidden_act="gelu", pooling=pooling))
    randomize(theirs)
    ours.load_state_dict(timm_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected = theirs.double().eval()(pixels)
    torch.testing.assert_close(ours.double().eval()(pixels).logits, expected, **CLOSE)
