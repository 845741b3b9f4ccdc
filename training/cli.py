"""`vit-scratch VERB ...`: one command a verb. Nothing heavy is imported before the verb is known."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from training.arguments import EvaluateRecipe, FinetuneRecipe, PretrainRecipe

__all__ = ["main"]

VERBS = {
    "demo": ("training.demo", "pretrain, fine-tune, evaluate and stage a small ViT in three minutes, offline"),
    "pretrain": ("training.pretrain", "train a network from its initialisation"),
    "finetune": ("training.finetune", "train a checkpoint on other images, classes or resolution"),
    "evaluate": ("training.evaluation", "measure a model on a split of a dataset"),
    "predict": ("training.prediction", "classify images and folders of images"),
    "convert": (
        "training.conversion",
        "turn checkpoints of other codes into ours, and ours into theirs, with a proof",
    ),
    "push": ("training.publishing", "publish a run folder on the Hub and verify what was published"),
    "verify": (
        "training.publishing",
        "load a published model as a stranger would; does it predict the same?",
    ),
}

RECIPES = {"pretrain": PretrainRecipe, "finetune": FinetuneRecipe, "evaluate": EvaluateRecipe}

DONE, OUR_FAULT, INPUT, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 75


def main(argv: list[str] | None = None) -> int:
    """Runs a verb and returns the exit code: 0 done, 1 our fault, 2 the input, 3 the environment, 75 resumable."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [argument for argument in argv if argument != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return DONE
    verb, *rest = argv
    if verb not in VERBS:
        print(f"vit-scratch {verb}: there is no such verb; the verbs are {', '.join(VERBS)}", file=sys.stderr)
        return INPUT
    # Threads that spin while they wait stall each other on shared cores; read when torch loads its OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _set_up_logging()
        return _run(verb, rest)
    except BrokenPipeError:  # `vit-scratch predict ... | head`: who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        code = _exit_code(error)
        if debug or code == OUR_FAULT:
            traceback.print_exc()
        if code != OUR_FAULT:
            print(f"vit-scratch {verb}: {' '.join(_innermost(error).split())}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print(f"vit-scratch {verb}: interrupted at once; what was saved before is whole", file=sys.stderr)
        return 130


def _run(verb: str, argv: list[str]) -> int:
    module, description = VERBS[verb]
    prog = f"vit-scratch {verb}"
    if verb in RECIPES:
        from training.parsing import parse_recipe

        # Before the import, which takes seconds: --help and mistyped flags are answered at once.
        recipe = parse_recipe(
            RECIPES[verb], argv, prog=prog, description=f"{description[0].upper()}{description[1:]}."
        )
        return importlib.import_module(module).main(recipe)
    return importlib.import_module(module).main(argv, prog=prog)


def _help() -> str:
    width = max(len(verb) for verb in VERBS)
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(["usage: vit-scratch VERB [--help] ...", "", *lines, "", "--debug shows tracebacks."])


def _set_up_logging() -> None:
    import logging

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # "Writing model shards" between our own bars
    for name in ("training", "hub_upload", "modeling_vit_scratch"):
        logging.getLogger(name).setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)


def _exit_code(error: Exception) -> int:
    from training.parsing import UsageError

    if isinstance(error, UsageError):
        return INPUT
    from huggingface_hub.errors import StrictDataclassError

    from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
    from training.callbacks import Interrupted

    if isinstance(error, Interrupted):
        return INTERRUPTED
    if isinstance(error, InputError | StrictDataclassError):
        return INPUT
    # A disk that is full, gone or read-only is nobody's mistake in the code, wherever it shows.
    return ENVIRONMENT if isinstance(error, EnvironmentFault | OSError) else OUR_FAULT


def _innermost(error: Exception) -> str:
    from huggingface_hub.errors import StrictDataclassError

    # transformers wraps what a config's own checks raise; the first cause says what the user should read.
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return str(error.__cause__)
    message = str(error)
    if "DataLoader worker process" in message.partition("\n")[0]:  # torch puts the worker's traceback in front
        return message.rstrip().splitlines()[-1].partition(": ")[2]
    return message


if __name__ == "__main__":
    sys.exit(main())
