"""If these fail, a run goes on from other files than it was told to, or can't go on at all."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from quintet.config.compose import load_experiment
from quintet.config.plan.disk import LOG_BYTES
from quintet.config.plan.run_plan import planned_disk
from quintet.errors import ConfigError, MachineError
from quintet.pipelines import rl
from quintet.pipelines.rl import train
from quintet.tracking.metric_columns import read_columns
from quintet.tracking.metrics import without_timing
from quintet.training.checkpoint.checkpoint import MANIFEST_FILE, STATE_FILE

Run = Callable[..., Path]
COMMON = (
    "training.steps=2",
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "warm_start={episodes: 20, updates: 1, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "algorithm.advantage.name=gae",
    "validation.episodes=2",
    "validation.every_steps=0",
    "checkpoint.every_steps=1",
    "tracking.loggers=[jsonl]",
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A whole run; gives its directory. What it said lies in `said`."""

    def start(*overrides: str, name: str = "a") -> Path:
        console_output = io.StringIO()
        try:
            train(
                load_experiment(None, (*COMMON, f"output_dir={tmp_path}", f"name={name}", *overrides)),
                Console(file=console_output, width=200),
            )
        finally:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "said").write_text(console_output.getvalue())
        return tmp_path / name

    return start


@pytest.fixture
def store() -> str:
    """An empty store that is no directory."""
    system = fsspec.filesystem("memory")
    if system.exists("/runs"):
        system.rm("/runs", recursive=True)
    return "memory://runs/mine"


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step_{step}"


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in (run / "checkpoints").glob("global_step_*"))


