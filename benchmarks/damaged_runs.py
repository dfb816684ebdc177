"""Damages of run directories, as accidents and attackers cause them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hostile_text import EVIL_MODULE, SECRET, Surroundings, mutate
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import RunProcess
from quintet.training.checkpoint.checkpoint import MANIFEST_FILE

CODE_SETTINGS = (
    "policy: {trust_remote_code: true}",
    f"external_libs: [{EVIL_MODULE}]",
    f"env: {{name: custom, path: {EVIL_MODULE}.py:Env}}",
    f"algorithm: {{loss: {{name: custom, function: '{EVIL_MODULE}.py:loss'}}}}",
    f"env: {{name: prompts}}\nreward: {{function: {EVIL_MODULE}.py:score}}\n"
    "data: {train_files: [prompts.jsonl], validation_files: [prompts.jsonl]}",
)


@dataclass(frozen=True, slots=True)
class Outside:
    """Files of the machine that no command may read, change or show, and a process that none may end."""

    path: Path
    decoy: int
    """Process ID."""

    @classmethod
    def create(cls, path: Path, run: Path, decoy: int) -> Outside:
        """Create files with the secret, of each kind that a run has."""
        Surroundings.create(path)
        for name in ("metrics.jsonl", "warm_start.jsonl"):
            (path / name).write_text(json.dumps({"step": 1, SECRET: 1.0}) + "\n")
        for name in ("run.json", "progress.json", "state.json", "manifest.json"):
            (path / name).write_text(json.dumps({SECRET: 1, "status": SECRET, "phase": SECRET}))
        stored = next(run.rglob("trajectories/*/*.jsonl")).read_text()
        (path / "step_000001.jsonl").write_text(stored.replace('"observation": "', f'"observation": "{SECRET} '))
        (path / "config.yaml").write_text(f"{SECRET}: [\n")
        weights = json.dumps({"__metadata__": {SECRET: SECRET}}).encode()
        (path / "model.safetensors").write_bytes(len(weights).to_bytes(8, "little") + weights)
        return cls(path, decoy)

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.path.iterdir())}

    def fitting(self, name: str) -> Path:
        """Return the file that fits best in place of one of a run."""
        same = [path for path in self.path.iterdir() if path.name == name]
        alike = [path for path in self.path.iterdir() if path.suffix == Path(name).suffix]
        return [*same, *alike, self.path / "secret.yaml"][0]


Damage = Callable[[Path, random.Random, Outside], Path]
"""Damages a run and returns the file or directory that it has damaged."""


def _any_file(run: Path, draws: random.Random, pattern: str = "*") -> Path:
    files = sorted(path for path in run.rglob(pattern) if path.is_file() and not path.is_symlink())
    return draws.choice(files) if files else run / "run.json"


def truncated(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    os.truncate(path, draws.choice((0, 1, path.stat().st_size // 2, max(0, path.stat().st_size - 1))))
    return path


def flipped(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    data = bytearray(path.read_bytes())
    for _ in range(draws.choice((1, 20)) if data else 0):
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)
    return path


def linked(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    path.unlink()
    path.symlink_to(draws.choice((outside.fitting(path.name), Path("/dev/zero"), Path(path.name), Path("missing"))))
    return path


def linked_directory(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = draws.choice(sorted(path for path in run.rglob("*") if path.is_dir() and not path.is_symlink()))
    shutil.rmtree(path)
    path.symlink_to(outside.path)
    return path


def new_link(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Add a link under a name that a command writes or deletes."""
    names = (
        ".lock",
        ".leader.lock",
        ".run.json.partial",
        ".progress.json.partial",
        "report.html",
        ".report.html.partial",
    )
    names += (
        "processes/stop.json",
        "processes/.stop.json.partial",
        "checkpoints/.staging_3",
        "checkpoints/global_step_9",
    )
    names += ("checkpoints/.staging_old_x", "checkpoints/latest_checkpointed_iteration.txt", "logs", "policy", "images")
    path = run / draws.choice(names)
    if not path.parent.resolve().is_relative_to(run.resolve()):
        raise ValueError("an earlier damage has linked the directory, so that this one would change what is outside")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(draws.choice((outside.path, outside.path / "secret.yaml", outside.path / "new")))
    return path


