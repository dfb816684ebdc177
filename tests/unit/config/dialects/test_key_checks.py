"""If these fail, a foreign configuration runs with a key that does nothing, or is refused without saying why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import read_merged

from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.key_checks import illegal_values, ineffective_keys, unsupported_keys
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS, detect
from quintet.config.dialects.unknown_keys import UnknownReason, unknown_keys
from quintet.errors import ConfigError

RAGEN = """\
system: {n_gpus: 1}
training:
  max_turns: five
  n_rolout: 16
trainer: {nnodes: 2}
zebra: {crossing: 1}
"""


def values(tmp_path: Path, dialect: str = "ragen", text: str = RAGEN) -> ForeignValues:
    return ForeignValues(read_merged(_file(tmp_path, text)), DIALECTS[dialect])


def test_unknown_keys_are_all_listed_in_three_kinds(tmp_path: Path) -> None:
    text = RAGEN.replace("zebra:", "es_manager: {group_size: 4}\nzebra:")
    unknown = unknown_keys(values(tmp_path, text=text), DIALECTS["ragen"])
    assert [(key.key, key.reason, key.suggestion) for key in unknown] == [
        ("es_manager.group_size", UnknownReason.UNDOCUMENTED, None),
        ("training.n_rolout", UnknownReason.TYPO, "training.n_rollout"),
        ("zebra.crossing", UnknownReason.NEW, None),
    ]
    assert "run.yaml:4" in str(unknown[1])
    assert "did you mean training.n_rollout?" in str(unknown[1])
    assert str(unknown[2]).endswith("does not exist in ragen, and is read as a key of a fork")


def test_a_type_is_checked_where_the_framework_doesnt(tmp_path: Path) -> None:
    (fault,) = illegal_values(values(tmp_path))
    assert fault.key == "training.max_turns"
    assert "'five'" in str(fault)
    assert "run.yaml:3" in str(fault)
    assert "an integer ≥ 1" in str(fault)


def test_a_pending_key_says_what_it_waits_for_unless_it_asks_for_nothing(tmp_path: Path) -> None:
    faults = {fault.key: str(fault) for fault in unsupported_keys(values(tmp_path))}
    assert "system.n_gpus" not in faults
    assert "requires one process per device" in faults["trainer.nnodes"]
    assert "trainer.nnodes=1" in faults["trainer.nnodes"]


def test_a_section_that_is_like_another_takes_its_keys(tmp_path: Path) -> None:
    text = "critic: {training_args: {learning_rate: 1.0e-5}, infer_batch_size: 2}\n"
    assert unknown_keys(values(tmp_path, "roll", text)) == []


def test_a_file_is_recognised_by_its_dialects_own_sections() -> None:
    assert detect({"rollout_manager": {}, "actor_rollout_ref": {}, "env1": {}})[0] == "vagen"
    assert detect({"actor_rollout_ref": {}}) == ["verl"]
    assert detect({"runner": {}, "cluster": {}})[0] == "rlinf"
    assert detect({"actor_train": {}, "rollout_batch_size": 1}) == ["roll"]
    assert detect({"training": {"n_rollout": 1}}) == ["ragen"]
    assert detect({"training": {"steps": 1}}) == []


def test_a_dialect_over_another_takes_its_keys_and_a_critic_those_of_the_actor(tmp_path: Path) -> None:
    text = """\
rollout_manager: {max_turns: 2}
data: {shuffle: true}
critic: {optim: {lr: 1.0e-5, lr_warmup_steps: 3}, model: {path: x, external_lib: null}, grad_clip: 1.0, gradclip: 1}
"""
    found = unknown_keys(values(tmp_path, "vagen", text))
    assert [(key.key, key.suggestion) for key in found] == [("critic.gradclip", "critic.grad_clip")]


def test_the_files_of_envs_take_their_keys_where_they_are_put(tmp_path: Path) -> None:
    text = "env: {train: {env_type: libero, total_num_envs: 8, init_params: {camera_heights: 64, camera_hight: 64}}}\n"
    found = unknown_keys(values(tmp_path, "rlinf", text))
    assert [key.key for key in found] == ["env.train.init_params.camera_hight"]


def test_keys_of_like_and_interpolated_sections_are_checked_too(tmp_path: Path) -> None:
    text = """\
