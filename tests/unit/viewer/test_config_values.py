"""If these fail, the viewer shows wrong settings, or hides a difference between runs."""

from __future__ import annotations

from pathlib import Path

from quintet.config.compose import load_experiment
from quintet.config.yaml_writer import dump_config
from quintet.viewer.run_catalog import ConfigValue, differences, read_config_values

TEXT = """\
# Resolved configuration
name: lake  # command line
training:
  steps: 3  # lake.yaml:4
  note: "a  # b"  # default
lists: [1, 2]  # default
nothing: null  # default
"""


def test_values_have_the_source_that_the_file_states(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TEXT)
    assert read_config_values(tmp_path / "config.yaml") == {
        "name": ConfigValue("lake", "command line"),
        "training.steps": ConfigValue("3", "lake.yaml:4"),
        "training.note": ConfigValue("a  # b", "default"),
        "lists": ConfigValue("[1, 2]", "default"),
        "nothing": ConfigValue("null", "default"),
    }
    assert read_config_values(tmp_path / "missing.yaml") == {}


def test_every_setting_of_a_run_is_shown(tmp_path: Path) -> None:
    composed = load_experiment(None, ["name=x", "seed=3"])
    (tmp_path / "config.yaml").write_text(dump_config(composed))
    values = read_config_values(tmp_path / "config.yaml")
    assert values["seed"] == ConfigValue("3", "command line")
    assert values["training.steps"].text == str(composed.experiment.training.steps)
    assert {value.source for value in values.values()} == {"command line", "default"}


def test_only_keys_with_different_values_are_differences() -> None:
    first = {"seed": ConfigValue("0", "default"), "name": ConfigValue("a", ""), "lr": ConfigValue("1e-4", "")}
    second = {"seed": ConfigValue("0", "command line"), "name": ConfigValue("b", "")}
    assert differences([first, second]) == {"name": ["a", "b"], "lr": ["1e-4", "–"]}
    assert differences([first]) == {}
