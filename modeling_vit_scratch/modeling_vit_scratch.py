"""Vision Transformer, "An Image is Worth 16x16 Words" (https://arxiv.org/abs/2010.11929), sections 3.1 and 3.2.

B images, T tokens (class token and patches), D hidden_size, A heads, d head_dim = D / A, K classes.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, GradientCheckpointingLayer
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .class_token_vit_scratch import attend_from_class_token, computes_as_written, is_watched
from .configuration_vit_scratch import ViTScratchConfig
from .embeddings_vit_scratch import ViTScratchEmbeddings
from .initialization_vit_scratch import ViTScratchModule, lecun_normal_
from .pooling_vit_scratch import ViTScratchAttentionPooling
from .positions_vit_scratch import ViTScratchLayerPositions, attention_positions, positions_for_attention
from .pretrained_vit_scratch import RULE, ViTScratchPreTrainedModel
from .residual_vit_scratch import ViTScratchLayerScale, drop_path_rates, forward_with_stochastic_depth
from .swiglu_vit_scratch import ViTScratchSwiGLU

__all__ = [
    "ViTScratchForImageClassification",
    "ViTScratchLayer",
    "ViTScratchModel",
    "classification_loss",
    "first_given",
]


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
    if attention_mask is not None:  # relative positions
        scores = scores + attention_mask
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
    # The ONNX exporter of torch takes the output of masked attention for contiguous, and then fails to reshape it.
    is_export_of_mask = attention_mask is not None and torch.compiler.is_exporting()
    if (low_precision_on_cpu and query.shape[2] <= MAX_TOKENS_WRITTEN_OUT) or is_export_of_mask:
        return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(RULE, attention_by_rule)


class ViTScratchAttention(ViTScratchModule):
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
        self.q_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps) if config.qk_norm else nn.Identity()
        self.positions = attention_positions(config)

    def initialize(self) -> None:
        """Xavier-uniform, each projection as a square matrix of its own rather than q, k and v as one."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                init.zeros_(projection.bias)

    def forward(
        self, hidden_states: Tensor, token_positions: tuple[Any, ...] | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)  # (B, A, T, d)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        # A kernel wants one dtype, and under autocast a norm gives float32 on an accelerator.
        query, key, added_scores = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype), None
        if self.positions is not None:  # rotary or relative ones; the paper's are in the embeddings
            query, key, added_scores = self.positions(query, key, token_positions)
        attention = eager_attention_forward
        if not output_attentions:  # only the form written out can show its weights
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attention)
        dropout = self.attention_dropout if self.training else 0.0
        context, weights = attention(self, query, key, value, added_scores, scaling=self.scaling, dropout=dropout)
        return self.o_proj(context.flatten(2)), weights  # (B, T, D)


class ViTScratchMLP(ViTScratchModule):
    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def initialize(self) -> None:
        for dense in (self.fc1, self.fc2):
            init.xavier_uniform_(dense.weight)
            init.normal_(dense.bias, std=1e-6)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation_fn(self.fc1(hidden_states))))


class ViTScratchLayer(GradientCheckpointingLayer):
    """Pre-norm Transformer layer (paper equations 2 and 3); `drop_path_rate` is that of this layer."""

    def __init__(self, config: ViTScratchConfig, drop_path_rate: float = 0.0):
        super().__init__()
        self.drop_path_rate = drop_path_rate
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = ViTScratchAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ViTScratchSwiGLU(config) if config.mlp_type == "swiglu" else ViTScratchMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        has_scale = config.layer_scale_init is not None
        self.layer_scale1 = ViTScratchLayerScale(config) if has_scale else nn.Identity()
        self.layer_scale2 = ViTScratchLayerScale(config) if has_scale else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        token_positions: tuple[Any, ...] | None = None,
        output_attentions: bool = False,
        class_token_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens (B, T, D), or only the class token (B, 1, D), and the attentions if asked for.

        `token_positions` is what the positions inside the attention need, if there are such.
        """
        if self.training and self.drop_path_rate > 0:
            return forward_with_stochastic_depth(
                self, hidden_states, token_positions, output_attentions, class_token_only
            )
        update, weights = self.attention_branch(hidden_states, token_positions, output_attentions, class_token_only)
        hidden_states = hidden_states[:, : update.shape[1]] + update  # equation 2
        return hidden_states + self.mlp_branch(hidden_states), weights  # equation 3

    def attention_branch(
        self,
        hidden_states: Tensor,
        token_positions: tuple[Any, ...] | None,
        output_attentions: bool,
        class_token_only: bool,
    ) -> tuple[Tensor, Tensor | None]:
        normed, weights = self.layernorm_before(hidden_states), None
        if class_token_only:
            update = attend_from_class_token(self.attention, normed)
        else:
            update, weights = self.attention(normed, token_positions, output_attentions)
        return self.layer_scale1(self.dropout(update)), weights

    def mlp_branch(self, hidden_states: Tensor) -> Tensor:
        return self.layer_scale2(self.dropout(self.mlp(self.layernorm_after(hidden_states))))


class ViTScratchPooler(ViTScratchModule):
    """The pre-logits layer (paper section 3.2): what pre-training puts between the pooled token and the classifier."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.dense = nn.Linear(config.pooled_size, cast(int, config.representation_size))

    def initialize(self) -> None:
        lecun_normal_(self.dense.weight)
        init.zeros_(self.dense.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled).tanh()


