"""What a run folder says about its run, read and checked: everything the card and the published files state."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from PIL import Image

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

__all__ = ["FIGURES", "RunFacts", "read_run_facts"]

FIGURES = ("figures/learning_curves.png", "figures/confusion_matrix.png", "figures/attention_rollout.png")
SCHEMA_VERSION = 1
ARCHITECTURE = "ViTScratchForImageClassification"

# Fields of a recipe that hold a folder or a file of the machine the run was made on.
_PATH_FIELDS = re.compile(r"(_dir|_path|_file|_folder)$|^(config|resume_from_checkpoint)$")

# The notes of a resumed run: "# changed at checkpoint-5: data_dir: /home/me/a -> /home/me/b"
_PATH_IN_A_NOTE = re.compile(r"(?<!\S)(?:[A-Za-z]:|~|\.{1,2})?[\\/](?:\S*[\\/])?(\S+)")


@dataclass(frozen=True)
class RunFacts:
    """The contents of a run folder's JSON and YAML files."""

    folder: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    recipe: dict[str, Any]
    metrics: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    conversion: dict[str, Any] | None = None
    """What a start from another code's checkpoint was converted from."""

    @property
    def class_names(self) -> list[str]:
        return [self.config["id2label"][str(index)] for index in range(len(self.config["id2label"]))]

    @property
    def start_checkpoint(self) -> str | None:
        """The checkpoint a fine-tuning started from, as the recipe names it; None for a run from scratch."""
        return self.recipe.get("model_name_or_path") if self.recipe["verb"] == "finetune" else None

    @property
    def possible_base_model(self) -> str | None:
        """The starting checkpoint where it can be a Hub id: it has the form of one and is no folder near the run."""
        start = self.start_checkpoint
        if start is None or not _can_be_hub_id(start):
            return None
        places = [Path.cwd(), *self.folder.resolve().parents]
        return None if any((place / start).exists() for place in places) else start

    def publishable_recipe(self, base_model: str | None) -> str:
        """The recipe's text with local paths reduced to their last part: the rest says where somebody keeps files.

        Line by line, since loading and dumping would turn a class called `no` into `false`.
        """
        lines = []
        for line in (self.folder / "recipe.yaml").read_text(encoding="utf-8").splitlines():
            name = line.partition(":")[0]
            value = self.recipe.get(name)
            if line.startswith("#"):
                line = _PATH_IN_A_NOTE.sub(r"\1", line)
            elif isinstance(value, str) and value != base_model and (_PATH_FIELDS.search(name) or _is_absolute(value)):
                line = f"{name}: {json.dumps(_last_part(value), ensure_ascii=False)}"  # JSON's strings are YAML's
            lines.append(line)
        return "\n".join(lines) + "\n"


def _can_be_hub_id(value: str) -> bool:
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return "/" in value


def _is_absolute(value: str) -> bool:
    return value.startswith(("/", "~", "./", "../")) or PureWindowsPath(value).is_absolute()


def _last_part(value: str) -> str:
    return PureWindowsPath(value).name or value  # splits at both / and \


