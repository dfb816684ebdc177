"""If these fail, the recipes in examples/cluster do not start a run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.configuration import inspect_config
from quintet.config.plan.placement import check_placement

ROOT = Path(__file__).parents[2]
SLURM, KUBERAY = ROOT / "examples/cluster/slurm.sh", ROOT / "examples/cluster/kuberay.yaml"
RECORD = """#!/bin/bash
echo "$(basename "$0") $*" >> "$RECORD"
case "$(basename "$0")" in
    scontrol) printf 'node1\\nnode2\\n' ;;
    srun) env | grep ^RAY_ >> "$RECORD"; shift 2; "$@" ;;
    ray) while [ -e "$RECORD.run" ]; do sleep 0.05; done; exit "$STATUS" ;;
    quintet) rm -f "$RECORD.run" ;;
esac
"""
"""Program that records its arguments: `srun` runs its command once, and `ray` runs until `quintet stop`."""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Environment of a job on two nodes."""
    for name in ("scontrol", "srun", "ray", "quintet"):
        program = tmp_path / name
        program.write_text(RECORD)
        program.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, **job, "PATH": path, "RECORD": str(tmp_path / "record"), "STATUS": "0"}


@pytest.mark.parametrize("status", [0, 2])
def test_the_slurm_script_starts_ray_on_all_nodes_and_one_run(slurm: dict[str, str], status: int) -> None:
    done = subprocess.run(["bash", SLURM], env={**slurm, "STATUS": str(status)}, timeout=20)
    assert done.returncode == status
    lines = Path(slurm["RECORD"]).read_text().splitlines()
    srun, ray = (next(line for line in lines if line.startswith(name)) for name in ("srun ", "ray "))
    assert srun == f"srun --nodes=2 --ntasks=2 {ray}"
    start, _, command = ray.partition(" -- ")
    assert start == "ray symmetric-run --address node1:6379 --min-nodes 2"
    assert command.endswith("placement.nodes=2 placement.devices_per_node=8 --ray node1:6379")
    check_run(command)
    assert "RAY_AUTH_MODE=token" in lines
    token = next(line.removeprefix("RAY_AUTH_TOKEN=") for line in lines if line.startswith("RAY_AUTH_TOKEN="))
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert token not in ray


def test_the_slurm_script_stops_the_run_before_the_time_limit(slurm: dict[str, str]) -> None:
    record = Path(slurm["RECORD"])
    Path(f"{record}.run").touch()
    job = subprocess.Popen(["bash", SLURM], env={**slurm, "STATUS": "143"})
    end = time.monotonic() + 20
    while not record.exists() or "\nray " not in record.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=20) == 143
    assert "quintet stop slurm --timeout 540" in record.read_text()


def check_run(command: str) -> Any:
    """Check the configuration of a command `quintet train`, and return it."""
    argv = shlex.split(command)
    overrides = [word for word in argv if "=" in word]
    config = next((str(ROOT / word) for word in argv if word.startswith("examples/")), None)
    composed = inspect_config(config, overrides, None, "refuse").composed
    check_placement(composed)
    return composed.experiment


def check_schema(manifest: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'quintet[ray]'")
    jsonschema.validate(manifest, yaml.safe_load((ROOT / "tests/support/rayjob_schema.yaml").read_text()))


def test_the_manifest_is_a_rayjob_whose_run_has_the_devices_of_its_pods() -> None:
    manifest = yaml.safe_load(KUBERAY.read_text())
    check_schema(manifest)
    cluster = manifest["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    placement = check_run(manifest["spec"]["entrypoint"]).placement
    assert placement.nodes == workers["replicas"] == workers["minReplicas"]
    assert placement.devices_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"].keys() == {"RAY_JOB_STOP_WAIT_TIME_S"}
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_a_misspelt_field_of_the_manifest_would_be_noticed() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'quintet[ray]'")
    manifest = yaml.safe_load(KUBERAY.read_text())
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    workers["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'resource' was unexpected"):
        check_schema(manifest)
