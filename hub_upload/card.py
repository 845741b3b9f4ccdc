"""The model card: measured facts of a run folder, as front matter the Hub understands and as text."""

import html
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

from modeling_vit_scratch.errors_vit_scratch import InputError

from .card_merge import BEGIN_MARKER, END_MARKER
from .run_facts import RunFacts

__all__ = ["DEFAULT_LICENSE", "check_card", "front_matter", "render_body"]

_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"

# The settings a reader compares runs by; the rest stands in recipe.yaml.
_SETTINGS = (
    "optimizer",
    "learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "warmup_steps",
    "max_steps",
    "num_train_epochs",
    "global_batch_size",
    "max_grad_norm",
    "seed",
    "bf16",
)


# Of the code files beside the weights; the owner of the weights may name another.
DEFAULT_LICENSE = "apache-2.0"


def front_matter(
    facts: RunFacts, model_name: str, base_model: str | None = None, license: str = DEFAULT_LICENSE
) -> dict[str, Any]:
    """Returns the card's metadata by key, model-index included. `base_model` is a Hub id, or None."""
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=["vit_scratch", "vision-transformer", "image-classification"],
        metrics=["accuracy"],
        datasets=[facts.data["dataset"]] if facts.data["kind"] == "hub" else None,
        base_model=base_model,
        model_name=model_name,
        eval_results=_eval_results(facts),
    ).to_dict()


def _eval_results(facts: RunFacts) -> list[EvalResult]:
    evaluation, data = facts.metrics["evaluation"], facts.data
    measures = {
        "accuracy": ("Accuracy", evaluation["accuracy"]["value"]),
        "f1": ("Macro F1", evaluation["macro_f1"]),
    }
    # `type` must look like a dataset id. A local source has none, so its own name stands there, never `imagefolder`.
    dataset_type = data["dataset"] if data["kind"] == "hub" else re.sub(r"[^\w.-]+", "-", data["dataset"])
    origin = data["splits"][evaluation["split"]]["origin"]
    return [
        EvalResult(
            task_type="image-classification",
            task_name="Image Classification",
            dataset_type=dataset_type,
            dataset_name=data["dataset"],
            # "test" alone would claim the source's own test split.
            dataset_split=evaluation["split"] if origin == "given" else f"{evaluation['split']} ({origin})",
            dataset_revision=data["revision"],
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=round(value, 6),
        )
        for metric_type, (metric_name, value) in measures.items()
    ]


def render_body(facts: RunFacts, model_name: str, source: str, base_model: str | None = None) -> str:
    """Returns the card's text, without front matter. `source` is the repository id or folder the snippets load."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=False)
    environment.filters.update(cell=_cell, code=_code, figure=_figure, sentence=_sentence)
    evaluation = facts.metrics["evaluation"]
    origin = facts.data["splits"][evaluation["split"]]["origin"]
    body = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        model_name=model_name,
        source=source,
        data=facts.data,
        evaluation=evaluation,
        summary=_summary(facts),
        accuracy=_accuracy(evaluation["accuracy"]),
        # What the starting checkpoint was trained on, this run cannot know.
        held_out="it was not trained on" if facts.start_checkpoint is None else "left out of the fine-tuning",
        split_origin="the source's own split" if origin == "given" else origin,
        measures=_measures(evaluation),
        splits=[(name, split) for name, split in facts.data["splits"].items() if split],
        class_sentence=_class_sentence(facts.class_names),
        dropped_sentence=_dropped_sentence(facts.data["dropped"]),
        start_sentence=_start_sentence(facts, base_model),
        settings=[(name, facts.recipe[name]) for name in _SETTINGS if facts.recipe.get(name) is not None],
        limits=_limits(facts),
        environment=_environment(facts),
        requirements=_requirements(),
    )
    # The loops of the template leave blank lines in their wake.
    return re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


def _cell(value: Any) -> str:
    """A value as the text of a table cell: class names may hold what would break the table or vanish as a tag."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")


def _code(value: Any) -> str:
    """A value as a code span, which shows everything as it is but backticks, fenced here by more of them."""
    text = " ".join(str(value).split())
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (1 + max(map(len, re.findall("`+", text))))
    return f"{fence} {text} {fence}"


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"


def _sentence(text: str) -> str:
    return text.strip().rstrip(".") + "."


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _accuracy(accuracy: dict[str, Any]) -> str:
    return (
        f"Accuracy {_percent(accuracy['value'])} ({accuracy['confidence']:.0%} {accuracy['interval'].title()} "
        f"interval {_percent(accuracy['low'])} to {_percent(accuracy['high'])})"
    )


def _summary(facts: RunFacts) -> str:
    config = facts.config
    size, patch = (_side(config[name]) for name in ("image_size", "patch_size"))
    return (
        f"A Vision Transformer ([paper](https://arxiv.org/abs/2010.11929)) of {config['num_hidden_layers']} layers, "
        f"width {config['hidden_size']} and {config['num_attention_heads']} heads, on images of {size} pixels in "
        f"patches of {patch}. It sorts images into {len(facts.class_names)} classes."
    )


def _side(size: int | list[int]) -> str:
    return f"{size}x{size}" if isinstance(size, int) else f"{size[0]}x{size[1]} (height x width)"


