"""If these fail, a key is lost or misread, or a run can't be repeated from the configuration it left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig, errors_with_sources
from quintet.config.native.experiment import Experiment
from quintet.config.yaml_reader import read_file
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError, MachineError


def write(directory: Path, text: str) -> str:
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ntraining:\n  steps: 7\nactor:\n  optimizer: {betas: [0.8,\n    0.9]}\n")
    composed = load_experiment(path, ["rollout.max_turns=3"])
    assert composed.experiment.training.steps == 7
    assert composed.provenance["training.steps"] == f"{path}:3"
    assert composed.provenance["actor.optimizer.betas"] == f"{path}:5"
    assert composed.provenance["rollout.max_turns"] == "command line"
    assert composed.provenance["seed"] == "default"
    assert load_experiment(path, ["name=b"]).provenance["name"] == "command line"


def test_a_default_is_shown_as_a_default_in_a_section_of_the_users_file(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nrollout:\n  max_turns: 3\npolicy:\n  lora: {rank: 4}\nwarm_start: null\n")
    composed = load_experiment(path)
    assert composed.describe("rollout.max_concurrent") == "rollout.max_concurrent = 256 (default)"
    assert (composed.source("policy.lora.rank"), composed.source("policy.lora.alpha")) == (f"{path}:5", "default")
    assert composed.source("warm_start") == f"{path}:6"
    assert composed.source("rollout").startswith(path), "an error about a section names the line of its keys"
    assert "max_concurrent: 256  # default" in dump_config(composed)


@pytest.mark.parametrize("word", ["no", "off", "007", "1e5", "true"])
def test_a_text_key_takes_a_word_of_the_command_line_as_it_stands(word: str) -> None:
    assert load_experiment(None, [f"name={word}"]).experiment.name == word


def test_a_text_key_of_the_command_line_can_still_be_null_and_a_switch_is_no_text() -> None:
    config = load_experiment(None, ["policy.tokenizer=null", "actor.gradient_checkpointing=yes"]).experiment
    assert (config.policy.tokenizer, config.actor.gradient_checkpointing) == (None, True)


def test_an_error_of_a_running_program_says_where_the_value_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout:\n  max_turns: 3\n")
    composed = load_experiment(path)
    error = ConfigError("rollout.max_turns = 3, but 2 fit", key="rollout.max_turns", hint="set rollout.max_turns=2")
    shown = f"rollout.max_turns = 3, but 2 fit ({path}:2)\n  set rollout.max_turns=2"
    with pytest.raises(ConfigError) as raised, errors_with_sources(composed):
        raise error
    assert (str(raised.value), raised.value.source) == (shown, f"{path}:2")
    unnamed = composed.with_source(ConfigError("they do not fit", key="rollout.max_turns"))
    assert str(unnamed) == f"rollout.max_turns = 3 ({path}:2): they do not fit"
    for other in (ConfigError("in use", key="--port"), raised.value, ConfigError("no key")):
        assert composed.with_source(other) is other


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("3E-5", 3e-5), ("0.5", 0.5), ("2e-3", 2e-3), (".5e-1", 0.05), ("1.e-2", 0.01)]
)
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    """YAML 1.1 reads 1e-4 as text; so does RAGEN's own command line."""
    key = "actor.optimizer.learning_rate"
    assert load_experiment(None, [f"{key}={text}"]).experiment.actor.optimizer.learning_rate == value
    path = write(tmp_path, f"actor: {{optimizer: {{learning_rate: {text}}}}}")
    assert load_experiment(path).experiment.actor.optimizer.learning_rate == value


def test_choices_switch_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "env: {name: frozenlake, size: 5}\n")
    env = load_experiment(path, ["env.name=sokoban", "env.boxes=2"]).experiment.env
    assert (env.name, env.boxes) == ("sokoban", 2)
    assert load_experiment(None, ["algorithm.advantage.name=bi_level_gae"]).experiment.needs_critic
    assert load_experiment(None, ["env.size=6"]).experiment.env.size == 6


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("env: {size: 5}", 6),
        ("env: {name: frozenlake, size: 5}", 6),
        ("env: {name: sokoban, width: 8}", 8),
        ("env: null", 6),
    ],
)
def test_a_choice_drops_the_options_of_another_choice_and_only_those(tmp_path: Path, text: str, width: int) -> None:
    """Whether the file names the env or not, and in whatever order the words come."""
    composed = load_experiment(write(tmp_path, text), ["env.boxes=2", "env.name=sokoban"])
    assert (composed.experiment.env.boxes, composed.experiment.env.width) == (2, width)
    assert composed.provenance["env.name"] == "command line"


