"""Recipes and flags: one typed parser, strict about names, and back to the same text."""

import dataclasses
import random
import subprocess
import sys
import typing
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from fixtures_training import refused

from modeling_vit_scratch import ViTScratchConfig
from training import parsing
from training.arguments import (
    EvaluateRecipe,
    FinetuneRecipe,
    NetworkArguments,
    PretrainRecipe,
    flat,
)
from training.cli import VERBS
from training.parsing import UsageError, dump_recipe, parse_recipe, read_recipe_file, recipe_names

RECIPES = {"pretrain": PretrainRecipe, "finetune": FinetuneRecipe, "evaluate": EvaluateRecipe}


def parse(*argv: str, verb: str = "pretrain") -> Any:
    if verb != "evaluate" and "--max_steps" not in argv and "--config" not in argv:
        argv = (*argv, "--max_steps", "1")
    return parse_recipe(RECIPES[verb], list(argv), prog=f"vit-scratch {verb}", description="")


def parse_line(tmp_path, line: str, verb: str = "pretrain") -> Any:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{line}\n" + ("" if "max_steps" in line or verb == "evaluate" else "max_steps: 1\n"))
    return parse("--config", str(recipe), verb=verb)


# What YAML's own types would make of these differs: a string, False, 8, None, a float, True, 1000, a date.
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "1e-3", 0.001),
        ("learning_rate", "1", 1.0),
        ("learning_rate", "1_0.5", 10.5),
        ("seed", "010", 10),
        ("max_grad_norm", "none", None),
        ("max_grad_norm", "Null", None),
        ("max_grad_norm", "~", None),
        ("data_dir", "none", None),
        ("dataset_name", "no", "no"),
        ("dataset_name", "1e-3", "1e-3"),
        ("dataset_revision", "2024-01-01", "2024-01-01"),
        ("dataset_revision", "0123456", "0123456"),
        ("bf16", "no", False),
        ("bf16", "Yes", True),
        ("bf16", "TRUE", True),
        ("pooling", "mean", "mean"),
        ("image_size", "32", 32),
        ("image_size", "none", None),
    ],
)
def test_a_scalar_means_the_same_as_a_line_and_as_a_flag(tmp_path, name, text, value):
    as_line = flat(parse_line(tmp_path, f"{name}: {text}"))[name]
    as_flag = flat(parse(f"--{name}", text))[name]
    assert (as_line, type(as_line)) == (value, type(value))
    assert (as_flag, type(as_flag)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "line", "flag", "value"),
    [
        ("image_size", "[32, 48]", ["32", "48"], [32, 48]),
        ("image_mean", "[0.5, 1e-1, 1]", ["0.5", "1e-1", "1"], [0.5, 0.1, 1.0]),
        ("image_mean", "0.5", ["0.5"], [0.5]),
        ("classes", "[no, 1, 1e-3, none]", ["no", "1", "1e-3", "none"], ["no", "1", "1e-3", "none"]),
        ("classes", "cat", ["cat"], ["cat"]),
        ("classes", "none", ["none"], None),
    ],
)
def test_a_list_means_the_same_as_a_line_and_as_a_flag(tmp_path, name, line, flag, value):
    assert flat(parse_line(tmp_path, f"{name}: {line}"))[name] == value
    assert flat(parse(f"--{name}", *flag))[name] == value


def test_a_flag_without_value_switches_on():
    assert parse("--bf16").optimization.bf16 is True


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("max_steps", "1e3", "must be int"),
        ("max_steps", "3.0", "must be int"),
        ("learning_rate", "fast", "must be float"),
        ("learning_rate", "nan", "must be float"),
        ("weight_decay", "inf", "must be float"),
        ("learning_rate", "none", "must be float"),
        ("bf16", "maybe", "must be true|false"),
        ("pooling", "max", "must be class_token|mean"),
        ("optimizer", "none", "must be adamw|sgd"),
        ("image_size", "big", "must be int or list of int"),
        ("learning_rate", "0", "above 0"),
        ("weight_decay", "-0.1", "0 or more"),
        ("adam_beta2", "1", "in [0, 1)"),
        ("seed", "4294967296", "in 0..2**32-1"),
        ("split_seed", "-1", "in 0..2**32-1"),
        ("validation_fraction", "1", "in [0, 1)"),
        ("save_total_limit", "0", "1 or more"),
    ],
)
def test_a_bad_value_is_refused_with_place_and_expectation(tmp_path, name, text, expected):
    with pytest.raises(UsageError) as line:
        parse_line(tmp_path, f"{name}: {text}")
    with pytest.raises(UsageError) as flag:
        parse(f"--{name}", text)
    for error in (line, flag):
        assert expected in str(error.value) and name in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_a_bad_line_is_named_with_file_and_number(tmp_path):
    with pytest.raises(UsageError, match=r"^recipe.yaml:3: learning_rate: 'fast' must be float"):
        parse_line(tmp_path, "# a comment\nmax_steps: 1\nlearning_rate: fast")


