"""If these fail, a run that will come to nothing begins without a word, or people are warned of what is well."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_models import on

from quintet.config.compose import load_experiment
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.run_plan import plan_run

RATE = "actor.optimizer.learning_rate=1e-6"
VLLM = "rollout.engine=vllm"


def warned(tmp_path: Path, *words: str) -> tuple[str, ...]:
    return plan_run(on(tmp_path, "Qwen2.5-7B", 1, 8, RATE, VLLM, *words)).warnings


@pytest.mark.parametrize("words", [[], ["algorithm.advantage.name=gae"], ["env.name=sokoban"]])
def test_the_runs_that_come_with_quintet_are_well(words: list[str]) -> None:
    assert plan_run(load_experiment(None, words)).warnings == ()


def test_a_well_made_run_on_a_cluster_is_well(tmp_path: Path) -> None:
    assert warned(tmp_path) == ()


GROUPS, MINI_BATCHES = "training.groups_per_step", "training.mini_batches"
FEW_EPISODES = f"placement.devices_per_node=1 training.steps=10 {GROUPS}=1 validation.every_steps=1 {MINI_BATCHES}=1"
NO_WINDOW = "rollout.window_size=null rollout.max_turns=8 rollout.max_start_tokens=200"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("actor.optimizer.learning_rate=6e-4", "learning_rate = 0.0006 (command line) suits the small preset policies"),
        ("training.steps=5", "the warm-up outlasts the 5 steps"),
        ("algorithm.kl.coefficient=0", "algorithm.kl.coefficient = 0.0 (command line) has no effect"),
        ("rollout.max_prompt_tokens=40000", "are 40,024 tokens, more than the 32,768 that the model supports"),
        ("rollout.engine_options.max_model_tokens=500", "more than the 500 that the engine allows"),
        (
            f"{NO_WINDOW} rollout.max_observation_tokens=100",
            "rollout.max_prompt_tokens = 512 (default): the last of 8 turns may need 1,068",
        ),
        (FEW_EPISODES, "validation runs 2,816 episodes (11 × 256), more than the 160 of training"),
        ("actor.budget.tokens=100", "actor.budget.tokens = 100 (command line) is less than the longest sequence"),
        ("placement.actor.devices=[0,1] placement.rollout.devices=[2,3]", "devices 4-7 are unused"),
        (
            f"{GROUPS}=6 training.samples_per_group=4 {MINI_BATCHES}=2",
            f"{MINI_BATCHES} = 2 (command line): its 12 episodes cannot be divided evenly over the 8 data-parallel "
            f"ranks of actor, so some ranks wait for others; nearest valid value: {MINI_BATCHES}=1, or {GROUPS}=4 or 8",
        ),
        (
            f"{GROUPS}=5 training.samples_per_group=3 {MINI_BATCHES}=1",
            "15 episodes cannot be divided evenly over the 8 data-parallel ranks of actor, so some ranks wait for "
            f"others; nearest valid value: {GROUPS}=8",
        ),
        ("placement.colocated=false", "yet components share devices"),
    ],
)
def test_what_looks_unwise_is_told_with_its_source(tmp_path: Path, words: str, told: str) -> None:
    lines = warned(tmp_path, *words.split())
    assert any(told in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_a_new_policy_that_the_learning_rate_of_fine_tuning_leaves_unchanged_is_reported(tmp_path: Path) -> None:
    def warnings(*words: str) -> str:
        low = "sft.optimizer.learning_rate=1e-5"
        return "\n".join(plan_run(load_experiment(None, ["sft.episodes={}", low, *words])).warnings)

    advised = "sft.optimizer.learning_rate = 1e-05 (command line) suits pretrained models"
    assert advised in warnings()
    assert advised in warnings("sft.then_reinforce=true")
    assert warnings("sft.optimizer.learning_rate=1e-3") == ""
    assert not any(advised in line for line in warned(tmp_path, "sft.episodes={}"))


def test_an_engine_across_machines_is_told(tmp_path: Path) -> None:
    composed = on(tmp_path, "Llama-3-8B", 2, 8, RATE, VLLM, "rollout.engine_options.tensor_parallel=16")
    assert any("one engine spans machines of 8 devices" in line for line in plan_run(composed).warnings)


def test_recomputing_is_advised_where_it_halves_the_memory(tmp_path: Path) -> None:
    """16,384 tokens of 28 layers: 84.0 GiB of activations, which would be 6.0."""
    long = [f"rollout.engine_options.{option}=true" for option in ("sleep_between_steps", "offload")]
    long += ["rollout.max_response_tokens=8000", "training.micro_batch_tokens=16384", "rollout.max_concurrent=8"]
    lines = warned(tmp_path, *long)
    assert any("actor.gradient_checkpointing=true lowers the peak from" in line for line in lines), lines
    assert warned(tmp_path, *long, "actor.gradient_checkpointing=true") == ()


def test_a_device_that_is_nearly_full_is_told(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 8, RATE, VLLM)
    peak = plan_run(composed).memory.fullest
    assert peak is not None
    lines = plan_run(composed, int(peak.total / 0.95)).warnings
    assert any("leave little memory for CUDA" in line for line in lines)
    assert plan_run(composed, 2 * peak.total + GIB).warnings == ()


def test_a_model_that_isnt_known_is_told_to_be_guessed(tmp_path: Path) -> None:
    composed = on(tmp_path, "Qwen2.5-7B", 1, 8, RATE, VLLM, "policy.overrides={model_type: novel}")
    assert any(
        "models of type 'novel' are estimated as if they were Llama" in line for line in plan_run(composed).warnings
    )


def test_chunks_of_robots_are_counted_as_episodes_of_a_mini_batch() -> None:
    """RLinf divides the chunks of all robots over the ranks, so that 42 episodes over 4 ranks are no reason to warn."""
    episodes = ["training.groups_per_step=21", "training.samples_per_group=2", "training.mini_batches=1"]
    arm = Path(__file__).parents[4] / "examples/native/arm.yaml"
    composed = load_experiment(str(arm), [*episodes, "env.environments=42", "placement.devices_per_node=4"])
    assert not any("evenly" in line for line in plan_run(composed).warnings)


def test_devices_that_share_a_sequence_are_one_rank_of_a_mini_batch(tmp_path: Path) -> None:
    words = ["training.groups_per_step=6", "training.samples_per_group=4", "training.mini_batches=2"]
    assert not any("evenly" in line for line in warned(tmp_path, *words, "actor.parallel.ulysses=2"))
