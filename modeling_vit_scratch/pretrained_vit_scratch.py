"""What all models share: initialisation, strict loading, and weights that follow another input size."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vit_scratch import ViTScratchConfig
from .errors_vit_scratch import InputError
from .initialization_vit_scratch import ViTScratchModule
from .loading_vit_scratch import INPUT_FIELDS, check_loaded, stored_input_fields, with_fields

__all__ = ["RULE", "ViTScratchPreTrainedModel"]

logger = logging.getLogger(__name__)

# The attention used when no `attn_implementation` was named: see `attention_by_rule` in modeling_vit_scratch.py.
RULE = "vit_scratch_rule"
# Those that can add a matrix of its own to each head's logits; flex takes one for all heads, flash none.
RELATIVE_ATTENTIONS = (RULE, "eager", "sdpa")


class ViTScratchPreTrainedModel(PreTrainedModel, ViTScratchModule):
    """Initialisation, loading and resizing, shared by all heads."""

    config: ViTScratchConfig
    config_class = ViTScratchConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]  # as in transformers' own ViT
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # else the Trainer leaves the mean over accumulated micro-batches to the loss
    left_out: tuple[str, ...] = ()  # how the names of tensors begin that a checkpoint may have and this model has not
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
        _check_attention(config, config._attn_implementation)
        super().__init__(config, *inputs, **kwargs)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(attn_implementation, str):  # a kernel of the Hub does not pass the method below
            _check_attention(self.config, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        # A model around this one calls this, not `set_attn_implementation`.
        _check_attention(self.config, requested_attention)
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # transformers takes a module of custom code that holds no tensor of its own (an attention block, say) for
        # initialised and skips it. `_init_weights` guards every tensor by itself, so none needs skipping.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ViTScratchModule):
            module.initialize()

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
        for module in self.modules():
            if isinstance(module, ViTScratchModule):
                module.resize(old, new)
        for name, size in changes.items():
            logger.warning("resized the model's input: %s %s -> %s", name, getattr(old, name), size)
            setattr(old, name, size)


def _check_attention(config: PreTrainedConfig, attn_implementation: Any) -> None:
    if config.position_embedding_type != "relative" or attn_implementation in RELATIVE_ATTENTIONS:
        return
    # One that does not exist is for transformers to refuse.
    if attn_implementation in ALL_ATTENTION_FUNCTIONS or "/" in str(attn_implementation):
        raise InputError(
            f"position_embedding_type='relative' adds a matrix to the logits of each head, which attn_implementation="
            f"{attn_implementation!r} cannot; use one of {', '.join(RELATIVE_ATTENTIONS)}"
        )
