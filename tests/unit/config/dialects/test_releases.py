"""If these fail, users read of releases in which a key does not exist, or do not find a key of their release."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from quintet.config.dialects import releases
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import KeyRange, Release, Releases, all_keys, load_releases

FRAMEWORKS = Path(releases.__file__).parent


@pytest.mark.parametrize("framework", DIALECTS)
def test_every_key_file_is_listed_with_the_releases_it_is_of(framework: str) -> None:
    names = {path.stem for path in (FRAMEWORKS / framework / "keys").glob("*.yaml")}
    assert {*load_releases(framework).files} == names


@pytest.mark.parametrize("framework", DIALECTS)
def test_releases_are_recorded_for_keys_that_exist_and_for_nearly_all_of_them(framework: str) -> None:
    recorded = {key for each in load_releases(framework).ranges for key in each.keys}
    keys = {spec.key for _, spec in all_keys(DIALECTS[framework])}
    assert recorded <= keys
    assert len(recorded) >= 0.8 * len(keys)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.train_batch_size", "all"),
        ("trainer.balance_batch", "since 0.3.0"),
        ("critic.kl_ctrl.kl_coef", "until 0.4.1"),
        ("reward_model.use_reward_loop", "0.7.0"),
        ("no.key", ""),
    ],
)
def test_the_releases_of_a_key_are_those_of_verls_own_files(key: str, text: str) -> None:
    assert load_releases("verl").of(key) == text


def test_a_key_of_several_files_is_listed_once_and_the_reference_documents_come_first() -> None:
    listed = list(all_keys(DIALECTS["roll"]))
    assert len({spec.key for _, spec in listed}) == len(listed)
    assert listed[0][0] == "roll"
    assert next(file for file, spec in listed if spec.key == "pretrain") == "roll_run"


def test_only_files_that_mention_a_key_are_read_for_it() -> None:
    files = {file for file, _ in all_keys(DIALECTS["verl"], ("trainer.balance_batch",))}
    assert "verl_run" in files
    assert "verl_megatron" not in files


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([KeyRange(since="0.3", keys=("a",))], "unknown releases: 0.3"),
        ([KeyRange(keys=("a",)), KeyRange(since="0.2", keys=("a",))], "a key is in two ranges"),
    ],
)
def test_wrong_records_are_refused(ranges: list[KeyRange], message: str) -> None:
    release = Release.model_validate({"name": "0.2", "commit": "v0.2", "day": "2025-02-15"})
    with pytest.raises(ValidationError, match=message):
        Releases(repository="verl-project/verl", releases=(release,), files={}, ranges=tuple(ranges))
