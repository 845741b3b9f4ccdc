"""Self-supervised training: masked patch prediction (https://arxiv.org/abs/2010.11929, appendix B.1.2) and masked
autoencoding (https://arxiv.org/abs/2111.06377).

B images, C channels, N patches of p x q pixels, D hidden_size. Both models hand their encoder on:
`ViTScratchForImageClassification.from_pretrained` takes what they saved.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput

from .configuration_vit_scratch import ViTScratchConfig
from .errors_vit_scratch import InputError
from .initialization_vit_scratch import ViTScratchModule
from .modeling_vit_scratch import ViTScratchLayer, ViTScratchModel, first_given
from .positions_vit_scratch import resize_positions, sincos_positions
from .pretrained_vit_scratch import ViTScratchPreTrainedModel

__all__ = [
    "ViTScratchForMaskedAutoencoding",
    "ViTScratchForMaskedPatchPrediction",
    "ViTScratchPretrainingOutput",
    "evaluation_noise",
]

# Paper B.1.2: of the corrupted patch embeddings 80 % become [mask], 10 % another patch's, 10 % stay.
MASKED, REPLACED = 0.8, 0.1
BINS = 8  # 3 bits a channel
DOWNSIZED = 4  # patches of 4 x 4
MAX_COLOR_CHANNELS = 4  # 8 ** 4 classes


@dataclass
class ViTScratchPretrainingOutput(ModelOutput):
    """What self-supervised models return.

    Args:
        loss: mean over the masked patches of the batch.
        logits: the prediction for each patch; its shape is that of the target, see the models.
        mask: (B, N), True for the patches whose prediction counts.
        hidden_states: those of the encoder, if asked for.
        attentions: those of the encoder, if asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ViTScratchForMaskedPatchPrediction(ViTScratchPreTrainedModel):
    """Corrupts half of the patch embeddings and predicts what the patches look like.

    What the paper leaves open, and how it is here: the number of corrupted patches is the same for every image, while
    each one's fate (mask, another patch, unchanged) is drawn for itself; the other patch is of the same image; a
    channel's mean on [0, 1] falls into one of eight equal bins; the class of a colour is 64 R + 8 G + B; patches are
    downsized by averaging; the head is one linear layer, zero at first, so that the loss starts at ln 512.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        if config.prediction_target != "pixels" and config.num_channels > MAX_COLOR_CHANNELS:
            raise InputError(
                f"prediction_target={config.prediction_target!r} makes a class of each colour, 8 ** num_channels of "
                f"them: num_channels={config.num_channels} must be at most {MAX_COLOR_CHANNELS}; or use 'pixels'"
            )
        for name in ("image_mean", "image_std"):
            values = getattr(config, name)
            if values is not None and len(values) != config.num_channels:
                raise InputError(f"{name}={values} must have num_channels={config.num_channels} numbers")
        self.vit = ViTScratchModel(config, add_pooling_layer=False)
        self.vit.embeddings.patch_dropout_rate = 0.0  # a patch that is not there cannot be predicted
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.prediction_head = nn.Linear(config.hidden_size, _num_outputs(config))
        self.post_init()

    def initialize(self) -> None:
        init.normal_(self.mask_token, std=0.02)
        init.zeros_(self.prediction_head.weight)
        init.zeros_(self.prediction_head.bias)

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:
        if _num_outputs(old) != _num_outputs(new):
            raise InputError(_other_pixels(self, old, new))

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ViTScratchPretrainingOutput | tuple[Any, ...]:
        """Returns the loss and the predictions of all patches.

        Their shape is (B, N, 8 ** C) for mean_color, (B, N, 16, 8 ** C) for downsized, (B, N, p * q * C) for pixels.

        Args:
            pixel_values: (B, C, H, W), normalised by `image_mean` and `image_std` of the config.
            bool_masked_pos: (B, N), the patches to corrupt, at least one; None: drawn, and in evaluation the same at
                every call.
            output_attentions: also return the encoder's attentions.
            output_hidden_states: also return the encoder's hidden states.
            return_dict: False for a plain tuple.
        """
        self.vit.embeddings.patch_embeddings.check(pixel_values)
        patches = patchify(pixel_values, self.config.patch_height_width)  # (B, N, p * q, C)
        order, fate, other = _noise(patches, self.training, num_draws=3).unbind(dim=1)
        if bool_masked_pos is None:
            num_corrupted = max(1, round(patches.shape[1] * self.config.corruption_ratio))
            bool_masked_pos = order.argsort(dim=1).argsort(dim=1) < num_corrupted
        mask = bool_masked_pos.bool()
        outputs = self.vit(
            pixel_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            corrupt=lambda embeddings: corrupted(embeddings, mask, fate, other, self.mask_token),
        )
        tokens = outputs.last_hidden_state[:, self.config.num_prefix_tokens :]
        logits = self.prediction_head(tokens)  # (B, N, outputs)
        if self.config.prediction_target == "downsized":
            logits = logits.unflatten(2, (DOWNSIZED**2, -1))
        output = ViTScratchPretrainingOutput(
            loss=prediction_loss(logits, self._targets(patches), mask),
            logits=logits,
            mask=mask,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if first_given(return_dict, self.config.return_dict) else output.to_tuple()

    def _targets(self, patches: Tensor) -> Tensor:
        """What is to be predicted of patches (B, N, p * q, C): colours (B, N), (B, N, 16), or pixels."""
        if self.config.prediction_target == "pixels":
            return patches.flatten(2)
        mean = patches.new_tensor(self.config.image_mean or [0.5] * self.config.num_channels)
        std = patches.new_tensor(self.config.image_std or [0.5] * self.config.num_channels)
        colors = patches * std + mean  # on [0, 1]
        if self.config.prediction_target == "mean_color":
            return color_classes(colors.mean(dim=2))
        images = colors.mT.unflatten(3, self.config.patch_height_width)  # (B, N, C, p, q)
        downsized = F.adaptive_avg_pool2d(images.flatten(0, 1), DOWNSIZED).flatten(2)  # (B * N, C, 16)
        return color_classes(downsized.mT).unflatten(0, images.shape[:2])


class ViTScratchDecoder(ViTScratchModule):
    """The light decoder of masked autoencoding: class token and all patches, the masked ones as [mask], to pixels."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.config, width = config, config.decoder_hidden_size
        self.num_prefix_tokens = int(bool(config.use_class_token))
        self.embed = nn.Linear(config.hidden_size, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        # Fixed, so a buffer: loading makes every parameter trainable.
        self.register_buffer("position_embeddings", self._fixed_positions(like=self.embed.weight))
        layer_config = _decoder_config(config)
        self.layers = nn.ModuleList([ViTScratchLayer(layer_config) for _ in range(config.decoder_num_hidden_layers)])
        for layer in self.layers:  # so that the attention kernel stays the one the model is set to
            cast(ViTScratchLayer, layer).attention.config = config
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.prediction = nn.Linear(width, _num_pixels(config))

    def initialize(self) -> None:
        init.normal_(self.mask_token, std=0.02)
        for dense in (self.embed, self.prediction):
            init.xavier_uniform_(dense.weight)
            init.zeros_(dense.bias)
        init.copy_(self.position_embeddings, self._fixed_positions(like=self.position_embeddings))

    def _fixed_positions(self, like: Tensor) -> Tensor:
        # MAE: frequencies 10000 ** -(k / (D / 4)). Here: those of sincos_2d; a converted table stays as it is.
        width = self.config.decoder_hidden_size
        patches = sincos_positions(self.config.grid_size, width, like=like)
        return torch.cat((patches.new_zeros(1, self.num_prefix_tokens, width), patches), dim=1)

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:
        self.position_embeddings = self._positions_for(new.grid_size)

    def forward(self, tokens: Tensor, visible: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Returns pixels (B, N, p * q * C) for the encoder's class token and visible patches, (B, 1 + n, D).

        `visible` holds the raster indices (B, n) of these patches.
        """
        tokens = self.embed(tokens)
        prefix, patches = tokens[:, : self.num_prefix_tokens], tokens[:, self.num_prefix_tokens :]
        num_patches = grid_size[0] * grid_size[1]
        every_patch = self.mask_token.to(patches.dtype).expand(patches.shape[0], num_patches, -1)
        every_patch = every_patch.scatter(1, visible.unsqueeze(2).expand_as(patches), patches)
        hidden_states = torch.cat((prefix, every_patch), dim=1) + self._positions_for(grid_size)
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states)
        return self.prediction(self.layernorm(hidden_states)[:, self.num_prefix_tokens :])

    def _positions_for(self, grid_size: tuple[int, int]) -> Tensor:
        if grid_size == self.config.grid_size:
            return self.position_embeddings
        return resize_positions(
            self.position_embeddings,
            self.config.grid_size,
            grid_size,
            num_prefix_tokens=self.num_prefix_tokens,
            interpolation=self.config.position_interpolation,
        )


class ViTScratchForMaskedAutoencoding(ViTScratchPreTrainedModel):
    """Encodes a quarter of the patches, and reconstructs the pixels of the others.

    `mask_ratio` alone says how many are hidden; `patch_dropout_rate` drops none of those that are seen.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__(config)
        if config.stem_depths is not None:
            raise InputError(
                f"stem_depths={config.stem_depths}: a ResNet stem sees the patches that masked autoencoding hides; "
                "use a model without one"
            )
        if config.num_patches < 2:
            raise InputError(f"image_size={config.image_size} is one patch: nothing is left to see when it is hidden")
        self.vit = ViTScratchModel(config, add_pooling_layer=False)
        self.decoder = ViTScratchDecoder(config)
        self.post_init()

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:  # called before that of any part
        if _num_pixels(old) != _num_pixels(new):
            raise InputError(_other_pixels(self, old, new))

    def forward(
        self,
        pixel_values: Tensor,
        noise: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ViTScratchPretrainingOutput | tuple[Any, ...]:
        """Returns the loss and the reconstructed pixels (B, N, p * q * C), rows first and channels last.

        Args:
            pixel_values: (B, C, H, W), normalised.
            noise: (B, N); the patches of lowest noise are seen. None: drawn, and in evaluation the same at every call.
            output_attentions: also return the encoder's attentions, among the tokens it sees.
            output_hidden_states: also return the encoder's hidden states of the tokens it sees.
            return_dict: False for a plain tuple.
        """
        self.vit.embeddings.patch_embeddings.check(pixel_values)
        patches = patchify(pixel_values, self.config.patch_height_width)  # (B, N, p * q, C)
        num_patches = patches.shape[1]
        if noise is None:
            noise = _noise(patches, self.training)[:, 0]
        num_visible = min(max(1, int(num_patches * (1 - self.config.mask_ratio))), num_patches - 1)
        visible = noise.argsort(dim=1)[:, :num_visible].sort(dim=1).values  # (B, n)
        mask = torch.ones_like(noise, dtype=torch.bool).scatter(1, visible, False)
        outputs = self.vit(
            pixel_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            visible_patches=visible,
        )
        sequence, num_prefix_tokens = outputs.last_hidden_state, self.config.num_prefix_tokens
        # Of the tokens before the patches the decoder gets the class token alone.
        sequence = torch.cat((sequence[:, : self.decoder.num_prefix_tokens], sequence[:, num_prefix_tokens:]), dim=1)
        patch_height, patch_width = self.config.patch_height_width
        grid_size = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)
        logits = self.decoder(sequence, visible, grid_size)
        output = ViTScratchPretrainingOutput(
            loss=prediction_loss(logits, self._targets(patches), mask),
            logits=logits,
            mask=mask,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if first_given(return_dict, self.config.return_dict) else output.to_tuple()

    def _targets(self, patches: Tensor) -> Tensor:
        """Pixels (B, N, p * q * C) of patches (B, N, p * q, C)."""
        pixels = patches.flatten(2)
        if not self.config.norm_pix_loss:
            return pixels
        variance, mean = torch.var_mean(pixels, dim=2, keepdim=True)
        return (pixels - mean) / (variance + 1e-6).sqrt()


def patchify(pixel_values: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Pixels (B, N, p * q, C) of the patches, both in raster order."""
    patch_height, patch_width = patch_size
    rows, columns = pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width
    patches = pixel_values.unflatten(3, (columns, patch_width)).unflatten(2, (rows, patch_height))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)  # from (B, C, rows, p, columns, q)


def corrupted(embeddings: Tensor, mask: Tensor, fate: Tensor, other: Tensor, mask_token: Tensor) -> Tensor:
    """Patch embeddings (B, N, D) of which those in the mask (B, N) became [mask], another patch's, or stayed.

    `fate` and `other` (B, N) are uniform on [0, 1): what becomes of a patch, and whose embedding it gets.
    """
    num_patches = embeddings.shape[1]
    steps = 1 + (other * max(1, num_patches - 1)).long()  # never a patch's own place, where there is another
    indices = (torch.arange(num_patches, device=other.device) + steps) % num_patches
    others = embeddings.gather(1, indices.unsqueeze(2).expand_as(embeddings))
    is_masked = mask & (fate < MASKED)
    is_replaced = mask & (fate >= MASKED) & (fate < MASKED + REPLACED)
    embeddings = torch.where(is_replaced.unsqueeze(2), others, embeddings)
    return torch.where(is_masked.unsqueeze(2), mask_token.to(embeddings.dtype), embeddings)


def color_classes(colors: Tensor) -> Tensor:
    """Class of colours (..., C) on [0, 1], 3 bits a channel: 64 R + 8 G + B."""
    bins = (colors * BINS).floor().clamp(0, BINS - 1).long()
    weights = BINS ** torch.arange(bins.shape[-1] - 1, -1, -1, device=bins.device)
    return (bins * weights).sum(dim=-1)


def evaluation_noise(num_images: int, num_patches: int) -> Tensor:
    """The noise (B, N) from which masked autoencoding draws its masks in evaluation, always the same."""
    # By a formula: torch.compile and torch.export cannot make a generator.
    places = torch.arange(num_images)[:, None] * num_patches + torch.arange(num_patches)
    return (((places + 1).double() * 12.9898).sin() * 43758.5453).remainder(1).float()


def _noise(patches: Tensor, training: bool, num_draws: int = 1) -> Tensor:
    """Uniform numbers (B, draws, N): new ones in training, the same at every call in evaluation."""
    num_images, num_patches = patches.shape[:2]
    if training:
        return torch.rand(num_images, num_draws, num_patches, device=patches.device)
    return evaluation_noise(num_images, num_draws * num_patches).unflatten(1, (num_draws, -1)).to(patches.device)


def prediction_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked patches of cross-entropy with classes, or of the squared distance to pixels."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if targets.is_floating_point():
        losses = (logits - targets).square()
    else:
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").unflatten(
            0, targets.shape
        )
    losses = losses.flatten(2).mean(dim=2) if losses.ndim > 2 else losses  # (B, N)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _num_outputs(config: ViTScratchConfig) -> int:
    """Width of the prediction for one patch."""
    num_colors = BINS**config.num_channels
    return {"mean_color": num_colors, "downsized": DOWNSIZED**2 * num_colors, "pixels": _num_pixels(config)}[
        config.prediction_target
    ]


def _num_pixels(config: ViTScratchConfig) -> int:
    patch_height, patch_width = config.patch_height_width
    return patch_height * patch_width * config.num_channels


def _decoder_config(config: ViTScratchConfig) -> ViTScratchConfig:
    """Plain layers of the decoder's width."""
    fields = {
        "hidden_size": config.decoder_hidden_size,
        "num_attention_heads": config.decoder_num_attention_heads,
        "intermediate_size": config.decoder_intermediate_size,
        "position_embedding_type": "none",
        "layer_scale_init": None,
        "qk_norm": False,
        "mlp_type": "mlp",
    }
    config = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _other_pixels(module: nn.Module, old: ViTScratchConfig, new: ViTScratchConfig) -> str:
    return (
        f"{type(module).__name__} predicts the pixels of a patch, so patch_size={old.patch_size} and num_channels="
        f"{old.num_channels} cannot become {new.patch_size} and {new.num_channels}; load the encoder alone "
        "(ViTScratchModel.from_pretrained) to resize it"
    )
