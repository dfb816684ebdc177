"""If these fail, a hint about a policy of robots leads nowhere: somebody follows it and gets the same error again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hint_cases import HintCase, case, name_of, sites_without_case
from robot_policies import build_action_policy
from tests.support.openvla_directories import write_openvla_directory
from tests.support.robot_policies import observe, robot_experiment

from quintet.embodied_records import ActionSampling
from quintet.policies.vla.build import load_action_policy
from quintet.policies.vla.robot_actions import robot_settings

KEY, ACTION_KEY = "policy.vla.normalization_key", "policy.vla.action_dim"
VLA: dict[str, Any] = {"action_dim": 3, "action_chunk": 1, "normalization_key": "libero_spatial"}
SMALL = {"layers": 1, "bins": 8, "hidden": 32, "heads": 2}


def built(policy: Mapping[str, Any]) -> None:
    build_action_policy(robot_experiment({"overrides": {}, **policy}))


def instructed(tokens: int) -> None:
    """Encode an instruction with a limit of the prompt."""
    config = robot_experiment({"preset": "arm-vla", "overrides": SMALL}, rollout={"max_prompt_tokens": tokens})
    build_action_policy(config).prepare(observe(1, ["zzzzzz"]))


def loaded(policy: Mapping[str, Any]) -> None:
    """Load a directory, and act with two cameras and four values of state."""
    section = {"preset": None, "kind": "openvla_oft", "path": "published", **policy}
    section["vla"] = {**VLA, **policy.get("vla", {})}
    config = robot_experiment(section, rollout={"max_prompt_tokens": 90})
    model = load_action_policy(Path(section["path"]), config)
    sample = model.sample(model.prepare(observe(1)), None, ActionSampling())
    model.to_robot_actions(sample.actions)


def with_state(settings: Mapping[str, Any]) -> None:
    """Prepare the state of robots that have four values."""
    policy = build_action_policy(robot_experiment({"preset": "state-mlp", "vla": dict(settings)}))
    policy.prepare(observe(1))


def with_proprioception(settings: Mapping[str, Any]) -> None:
    section = {"preset": "arm-vla", "overrides": SMALL, "vla": dict(settings)}
    build_action_policy(robot_experiment(section)).prepare(observe(1))


def with_head(name: str) -> None:
    """Load a regression head from a file."""
    vla = {"action_head": "l1", "normalization_key": "bridge_orig"}
    loaded({"path": name, "vla": vla})


def for_setup(setup: str) -> None:
    robot_settings("maniskill", setup, 7)


DIRECTORY = "use a directory of an action policy"
SIZES = "policy.overrides"
CASES = [
    case(built, {"preset": "grid-1m"}, "set policy.preset=arm-vla or", {"preset": "arm-vla"}, {"preset": "state-mlp"}),
    case(
        built,
        {"preset": "arm-vla", "overrides": {"bin": 4}},
        f"did you mean {SIZES}.bins?",
        {"preset": "arm-vla", "overrides": {"bins": 4}},
    ),
    case(
        built,
        {"preset": "arm-vla", "overrides": {"zzz": 4}},
        "valid sizes: hidden,",
        {"preset": "arm-vla", "overrides": {"hidden": 64}},
    ),
    case(with_proprioception, {"image_size": (16, 32)}, "set policy.vla.image_size=[16, 16]", {"image_size": (16, 16)}),
    case(with_proprioception, {"vocabulary": 99}, "set policy.vla.vocabulary=null", {"vocabulary": None}),
    case(instructed, 4, "set rollout.max_prompt_tokens=", 7),
    case(with_state, {"state_dim": 9}, "set policy.vla.state_dim=4, or", {"state_dim": 4}),
    case(
        with_proprioception,
        {"state_dim": 9, "use_proprioception": True},
        "use a policy for this robot, or policy.vla.use_proprioception=false",
        {"state_dim": 9, "use_proprioception": False},
    ),
    case(
        for_setup,
        "google_robot",
        "policy.vla.policy_setup=widowx_bridge, or policy.vla.policy_setup=panda-qpos, or ",
        *("widowx_bridge", "panda-qpos", "panda-ee-dpose"),
    ),
    case(loaded, {"vla": {"images": 3}}, "set policy.vla.images=2", {"vla": {"images": 2}}),
    case(loaded, {"vla": {"normalization_key": "libero_spatia"}}, "did you mean 'libero_spatial_no_noops'?", {}),
    case(loaded, {"vla": {"normalization_key": None}}, "valid values: bridge_orig, libero_spatial_no_noops", {}),
    case(loaded, {"path": "no_statistics"}, "the directory of the policy has no statistics: copy its dataset_", {}),
    case(loaded, {"vla": {"action_dim": 7}}, f"set {ACTION_KEY}=3", {"vla": {"action_dim": 3}}),
    case(loaded, {"vla": {"hidden_size": 9}}, "set policy.vla.hidden_size=16", {"vla": {"hidden_size": 16}}),
    case(loaded, {"kind": "openvla_of"}, "did you mean 'openvla_oft'?", {"kind": "openvla_oft"}),
    case(loaded, {"kind": None}, "set policy.kind to one of openvla, openvla_oft", {"kind": "openvla"}),
    case(loaded, {"overrides": {"n_action_bin": 9}}, f"did you mean {SIZES}.n_action_bins?", {}),
    case(loaded, {"overrides": {"zzzz": 9}}, f"remove {SIZES}.zzzz", {}),
    case(loaded, {"path": "nowhere"}, DIRECTORY, {}),
    case(loaded, {"path": "list"}, DIRECTORY, {}),
    case(loaded, {"path": "text"}, "use a directory of OpenVLA-OFT or OpenVLA", {}),
    case(loaded, {"path": "other_tower"}, "use a policy with vit_large_patch14_reg4_dinov2.lvd142m and", {}),
    case(loaded, {"path": "letterbox"}, "use a policy that was trained with resize-naive", {}),
    case(loaded, {"path": "damaged"}, "copy the files of the policy again", {}),
    case(loaded, {"vla": {"action_head": "l1"}}, "use the directory of a policy of this kind, or another", {}),
    case(with_head, "no_head", "use the file of the published policy", "with_head"),
    case(with_head, "other_head", "use the file of the published policy", "with_head"),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of policies, of which some cannot be loaded."""
    path = tmp_path_factory.mktemp("policies")
    names = ("published", "damaged", "no_head", "other_head", "with_head", "other_tower", "letterbox", "no_statistics")
    for name in names:
        write_openvla_directory(path / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        (path / "damaged/model-00001-of-00003.safetensors").write_bytes(b"0")
        (path / "no_statistics/dataset_statistics.json").unlink()
        _change(path / "no_statistics/config.json", norm_stats={})
        (path / "no_head/action_head--9_checkpoint.pt").write_bytes(b"0")
        _change(path / "other_tower/config.json", vision_towers=None, timm_model_ids=["vit_tiny"])
        _change(path / "letterbox/preprocessor_config.json", image_resize_strategy="letterbox")
        torch.save({"model.fc9.weight": torch.zeros(1)}, path / "other_head/action_head--9_checkpoint.pt")
        torch.save(_head(), path / "with_head/action_head--9_checkpoint.pt")
        for name, text in {"list": "[]", "text": '{"model_type": "qwen2"}'}.items():
            (path / name).mkdir()
            (path / name / "config.json").write_text(text)
    return path


def _change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def _head() -> dict[str, torch.Tensor]:
    from quintet.policies.vla.openvla_config import OpenVlaConfig
    from quintet.policies.vla.openvla_modules import RegressionHead

    text = {"hidden_size": 16, "num_attention_heads": 2}
    return RegressionHead(OpenVlaConfig(text_config=text, action_dim=3)).state_dict()


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_following_a_hint_makes_it_work(entry: HintCase, directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directories)
    entry.check()


def test_every_hint_about_policies_of_robots_is_followed(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directories)
    assert sites_without_case("policies/vla", CASES, ()) == []
