"""If these fail, a run that can't be placed starts, one that can is refused, or people look for it on other devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_models import on

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import check_placement, format_ranges, place_components, placement_problems
from quintet.config.problems import raise_problems
from quintet.errors import ConfigError

MEGATRON = ("actor.backend=megatron",)
SPLIT = (*MEGATRON, "actor.parallel.tensor=2", "actor.parallel.pipeline=2")


def refusal(composed: ComposedConfig) -> str:
    config = composed.experiment
    with pytest.raises(ConfigError) as error:
        raise_problems(placement_problems(composed, place_components(config), find_models(config)))
    return str(error.value)


def accepted(composed: ComposedConfig) -> None:
    config = composed.experiment
    raise_problems(placement_problems(composed, place_components(config), find_models(config)))


def test_two_nodes_of_eight_with_two_by_two(tmp_path: Path) -> None:
    """Four copies of the policy, two engines of eight, everything on all sixteen devices."""
    words = (*SPLIT, "algorithm.kl.coefficient=0.1", "rollout.engine_options.tensor_parallel=4")
    composed = on(tmp_path, "Qwen2.5-7B", 2, 8, *words, "rollout.engine_options.pipeline_parallel=2")
    accepted(composed)
    placement = place_components(composed.experiment)
    assert [one.name for one in placement.components] == ["actor", "rollout", "reference"]
    actor, engines, reference = placement.components
    assert (actor.copies, engines.copies, reference.copies) == (4, 2, 16)
    assert placement.by_node(actor) == {0: tuple(range(8)), 1: tuple(range(8, 16))}
    assert format_ranges(placement.by_node(actor)[1]) == "8-15"
    assert placement.idle == ()


def test_split_components_and_idle_devices(tmp_path: Path) -> None:
    words = ["placement.actor.devices=[0,1,2,3]", "placement.rollout.devices=[4,5,9]", "placement.colocated=false"]
    composed = on(tmp_path, "Qwen2.5-7B", 2, 8, *words)
    accepted(composed)
    placement = place_components(composed.experiment)
    assert placement.groups() == {("actor",): (0, 1, 2, 3), ("rollout",): (4, 5, 9)}
    assert format_ranges(placement.idle) == "6-8,10-15"


def test_what_shares_a_device_is_one_group_with_it(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 4, "placement.rollout.devices=[2,3]")
    assert place_components(composed.experiment).groups() == {("actor",): (0, 1), ("actor", "rollout"): (2, 3)}


def test_the_processes_of_one_device_count_once(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 4, "placement.actor.devices=[0,0,1,1]")
    actor = place_components(composed.experiment).of("actor")
    assert actor is not None
    assert (actor.devices, actor.copies) == ((0, 1), 2)


def test_the_cpu_has_no_device(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 1, "placement.rollout.devices=[]")
    accepted(composed)
    assert place_components(composed.experiment).groups() == {("actor",): (0,)}


@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        (
            "Qwen2.5-7B",
            ["placement.actor.devices=[14,15,16]"],
            ["placement.actor.devices = [14, 15, 16] (command line)", "16 devices (2 × 8)", "placement.nodes=3"],
        ),
        (
            "Qwen2.5-7B",
            ["placement.visible_devices=[0,1,2]"],
            [
                "placement.devices_per_node = 8",
                "visible_devices = [0, 1, 2]",
                "nearest valid value: placement.devices_per_node=3",
            ],
        ),
        (
            "Qwen2.5-7B",
            ["placement.rollout.devices_per_worker=3"],
            [
                "placement.rollout.devices_per_worker = 3",
                "the 16 devices",
                "nearest valid value: placement.rollout.devices_per_worker=2",
            ],
        ),
        (
            "Llama-3-8B",
            [*MEGATRON, "actor.parallel.tensor=3"],
            [
                "actor.parallel.tensor = 3 (command line)",
                "the 16 devices",
                "nearest valid value: actor.parallel.tensor=2",
            ],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.tensor=8"],
            ["actor.parallel.tensor = 8", "the 28 attention heads", "nearest valid value: actor.parallel.tensor=4"],
        ),
        (
            "Llama-3-8B",
            [*MEGATRON, "actor.parallel.tensor=16"],
            ["actor.parallel.tensor = 16", "the 8 key-value heads", "nearest valid value: actor.parallel.tensor=8"],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.pipeline=8"],
            ["actor.parallel.pipeline = 8", "the 28 layers", "nearest valid value: actor.parallel.pipeline=4"],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.pipeline=4", "actor.parallel.virtual_pipeline=2"],
            [
                "actor.parallel.virtual_pipeline = 2",
                "8 parts of stages",
                "nearest valid value: actor.parallel.virtual_pipeline=1",
            ],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.virtual_pipeline=2"],
            [
                "actor.parallel.virtual_pipeline = 2",
                "without a pipeline",
                "nearest valid value: actor.parallel.virtual_pipeline=1",
            ],
        ),
        (
            "Qwen2.5-7B",
            ["actor.parallel.ulysses=8"],
            ["actor.parallel.ulysses = 8", "the 28 attention heads", "nearest valid value: actor.parallel.ulysses=4"],
        ),
        (
            "Qwen2.5-7B",
            ["actor.sharding.group_size=3"],
            ["actor.sharding.group_size = 3", "16 devices", "nearest valid value: actor.sharding.group_size=2"],
        ),
        (
            "Qwen2.5-7B",
            ["actor.backend=fsdp", "actor.parallel.pipeline=2"],
            [
                "actor.parallel.pipeline = 2",
                "only fsdp2 and megatron can split a model so",
                "the backend is fsdp",
                "nearest valid value: actor.parallel.pipeline=1",
            ],
        ),
        (
            "Qwen2.5-7B",
            ["actor.parallel.pipeline=8", "actor.parallel.virtual_pipeline=4"],
            [
                "virtual_pipeline = 4",
                "32 parts are more than the 28 layers",
                "nearest valid value: actor.parallel.virtual_pipeline=2",
            ],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.ulysses=2"],
            ["actor.parallel.ulysses = 2", "only fsdp and fsdp2", "nearest valid value: actor.parallel.ulysses=1"],
        ),
        (
            "Qwen2.5-7B",
            ["actor.backend=fsdp", "actor.parallel.tensor=2"],
            ["actor.parallel.tensor = 2", "only fsdp2 and megatron", "nearest valid value: actor.parallel.tensor=1"],
        ),
        (
            "Qwen2.5-7B",
            ["actor.parallel.tensor=4", "actor.parallel.ulysses=2"],
            ["actor.parallel.ulysses = 2", "the 7 attention heads that tensor 4 leaves to a device"],
        ),
        (
            "Qwen2.5-7B",
            [*MEGATRON, "actor.parallel.expert=2"],
            ["actor.parallel.expert = 2", "no experts", "nearest valid value: actor.parallel.expert=1"],
        ),
        (
            "Mixtral-8x7B",
            [*MEGATRON, "actor.parallel.expert=16"],
            ["actor.parallel.expert = 16", "the 8 experts", "nearest valid value: actor.parallel.expert=8"],
        ),
        (
            "Mixtral-8x7B",
            [*MEGATRON, "actor.parallel.expert=8", "actor.parallel.tensor=4", "actor.parallel.sequence=true"],
            ["actor.parallel.expert = 8", "tensor 4 × expert 8", "nearest valid value: actor.parallel.expert=4"],
        ),
        (
            "Mixtral-8x7B",
            [*MEGATRON, "actor.parallel.tensor=4"],
            [
                "actor.parallel.tensor = 4",
                "only with parallel.sequence=true",
                "nearest valid value: actor.parallel.tensor=1",
            ],
        ),
        (
            "Qwen2.5-7B",
            ["rollout.engine_options.tensor_parallel=8"],
            ["rollout.engine_options.tensor_parallel = 8", "28 attention heads", "engine_options.tensor_parallel=4"],
        ),
        (
            "Qwen2.5-7B",
            ["rollout.engine_options.tensor_parallel=4", "placement.rollout.devices=[0,1,2,3,4,5]"],
            ["rollout.engine_options.tensor_parallel = 4", "the 6 devices", "engine_options.tensor_parallel=2"],
        ),
        (
            "Qwen2.5-7B",
            ["algorithm.advantage.name=gae", "critic.backend=megatron", "critic.parallel.tensor=7"],
            ["critic.parallel.tensor = 7", "the 16 devices", "nearest valid value: critic.parallel.tensor=4"],
        ),
        (
            "Qwen2.5-7B",
            ["algorithm.kl.coefficient=0.1", "reference.backend=megatron", "reference.parallel.pipeline=16"],
            ["reference.parallel.pipeline = 16", "28 layers", "nearest valid value: reference.parallel.pipeline=4"],
        ),
    ],
)
def test_what_cant_work_names_the_nearest_that_can(
    tmp_path: Path, model: str, words: list[str], told: list[str]
) -> None:
    message = refusal(on(tmp_path, model, 2, 8, *words))
    for part in told:
        assert part in message, message


def test_engines_repeat_key_value_heads_that_are_too_few(tmp_path: Path) -> None:
    """Llama-3-8B has 8 of them; vLLM takes 16 devices all the same."""
    accepted(on(tmp_path, "Llama-3-8B", 2, 8, "rollout.engine_options.tensor_parallel=16"))


def test_the_nearest_fits_everything_else_too(tmp_path: Path) -> None:
    """With two stages only 4 of the 16 devices' divisors remain for tensor parallelism that also divide the heads."""
    words = (*MEGATRON, "actor.parallel.tensor=16", "actor.parallel.pipeline=2")
    message = refusal(on(tmp_path, "Qwen2.5-7B", 2, 8, *words))
    assert "nearest valid value: actor.parallel.tensor=4" in message


