"""If these fail, the first command of the README fails, or a stopped run isn't the run it would have been."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from paused_runs import stop_run, wait_for
from tests.system.conftest import SMALL, run_quintet

from quintet.tracking.metrics import describe, without_timing

Command = Any


def metrics(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines that have to be equal in two runs of one experiment: times and memory left out."""
    return [without_timing(json.loads(line)) for line in (run / file).read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, str]:
    directory = run / "checkpoints" / f"global_step_{step}"
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in directory.rglob("*.safetensors")
    }


@pytest.mark.parametrize("advantage", ["grpo", "gae", "bi_level_gae"])
def test_a_run_leaves_what_it_promises(quintet: Command, small: Path, tmp_path: Path, advantage: str) -> None:
    done = quintet("train", str(small), f"algorithm.advantage.name={advantage}")
    run = tmp_path / "runs/small"
    assert "before RL" in done.stdout
    assert "success" in done.stdout
    states = json.loads((run / "keys.json").read_text())
    assert {"name", "training.steps", "algorithm.advantage.name"} <= {each["key"] for each in states}
    honoured = sum(each["state"] == "honoured" for each in states)
    assert f"keys: {honoured} honoured" in done.stdout
    assert "see runs/small/keys.json" in done.stdout
    for name in ("config.yaml", "metrics.jsonl", "report.html", "checkpoints/global_step_4/hf/model.safetensors"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").glob("events.*"))
    assert (run / "trajectories/validation/step_000004.jsonl").read_text().count("\n") == 16
    assert (run / "trajectories/train/step_000002.jsonl").read_text().count("\n") == 16
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert list(lines[1])[:2] == ["step", "time_seconds"]
    for name in set(lines[-1]) - {"step", "time_seconds"}:
        describe(name)
    assert lines[1]["training/rollout_probs_diff_max"] < 1e-4
    assert ("critic/vf_loss" in lines[1]) == (advantage != "grpo")
    assert "val/frozenlake/success_rate" in lines[0]
    assert "val/frozenlake/success_rate" in lines[2]


def trace_names(path: Path) -> dict[str, set[str]]:
    """Return the names of the spans, requests and counters of a trace by track."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    names: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] != "M":
            names.setdefault(tracks[event["tid"]] if event["ph"] == "X" else event["name"], set()).add(event["name"])
    return names


def test_a_profiled_step_has_a_trace_of_everything_it_does(quintet: Command, small: Path, tmp_path: Path) -> None:
    profile = "tracking.profile={steps: [2], torch: {}}"
    overrides = ("training.steps=2", "env.processes=2", "validation.before_training=false", profile)
    quintet("train", str(small), *overrides)
    directory = tmp_path / "runs/small/profile"
    assert sorted(path.name for path in directory.iterdir()) == [
        "step_000002_rank_0.json",
        "step_000002_rank_0.torch.json.gz",
    ]
    names = trace_names(directory / "step_000002_rank_0.json")
    phases = {"step", "gen", "update_actor", "sync_weights", "testing"}
    assert phases | {"learners.actor.update", "forward_backward", "agent_loop"} <= names["MainThread"]
    assert {"step", "forward", "sample", "load_weights"} <= names["engine 0"]
    for number in (1, 2):
        assert {"reset", "step"} <= names[f"frozenlake worker {number}"]
    assert {"requests of engine 0", "memory, MiB"} <= names.keys()
    operators = gzip.decompress((directory / "step_000002_rank_0.torch.json.gz").read_bytes())
    recorded = {event.get("name") for event in json.loads(operators)["traceEvents"]}
    assert {"update_actor", "aten::mm"} <= recorded


def test_the_policy_loads_with_nothing_of_ours(quintet: Command, small: Path, tmp_path: Path) -> None:
    quintet("train", str(small), "training.steps=1")
    code = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
text = "Ordinary text, ünïcödé and 漢字 too."
assert tokenizer.decode(tokenizer.encode(text)) == text
for symbol in (" P", " _", " O", " G", " #"):
    assert len(tokenizer.encode(symbol)) == 1, symbol
messages = [{"role": "user", "content": " P"}]
chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
model.generate(**chat, max_new_tokens=3)
assert "quintet" not in sys.modules
"""
    directory = tmp_path / "runs/small/checkpoints/global_step_1/hf"
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=120, cwd=tmp_path)


