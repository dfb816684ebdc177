"""If these fail, a process that has become the controller runs its own code in the workers of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from standalone_workers import ThreadWorker

from quintet.algorithms.objective import PolicyObjective
from quintet.config.compose import load_experiment
from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.worker import Worker

EVIL = "import pathlib; pathlib.Path('{mark}').touch()\ndef loss(*_): pass\nclass Env: pass\n"
SENT = {
    "policy.trust_remote_code": "policy.trust_remote_code=true",
    "policy.trust_tokenizer_code": "policy.trust_tokenizer_code=true",
    "external_libs": "external_libs=[evil]",
    "env.path": "env={{name: custom, path: '{evil}:Env', processes: null}}",
    "reward.function": "reward.function='{evil}:loss'",
    "algorithm.loss.function": "algorithm.loss={{name: custom, function: '{evil}:loss'}}",
    "rollout.engine_options.server_python": "rollout.engine_options.server_python='{evil}'",
    "rollout.engine_options.arguments.worker_cls": "rollout.engine_options.arguments={{worker_cls: evil.Worker}}",
}


def composed(*overrides: str) -> Experiment:
    return load_experiment(None, [*overrides]).experiment


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    file = tmp_path / "evil.py"
    file.write_text(EVIL.format(mark=tmp_path / "ran"))
    return file


def worker_of(config: Experiment | None) -> WorkerConnection:
    return ThreadWorker(1, Worker(), AllowedCode(config))


@pytest.mark.parametrize("key", SENT)
def test_a_worker_refuses_code_that_its_own_command_does_not_name(evil: Path, key: str) -> None:
    worker, sent = worker_of(composed()), composed(SENT[key].format(evil=evil))
    calls = {"hosted_envs.build": {"config": sent}, "engine.build": {"config": sent, "policy": Path("/nowhere")}}
    for name, arguments in calls.items():
        with pytest.raises(MachineError, match=rf"sent {key}=.*command line of this one does not name"):
            worker.call(RemoteCall(*name.split("."), arguments))
    assert not (evil.parent / "ran").exists()
    assert worker.call(RemoteCall("worker", "close_judge_servers")) is None


def test_a_worker_that_started_without_a_configuration_runs_no_code(evil: Path) -> None:
    sent = composed(SENT["env.path"].format(evil=evil))
    with pytest.raises(MachineError, match=r"env\.path"):
        worker_of(None).call(RemoteCall("hosted_envs", "build", {"config": sent}))


def test_code_of_the_command_line_runs(evil: Path) -> None:
    config = composed(SENT["env.path"].format(evil=evil), SENT["algorithm.loss.function"].format(evil=evil))
    with pytest.raises(MachineError, match=r"lacks instruction\(\)"):
        worker_of(config).call(RemoteCall("hosted_envs", "build", {"config": config}))
    assert (evil.parent / "ran").exists()
    AllowedCode(config).check(config.algorithm)
    another = composed(SENT["env.path"].format(evil=evil.with_name("another.py")))
    with pytest.raises(MachineError, match=r"sent env\.path="):
        AllowedCode(config).check(another)


def test_an_objective_with_a_loss_of_a_file_is_refused_before_the_file_is_read(
    evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = composed(SENT["algorithm.loss.function"].format(evil=evil)).algorithm
    objective = object.__new__(PolicyObjective)
    object.__setattr__(objective, "config", named)
    call = RemoteCall("learners.actor", "update", {"objective": objective})
    with pytest.raises(MachineError, match=r"sent loss\.function="):
        worker_of(composed()).call(call)
    assert not (evil.parent / "ran").exists()


def test_the_trust_in_the_policy_is_none_in_a_reward_model() -> None:
    allowed = AllowedCode(composed("policy.trust_remote_code=true"))
    with pytest.raises(MachineError, match="trust_remote_code"):
        allowed.check(RewardModelConfig(trust_remote_code=True))


def test_a_trusted_model_is_read_from_where_the_command_line_says(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "runs" / "lake"
    settings = ("policy.preset=null", f"output_dir={tmp_path / 'runs'}", "name=lake")
    trusting = composed(f"policy={{path: {base}, trust_remote_code: true}}", *settings)
    allowed = AllowedCode(trusting)
    for path in (base, run / "checkpoints" / "global_step_3" / "hf", run / "policy"):
        allowed.check(path)
        allowed.check(trusting.model_copy(update={"policy": trusting.policy.model_copy(update={"path": str(path)})}))
    for path in (tmp_path / "evil", tmp_path, run / ".." / "evil", Path("/")):
        with pytest.raises(MachineError, match="sent directory="):
            allowed.check(path)
    with pytest.raises(MachineError, match="sent path="):
        allowed.check(composed(f"policy={{path: {tmp_path}/evil, trust_remote_code: true}}", *settings))
    AllowedCode(composed(f"policy.path={base}", *settings)).check(tmp_path / "evil")


def test_a_result_runs_no_code_in_the_controller(evil: Path) -> None:
    """A worker is no more trusted than the controller."""

    class Hostile(Worker):
        def execute(self, call: RemoteCall) -> Any:
            return composed(SENT["algorithm.loss.function"].format(evil=evil))

    with pytest.raises(MachineError, match=r"algorithm\.loss\.function"):
        ThreadWorker(1, Hostile()).call(RemoteCall("engine", "step", {"requests": []}))
    assert not (evil.parent / "ran").exists()
