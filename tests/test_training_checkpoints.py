"""Checkpoints are whole or absent, whatever the disk does."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from fixtures_training import (
    assert_same_tensors,
    files_below,
    interrupted_copy,
    pretrain_flags,
    run,
    short_run,
    tiny_trainer,
)

from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError
from training import checkpoints

# Every file of a save, in the order of writing.
SAVED_FILES = [
    "model.safetensors",
    "config.json",
    "preprocessor_config.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "hashes.json",
]


def publish(run_folder: Path, step: int, content: str = "content") -> Path:
    """A checkpoint of two small files."""
    aside = checkpoints.unfinished_folder(run_folder, step)
    aside.mkdir(parents=True)
    (aside / "a.txt").write_text(content)
    (aside / "b.txt").write_text(f"{content} of {step}")
    return checkpoints.publish_checkpoint(run_folder, step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publishing_leaves_only_the_named_folder_with_its_hashes(tmp_path):
    folder = publish(tmp_path, 7)
    assert names(tmp_path) == ["checkpoint-7"]
    assert names(folder) == ["a.txt", "b.txt", "hashes.json"]
    hashes = json.loads((folder / "hashes.json").read_text())
    # sha256sum's
    assert hashes["sha256"]["a.txt"] == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert (hashes["schema_version"], hashes["step"]) == (1, 7)


def test_files_and_folders_are_synced_before_the_name_and_after(tmp_path, monkeypatch):
    seen = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        seen.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source, target):
        seen.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    publish(tmp_path, 7)
    aside = tmp_path / "unfinished-checkpoint-7"
    before, after = seen[: seen.index("rename")], seen[seen.index("rename") + 1 :]
    assert sorted(before) == sorted(map(str, [aside, aside / "a.txt", aside / "b.txt", aside / "hashes.json"]))
    assert after == [str(tmp_path)]


def test_publishing_a_step_again_replaces_it(tmp_path):
    publish(tmp_path, 7, "old")
    folder = publish(tmp_path, 7, "new")
    checkpoints.verify_checkpoint(folder)
    assert (folder / "a.txt").read_text() == "new"


@pytest.mark.parametrize("name", ["a.txt", "b.txt"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "flipped"])
def test_a_damaged_file_is_named(tmp_path, name, harm):
    folder = publish(tmp_path, 7)
    content = (folder / name).read_bytes()
    if harm == "missing":
        (folder / name).unlink()
    elif harm == "truncated":
        (folder / name).write_bytes(content[:-1])
    else:
        (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(InputError) as error:
        checkpoints.verify_checkpoint(folder)
    assert str(folder / name) in str(error.value)
    assert f"delete {folder}" in str(error.value)


def test_the_first_bad_file_is_named(tmp_path):
    folder = publish(tmp_path, 7)
    (folder / "b.txt").unlink(), (folder / "a.txt").write_text("other")
    with pytest.raises(InputError, match=r"a\.txt is not as it was saved"):
        checkpoints.verify_checkpoint(folder)


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_a_checkpoint_without_its_hashes_is_refused(tmp_path, content):
    folder = publish(tmp_path, 7)
    (folder / "hashes.json").unlink() if content is None else (folder / "hashes.json").write_text(content)
    with pytest.raises(InputError, match=r"hashes\.json is missing or unreadable"):
        checkpoints.verify_checkpoint(folder)


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    for step in (10, 9, 100):
        publish(tmp_path, step)
    assert checkpoints.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_the_newest_is_verified(tmp_path):
    publish(tmp_path, 9)
    (publish(tmp_path, 10) / "a.txt").unlink()
    with pytest.raises(InputError, match=r"checkpoint-10.a\.txt is missing"):
        checkpoints.newest_checkpoint(tmp_path)


def test_what_is_no_published_checkpoint_is_not_taken_for_one(tmp_path):
    publish(tmp_path, 3)
    (tmp_path / "unfinished-checkpoint-9").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert checkpoints.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_no_checkpoint_is_none(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert checkpoints.newest_checkpoint(tmp_path / folder) is None


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in (2, 4, 10, 8, 6):
        publish(tmp_path, step)
    checkpoints.prune_checkpoints(tmp_path, keep=2, best=str(tmp_path / "checkpoint-4"))
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]


def test_pruning_fewer_than_are_kept_removes_none(tmp_path):
    publish(tmp_path, 2)
    checkpoints.prune_checkpoints(tmp_path, keep=3, best=None)
    assert names(tmp_path) == ["checkpoint-2"]


def test_removing_what_is_unfinished_leaves_the_rest(tmp_path):
    publish(tmp_path, 2)
    (tmp_path / "unfinished-checkpoint-4").mkdir()
    (tmp_path / "unfinished-checkpoint-4" / "model.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["checkpoint-2", "notes.txt"]


def test_a_save_holds_every_file_that_a_resume_needs(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(None)
    assert names(tmp_path / "checkpoint-2") == sorted(SAVED_FILES)


def full_disk() -> Path:
    path = Path("/dev/full")
    if not path.exists() or not stat.S_ISCHR(path.stat().st_mode):
        pytest.skip("this system has no /dev/full")
    return path


def assert_failed_save_harmed_nothing(folder: Path, error: EnvironmentFault) -> None:
    assert len(str(error).splitlines()) == 1
    assert str(folder / "unfinished-checkpoint-4") in str(error)
    assert "earlier checkpoints are whole: make room, then use --resume" in str(error)
    assert names(folder) == ["checkpoint-2"]
    checkpoints.verify_checkpoint(folder / "checkpoint-2")


def failing_at_second_save(folder: Path, monkeypatch, prepare) -> EnvironmentFault:
    trainer = tiny_trainer(folder, max_steps=4)
    save_model = trainer.save_model

    def save(output_dir, **kwargs):
        if output_dir.endswith("-4"):
            prepare(Path(output_dir))
        save_model(output_dir, **kwargs)

    monkeypatch.setattr(trainer, "save_model", save)
    with pytest.raises(EnvironmentFault) as error:
        trainer.fit(None)
    return error.value


# safetensors writes to a file of its own and renames it, so that the name leads nowhere.
@pytest.mark.parametrize("name", SAVED_FILES[1:])
def test_no_space_at_any_file_of_a_save_harms_nothing(tmp_path, monkeypatch, name):
    device = full_disk()
    error = failing_at_second_save(tmp_path, monkeypatch, lambda aside: (aside / name).symlink_to(device))
    assert_failed_save_harmed_nothing(tmp_path, error)


@pytest.mark.parametrize("call_name", ["fsync", "replace"])
def test_no_space_at_sync_or_rename_harms_nothing(tmp_path, monkeypatch, call_name):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    error = failing_at_second_save(
        tmp_path, monkeypatch, lambda aside: monkeypatch.setattr(checkpoints.os, call_name, fail)
    )
    assert_failed_save_harmed_nothing(tmp_path, error)


def test_without_an_earlier_checkpoint_the_message_does_not_offer_one(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    monkeypatch.setattr(trainer, "save_model", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(EnvironmentFault, match="there is no earlier checkpoint: make room, then run again"):
        trainer.fit(None)


def test_other_runtime_errors_are_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="collective failed"), checkpoints.writing_to_disk(tmp_path):
        raise RuntimeError("collective failed")


def file_limits(folder: Path) -> list[int]:
    """A limit below the size of each file of a save, above all that are smaller."""
    sizes = sorted({path.stat().st_size for path in folder.iterdir()})
    return [max(size - 40, smaller + 1) for size, smaller in zip(sizes[1:], sizes, strict=False)]


@pytest.mark.e2e
def test_a_limit_on_file_size_between_any_two_files_of_a_save_harms_nothing(tmp_path):
    limits = file_limits(short_run() / "checkpoint-2")
    assert len(limits) >= 6
    for limit in limits:
        folder = interrupted_copy(short_run(), tmp_path / str(limit))
        before = files_below(folder)
        outcome = run([*pretrain_flags(folder), "--resume"], file_limit=limit)
        assert outcome.code == 3, outcome.err
        assert str(folder) in outcome.error_line and "make room" in outcome.error_line
        assert files_below(folder) == before
        checkpoints.verify_checkpoint(folder / "checkpoint-2")


@pytest.mark.e2e
def test_after_a_full_disk_resume_ends_with_the_bytes_of_the_run_that_had_room(tmp_path):
    folder = tmp_path / "run"
    model_size = (short_run() / "checkpoint-2" / "model.safetensors").stat().st_size
    assert run(pretrain_flags(folder), file_limit=model_size + 1000).code == 3
    assert not folder.exists()  # nothing was saved, so nothing is left
    interrupted_copy(short_run(), folder)
    assert run([*pretrain_flags(folder), "--resume"], file_limit=model_size + 1000).code == 3
    assert run([*pretrain_flags(folder), "--resume"]).code == 0
    assert_same_tensors(folder / "model.safetensors", short_run() / "model.safetensors")


def test_nothing_pickled_beyond_tensors_is_needed_to_read_a_save(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(None)
    for name in ("optimizer.pt", "scheduler.pt"):
        assert torch.load(tmp_path / "checkpoint-2" / name, weights_only=True)
