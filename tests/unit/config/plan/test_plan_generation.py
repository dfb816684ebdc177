"""If these fail, the plan of a run that only generates shows other numbers or devices than the run has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.config.checks.processes import torchrun_command
from quintet.config.compose import load_experiment
from quintet.config.plan.placement import place_components
from quintet.config.plan.process_layout import process_layout
from quintet.config.plan.run_plan import RunPlan, plan_run

WORDS = (
    *("env.name=prompts", "data.train_files=[rows.jsonl]", "policy.path=model"),
    "generation={output_path: out.parquet, samples: 4, batch_size: 4}",
)
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?"}\n' * 6)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))


def planned(*words: str) -> RunPlan:
    return plan_run(load_experiment(None, [*WORDS, *words]))


def test_responses_and_batches_are_counted() -> None:
    """Six prompts are 24 responses in batches of four and of two prompts."""
    assert planned().numbers == {"prompts": 6, "samples": 4, "responses": 24, "batches": 2}
    shown = planned().to_json()["run"]
    assert (shown["kind"], shown["responses"]) == ("generation of responses", "out.parquet")


def test_more_prompts_in_a_training_step_than_rows_do_not_matter() -> None:
    assert planned("data.epochs=1", "training.groups_per_step=64").numbers["prompts"] == 6


def test_a_device_has_the_weights_of_its_engine_and_no_optimizer() -> None:
    for dtype, width in {"float32": 4, "bfloat16": 2}.items():
        plan = planned(f"rollout.engine_options.dtype={dtype}")
        shape = plan.models.of("rollout")
        assert shape is not None
        assert plan.memory.active.keys() == {"rollout", "process"}
        assert plan.memory.active["rollout"].weights == shape.parameters * width


def test_engines_are_on_all_devices_whatever_a_training_run_has_there() -> None:
    """Four devices with engines of two, although the run trains on the first two with other parallel sizes."""
    words = (
        *("placement.devices_per_node=4", "placement.actor.devices=[0,1]", "placement.colocated=false"),
        *("rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2", "actor.parallel.tensor=2"),
    )
    composed = load_experiment(None, [*WORDS, *words])
    (engines,) = plan_run(composed).placement.components
    assert (engines.devices, engines.copies) == (range(4), 2)
    assert process_layout(composed.experiment).learner_ranks == (0, 1, 2, 3)
    assert torchrun_command(composed.experiment) == "torchrun --nproc-per-node 4 -m quintet generate …"
    narrower = load_experiment(None, [*WORDS, *words, "placement.rollout.devices=[2,3]"]).experiment
    assert {component.devices for component in place_components(narrower).components} == {range(2, 4)}
