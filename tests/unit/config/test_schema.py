"""If these fail, the reference page and `quintet explain` say what isn't so."""

from __future__ import annotations

import pytest

from quintet.config.dialects.synonyms import keys_by_synonym
from quintet.config.dotted import flatten
from quintet.config.native.experiment import Experiment
from quintet.config.schema import NAMED_SECTIONS, is_key, key_names, keys, keys_in, keys_named, valid_keys
from quintet.config.validation import suggest_keys


def test_every_key_says_what_it_means() -> None:
    assert [key.name for key in keys() if not key.description and not key.is_section] == []


def test_keys_of_one_section_and_names_alone_are_those_of_the_whole_schema() -> None:
    """`explain` and the completion of keys do not read the whole schema, which takes longer."""
    assert [key for section in Experiment.model_fields for key in keys_in(section)] == [*keys()]
    assert key_names() == [*dict.fromkeys(key.name for key in keys())]
    sizes = [key for key in keys() if key.name == "envs.*.env.size"]
    assert keys_named("envs.lake.env.size") == sizes
    assert len(sizes) > 1
    assert keys_named("seeds") == keys_named("model.path") == []


def test_defaults_are_those_of_their_place() -> None:
    """The optimizers share a class, not their learning rates."""
    told = {key.name: key.default for key in valid_keys({}) if not key.is_section}
    has = flatten(Experiment().model_dump(mode="json"))
    assert {name: told[name] for name in has if name in told} == {name: has[name] for name in has if name in told}
    without = {name for name in has if name not in told}
    null = {key.name for key in keys() if key.is_section and key.default is None}
    assert without <= null, "a section that is null has keys of its own"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("training.steps", "an integer ≥ 0"),
        ("env.width", "an integer ≥ 4 and ≤ 16"),
        ("seed", "an integer ≥ 0 and < 4294967296"),
        ("critic.value_clip", "a number > 0 or null"),
        ("policy.dtype", "one of float32, bfloat16, float16, auto"),
        ("env.slippery", "true or false"),
        ("tracking.loggers", "a list, each text"),
        ("warm_start", "a section or null"),
    ],
)
def test_ranges_are_told_in_words(name: str, takes: str) -> None:
    assert [key.value_type for key in keys() if key.name == name] == [takes]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("training.stesp", ["training.steps"]),
        ("window_size", ["rollout.window_size"]),
        ("windowsize", ["rollout.window_size"]),
        ("validation.rows", ["data.validation_rows"]),
        (
            "training.temperature",
            ["rollout.temperature", "reward.judge.temperature", "sft.distillation.temperature"],
        ),
        ("qqqqqq", []),
    ],
)
def test_the_nearest_key_is_a_sibling_then_the_same_word_elsewhere(name: str, meant: list[str]) -> None:
    assert suggest_keys(name, valid_keys({}), keys_by_synonym) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("actor.optimizer.lr", ["actor.optimizer.learning_rate"]),
        ("actor.optimizer.lr_warmup_steps_ratio", ["actor.optimizer.warmup_ratio"]),
        ("actor.strategy", ["actor.backend"]),
        ("actor.sharding.fsdp_size", ["actor.sharding.group_size"]),
        ("actor.sharding.param_offload", ["actor.memory.offload_parameters"]),
        ("actor.parallel.tensor_model_parallel_size", ["actor.parallel.tensor"]),
        ("rollout.n", ["training.samples_per_group", "validation.sampling.samples"]),
    ],
)
def test_another_frameworks_word_finds_the_key_that_it_means(name: str, meant: list[str]) -> None:
    """Who comes from verl writes `lr` and not `learning_rate`; spelling alone would lead to `lora`."""
    assert suggest_keys(name, valid_keys({}), keys_by_synonym) == meant


def test_the_sections_with_names_of_the_user_are_those_of_the_schema() -> None:
    sections = {key.name.partition(".*")[0] for key in keys() if ".*" in key.name}
    assert sections - {"rollout.tool_calls.tools", "rollout.interactions.users"} == {*NAMED_SECTIONS}


def test_a_key_is_recognised_without_the_documentation_of_all_keys() -> None:
    written = (".tools.*", ".users.*")  # names of tools and users stay as they are written
    names = {key.name for key in keys() if not any(section in key.name for section in written)}
    sections = {name.rpartition(".")[0] for name in names} - {*NAMED_SECTIONS}
    moved = {f"{section}.{name.rpartition('.')[2]}".strip(".") for section in sections for name in names}
    recognised = {name for name in names | moved if is_key(name)}
    assert names <= recognised
    assert {name for name in recognised - names if "*" not in name} == set()
