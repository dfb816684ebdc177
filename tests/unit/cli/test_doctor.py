"""If these fail, people install what they have or look for a fault where something is simply missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet import __version__
from quintet.cli import doctor
from quintet.cli import main as command


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    doctor.run(as_json=True)
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def states(found: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(one["kind"], one["name"]): one["state"] for one in found["abilities"]}


def test_versions_and_machine_are_told(found: dict[str, Any]) -> None:
    assert found["versions"]["quintet"] == __version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] > 0
    assert found["machine"]["memory_bytes"] > 1 << 28


def test_what_comes_with_quintet_is_ready(found: dict[str, Any]) -> None:
    ready = states(found)
    for ability in (("engine", "hf"), ("learner", "in process"), ("logger", "jsonl"), ("world", "sokoban")):
        assert ready[ability] == "ready"


def test_every_engine_learner_and_runtime_has_a_line(found: dict[str, Any]) -> None:
    told = states(found)
    wanted = {"engine": ("hf", "vllm", "sglang"), "learner": ("fsdp", "megatron"), "runtime": ("in process", "ray")}
    assert {(kind, name) for kind, names in wanted.items() for name in names} <= set(told)


def test_a_missing_package_is_told_by_its_name_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    none = doctor.Machine(1, 1, 1, (), "", ())
    one = doctor._outside("learner", "megatron", "megatron-core", None, none)
    assert (one.state, one.note) == ("needs", "needs pip install megatron-core and an accelerator")
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    some = doctor.Machine(1, 1, 1, (doctor.Device("H200", 1),) * 2, "", ())
    assert doctor._outside("learner", "fsdp", None, None, some, devices=2).state == "ready"


def test_a_broken_torch_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    devices, built = doctor._devices()
    assert devices == ()
    assert built.startswith("torch can't be imported: ")


def test_nvidia_smi_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch built without CUDA on a machine with a device is the commonest fault of all."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor._driver() == ("NVIDIA H200, 143771 MiB, 570.1",)
    rows = list(doctor._machine_rows(doctor.Machine(1, 1, 1, (), "without CUDA", doctor._driver())))
    assert ("nvidia-smi", "1", "torch doesn't see them all: is it built for this CUDA?") in rows


def test_an_nvidia_smi_that_fails_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor._driver() == ()


def test_the_table_is_narrow_and_ends_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quintet", "doctor"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert not end.value.code
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"quintet {__version__}"
    assert max(map(len, shown)) <= 100
    assert any(line.startswith("  engines   hf ") for line in shown)