def test_a_whole_section_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "env:\n  size: 5\n")
    composed = load_experiment(path, ["env={name: frozenlake, floor_density: 0.7}"])
    assert (composed.experiment.env.size, composed.experiment.env.floor_density) == (4, 0.7)
    assert composed.provenance["env.size"] == "default"


def test_one_key_of_a_section_leaves_the_others_as_they_are_in_that_place() -> None:
    """`actor.optimizer.schedule=constant` must not change the actor's learning rate."""
    words = ["actor.optimizer.schedule=constant", "warm_start.optimizer.weight_decay=0.1"]
    before, after = Experiment(), load_experiment(None, words).experiment
    assert after.actor.optimizer == before.actor.optimizer.model_copy(update={"schedule": "constant"})
    assert before.warm_start is not None
    assert after.warm_start is not None
    assert after.warm_start.optimizer.learning_rate == before.warm_start.optimizer.learning_rate
    assert before.warm_start.optimizer.learning_rate != before.actor.optimizer.learning_rate


def test_a_section_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    assert load_experiment(None, ["warm_start=null"]).experiment.warm_start is None
    again = load_experiment(write(tmp_path, "warm_start: null"), ["warm_start.updates=5"]).experiment.warm_start
    assert again is not None
    assert again.updates == 5


def test_a_section_without_keys_is_a_section_of_defaults(tmp_path: Path) -> None:
    """Its keys may all be commented out; only a written null switches the warm start off."""
    assert load_experiment(write(tmp_path, "training:\n  # steps: 3\nwarm_start:\n")).experiment == Experiment()
    assert load_experiment(write(tmp_path, "")).experiment == Experiment()
    assert load_experiment(write(tmp_path, "warm_start: null")).experiment.warm_start is None


