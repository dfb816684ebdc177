"""If these fail, a hint about checkpoints, dtypes or a server leads nowhere."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from env_services import env_service
from hint_cases import HintCase, case, name_of, sites_without_case
from safetensors.torch import save_file

from quintet.config.compose import load_experiment
from quintet.config.torchrun import RankInfo
from quintet.policies.model_loading import load_model
from quintet.runtime.dtypes import stored_dtype
from quintet.runtime.embodied import rollout_runner
from quintet.runtime.engines.engine_builders import load_checked_tokenizer
from quintet.runtime.engines.engine_weights import checked_transfer
from quintet.runtime.http_service.address import Address
from quintet.runtime.learners import learner_checkpoint, megatron_backend
from quintet.runtime.ray_cluster import launcher
from quintet.runtime.serving import build
from quintet.runtime.serving.app import ServingServer
from quintet.training.checkpoint.checkpoint import Checkpoint


def typed(settings: Mapping[str, Any]) -> None:
    """The dtype of a stored model, unless another one is set."""
    Path("stored").mkdir(exist_ok=True)
    config = Path("stored/config.json")
    config.unlink(missing_ok=True)
    if "dtype" in settings:
        config.write_text(json.dumps({"dtype": settings["dtype"]}))
    if settings.get("policy.dtype", "auto") == "auto":
        stored_dtype("stored", "policy.dtype")


def tokenized(overrides: Sequence[str]) -> None:
    """A model with a vocabulary of a token less than the other tokenizer has."""
    config = load_experiment(None, [*overrides]).experiment
    load_checked_tokenizer(config, Path("model"), 420 if config.policy.tokenizer is None else 10)


def loaded(requested: Sequence[str]) -> None:
    """Contents of a checkpoint that has no optimizer."""
    checkpoint = Checkpoint(Path("saved"), 1, {"contents": ["model"]})
    learner_checkpoint.contents_to_load(checkpoint, requested)


def adapted(contents: Sequence[str]) -> None:
    """A policy with adapters from a checkpoint with these contents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_checkpoint, "read_adapters", lambda *_: [])
        patch.setattr(learner_checkpoint, "restore_learner", lambda *_: None)
        learner_checkpoint.restore_adapters(MagicMock(), Path("saved"), contents)


def on_megatron(contents: Sequence[str]) -> None:
    """A Megatron learner from a checkpoint that has none."""
    learner: Any = SimpleNamespace()
    Path("saved").mkdir(exist_ok=True)
    megatron_backend.restore_full_state(learner, Path("saved"), "actor", contents)


def fitting(directory: str) -> None:
    """The weights of a directory in a learner of the model."""

    def load(weights: Mapping[str, Any]) -> None:
        for name, _ in load_model("model").named_parameters():
            weights[name]

    megatron_backend.restore_from_directory(SimpleNamespace(load_weights=load), Path(directory))


def reachable(host_and_token: tuple[str, str | None]) -> None:
    host, token = host_and_token
    Address(host, 8000, token).check()


def served(directory: str) -> None:
    """The model that vLLM would load itself."""
    build._model(load_experiment(None, ["rollout.engine=vllm"]).experiment, Path(directory))


def with_context(tokens: int) -> None:
    build._context(load_experiment(None, []).experiment, load_model("model"), tokens, 2048)


