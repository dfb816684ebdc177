"""If these fail, people are told that nobody knows a key of their framework, or that it is a slip."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import read_merged

from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.dialect import known_names
from quintet.config.dialects.key_checks import UnknownReason, unknown_keys
from quintet.config.dialects.registry import DIALECTS

LEAST = {"verl": 400, "vagen": 400, "rlinf": 700, "roll": 700, "ragen": 100}
"""Keys of each list; VAGEN knows verl's, too."""

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
def test_a_list_holds_the_frameworks_keys_and_none_that_is_documented_here(name: str) -> None:
    listed = DIALECTS[name].known_keys()
    assert len(listed) >= LEAST[name]
    rows = DIALECTS[name].specs()
    ours = {*rows, *(alias for row in rows.values() for alias in row.aliases)}
    assert listed & ours == set()
    assert [key for key in listed if any(row.startswith(f"{key}.") for row in rows)] == []


@pytest.mark.parametrize("name", DIALECTS)
def test_a_list_names_no_key_that_is_known_without_it(name: str) -> None:
    dialect = DIALECTS[name]
    elsewhere = dialect.specs().keys() | (dialect.base.known_keys() if dialect.base else set())
    assert sorted(known_names(name) & elsewhere) == []


def test_every_list_says_where_its_names_are_from() -> None:
    from quintet.config.dialects import dialect

    for path in (Path(dialect.__file__).parent / "known").glob("*.txt"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# ")
        assert lines[1:] == sorted(set(lines[1:])), path.name


@pytest.mark.parametrize(("name", "text", "key"), WELL_KNOWN, ids=[f"{one[0]}:{one[2]}" for one in WELL_KNOWN])
def test_a_well_known_key_is_told_as_the_frameworks_own(tmp_path: Path, name: str, text: str, key: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config, dialect = compose_config(path, []), DIALECTS[name]
    values = ForeignValues(config.merge_onto({}), dialect.narrowed(config.plain()))
    found = {one.key: one for one in unknown_keys(values, dialect.known_keys())}
    assert found[key].reason is UnknownReason.UNDOCUMENTED
    assert found[key].suggestion is None
    assert str(found[key]).endswith(f"exists in {name} but is not documented in its reference")


def test_a_slip_stays_a_slip(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor_train: {training_args: {learning_rat: 1}, infer_batchsize: 2}")
    roll = ForeignValues(read_merged(path), DIALECTS["roll"])
    found = unknown_keys(roll, roll.dialect.known_keys())
    assert [(one.reason, one.suggestion) for one in found] == [
        (UnknownReason.TYPO, "actor_train.infer_batch_size"),
        (UnknownReason.TYPO, "actor_train.training_args.learning_rate"),
    ]
