"""`vit-scratch convert`: a checkpoint of another code as one of ours, or ours as another's, with a proof."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.parsing import FlagParser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from modeling_vit_scratch import ViTScratchImageProcessor
    from modeling_vit_scratch.convert_proof_vit_scratch import Conversion, Difference
    from modeling_vit_scratch.convert_vit_scratch import ConversionOptions

    Proof = tuple[Conversion, list[Difference]]

# The rest is imported where it is used, so that --help answers at once.

__all__ = ["UnequalError", "conversion_record", "convert_checkpoint", "describe", "describe_model", "proven"]

CONVERSION_FILE = "conversion.json"
FORMATS = ("vit_scratch", "vit", "timm", "npz")

# All that a conversion writes; a folder that holds something else is not one of ours.
_WRITTEN = ("config.json", "preprocessor_config.json", CONVERSION_FILE, "model.npz", "model*.safetensors*")

# Whose versions may move a difference.
_PACKAGES = ("vit-scratch", "torch", "transformers", "timm", "torchvision", "numpy", "onnx", "onnxruntime")

# Fields that the line about a model states in words.
_FIELDS_IN_WORDS = {
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "id2label",
    "label2id",
    "problem_type",
}


class UnequalError(RuntimeError):
    """The converted model does not compute what the original computes: a mistake of the converter's."""


def convert_checkpoint(
    source: str,
    output_dir: str | Path,
    *,
    to: str = "vit_scratch",
    revision: str | None = None,
    tolerance: float | None = None,
    options: ConversionOptions | None = None,
) -> Path:
    """Returns the folder with the converted checkpoint, written only if both sides are equal. Prints what it finds.

    Args:
        source: a file, a folder or a Hub repo.
        output_dir: new, empty, or of an earlier conversion, which is replaced.
        to: one of `FORMATS`.
        revision: branch, tag or commit of a Hub repo.
        tolerance: largest difference, relative to the largest value; None: by the dtype of the proof.
        options: what the source leaves open.

    Raises:
        UnequalError: past the tolerance.
    """
    from modeling_vit_scratch import convert_vit_scratch as converters
    from training import run_folder
    from training.reading import reading

    _check_output_dir(folder := Path(output_dir))
    path = reading(lambda: converters.locate(source, revision), source)
    _check_is_not_source(folder, source, path)
    model, processor, proofs = _read(path, source, to, tolerance, options)
    with _written_aside(folder) as aside:
        if to == "vit_scratch":
            converters.save_vit_scratch(model, processor, aside)
        else:
            written = converters.export(model, processor, to, aside)
            print(f"written {written.source_kind}")
            proofs.append((written, proven(written, tolerance, say=print)))
        weights = converters.weight_files(path)
        run_folder.write_json(aside / CONVERSION_FILE, conversion_record(source, weights, proofs))
    return folder


def _read(
    path: Path, source: str, to: str, tolerance: float | None, options: ConversionOptions | None
) -> tuple[PreTrainedModel, ViTScratchImageProcessor, list[Proof]]:
    """Returns model and processor of a source, and the proof that they are its own where it is of another code."""
    from modeling_vit_scratch import convert_vit_scratch as converters
    from training.reading import reading

    if to != "vit_scratch" and converters.is_vit_scratch(path):
        settled = options or converters.ConversionOptions()
        model, processor = reading(lambda: converters.load_vit_scratch(path, source, settled), source)
        print(f"source  {source}: a vit_scratch model", f"model   {describe_model(model)}", sep="\n")
        return model, processor, []
    conversion = reading(lambda: converters.convert(path, source=source, options=options), source)
    print(*describe(conversion), sep="\n")
    proof = conversion, proven(conversion, tolerance, say=print)
    return conversion.model, conversion.image_processor, [proof]


