"""If these fail, people rent devices by a command that they cannot use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_plan_command import MODEL

from quintet import hardware
from quintet.cli import main as command
from quintet.cli import plan_fit

Call = Callable[..., int]
LONG = ("rollout.max_turns=1", "rollout.max_prompt_tokens=1024", "rollout.max_response_tokens=4096")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `quintet plan` and return its exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["quintet", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0)

    return run


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Overrides for a run of Qwen2.5-7B with long responses."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    overrides = ["policy.preset=null", f"policy.path={tmp_path}", "policy.dtype=bfloat16", "warm_start=null"]
    return [*overrides, *LONG, "rollout.engine=vllm"]


def fitted(call: Call, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The proposals as JSON."""
    assert call(*arguments, "--fit", "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_table_has_times_peaks_and_sizes_and_below_it_overrides_with_reasons(
    model: list[str], call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*model, "name=lake", "--fit", "--device", "h100", "--devices", "8") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "lake  8 × 80.0 GiB, 72.0 GiB usable"
    assert "Proposals, step times estimated with the figures of h100" in shown
    assert any(line.split()[:6] == ["step", "peak", "actor", "engines"] for line in shown)
    (first,) = (line for line in shown if line.startswith("  1  placement.devices_per_node=8"))
    reason = shown[shown.index(first) + 1]
    assert "of the step; memory is fullest while" in reason
    assert any(" combinations, most often: too little memory while " in line for line in shown)


def test_tables_are_plain_and_narrow_where_nobody_looks(
    model: list[str], call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overrides are one line each, to be copied."""
    assert call(*model, "--fit", "--device", "h100", "--devices", "8") == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() and line.isprintable() for line in shown)
    assert max(map(len, shown[: shown.index("Overrides")])) <= 100


def test_json_has_devices_proposals_and_rejections(
    model: list[str], call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fitted(call, capsys, *model, "--device", "a100", "--devices", "16")
    assert result["cluster"] == {
        "nodes": 2,
        "devices": 16,
        "device_bytes": 80 << 30,
        "usable_bytes": int(0.9 * (80 << 30)),
        "figures": "a100",
    }
    assert len(result["proposals"]) == 5
    first = result["proposals"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["phases"].values()))
    assert {"update of actor", "prefill", "decode", "weight sync"} <= set(first["phases"])
    assert first["peak_bytes"] <= result["cluster"]["usable_bytes"]
    assert {"placement.nodes=2", "placement.devices_per_node=8"} <= set(first["overrides"])
    assert result["considered"] > sum(result["rejected"].values()) > 0


def test_the_written_proposal_is_planned_with_the_same_peak(
    model: list[str], tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*model, "--device", "h100", "--devices", "8", "--write", "2", "-o", str(tmp_path / "run.yaml")]
    proposal = fitted(call, capsys, *arguments)["proposals"][1]
    assert call(str(tmp_path / "run.yaml"), "--json") == 0
    (peak,) = json.loads(capsys.readouterr().out)["memory"]["peaks"]
    assert (peak["total"], peak["phase"]) == (proposal["peak_bytes"], proposal["peak_phase"])


def test_a_proposal_is_written_to_a_new_file_only(
    model: list[str], tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mine")
    assert call(*model, "--fit", "--device", "h100", "--devices", "8", "-o", str(file)) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_if_nothing_fits_it_fails_and_says_what_is_missing(
    model: list[str], call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*model, "--fit", "--device-memory", "24") == 2
    message = capsys.readouterr().err
    assert "no combination fits into 1 device of 24.0 GiB, of which 21.6 GiB are usable" in message
    assert "too much: optimizer state of actor 56.7 GiB" in message
    assert "what helps: --devices 8, or policy.lora.rank=16, or a smaller model" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--devices", "8"], "--devices has an effect only with --fit\n  add --fit"),
        (["-o", "x.yaml"], "--output has an effect only with --fit"),
        (["--fit", "--device", "h1000"], "--device h1000: unknown device\n  did you mean h100?"),
        (["--fit", "--device", "h100", "--write", "2"], "--write needs a file\n  --write 2 -o FILE"),
        (["--fit", "--device", "h100", "--write", "7", "-o", "x.yaml"], "--write 7: there is no such proposal"),
        (
            ["--fit", "--device", "h100", "--nodes", "3", "--devices", "8"],
            "--devices 8: 3 nodes cannot have equally many",
        ),
        (["--fit", "sft.batch=8", "--device", "h100"], "this run does something else"),
    ],
)
def test_options_that_cannot_be_followed_are_named(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*overrides) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_hint_at_devices_can_be_followed(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--fit", "--device", "h100", "--nodes", "3", "--devices", "8") == 2
    assert "--devices 9" in capsys.readouterr().err
    assert call("--fit", "--device", "h100", "--nodes", "3", "--devices", "9") == 0


def test_without_options_it_is_this_machine(
    monkeypatch: pytest.MonkeyPatch, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its GPUs, or if it has none, a question."""
    monkeypatch.setattr(hardware, "nvidia_smi", lambda: ())
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    assert call("--fit") == 2
    assert "--device h100, or --device-memory 80" in capsys.readouterr().err
    monkeypatch.setattr(hardware, "nvidia_smi", lambda: ("NVIDIA L4, 23034 MiB, 570.1",) * 4)
    monkeypatch.setattr(hardware, "num_gpus", lambda: 4)
    cluster = fitted(call, capsys)["cluster"]
    assert (cluster["nodes"], cluster["devices"], cluster["device_bytes"]) == (1, 4, 23034 << 20)
    assert cluster["figures"] == "l4"


def test_nodes_follow_from_the_devices(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the configuration, otherwise of at most 8 devices."""
    h100 = ("--device", "h100")
    cluster = fitted(call, capsys, *h100, "--devices", "12")["cluster"]
    assert (cluster["nodes"], cluster["devices"]) == (2, 12)
    placed = ("placement.nodes=2", "placement.devices_per_node=2")
    assert fitted(call, capsys, *h100, *placed)["cluster"]["nodes"] == 2
    assert fitted(call, capsys, *h100, *placed, "--devices", "8")["cluster"]["nodes"] == 1


def test_a_run_script_of_another_framework_gets_its_keys_and_is_written_as_a_native_file(
    tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine takes a share of the device, which a plan has to know."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    script = str(Path(__file__).parents[3] / "examples/verl/run_grpo_math_qwen2.5-3b.sh")
    overrides = [script, f"actor_rollout_ref.model.path={tmp_path}", "--device", "h200", "--devices", "8"]
    proposal = fitted(call, capsys, *overrides, "-o", str(tmp_path / "run.yaml"))["proposals"][0]
    assert "trainer.n_gpus_per_node=8" in proposal["overrides"]
    assert all(word.startswith(("trainer.", "actor_rollout_ref.")) for word in proposal["overrides"])
    assert call(str(tmp_path / "run.yaml"), "--device-memory", "141", "--json") == 0
    (peak,) = json.loads(capsys.readouterr().out)["memory"]["peaks"]
    assert (peak["total"], peak["phase"]) == (proposal["peak_bytes"], proposal["peak_phase"])


def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After a second, then whenever it has taken twice as long."""
    seconds = iter([0.0, 0.5, 1.5, 2.0, 3.5])
    monkeypatch.setattr(plan_fit, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    progress = plan_fit._ProgressLines()
    for considered in (10, 1000, 2000, 3000):
        progress(considered)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1,000 parallel sizes considered in 2 s", "3,000 parallel sizes considered in 4 s"]
