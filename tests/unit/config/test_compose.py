"""If these fail, a key is lost, misread, or its error doesn't say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config import dump_config, load_experiment, plan
from quintet.config.faults import legal_keys
from quintet.config.native import Experiment
from quintet.config.plan import PRESET_CONTEXTS
from quintet.errors import ConfigError, MachineError


def write(directory: Path, text: str) -> str:
    path = directory / "run.yaml"
    path.write_text(text)
    return str(path)


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ntraining:\n  steps: 7\n")
    composed = load_experiment(path, ["rollout.max_turns=3"])
    assert composed.experiment.training.steps == 7
    assert composed.provenance["training.steps"] == f"{path}:3"
    assert composed.provenance["rollout.max_turns"] == "command line"
    assert composed.provenance["seed"] == "default"


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("3E-5", 3e-5), ("0.5", 0.5), ("2e-3", 2e-3)])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    """YAML 1.1 reads 1e-4 as text; so does RAGEN's own command line."""
    key = "actor.optimizer.learning_rate"
    assert load_experiment(None, [f"{key}={text}"]).experiment.actor.optimizer.learning_rate == value
    path = write(tmp_path, f"actor: {{optimizer: {{learning_rate: {text}}}}}")
    assert load_experiment(path).experiment.actor.optimizer.learning_rate == value


def test_choices_switch_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "world: {name: frozenlake, size: 5}\n")
    world = load_experiment(path, ["world.name=sokoban", "world.boxes=2"]).experiment.world
    assert (world.name, world.boxes) == ("sokoban", 2)
    assert load_experiment(None, ["algorithm.advantage.name=bi_level_gae"]).experiment.needs_critic
    assert load_experiment(None, ["world.size=6"]).experiment.world.size == 6


def test_a_section_can_be_switched_off() -> None:
    assert load_experiment(None, ["warm_start=null"]).experiment.warm_start is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(1e-7, 1e-1),
    st.sampled_from(["grpo", "gae", "bi_level_gae"]),
    st.none() | st.integers(1, 9),
    st.text(alphabet="abc:#'\" |&", min_size=1, max_size=8).filter(lambda t: t.strip() == t and t),
)
def test_a_dumped_configuration_is_the_same_run(
    steps: int, rate: float, name: str, window: int | None, separator: str
) -> None:
    tree = {
        "training": {"steps": steps},
        "actor": {"optimizer": {"learning_rate": rate}},
        "algorithm": {"advantage": {"name": name}},
        "rollout": {"window_size": window, "action_separator": separator},
    }
    from quintet.config.compose import Composed

    experiment = Experiment.model_validate(tree)
    text = dump_config(Composed(experiment, {}))
    assert Experiment.model_validate(yaml.safe_load(text)) == experiment


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.stesp=3"], ["training.stesp", "command line", "training.steps"]),
        (["learning_rate=1"], ["learning_rate", "actor.optimizer.learning_rate"]),
        (["trainning.steps=3"], ["trainning", "training"]),
        (["world.name=sokobn"], ["world.name", "'sokobn'", "did you mean sokoban"]),
        (["world.sizes=3"], ["unknown key world.sizes", "world.size"]),
        (["world.size=99"], ["world.size", "99", "32"]),
        (["training.steps=many"], ["training.steps", "'many'", "integer"]),
        (["rollout.temperature=0"], ["rollout.temperature", "greater than 0"]),
        (["policy.path=x"], ["policy", "preset"]),
        (["training.mini_batches=5"], ["training.mini_batches", "32", "nearest", "mini_batches=4", "30 or 35"]),
        (["training.samples_per_group=1"], ["samples_per_group", "gae"]),
        (["rollout.max_prompt_tokens=4000"], ["rollout.max_prompt_tokens", "2048", "nearest"]),
        (["training"], ["'training'", "key=value"]),
        (["name=../x"], ["name", "'../x'"]),
        (["training.steps=[1"], ["training.steps"]),
    ],
)
def test_faults_name_key_value_and_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        load_experiment(None, overrides)
    for word in words:
        assert word in str(fault.value), str(fault.value)
    assert "tagged" not in str(fault.value)


def test_all_faults_come_in_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "sede: 3\ntraining:\n  steps: -1\n")
    with pytest.raises(ConfigError) as fault:
        load_experiment(path)
    assert f"{path}:1" in str(fault.value)
    assert f"{path}:3" in str(fault.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1,", [":1", "not YAML"]),
        ("- 1\n- 2\n", ["holds no keys"]),
        ("seed: 1\nseed: 2\n", ["seed is given twice", ":1", ":2"]),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        load_experiment(write(tmp_path, text))
    for word in words:
        assert word in str(fault.value)


def test_files_that_cant_be_read(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1")
    with pytest.raises(MachineError, match=r"did you mean .*run\.yaml"):
        load_experiment(str(tmp_path / "runn.yaml"))
    with pytest.raises(MachineError, match="is a directory"):
        load_experiment(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(MachineError, match="UTF-8"):
        load_experiment(str(tmp_path / "latin.yaml"))
    assert load_experiment(write(tmp_path, "")).experiment == Experiment()


def test_the_plan_by_hand() -> None:
    numbers = plan(load_experiment(None, ["training.steps=10", "validation.every_steps=4", "checkpoint.every_steps=5"]))
    assert numbers.games_per_step == 256
    assert numbers.games_per_mini_batch == 32
    assert numbers.optimizer_steps == 80
    assert numbers.validations == 4  # before, 4, 8, after
    assert numbers.checkpoints == 3


def test_every_key_is_documented() -> None:
    bare = [key for key, info in legal_keys(Experiment) if not info.description and not key.endswith("name")]
    assert bare == []


def test_preset_contexts_are_the_presets_own() -> None:
    from quintet.policies.tiny import PRESETS

    assert {name: shape.context for name, shape in PRESETS.items()} == PRESET_CONTEXTS


def test_configuration_loads_nothing_heavy() -> None:
    code = "import sys, quintet.config; print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
