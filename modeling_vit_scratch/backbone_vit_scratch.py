"""Feature maps of the encoder, for the detection and segmentation heads of transformers.

B images, D hidden_size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import BackboneMixin
from transformers.modeling_outputs import BackboneOutput

from .configuration_vit_scratch import ViTScratchConfig
from .errors_vit_scratch import InputError
from .modeling_vit_scratch import ViTScratchModel, first_given
from .pretrained_vit_scratch import ViTScratchPreTrainedModel

__all__ = ["ViTScratchBackbone"]


class ViTScratchBackbone(BackboneMixin, ViTScratchPreTrainedModel):
    """The encoder as far as the last stage that is asked for: "stem" is the embeddings, "stage3" the third layer.

    `ViTScratchBackbone.from_pretrained(folder, out_features=["stage6", "stage12"])` takes the weights of any of our
    models, from a folder or a Hub repo. `AutoBackbone.from_config(config)` and `AutoBackbone.from_pretrained(repo)`
    work as well, but not AutoBackbone with a local folder: transformers asks the Hub for a repo of that name first.

    What no feature map depends on does not exist here, so that every parameter has a gradient: the layers behind the
    last stage and their positions, pooling, the pre-logits layer, and the last LayerNorm where it is not applied.
    Images keep all their patches in training, whatever `patch_dropout_rate` says: a map has no holes.
    """

    def __init__(self, config: ViTScratchConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.num_features = [config.hidden_size for _ in self.stage_names]
        self.vit = ViTScratchModel(config, add_pooling_layer=False)
        # With the norm behind the pooling (timm's fc_norm) the tokens themselves were never normalised.
        self.has_norm = config.apply_layernorm and config.final_norm == "before_pooling"
        self.left_out = self._leave_out(num_layers=self._last_stage())
        self.post_init()

    def _last_stage(self) -> int:
        return max(self.stage_names.index(name) for name in self.out_features)

    def _leave_out(self, num_layers: int) -> tuple[str, ...]:
        """Takes the parts without a gradient off the encoder; returns how the names of their tensors begin."""
        vit = self.vit
        parts = [f"layers.{index}." for index in range(num_layers, len(vit.layers))]
        vit.layers = vit.layers[:num_layers]
        if vit.layer_positions is not None and num_layers == 0:
            vit.layer_positions = None
            parts.append("layer_positions.")
        elif vit.layer_positions is not None:
            tables = vit.layer_positions.tables
            parts += [f"layer_positions.tables.{index}." for index in range(num_layers, len(tables))]
            vit.layer_positions.tables = tables[:num_layers]
        if not self.has_norm:
            vit.layernorm = nn.Identity()  # type: ignore[assignment]
            parts.append("layernorm.")
        vit.embeddings.patch_dropout_rate = 0.0
        return (*(f"vit.{part}" for part in parts), *parts)  # as a classifier and as a bare encoder have them

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Returns `feature_maps`, one (B, D, rows, columns) of the patch tokens for each of `out_features`.

        Args:
            pixel_values: (B, C, H, W), normalised; H and W multiples of the patch, of any grid.
            output_hidden_states: also return all tokens (B, T, D) of every stage up to the last one asked for, before
                the final norm.
            output_attentions: also return the attentions (B, A, T, T) of these layers.
            return_dict: False for a plain tuple.
        """
        if self._last_stage() > len(self.vit.layers):
            raise InputError(
                f"out_features={self.out_features} goes beyond the {len(self.vit.layers)} layers this backbone was "
                "built with; give out_features to from_pretrained or to the config"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.vit(pixel_values, output_attentions, output_hidden_states=True, return_dict=True)
        (height, width), (patch_height, patch_width) = pixel_values.shape[2:], self.config.patch_height_width
        grid_size = (height // patch_height, width // patch_width)
        feature_maps = []
        for name in self.out_features:
            stage = self.stage_names.index(name)
            if stage == len(self.vit.layers):
                tokens = outputs.last_hidden_state
            else:
                tokens = self.vit.layernorm(outputs.hidden_states[stage])  # nothing where it is not applied
            patches = tokens[:, self.config.num_prefix_tokens :]  # (B, N, D)
            feature_maps.append(patches.transpose(1, 2).unflatten(2, grid_size))  # (B, D, rows, columns)
        output = BackboneOutput(
            feature_maps=tuple(feature_maps),
            hidden_states=outputs.hidden_states if output_hidden_states else None,
            attentions=outputs.attentions,
        )
        return output if first_given(return_dict, self.config.return_dict) else output.to_tuple()