def pipe(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    path.unlink()
    os.mkfifo(path)
    return path


def directory(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    path.unlink()
    path.mkdir()
    return path


def sparse(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    os.truncate(path, 1 << 40)
    return path


def removed(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws)
    path.unlink()
    return path


VALUES: tuple[Any, ...] = (
    -1,
    0,
    2**63,
    10**400,
    1e308,
    True,
    None,
    "",
    "x" * 100_000,
    [],
    {},
    [[]],
    "\ud800",
    "\x1b[2J",
)
VALUES += (
    "../../../outside/model.safetensors",
    "/etc/passwd",
    "../../hf/model.safetensors",
    [10**9, 10**9],
    [[1] * 9] * 9,
)


def _changed(value: Any, draws: random.Random) -> Any:
    """Return JSON values of which a random part is another one."""
    if isinstance(value, dict) and value and draws.random() < 0.9:
        key = draws.choice(list(value))
        return {**value, key: _changed(value[key], draws)}
    if isinstance(value, list) and value and draws.random() < 0.9:
        place = draws.randrange(len(value))
        return [*value[:place], _changed(value[place], draws), *value[place + 1 :]]
    return draws.choice(VALUES)


def json_value(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws, "*.json")
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), draws)))
    _sign(path)
    return path


def json_line(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Damage a line of a file, and keep the others."""
    path = _any_file(run, draws, "*.jsonl")
    lines = path.read_text().splitlines()
    place = draws.randrange(len(lines))
    hostile = (
        "{",
        "[" * 100_000,
        '{"step": 1e999}',
        "NaN",
        '{"step": ' + "9" * 5000 + "}",
        "\x00",
        '{"a":' * 900 + "1" + "}" * 900,
    )
    changed = json.dumps(_changed(json.loads(lines[place]), draws))
    lines[place] = draws.choice((*hostile, *(changed,) * 6))
    path.write_text("\n".join(lines) + "\n")
    return path


def safetensors_header(run: Path, draws: random.Random, outside: Outside) -> Path:
    path = _any_file(run, draws, "*.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    choice = draws.randrange(4)
    if choice == 0:
        path.write_bytes(draws.choice((2**63, 2**64 - 1, 10**9, 0)).to_bytes(8, "little") + data[8:])
    elif choice == 1:
        path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    else:
        text = json.dumps(_changed(header, draws)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    _sign(path)
    return path


def index_outside(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Let the index of a model's weights name a file outside of its directory."""
    model = draws.choice(sorted(path.parent for path in run.rglob("hf/model.safetensors")) or [run])
    names = ("../../../../outside/model.safetensors", str(outside.path / "model.safetensors"), 7, ["x"])
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": draws.choice(names)}}))
    (model / "model.safetensors").unlink(missing_ok=True)
    _sign(path)
    return path


def settings(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Set keys that run code, or change the configuration as attackers of configurations do."""
    path = run / "config.yaml"
    if draws.random() < 0.5:
        path.write_text(f"name: r\n{draws.choice(CODE_SETTINGS)}\n")
    else:
        mutate(path, draws)
    return path


def model_code(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Let a model directory bring code."""
    path = _any_file(run, draws, "hf/config.json")
    config = json.loads(path.read_text()) | {"model_type": draws.choice(("evil", "qwen2"))}
    config["auto_map"] = {
        name: f"{EVIL_MODULE}.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    }
    path.write_text(json.dumps(config))
    (path.parent / f"{EVIL_MODULE}.py").write_text("open('code-was-executed', 'w')\n")
    _sign(path)
    return path


def record(run: Path, draws: random.Random, outside: Outside) -> Path:
    """Name a process of somebody else as one of the run."""
    processes = RunDirectory(run).processes
    victim = RunProcess.of(outside.decoy, "rank 0", 1)
    changed = draws.choice(
        (
            victim,
            victim,
            replace(victim, pid=1),
            replace(victim, pid=-1),
            replace(victim, size=10**12),
            replace(victim, role="\x1b[2J"),
        )
    )
    processes.write(draws.choice((processes.rank(0), processes.launcher)), changed)
    return processes.path


DAMAGES: Mapping[str, Damage] = {
    damage.__name__: damage
    for damage in (
        *(truncated, flipped, linked, linked_directory, new_link, pipe, directory, sparse, removed),
        *(json_value, json_line, safetensors_header, index_outside, settings, model_code, record),
    )
}


def _sign(path: Path) -> None:
    """Correct the manifest of the checkpoint that contains a file, as an attacker does."""
    for parent in path.parents:
        manifest = parent / MANIFEST_FILE
        if parent.name.startswith("global_step_") and manifest.is_file() and path != manifest:
            rows = json.loads(manifest.read_text())
            data = path.read_bytes()
            rows[str(path.relative_to(parent))] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            rows = {name: row for name, row in rows.items() if (parent / name).exists()}
            manifest.write_text(json.dumps(rows))
