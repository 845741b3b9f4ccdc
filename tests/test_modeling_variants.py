"""Every variant: low precision, gradient checkpointing, adapters, and work that is really skipped."""

import copy
import dataclasses
from typing import Any, get_args

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_config, tiny_encoder
from fixtures_variants import VARIANTS, variant_classifier, variant_pixels
from huggingface_hub.errors import StrictDataclassClassValidationError
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from modeling_vit_scratch import ViTScratchConfig

EXACT = {"rtol": 0, "atol": 0}
LABELS = torch.tensor([0, 3, 1, 2])

# The variants are complete.

OF_OTHER_MODELS = {  # self-supervision, backbone, and what transformers keeps in a config
    *("corruption_ratio", "prediction_target", "image_mean", "image_std", "mask_ratio", "norm_pix_loss"),
    *("decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads", "decoder_intermediate_size"),
    *("apply_layernorm", "_out_features", "_out_indices"),
}
SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps"}
FIELDS = [name for name in ViTScratchConfig.__annotations__ if name not in OF_OTHER_MODELS | SIZES]


@pytest.mark.parametrize("field", FIELDS)
def test_the_variants_use_every_field_and_each_of_its_choices(field):
    values = {repr(getattr(tiny_config(**variant), field)) for variant in VARIANTS.values()}
    choices = get_args(ViTScratchConfig.__annotations__[field])
    choices = choices if all(isinstance(choice, str) for choice in choices) else ()
    assert values >= {repr(choice) for choice in choices} and len(values) > 1


def test_the_variants_hold_every_place_of_every_kind_of_positions():
    fields = ("position_embedding_type", "position_embedding_placement")
    kinds, placements = (get_args(ViTScratchConfig.__annotations__[name]) for name in fields)
    possible = set()
    for kind in kinds:
        for placement in placements:
            try:
                tiny_config(position_embedding_type=kind, position_embedding_placement=placement)
                possible.add((kind, placement))
            except StrictDataclassClassValidationError:
                continue
    configs = [tiny_config(**variant) for variant in VARIANTS.values()]
    assert {tuple(getattr(config, name) for name in fields) for config in configs} == possible


def test_no_two_variants_are_the_same_network():
    configs = [dataclasses.asdict(tiny_config(**variant)) for variant in VARIANTS.values()]
    assert [config for index, config in enumerate(configs) if config in configs[:index]] == []


# Low precision.


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def gradients_of(model: nn.Module, pixels: Tensor, bf16: bool = False) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(pixels, labels=LABELS).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


