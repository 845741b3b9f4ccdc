"""Position embeddings of every kind the paper compares (appendix D.4), and rotary ones.

Learned and sine-cosine tables are added to tokens; relative and rotary positions act inside the attention.
B images, N patches on a grid of rows x columns, T tokens, D hidden_size, A heads, d head_dim.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_vit_scratch import ViTScratchConfig
from .initialization_vit_scratch import ViTScratchModule, replace_parameter
from .validation_vit_scratch import ADDED_POSITIONS

__all__ = [
    "TokenPlaces",
    "ViTScratchLayerPositions",
    "ViTScratchPositionEmbeddings",
    "ViTScratchRelativePositions",
    "ViTScratchRotaryPositions",
    "attention_positions",
    "positions_for_attention",
    "resize_positions",
    "sincos_positions",
]


class TokenPlaces(NamedTuple):
    """Where the patch tokens of a batch stand."""

    grid_size: tuple[int, int]
    """(rows, columns) of the whole image."""
    kept: Tensor | None = None
    """Raster indices (B, n) of the patches that are there; None: all N."""


class ViTScratchPositionEmbeddings(ViTScratchModule):
    """A table of positions that is added to tokens: learned_1d, learned_2d or sincos_2d; none without `has_table`."""

    def __init__(self, config: ViTScratchConfig, has_table: bool = True):
        super().__init__()
        self.config = config
        is_added = has_table and config.position_embedding_type in ADDED_POSITIONS
        self.position_kind = config.position_embedding_type if is_added else None
        rows, columns = config.grid_size
        if self.position_kind == "learned_1d":
            num_positions = config.num_prefix_positions + config.num_patches
            self.position_embeddings = nn.Parameter(torch.zeros(1, num_positions, config.hidden_size))
        elif self.position_kind == "learned_2d":  # the paper's X and Y, each half as wide
            self.position_embeddings_x = nn.Parameter(torch.zeros(columns, config.hidden_size // 2))
            self.position_embeddings_y = nn.Parameter(torch.zeros(rows, config.hidden_size // 2))

    def initialize(self) -> None:
        for name in self._learned():
            init.normal_(getattr(self, name), std=0.02)

    def positions_at(self, places: TokenPlaces, like: Tensor) -> Tensor | None:
        """Returns what is added to the T tokens, (1, T, D) or (B, T, D) where patches are missing; None for nothing.

        The paper does not say what the class token gets where positions are two-dimensional. Here: nothing, as for
        registers. `like` is a tensor of the dtype and device to compute in.
        """
        if self.position_kind is None:
            return None
        table = self.table_for(places.grid_size, like)  # (1, rows before the patches + N, D)
        num_prefix, num_positioned = self.config.num_prefix_tokens, table.shape[1] - math.prod(places.grid_size)
        if places.kept is not None:
            prefix = table[:, :num_positioned].expand(places.kept.shape[0], -1, -1)
            table = torch.cat((prefix, table[0, num_positioned:][places.kept]), dim=1)
        if num_positioned == num_prefix:
            return table
        zeros = table.new_zeros(table.shape[0], num_prefix - num_positioned, table.shape[2])
        return torch.cat((table[:, :num_positioned], zeros, table[:, num_positioned:]), dim=1)

    def table_for(self, grid_size: tuple[int, int], like: Tensor) -> Tensor:
        """Positions for a grid of (rows, columns), resampled if it is not the model's own."""
        if self.position_kind == "sincos_2d":
            return sincos_positions(grid_size, self.config.hidden_size, like)
        if self.position_kind == "learned_2d":
            (rows, columns), (x, y) = grid_size, self._axes_for(grid_size)
            table = torch.cat((x.expand(rows, -1, -1), y.unsqueeze(1).expand(-1, columns, -1)), dim=2)
            return table.flatten(0, 1).unsqueeze(0)  # (1, N, D)
        return self._table_1d(self.config, grid_size)

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:
        if self.position_kind == "learned_1d":
            replace_parameter(self, "position_embeddings", self._table_1d(old, new.grid_size))
        elif self.position_kind == "learned_2d":
            x, y = self._axes_for(new.grid_size)
            replace_parameter(self, "position_embeddings_x", x)
            replace_parameter(self, "position_embeddings_y", y)

    def _table_1d(self, config: ViTScratchConfig, grid_size: tuple[int, int]) -> Tensor:
        if grid_size == config.grid_size:
            return self.position_embeddings
        return resize_positions(
            self.position_embeddings,
            config.grid_size,
            grid_size,
            num_prefix_tokens=config.num_prefix_positions,
            interpolation=config.position_interpolation,
        )

    def _axes_for(self, grid_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        (rows, columns), interpolation = grid_size, self.config.position_interpolation
        x = _resize_line(self.position_embeddings_x, columns, interpolation)
        return x, _resize_line(self.position_embeddings_y, rows, interpolation)

    def _learned(self) -> list[str]:
        return [name for name, _ in self.named_parameters(recurse=False) if name.startswith("position_embeddings")]


class ViTScratchLayerPositions(nn.Module):
    """Positions for each layer's input, learned for each (every_layer) or shared by all (every_layer_shared)."""

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.num_layers = config.num_hidden_layers
        num_tables = self.num_layers if config.position_embedding_placement == "every_layer" else 1
        self.tables = nn.ModuleList([ViTScratchPositionEmbeddings(config) for _ in range(num_tables)])

    def forward(self, places: TokenPlaces, like: Tensor) -> list[Tensor]:
        """Returns the positions (1 or B, T, D) of every layer."""
        positions = [table.positions_at(places, like) for table in self.tables]  # type: ignore[operator]
        return positions * (self.num_layers // len(positions))


class ViTScratchRotaryPositions(nn.Module):
    """Rotates queries and keys of the patch tokens by angles that grow with their row and column."""

    def forward(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, None]:
        return self._rotated(query, angles), self._rotated(key, angles), None

    def _rotated(self, tokens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (part.to(tokens.dtype) for part in angles)  # (1 or B, 1, n, d)
        num_prefix_tokens = tokens.shape[2] - cos.shape[2]
        prefix, patches = tokens[:, :, :num_prefix_tokens], tokens[:, :, num_prefix_tokens:]
        first, second = patches.chunk(2, dim=-1)
        return torch.cat((prefix, patches * cos + torch.cat((-second, first), dim=-1) * sin), dim=2)


class ViTScratchRelativePositions(ViTScratchModule):
    """A learned vector for each offset between two tokens of the sequence, whose product with the query is added to
    the content logits before the softmax (paper D.4).

    The paper leaves open what follows: all T tokens count as places of the sequence, the class token as the first;
    each layer has a table, which its heads share; the added logits are scaled by 1 / sqrt(d) as the content's are.
    """

    def __init__(self, config: ViTScratchConfig):
        super().__init__()
        self.scaling, self.interpolation = config.head_dim**-0.5, config.position_interpolation
        self.table = nn.Parameter(
            torch.zeros(2 * (config.num_prefix_tokens + config.num_patches) - 1, config.head_dim)
        )

    def initialize(self) -> None:
        init.normal_(self.table, std=0.02)

    def forward(self, query: Tensor, key: Tensor, offsets: tuple[Tensor, int]) -> tuple[Tensor, Tensor, Tensor]:
        index, num_offsets = offsets  # (1 or B, 1, T, T)
        table = _resize_line(self.table, num_offsets, self.interpolation)
        logits = query @ table.mT * self.scaling  # (B, A, T, num_offsets)
        return query, key, logits.gather(3, index.expand(*logits.shape[:2], -1, -1))

    def resize(self, old: ViTScratchConfig, new: ViTScratchConfig) -> None:
        num_tokens = new.num_prefix_tokens + new.num_patches
        replace_parameter(self, "table", _resize_line(self.table, 2 * num_tokens - 1, self.interpolation))


def attention_positions(config: ViTScratchConfig) -> nn.Module | None:
    """Positions inside the attention of a layer: query, key, token positions -> query, key, added scores or None."""
    if config.position_embedding_type == "rope_2d":
        return ViTScratchRotaryPositions()
    if config.position_embedding_type == "relative":
        return ViTScratchRelativePositions(config)
    return None


def positions_for_attention(config: ViTScratchConfig, places: TokenPlaces, like: Tensor) -> tuple[Any, ...] | None:
    """What the positions inside the attention of every layer start from, computed once a forward."""
    if config.position_embedding_type == "rope_2d":
        return rotary_angles(config, places, like)
    if config.position_embedding_type == "relative":
        return relative_offsets(config, places, like)
    return None


def rotary_angles(config: ViTScratchConfig, places: TokenPlaces, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (1 or B, 1, n, d) for the patch tokens: wavelengths in units of the image's half side.

    As DINOv3 has it: patch centres on [-1, 1] each way, a quarter of the head's width for the row's angles and a
    quarter for the column's, and the same again for the other half of the pairs that are rotated.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows, columns = places.grid_size
    y, x = (2 * torch.arange(0.5, length, device=like.device) / length - 1 for length in (rows, columns))
    centers = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)  # (N, 2)
    steps = torch.arange(0, 1, 4 / config.head_dim, device=like.device)
    frequencies = 1 / config.rope_theta**steps  # (d / 4,)
    angles = (2 * math.pi * centers[:, :, None]).to(dtype) * frequencies.to(dtype)
    angles = angles.flatten(1).tile(2)  # (N, d)
    angles = angles.unsqueeze(0) if places.kept is None else angles[places.kept]
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def relative_offsets(config: ViTScratchConfig, places: TokenPlaces, like: Tensor) -> tuple[Tensor, int]:
    """Rows (1 or B, 1, T, T) of the table of offsets for each pair of tokens, and how many rows the table has."""
    prefix, num_patches = config.num_prefix_tokens, math.prod(places.grid_size)
    kept = torch.arange(num_patches, device=like.device)[None] if places.kept is None else places.kept
    positions = torch.cat((torch.arange(prefix, device=like.device).expand(kept.shape[0], -1), kept + prefix), dim=1)
    offsets = positions[:, :, None] - positions[:, None, :] + prefix + num_patches - 1
    return offsets.unsqueeze(1), 2 * (prefix + num_patches) - 1


def sincos_positions(grid_size: tuple[int, int], hidden_size: int, like: Tensor) -> Tensor:
    """Fixed positions (1, N, D) of Better plain ViT baselines: [sin x, cos x, sin y, cos y] at D / 4 frequencies."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows, columns = grid_size
    frequencies = 10000 ** -torch.linspace(0, 1, hidden_size // 4, dtype=dtype, device=like.device)
    y, x = (torch.arange(length, dtype=dtype, device=like.device)[:, None] * frequencies for length in (rows, columns))
    x, y = x.expand(rows, -1, -1), y.unsqueeze(1).expand(-1, columns, -1)  # (rows, columns, D / 4)
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=2).flatten(0, 1).unsqueeze(0).to(like.dtype)


def resize_positions(
    positions: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    num_prefix_tokens: int,
    interpolation: str,
) -> Tensor:
    """Positions (1, prefix + N, D) of one grid resampled to another; those of the prefix tokens stay as they are.

    "bilinear_corners" maps corner to corner, as the official code does (its `scipy.ndimage.zoom` of order 1; where
    that function's rounding zeroes the last row, this does not). "bicubic" is that of transformers' ViT,
    "bicubic_antialias" that of timm and of DINOv2 with registers.
    """
    prefix, patches = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    patches = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
    if interpolation == "bilinear_corners":
        resized = F.interpolate(patches, size=new_grid, mode="bilinear", align_corners=True)
    else:
        antialias = interpolation == "bicubic_antialias"
        resized = F.interpolate(patches, size=new_grid, mode="bicubic", align_corners=False, antialias=antialias)
    resized = resized.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)  # (1, N, D)
    return torch.cat((prefix, resized), dim=1)


def _resize_line(table: Tensor, length: int, interpolation: str) -> Tensor:
    """Rows (K, width) resampled to `length` rows."""
    if length == len(table):
        return table
    line = table.unsqueeze(0)
    return resize_positions(line, (1, len(table)), (1, length), num_prefix_tokens=0, interpolation=interpolation)[0]