def test_adapters_lie_beside_the_merged_model_as_peft_stores_them(
    quintet: Command, small: Path, tmp_path: Path
) -> None:
    overrides = ["training.steps=1", "policy.lora={rank: 4, alpha: 8}", "policy.dtype=bfloat16"]
    quintet("train", str(small), *overrides)
    code = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, checkpoint = sys.argv[1:]
merged = AutoModelForCausalLM.from_pretrained(f"{checkpoint}/hf")
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{checkpoint}/lora_adapter")
plain = AutoModelForCausalLM.from_pretrained(base)
tokens = torch.arange(40)[None]
gap = lambda other: float((other(tokens).logits - merged(tokens).logits).abs().max())
assert gap(adapted) < 1e-4 < gap(plain), (gap(adapted), gap(plain))
assert "quintet" not in sys.modules
"""
    run = tmp_path / "runs/small"
    arguments = [str(run / "policy"), str(run / "checkpoints/global_step_1")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120, cwd=tmp_path)


def test_a_finished_run_says_so_and_does_nothing(quintet: Command, small: Path, tmp_path: Path) -> None:
    quintet("train", str(small), "training.steps=1")
    before = (tmp_path / "runs/small/metrics.jsonl").read_bytes()
    done = quintet("train", str(small), "training.steps=1")
    assert "finished" in done.stdout
    assert (tmp_path / "runs/small/metrics.jsonl").read_bytes() == before


def start(small: Path, directory: Path, *overrides: str) -> subprocess.Popen[bytes]:
    log = (directory / "log").open("ab")
    command = [sys.executable, "-m", "quintet", "train", str(small), *overrides]
    return warm_processes.Popen(command, cwd=directory, stdout=log, stderr=log)


STEERED = "algorithm.kl={place: reward, coefficient: 0.1, target: 0.01, horizon: 50, refresh_every_steps: 3}"

STREAMED = "rollout.async_ratio=0.5;rollout.partial=true;checkpoint.every_steps=2;training.steps=7"
STREAMED += ";tracking.trajectories_every_steps=1"
"""Episodes outlast their step, and a stop falls between two checkpoints."""
ADAPTED = "policy.lora={rank: 4, alpha: 8};algorithm.kl={coefficient: 0.01};policy.dtype=bfloat16"
"""Adapters alone are trained, and the reference is the same model with those of the beginning."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a run with these settings that never stops; each is trained once."""

    @cache
    def train(choice: str) -> Path:
        directory = tmp_path_factory.mktemp("whole")
        (directory / "small.yaml").write_text(SMALL)
        run_quintet(directory, "train", "small.yaml", *choice.split(";"), "name=whole")
        return directory / "runs/whole"

    return train


