"""SwiGLU in the place of the MLP, and normalised queries and keys: against transformers, timm and closed forms."""

import math

import numpy as np
import pytest
import torch
import transformers
from fixtures_dinov2 import TINY_DINOV2, dinov2_to_ours
from fixtures_modeling import TINY, random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from torch import nn
from transformers.models.dinov2.modeling_dinov2 import Dinov2SwiGLUFFN
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTGatedMLP

from modeling_vit_scratch import ViTScratchModel
from modeling_vit_scratch.swiglu_vit_scratch import ViTScratchSwiGLU

EXACT = {"rtol": 0, "atol": 0}
# Both sides are in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 0, "atol": 1e-12}
TOKENS = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

# SwiGLU.


def swiglu(intermediate_size: int) -> ViTScratchSwiGLU:
    fields = {"mlp_type": "swiglu", "hidden_act": "silu", "intermediate_size": intermediate_size}
    return tiny_encoder(dtype=torch.float64, **fields).layers[0].mlp


def test_swiglu_is_that_of_dinov2():
    theirs = Dinov2SwiGLUFFN(transformers.Dinov2Config(**{**TINY_DINOV2, "mlp_ratio": 4})).double()
    randomize(theirs)
    ours = swiglu(88)  # two thirds of 4 * 32, up to a multiple of 8
    ours.load_state_dict(dinov2_to_ours(theirs.state_dict()), strict=True)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS), **EXACT)


def test_swiglu_is_the_gated_mlp_of_dinov3():
    theirs = DINOv3ViTGatedMLP(transformers.DINOv3ViTConfig(**TINY, hidden_act="silu")).double()
    randomize(theirs)
    ours = swiglu(64)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS), **EXACT)


def test_swiglu_is_its_formula():
    mlp = swiglu(64)
    gate, up = (
        TOKENS.numpy() @ dense.weight.detach().numpy().T + dense.bias.detach().numpy()
        for dense in (mlp.gate_proj, mlp.up_proj)
    )
    hidden = gate / (1 + np.exp(-gate)) * up
    expected = hidden @ mlp.down_proj.weight.detach().numpy().T + mlp.down_proj.bias.detach().numpy()
    torch.testing.assert_close(mlp(TOKENS).detach(), torch.from_numpy(expected), **CLOSE)


def test_the_encoder_with_swiglu_equals_dinov2():
    theirs = transformers.Dinov2Model(transformers.Dinov2Config(**TINY_DINOV2, use_swiglu_ffn=True))
    ours = ViTScratchModel(
        tiny_config(mlp_type="swiglu", hidden_act="silu", intermediate_size=48, layer_scale_init=1.0)
    )
    randomize(theirs)
    ours.load_state_dict(dinov2_to_ours(theirs.state_dict()), strict=True)
    pixels = random_pixels(dtype=torch.float64)
    expected, actual = theirs.double().eval()(pixels), ours.double().eval()(pixels)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, **CLOSE)


def test_dropout_follows_the_gate():
    mlp = tiny_encoder(mlp_type="swiglu", hidden_act="silu", hidden_dropout_prob=0.5).layers[0].mlp.train()
    seen: list[tuple[int, ...]] = []
    mlp.dropout.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    mlp(TOKENS.float())
    assert seen == [(2, 5, 64)]


# Queries and keys.


