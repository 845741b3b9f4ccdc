"""Entries in the Hub's `.eval_results/*.yaml` format, which feed the leaderboard of a benchmark dataset.

An entry names a task that the dataset itself declares in its `eval.yaml`, so there is one only where the run was
measured on such a dataset's own split. Digits, local folders and held-out parts have none: model-index carries their
results.
"""

import logging
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, HfApi, eval_result_entries_to_yaml
from huggingface_hub.errors import EntryNotFoundError, HTTPError

from .run_facts import RunFacts

__all__ = ["EVAL_RESULTS_FOLDER", "benchmark_results", "eval_results_yaml"]

logger = logging.getLogger(__name__)

EVAL_RESULTS_FOLDER = ".eval_results"


def benchmark_results(facts: RunFacts, api: HfApi) -> list[EvalResultEntry]:
    """Returns the entry of the run's accuracy, or none where the dataset declares no task for the evaluated split."""
    data, evaluation = facts.data, facts.metrics["evaluation"]
    split = evaluation["split"]
    if data["kind"] != "hub" or data["splits"][split]["origin"] != "given":
        return []
    tasks = [task for task in _declared_tasks(data, api) if task.get("split", "test") == split]
    if len(tasks) != 1:
        # Two tasks on one split differ in their config, which data.json does not name: no claim beats a wrong one.
        logger.info("%s declares %d tasks on its split %s: no .eval_results", data["dataset"], len(tasks), split)
        return []
    return [
        EvalResultEntry(
            dataset_id=data["dataset"],
            task_id=tasks[0]["id"],
            value=evaluation["accuracy"]["value"],
            dataset_revision=data["revision"],
            date=facts.environment["date"],
            notes=f"top-1 accuracy on {evaluation['num_samples']} images",
        )
    ]


def _declared_tasks(data: dict[str, Any], api: HfApi) -> list[dict[str, Any]]:
    try:
        path = api.hf_hub_download(data["dataset"], "eval.yaml", repo_type="dataset", revision=data["revision"])
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tasks"]
    except (EntryNotFoundError, HTTPError, OSError, yaml.YAMLError, KeyError, TypeError) as error:
        # Not a benchmark, or not reachable: the results stand in model-index either way.
        logger.info("%s: no benchmark task (%s)", data["dataset"], error.__class__.__name__)
        return []


def eval_results_yaml(entries: list[EvalResultEntry]) -> str:
    """Returns the text of a file in `.eval_results`."""
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
