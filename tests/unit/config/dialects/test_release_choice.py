"""The release that a configuration is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_choice import choose_release
from quintet.config.dialects.release_tables import (
    ChosenRelease,
    ReleaseEvidence,
    TableNames,
    load_release_tables,
)
from quintet.config.dotted import unflatten
from quintet.errors import ConfigError

MODEL = {"actor_rollout_ref.model.path": "model"}


def chosen(keys: Mapping[str, Any], framework: str = "verl", **evidence: Any) -> ChosenRelease:
    """The release of a file with these keys."""
    release = choose_release(DIALECTS[framework], unflatten(keys), sorted(keys), ReleaseEvidence(**evidence))
    assert release is not None
    return release


@pytest.mark.parametrize(
    ("keys", "release"),
    [
        (MODEL, "0.9.0"),
        (MODEL | {"actor_rollout_ref.rollout.name": "vllm"}, "0.9.0"),  # `???` in verl's file, since 0.6
        (MODEL | {"actor_rollout_ref.actor.fsdp_config.grad_offload": False}, "0.2"),
        (MODEL | {"trainer.val_generations_to_log_to_wandb": 1}, "0.3.0"),
        (
            MODEL
            | {"actor_rollout_ref.actor.optim.warmup_style": "cosine", "reward_model.launch_reward_fn_async": True},
            "0.7.0",
        ),
        ({"model.partial_pretrain": "model"}, "0.7.0"),
        ({"model.path": "model"}, "0.9.0"),
        ({"data.output_path": "out", "rollout.n": 1}, "0.7.0"),
    ],
)
def test_a_file_is_read_as_one_of_a_release_without_its_keys(keys: dict[str, Any], release: str) -> None:
    assert (chosen(keys).name, chosen(keys).reason.partition(";")[0]) == (
        release,
        "the newest release that has all keys of the file",
    )


def test_a_key_that_a_script_adds_with_plus_exists_in_its_release() -> None:
    """Hydra refuses `+key` for a key that exists: `use_dynamic_bsz` of log-probs exists since 0.2."""
    key = "actor_rollout_ref.rollout.disable_log_stats"
    tables = load_release_tables("verl")
    assert tables is not None
    with_key = [name for name in tables.releases() if key in tables.table("ppo_trainer", name)]
    assert chosen({**MODEL, key: True}, added=frozenset({key})).name not in with_key


def test_a_script_is_read_as_one_of_a_release_without_its_trainer() -> None:
    keys = {"data.train_files": "a", "model.path": "model"}
    assert chosen(keys, module="verl.trainer.sft_trainer").name == "0.9.0"
    assert chosen(keys, module="verl.trainer.fsdp_sft_trainer").name == "0.7.0"


def test_unknown_keys_keep_a_file_from_the_release_with_its_other_keys() -> None:
    keys = MODEL | {
        "actor_rollout_ref.actor.fsdp_config.grad_offload": False,
        "data.of_a_fork": 1,
        "trainer.use_v1": True,
    }
    release = chosen(keys)
    assert release.reason.startswith("the newest release that has 2 of the 3 keys of the file")


def test_a_copy_of_a_releases_file_is_read_as_one_of_a_newer_release() -> None:
    """All keys of 0.1's file exist in 0.2 and 0.3, too, which have further ones."""
    tables = load_release_tables("verl")
    assert tables is not None
    for release in ("0.1", "0.2", "0.5.0", "0.8.0"):
        copy = dict(tables.table("ppo_trainer", release)) | {"trainer.total_epochs": 7}
        found = chosen(copy)
        assert (found.name, found.reason.partition(",")[0]) == (release, "the file is a copy of its own")


def test_release_option_does_not_name_the_release() -> None:
    assert chosen(MODEL, named="0.4").name == "0.4.1"
    assert chosen(MODEL, named="v0.4.0").reason == "named by --release"


def test_unknown_release_is_taken_for_another() -> None:
    with pytest.raises(ConfigError, match="no such release of this kind of run") as error:
        chosen(MODEL, named="0.44")
    assert "0.4.1" in str(error.value.hint)


def test_keys_in_sections_are_not_found_in_a_table() -> None:
    names = TableNames({"a.b": 1, "c.options": {}, "rewards.*.path": None})
    assert [names.has(key) for key in ("a.b", "a", "c.options.x", "rewards.math.path")] == [True] * 4
    assert not any(names.has(key) for key in ("a.c", "c.x", "rewards.math.other"))


@pytest.mark.parametrize("framework", ["verl"])
def test_recorded_tables_lack_a_release_or_refer_to_a_missing_one(framework: str) -> None:
    tables = load_release_tables(framework)
    assert tables is not None
    for configuration, releases in tables.recorded.items():
        order = [name for name in tables.releases() if name in releases]
        assert list(releases) == order
        assert all(tables.table(configuration, release) for release in releases)
    names = {name for entry in DIALECTS[framework].configurations for name in entry[0]}
    assert names <= tables.recorded.keys()
