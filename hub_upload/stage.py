"""The staging folder: everything that a repository will hold, built from a run folder and complete in itself."""

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResultEntry
from safetensors import SafetensorError, safe_open

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

from .card import DEFAULT_LICENSE, check_card, front_matter, render_body
from .card_merge import merge_card
from .eval_results import EVAL_RESULTS_FOLDER, eval_results_yaml
from .golden import GOLDEN_NAME, write_golden
from .manifest import MANIFEST_NAME, code_closure, write_manifest
from .run_facts import FIGURES, RunFacts, read_run_facts

__all__ = ["PublishedBefore", "stage"]

logger = logging.getLogger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_vit_scratch.ViTScratchConfig",
    "AutoBackbone": "backbone_vit_scratch.ViTScratchBackbone",
    "AutoModel": "modeling_vit_scratch.ViTScratchModel",
    "AutoModelForMaskedImageModeling": "pretraining_vit_scratch.ViTScratchForMaskedPatchPrediction",
    "AutoModelForPreTraining": "pretraining_vit_scratch.ViTScratchForMaskedAutoencoding",
    "AutoModelForImageClassification": "modeling_vit_scratch.ViTScratchForImageClassification",
}
PROCESSOR_AUTO_MAP = {"AutoImageProcessor": "image_processing_vit_scratch.ViTScratchImageProcessor"}
COPIED_FILES = ("model.safetensors", "metrics.json", "data.json", "environment.json", *FIGURES)


@dataclass(frozen=True)
class PublishedBefore:
    """What the repository already holds and the new card has to respect."""

    card: str | None = None
    card_metadata: dict[str, Any] = field(default_factory=dict)
    """The front matter our previous push wrote, from its manifest."""


def stage(
    run_folder: str | Path,
    output: str | Path,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    eval_results: list[EvalResultEntry] | None = None,
    before: PublishedBefore | None = None,
    license: str = DEFAULT_LICENSE,
) -> Path:
    """Returns the staging folder `output`, written aside and renamed, so that it is whole or absent.

    Args:
        run_folder: What `pretrain` or `finetune` left.
        output: Replaced where it is a staging folder of ours; anything else there is an InputError.
        repo_id: The repository the card's snippets load; None: the folder itself.
        base_model: Hub id of the checkpoint a fine-tuning started from, where it has one.
        eval_results: Entries of the Hub's benchmarks that the run's accuracy belongs to.
        before: What the repository already holds.
        license: Identifier of the weights' licence, for a card that has none yet.
    """
    facts, output = read_run_facts(Path(run_folder)), Path(output)
    name, source = (repo_id.split("/")[-1], repo_id) if repo_id else (facts.folder.resolve().name, output.name)
    aside = None
    try:
        aside = _folder_aside(output)
        _write_code_and_configs(facts, aside, base_model)
        _write_golden(facts, aside)
        _write_eval_results(aside / EVAL_RESULTS_FOLDER / f"{name}.yaml", eval_results or [])
        metadata = _write_card(facts, aside, name, source, base_model, license, before or PublishedBefore())
        write_manifest(aside, code_files=code_closure(_package_folder()), card_metadata=metadata)
        _replace(aside, output)
    except OSError as error:
        raise EnvironmentFault(
            f"{output}: the staging folder could not be written ({error.strerror or error}); nothing was left there, "
            "make room or name another folder, then run it again"
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    logger.info("staged %s from %s", output, facts.folder)
    return output


def _folder_aside(output: Path) -> Path:
    """Returns a new folder beside `output`, which must be absent or a staging folder."""
    if output.exists() and not (output / MANIFEST_NAME).is_file():
        raise InputError(f"{output}: exists and is no staging folder; name another one or move it away")
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    aside.chmod(0o755)  # mkdtemp makes it private; the rename keeps that
    return aside


def _package_folder() -> Path:
    import modeling_vit_scratch

    return Path(modeling_vit_scratch.__file__).parent


def _write_code_and_configs(facts: RunFacts, folder: Path, base_model: str | None) -> None:
    for name in code_closure(_package_folder()):
        shutil.copyfile(_package_folder() / name, folder / name)
    for name in COPIED_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(facts.folder / name, folder / name)
    from modeling_vit_scratch.pipeline_vit_scratch import CUSTOM_PIPELINES

    # A run that started from a remote checkpoint carries an auto_map that points to that repository: it is replaced
    # whole. `_name_or_path` and the like say where files lay on this machine.
    config = {key: value for key, value in facts.config.items() if not key.startswith("_")}
    _write_json(folder / "config.json", {**config, "auto_map": AUTO_MAP, "custom_pipelines": CUSTOM_PIPELINES})
    _write_json(folder / "preprocessor_config.json", {**facts.preprocessor, "auto_map": PROCESSOR_AUTO_MAP})
    (folder / "recipe.yaml").write_text(facts.publishable_recipe(base_model), encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_golden(facts: RunFacts, folder: Path) -> None:
    """Writes the golden from the staged weights, which proves on the way that they belong to config and code."""
    from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor

    _check_weights(facts)
    try:
        model, report = ViTScratchForImageClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
        processor = ViTScratchImageProcessor.from_pretrained(folder)
    except Exception as error:  # whatever config, processor or weights make transformers raise, the files are at fault
        reason = " ".join(str(error).split())
        raise InputError(f"{facts.folder}: the model does not load ({reason}); publish another checkpoint") from error
    # transformers only warns of what a file lacks (drawn at random then), has too much, or has in another shape.
    odd = [f"{kind.replace('_', ' ')} {sorted(map(str, report[kind]))}" for kind in report if report[kind]]
    if odd:
        raise InputError(
            f"{facts.folder / 'model.safetensors'}: does not fit config.json: {'; '.join(odd)}; "
            "both must come from the same run"
        )
    try:
        write_golden(folder / GOLDEN_NAME, model, processor)
    except SafetensorError as error:  # the library's way to report a full disk
        raise OSError(str(error)) from error


def _check_weights(facts: RunFacts) -> None:
    path = facts.folder / "model.safetensors"
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); publish another checkpoint") from error
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise InputError(f"{path}: NaN or infinity in {', '.join(sorted(broken))}; publish an earlier checkpoint")


def _write_eval_results(path: Path, entries: list[EvalResultEntry]) -> None:
    if entries:
        path.parent.mkdir()
        path.write_text(eval_results_yaml(entries), encoding="utf-8")


def _write_card(
    facts: RunFacts,
    folder: Path,
    name: str,
    source: str,
    base_model: str | None,
    license: str,
    before: PublishedBefore,
) -> dict[str, Any]:
    """Returns our front matter, having written and checked the merged card."""
    metadata = front_matter(facts, name, base_model, license)
    body = render_body(facts, name, source, base_model)
    card = merge_card(metadata, body, before.card, before.card_metadata)
    (folder / "README.md").write_bytes(card.encode("utf-8"))
    check_card(card, folder)
    return metadata


def _replace(aside: Path, output: Path) -> None:
    if not output.exists():
        os.replace(aside, output)
        return
    # A folder cannot be renamed over a full one; the old one steps aside first and comes back should the second fail.
    old = aside.with_name(aside.name + ".old")
    os.replace(output, old)
    try:
        os.replace(aside, output)
    except OSError:
        os.replace(old, output)
        raise
    shutil.rmtree(old)
