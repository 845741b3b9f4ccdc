"""Vision Transformer, "An Image is Worth 16x16 Words" (https://arxiv.org/abs/2010.11929), sections 3.1 and 3.2.

B images, T tokens (class token and patches), D hidden_size, A heads, d head_dim = D / A, K classes.
"""

import logging
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, GradientCheckpointingLayer, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vit_scratch import ViTScratchConfig
from .embeddings_vit_scratch import (
    ViTScratchEmbeddings,
    ViTScratchPatchEmbeddings,
    resize_channels,
    resize_patch_kernel,
    resize_positions,
)
from .loading_vit_scratch import INPUT_FIELDS, check_loaded, stored_input_fields, with_fields

__all__ = ["ViTScratchForImageClassification", "ViTScratchModel", "ViTScratchPreTrainedModel"]

logger = logging.getLogger(__name__)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out (paper equations 6 and 7); query, key, value are (B, A, T, d)."""
    scores = query @ key.transpose(2, 3) * scaling  # (B, A, T, T)
    weights = F.dropout(scores.softmax(dim=-1), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights  # (B, T, A, d)


# Above this many tokens the T x T weights written out cost more memory than they save time.
MAX_TOKENS_WRITTEN_OUT = 1024


def attention_by_rule(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The fastest attention for the device and dtype at hand: used when no `attn_implementation` was named.

    On a CPU a bfloat16 training step at ViT lengths is faster with attention written out than with torch's
    scaled_dot_product_attention (benchmarks/fast_paths.py); everywhere else torch chooses its own kernel.
    """
    low_precision_on_cpu = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    if low_precision_on_cpu and query.shape[2] <= MAX_TOKENS_WRITTEN_OUT:
        return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


RULE = "vit_scratch_rule"
AttentionInterface.register(RULE, attention_by_rule)

