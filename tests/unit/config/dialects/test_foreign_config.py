"""If these fail, a foreign configuration isn't composed as its own users compose it, or a value's place is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import read_merged

from quintet.config.dialects.composition.foreign_config import MergedConfig
from quintet.errors import ConfigError, MachineError

MAIN = """\
defaults:
  - env/lake@env.train
  - env/room@env.eval
hydra:
  searchpath:
    - file://${oc.env:PLACE_OF_ROOMS}
algorithm:
  k: 3
  n: ${subtract:${algorithm.k}, 1}
rate: 1e-4
dangling: ${nowhere.to.go}
"""


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose defaults list reaches into its own directory and into one on the search path."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env/lake.yaml").write_text("kind: lake\nsize: ${algorithm.k}\n")
    (tmp_path / "more/env").mkdir(parents=True)
    (tmp_path / "more/env/room.yaml").write_text("kind: room\n")
    monkeypatch.setenv("PLACE_OF_ROOMS", str(tmp_path / "more"))
    path = tmp_path / "main.yaml"
    path.write_text(MAIN)
    return path


def place(written: MergedConfig, key: str) -> str:
    return written.sources[key].rpartition("/")[2]


def test_defaults_packages_and_search_paths_are_followed(main: Path) -> None:
    written = read_merged(main)
    assert written.value("env.train") == {"kind": "lake", "size": 3}
    assert written.value("env.eval.kind") == "room"
    assert place(written, "env.train.size") == "lake.yaml:2"
    assert place(written, "env.eval.kind") == "room.yaml:1"
    assert place(written, "rate") == "main.yaml:10"
    assert written.value("rate") == 1e-4
    assert "hydra" not in written.tree


def test_words_of_the_command_line_change_add_and_take_away(main: Path) -> None:
    written = read_merged(
        main, ["algorithm.k=7", "+list=[1,two]", "~env.eval.kind", "deep={a: {b: 1}}"], {"deep": {"c": 2}}
    )
    assert written.value("algorithm.n") == 6
    assert written.value("list") == [1, "two"]
    assert written.value("env.eval.kind") is None
    assert written.value("deep") == {"a": {"b": 1}, "c": 2}
    assert {key for key, source in written.sources.items() if source == "command line"} >= {"algorithm.k", "deep.a.b"}
    assert "env.eval.kind" not in written.sources


def test_the_reference_lies_beneath_and_is_nobodys_word(main: Path) -> None:
    written = read_merged(main, [], {"algorithm": {"z": 1, "twice": "${multiply:${algorithm.k},2}"}})
    assert written.value("algorithm.twice") == 6
    assert written.value("algorithm.z") == 1
    assert "algorithm.z" not in set(written.leaves())


def test_the_resolvers_of_the_frameworks_are_there(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: ${int_div:7,2}\nb: ${not:true}\nc: ${torch.dtype:bfloat16}\n")
    written = read_merged(path)
    assert [written.value(key) for key in "abc"] == [3, False, "bfloat16"]


def test_an_interpolation_that_dangles_costs_only_who_reads_it(main: Path) -> None:
    written = read_merged(main)
    with pytest.raises(ConfigError, match=r"dangling .*main\.yaml:11.*nowhere"):
        written.value("dangling")


def test_what_isnt_there_or_isnt_text_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    for name in ("nothing.yaml", "latin.yaml", "."):
        with pytest.raises(MachineError):
            read_merged(tmp_path / name)
