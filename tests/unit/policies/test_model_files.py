"""If these fail, a model from somebody else makes a command read, and copy, files of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.errors import MachineError
from quintet.policies.model_files import check_index, check_model_files
from quintet.policies.model_loading import load_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", ["../secret", "x/../../secret", "{place}/secret"])
def test_an_index_cannot_name_a_file_outside(model: Path, name: str) -> None:
    weights = {"a": "model.safetensors", "b": name.format(place=model.parent)}
    (model / INDEX).write_text(json.dumps({"weight_map": weights}))
    for check in (check_index, check_model_files, load_model):
        with pytest.raises(MachineError, match="secret leads out of"):
            check(model)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "[" * 100_000])
def test_a_damaged_index_is_named(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    with pytest.raises(MachineError, match=r"index\.json is no index of weights"):
        check_index(model)


def test_a_link_out_of_a_model_is_refused(model: Path) -> None:
    (model / "tokenizer.json").symlink_to("../secret")
    with pytest.raises(MachineError, match=r"tokenizer.json leads out of"):
        check_model_files(model)


def test_a_model_in_the_cache_of_hugging_face_is_read(tmp_path: Path) -> None:
    """Its files are links to those of its repository, and only to them."""
    snapshot = tmp_path / "models--org--name/snapshots/0"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name/blobs").mkdir()
    (tmp_path / "models--org--name/blobs/1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    check_model_files(snapshot)
    (tmp_path / "secret").write_text("secret")
    (snapshot / "tokenizer.json").symlink_to("../../../secret")
    with pytest.raises(MachineError, match=r"tokenizer\.json leads out of"):
        check_model_files(snapshot)
