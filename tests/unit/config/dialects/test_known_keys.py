"""If these fail, people are told that nobody knows a key of their framework, or that it is a slip."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import read_merged

from quintet.cli.configuration import inspect_config, load_config
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.dialect import known_names
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import documented_names
from quintet.config.dialects.unknown_keys import UnknownReason, unknown_keys
from quintet.errors import ConfigError

LEAST = {"verl": 900, "vagen": 900, "rlinf": 1200, "roll": 900, "ragen": 900}
"""Keys of each framework in all releases and runs; VAGEN and RAGEN know verl's, too."""

WELL_KNOWN = [
    ("verl", "actor_rollout_ref: {actor: {veomni: {fsdp_size: 2}}}", "actor_rollout_ref.actor.veomni.fsdp_size"),
    ("verl", "actor_rollout_ref: {checkpoint_engine: {enable: true}}", "actor_rollout_ref.checkpoint_engine.enable"),
    ("verl", "actor_rollout_ref: {}\nenv: {train: {num_envs: 16}}", "env.train.num_envs"),
    (
        "verl",
        "actor_rollout_ref: {model: {path: x}}\nray_kwargs: {ray_init: {address: auto}}",
        "ray_kwargs.ray_init.address",
    ),
    ("vagen", "rollout_manager: {max_workers: 4}", "rollout_manager.max_workers"),
    (
        "vagen",
        "rollout_manager: {}\nactor_rollout_ref: {ref: {torchtitan: {seed: 1}}}",
        "actor_rollout_ref.ref.torchtitan.seed",
    ),
    (
        "rlinf",
        "runner: {task_type: embodied}\nalgorithm: {replay_buffer: {cache_size: 9}}",
        "algorithm.replay_buffer.cache_size",
    ),
    ("roll", "sft_train: {}\nactor_infer: {data_args: {template: qwen2_5}}", "actor_infer.data_args.template"),
    ("ragen", "agent_proxy: {max_actions: 5}", "agent_proxy.max_actions"),
]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_key_of_any_release_is_not_called_a_typo(name: str) -> None:
    assert len(DIALECTS[name].known_keys() | documented_names(DIALECTS[name])) >= LEAST[name]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_key_is_listed_in_one_place_so_that_its_documentation_and_its_list_cannot_differ(name: str) -> None:
    dialect = DIALECTS[name]
    elsewhere = documented_names(dialect) | (dialect.base.known_keys() if dialect.base else set())
    assert sorted(known_names(name) & elsewhere) == []


def test_every_list_says_where_its_names_are_from() -> None:
    from quintet.config.dialects import dialect

    for path in (Path(dialect.__file__).parent / "known").glob("*.txt"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# ")
        assert lines[1:] == sorted(set(lines[1:])), path.name


@pytest.mark.parametrize(("name", "text", "key"), WELL_KNOWN, ids=[f"{one[0]}:{one[2]}" for one in WELL_KNOWN])
def test_a_key_of_another_release_or_run_is_said_to_be_the_frameworks(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config, dialect = compose_config(path, []), DIALECTS[name]
    values = ForeignValues(config.merge_onto({}), dialect.narrowed(config.plain()))
    unknown = {each.key: each for each in unknown_keys(values, dialect)}
    assert unknown[key].reason in (UnknownReason.UNDOCUMENTED, UnknownReason.OTHER_RUNS)
    assert unknown[key].suggestion is None


def test_a_key_of_another_run_is_not_said_to_be_undocumented(tmp_path: Path) -> None:
    """`data.n_samples` is read by `main_generation`, not by `main_ppo`."""
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {}\ndata: {n_samples: 4}\n")
    config, verl = compose_config(path, []), DIALECTS["verl"]
    values = ForeignValues(config.merge_onto({}), verl.narrowed(config.plain()))
    assert [str(each) for each in unknown_keys(values, verl)] == [
        f"data.n_samples ({path}:2) is not read by runs of this kind"
    ]


def test_a_slip_stays_a_slip(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor_train: {training_args: {learning_rat: 1}, infer_batchsize: 2}")
    roll = ForeignValues(read_merged(path), DIALECTS["roll"])
    found = unknown_keys(roll, roll.dialect)
    assert [(one.reason, one.suggestion) for one in found] == [
        (UnknownReason.TYPO, "actor_train.infer_batch_size"),
        (UnknownReason.TYPO, "actor_train.training_args.learning_rate"),
    ]


@pytest.mark.parametrize(("limit", "waits"), [(9, True), (5, False)])
def test_a_script_with_an_undocumented_key_of_the_framework_is_refused_by_plan(
    tmp_path: Path, limit: int, waits: bool
) -> None:
    """VAGEN's trainer file of 2025 has `limit_mm_per_prompt: 5`, and its page does not mention the key."""
    key = "actor_rollout_ref.rollout.limit_mm_per_prompt"
    path = tmp_path / "run.yaml"
    path.write_text(
        "env1: {env_name: sokoban}\nrollout_manager: {max_turns: 3}\n"
        f"actor_rollout_ref: {{model: {{path: models/small}}, rollout: {{limit_mm_per_prompt: {limit}}}}}\n"
    )
    told = [each.message for each in inspect_config(str(path), [], None, "refuse").unsupported if each.key == key]
    assert len(told) == waits
    assert all("waits: key of vagen that its reference does not document" in each for each in told)
    if waits:
        with pytest.raises(ConfigError, match=f"without it: ~{key}"):
            load_config(str(path), [], None, "refuse")
        assert key not in {each.key for each in inspect_config(str(path), [f"~{key}"], None, "refuse").unsupported}