def read_run_facts(folder: Path) -> RunFacts:
    """Returns what the run folder states; raises InputError for a missing, broken or self-contradicting file."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such run folder; give the output folder of pretrain or finetune")
    _refuse_missing(folder, [*_READERS, "model.safetensors"])
    contents = {field: _read(folder / name) for name, field in _READERS.items()}
    if (conversion := folder / "conversion.json").exists():
        contents["conversion"] = _read(conversion)
    if contents["metrics"].get("evaluation") is None:  # said before its pictures are missed
        raise InputError(
            f"{folder / 'metrics.json'}: the run was not evaluated, so a card has nothing to state; give it a test "
            "split"
        )
    _refuse_missing(folder, FIGURES)
    for name in FIGURES:
        _check_picture(folder / name)
    facts = RunFacts(folder=folder, **contents)
    if facts.recipe.get("verb") not in ("pretrain", "finetune"):
        raise InputError(f"{folder / 'recipe.yaml'}: verb={facts.recipe.get('verb')!r} must be pretrain or finetune")
    _check_config(facts)
    _check_metrics(facts)
    return facts


def _refuse_missing(folder: Path, names: Iterable[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder}: a run folder holds {', '.join(missing)}, this one does not; "
            "give the output folder of a finished pretrain or finetune"
        )


_READERS = {
    "config.json": "config",
    "preprocessor_config.json": "preprocessor",
    "recipe.yaml": "recipe",
    "metrics.json": "metrics",
    "data.json": "data",
    "environment.json": "environment",
}
_VERSIONED = ("metrics.json", "data.json", "environment.json", "conversion.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except OSError as error:
        raise EnvironmentFault(f"{path}: cannot be read ({error.strerror}); make it readable and try again") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read ({reason}); make the run again or restore the file") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__} instead of named fields; restore the file")
    if path.name in _VERSIONED and content.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version={content.get('schema_version')} must be {SCHEMA_VERSION}; "
            "push with the vit-scratch that made the run"
        )
    return content


def _check_picture(path: Path) -> None:
    try:
        with Image.open(path) as picture:
            picture.verify()
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ... on broken files
        raise InputError(f"{path}: not a readable picture ({error}); draw the figures again") from error


def _check_config(facts: RunFacts) -> None:
    path, config = facts.folder / "config.json", facts.config
    if config.get("model_type") != "vit_scratch" or config.get("architectures") != [ARCHITECTURE]:
        raise InputError(
            f"{path}: architectures={config.get('architectures')}, model_type={config.get('model_type')!r}; "
            f"only {ARCHITECTURE} of vit_scratch is published by this command"
        )
    id2label, label2id = config.get("id2label") or {}, config.get("label2id") or {}
    # JSON has string keys, and transformers writes them in the order 0, 1, 10, 2.
    if set(id2label) != {str(index) for index in range(len(id2label))} or not id2label:
        raise InputError(f"{path}: id2label must number the classes 0, 1, ... without gaps; got {list(id2label)}")
    if label2id != {label: int(index) for index, label in id2label.items()} or len(label2id) != len(id2label):
        raise InputError(f"{path}: label2id must be the inverse of id2label, with a number for each class name, once")
    if facts.data.get("class_names") != facts.class_names:
        raise InputError(
            f"{facts.folder / 'data.json'}: class_names={facts.data.get('class_names')} must be the classes of "
            f"config.json in their order, {facts.class_names}; the files come from two runs"
        )


def _check_metrics(facts: RunFacts) -> None:
    """Refuses figures that contradict each other: the card repeats them as facts."""
    path = facts.folder / "metrics.json"
    try:
        evaluation = facts.metrics["evaluation"]
        accuracy, num_samples = evaluation["accuracy"], evaluation["num_samples"]
        labels = [row["label"] for row in evaluation["per_class"]]
        matrix = evaluation["confusion_matrix"]
        num_correct = sum(matrix[index][index] for index in range(len(matrix)))
        agree = {
            "per_class": labels == facts.class_names,
            "confusion_matrix": sum(map(sum, matrix)) == num_samples and len(matrix) == len(facts.class_names),
            "accuracy.num_correct": accuracy["num_correct"] == num_correct,
            "accuracy.value": abs(accuracy["value"] - num_correct / num_samples) < 1e-6,
            "accuracy.low, high": accuracy["low"] <= accuracy["value"] <= accuracy["high"],
            "split": evaluation["split"] in facts.data["splits"],
        }
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{path}: field {error} is missing or of another kind; evaluate the run again") from error
    wrong = [field for field, right in agree.items() if not right]
    if wrong:
        raise InputError(f"{path}: {', '.join(wrong)} contradict the rest of the run folder; evaluate the run again")
