"""If these fail, a checkpoint from somebody else reads files of this machine, or ends a command in a traceback."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_checkpoints import save_checkpoint

from quintet.errors import MachineError
from quintet.training.checkpoint.checkpoint import find_checkpoint, finish_interrupted_replacements, open_checkpoint
from quintet.training.checkpoint.learner_state import SINGLE_RANK
from quintet.training.checkpoint.safetensors_files import stored_sizes, write_tensors
from quintet.training.checkpoint.shards import ShardReader, TensorShard, write_shards

WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with one tensor, beside weights that are none of it."""
    write_tensors(tmp_path / "outside.safetensors", {"w": WEIGHT})
    shards = [TensorShard("w", (2, 3), (0, 0), WEIGHT)]
    root = tmp_path / "run/checkpoints"
    return save_checkpoint(root, 1, {}, lambda path: write_shards(path, "actor/model", shards, SINGLE_RANK), keep=1)


def sign(checkpoint: Path, name: str) -> None:
    """Correct the manifest after a change of a file, as an attacker does."""
    rows, data = json.loads((checkpoint / "manifest.json").read_text()), (checkpoint / name).read_bytes()
    rows[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(rows))


def change_row(checkpoint: Path, **values: Any) -> None:
    """Change the table of shards."""
    table = next((checkpoint / "actor").glob("*.json"))
    (row,) = json.loads(table.read_text())
    table.write_text(json.dumps([row | values]))


def load(checkpoint: Path) -> torch.Tensor:
    reader = ShardReader.open(checkpoint, "actor/model")
    assert reader is not None
    loaded = torch.zeros(2, 3)
    reader.load_into({"w": loaded})
    return loaded


def test_an_intact_checkpoint_is_read(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint).step == 1
    assert torch.equal(load(checkpoint), WEIGHT)


@pytest.mark.parametrize("file", ["../../../outside.safetensors", "{place}/outside.safetensors"])
def test_shards_outside_of_the_checkpoint_are_not_read(checkpoint: Path, tmp_path: Path, file: str) -> None:
    change_row(checkpoint, file=file.format(place=tmp_path))
    with pytest.raises(MachineError, match=r"outside\.safetensors leads out of"):
        load(checkpoint)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "X"},
        {"dtype": 7},
        {"shape": [10**9, 10**9]},
        {"shape": [10**9, 10**9], "sizes": [10**9, 10**9]},
        {"shape": [-2, -3], "sizes": [-2, -3]},
        {"offsets": [1, 0]},
        {"sizes": [2]},
        {"sizes": "23"},
        {"file": "missing.safetensors"},
        {"key": "x"},
    ],
)
def test_a_table_that_does_not_fit_its_files_is_named(checkpoint: Path, values: dict[str, Any]) -> None:
    """A tensor of a table must not be larger than its file: it would fill the memory."""
    change_row(checkpoint, **values)
    with pytest.raises(MachineError, match=r"is not a valid table of shards|has only a part of w|has no valid x"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["hf", "actor", "state.json", "surprise"])
def test_links_out_of_a_checkpoint_are_damage(checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = checkpoint / name
    if path.exists():
        path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(MachineError, match=f"{name} leads out of"):
        open_checkpoint(checkpoint)


def test_a_checkpoint_that_is_a_link_out_of_the_run_is_not_used(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.rename(tmp_path / "global_step_1")
    checkpoint.symlink_to(tmp_path / "global_step_1")
    refused: dict[Path, str] = {}
    assert find_checkpoint(checkpoint.parent, refused.__setitem__) is None
    assert "leads out of" in refused[checkpoint]


def test_a_manifest_cannot_name_a_file_outside(checkpoint: Path, tmp_path: Path) -> None:
    rows = json.loads((checkpoint / "manifest.json").read_text())
    data = (tmp_path / "outside.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    rows["../../../outside.safetensors"] = {"size": len(data), "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(rows))
    with pytest.raises(MachineError, match=r"its manifest names .*outside\.safetensors, which is outside"):
        open_checkpoint(checkpoint)


def test_a_pipe_in_a_checkpoint_is_damage(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "pipe")
    with pytest.raises(MachineError, match="pipe is not a file"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"step": "1"}', '{"step": 1, "experiment": []}', '{"step": 1, "seconds": 1e999}', "[" * 100_000],
)
def test_a_state_that_no_run_has_is_damage(checkpoint: Path, text: str) -> None:
    (checkpoint / "state.json").write_text(text)
    sign(checkpoint, "state.json")
    with pytest.raises(MachineError, match=r"state\.json is no state of a run"):
        open_checkpoint(checkpoint)


def test_names_without_a_step_are_no_checkpoints(checkpoint: Path) -> None:
    root = checkpoint.parent
    for name in ("global_step_²", f"global_step_{'9' * 100}", "global_step_x", ".staging_old_x", ".staging_old_²"):
        (root / name).mkdir()
    finish_interrupted_replacements(root)
    found = find_checkpoint(root, lambda path, reason: pytest.fail(f"{path}: {reason}"))
    assert found is not None
    assert found.directory == checkpoint


def test_interrupted_saves_are_not_deleted_through_links(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("content")
    (checkpoint.parent / ".staging_7").symlink_to(tmp_path / "outside")
    save_checkpoint(checkpoint.parent, 2, {}, lambda path: None, keep=2)
    assert (tmp_path / "outside/file").read_text() == "content"


@pytest.mark.parametrize(
    "data", [b"", (1 << 63).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]", b"\x01" + bytes(7) + b"{"]
)
def test_a_damaged_header_of_weights_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(MachineError, match=r"model\.safetensors has no valid header"):
        stored_sizes(tmp_path / "model.safetensors")