@pytest.mark.parametrize(
    ("how", "choice"),
    [
        (signal.SIGKILL, "algorithm.advantage.name=grpo"),
        (signal.SIGTERM, "algorithm.advantage.name=grpo"),
        (signal.SIGINT, "algorithm.advantage.name=grpo"),
        (signal.SIGKILL, "algorithm.advantage.name=gae"),
        (signal.SIGKILL, STEERED),
        (signal.SIGTERM, STREAMED),
        (signal.SIGKILL, STREAMED),
        (signal.SIGKILL, ADAPTED),
    ],
)
def test_a_stopped_run_ends_as_one_that_never_stopped(
    quintet: Command,
    small: Path,
    tmp_path: Path,
    whole_run: Callable[[str], Path],
    how: signal.Signals,
    choice: str,
) -> None:
    words = choice.split(";")
    before = "trajectories/train/step_000003.jsonl" if choice is STREAMED else "checkpoints/global_step_2"
    command = ["train", str(small), *words, "name=stopped"]
    status, output = stop_run(command, tmp_path, f"runs/stopped/{before}", how)
    assert status == (-signal.SIGKILL if how is signal.SIGKILL else 128 + how)
    assert "Traceback" not in output
    again = quintet("train", str(small), *words, "name=stopped")
    assert "resuming from" in again.stdout
    whole, stopped = whole_run(choice), tmp_path / "runs/stopped"
    assert metrics(whole) == metrics(stopped)
    last_step = metrics(whole)[-1]["step"]
    assert weights(whole, last_step) == weights(stopped, last_step) != {}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_stopped_in_its_warm_start_continues_it(
    quintet: Command, small: Path, tmp_path: Path, how: signal.Signals
) -> None:
    overrides = ("training.steps=1", "warm_start.updates=12", "checkpoint.keep=12")
    stopped, whole = tmp_path / "runs/stopped", tmp_path / "runs/whole"
    stop_run(["train", str(small), *overrides, "name=stopped"], tmp_path, "runs/stopped/warm_start/global_step_4", how)
    assert not (stopped / "checkpoints").exists()
    again = quintet("train", str(small), *overrides, "name=stopped")
    assert "resuming from runs/stopped/warm_start/global_step_" in again.stdout
    # an interpreter of its own: the forks of the test server end with the same numbers
    command = [sys.executable, "-m", "quintet", "train", str(small), *overrides, "name=whole"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    for step in (0, 1):
        assert weights(stopped, step) == weights(whole, step) != {}
    for file in ("metrics.jsonl", "warm_start.jsonl"):
        assert metrics(stopped, file) == metrics(whole, file)
    assert not (stopped / "warm_start").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    quintet: Command, small: Path, tmp_path: Path
) -> None:
    quintet("train", str(small), "name=torn", "training.steps=3", "checkpoint.keep=3")
    # The same experiment with one more step: what step 3 left is damaged on the disk.
    newest = tmp_path / "runs/torn/checkpoints/global_step_3/actor/optim_world_size_1_rank_0.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    done = quintet("train", str(small), "name=torn", "training.steps=3", "checkpoint.keep=3")
    assert "global_step_3" in done.stdout
    assert "hash" in done.stdout
    assert "global_step_2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["training.stesp=3"], ["training.stesp", "training.steps"]),
        (["training.mini_batches=3"], ["training.mini_batches", "nearest"]),
        (["env.size=1"], ["env.size", "1"]),
        (["nothing.yaml"], ["no such file: nothing.yaml"]),
        (["output_dir=/proc/nowhere"], ["/proc/nowhere"]),
        (["policy.preset=null", "policy.path=/nowhere"], ["/nowhere", "policy.path"]),
        (["policy.preset=grid-1x"], ["policy.preset", "grid-1m"]),
        (["rollout.engine=vlm"], ["engine", "vlm"]),
        (["tracking.loggers=[wandbb]"], ["wandbb"]),
        (["resume=/nowhere"], ["/nowhere"]),
    ],
)
def test_the_users_faults_end_in_one_message(
    quintet: Command, tmp_path: Path, arguments: list[str], overrides: list[str]
) -> None:
    done = quintet("train", *arguments, check=False)
    assert done.returncode == 2, done.stderr
    for word in overrides:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/*.jsonl"))


def test_a_resumed_run_must_be_the_same_experiment(quintet: Command, small: Path) -> None:
    quintet("train", str(small), "training.steps=1")
    done = quintet("train", str(small), "training.steps=2", "rollout.temperature=0.5", check=False)
    assert done.returncode == 2
    assert "rollout.temperature" in done.stderr
    assert "resume=never" in done.stderr


def test_two_processes_dont_share_a_run(quintet: Command, small: Path, tmp_path: Path) -> None:
    # The first run cannot end before the second asks, however slow the machine is.
    process = start(small, tmp_path, "training.steps=100000")
    try:
        wait_for(tmp_path / "runs/small/config.yaml", process)
        done = quintet("train", str(small), "training.steps=100000", check=False)
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 2, done.stdout
    assert str(process.pid) in done.stderr


@pytest.mark.parametrize("command", [["plan"], ["list"], ["explain", "rollout.window_size"], ["--version"], ["--help"]])
def test_the_small_commands_answer(quintet: Command, command: list[str]) -> None:
    assert quintet(*command).stdout.strip()


def test_sokoban_runs_by_the_same_command(quintet: Command, small: Path, tmp_path: Path) -> None:
    quintet("train", str(small), "env.name=sokoban", "training.steps=1", "rollout.window_size=null")
    assert (tmp_path / "runs/small/report.html").exists()


def test_a_run_with_nothing_but_damaged_checkpoints_isnt_thrown_away(
    quintet: Command, small: Path, tmp_path: Path
) -> None:
    quintet("train", str(small), "training.steps=1", "checkpoint.keep=1")
    run = tmp_path / "runs/small"
    (run / "checkpoints/global_step_1/hf/model.safetensors").write_bytes(b"torn")
    before = (run / "metrics.jsonl").read_bytes()
    done = quintet("train", str(small), "training.steps=1", "checkpoint.keep=1", check=False)
    assert done.returncode == 2
    assert "global_step_1: hf/model.safetensors has 4 bytes" in done.stderr
    assert "resume=never" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    quintet("train", str(small), "training.steps=1", "resume=never")
    assert [line["step"] for line in metrics(run)] == [0, 1]


def test_a_run_goes_on_from_the_checkpoint_it_is_given(quintet: Command, small: Path, tmp_path: Path) -> None:
    quintet("train", str(small), "name=whole", "checkpoint.keep=5")
    checkpoint = tmp_path / "runs/whole/checkpoints/global_step_2"
    done = quintet("train", str(small), "name=branch", f"resume={checkpoint}")
    assert f"resuming from {checkpoint}" in done.stdout.replace("\n", "")
    assert weights(tmp_path / "runs/branch", 4) == weights(tmp_path / "runs/whole", 4)
    assert metrics(tmp_path / "runs/branch") == metrics(tmp_path / "runs/whole")[3:]


def test_a_full_disk_ends_the_run_with_one_message_and_leaves_the_last_checkpoint(
    quintet: Command, small: Path, tmp_path: Path
) -> None:
    quintet("train", str(small), "training.steps=1")
    code = """
import resource, sys
from quintet.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # no file may outgrow a megabyte
main()
"""
    command = [sys.executable, "-c", code, "train", str(small), "training.steps=2"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "disk full" in done.stderr
    assert "Traceback" not in done.stderr
    assert "resuming from" in quintet("train", str(small), "training.steps=2").stdout
    assert len(metrics(tmp_path / "runs/small")) == 3


def test_a_divergence_from_the_reference_holds_the_policy_back(quintet: Command, small: Path, tmp_path: Path) -> None:
    for coefficient in (0.0, 10.0):
        name = f"name=kl{coefficient:.0f}"
        quintet("train", str(small), name, f"algorithm.kl={{coefficient: {coefficient}}}", "training.epochs=3")
    free, held = (metrics(tmp_path / f"runs/kl{c}") for c in (0, 10))
    assert held[-1]["actor/kl_loss"] < 0.5 * free[-1]["actor/kl_loss"]


def test_weights_in_bfloat16_play_and_learn(quintet: Command, small: Path, tmp_path: Path) -> None:
    quintet("train", str(small), "policy.dtype=bfloat16", "algorithm.advantage.name=gae")
    lines = metrics(tmp_path / "runs/small")
    assert lines[-1]["actor/grad_norm"] > 0
    assert 0 < lines[1]["training/rollout_probs_diff_max"] < 0.2
