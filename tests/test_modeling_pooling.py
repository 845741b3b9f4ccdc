"""What a head reads: each pooling against transformers' SigLIP and Dinov2, timm, and closed forms."""

import pytest
import torch
import transformers
from fixtures_dinov2 import TINY_DINOV2, dinov2_to_ours
from fixtures_modeling import random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import Tensor, nn
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from modeling_vit_scratch import ViTScratchForImageClassification

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}


def normed(tokens: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The layer norm written out."""
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    deviation = (centred.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    return centred / deviation * norm.weight + norm.bias


def last_hidden_state(model: nn.Module, pixels: Tensor) -> Tensor:
    """The tokens after the last layer, before any norm."""
    return model(pixels, output_hidden_states=True).hidden_states[-1]


def test_the_layer_norm_written_out_is_torchs():
    norm, tokens = nn.LayerNorm(32).double(), torch.randn(2, 3, 32, dtype=torch.float64)
    torch.testing.assert_close(normed(tokens, norm), norm(tokens), **CLOSE)


# Mean.


@pytest.mark.parametrize(
    "tokens", [{}, {"use_class_token": True}, {"use_class_token": True, "num_register_tokens": 2}], ids=str
)
def test_the_mean_is_that_of_the_normed_patch_tokens(tokens):
    model, pixels = tiny_encoder(dtype=torch.float64, pooling="mean", **tokens), random_pixels(dtype=torch.float64)
    patches = last_hidden_state(model, pixels)[:, -16:]
    output = model(pixels)
    torch.testing.assert_close(output.pooler_output, normed(patches, model.layernorm).mean(dim=1), **CLOSE)
    assert output.last_hidden_state.shape[1] == 16 + model.config.num_prefix_tokens


@pytest.mark.parametrize(
    "tokens", [{}, {"use_class_token": True}, {"use_class_token": True, "num_register_tokens": 2}], ids=str
)
def test_a_norm_after_pooling_takes_the_mean_of_patch_tokens_that_are_not_normed(tokens):
    fields = {"pooling": "mean", "final_norm": "after_pooling", **tokens}
    model, pixels = tiny_encoder(dtype=torch.float64, **fields), random_pixels(dtype=torch.float64)
    hidden_states = last_hidden_state(model, pixels)
    output = model(pixels)
    expected = normed(hidden_states[:, -16:].mean(dim=1), model.layernorm)
    torch.testing.assert_close(output.pooler_output, expected, **CLOSE)
    torch.testing.assert_close(output.last_hidden_state, hidden_states, **EXACT)


def test_a_class_token_beside_the_mean_is_attended_to():
    model, pixels = tiny_encoder(pooling="mean", use_class_token=True), random_pixels()
    before = model(pixels).pooler_output
    nn.init.constant_(model.embeddings.cls_token, 3.0)
    assert (model(pixels).pooler_output - before).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", ["class_token", "mean", "class_token_and_mean", "attention"])
def test_the_pre_logits_layer_follows_the_pooled_token(pooling):
    fields = {"pooling": pooling, "representation_size": 16}
    model, pixels = tiny_encoder(dtype=torch.float64, **fields), random_pixels(dtype=torch.float64)
    without = tiny_encoder(dtype=torch.float64, pooling=pooling)
    without.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("pooler")})
    dense = model.pooler.dense
    expected = (without(pixels).pooler_output @ dense.weight.mT + dense.bias).tanh()
    torch.testing.assert_close(model(pixels).pooler_output, expected, **CLOSE)


# Class token and mean.


def test_class_token_and_mean_side_by_side_equal_the_classifier_of_dinov2():
    theirs = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**TINY_DINOV2, num_labels=7))
    ours = ViTScratchForImageClassification(
        tiny_config(pooling="class_token_and_mean", layer_scale_init=1.0, hidden_act="gelu")
    )
    randomize(theirs)
    ours.load_state_dict(dinov2_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels).logits, ours.double().eval()(pixels).logits
    torch.testing.assert_close(actual, expected, **CLOSE)


# The attention head.


def siglip_to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's fused attention, taken apart."""
    ours = {name: tensor for name, tensor in state.items() if "attention" not in name}
    for kind in ("weight", "bias"):
        for projection, part in zip("qkv", state[f"attention.in_proj_{kind}"].chunk(3), strict=True):
            ours[f"attention.{projection}_proj.{kind}"] = part
        ours[f"attention.o_proj.{kind}"] = state[f"attention.out_proj.{kind}"]
    return ours


def siglip_and_ours() -> tuple[nn.Module, nn.Module]:
    """Returns SigLIP's attention head and ours with the same weights, in float64."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    theirs = SiglipMultiheadAttentionPoolingHead(transformers.SiglipVisionConfig(**shape)).double()
    randomize(theirs)
    ours = tiny_encoder(dtype=torch.float64, pooling="attention")
    ours.attention_pooling.load_state_dict(siglip_to_ours(theirs.state_dict()), strict=True)
    return theirs, ours


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 24)])
def test_the_attention_head_equals_that_of_siglip(height, width):
    theirs, ours = siglip_and_ours()
    output = ours(random_pixels(height=height, width=width, dtype=torch.float64))
    torch.testing.assert_close(output.pooler_output, theirs(output.last_hidden_state), **CLOSE)


def test_the_gradients_of_the_attention_head_equal_those_of_siglip():
    theirs, ours = siglip_and_ours()
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours.attention_pooling(tokens).square().sum().backward()
    theirs(tokens).square().sum().backward()
    expected = siglip_to_ours({name: parameter.grad for name, parameter in theirs.named_parameters()})
    actual = {name: parameter.grad for name, parameter in ours.attention_pooling.named_parameters()}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-10)


def test_the_attention_head_reads_normed_tokens_without_a_class_token():
    model, pixels = tiny_encoder(dtype=torch.float64, pooling="attention"), random_pixels(dtype=torch.float64)
    tokens = normed(last_hidden_state(model, pixels), model.layernorm)
    assert tokens.shape[1] == 16
    torch.testing.assert_close(model(pixels).pooler_output, model.attention_pooling(tokens), **CLOSE)


def test_a_probe_that_cannot_tell_the_tokens_apart_takes_their_mean():
    model = tiny_encoder(dtype=torch.float64, pooling="attention").attention_pooling
    for parameter in (model.attention.q_proj.weight, model.attention.q_proj.bias, model.mlp.fc2.weight):
        nn.init.zeros_(parameter)
    nn.init.zeros_(model.mlp.fc2.bias)
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = model.attention.o_proj(model.attention.v_proj(tokens).mean(dim=1))
    torch.testing.assert_close(model(tokens), expected, **CLOSE)


# Every pooling.


POOLINGS = {
    "class_token": {},
    "distilled": {"use_distillation_token": True},
    "mean": {"pooling": "mean"},
    "mean with a class token": {"pooling": "mean", "use_class_token": True},
    "mean, then the norm": {"pooling": "mean", "final_norm": "after_pooling"},
    "class_token_and_mean": {"pooling": "class_token_and_mean"},
    "attention": {"pooling": "attention"},
}


@pytest.mark.parametrize("name", POOLINGS)
def test_every_parameter_of_a_classifier_gets_a_gradient_whatever_it_reads(name):
    model = tiny_classifier(**POOLINGS[name], representation_size=None if name == "distilled" else 16).train()
    model(random_pixels(), labels=torch.tensor([0, 3])).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", POOLINGS)
def test_a_classifier_reads_what_its_encoder_returns(name):
    model, pixels = tiny_classifier(dtype=torch.float64, **POOLINGS[name]), random_pixels(dtype=torch.float64)
    output = model.vit(pixels)
    logits = model.classifier(output.pooler_output)
    if name == "distilled":
        logits = (logits + model.distillation_classifier(output.last_hidden_state[:, 1])) / 2
    torch.testing.assert_close(model(pixels).logits, logits, **CLOSE)


@pytest.mark.parametrize("name", POOLINGS)
def test_a_classifier_of_each_pooling_survives_saving_and_loading(name, tmp_path):
    model = tiny_classifier(**POOLINGS[name])
    model.save_pretrained(tmp_path)
    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(random_pixels()).logits, model(random_pixels()).logits, **EXACT)


# timm


TIMM = {
    "class token": ({}, {}),
    "mean, then the norm": (
        {"global_pool": "avg"},
        {"pooling": "mean", "final_norm": "after_pooling", "use_class_token": True},
    ),
    "mean, then the norm, without a class token": (
        {"global_pool": "avg", "class_token": False},
        {"pooling": "mean", "final_norm": "after_pooling"},
    ),
    "mean after the norm": (
        {"global_pool": "avg", "fc_norm": False},
        {"pooling": "mean", "use_class_token": True},
    ),
    "mean after the norm, with registers": (
        {"global_pool": "avg", "fc_norm": False, "reg_tokens": 2, "no_embed_class": True},
        {"pooling": "mean", "use_class_token": True, "num_register_tokens": 2, "class_token_position": False},
    ),
    "attention": ({"global_pool": "map", "class_token": False}, {"pooling": "attention"}),
}


def timm_to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "blocks": "vit.layers",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "pos_embed": "vit.embeddings.position_embeddings",
        "cls_token": "vit.embeddings.cls_token",
        "reg_token": "vit.embeddings.register_tokens",
        "head.": "classifier.",
        "fc_norm.": "norm.",
        "attn_pool.latent": "vit.attention_pooling.probe",
        "attn_pool.proj": "vit.attention_pooling.attention.o_proj",
        "attn_pool.q": "vit.attention_pooling.attention.q_proj",
        "attn_pool.norm": "vit.attention_pooling.layernorm",
        "attn_pool.mlp": "vit.attention_pooling.mlp",
    }
    ours = {}
    for name, tensor in state.items():
        for fused, parts in (("attn.qkv", "qkv"), ("attn_pool.kv", "kv")):
            if fused in name:
                for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
                    target = "attention." if fused == "attn.qkv" else "vit.attention_pooling.attention."
                    key = name.replace("blocks", "vit.layers").replace(fused + ".", f"{target}{part}_proj.")
                    ours[key] = piece
                break
        else:
            for old, new in names.items():
                name = name.replace(old, new)
            ours["vit.layer" + name if name.startswith("norm.") else name] = tensor
    return ours


@pytest.mark.peer
@pytest.mark.parametrize("name", TIMM)
def test_the_logits_of_each_pooling_equal_those_of_timm(name):
    timm = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    their_fields, our_fields = TIMM[name]
    # Its attention head has an MLP four times as wide, whatever the layers have.
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 4}
    theirs = timm.VisionTransformer(**shape, num_classes=7, **their_fields)
    ours = ViTScratchForImageClassification(tiny_config(hidden_act="gelu", intermediate_size=128, **our_fields))
    randomize(theirs)
    ours.load_state_dict(timm_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels), ours.double().eval()(pixels).logits
    torch.testing.assert_close(actual, expected, **CLOSE)