def proven(conversion: Conversion, tolerance: float | None, *, say: Callable[[str], None]) -> list[Difference]:
    """Returns the differences after saying each; raises UnequalError where one is past the tolerance."""
    from modeling_vit_scratch.convert_proof_vit_scratch import prove
    from modeling_vit_scratch.errors_vit_scratch import InputError

    differences = prove(conversion, tolerance=tolerance)
    dtype = str(conversion.reference_dtype).removeprefix("torch.")
    say(f"proof   two fixed images in {dtype}, tolerance {differences[0].tolerance:g} of max(1, largest value)")
    for found in differences:
        height, width = found.image_size
        say(
            f"        {found.output:17} at {height}x{width}: largest |difference| {found.largest:.1e}, "
            f"relative to {found.scale:.3g}: {'equal' if found.is_equal else 'NOT equal'}"
        )
    unequal = [found.output for found in differences if not found.is_equal]
    if unequal and conversion.taken_from_user:
        raise InputError(
            f"{conversion.source}: {', '.join(dict.fromkeys(unequal))} NOT equal with {conversion.taken_from_user}, "
            "which nothing in the file confirms; give another value"
        )
    if unequal:
        raise UnequalError(
            f"{conversion.source}: {', '.join(dict.fromkeys(unequal))} NOT equal, so the conversion is wrong and "
            "nothing is kept of it; please report the checkpoint"
        )
    return differences


def describe(conversion: Conversion) -> list[str]:
    """Returns lines on what the source is, what it becomes, and what was left out, folded or assumed."""
    return [
        f"source  {conversion.source}: {conversion.source_kind}",
        f"model   {describe_model(conversion.model)}",
        *(f"note    {note}" for note in conversion.notes),
    ]


def describe_model(model: PreTrainedModel) -> str:
    """Returns the shape of a model of ours in one line, and the fields that are not the defaults."""
    config = model.config
    (height, width), (patch_height, patch_width) = config.image_height_width, config.patch_height_width
    usual = type(config)()
    fields = [name for name in type(config).__annotations__ if name not in _FIELDS_IN_WORDS and name[0] != "_"]
    others = [name for name in fields if getattr(config, name) != getattr(usual, name)]
    parts = [
        type(model).__name__,
        f"{height}x{width} pixels of {config.num_channels} channels in patches of {patch_height}x{patch_width}",
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"MLP {config.intermediate_size}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters in "
        f"{str(model.dtype).removeprefix('torch.')}",
        *([f"{config.num_labels} classes, {config.problem_type}"] if hasattr(model, "classifier") else []),
        *([" ".join(f"{name}={getattr(config, name)}" for name in others)] if others else []),
    ]
    return "; ".join(parts)


def conversion_record(source: str, weight_files: list[Path], proofs: list[Proof]) -> dict[str, Any]:
    """Returns the content of conversion.json."""
    return {
        "source": source,
        "sha256": {path.name: _sha256(path) for path in weight_files},
        "kind": proofs[0][0].source_kind,
        "notes": [note for conversion, _ in proofs for note in conversion.notes],
        "proof": [
            {
                "compared_with": conversion.source_kind,
                "dtype": str(conversion.reference_dtype).removeprefix("torch."),
                "output": found.output,
                "image_size": list(found.image_size),
                "largest_difference": found.largest,
                "relative_to": found.scale,
                "tolerance": found.tolerance,
            }
            for conversion, differences in proofs
            for found in differences
        ],
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_output_dir(folder: Path) -> None:
    from modeling_vit_scratch.errors_vit_scratch import InputError

    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file: name a folder")
    if folder.exists() and folder.samefile(Path.cwd()):
        raise InputError(f"--output_dir {folder} is the current folder, which cannot be replaced: name another")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    others = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in _WRITTEN)]
    if names and (others or CONVERSION_FILE not in names):
        raise InputError(
            f"--output_dir {folder} holds {', '.join((others or names)[:3])}, which no conversion wrote: name another "
            "folder"
        )


