"""If these fail, the card of an exported model tells of another training than the one that happened."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.pipelines.export import _PolicySource, export
from quintet.pipelines.model_card import plain_card, training_card
from quintet.pipelines.sft.fine_tuning import HeldOutLosses
from quintet.pipelines.training_record import RECORD_FILE, base_model_name, checkpoint_record, training_record
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import Checkpoint

COMMON = ("sft.batch=8", "sft.epochs=2", "tracking.loggers=[jsonl]", "training.threads=1", "training.steps=70")


def test_every_export_of_a_fine_tuned_model_has_the_card_of_its_training(
    tune: Callable[..., Path], tmp_path: Path, policy_directory: Path
) -> None:
    run = tune("sft.lora={rank: 2, alpha: 8, target_modules: [q_proj]}", "sft.optimizer.learning_rate=0.003")
    digests = {
        name: hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest() for name in ("train", "held")
    }
    sources = (run, run / "checkpoints/global_step_4", run / "model", run / "lora_adapter")
    for number, source in enumerate((*sources, run / "checkpoints/global_step_4/lora_adapter", tmp_path / "out2")):
        export(str(source), tmp_path / f"out{number}")
        card = (tmp_path / f"out{number}/README.md").read_text()
        assert "Trained by supervised fine-tuning with LoRA" in card, source
        assert ": 4 steps, " in card, source
        assert "Weights are in float32." in card, source
        assert f"| base model | {'/'.join(policy_directory.parts[-2:])} |" in card or policy_directory.name in card
        for row in (
            "| LoRA | rank 2, alpha 8, q_proj |",
            "| learning rate | 0.003, schedule cosine |",
            f"| train | train.jsonl | 20 | `{digests['train']}` |",
            f"| validation | held.jsonl | 6 | `{digests['held']}` |",
        ):
            assert row in card, (source, row)
        assert "| held out | first | last |" in card, source
        assert "(step 0) |" in card.split("| loss | ")[1].splitlines()[0]
        for unused in ("grid-1m", "frozenlake", "grpo", "70", str(tmp_path)):
            assert unused not in card.replace(digests["train"], "").replace(digests["held"], ""), (source, unused)
    assert "Adapters merged into" in (tmp_path / "out3/README.md").read_text()


def _card(run: Path, *overrides: str, **state: object) -> str:
    experiment = load_experiment(None, overrides).experiment.model_dump(mode="json")
    record = training_record({"experiment": experiment, "seconds": 60.0, **state}, 3, RunDirectory(run))
    return training_card(record, "bfloat16", "out")


def test_results_on_training_rows_are_not_called_held_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/loss": 2.0}\n{"step": 3, "val/loss": 1.0}\n')
    held_out = ["data.train_files=[a.jsonl]", "data.validation_files=[b.jsonl]", "sft={}"]
    assert "| held out | first | last |" in _card(tmp_path, *held_out, reached={}, steps=3)
    card = _card(tmp_path, held_out[0], "sft={}", reached={}, steps=3)
    assert "| training rows, since no rows were held out | first | last |" in card


def test_a_card_names_the_environment_of_games_and_the_data_and_reward_of_prompts(tmp_path: Path) -> None:
    lake = _card(tmp_path, "policy.path=/models/small", "policy.preset=null", "policy.lora={rank: 4}")
    assert "| env | frozenlake |" in lake
    assert "| base model | small |" in lake
    assert "| LoRA | rank 4, alpha 16, all-linear |" in lake
    prompts = _card(tmp_path, "env.name=prompts", "data.train_files=[/data/sums.jsonl]", "reward.kind=numeric")
    assert "| data | sums.jsonl |" in prompts
    assert "| reward | numeric |" in prompts
    assert "| env |" not in prompts
    assert f": 3 of {Experiment().training.steps} steps" in prompts
    assert "env:\n  name: prompts\n" in prompts
    assert "| warm start | at most 250 updates on demonstrations |" in prompts
    assert "a preset with random weights" in prompts


def test_a_model_of_the_hub_is_named_as_there(tmp_path: Path) -> None:
    path = "/cache/hub/models--org--small-model/snapshots/0a1b2c"
    card = _card(tmp_path, "sft={}", f"sft.path={path}", "data.train_files=[a.jsonl]", reached={})
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/small-model"
    assert base_model_name({"policy": {"path": "runs/words/sft/model"}}, is_tuned=False) == "sft/model"


def test_every_card_is_valid_for_the_hub(tmp_path: Path) -> None:
    """As far as the hub's library checks one without a network."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/loss": 2.0}\n{"step": 3, "val/loss": 1.0}\n')
    hub = "/cache/hub/models--org--small-model/snapshots/0a1b2c"
    cards = {
        "plain": plain_card("small", "A model: with a colon."),
        "reinforced": _card(tmp_path, "policy.lora={rank: 4}"),
        "robot": _card(tmp_path, "env.name=simulator", "env.simulator=arm", "policy.preset=arm-vla"),
        "tuned": _card(tmp_path, "sft={}", "data.train_files=[a.jsonl]", f"sft.path={hub}", reached={}),
        "of a run": _card(
            tmp_path, "sft={}", "data.train_files=[a.jsonl]", "sft.path=runs/words/sft/model", reached={}
        ),
    }
    base_models = {}
    for kind, text in cards.items():
        card = ModelCard(text, ignore_metadata_errors=False)
        assert str(card) == text, kind
        assert card.text.strip().startswith("# "), kind
        assert card.data.library_name == "transformers"
        assert card.data.tags == ["quintet"]
        base_models[kind] = card.data.base_model
        if card.data.base_model is not None:
            validate_repo_id(card.data.base_model)
    # a directory of this machine is no model of the hub
    assert base_models == dict.fromkeys(cards) | {"tuned": "org/small-model"}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", "soon"),
        ("seconds", 10**400),
        ("steps", [3]),
        ("base_model", None),
        ("data", [{"split": "train"}]),
        ("results", {"val/loss": [["x", 1.0]]}),
        ("experiment", []),
        ("experiment", {"policy": 7}),
    ],
)
def test_a_record_with_a_damaged_value_is_a_users_error(
    policy_directory: Path, tmp_path: Path, name: str, value: object
) -> None:
    shutil.copytree(policy_directory, tmp_path / "model")
    experiment = load_experiment(None, ()).experiment.model_dump(mode="json")
    record = training_record({"experiment": experiment, "seconds": 60.0}, 3, RunDirectory(tmp_path))
    (tmp_path / "model" / RECORD_FILE).write_text(json.dumps({**record, name: value}))
    with pytest.raises(MachineError, match="record of training"):
        export(str(tmp_path / "model"), tmp_path / "out")


