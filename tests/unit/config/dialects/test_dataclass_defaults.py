"""If these fail, a file of ROLL in a checkout has the defaults of another one, or its keys are called unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import changed

from quintet.cli.configuration import InspectedConfig, inspect_config
from quintet.errors import ConfigError

FILE: dict[str, Any] = {
    "pretrain": "models/small",
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 4,
    "response_length": 64,
    "rewards": {"math_rule": {"tag_included": ["math"]}},
    "actor_train": {"training_args": {"gradient_accumulation_steps": 4}, "device_mapping": [0]},
    "actor_infer": {"generating_args": {"max_new_tokens": 64}, "device_mapping": [0]},
}
CLASSES = """\
class PPOConfig(BaseConfig):
    ppo_epochs: int = field(default=3, metadata={"help": "not executed: " + open("/nowhere").read()})
    loss_agg_mode: Literal["token-mean"] = (
        field(default="seq-mean-token-sum")
    )
    hint_rate: float = field(default=0.5)


class RLVRConfig(PPOConfig):
    prompt_length: int = 96
    actor_train: WorkerConfig = field(default_factory=lambda: WorkerConfig(training_args=Arguments(max_steps=7)))
    rewards: Optional[Dict[str, RewardConfig]] = field(default_factory=dict)


class WorkerConfig:
    worker: "WorkerConfig" = field(default_factory=WorkerConfig)
    training_args: Arguments = field(default_factory=Arguments)


class Arguments:
    learning_rate: float = 3e-4
    max_steps: int = -1


class RewardConfig(WorkerConfig):
    hint_file: Optional[str] = field(default=None)
"""


OTHER_CLASSES = """\
class AgenticConfig(PPOConfig):
    rewards: Optional[Dict[str, RewardConfig]] = field(default_factory=dict)


class RewardConfig(WorkerConfig):
    bonus: float = 0.0
"""


def run_in_checkout(directory: Path, classes: str, **changes: Any) -> InspectedConfig:
    """Inspect a file of examples in a checkout of ROLL with configuration classes."""
    code = directory / "roll/configs/base_config.py"
    code.parent.mkdir(parents=True)
    code.write_text(classes)
    (code.parent / "agentic_config.py").write_text(OTHER_CLASSES)
    file = directory / "examples/run.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(changed(FILE, changes)))
    return inspect_config(str(file), [], None, "refuse")


def test_a_file_in_a_checkout_has_the_defaults_of_another_release(tmp_path: Path) -> None:
    """The classes of the checkout have the defaults, whatever release has the keys of the file."""
    inspected = run_in_checkout(tmp_path, CLASSES)
    run = inspected.composed.experiment
    assert "closest to the classes in the checkout" in inspected.composed.release
    assert run.algorithm.aggregation == "seq-mean-token-sum"
    assert run.training.epochs == 3
    assert run.rollout.max_prompt_tokens == 96
    assert run.actor.optimizer.learning_rate == 3e-4


def test_a_key_of_classes_in_a_checkout_is_not_said_to_be_of_this_fork(tmp_path: Path) -> None:
    keys = {"hint_rate": 0.25, "rewards.math_rule.hint_file": "hints.json", "prompt_lenght": 9}
    with pytest.raises(ConfigError) as error:
        run_in_checkout(tmp_path / "a", CLASSES, **keys)
    assert "prompt_lenght" in str(error.value)
    del keys["prompt_lenght"]
    found = {each.key: each.message for each in run_in_checkout(tmp_path / "b", CLASSES, **keys).unsupported}
    for key in keys:
        assert "waits: key of this fork (its configuration classes)" in found[key]


@pytest.mark.parametrize(
    "classes", ["class RLVRConfig(", "class RLVRConfig(RLVRConfig):\n    rollout_batch_size: int = 4\n"]
)
def test_damaged_or_endless_classes_of_a_checkout_end_a_plan(tmp_path: Path, classes: str) -> None:
    run = run_in_checkout(tmp_path, classes).composed.experiment
    assert run.algorithm.aggregation == "seq-mean-token-mean"