def test_a_flag_beats_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-3\nmax_steps: 7\nbf16: yes\nclasses: [a, b]\n")
    found = parse("--config", str(recipe), "--learning_rate", "5e-1", "--bf16", "no", "--classes", "none")
    assert (found.optimization.learning_rate, found.optimization.max_steps) == (0.5, 7)
    assert (found.optimization.bf16, found.data.classes) == (False, None)


def test_an_unknown_line_is_refused_with_number_and_suggestion(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"recipe.yaml:1: learning_rat is no field of vit-scratch pretrain; did you mean learning_rate\?",
    ):
        parse_line(tmp_path, "learning_rat: 1e-3")


@pytest.mark.parametrize("flag", ["--learning_rat", "--learning-rate", "--learning_rat=3"])
def test_an_unknown_flag_is_refused_with_suggestion(flag):
    with pytest.raises(UsageError, match=r"there is no flag --learning.*did you mean --learning_rate\?"):
        parse(flag, "1e-3")


def test_a_flag_is_not_known_by_its_beginning():
    with pytest.raises(UsageError, match="there is no flag --learning_r"):
        parse("--learning_r", "1e-3")


def test_a_duplicate_line_is_refused_with_its_number(tmp_path):
    with pytest.raises(UsageError, match=r"recipe.yaml:3: seed stands a second time"):
        parse_line(tmp_path, "seed: 1\nmax_steps: 2\nseed: 1")


def test_a_recipe_of_another_verb_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is a recipe of `vit-scratch finetune`, not of `vit-scratch pretrain`"):
        parse_line(tmp_path, "verb: finetune")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold lines of `field: value`"),
        ("- a\n- b\n", "must hold lines of `field: value`"),
        ("seed: {a: 1}\n", "recipe.yaml:1: seed must be one value or a list of values"),
        ("seed: [[1]]\n", "recipe.yaml:1: seed must be one value or a list of values"),
        ("? [a]\n: 1\n", "recipe.yaml:1 must be a line of `field: value`"),
        ("seed: 'open\n", "recipe.yaml is not a YAML file"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UsageError) as error:
        read_recipe_file(str(recipe))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_recipe_names_the_shipped_ones():
    with pytest.raises(UsageError, match=r"--config nowhere.yaml: no such file, nor one of .*demo_pretrain"):
        parse("--config", "nowhere.yaml")


@pytest.mark.parametrize(
    "argv", [[], ["--max_steps", "1", "--num_train_epochs", "1"]], ids=["no length", "two lengths"]
)
def test_the_length_must_be_given_once(argv):
    with pytest.raises(UsageError, match="set max_steps or num_train_epochs"):
        parse_recipe(PretrainRecipe, argv, prog="vit-scratch pretrain", description="")