class ViTScratchModel(ViTScratchPreTrainedModel):
    """The encoder (paper figure 1): embeddings, layers, final norm, pooling and the optional pre-logits layer.

    Without `add_pooling_layer` it ends with the final norm over all tokens, for heads that read these.
    """

    def __init__(self, config: ViTScratchConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = ViTScratchEmbeddings(config)
        at_every_layer = config.position_embedding_placement != "stem"
        self.layer_positions = ViTScratchLayerPositions(config) if at_every_layer else None
        self.layers = nn.ModuleList([ViTScratchLayer(config, rate) for rate in drop_path_rates(config)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.add_pooling_layer = add_pooling_layer
        has_attention_head = add_pooling_layer and config.pooling == "attention"
        self.attention_pooling = (
            ViTScratchAttentionPooling(config, ViTScratchMLP(config)) if has_attention_head else None
        )
        has_pre_logits = add_pooling_layer and config.representation_size is not None
        self.pooler = ViTScratchPooler(config) if has_pre_logits else None
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        pooled_only: bool = False,
        visible_patches: Tensor | None = None,
        corrupt: Callable[[Tensor], Tensor] | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Returns `last_hidden_state` (B, T, D) after the last norm and `pooler_output` (B, representation_size or D).

        Args:
            pixel_values: (B, C, H, W), normalised; H and W multiples of the patch, of any grid.
            output_attentions: also return the L attentions (B, A, T, T), whatever the attention implementation.
            output_hidden_states: also return the L + 1 hidden states (B, T, D) before the final norm.
            return_dict: False for a plain tuple.
            pooled_only: what a classifier asks for. The last layer may then be computed for the class token alone,
                and `last_hidden_state` is (B, 1, D).
            visible_patches: raster indices (B, n) of the only patches to encode (masked autoencoding).
            corrupt: what is done to the patch embeddings (B, N, D) before positions (masked patch prediction).
        """
        output_attentions = first_given(output_attentions, self.config.output_attentions)
        output_hidden_states = first_given(output_hidden_states, self.config.output_hidden_states)
        class_token_only = (
            pooled_only and not (output_attentions or output_hidden_states) and self._needs_class_token_only()
        )
        hidden_states, places = self.embeddings(pixel_values, visible_patches, corrupt)  # (B, T, D), equation 1
        token_positions = positions_for_attention(self.config, places, like=hidden_states)
        layer_positions = None if self.layer_positions is None else self.layer_positions(places, like=hidden_states)
        all_hidden_states, all_attentions = [], []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:  # else each layer's input can go as soon as the next one has read it
                all_hidden_states.append(hidden_states)
            if layer_positions is not None:  # paper D.4: positions at every layer
                hidden_states = hidden_states + layer_positions[index]
            is_last = index == len(self.layers) - 1
            hidden_states, weights = layer(
                hidden_states, token_positions, output_attentions, class_token_only and is_last
            )
            all_attentions.append(weights)
        sequence = hidden_states
        if self.config.final_norm == "before_pooling" or not self.add_pooling_layer:
            sequence = self.layernorm(hidden_states)  # equation 4
        pooled = self._pool(sequence) if self.add_pooling_layer else None
        output = BaseModelOutputWithPooling(
            last_hidden_state=sequence,
            pooler_output=pooled,
            hidden_states=(*all_hidden_states, hidden_states) if output_hidden_states else None,
            attentions=tuple(all_attentions) if output_attentions else None,
        )
        return output if first_given(return_dict, self.config.return_dict) else output.to_tuple()

    def _pool(self, sequence: Tensor) -> Tensor:
        """Returns what the head reads of the tokens: (B, representation_size or pooled_size)."""
        pooled, patches = sequence[:, 0], sequence[:, self.config.num_prefix_tokens :]
        if self.config.pooling == "mean":
            pooled = patches.mean(dim=1)
        elif self.config.pooling == "class_token_and_mean":
            pooled = torch.cat((pooled, patches.mean(dim=1)), dim=1)
        elif self.attention_pooling is not None:
            pooled = self.attention_pooling(patches)
        if self.config.final_norm == "after_pooling":
            pooled = self.layernorm(pooled)
        return pooled if self.pooler is None else self.pooler(pooled)

    def _needs_class_token_only(self) -> bool:
        return (
            self.config.pooling == "class_token"
            and not self.config.use_distillation_token
            and type(self.layers[-1].attention) is ViTScratchAttention
            and computes_as_written(self.layers[-1])
            and not (is_watched(self.layernorm) or is_watched(self))  # whose output would have one token
        )


class ViTScratchForImageClassification(ViTScratchPreTrainedModel):
    """ViT with a linear classifier, zero at first: its step-0 loss is ln K.

    With a distillation token there are two classifiers, and the logits are the mean of theirs (DeiT).
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        self.vit = ViTScratchModel(config)
        width, num_labels = config.representation_size or config.pooled_size, cast(int, config.num_labels)
        self.classifier = nn.Linear(width, num_labels)
        self.distillation_classifier = nn.Linear(width, num_labels) if config.use_distillation_token else None
        self.post_init()

    def initialize(self) -> None:
        for classifier in (self.classifier, self.distillation_classifier):
            if classifier is not None:
                init.zeros_(classifier.weight)
                init.constant_(classifier.bias, self.config.head_bias_init)

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
        if self.distillation_classifier is not None:
            logits = (logits + self.distillation_classifier(outputs.last_hidden_state[:, 1])) / 2
        output = ImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels, self.config.problem_type),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if first_given(return_dict, self.config.return_dict) else output.to_tuple()


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


def first_given(value: bool | None, default: bool | None) -> bool:
    return bool(default if value is None else value)