def _check_is_not_source(folder: Path, source: str, path: Path) -> None:
    """Raises where the output would take the place of what it is made from."""
    from modeling_vit_scratch.errors_vit_scratch import InputError

    places = [path.resolve()] + ([Path(source).absolute()] if Path(source).exists() else [])
    if any(place.is_relative_to(ending) for place in places for ending in (folder.resolve(), folder.absolute())):
        raise InputError(
            f"--output_dir {folder} holds the source {source}, which it would replace: name another folder"
        )


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder to write into, which then takes the place of `folder`; after an exception nothing has changed."""
    from safetensors import SafetensorError

    from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault

    folder, aside = folder.resolve(), None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.unfinished-", dir=folder.parent))
        content = aside / "new"
        content.mkdir()
        yield content
        _replace(folder, content, aside / "old")
    except (OSError, SafetensorError) as error:
        is_lost = aside is not None and _is_aside(folder, aside)
        kept = f"The earlier conversion lies in {aside}/old" if is_lost else "Nothing was changed"
        raise EnvironmentFault(
            f"cannot write {folder}: {error}. {kept}; make room or mend permissions, then run again."
        ) from error
    finally:
        if aside is not None and not _is_aside(folder, aside):
            shutil.rmtree(aside, ignore_errors=True)


def _replace(folder: Path, content: Path, old: Path) -> None:
    """Puts `content` in the place of `folder`; after an exception, an interrupt too, `folder` is what it was."""
    try:
        if folder.exists():
            os.replace(folder, old)
        os.replace(content, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise


def _is_aside(folder: Path, aside: Path) -> bool:
    """Whether the earlier conversion could not be put back."""
    return (aside / "old").exists() and not folder.exists()


def main(argv: list[str], prog: str = "vit-scratch convert") -> int:
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    if len(arguments.image_size or []) > 2:
        parser.error("--image_size takes one number, or height and width")
    from modeling_vit_scratch.convert_vit_scratch import ConversionOptions

    size = arguments.image_size
    options = ConversionOptions(
        image_size=size[0] if size and len(size) == 1 else size,
        num_attention_heads=arguments.num_attention_heads,
        drop_distillation=arguments.drop_distillation,
    )
    try:
        folder = convert_checkpoint(
            arguments.source,
            arguments.output_dir,
            to=arguments.to,
            revision=arguments.revision,
            tolerance=arguments.tolerance,
            options=options,
        )
    except UnequalError as error:
        # Whoever gave the file did nothing wrong: a network that is not understood is refused before it is compared.
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _parser(prog: str) -> FlagParser:
    parser = FlagParser(
        prog=prog,
        description="Convert a checkpoint of another code, or ours for another code, and prove that both are equal.",
        epilog="Exit codes: 0 both sides are equal; 1 they are not, and nothing is written; 2 the source is not "
        "understood; 3 the environment.",
    )
    parser.add_argument(
        "source",
        help="a file (.npz .onnx .safetensors .pth .pt .bin); a folder or Hub repo of transformers, timm, vit_scratch",
    )
    parser.add_argument("--output_dir", required=True, help="folder for the result; an earlier conversion is replaced")
    parser.add_argument("--to", choices=FORMATS, default=FORMATS[0], help=f"whose checkpoint to write [{FORMATS[0]}]")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repo")
    parser.add_argument(
        "--tolerance",
        type=_positive(float),
        help="largest difference, relative to max(1, largest value) [1e-8 in float64, 3e-5 in float32]",
    )
    size_help = "pixels (one number, or height and width) of a file that does not tell; resamples a vit_scratch model"
    parser.add_argument("--image_size", type=_positive(int), nargs="+", help=size_help)
    parser.add_argument("--num_attention_heads", type=_positive(int), help="of a file that does not tell")
    parser.add_argument("--drop_distillation", action="store_true", help="drop a DeiT's distillation token and head")
    return parser


def _positive(number: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = number(0)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
        return value

    return read


if __name__ == "__main__":
    from training.cli import main as cli

    sys.exit(cli(["convert", *sys.argv[1:]]))