def policy(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(run, step) / "hf/model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def metrics(run: Path) -> list[dict[str, Any]]:
    return [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def console_output(run: Path) -> str:
    return (run / "said").read_text()


def optimizer(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(run, step) / "actor/optim_world_size_1_rank_0.safetensors")


def test_what_a_checkpoint_holds_is_chosen(run: Run) -> None:
    place = checkpoint(run("checkpoint.contents=[model, hf_model]"), 2)
    assert not list(place.glob("actor/optim*"))
    assert (place / "actor/huggingface").resolve() == (place / "hf").resolve(), "where verl's scripts look"
    assert "starts" not in json.loads((place / "state.json").read_text())
    place = checkpoint(run("checkpoint.contents=[optimizer, extra]", name="b"), 2)
    assert not list(place.glob("actor/model*"))
    assert (place / "hf/model.safetensors").exists(), "the model for transformers always lies there"


def test_what_is_read_is_chosen(run: Run, tmp_path: Path) -> None:
    whole = run("checkpoint.keep=9")
    resume = f"resume={checkpoint(whole, 1)}"
    everything = run(resume, name="everything")
    assert equal(policy(everything, 2), policy(whole, 2))
    fresh = run(resume, "checkpoint.load_contents=[model, extra]", name="fresh")
    count = next(name for name in optimizer(whole, 2) if name.endswith(".step"))
    # one mini-batch a step, and the warm start has an optimizer of its own
    assert (float(optimizer(fresh, 2)[count]), float(optimizer(whole, 2)[count])) == (1.0, 2.0)
    rates = [
        metrics(place)[-1]["actor/lr"] for place in (whole, run(resume, "checkpoint.load_contents=[model]", name="c"))
    ]
    assert rates[1] == metrics(whole)[-2]["actor/lr"] != rates[0], "without `extra` the schedule begins anew"
    shutil.rmtree(checkpoint(whole, 1) / "actor")
    with pytest.raises(MachineError, match="damaged: actor/"):
        run(resume, name="d")


def test_weights_from_the_model_that_others_read(run: Run) -> None:
    alone = "algorithm.advantage.name=reinforce_plus_plus"  # without a critic, which has no such form
    whole = run(alone, "checkpoint.contents=[optimizer, extra]", "checkpoint.keep=9")
    assert not equal(policy(whole, 2), policy(whole, 1))
    resume = f"resume={checkpoint(whole, 1)}"
    taken = run(resume, alone, "checkpoint.load_contents=[hf_model, optimizer, extra]", name="taken")
    assert equal(policy(taken, 2), policy(whole, 2))
    assert equal(policy(run(resume, alone, name="default"), 2), policy(whole, 2))
    with pytest.raises(ConfigError, match=r"names model, but .* has only optimizer, extra") as error:
        run(resume, alone, "checkpoint.load_contents=[model]", name="refused")
    assert error.value.key == "checkpoint.load_contents"


def test_critic_and_reference_come_back_where_the_policy_comes_from_the_model_that_others_read(run: Run) -> None:
    kept = ("checkpoint.contents=[optimizer, extra]", "checkpoint.keep=9", "algorithm.kl={coefficient: 0.1}")
    whole = run(*kept)
    again = run(*kept, f"resume={checkpoint(whole, 1)}", name="again")
    for stem in ("critic/model", "critic/optim", "reference/model"):
        held = [load_file(checkpoint(place, 2) / f"{stem}_world_size_1_rank_0.safetensors") for place in (whole, again)]
        assert equal(*held), stem
    assert metrics(again)[-1] == metrics(whole)[-1]


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights."""
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def test_weights_that_the_run_began_with(run: Run) -> None:
    made = run("training.steps=1")
    begun = [f"policy.path={checkpoint(made, 0) / 'hf'}", "policy.preset=null", "warm_start=null"]
    begun += ["actor.optimizer.warmup_steps=0", "actor.optimizer.schedule=constant"]
    first = run(*begun, "training.steps=1", name="b")
    assert not equal(policy(first, 1), policy(first, 0))
    resume = (*begun, f"resume={checkpoint(first, 1)}")
    anew = run(*resume, "checkpoint.load_contents=[extra]", name="c")
    further = run(*resume, "checkpoint.load_contents=[hf_model]", name="d")
    steps = [far(policy(place, 2), policy(first, at)) for place, at in ((anew, 0), (further, 1))]
    assert 0 < steps[0] < 1.1e-3, "one step of Adam from where the run began"
    assert 0 < steps[1] < 1.1e-3, "one step from the checkpoint"
    with pytest.raises(ConfigError, match=r"policy\.path") as error:
        run(f"resume={checkpoint(made, 1)}", "checkpoint.load_contents=[extra]", name="e")
    assert error.value.key == "checkpoint.load_contents"


def test_a_checkpoint_goes_once_the_run_went_on_from_it(run: Run) -> None:
    first = run("training.steps=1", "checkpoint.keep=9")
    assert steps(first) == [0, 1]
    run("checkpoint.keep=9", "checkpoint.delete_after_load=true")
    assert steps(first) == [0, 2]


@pytest.mark.parametrize("kind", ["memory", "path"])
def test_a_run_goes_on_elsewhere_from_the_copies_in_a_store(run: Run, store: str, tmp_path: Path, kind: str) -> None:
    address = store if kind == "memory" else str(tmp_path / "copies")
    overrides = [f"checkpoint.remote_dir={address}", "checkpoint.keep=1"]
    whole = run(*overrides, "checkpoint.remote_dir=null", name="whole")
    first = run(*overrides, "training.steps=1")
    system, path = fsspec.core.url_to_fs(address)
    assert system.cat_file(f"{path}/latest_checkpointed_iteration.txt") == b"1"
    assert system.exists(f"{path}/global_step_0/manifest.json"), "nothing is removed there"
    shutil.rmtree(first)
    again = run(*overrides)
    assert "fetched global_step_1 from" in console_output(again)
    assert equal(policy(again, 2), policy(whole, 2))
    assert metrics(again) == metrics(whole)[2:]


def test_a_torn_copy_is_refused_by_name_and_the_one_before_taken(run: Run, store: str) -> None:
    overrides = (f"checkpoint.remote_dir={store}", "checkpoint.keep=1")
    first = run(*overrides, "training.steps=2")
    system, path = fsspec.core.url_to_fs(store)
    system.rm(f"{path}/global_step_2/manifest.json")
    name = f"{path}/global_step_1/hf/model.safetensors"
    system.pipe_file(name, system.cat_file(name)[:-1])
    shutil.rmtree(first)
    again = run(*overrides)
    assert "skipping checkpoint global_step_2: its upload was not completed" in console_output(again)
    assert "skipping checkpoint global_step_1: hf/model.safetensors has" in console_output(again)
    assert "fetched global_step_0" in console_output(again)


def test_an_address_that_nobody_knows_is_told_before_anything_is_done(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.remote_dir = nowhere://x") as error:
        run("checkpoint.remote_dir=nowhere://x")
    assert error.value.key == "checkpoint.remote_dir"


def test_a_store_that_refuses_ends_the_run_and_not_its_checkpoints(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot copy .*global_step_\d"):
        run("checkpoint.remote_dir=/proc/nowhere")
    assert steps(tmp_path / "a")


@pytest.mark.attack
def test_names_in_a_store_cant_reach_outside_a_checkpoint(run: Run, store: str, tmp_path: Path) -> None:
    overrides = (f"checkpoint.remote_dir={store}", "training.steps=1")
    first = run(*overrides)
    system, path = fsspec.core.url_to_fs(store)
    for step in (0, 1):
        name = f"{path}/global_step_{step}/manifest.json"
        manifest = {"../../escaped": {"size": 1, "sha256": ""}, **json.loads(system.cat_file(name))}
        system.pipe_file(name, json.dumps(manifest).encode())
    shutil.rmtree(first)
    with pytest.raises(MachineError, match="is outside the checkpoint"):
        run(*overrides)
    assert not list(tmp_path.rglob("escaped"))


def test_copies_dont_take_the_place_of_the_checkpoints(run: Run, tmp_path: Path) -> None:
    overrides = ("training.steps=1", "checkpoint.keep=1")
    before = policy(run(*overrides), 1)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for address in (f"{tmp_path}/a/checkpoints/", f"file://{tmp_path}/link/checkpoints"):
        with pytest.raises(ConfigError, match=r"checkpoint\.remote_dir = .* is the run's own checkpoint directory"):
            run(*overrides, "training.steps=2", f"checkpoint.remote_dir={address}")
    assert equal(policy(tmp_path / "a", 1), before)


@pytest.mark.parametrize("error", [OSError("broken pipe"), type("Unsigned", (Exception,), {})("no credentials")])
def test_a_copy_that_failed_is_made_by_the_same_command(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    system, path = fsspec.core.url_to_fs(store)
    put = type(system).put_file

    def refuse(self: Any, source: str, target: str, **named: Any) -> Any:
        if "global_step_2/hf/model" in target:
            raise error
        return put(self, source, target, **named)

    monkeypatch.setattr(type(system), "put_file", refuse)
    overrides = (f"checkpoint.remote_dir={store}", "checkpoint.keep=1")
    with pytest.raises(MachineError, match=r"cannot copy .*global_step_2 to memory"):
        run(*overrides)
    assert not system.exists(f"{path}/global_step_2/manifest.json")
    monkeypatch.undo()
    own = run(*overrides)
    assert system.cat_file(f"{path}/global_step_2/manifest.json") == (checkpoint(own, 2) / "manifest.json").read_bytes()
    system.rm(f"{path}/global_step_2", recursive=True)
    assert "Nothing to do" in console_output(run(*overrides))
    assert system.exists(f"{path}/global_step_2/manifest.json"), "a finished run's, too"


@pytest.mark.parametrize(
    "overrides", [("training.steps=1",), ("env.processes=2",), ("env.service.urls=http://127.0.0.1:1",)]
)
def test_a_finished_run_is_not_resumed_for_fewer_steps_or_a_setting_without_effect(
    run: Run, overrides: tuple[str, ...]
) -> None:
    run()
    text = console_output(run(*overrides))
    assert "is finished: 2 steps. Nothing to do." in text
    assert "resuming" not in text


def test_a_run_does_not_continue_under_another_protocol_of_its_env_service(run: Run) -> None:
    run()
    with pytest.raises(ConfigError, match=r"env\.service\.protocol = 'vagen', but"):
        run("env.service={urls: ['http://127.0.0.1:1'], protocol: vagen}")


def test_an_earlier_runs_copies_arent_taken_for_those_of_one_that_began_anew(run: Run, store: str) -> None:
    overrides = (f"checkpoint.remote_dir={store}", "checkpoint.keep=1")
    run(*overrides)
    anew = run(*overrides, "resume=never", "training.steps=1")
    shutil.rmtree(anew)
    assert "fetched global_step_1" in console_output(run(*overrides, "training.steps=1"))


def test_a_run_that_goes_on_asks_for_the_room_that_it_still_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("training.steps=1")
    held = sum(file.stat().st_size for file in (first / "checkpoints").rglob("*") if file.is_file())
    free = LOG_BYTES + planned_disk(load_experiment(None, COMMON)).total - held
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    run()
    assert steps(first) == [1, 2]
    with pytest.raises(ConfigError, match=r"checkpoint\.keep = 2 .*3 checkpoints of up to .*free\n.*output_dir="):
        run(name="b")


def test_a_finished_run_that_gets_more_steps_is_running_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = run("training.steps=1")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rl, "finish", die)
    with pytest.raises(KeyboardInterrupt):
        run("training.steps=2")
    assert json.loads((place / "run.json").read_text())["status"] == "running"
    assert "\n  steps: 2 " in (place / "config.yaml").read_text()
    monkeypatch.undo()
    (place / "report.html").unlink()
    run("training.steps=2")
    assert (place / "report.html").is_file(), "it wasn't through"


def test_a_checkpoint_with_former_key_names_is_resumed(run: Run) -> None:
    """The configuration in the checkpoint and in the run directory has the key names of an earlier version."""
    place = run("training.steps=1")
    state_file = place / "checkpoints" / "global_step_1" / STATE_FILE
    state = json.loads(state_file.read_text())
    experiment = state["experiment"]
    experiment["world"], experiment["worlds"] = experiment.pop("env"), experiment.pop("envs")
    experiment["validation"]["games"] = experiment["validation"].pop("episodes")
    state_file.write_text(json.dumps(state))
    manifest_file = state_file.with_name(MANIFEST_FILE)
    manifest = json.loads(manifest_file.read_text())
    content = state_file.read_bytes()
    manifest[STATE_FILE] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest_file.write_text(json.dumps(manifest))
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(text.replace("\nenv:", "\nworld:").replace("\n  episodes:", "\n  games:"))
    run("training.steps=2")
    assert read_columns(place / "metrics.jsonl").steps[-1] == 2