def slow_attention(attention: nn.Module, tokens: np.ndarray, epsilon: float) -> np.ndarray:
    """Attention weights (B, A, T, T) of queries and keys that are normalised head by head."""

    def heads(name: str) -> np.ndarray:
        dense, norm = attention.get_submodule(f"{name}_proj"), attention.get_submodule(f"{name}_norm")
        projected = tokens @ dense.weight.detach().numpy().T + dense.bias.detach().numpy()
        projected = projected.reshape(*tokens.shape[:2], 4, 8).transpose(0, 2, 1, 3)
        centred = projected - projected.mean(axis=3, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(axis=3, keepdims=True) + epsilon)
        return normed * norm.weight.detach().numpy() + norm.bias.detach().numpy()

    scores = np.exp(heads("q") @ heads("k").transpose(0, 1, 3, 2) / math.sqrt(8))
    return scores / scores.sum(axis=3, keepdims=True)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_queries_and_keys_are_normalised_in_each_head(epsilon):
    layer = tiny_encoder(dtype=torch.float64, qk_norm=True, layer_norm_eps=epsilon).layers[0]
    _, weights = layer.attention(TOKENS, output_attentions=True)
    expected = slow_attention(layer.attention, TOKENS.numpy(), epsilon)
    torch.testing.assert_close(weights.detach(), torch.from_numpy(expected), **CLOSE)


def test_normalised_queries_do_not_see_the_scale_of_their_projection():
    model, pixels = tiny_classifier(dtype=torch.float64, qk_norm=True), random_pixels(dtype=torch.float64)
    before = model(pixels).logits
    with torch.no_grad():
        for layer in model.vit.layers:
            for projection in (layer.attention.q_proj, layer.attention.k_proj):
                projection.weight.mul_(1000)
                projection.bias.mul_(1000)
    # The epsilon under the root is 1e-6 of a variance of about 1.
    torch.testing.assert_close(model(pixels).logits, before, rtol=0, atol=1e-3)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", None])
def test_a_classifier_with_normalised_queries_reads_the_full_last_layer(attn_implementation):
    fields = {"qk_norm": True, "attn_implementation": attn_implementation}
    model, pixels = tiny_classifier(dtype=torch.float64, **fields), random_pixels(dtype=torch.float64)
    torch.testing.assert_close(model(pixels).logits, model.classifier(model.vit(pixels).pooler_output), **CLOSE)


def test_queries_are_normalised_before_they_are_rotated():
    model = tiny_encoder(dtype=torch.float64, qk_norm=True, position_embedding_type="rope_2d")
    attention, seen = model.layers[0].attention, []
    attention.positions.register_forward_pre_hook(lambda module, args: seen.extend(args[:2]))
    model(random_pixels(dtype=torch.float64))
    for tokens, norm in zip(seen, (attention.q_norm, attention.k_norm), strict=True):
        plain = (tokens - norm.bias) / norm.weight
        torch.testing.assert_close(plain.mean(dim=3), torch.zeros_like(plain[..., 0]), rtol=0, atol=1e-9)


# timm


@pytest.mark.peer
def test_normalised_queries_and_keys_are_those_of_timm():
    timm = pytest.importorskip("timm.layers", reason="needs timm")
    theirs = timm.Attention(32, num_heads=4, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm).double().eval()
    randomize(theirs)
    attention = tiny_encoder(dtype=torch.float64, qk_norm=True, layer_norm_eps=1e-5).layers[0].attention
    state = {}
    for name, tensor in theirs.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module == "qkv":
            state |= {f"{part}_proj.{kind}": piece for part, piece in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            state[{"proj": "o_proj"}.get(module, module) + f".{kind}"] = tensor
    attention.load_state_dict(state, strict=True)
    torch.testing.assert_close(attention(TOKENS)[0], theirs(TOKENS), **CLOSE)


@pytest.mark.peer
def test_swiglu_is_that_of_timm():
    timm = pytest.importorskip("timm.layers", reason="needs timm")
    theirs = timm.SwiGLU(32, hidden_features=64, act_layer=nn.SiLU).double().eval()
    randomize(theirs)
    names = {"fc1_g": "gate_proj", "fc1_x": "up_proj", "fc2": "down_proj"}
    state = {f"{names[name.split('.')[0]]}.{name.split('.')[1]}": t for name, t in theirs.state_dict().items()}
    ours = swiglu(64)
    ours.load_state_dict(state, strict=True)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS), **CLOSE)
