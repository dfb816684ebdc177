"""If these fail, a run that was killed can't go on, or goes on from something broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from saved_checkpoints import save_checkpoint

from quintet.errors import MachineError
from quintet.training.checkpoint.checkpoint import (
    MANIFEST_FILE,
    REPLACED_PREFIX,
    find_checkpoint,
    finish_interrupted_replacements,
    open_checkpoint,
    staging_directory,
)


def save(root: Path, step: int, keep: int = 3) -> Path:
    def write(directory: Path) -> None:
        (directory / "hf").mkdir()
        (directory / "hf/model.safetensors").write_bytes(bytes([step]) * 100)

    return save_checkpoint(root, step, {"seconds": 1.5}, write, keep=keep)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def never(path: Path, reason: str) -> None:
    pytest.fail(f"{path} was rejected: {reason}")


def test_the_newest_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    # 9 was saved last: what lies beyond it belongs to a run that went another way.
    actual = find_checkpoint(tmp_path, never)
    assert actual is not None
    assert (actual.step, actual.state["seconds"]) == (9, 1.5)
    assert steps(tmp_path) == ["global_step_2", "global_step_9"]


def test_older_checkpoints_are_deleted(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["global_step_4", "global_step_5"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    target = save(tmp_path, 2) / "hf/model.safetensors"
    if damage == "flip":
        target.write_bytes(target.read_bytes()[:-1] + b"\0")
    elif damage == "cut":
        target.write_bytes(target.read_bytes()[:50])
    elif damage == "remove":
        target.unlink()
    else:
        (tmp_path / "global_step_2/manifest.json").write_text("{")
    rejected: list[tuple[str, str]] = []
    actual = find_checkpoint(tmp_path, lambda path, reason: rejected.append((path.name, reason)))
    assert actual is not None
    assert actual.step == 1
    assert [name for name, _ in rejected] == ["global_step_2"]
    with pytest.raises(MachineError, match="damaged"):
        open_checkpoint(tmp_path / "global_step_2")


@pytest.mark.parametrize(
    "manifest", ["[]", "null", "{}", '{"state.json": 3}', '{"state.json": {"sizf": 1, "sha256": ""}}', "\0"]
)
def test_an_invalid_manifest_counts_as_damage(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text(manifest)
    rejected: list[tuple[str, str]] = []
    actual = find_checkpoint(tmp_path, lambda path, reason: rejected.append((path.name, reason)))
    assert actual is not None
    assert actual.step == 1
    assert "its manifest" in rejected[0][1]


def test_an_unreadable_file_counts_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    bad = save(tmp_path, 2) / "hf/model.safetensors"
    opened = Path.open

    def refuse(path: Path, *value: Any, **named: Any) -> Any:
        if path == bad:
            raise OSError(5, "Input/output error")
        return opened(path, *value, **named)

    monkeypatch.setattr(Path, "open", refuse)
    rejected: list[str] = []
    actual = find_checkpoint(tmp_path, lambda path, reason: rejected.append(reason))
    assert actual is not None
    assert actual.step == 1
    assert rejected == ["hf/model.safetensors cannot be read: Input/output error"]


def test_the_latest_step_file_never_names_a_deleted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep=1)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quintet.training.checkpoint.checkpoint.shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep=1)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_run_directory_is_not_reported_as_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    with pytest.raises(MachineError, match="global_step_N"):
        open_checkpoint(tmp_path)


def test_an_interrupted_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def die(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, {}, die, keep=2)
    actual = find_checkpoint(tmp_path, never)
    assert actual is not None
    assert actual.step == 1
    save(tmp_path, 2)
    assert steps(tmp_path) == ["global_step_1", "global_step_2"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1)
    assert steps(tmp_path) == ["global_step_1"]


@pytest.mark.parametrize("is_new_complete", [True, False])
def test_a_checkpoint_whose_replacement_was_killed_between_its_renames_is_restored(
    tmp_path: Path, is_new_complete: bool
) -> None:
    save(tmp_path, 2)
    replaced = tmp_path / f"{REPLACED_PREFIX}2"
    (tmp_path / "global_step_2").rename(replaced)
    new = shutil.copytree(replaced, staging_directory(tmp_path, 2))
    (new / "new").write_text("x")
    if not is_new_complete:
        (new / MANIFEST_FILE).unlink()
    finish_interrupted_replacements(tmp_path)
    actual = find_checkpoint(tmp_path, never)
    assert actual is not None
    assert (actual.step, (actual.directory / "new").exists()) == (2, is_new_complete)
    save(tmp_path, 3)
    assert steps(tmp_path) == ["global_step_2", "global_step_3"]


def test_the_next_save_deletes_no_checkpoint_whose_replacement_was_killed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / f"{REPLACED_PREFIX}2")
    save(tmp_path, 3)
    assert steps(tmp_path) == ["global_step_2", "global_step_3"]


def test_the_latest_step_file_is_verls(tmp_path: Path) -> None:
    for step in (3, 12):
        save(tmp_path, step)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    directory = save(tmp_path, 7)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert set(manifest) == {"hf/model.safetensors", "state.json"}
    assert manifest["hf/model.safetensors"]["size"] == 100


def test_a_missing_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="global_step_N"):
        open_checkpoint(tmp_path / "none")