def draw(hint: Any, randomness: random.Random) -> Any:
    """A value of a field's type, among them texts that YAML would read as something else."""
    kind = randomness.choice(
        typing.get_args(hint) if typing.get_origin(hint) not in (None, list, Literal) else (hint,)
    )
    if typing.get_origin(kind) is Literal:
        return randomness.choice(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return [draw(typing.get_args(kind)[0], randomness) for _ in range(randomness.randint(2, 4))]
    texts = ["no", "1e-3", "0123", "a: b", "# c", "'q'", '"', "x, y", "[z]", "ä→", "- d", "&e", "2024-01-01", "a  b "]
    values = {
        int: lambda: randomness.randint(1, 30),
        float: lambda: randomness.choice([1e-05, 1e-3, 0.1, 0.5, 1 / 3, 3e-17]),
        bool: lambda: randomness.random() < 0.5,
        str: lambda: randomness.choice(texts),
        type(None): lambda: None,
    }
    return values[kind]()


def draw_recipe(recipe_class: type, randomness: random.Random) -> Any:
    groups = {}
    for name, group in typing.get_type_hints(recipe_class).items():
        hints = typing.get_type_hints(group)
        while name not in groups:  # some values exclude others
            try:
                groups[name] = group(**{field: draw(hint, randomness) for field, hint in hints.items()})
            except ValueError:
                continue
    return recipe_class(**groups)


@pytest.mark.parametrize("verb", RECIPES)
@pytest.mark.parametrize("seed", range(20))
def test_a_dumped_recipe_parses_to_the_same_recipe(tmp_path, verb, seed):
    recipe = draw_recipe(RECIPES[verb], random.Random(seed))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"verb: {verb}\n{dump_recipe(recipe)}", encoding="utf-8")
    assert parse("--config", str(path), verb=verb) == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_parses_and_says_which_verb_it_is_for(name):
    verb = read_recipe_file(name)["verb"][0]
    given = set(read_recipe_file(name)) - {"verb"}
    recipe = parse("--config", name, verb=verb)
    defaults = flat(parse(verb=verb))
    assert given <= defaults.keys()
    assert recipe.optimization.max_steps or recipe.optimization.num_train_epochs


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_opens_with_its_command(name):
    head = (parsing._RECIPES / f"{name}.yaml").read_text().partition("\nverb:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"--config {name}" in head


def options_of(recipe_class: type) -> list[dataclasses.Field]:
    groups = typing.get_type_hints(recipe_class).values()
    return [option for group in groups for option in dataclasses.fields(group)]


@pytest.mark.parametrize("verb", RECIPES)
def test_help_lists_every_field_once_with_a_text(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help", verb=verb)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    options = [
        option for group in typing.get_type_hints(RECIPES[verb]).values() for option in dataclasses.fields(group)
    ]
    for option in options:
        assert shown.count(f"  --{option.name} ") == 1
        assert option.metadata["help"].split()[0] in shown


def test_no_field_stands_in_two_groups_of_a_recipe():
    for recipe_class in RECIPES.values():
        names = [
            option.name
            for group in typing.get_type_hints(recipe_class).values()
            for option in dataclasses.fields(group)
        ]
        assert len(names) == len(set(names))


HELP = """
import resource, sys
from training.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code
heavy = [name for name in ("torch", "transformers", "numpy", "accelerate", "datasets") if name in sys.modules]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime, heavy)
"""


@pytest.mark.parametrize("argv", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_takes_under_half_a_second_and_imports_nothing_heavy(argv):
    done = subprocess.run([sys.executable, "-c", HELP, *argv], capture_output=True, text=True, check=True)
    cpu_seconds, _, heavy = done.stdout.splitlines()[-1].partition(" ")
    assert heavy == "[]"
    assert float(cpu_seconds) < 0.5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pretrain", "--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate?"]),
        (["pretrain", "--learning_rate"], ["--learning_rate", "expected", "--help"]),
        (["pretrain", "--max_steps", "many"], ["--max_steps", "'many' must be int"]),
        (["pretrain", "stray", "--max_steps", "1"], ["stray"]),
        (["predict", "model"], ["images", "--help"]),
        (["predict", "model", "image.png", "--top_k", "0"], ["--top_k", "1 or more"]),
        (["predict", "model", "image.png", "--top_k", "few"], ["--top_k", "'few' must be a whole number"]),
        (["predict", "model", "image.png", "--top", "1"], ["--top"]),
        (["predict", "model", "image.png", "--batch_size", "-3"], ["--batch_size", "1 or more"]),
        (["evaluate", "--batch_size", "0"], ["batch_size=0", "1 or more"]),
        (["evaluate", "--split", "dev"], ["--split", "train|validation|test"]),
        (["frobnicate"], ["frobnicate", "pretrain"]),
    ],
)
def test_a_bad_command_line_ends_with_2_and_one_line(argv, words):
    line = refused(*argv)
    assert all(word in line for word in words)


def test_a_bad_flag_is_refused_without_importing_torch():
    script = "import sys; from training.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    argv = [sys.executable, "-c", script, "pretrain", "--learning_rat", "1"]
    assert subprocess.run(argv, capture_output=True, text=True).stdout.split() == ["2", "False"]


# --- the network of a recipe and the configuration of the model

# Set by converters or by the data, or for objectives that `pretrain` does not train.
NOT_IN_RECIPES = {
    *("layer_norm_eps", "qkv_bias", "class_token_position", "rope_theta", "position_interpolation"),
    *("use_distillation_token", "stem_width_factor", "apply_layernorm", "_out_features", "_out_indices"),
    *("corruption_ratio", "prediction_target", "image_mean", "image_std", "mask_ratio", "norm_pix_loss"),
    *("decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads", "decoder_intermediate_size"),
}


def choices(kind: Any) -> set[Any]:
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return {value for literal in literals for value in get_args(literal)}


def test_a_recipe_names_every_option_of_the_network():
    assert (
        get_type_hints(NetworkArguments).keys() - {"variant"}
        == ViTScratchConfig.__annotations__.keys() - NOT_IN_RECIPES
    )


@pytest.mark.parametrize("name", sorted(ViTScratchConfig.__annotations__.keys() - NOT_IN_RECIPES))
def test_an_option_of_a_recipe_has_the_values_that_the_model_knows(name):
    assert choices(get_type_hints(NetworkArguments)[name]) == choices(ViTScratchConfig.__annotations__[name])
