"""The card states what the run folder states, in metadata the Hub accepts, and never touches what others wrote."""

import json
import re

import pytest
import yaml
from hub_run_folder import edit_json
from hub_server import card_errors
from huggingface_hub import ModelCard

from hub_upload.card import check_card, front_matter, render_body
from hub_upload.card_merge import BEGIN_MARKER, END_MARKER, merge_card
from hub_upload.run_facts import read_run_facts
from modeling_vit_scratch.errors_vit_scratch import InputError

pytest_plugins = ["fixtures_hub"]


def card_of(folder, base_model=None, **merge):
    facts = read_run_facts(folder)
    body = render_body(facts, "digits", "alice/digits", base_model)
    return merge_card(front_matter(facts, "digits", base_model), body, **merge)


def metadata_of(card):
    return yaml.safe_load(card.split("---\n")[1])


def set_recipe(folder, **fields):
    recipe = {**yaml.safe_load((folder / "recipe.yaml").read_text()), **fields}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def rename_first_class(folder, name):
    rows = json.loads((folder / "metrics.json").read_text())["evaluation"]["per_class"]
    rows[0]["label"] = name
    names = [row["label"] for row in rows]
    edit_json(folder / "config.json", id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    edit_json(folder / "data.json", class_names=names)
    edit_json(folder / "metrics.json", evaluation__per_class=rows)


def test_model_index_states_the_accuracy_of_metrics_json(run_folder):
    accuracy = json.loads((run_folder / "metrics.json").read_text())["evaluation"]["accuracy"]["value"]
    results = ModelCard(card_of(run_folder)).data.eval_results
    assert {r.metric_type: r.metric_value for r in results}["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_the_server_accepts_the_metadata(run_folder):
    assert card_errors(card_of(run_folder)) == []


def test_the_text_gives_accuracy_with_n_and_wilson_interval(run_folder):
    # Wilson, 293 of 360, z = 1.959964: computed with statsmodels' formula by hand.
    assert json.loads((run_folder / "metrics.json").read_text())["evaluation"]["accuracy"]["num_correct"] == 293
    text = card_of(run_folder)
    assert "Accuracy 81.39 % (95% Wilson interval 77.04 % to 85.07 %)" in text and "293 of 360" in text


def test_every_class_has_its_row(run_folder):
    rows = json.loads((run_folder / "metrics.json").read_text())["evaluation"]["per_class"]
    text = card_of(run_folder)
    for row in rows:
        assert f"| {row['label']} | {row['num_samples']} | {row['precision']:.3f} | {row['recall']:.3f} |" in text


def test_the_splits_stand_with_their_hashes(run_folder):
    splits = json.loads((run_folder / "data.json").read_text())["splits"]
    text = card_of(run_folder)
    assert all(split["sha256"] in text for split in splits.values())


def test_every_picture_of_the_card_is_in_the_run_folder(run_folder):
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", card_of(run_folder))
    assert len(links) == 3 and all((run_folder / link).is_file() for link in links)


def test_a_scratch_model_is_not_called_fine_tuned_and_has_no_base(run_folder):
    card = card_of(run_folder)
    assert "base_model" not in metadata_of(card) and "fine-tuned" not in card.lower()
    assert "random initialisation" in card


@pytest.mark.parametrize("start", ["./gone", "../gone", "-x/y", "a..b/c", "runs/pre.git", "plain"])
def test_what_cannot_be_a_hub_id_is_no_possible_base(run_folder, start):
    set_recipe(run_folder, verb="finetune", model_name_or_path=start)
    assert read_run_facts(run_folder).possible_base_model is None


def test_only_a_run_from_scratch_says_that_it_never_saw_the_test_images(run_folder):
    assert "on 360 images it was not trained on" in card_of(run_folder)
    set_recipe(run_folder, verb="finetune", model_name_or_path="org/base")  # may have seen any image
    assert "on 360 images left out of the fine-tuning" in card_of(run_folder, "org/base")


def test_the_card_names_every_library_that_the_code_files_import(run_folder):
    # What pyproject.toml declares; a downloader's transformers asks for each of them.
    text = card_of(run_folder)
    assert all(f"`{name}" in text for name in ("torch>=", "torchvision>=", "transformers<", "pillow>="))


@pytest.mark.parametrize("word", ["More information", "None", "nan ", "imagefolder", "split: train", "[[", "{{"])
def test_the_card_holds_no_filler(run_folder, word):
    assert word not in card_of(run_folder)


def test_a_fine_tuning_of_a_hub_model_names_it_as_base(run_folder):
    set_recipe(run_folder, verb="finetune", model_name_or_path="org/base")
    assert read_run_facts(run_folder).possible_base_model == "org/base"
    card = card_of(run_folder, "org/base")
    assert metadata_of(card)["base_model"] == "org/base" and "Fine-tuned from [org/base]" in card


def test_a_fine_tuning_of_a_local_folder_claims_no_base(run_folder, tmp_path):
    (tmp_path / "runs" / "pretrained").mkdir()
    set_recipe(run_folder, verb="finetune", model_name_or_path="runs/pretrained")
    assert read_run_facts(run_folder).possible_base_model is None
    card = card_of(run_folder)
    assert "base_model" not in metadata_of(card) and "local checkpoint `pretrained`" in card


def test_a_converted_start_is_named(run_folder):
    set_recipe(run_folder, verb="finetune", model_name_or_path="/data/vit.npz")
    record = {"schema_version": 1, "kind": "Google's npz in the released layout"}
    (run_folder / "conversion.json").write_text(json.dumps(record))
    assert "local checkpoint `vit.npz`, converted from Google's npz in the released layout, which" in card_of(
        run_folder
    )


def test_a_held_out_part_is_not_passed_off_as_the_test_split(run_folder):
    dataset = metadata_of(card_of(run_folder))["model-index"][0]["results"][0]["dataset"]
    assert dataset["split"] == "test (carved from train)"


def test_figures_of_the_validation_split_are_marked_as_flattering(run_folder):
    splits = json.loads((run_folder / "data.json").read_text())["splits"]
    edit_json(run_folder / "data.json", splits={"train": splits["train"], "validation": splits["test"]})
    edit_json(run_folder / "metrics.json", evaluation__split="validation")
    assert "There was no test split" in card_of(run_folder)


def test_a_hub_dataset_is_linked_with_its_revision(run_folder):
    edit_json(
        run_folder / "data.json", kind="hub", dataset="org/pets", revision="0" * 40, splits__test__origin="given"
    )
    metadata = metadata_of(card_of(run_folder))
    dataset = metadata["model-index"][0]["results"][0]["dataset"]
    assert metadata["datasets"] == ["org/pets"]
    assert (dataset["type"], dataset["split"], dataset["revision"]) == ("org/pets", "test", "0" * 40)


def test_a_local_folder_links_no_dataset_and_keeps_its_own_name(run_folder):
    edit_json(run_folder / "data.json", kind="imagefolder", dataset="my flowers")
    card = card_of(run_folder)
    assert "datasets" not in metadata_of(card) and card_errors(card) == []
    assert metadata_of(card)["model-index"][0]["results"][0]["dataset"]["name"] == "my flowers"


def test_a_class_name_cannot_break_the_table(run_folder):
    rename_first_class(run_folder, "a|b\nc")
    assert "| a\\|b c | 36 |" in card_of(run_folder)


@pytest.mark.parametrize(
    ("name", "in_the_table", "in_the_text"),
    [
        ("<unk>", "| &lt;unk&gt; |", "`<unk>`"),
        ("a|b", "| a\\|b |", "`a|b`"),
        ("`x` y", "| `x` y |", "`` `x` y ``"),
        ("no", "| no |", "`no`"),
    ],
)
def test_a_class_name_is_shown_as_it_is(run_folder, name, in_the_table, in_the_text):
    rename_first_class(run_folder, name)
    card = card_of(run_folder)
    assert in_the_table in card and f"10 classes: {in_the_text}, `1`" in card


# Merging

HAND_WRITTEN = """---
license: mit  # the lab's
language: no
tags:
- plants
# who to ask
contact: me@example.org
---

# My flowers

Do not eat them.
"""


def test_a_hand_written_card_keeps_every_word_and_every_key(run_folder):
    card = card_of(run_folder, existing=HAND_WRITTEN)
    for line in ("license: mit  # the lab's\n", "language: no\n", "# who to ask\ncontact: me@example.org\n"):
        assert line in card
    assert "\n# My flowers\n\nDo not eat them.\n\n" + BEGIN_MARKER in card
    assert metadata_of(card)["tags"][0] == "plants" and "vit_scratch" in metadata_of(card)["tags"]
    assert metadata_of(card)["pipeline_tag"] == "image-classification"


def test_a_picture_that_only_the_repository_has_is_no_fault(run_folder):
    check_card(card_of(run_folder, existing="# Mine\n\n![my dog](dog.png)\n"), run_folder)


def test_merging_twice_changes_nothing(run_folder):
    previous = front_matter(read_run_facts(run_folder), "digits")
    once = card_of(run_folder, existing=HAND_WRITTEN)
    assert card_of(run_folder, existing=once, previous_metadata=previous) == once


def test_text_around_the_markers_stays(run_folder):
    card = card_of(run_folder)
    edited = card.replace(BEGIN_MARKER, "Before.\n\n" + BEGIN_MARKER).replace(END_MARKER, END_MARKER + "\n\nAfter.")
    set_recipe(run_folder, seed=77)
    merged = card_of(run_folder, existing=edited)
    assert "Before.\n\n" + BEGIN_MARKER in merged and merged.endswith(END_MARKER + "\n\nAfter.\n")
    assert "| `seed` | 77 |" in merged and "| `seed` | 0 |" not in merged


def test_a_key_of_the_previous_push_is_taken_back_when_it_no_longer_holds(run_folder):
    previous = front_matter(read_run_facts(run_folder), "digits", "org/base")
    card = card_of(run_folder, base_model="org/base")
    assert "base_model" not in metadata_of(card_of(run_folder, existing=card, previous_metadata=previous))


def test_a_key_that_somebody_changed_since_stays_theirs(run_folder):
    previous = front_matter(read_run_facts(run_folder), "digits")
    card = card_of(run_folder).replace("license: apache-2.0", "license: mit")
    assert metadata_of(card_of(run_folder, existing=card, previous_metadata=previous))["license"] == "mit"


def test_results_of_another_model_stay_in_model_index(run_folder):
    other = {"name": "other", "results": []}
    existing = f"---\n{yaml.safe_dump({'model-index': [other]})}---\ntext\n"
    index = metadata_of(card_of(run_folder, existing=existing))["model-index"]
    assert [model["name"] for model in index] == ["other", "digits"]


@pytest.mark.parametrize(
    "existing",
    ["", "# only text\n", "---\n---\n", "---\nlicense: mit\n---", "---\n{license: mit}\n---\nx\n", "\ufeffx"],
)
def test_cards_of_every_form_merge_into_one_with_valid_metadata(run_folder, existing):
    card = card_of(run_folder, existing=existing)
    check_card(card, run_folder)
    assert card_errors(card) == []
    assert metadata_of(card)["license"] == ("mit" if "mit" in existing else "apache-2.0")


@pytest.mark.parametrize("empty", ["", " []", " ~"])
@pytest.mark.parametrize("key", ["model-index", "tags", "license", "pipeline_tag"])
def test_a_key_without_a_value_is_filled_in(run_folder, key, empty):
    card = card_of(run_folder, existing=f"---\nlanguage: en\n{key}:{empty}\n---\ntext\n")
    assert metadata_of(card)[key] == metadata_of(card_of(run_folder))[key]
    assert card.count(f"\n{key}:") == 1


def test_windows_line_ends_stay(run_folder):
    card = card_of(run_folder, existing=HAND_WRITTEN.replace("\n", "\r\n"))
    assert "\r\n" in card and "\n" not in card.replace("\r\n", "")


@pytest.mark.parametrize(
    ("existing", "said"),
    [
        ("---\nlicense: [mit\n---\n", "front matter cannot be read"),
        ("---\n- a\n- b\n---\n", "holds no fields"),
        (f"{BEGIN_MARKER}\ntext\n", "stands 1 times"),
        (f"{END_MARKER}\n{BEGIN_MARKER}\n", "in this order"),
    ],
)
def test_a_card_that_cannot_be_merged_is_refused(run_folder, existing, said):
    with pytest.raises(InputError, match=said):
        card_of(run_folder, existing=existing)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("license: apache-2.0\n", "", "license=None"),
        ("license: apache-2.0", "license: My Own!", "license='My Own!'"),
        ("license: apache-2.0", "license: other", "license_name"),
        ("pipeline_tag: image-classification", "pipeline_tag: other", "pipeline_tag"),
        ("value: 0.81", "value: .nan #", "must be finite"),
        ("tags:", "base_model: my model\ntags:", "base_model"),
        ("  - task:", "  - tusk:", "front matter is not valid"),
        ("figures/confusion_matrix.png", "figures/gone.png", "figures/gone.png is missing"),
    ],
)
def test_check_refuses_a_card_the_hub_would_refuse_or_that_shows_nothing(run_folder, old, new, said):
    card = card_of(run_folder)
    assert old in card
    with pytest.raises(InputError, match=re.escape(said)):
        check_card(card.replace(old, new), run_folder)