def listening(port: int | None) -> None:
    """A server at a port; None is one that is in use."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        used = other.getsockname()[1]
        ServingServer(MagicMock(), Address("127.0.0.1", used if port is None else port)).close()


def serving_envs(port_and_env: tuple[int | None, str]) -> None:
    """An environment service at a port; None is one that is in use."""
    port, env = port_and_env
    Path("lake.py").write_text("from quintet.envs.frozenlake import FrozenLake as Lake\n")
    with closing(socket.create_server(("127.0.0.1", 0))) as other, closing(ExitStack()) as stack:
        stack.enter_context(env_service(env, port=other.getsockname()[1] if port is None else port))


def on_a_cluster(nodes_and_devices: tuple[int, int]) -> None:
    """Ranks on a cluster of a node with two GPUs."""
    ray: Any = pytest.importorskip("ray")
    nodes, devices = nodes_and_devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 2.0, "CPU": 8.0}}])
        launcher._resources_per_node(
            launcher.RankCommand([], "", RankInfo(0, nodes * devices, 0, devices), 0, 0, lambda _: None)
        )


def transferred(transfer: str) -> None:
    """Weights for a worker of another machine."""
    config = load_experiment(None, [f"placement.weight_transfer={transfer}"]).experiment
    checked_transfer(config, MagicMock(host="another machine"))


def moved(dimensions: int) -> None:
    """Robots of two dimensions, by a policy."""
    policy: Any = SimpleNamespace(action_dim=dimensions, robot_action_dim=dimensions)
    rollout_runner._check_action_dim(policy, 2)


CASES = [
    case(moved, 3, "use a policy for this robot, or set policy.vla.action_dim=2", 2),
    case(transferred, "shared_memory", "set placement.weight_transfer=auto", "auto"),
    case(
        typed,
        {},
        "restore that file; it is needed even if the run resumes from a checkpoint",
        {"dtype": "float32"},
        {"dtype": "float16"},
    ),
    case(
        typed,
        {"dtype": "float8_e4m3fn"},
        "policy.dtype=float32, or policy.dtype=bfloat16, or policy.dtype=float16",
        *({"dtype": "float8_e4m3fn", "policy.dtype": name} for name in ("float32", "bfloat16", "float16")),
    ),
    case(tokenized, ["policy.tokenizer=model"], "use the model's own tokenizer: policy.tokenizer=null", []),
    # checkpoints
    case(loaded, ["model", "optimizer"], "remove optimizer from it, or use a checkpoint that was", ["model"]),
    case(adapted, ["hf_model"], "add model to checkpoint.load_contents; ", ["model", "hf_model"]),
    case(on_megatron, ["model"], "remove model from checkpoint.load_contents", []),
    case(fitting, "other", "use a checkpoint of the same model", "model"),
    # serving
    case(
        reachable,
        ("0.0.0.0", None),
        "set the environment variable QUINTET_TOKEN, or listen on 127.0.0.1",
        ("0.0.0.0", "sesame"),
        ("127.0.0.1", None),
    ),
    case(served, "empty", "use a directory in Hugging Face format", "model"),
    case(with_context, 9999, "use 512 or less", 512),
    case(listening, None, "use another --port; 0 selects a free one", 0),
    case(serving_envs, (None, "frozenlake"), "use another --port; 0 selects a free one", (0, "frozenlake")),
    case(
        serving_envs,
        (0, "frozenlak"),
        "did you mean frozenlake? it has ",
        (0, "frozenlake"),
        (0, "sokoban"),
        (0, "lake.py:Lake"),
    ),
    # Ray
    case(
        on_a_cluster,
        (2, 4),
        "change placement.nodes and placement.devices_per_node, or add nodes to the cluster",
        (1, 2),
    ),
]
EXEMPT = (
    {"runtime/judge_servers.py _visible_gpu": "the machine needs GPUs"}
    | {
        f"runtime/ray_cluster/launcher.py {function}": "another machine, another run or another start is the remedy"
        for function in ("run_on_ray", "_connected", "_placed", "_start_ranks")
    }
    | {
        f"runtime/ray_cluster/job.py {function}": "another endpoint, or another command, is the remedy"
        for function in ("_submit", "_refused", "_lost")
    }
    | {"runtime/calls/transport.py translate_worker_errors": "the hint is that of the error in the worker"}
    | {
        f"runtime/{function}": "another start of processes is the remedy"
        for function in (
            "engines/engine_group.py _revive_dead",
            "engines/remote_engines.py _finish_first_build",
            "judge_servers.py wait_until_ready",
            "http_service/server.py __init__",
            "env_service/worker_pool.py check_platform",
            "calls/code_check.py check",
            "calls/handshake.py send_hello",
            "calls/listener.py wait_for",
            "calls/messages.py _decode_error",
            "calls/run_secret.py taken_from_environment",
            "calls/run_secret.py find",
            "calls/run_secret.py create",
            "calls/run_secret.py _check_private",
        )
    }
)


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    for name in ("other", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, tmp_path / "other/model.safetensors")


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_of_a_running_component_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_of_a_running_component_is_followed() -> None:
    assert not sites_without_case("runtime", CASES, EXEMPT)