# All compute softmax(q k / sqrt(d)) v; what a user registers under another name may be something else.
EXACT_ATTENTIONS = (RULE, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class ViTScratchAttention(nn.Module):
    """Multi-head self-attention (paper appendix A)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob
        self.is_causal = False  # read by transformers' sdpa and flash functions
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)  # (B, A, T, d)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        attention = eager_attention_forward
        if not output_attentions:  # only the form written out can show its weights
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attention)
        dropout = self.attention_dropout if self.training else 0.0
        context, weights = attention(self, query, key, value, None, scaling=self.scaling, dropout=dropout)
        return self.o_proj(context.flatten(2)), weights  # (B, T, D)

    def forward_class_token(self, hidden_states: Tensor) -> Tensor:
        """Returns the class token's row of `forward`, (B, 1, D), without forming a key or a value.

        With one query a head, q . (Wk x_j) = (Wk' q) . x_j and sum_j p_j (Wv x_j) = Wv (sum_j p_j x_j), so that the
        D x D products run over one token instead of T. The key bias adds the same to all scores; it is kept so that
        every parameter has its (zero) gradient.
        """
        dim = hidden_states.shape[2]
        query = self.q_proj(hidden_states[:, 0]).unflatten(1, (-1, 1, self.head_dim))  # (B, A, 1, d)
        key_weight = self.k_proj.weight.view(-1, self.head_dim, dim)  # (A, d, D)
        value_weight = self.v_proj.weight.view(-1, self.head_dim, dim)
        absorbed_query = (query @ key_weight).squeeze(2)  # (B, A, D)
        scores = absorbed_query @ hidden_states.transpose(1, 2)  # (B, A, T)
        if self.k_proj.bias is not None:
            scores = scores + query.squeeze(2).mul(self.k_proj.bias.view(-1, self.head_dim)).sum(2, keepdim=True)
        weights = F.dropout((scores * self.scaling).softmax(dim=-1), self.attention_dropout, self.training)
        pooled = weights @ hidden_states  # (B, A, D)
        context = (pooled.unsqueeze(2) @ value_weight.transpose(1, 2)).squeeze(2)  # (B, A, d)
        if self.v_proj.bias is not None:
            context = context + weights.sum(2, keepdim=True) * self.v_proj.bias.view(-1, self.head_dim)
        return self.o_proj(context.flatten(1)).unsqueeze(1)


class ViTScratchMLP(nn.Module):
    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation_fn(self.fc1(hidden_states))))


class ViTScratchLayer(GradientCheckpointingLayer):
    """Pre-norm Transformer layer (paper equations 2 and 3)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = ViTScratchAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ViTScratchMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: Tensor, output_attentions: bool = False, class_token_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens (B, T, D), or only the class token (B, 1, D), and the attentions if asked for."""
        normed, weights = self.layernorm_before(hidden_states), None
        if class_token_only:
            attended, hidden_states = self.attention.forward_class_token(normed), hidden_states[:, :1]
        else:
            attended, weights = self.attention(normed, output_attentions)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.layernorm_after(hidden_states))), weights

    def is_plain(self) -> bool:
        """Whether reading the projections' weights gives what calling them gives, and nobody watches the calls.

        False under adapters, quantisation, tensor parallelism, parametrisations, hooks and attentions of the user's.
        """
        attention = self.attention
        if type(attention) is not ViTScratchAttention:
            return False
        if attention.config._attn_implementation not in EXACT_ATTENTIONS:
            return False
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            if type(projection) is not nn.Linear or type(projection.weight.data) is not Tensor:
                return False
        return not any(_is_watched(module) for module in self.modules())


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


class ViTScratchPooler(nn.Module):
    """The pre-logits layer (paper section 3.2): what pre-training puts between the pooled token and the classifier."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        assert config.representation_size is not None
        self.dense = nn.Linear(config.hidden_size, config.representation_size)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled).tanh()


class ViTScratchPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and resizing, shared by all heads."""

    config: ViTScratchConfig
    config_class = ViTScratchConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]  # as in transformers' own ViT
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # else the Trainer leaves the mean over accumulated micro-batches to the loss
    _no_split_modules = ["ViTScratchEmbeddings", "ViTScratchLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: ViTScratchConfig, *inputs: Any, **kwargs: Any):
        if config._attn_implementation is None:
            config._attn_implementation = RULE
        super().__init__(config, *inputs, **kwargs)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers takes a module of custom code that holds no tensor of its own (an attention block, say) for
        # initialised and skips it. `_init_weights` guards every tensor by itself, so none needs skipping.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The official code's initialisers (none is stated in the paper); a fresh classifier outputs its bias."""
        if isinstance(module, ViTScratchEmbeddings):
            init.normal_(module.position_embeddings, std=0.02)
            if module.cls_token is not None:
                init.zeros_(module.cls_token)
        elif isinstance(module, ViTScratchPatchEmbeddings):
            _lecun_normal_(module.projection.weight)
            init.zeros_(cast(Tensor, module.projection.bias))
        elif isinstance(module, ViTScratchAttention):
            for projection in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
                init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    init.zeros_(projection.bias)
        elif isinstance(module, ViTScratchMLP):
            for dense in (module.fc1, module.fc2):
                init.xavier_uniform_(dense.weight)
                init.normal_(dense.bias, std=1e-6)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ViTScratchPooler):
            _lecun_normal_(module.dense.weight)
            init.zeros_(module.dense.bias)
        elif isinstance(module, ViTScratchForImageClassification):
            init.zeros_(module.classifier.weight)
            init.constant_(module.classifier.bias, self.config.head_bias_init)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Returns the stored model; a missing encoder tensor or one that belongs nowhere raises `InputError`.

        Heads may be new. `image_size`, `patch_size` and `num_channels` that differ from the stored ones are applied
        after loading, by `resize_input`.
        """
        wanted = {name: kwargs.pop(name) for name in INPUT_FIELDS if name in kwargs}
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig) and pretrained_model_name_or_path is not None:
            # The Auto classes put such keyword arguments into the config before they call this method.
            stored = stored_input_fields(pretrained_model_name_or_path, config, kwargs)
            wanted = {**{name: getattr(config, name) for name in stored}, **wanted}
            kwargs["config"] = with_fields(config, stored)
        give_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        if pretrained_model_name_or_path is not None or kwargs.get("state_dict"):
            check_loaded(model, info, source=pretrained_model_name_or_path)
        changed = {name: value for name, value in wanted.items() if value != getattr(model.config, name)}
        if changed:
            model.resize_input(**changed)
        return (model, info) if give_info else model

    @torch.no_grad()
    def resize_input(
        self,
        *,
        image_size: int | list[int] | None = None,
        patch_size: int | list[int] | None = None,
        num_channels: int | None = None,
    ) -> None:
        """Edits weights and config for other input: positions, patch kernel and channels are resampled.

        A forward at another grid needs none of this; it resamples the positions on the fly and edits nothing.
        """
        old = self.config
        fields = {"image_size": image_size, "patch_size": patch_size, "num_channels": num_channels}
        changes = {name: value for name, value in fields.items() if value is not None}
        new = with_fields(old, changes)
        new.validate()
        embeddings = cast(ViTScratchEmbeddings, self.base_model.embeddings)
        patches = embeddings.patch_embeddings
        kernel = patches.projection.weight
        if new.patch_height_width != old.patch_height_width:
            kernel = resize_patch_kernel(kernel, new.patch_height_width)
        if new.num_channels != old.num_channels:
            kernel = resize_channels(kernel, new.num_channels)
        positions = resize_positions(
            embeddings.position_embeddings,
            old.grid_size,
            new.grid_size,
            num_prefix_tokens=old.num_prefix_tokens,
            interpolation=old.position_interpolation,
        )
        for module, name, value in (
            (embeddings, "position_embeddings", positions),
            (patches.projection, "weight", kernel.contiguous()),
        ):
            setattr(module, name, nn.Parameter(value, requires_grad=getattr(module, name).requires_grad))
        patches.projection.in_channels = patches.num_channels = new.num_channels
        patches.projection.kernel_size = patches.projection.stride = patches.patch_size = new.patch_height_width
        for name, size in changes.items():
            logger.warning("resized the model's input: %s %s -> %s", name, getattr(old, name), size)
            setattr(old, name, size)


class ViTScratchModel(ViTScratchPreTrainedModel):
    """The encoder (paper figure 1): embeddings, layers, final norm, pooling and the optional pre-logits layer."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        self.embeddings = ViTScratchEmbeddings(config)
        self.layers = nn.ModuleList([ViTScratchLayer(config) for _ in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ViTScratchPooler(config) if config.representation_size is not None else None
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        pooled_only: bool = False,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Returns `last_hidden_state` (B, T, D) after the last norm and `pooler_output` (B, representation_size or D).

        Args:
            pixel_values: (B, C, H, W), normalised; H and W multiples of the patch, of any grid.
            output_attentions: also return the L attentions (B, A, T, T), whatever the attention implementation.
            output_hidden_states: also return the L + 1 hidden states (B, T, D) before the final norm.
            return_dict: False for a plain tuple.
            pooled_only: what a classifier asks for. The last layer may then be computed for the class token alone,
                and `last_hidden_state` is (B, 1, D).
        """
        output_attentions = _first_given(output_attentions, self.config.output_attentions)
        output_hidden_states = _first_given(output_hidden_states, self.config.output_hidden_states)
        class_token_only = (
            pooled_only and not (output_attentions or output_hidden_states) and self._needs_class_token_only()
        )
        hidden_states = self.embeddings(pixel_values)  # (B, T, D), equation 1
        all_hidden_states, all_attentions = [], []
        for layer in self.layers:
            if output_hidden_states:  # else each layer's input can go as soon as the next one has read it
                all_hidden_states.append(hidden_states)
            hidden_states, weights = layer(
                hidden_states, output_attentions, class_token_only and layer is self.layers[-1]
            )
            all_attentions.append(weights)
        sequence = self.layernorm(hidden_states)  # equation 4
        pooled = sequence[:, 0] if self.config.pooling == "class_token" else sequence.mean(dim=1)  # (B, D)
        output = BaseModelOutputWithPooling(
            last_hidden_state=sequence,
            pooler_output=pooled if self.pooler is None else self.pooler(pooled),
            hidden_states=(*all_hidden_states, hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )
        return output if _first_given(return_dict, self.config.return_dict) else output.to_tuple()

    def _needs_class_token_only(self) -> bool:
        return (
            self.config.pooling == "class_token"
            and cast(ViTScratchLayer, self.layers[-1]).is_plain()
            and not (_is_watched(self.layernorm) or _is_watched(self))  # whose output would have one token
        )


class ViTScratchForImageClassification(ViTScratchPreTrainedModel):
    """ViT with a linear classifier, zero at first: its step-0 loss is ln K."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        self.vit = ViTScratchModel(config)
        self.classifier = nn.Linear(config.representation_size or config.hidden_size, cast(int, config.num_labels))
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """Returns `logits` (B, K), and the loss if there are labels: class indices (B,) or targets (B, K)."""
        outputs = self.vit(
            pixel_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            pooled_only=True,
        )
        logits = self.classifier(outputs.pooler_output)  # (B, K)
        output = ImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels, self.config.problem_type),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if _first_given(return_dict, self.config.return_dict) else output.to_tuple()


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str) -> Tensor:
    """Mean over the batch, in float32 at least, of softmax, or of sigmoid cross-entropy summed over the classes.

    Labels are class indices (B,) or targets (B, K), soft ones included; they never change the objective.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels if labels.ndim == 1 else labels.to(logits.dtype))
    if labels.ndim == 1:
        labels = F.one_hot(labels, logits.shape[1])
    targets = labels.to(logits.dtype)
    # Not torch's binary_cross_entropy_with_logits: in float32 it cancels 10 against 10.00004 for every absent class
    # (21,842 of them at a head bias of -10), and then the first loss is 11.000 instead of 10.992.
    return -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum(dim=1).mean()


def _lecun_normal_(weight: Tensor) -> None:
    # Flax's: cut at two sigma, then scaled back to variance 1 / fan_in (0.8796 is sigma of the cut unit normal).
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std)


def _first_given(value: bool | None, default: bool | None) -> bool:
    return bool(default if value is None else value)
