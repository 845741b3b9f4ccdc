"""Which attention runs, and where dropout acts."""

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier, tiny_encoder
from torch.nn import functional as F
from transformers import AttentionInterface

from modeling_vit_scratch import modeling_vit_scratch as modeling

# Dropout: where the official code has it, and nowhere else.


@pytest.fixture
def dropouts(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what goes through an active dropout, in order."""
    shapes: list[tuple[int, ...]] = []
    original = F.dropout

    def recorded(input, p=0.5, training=True, inplace=False):
        if training and p > 0:
            shapes.append(tuple(input.shape))
        return original(input, p, training, inplace)

    monkeypatch.setattr(F, "dropout", recorded)
    return shapes


TOKENS, HIDDEN = (2, 17, 32), (2, 17, 64)


def test_dropout_follows_positions_attention_output_gelu_and_second_mlp_layer(dropouts):
    model = tiny_encoder(hidden_dropout_prob=0.5, representation_size=16).train()
    model(random_pixels())
    assert dropouts == [TOKENS] + [TOKENS, HIDDEN, TOKENS] * 2


def test_the_class_token_only_layer_drops_at_the_same_places(dropouts):
    tiny_classifier(hidden_dropout_prob=0.5, representation_size=16).train()(random_pixels())
    assert dropouts == [TOKENS, TOKENS, HIDDEN, TOKENS, (2, 1, 32), (2, 1, 64), (2, 1, 32)]


def test_attention_dropout_drops_attentions_only(dropouts):
    model = tiny_classifier(attention_probs_dropout_prob=0.5, attn_implementation="eager").train()
    model(random_pixels(), output_hidden_states=True)
    assert dropouts == [(2, 4, 17, 17)] * 2


def test_the_class_token_only_layer_drops_the_attentions_of_the_class_token(dropouts):
    tiny_classifier(attention_probs_dropout_prob=0.5, attn_implementation="eager").train()(random_pixels())
    assert dropouts == [(2, 4, 17, 17), (2, 4, 17)]


def test_evaluation_drops_nothing(dropouts):
    tiny_classifier(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)(random_pixels())
    assert dropouts == []


def test_dropout_of_the_embeddings_is_after_the_positions_are_added(monkeypatch):
    model = tiny_encoder()
    torch.nn.init.zeros_(model.embeddings.patch_embeddings.projection.weight)
    torch.nn.init.zeros_(model.embeddings.patch_embeddings.projection.bias)
    torch.nn.init.zeros_(model.embeddings.cls_token)
    seen = []
    monkeypatch.setattr(model.embeddings.dropout, "forward", lambda tokens: seen.append(tokens) or tokens)
    model(random_pixels())
    torch.testing.assert_close(seen[0], model.embeddings.position_embeddings.expand(2, -1, -1), rtol=0, atol=0)


def test_dropout_after_the_gelu_is_really_after_it(monkeypatch):
    model = tiny_encoder(hidden_dropout_prob=0.5).train()
    seen = []
    monkeypatch.setattr(model.layers[0].mlp.dropout, "forward", lambda hidden: seen.append(hidden) or hidden)
    model(random_pixels())
    assert seen[0].min() > -0.2  # GELU has its minimum of -0.17 there; what enters it goes far below


# Which attention runs.


@pytest.fixture
def attention_calls(monkeypatch) -> list[tuple[str, float]]:
    """Name and dropout of every attention computed over all tokens, in order."""
    calls: list[tuple[str, float]] = []
    sdpa, eager = F.scaled_dot_product_attention, modeling.eager_attention_forward

    def record_sdpa(*args, dropout_p=0.0, **kwargs):
        calls.append(("sdpa", dropout_p))
        return sdpa(*args, dropout_p=dropout_p, **kwargs)

    def record_eager(*args, dropout=0.0, **kwargs):
        calls.append(("eager", dropout))
        return eager(*args, dropout=dropout, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record_sdpa)
    monkeypatch.setattr(modeling, "eager_attention_forward", record_eager)
    return calls


def names(calls: list[tuple[str, float]]) -> list[str]:
    return [name for name, _ in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_an_explicit_attention_is_obeyed(attention_calls, attn_implementation, dtype):
    tiny_encoder(attn_implementation=attn_implementation, dtype=dtype)(random_pixels())
    assert names(attention_calls) == [attn_implementation] * 2


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_an_explicit_attention_at_load_is_obeyed(tmp_path, attention_calls, attn_implementation):
    tiny_encoder().save_pretrained(tmp_path)
    model = modeling.ViTScratchModel.from_pretrained(
        tmp_path, attn_implementation=attn_implementation, dtype=torch.bfloat16
    )
    model(random_pixels())
    assert names(attention_calls) == [attn_implementation] * 2


def test_an_attention_set_afterwards_is_obeyed(attention_calls):
    model = tiny_encoder()
    model.set_attn_implementation("eager")
    model(random_pixels())
    assert names(attention_calls) == ["eager"] * 2


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, "sdpa"), (torch.bfloat16, "eager")])
def test_the_rule_writes_attention_out_in_low_precision_on_a_cpu(attention_calls, dtype, expected):
    tiny_encoder(dtype=dtype)(random_pixels())
    assert names(attention_calls) == [expected] * 2


def test_the_rule_writes_attention_out_under_autocast_on_a_cpu(attention_calls):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tiny_encoder()(random_pixels())
    assert names(attention_calls) == ["eager"] * 2


def test_the_rule_leaves_long_sequences_to_torch(attention_calls):
    tiny_encoder(dtype=torch.bfloat16, patch_size=4)(random_pixels(batch=1, height=128, width=132))  # 1057 tokens
    assert names(attention_calls) == ["sdpa"] * 2


def test_a_loaded_model_without_an_explicit_attention_follows_the_rule(tmp_path, attention_calls):
    tiny_encoder(attn_implementation="sdpa").save_pretrained(tmp_path)
    modeling.ViTScratchModel.from_pretrained(tmp_path, dtype=torch.bfloat16)(random_pixels())
    assert names(attention_calls) == ["eager"] * 2


@pytest.mark.parametrize(("training", "expected"), [(True, 0.25), (False, 0.0)])
@pytest.mark.parametrize(("attn_implementation", "dtype"), [("sdpa", torch.float32), (None, torch.bfloat16)])
def test_attention_dropout_reaches_every_attention_in_training_only(
    attention_calls, attn_implementation, dtype, training, expected
):
    model = tiny_encoder(attn_implementation=attn_implementation, dtype=dtype, attention_probs_dropout_prob=0.25)
    model.train(training)(random_pixels())
    assert [dropout for _, dropout in attention_calls] == [expected] * 2


def test_an_attention_of_the_users_runs_in_the_last_layer_too():
    calls = []

    def uniform_attention(module, query, key, value, attention_mask, **kwargs):
        calls.append(module)
        return value.mean(2, keepdim=True).expand_as(value).transpose(1, 2), None

    AttentionInterface.register("uniform_for_this_test", uniform_attention)
    model = tiny_classifier(attn_implementation="uniform_for_this_test")
    model(random_pixels())
    assert calls == [layer.attention for layer in model.vit.layers]


def test_an_attention_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no_such_attention"):
        tiny_classifier(attn_implementation="no_such_attention")
