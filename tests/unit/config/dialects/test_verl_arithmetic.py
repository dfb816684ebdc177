"""If these fail, a step of a verl file has other sequences, optimizer steps, micro-batches or GPUs than under verl.

The settings are those of ten scripts in verl's `examples/` (commit b178a3c, 2026-01-29). With B prompts of n samples,
mini-batches of M prompts and `ppo_epochs: 1`, a step has by `verl/trainer/ppo/ray_trainer.py` (`RayPPOTrainer.fit`)
B × n sequences, and by `verl/workers/actor/dp_actor.py` (`update_policy`) ⌈B / M⌉ optimizer steps. A data-parallel rank
has M × n / ranks sequences of each (`ActorRolloutRefWorker.__init__`). The ranks are GPUs / Ulysses size under FSDP
(`verl/workers/fsdp_workers.py`), GPUs / (tensor × pipeline × context size) under Megatron
(`verl/workers/megatron_workers.py`). They are computed `ppo_micro_batch_size_per_gpu` at a time, or with
`use_dynamic_bsz` ⌈tokens / `ppo_max_token_len_per_gpu`⌉ times (`verl/utils/seqlen_balancing.py`); here all sequences
are as long as they may be. The critic does the same with its own keys (`CriticWorker.__init__`). There are
GPUs / (tensor × data × pipeline size of the rollout) engines (`_build_rollout`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foreign import changed, converted

from quintet.config.plan.run_plan import plan_run

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))


class Counts(NamedTuple):
    """Data-parallel ranks of a learner, sequences of each in an optimizer step, and micro-batches of these."""

    ranks: int
    sequences: int
    micro_batches: int


class Step(NamedTuple):
    """What one training step has, and the number of engines; `reference` is the number of its copies."""

    episodes: int
    mini_batch: int
    optimizer_steps: int
    actor: Counts
    engines: int
    reference: int = 0
    critic: Counts | None = None


def sizes(prompts: int, samples: int, mini_batch: int, tokens: int) -> dict[str, Any]:
    return {
        f"{MODEL}.path": "some/model",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": tokens // 2,
        "data.max_response_length": tokens - tokens // 2,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": samples,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
        f"{ACTOR}.ppo_mini_batch_size": mini_batch,
    }


def gpus(number: int, engine: int, nodes: int = 1) -> dict[str, Any]:
    return {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": number,
        f"{ROLLOUT}.tensor_model_parallel_size": engine,
    }


def per_gpu(actor: int, critic: int | None = None) -> dict[str, Any]:
    """Sequences in a micro-batch."""
    of_critic = (
        {} if critic is None else {"critic.model.path": "some/model", "critic.ppo_micro_batch_size_per_gpu": critic}
    )
    return {f"{ACTOR}.ppo_micro_batch_size_per_gpu": actor, **of_critic}


def tokens_per_gpu(tokens: int) -> dict[str, Any]:
    return {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": tokens}


def megatron(tensor: int, pipeline: int, expert: int = 1, *, critic: bool = False) -> dict[str, Any]:
    split = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    if expert > 1:
        split |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
    sections = (ACTOR, REF, "critic") if critic else (ACTOR, REF)
    strategies = {f"{section}.strategy": "megatron" for section in sections if section != REF}
    return strategies | {f"{section}.megatron.{key}": size for section in sections for key, size in split.items()}


def estimator(name: str, *, kl_in_loss: bool = False, kl_in_reward: bool = False) -> dict[str, Any]:
    reference = {f"{REF}.log_prob_micro_batch_size_per_gpu": 8} if kl_in_loss or kl_in_reward else {}
    kl = {f"{ACTOR}.use_kl_loss": kl_in_loss, "algorithm.use_kl_in_reward": kl_in_reward}
    return {"algorithm.adv_estimator": name, **kl, **reference}


GRPO, PPO = estimator("grpo", kl_in_loss=True), estimator("gae")
SEQUENCE_PARALLEL = {
    f"{MODEL}.use_remove_padding": True,
    f"{ACTOR}.ulysses_sequence_parallel_size": 2,
    "critic.model.use_remove_padding": True,
    "critic.ulysses_sequence_parallel_size": 2,
}

FILES: dict[str, tuple[dict[str, Any], Step]] = {
    "grpo_trainer/run_qwen2-7b.sh": (
        # 256 × 5 / 8 GPUs = 160 sequences, 40 at a time
        GRPO | sizes(1024, 5, 256, 1536) | gpus(8, 2) | per_gpu(40),
        Step(5120, 1280, 4, Counts(8, 160, 4), engines=4, reference=8),
    ),
    "grpo_trainer/run_qwen2-7b_seq_balance.sh": (
        # 160 sequences × 1536 tokens / 24000 = 10.24
        GRPO | sizes(1024, 5, 256, 1536) | gpus(8, 2) | tokens_per_gpu(24000),
        Step(5120, 1280, 4, Counts(8, 160, 11), engines=4, reference=8),
    ),
    "grpo_trainer/run_qwen2-7b_math_megatron.sh": (
        # 8 GPUs / (2 × 2) = 2 ranks with 256 × 5 / 2 = 640 sequences, 4 at a time
        GRPO | sizes(1024, 5, 256, 2048) | gpus(8, 2) | per_gpu(4) | megatron(2, 2),
        Step(5120, 1280, 4, Counts(2, 640, 160), engines=4, reference=2),
    ),
    "grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh": (
        # experts are divided over the data-parallel ranks; a micro-batch has the tokens of one sequence, 10240
        estimator("grpo") | sizes(512, 16, 128, 10240) | gpus(8, 4) | tokens_per_gpu(10240) | megatron(1, 1, 8),
        Step(8192, 2048, 4, Counts(8, 256, 256), engines=2),
    ),
    "grpo_trainer/run_deepseek671b_math_megatron_80gb.sh": (
        # 32 × 8 GPUs / 16 stages = 16 ranks with 128 × 4 / 16 = 32 sequences of 6144 tokens
        GRPO | sizes(512, 4, 128, 6144) | gpus(8, 32, nodes=32) | tokens_per_gpu(6144) | megatron(1, 16, 16),
        Step(2048, 512, 4, Counts(16, 32, 32), engines=8, reference=16),
    ),
    "ppo_trainer/run_deepseek7b_llm.sh": (
        # 256 / 8 = 32 sequences, 16 at a time in the policy, 32 in the critic
        PPO | sizes(1024, 1, 256, 1024) | gpus(8, 4) | per_gpu(16, 32),
        Step(1024, 256, 4, Counts(8, 32, 2), engines=2, critic=Counts(8, 32, 1)),
    ),
    "ppo_trainer/run_deepseek7b_llm_sp2.sh": (
        # two GPUs share a sequence: 8 / 2 = 4 ranks with 256 / 4 = 64
        PPO | sizes(1024, 1, 256, 1024) | gpus(8, 4) | per_gpu(32, 64) | SEQUENCE_PARALLEL,
        Step(1024, 256, 4, Counts(4, 64, 2), engines=2, critic=Counts(4, 64, 1)),
    ),
    "ppo_trainer/run_qwen2.5-32b.sh": (
        # 4 × 8 GPUs with 256 / 32 = 8
        PPO | sizes(1024, 1, 256, 2048) | gpus(8, 4, nodes=4) | per_gpu(8, 8),
        Step(1024, 256, 4, Counts(32, 8, 1), engines=8, critic=Counts(32, 8, 1)),
    ),
    "ppo_trainer/run_moonlight16b_a3b_gsm8k_megatron.sh": (
        # 32 GPUs / (8 × 2) = 2 ranks with 256 / 2 = 128 sequences, 4 at a time
        PPO | sizes(1024, 1, 256, 1536) | gpus(8, 4, nodes=4) | per_gpu(4, 4) | megatron(8, 2, 8, critic=True),
        Step(1024, 256, 4, Counts(2, 128, 32), engines=8, critic=Counts(2, 128, 32)),
    ),
    "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf.sh": (
        # the whole step is a mini-batch: 1024 × 8 / 16 = 512 sequences, 16 at a time
        estimator("reinforce_plus_plus", kl_in_reward=True) | sizes(1024, 8, 1024, 2048) | gpus(16, 2) | per_gpu(16),
        Step(8192, 8192, 1, Counts(16, 512, 32), engines=8, reference=16),
    ),
    "remax_trainer/run_qwen2.5-7b_seq_balance.sh": (
        # 256 × 4 / 8 = 128 sequences × 1536 tokens / 24000 = 8.19
        estimator("remax", kl_in_reward=True) | sizes(1024, 4, 256, 1536) | gpus(8, 2) | tokens_per_gpu(24000),
        Step(4096, 1024, 4, Counts(8, 128, 9), engines=4, reference=8),
    ),
}


@pytest.mark.parametrize(("settings", "expected"), FILES.values(), ids=FILES)
def test_a_step_has_the_numbers_that_it_has_under_verl(
    tmp_path: Path, settings: dict[str, Any], expected: Step
) -> None:
    plan = plan_run(converted(tmp_path, "verl", changed({}, settings)).composed)
    counts = {
        name: Counts(work.data_parallel_ranks, work.sequences_per_rank, work.micro_batches)
        for name, work in plan.workloads.items()
    }
    copies = {component.name: component.copies for component in plan.placement.components}
    planned = Step(
        plan.numbers["episodes_per_step"],
        plan.numbers["episodes_per_mini_batch"],
        plan.numbers["optimizer_steps_per_step"],
        counts["actor"],
        copies["rollout"],
        copies.get("reference", 0),
        counts.get("critic"),
    )
    assert planned == expected