@pytest.mark.parametrize("text", ["||", "|", "#", "&", "*x", "a: b: c", "[", "%", "'3'x"])
def test_text_that_yaml_cant_read_is_taken_as_it_stands(text: str) -> None:
    rollout = load_experiment(None, [f"rollout.action_separator={text}"]).experiment.rollout
    assert rollout.action_separator == text


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ["1e-4", "no", "null", "3", "a: b", "# x", "a\n b", " x", "||", "2026-01-01", "~", "\ufeffx", "\x85", "\U0001f9ca"]
)
"""Text that a careless writer of YAML spoils, among any other that UTF-8 can hold."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numbers=st.tuples(st.integers(0, 10**18), st.floats(1e-12, 1e6)),
    names=st.tuples(st.sampled_from(["grpo", "gae", "bi_level_gae"]), st.sampled_from(["frozenlake", "sokoban"])),
    window=st.none() | st.integers(1, 9),
    text=TEXT,
    loggers=st.lists(TEXT, max_size=3),
    warm_start=st.none() | st.just({"updates": 3}),
)
def test_a_dumped_configuration_is_the_same_run(
    tmp_path: Path,
    numbers: tuple[int, float],
    names: tuple[str, str],
    window: int | None,
    text: str,
    loggers: list[str],
    warm_start: dict[str, int] | None,
) -> None:
    """`quintet train runs/x/config.yaml` repeats the run x, and another program reads the same values."""
    tree = {
        "output_dir": text,
        "training": {"steps": numbers[0]},
        "actor": {"optimizer": {"learning_rate": numbers[1]}},
        "algorithm": {"advantage": {"name": names[0]}},
        "env": {"name": names[1]},
        "rollout": {"window_size": window, "action_separator": text},
        "tracking": {"loggers": loggers},
        "warm_start": warm_start,
    }
    experiment = Experiment.model_validate(tree)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(ComposedConfig(experiment, {"seed": "run.yaml:3"})), encoding="utf-8")
    dumped = path.read_text(encoding="utf-8")
    assert load_experiment(str(path)).experiment == experiment
    assert Experiment.model_validate(yaml.safe_load(dumped)) == experiment
    assert "seed: 0  # run.yaml:3\n" in dumped


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1,", [":1", "not YAML"]),
        ("name: x\nseed: [1,\nsteps: }\n", [":3", "not YAML"]),
        ("- 1\n- 2\n", ["has no keys"]),
        ("just words", ["has no keys"]),
        ("seed: 1\nseed: 2\n", ["seed is set twice", ":1", ":2"]),
        ("training:\n  steps: 1\n  steps: 2\n", ["training.steps is set twice", ":2", ":3"]),
        ("env: {size: 4, size: 5}", ["env.size is set twice"]),
        ("seed: 1\ntraining: &a {steps: *a}\n", [":2", "*a", "refers to itself"]),
        (
            "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}' if n else '1'] * 9)}]\n" for n in range(9)),
            ["10,000 values"],
        ),
        ("".join(f"k{n}: &k{n} [[[[[*k{n - 1}]]]]]\n" if n else "k0: &k0 [1]\n" for n in range(9)), ["too deeply"]),
        ("seed: *b\n", [":1", "undefined alias"]),
        ("training:\n  <<: 5\n", [":2", "<<"]),
        ("seed: !!python/name:os.system x\n", [":1", "tag"]),
        ("seed: !!int x\n", [":1", "'x'"]),
        ("? [a, b]\n: 1\n", [":1", "key"]),
        ("name: x\nseed: \x07\n", [":2", "U+0007"]),
        ("seed: " + "[" * 3000, ["nested too deeply"]),
        (f"rollout: {{stop: [{'a,' * 100_000}]}}", ["run.yaml has more than 10,000 values", "shorten its lists"]),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        load_experiment(write(tmp_path, text))
    for word in words:
        assert word in str(fault.value), str(fault.value)


def test_a_list_of_100_000_entries_is_refused_within_seconds_and_one_of_9_000_is_read(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"rollout\.stop \(command line\) has more than 10,000 values"):
        load_experiment(None, [f"rollout.stop=[{'a,' * 100_000}]"])
    assert time.monotonic() - begun < 5
    composed = load_experiment(write(tmp_path, f"rollout: {{stop: [{'a,' * 9_000}]}}"))
    assert len(composed.experiment.rollout.stop) == 9_000


@pytest.mark.parametrize("words", [["policy.lora={rank:", "16}"], ["rollout.stop=[a,", "b]"]])
def test_a_value_that_the_shell_split_is_to_be_quoted(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"quote a value with spaces: 'key=\{a: 1, b: 2\}'"):
        load_experiment(None, words)


def test_files_that_cant_be_read(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1")
    with pytest.raises(MachineError, match=r"did you mean .*run\.yaml"):
        load_experiment(str(tmp_path / "runn.yaml"))
    with pytest.raises(MachineError, match="check the path"):
        load_experiment(str(tmp_path / "nowhere" / "run.yaml"))
    with pytest.raises(MachineError, match=r"the current directory is "):
        load_experiment("nowhere/run.yaml")
    (tmp_path / "runs").mkdir()
    with pytest.raises(MachineError, match=r"did you mean .*/runs\?"):
        load_experiment(str(tmp_path / "rnus"))
    with pytest.raises(MachineError, match=r"write training\.steps=VALUE"):
        load_experiment("training.steps")
    with pytest.raises(MachineError, match=r"is a directory\n  name a file in it: run\.yaml"):
        load_experiment(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\nname: \xff\xfe")
    with pytest.raises(MachineError, match=r"latin\.yaml:2 is not UTF-8"):
        load_experiment(str(tmp_path / "latin.yaml"))


def test_a_path_replaces_a_preset_that_nobody_set(tmp_path: Path) -> None:
    composed = load_experiment(None, ["policy.path=x"])
    assert (composed.experiment.policy.path, composed.experiment.policy.preset) == ("x", None)
    assert composed.provenance["policy.preset"] == "command line"
    with pytest.raises(ConfigError, match=r"exclude each other\n  policy\.preset=null, or"):
        load_experiment(write(tmp_path, "policy: {preset: grid-3m}"), ["policy.path=x"])


def test_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys; from quintet.config.compose import load_experiment; load_experiment(None);"
        "print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_anchors_and_merged_sections_are_expanded(tmp_path: Path) -> None:
    """As PyYAML and Hydra do: own keys replace merged ones, and of several sections the first counts."""
    text = """
steps: &steps 7
first: &first {a: 1, b: *steps}
second: &second {b: 2, c: [*steps, *first]}
merged: {<<: [*first, *second], a: 3}
"""
    path = tmp_path / "x.yaml"
    path.write_text(text)
    sources: dict[str, str] = {}
    tree = read_file(path, sources)
    assert tree == yaml.safe_load(text)
    assert tree["merged"] == {"b": 7, "c": [7, {"a": 1, "b": 7}], "a": 3}
    assert sources["merged.b"] == f"{path}:3"
