"""If these fail, a run on a CPU is planned with memory that it does not take, and runs out of it or is not started."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_models import PARAMETERS, at

from quintet.config.compose import load_experiment
from quintet.config.plan import cpu_memory
from quintet.config.plan.cpu_memory import CHECKPOINT, PROCESS, PROCESS_BYTES
from quintet.config.plan.memory import MemoryPlan, plan_memory
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import place_components

P = PARAMETERS["Qwen2.5-0.5B"]
ADAPTERS = 24 * 8 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
"""Of rank 8 on all linear layers."""
ROWS = ("sft.batch=16", "sft.max_tokens=96", "data.train_files=[x.jsonl]")
HEAD = 151936 * 896


@pytest.fixture(autouse=True)
def exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the holes that the allocator leaves."""
    for name in ("KERNEL_HEAP", "MODULE_HEAP"):
        monkeypatch.setattr(cpu_memory, name, 1.0)


def on_cpu(tmp_path: Path, *words: str, steps: int | None = 2) -> MemoryPlan:
    """Memory of a run of Qwen2.5-0.5B in float32 in one process."""
    model = ("policy.preset=null", f"policy.path={at(tmp_path, 'Qwen2.5-0.5B')}", "warm_start=null")
    config = load_experiment(None, [*model, *words]).experiment
    return plan_memory(config, place_components(config), find_models(config), on_cpu=True, steps=steps)


def test_fine_tuning_is_planned_with_what_the_kernels_save(tmp_path: Path) -> None:
    """16 rows of 96 tokens: per token and layer 4 · 896 inputs, 2 · 896 of queries and attention, 2 · 128 of keys and
    values, 2 · 4864 of the MLP; concatenated projections; 2**25 logits and the gradient of the head."""
    use = on_cpu(tmp_path, *ROWS).active["actor"]
    assert use.activations == 16 * 96 * 24 * 4 * (6 * 896 + 2 * 128 + 2 * 4864)
    assert use.copies == 24 * 4 * 896 * (896 + 2 * 128 + 2 * 4864)
    assert use.logits == 4 * 2**25 + 4 * HEAD
    assert (use.weights, use.optimizer) == (4 * P, 8 * P)


def test_gradients_of_a_single_micro_batch_take_the_place_of_its_activations(tmp_path: Path) -> None:
    single, several = (on_cpu(tmp_path, *ROWS, *more).active["actor"] for more in ((), ("sft.sequences_per_pass=1",)))
    freed = single.activations + single.copies + single.logits
    assert single.gradients == max(0, 4 * P - freed)
    assert several.gradients == 4 * P


def test_fine_tuning_with_adapters_has_no_moments_of_frozen_weights(tmp_path: Path) -> None:
    """Modules save 4 · 896 inputs without those of frozen norms, and 4 · 4864 of the MLP."""
    use = on_cpu(tmp_path, *ROWS, "sft.lora={rank: 8}").active["actor"]
    assert (use.weights, use.optimizer, use.gradients) == (4 * (P + ADAPTERS), 8 * ADAPTERS, 0)
    assert use.activations == 16 * 96 * 24 * 4 * (6 * 896 + 2 * 128 + 4 * 4864)


def test_adapters_of_fine_tuning_are_those_of_its_own_section(tmp_path: Path) -> None:
    assert on_cpu(tmp_path, *ROWS, "policy.lora={rank: 8}").active["actor"].optimizer == 8 * P


def test_recomputed_layers_of_fine_tuning_save_their_inputs(tmp_path: Path) -> None:
    use = on_cpu(tmp_path, *ROWS, "sft.gradient_checkpointing=true").active["actor"]
    layer = 4 * (8 * 896 + 2 * 128 + 4 * 4864)
    assert use.activations == 16 * 96 * (layer + 24 * 4 * 896)


def test_every_process_has_its_interpreter(tmp_path: Path) -> None:
    plan = on_cpu(tmp_path, *ROWS)
    (peak,) = plan.peaks
    assert peak.parts[PROCESS].total == PROCESS_BYTES
    assert peak.total == sum(use.total for use in peak.parts.values())


@pytest.mark.parametrize(
    ("words", "steps", "kept", "saved"),
    [
        (("checkpoint.every_steps=10",), 5, 4 * P, 12 * P),
        (("checkpoint.every_steps=10",), 50, 12 * P, 12 * P),
        (("checkpoint.every_steps=10", "checkpoint.contents=[model]"), 50, 4 * P, 4 * P),
        (("policy.lora={rank: 8}",), 5, 4 * (P + ADAPTERS), 4 * P + 12 * ADAPTERS),
        (ROWS, 2, 0, 12 * P),
        ((*ROWS, "sft.epochs=2"), 4, 12 * P, 12 * P),
        ((*ROWS, "sft.lora={rank: 8}"), 2, 0, 8 * P + 12 * ADAPTERS),
    ],
)
def test_checkpoints_are_written_from_copies_that_stay(
    words: tuple[str, ...], steps: int, kept: int, saved: int, tmp_path: Path
) -> None:
    """The first checkpoint of reinforcement learning has no moments; fine-tuning has none before its first step.
    Adapters are merged into a copy, which the final weights of fine-tuning are once more."""
    plan = on_cpu(tmp_path, *words, steps=steps)
    assert (plan.idle[CHECKPOINT].total, plan.active[CHECKPOINT].total) == (kept, saved)


def test_an_engine_is_planned_with_the_requests_that_there_are(tmp_path: Path) -> None:
    """64 episodes of a step, and no validation; 4 bytes of 2 · 24 · 2 · 64 numbers a token. 34 blocks of 16 tokens hold
    the 536 of an episode; one more is a copy of a block that it shares."""
    words = ("training.groups_per_step=4", "training.samples_per_group=16", "validation.before_training=false")
    plan = on_cpu(tmp_path, *words, "validation.every_steps=-1")
    assert plan.active["rollout"].cache == 64 * 35 * 16 * 4 * 2 * 24 * 2 * 64
    validated = on_cpu(tmp_path, *words, "validation.episodes=100")
    assert validated.active["rollout"].cache == plan.active["rollout"].cache // 64 * 100


def test_nothing_is_offloaded_from_a_cpu(tmp_path: Path) -> None:
    plan = on_cpu(tmp_path, "actor.memory.offload_optimizer=true", "actor.memory.offload_parameters=true")
    assert (plan.idle["actor"].weights, plan.idle["actor"].optimizer) == (4 * P, 8 * P)