# bfloat16 has 8 bits of mantissa, so each product is rounded by up to 0.4 %. Measured over all variants: logits are
# off by 0.2 to 2.1 %, all gradients together by 0.5 to 2.3 %.


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_under_autocast_are_close_to_those_in_float32(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(pixels).logits
    assert relative_error(logits, model(pixels).logits) < 0.04


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_model_in_bfloat16_are_close_to_those_in_float32(variant):
    model, pixels = variant_classifier(variant), variant_pixels(variant)
    expected = model(pixels).logits
    assert relative_error(model.bfloat16()(pixels).logits, expected) < 0.04


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gradient_under_autocast_is_finite_and_all_are_close_to_those_in_float32(variant):
    model, pixels = variant_classifier(variant).train(), variant_pixels(variant, batch=4)
    expected, actual = gradients_of(model, pixels), gradients_of(model, pixels, bf16=True)
    assert [name for name, gradient in actual.items() if gradient is None or not gradient.isfinite().all()] == []
    together = [torch.cat([gradient.flatten() for gradient in side.values()]) for side in (actual, expected)]
    assert relative_error(*together) < 0.06


# Gradient checkpointing.


# Reentrant checkpointing runs the forward without gradients, for which torch may choose another kernel.
TOLERANCE = {False: EXACT, True: {"rtol": 1e-4, "atol": 1e-5}}


@pytest.mark.parametrize("use_reentrant", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_gives_the_same_gradients(variant, use_reentrant):
    model, pixels = variant_classifier(variant).train(), variant_pixels(variant, batch=4)
    expected = gradients_of(model, pixels)
    # The second name is that of the lowest transformers we support; newer ones warn that it goes.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    torch.testing.assert_close(gradients_of(model, pixels), expected, **TOLERANCE[use_reentrant])


# Adapters.


def with_lora(variant: str) -> nn.Module:
    """Returns the variant in float64 with an adapter on queries and values whose B is not zero."""
    model = variant_classifier(variant)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(model, config).double().eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_changes_the_logits_and_equals_its_merged_model(variant):
    adapted, pixels = with_lora(variant), variant_pixels(variant).double()
    logits = adapted(pixels).logits
    with adapted.disable_adapter():
        assert (adapted(pixels).logits - logits).abs().max() > 0.01
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(pixels).logits, logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_gets_gradients_in_every_layer(variant):
    adapted, pixels = with_lora(variant).train(), variant_pixels(variant, batch=4).double()
    gradients = {name: gradient for name, gradient in gradients_of(adapted, pixels).items() if "lora_" in name}
    num_attentions = adapted.config.num_hidden_layers + (adapted.config.pooling == "attention")
    assert len(gradients) == num_attentions * 2 * 2  # projections, A and B
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.abs().sum() > 0] == []


# Work that is skipped.


def shapes_seen(model: nn.Module, pixels: Tensor) -> dict[str, list[tuple[int, ...]]]:
    """(images, tokens) that the attention and the MLP of each layer work on in one forward."""
    seen: dict[str, list[tuple[int, ...]]] = {"attention": [], "mlp": []}
    for layer in model.base_model.layers:
        for name, shapes in seen.items():
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, shapes=shapes: shapes.append(tuple(inputs[0].shape[:2]))
            )
    model(pixels)
    return seen


def test_stochastic_depth_computes_only_the_images_it_keeps():
    model = tiny_encoder(num_hidden_layers=5, drop_path_rate=0.4).train()
    expected = [(10, 17), (9, 17), (8, 17), (7, 17), (6, 17)]  # 10 images at rates 0, 0.1, 0.2, 0.3, 0.4
    assert shapes_seen(model, random_pixels(batch=10)) == {"attention": expected, "mlp": expected}


def test_patch_dropout_computes_only_the_patches_it_keeps():
    model = tiny_encoder(patch_dropout_rate=0.75, num_register_tokens=2).train()
    expected = [(3, 1 + 2 + 4)] * 2
    assert shapes_seen(model, random_pixels(batch=3)) == {"attention": expected, "mlp": expected}


def test_both_together_skip_both():
    model = tiny_encoder(patch_dropout_rate=0.5, drop_path_rate=0.5, num_hidden_layers=2).train()
    expected = [(4, 9), (2, 9)]
    assert shapes_seen(model, random_pixels(batch=4)) == {"attention": expected, "mlp": expected}


@pytest.mark.parametrize("fields", [{"drop_path_rate": 0.4}, {"patch_dropout_rate": 0.75}], ids=str)
def test_evaluation_skips_nothing(fields):
    model, twin = tiny_classifier(**fields), tiny_classifier()
    torch.testing.assert_close(model(random_pixels()).logits, twin(random_pixels()).logits, **EXACT)


def test_images_that_are_skipped_get_no_update_and_the_others_a_larger_one():
    # The last layer alone can be skipped here, so a token is what enters it, plus nothing or 1 / (1 - rate) updates.
    model: Any = tiny_encoder(drop_path_rate=0.5, num_hidden_layers=2)
    with torch.no_grad():  # so that only the attention branch adds anything
        model.layers[1].mlp.fc2.weight.zero_()
        model.layers[1].mlp.fc2.bias.zero_()
    pixels = random_pixels(batch=8)
    before, whole = model(pixels, output_hidden_states=True).hidden_states[1:]
    twin = copy.deepcopy(model).train()
    torch.manual_seed(0)
    after = twin(pixels, output_hidden_states=True).hidden_states[2]
    kept = (after != before).flatten(1).any(1)
    assert kept.sum() == 4
    torch.testing.assert_close(after[kept] - before[kept], 2 * (whole - before)[kept], rtol=1e-4, atol=1e-4)
