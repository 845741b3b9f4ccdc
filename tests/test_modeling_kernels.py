"""The attention kernels: which serve which network, and that all give the same answer."""

import pytest
import torch
from fixtures_modeling import random_pixels, randomize, tiny_classifier, tiny_config, tiny_encoder
from fixtures_variants import VARIANTS, variant_classifier, variant_pixels
from transformers import AttentionInterface, UperNetConfig, UperNetForSemanticSegmentation

from modeling_vit_scratch import ViTScratchForImageClassification
from modeling_vit_scratch.errors_vit_scratch import InputError

# Of values around 1 in float64; a difference of meaning is larger by many orders.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LABELS = torch.tensor([0, 3])
WITHOUT_RELATIVE = [name for name, fields in VARIANTS.items() if fields.get("position_embedding_type") != "relative"]
KERNELS_WITHOUT_A_MATRIX_A_HEAD = ["flex_attention", "flash_attention_2", "flash_attention_3"]


def evaluated(variant: str, attn_implementation: str) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of the variant, in float64 and in evaluation mode."""
    model = variant_classifier(variant, dtype=torch.float64, attn_implementation=attn_implementation)
    output = model(variant_pixels(variant).double(), labels=LABELS)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": output.logits, "loss": output.loss, **gradients}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_attention_written_out(variant):
    torch.testing.assert_close(evaluated(variant, "sdpa"), evaluated(variant, "eager"), **CLOSE)


@pytest.mark.parametrize("attn_implementation", [None, "eager", "sdpa"])
@pytest.mark.parametrize("variant", ["relative", "rotary", "QK-norm", "registers and attention pooling"])
def test_attentions_asked_for_do_not_depend_on_the_kernel(variant, attn_implementation):
    model, pixels = variant_classifier(variant, dtype=torch.float64), variant_pixels(variant).double()
    model.set_attn_implementation("eager")
    expected = model(pixels, output_attentions=True).attentions
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    torch.testing.assert_close(model(pixels, output_attentions=True).attentions, expected, rtol=0, atol=0)
    assert expected[1].shape == (2, 4, *[model.config.num_prefix_tokens + model.config.num_patches] * 2)


def with_flex(variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the variant from flex attention, and from attention written out."""
    model, pixels = variant_classifier(variant, attn_implementation="flex_attention"), variant_pixels(variant)
    with torch.no_grad():
        flex = model(pixels).logits
        model.set_attn_implementation("eager")
        return flex, model(pixels).logits


# Flex is compiled for a while at the first two or three sequence lengths. On a CPU it has no backward.
@pytest.mark.e2e
@pytest.mark.parametrize("variant", ["rotary"])
def test_flex_attention_gives_the_logits_of_attention_written_out(variant):
    flex, eager = with_flex(variant)
    torch.testing.assert_close(flex, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", WITHOUT_RELATIVE)
def test_flex_attention_serves_every_variant_but_relative_positions(variant):
    flex, eager = with_flex(variant)
    torch.testing.assert_close(flex, eager, rtol=1e-5, atol=1e-5)


def test_queries_and_keys_reach_the_kernel_in_the_dtype_of_the_values():
    # Under autocast on an accelerator a LayerNorm gives float32; so do these on any device.
    seen = []

    def recorded(module, query, key, value, attention_mask, **kwargs):
        seen.append((query.dtype, key.dtype, value.dtype))
        return value.transpose(1, 2), None

    AttentionInterface.register("dtypes_for_this_test", recorded)
    model = tiny_encoder(qk_norm=True, attn_implementation="dtypes_for_this_test", dtype=torch.bfloat16)
    for layer in model.layers:
        layer.attention.q_norm.register_forward_hook(lambda _, inputs, output: output.float())
        layer.attention.k_norm.register_forward_hook(lambda _, inputs, output: output.float())
    model(random_pixels())
    assert seen == [(torch.bfloat16,) * 3] * 2


# Relative positions add a matrix to each head's logits. Flex attention as transformers calls it would add that of the
# first head to all, and flash attention none, in silence.

REFUSAL = r"position_embedding_type='relative' .*attn_implementation='{}'.*use one of .*eager, sdpa"


@pytest.mark.parametrize("attn_implementation", KERNELS_WITHOUT_A_MATRIX_A_HEAD)
def test_relative_positions_refuse_a_kernel_that_cannot_serve_them(attn_implementation):
    with pytest.raises(InputError, match=REFUSAL.format(attn_implementation)):
        tiny_classifier(position_embedding_type="relative", attn_implementation=attn_implementation)


@pytest.mark.parametrize("attn_implementation", KERNELS_WITHOUT_A_MATRIX_A_HEAD)
def test_relative_positions_refuse_such_a_kernel_at_load(tmp_path, attn_implementation):
    tiny_classifier(position_embedding_type="relative").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=REFUSAL.format(attn_implementation)):
        ViTScratchForImageClassification.from_pretrained(tmp_path, attn_implementation=attn_implementation)


@pytest.mark.parametrize("wanted", [*KERNELS_WITHOUT_A_MATRIX_A_HEAD, {"": "flex_attention"}], ids=str)
def test_relative_positions_refuse_such_a_kernel_afterwards_and_keep_theirs(wanted):
    model = tiny_classifier(position_embedding_type="relative", attn_implementation="eager")
    with pytest.raises(InputError, match=REFUSAL.format(wanted if isinstance(wanted, str) else wanted[""])):
        model.set_attn_implementation(wanted)
    assert model.config._attn_implementation == "eager"


def test_relative_positions_refuse_such_a_kernel_set_by_the_model_around_them():
    backbone_config = tiny_config(position_embedding_type="relative")
    head = {"hidden_size": 8, "pool_scales": [1], "use_auxiliary_head": False}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone_config, **head))
    with pytest.raises(InputError, match=REFUSAL.format("flex_attention")):
        model.set_attn_implementation({"backbone_config": "flex_attention"})


@pytest.mark.parametrize("wanted", ["eager", "sdpa", {"": "eager"}], ids=str)
def test_relative_positions_take_the_kernels_that_serve_them(wanted):
    model, pixels = tiny_encoder(position_embedding_type="relative"), random_pixels()
    expected = model(pixels).last_hidden_state
    model.set_attn_implementation(wanted)
    torch.testing.assert_close(model(pixels).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_each_head_has_relative_logits_of_its_own():
    # Else one head's logits for all, as flex attention would have it, would pass every test above.
    model = tiny_encoder(position_embedding_type="relative", num_hidden_layers=1)
    randomize(model)
    with torch.no_grad():  # no content: only positions tell keys apart
        model.layers[0].attention.k_proj.weight.zero_()
        model.layers[0].attention.k_proj.bias.zero_()
    attentions = model(random_pixels(), output_attentions=True).attentions[0]  # (B, A, T, T)
    assert (attentions[:, 0] - attentions[:, 1]).abs().max() > 0.01