def test_an_unknown_model_is_placed_by_what_is_known(tmp_path: Path) -> None:
    words = ["policy.preset=null", f"policy.path={tmp_path}", "placement.devices_per_node=8"]
    accepted(load_experiment(None, [*words, "actor.parallel.ulysses=8"]))
    assert "the 8 devices" in refusal(load_experiment(None, [*words, "actor.parallel.ulysses=3"]))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["actor.sharding.group_size=3"],
            "actor.sharding.group_size = 3 (command line): groups of 3 do not fill the 8",
        ),
        (
            ["actor.sharding.group_size=3", "actor.parallel.tensor=2"],
            "groups of 3 do not fill the 4 devices that compute with the same weights",
        ),
        (
            ["actor.sharding.group_size=2", "actor.parallel.ulysses=4"],
            "groups of 2 cut through the 4 devices that share a sequence",
        ),
    ],
)
def test_sharding_groups_are_cut_out_of_devices_with_the_same_weights(
    tmp_path: Path, words: list[str], told: str
) -> None:
    """Else a plan says yes to what the start refuses, minutes later."""
    assert told in refusal(on(tmp_path, "Qwen2.5-7B", 1, 8, *words))


def test_a_sharding_group_of_more_devices_than_there_are_takes_them_all(tmp_path: Path) -> None:
    """As in verl, where `fsdp_size` may be that of a larger machine."""
    accepted(on(tmp_path, "Qwen2.5-7B", 1, 4, "actor.sharding.group_size=8"))


def test_one_device_is_not_split_in_silence() -> None:
    """A run of one process would train unsplit, whatever its configuration says."""
    composed = load_experiment(None, ["actor.parallel.tensor=2"])
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tensor = 2 \(command line\).*one device\n.*torchrun"):
        check_placement(composed)


def test_everything_that_cant_work_comes_in_one_message(tmp_path: Path) -> None:
    words = [*MEGATRON, "actor.parallel.pipeline=8", "rollout.engine_options.tensor_parallel=8"]
    message = refusal(on(tmp_path, "Qwen2.5-7B", 2, 8, *words))
    for key in ("actor.parallel.pipeline", "rollout.engine_options.tensor_parallel"):
        assert f"{key} = 8" in message


def test_a_cluster_that_nobody_has_is_refused_before_it_is_laid_out() -> None:
    message = refusal(load_experiment(None, ["placement.nodes=1000000000000"]))
    assert "1,000,000,000,000 devices" in message


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")]
)
def test_ranges_are_short(numbers: tuple[int, ...], text: str) -> None:
    assert format_ranges(numbers) == text