def _measures(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    accuracy = evaluation["accuracy"]
    correct = f"{_percent(accuracy['value'])} ({accuracy['num_correct']} of {evaluation['num_samples']})"
    measures = [("accuracy", correct)]
    if evaluation.get("top_5_accuracy") is not None:
        measures.append(("top-5 accuracy", _percent(evaluation["top_5_accuracy"])))
    return [
        *measures,
        ("balanced accuracy", _percent(evaluation["balanced_accuracy"])),
        ("macro F1", f"{evaluation['macro_f1']:.4f}"),
        ("expected calibration error", f"{evaluation['expected_calibration_error']:.4f}"),
        ("loss", f"{evaluation['loss']:.4f}"),
    ]


def _class_sentence(names: list[str]) -> str:
    shown = ", ".join(map(_code, names[:20]))
    rest = f" and {len(names) - 20} more (in `config.json`)" if len(names) > 20 else ""
    return f"{len(names)} classes: {shown}{rest}."


def _dropped_sentence(dropped: list[dict[str, Any]]) -> str:
    if not dropped:
        return "No image of the source was dropped."
    return f"{len(dropped)} images of the source were dropped; `data.json` names each with the reason."


def _start_sentence(facts: RunFacts, base_model: str | None) -> str:
    if facts.start_checkpoint is None:
        return "Trained from random initialisation."
    origin = "" if facts.conversion is None else f", converted from {facts.conversion['kind']}"
    if base_model is not None:
        return f"Fine-tuned from [{base_model}](https://huggingface.co/{base_model}){origin}."
    name = Path(facts.start_checkpoint).name
    return f"Fine-tuned from the local checkpoint `{name}`{origin}, which is not on the Hub."


def _limits(facts: RunFacts) -> list[str]:
    rows = [row for row in facts.metrics["evaluation"]["per_class"] if row["num_samples"]]
    weakest = min(rows, key=lambda row: row["recall"])
    smallest = min(rows, key=lambda row: row["num_samples"])
    limits = [
        f"The weakest class is {_code(weakest['label'])}: {_percent(weakest['recall'])} of its "
        f"{weakest['num_samples']} images are recognised.",
        f"The class with the fewest test images, {_code(smallest['label'])}, has {smallest['num_samples']}: "
        "the rows of the class table are that uncertain.",
    ]
    if facts.metrics["evaluation"]["split"] == "validation":
        limits.append("There was no test split: choices made on the validation split flatter the figures above.")
    if unseen := [row["label"] for row in facts.metrics["evaluation"]["per_class"] if not row["num_samples"]]:
        limits.append(f"Without a test image, so not measured: {', '.join(map(_code, unseen))}.")
    return limits


def _environment(facts: RunFacts) -> list[tuple[str, str]]:
    environment, training = facts.environment, facts.metrics["training"]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(environment["packages"].items()))
    rows = [
        ("date", environment["date"]),
        ("code", f"commit `{environment['git_commit']}`" if environment["git_commit"] else None),
        ("processor", f"{environment['cpu']}, {environment['num_threads']} of {environment['num_cores']} cores used"),
        ("accelerator", environment["accelerator"] or "none"),
        ("processes", training["world_size"]),
        ("Python and packages", f"Python {environment['python']}, {packages}"),
        ("training images", training["num_train_samples"]),
        ("optimizer steps", f"{training['num_steps']} ({training['num_epochs']:.4g} epochs)"),
        ("duration", f"{training['elapsed_seconds']:.0f} s, {training['cpu_seconds']:.0f} CPU-seconds"),
        ("throughput", f"{training['images_per_second']:.0f} images/s"),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _requirements() -> str | None:
    """What this project declares of the libraries that its code files import; None where it runs uninstalled."""
    try:
        declared = importlib.metadata.requires("vit-scratch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    needed = [line for line in declared if re.match(r"(torch|torchvision|transformers|pillow)\b(?!-)", line)]
    return ", ".join(f"`{line}`" for line in needed) or None


def check_card(text: str, folder: Path) -> None:
    """Raises InputError where the Hub would refuse the card, or where it points to a file that `folder` lacks."""
    try:
        metadata = ModelCard(text).data.to_dict()
        for model in metadata.get("model-index", []):
            model_index_to_eval_results([model])
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise InputError(f"README.md: the front matter is not valid: {' '.join(str(error).split())}") from error
    problems = [*_metadata_problems(metadata), *_body_problems(text, folder)]
    if problems:
        raise InputError(f"README.md: {'; '.join(problems)}; correct the card on the Hub or the run folder")


def _metadata_problems(metadata: dict[str, Any]) -> list[str]:
    problems = []
    licence = metadata.get("license")
    for value in licence if isinstance(licence, list) else [licence]:
        if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9.-]+", value):
            problems.append(f"license={value!r} must be an identifier such as apache-2.0")
    if licence == "other" and "license_name" not in metadata:
        problems.append("license=other needs license_name")
    if metadata.get("pipeline_tag") != "image-classification":
        problems.append(f"pipeline_tag={metadata.get('pipeline_tag')!r} must be image-classification")
    base_models = metadata.get("base_model", [])
    for base in base_models if isinstance(base_models, list) else [base_models]:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(base)):
            problems.append(f"base_model={base!r} must be a Hub id")
    for model in metadata.get("model-index", []):
        for result in model["results"]:
            for metric in result["metrics"]:
                if isinstance(metric["value"], float) and not abs(metric["value"]) < float("inf"):
                    problems.append(f"model-index: {metric['type']}={metric['value']} must be finite")
    return problems


def _body_problems(text: str, folder: Path) -> list[str]:
    """Pictures of our own part that are not there; what others wrote may show files that only the repository has."""
    text = text.partition(BEGIN_MARKER)[2].partition(END_MARKER)[0]
    links = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:|/", link)]
    return [f"picture {link} is missing" for link in local if not (folder / link).is_file()]
