"""The last layer for the class token alone: what a classifier needs of it, at a fraction of the work.

B images, T tokens, D hidden_size, A heads, d head_dim.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .pretrained_vit_scratch import RULE

__all__ = ["attend_from_class_token", "computes_as_written", "is_watched"]

# All compute softmax(q k / sqrt(d)) v; what a user registers under another name may be something else.
EXACT_ATTENTIONS = (RULE, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def attend_from_class_token(attention: Any, hidden_states: Tensor) -> Tensor:
    """Returns the class token's row of what `attention` returns, (B, 1, D), without forming a key or a value.

    With one query a head, q . (Wk x_j) = (Wk' q) . x_j and sum_j p_j (Wv x_j) = Wv (sum_j p_j x_j), so that the
    D x D products run over one token instead of T. The key bias adds the same to all scores; it is kept so that
    every parameter has its (zero) gradient.
    """
    head_dim, dim = attention.head_dim, hidden_states.shape[2]
    query = attention.q_proj(hidden_states[:, 0]).unflatten(1, (-1, 1, head_dim))  # (B, A, 1, d)
    key_weight = attention.k_proj.weight.view(-1, head_dim, dim)  # (A, d, D)
    value_weight = attention.v_proj.weight.view(-1, head_dim, dim)
    absorbed_query = (query @ key_weight).squeeze(2)  # (B, A, D)
    scores = absorbed_query @ hidden_states.transpose(1, 2)  # (B, A, T)
    if attention.k_proj.bias is not None:
        scores = scores + query.squeeze(2).mul(attention.k_proj.bias.view(-1, head_dim)).sum(2, keepdim=True)
    weights = F.dropout((scores * attention.scaling).softmax(dim=-1), attention.attention_dropout, attention.training)
    pooled = weights @ hidden_states  # (B, A, D)
    context = (pooled.unsqueeze(2) @ value_weight.transpose(1, 2)).squeeze(2)  # (B, A, d)
    if attention.v_proj.bias is not None:
        context = context + weights.sum(2, keepdim=True) * attention.v_proj.bias.view(-1, head_dim)
    return attention.o_proj(context.flatten(1)).unsqueeze(1)


def computes_as_written(layer: nn.Module) -> bool:
    """Whether reading the projections' weights gives what calling them gives, and nobody watches the calls.

    False under adapters, quantisation, tensor parallelism, parametrisations, hooks and attentions of the user's,
    and where keys are more than a projection: normalised, rotated, or met by relative positions.
    """
    attention: Any = layer.attention
    if attention.positions is not None or type(attention.q_norm) is not nn.Identity:
        return False
    if attention.config._attn_implementation not in EXACT_ATTENTIONS:
        return False
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        if type(projection) is not nn.Linear or type(projection.weight.data) is not Tensor:
            return False
    return not any(is_watched(module) for module in layer.modules())


def is_watched(module: nn.Module) -> bool:
    """Whether somebody sees, or has replaced, what the module's forward returns."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