critic: {infer_batch_size: eight, device_mapping: "list(range(0,16))"}
actor_train: {infer_batch_size: many}
reference: ${actor_train}
"""
    roll = values(tmp_path, "roll", text)
    faults = {fault.key for fault in illegal_values(roll)}
    assert faults == {"critic.infer_batch_size", "actor_train.infer_batch_size", "reference.infer_batch_size"}
    assert "critic.device_mapping" in {fault.key for fault in unsupported_keys(roll)}


def test_a_zero_is_a_zero_and_false_is_none(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {actor: {entropy_coeff: 0, kl_loss_coef: 0}}\n"
    assert list(unsupported_keys(values(tmp_path, "verl", text))) == []


def test_a_key_that_needs_an_idle_one_is_idle_too() -> None:
    """Without an engine of its own there are no CUDA graphs, whatever `enforce_eager` says."""
    engine = {"backend": "huggingface", "enforce_eager": False, "cuda_graph_max_bs": 8}
    tree = {"runner": {"task_type": "math"}, "rollout": engine}
    rlinf, _ = merge_with_reference(config_from_tree(tree), DIALECTS["rlinf"])
    assert list(unsupported_keys(rlinf)) == []
    (told,) = (line for line in ineffective_keys(rlinf) if "cuda_graph_max_bs" in line)
    assert told.endswith("rollout.backend is 'huggingface', not one of vllm, sglang")


def test_hydras_own_section_is_checked_like_any_other(tmp_path: Path) -> None:
    """What Hydra knows there is its own matter; what it doesn't know is a slip."""
    text = "hydra: {searchcpath: [], ru_n: {dir: .}, run: {dri: x}, job: {name: a}}\nrunner: {max_steps: 3}\n"
    rlinf, _ = merge_with_reference(compose_config(_file(tmp_path, text), []), DIALECTS["rlinf"])
    found = {key.key: key.suggestion for key in unknown_keys(rlinf)}
    assert set(found) == {"hydra.searchcpath", "hydra.ru_n.dir", "hydra.run.dri"}
    assert found["hydra.ru_n.dir"] == found["hydra.run.dri"] == "hydra.run.dir"


def test_a_key_without_effect_is_told(tmp_path: Path) -> None:
    """It was given a value of its own, and another key keeps it from doing anything."""
    text = "runner: {task_type: math}\nalgorithm: {entropy_bonus: 0.01}\nactor: {training_backend: fsdp}\n"
    rlinf, _ = merge_with_reference(compose_config(_file(tmp_path, text), []), DIALECTS["rlinf"])
    told = list(ineffective_keys(rlinf))
    assert len(told) == 1
    assert "entropy_bonus = 0.01" in told[0]
    assert "has no effect: algorithm.calculate_entropy is false, not true" in told[0]
    again = compose_config(_file(tmp_path, text), ["algorithm.calculate_entropy=true"])
    assert list(ineffective_keys(merge_with_reference(again, DIALECTS["rlinf"])[0])) == []


def test_a_choice_without_effect_may_be_any(tmp_path: Path) -> None:
    """RAGEN's sweeps name an estimator that verl does not know, and use no KL loss."""
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.kl_loss_type=low-var-kl", f"{actor}.use_kl_loss=false"]
    unused, _ = merge_with_reference(compose_config(None, words), DIALECTS["verl"])
    assert list(illegal_values(unused)) == []
    assert any("kl_loss_type" in remark and "has no effect" in remark for remark in ineffective_keys(unused))
    used, _ = merge_with_reference(compose_config(None, [words[0], f"{actor}.use_kl_loss=true"]), DIALECTS["verl"])
    assert [problem.key for problem in illegal_values(used)] == [f"{actor}.kl_loss_type"]


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("dialect", "tree", "words"),
    [
        ("rlinf", {"runner": {"task_type": "math"}, "cluster": {"num_nodes": 10**11}}, "cluster.num_nodes"),
        ("rlinf", {"runner": {"task_type": "math"}, "data": {"rollout_batch_size": 10**20 + 39}}, "n_minibatches"),
        ("roll", {"actor_train": {"device_mapping": f"list(range(0,{10**23}))"}}, "exceeds the maximum of"),
        ("roll", {"rollout_batch_size": 10**20 + 39}, "gradient_accumulation_steps"),
        ("verl", {"actor_rollout_ref": {}, "data": {"train_batch_size": 10**20 + 39}}, "ppo_mini_batch_size"),
    ],
)
def test_a_huge_number_is_a_message_and_no_wait(dialect: str, tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(config_from_tree(tree), DIALECTS[dialect])