@pytest.mark.attack
@pytest.mark.parametrize(
    "damage", [{"seconds": "soon"}, {"seconds": None}, {"data": 7}, {"experiment": {"policy": 7}}, {"experiment": 1}]
)
def test_a_state_with_a_damaged_value_is_a_users_error(tmp_path: Path, damage: dict[str, object]) -> None:
    experiment = load_experiment(None, ()).experiment.model_dump(mode="json")
    state = {"experiment": experiment, "seconds": 60.0} | damage
    checkpoint = SimpleNamespace(directory=tmp_path / "checkpoints/global_step_1", state=state, step=1)
    with pytest.raises(MachineError, match="does not describe a training"):
        checkpoint_record(checkpoint)


def test_a_damaged_record_is_a_users_error(policy_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_directory, tmp_path / "model")
    (tmp_path / "model" / RECORD_FILE).write_text('{"kind": "reinforcement learning"}')
    with pytest.raises(MachineError, match="no record of training"):
        export(str(tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.attack
@pytest.mark.parametrize("state", [{}, {"experiment": 7}, {"experiment": None}])
def test_an_entry_of_a_state_has_its_type(tmp_path: Path, state: dict[str, object]) -> None:
    checkpoint = Checkpoint(tmp_path, 1, state)
    with pytest.raises(MachineError, match=r"state\.json: experiment is"):
        checkpoint.entry("experiment", dict)
    assert checkpoint.entry("contents", list, ["model"]) == ["model"]


@pytest.mark.attack
@pytest.mark.parametrize("policy", [None, 7, [], {"overrides": 7}])
def test_a_damaged_section_of_a_checkpoints_configuration_overrides_nothing(tmp_path: Path, policy: object) -> None:
    checkpoint = Checkpoint(tmp_path, 1, {"experiment": {"policy": policy}})
    assert _PolicySource.of(tmp_path, checkpoint, trust_remote_code=False).overrides == {}


@pytest.mark.attack
@pytest.mark.parametrize("losses", [7, {"best": "low"}, {"other": 1.0}, {"before": []}])
def test_damaged_losses_of_a_fine_tuning_are_a_users_error(tmp_path: Path, losses: object) -> None:
    with pytest.raises(MachineError):
        HeldOutLosses.restored(Checkpoint(tmp_path, 1, {"reached": losses}))
    assert HeldOutLosses.restored(Checkpoint(tmp_path, 1, {"reached": HeldOutLosses(1.0).state()})) == HeldOutLosses(
        1.0
    )
