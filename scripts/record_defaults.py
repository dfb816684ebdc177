"""Record the default values of a framework's releases: `python scripts/record_defaults.py FRAMEWORK CHECKOUT [BASE]`.

CHECKOUT is a clone of the framework with its tags, BASE one of the framework whose files it composes as a submodule
(verl, for RAGEN and VAGEN). Of each release in `releases.yaml`, each configuration of `ENTRIES` is composed by Hydra,
or read from the fields of dataclasses. Nothing of the framework is executed. The script writes `defaults.json` beside
`releases.yaml`: each table is stored as its differences from another one, mostly that of the next release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir
from io import BytesIO
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from quintet.config.dialects.composition.dataclass_defaults import class_tables
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_tables import leaves
from quintet.config.dialects.releases import load_releases
from quintet.config.dotted import sections_around, unflatten

DIALECT_FILES = Path(__file__).parent.parent / "src/quintet/config/dialects"
VERL_CONFIG = "verl/trainer/config"
EXPERIMENTS = ("verl/experimental", "recipe")
ENTRIES: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        **{
            name: (f"{VERL_CONFIG}/{name}.yaml",)
            for name in (
                "ppo_trainer",
                "ppo_megatron_trainer",
                "generation",
                "evaluation",
                "sft_trainer",
                "sft_trainer_engine",
            )
        },
        **{
            f"ppo_trainer model_engine={name}": (f"{VERL_CONFIG}/ppo_trainer.yaml",)
            for name in ("veomni", "torchtitan")
        },
        **{
            f"{kind}_ppo{backend}_trainer": tuple(
                f"{root}/{package}/config/{kind}_ppo{backend}_trainer.yaml" for root in EXPERIMENTS
            )
            for kind, package in (("one_step_off", "one_step_off_policy"), ("fully_async", "fully_async_policy"))
            for backend in ("", "_megatron")
        },
        "dapo_trainer": ("recipe/dapo/config/dapo_trainer.yaml",),
    },
    "vagen": {
        "ppo_trainer": ("vagen/trainer/config/ppo_trainer.yaml",),
        "vagen_multiturn": ("vagen/configs/vagen_multiturn.yaml",),
    },
    "ragen": {"base": ("config/base.yaml",), "early": ("config/base.yaml",)},
}
"""Files of each configuration, of which a release has one."""
FORMATS = {"base": "agent_proxy.", "early": "training."}
"""Sections that RAGEN's file has in its format of agents, and in that of early 2025."""
PATHS = {
    "roll": ("roll/configs", "roll/pipeline"),
    "ragen": ("config",),
    "vagen": ("vagen",),
    "verl": ("verl", "recipe"),
}
"""Directories that are read."""
ENVIRONMENTS = "custom_envs"
"""Section of RAGEN's environments with their prompts, which `tables.yaml` has."""
FORK_BASE = "v0.6.1"
"""Release of verl in place of a fork that BASE does not contain: the one to which VAGEN's trainer is closest."""
WITH_MAIN = ("ragen", "vagen")
"""Frameworks whose main branch is recorded: no release has its format."""

Table = dict[str, Any]
"""Default values by dotted key."""


def git(checkout: str, *words: str) -> bytes:
    return subprocess.run(["git", "-C", checkout, *words], capture_output=True, check=True).stdout


def extract(checkout: str, revision: str, directory: Path, paths: tuple[str, ...] = ()) -> None:
    """Write the files of a revision, of which only configurations and Python files are read."""
    present = git(checkout, "ls-tree", "--name-only", revision, *paths).decode().split()
    with tarfile.open(fileobj=BytesIO(git(checkout, "archive", revision, *present))) as archive:
        for member in archive.getmembers():
            if member.name.endswith((".yaml", ".py")) and (member.isfile() or member.issym()):
                archive.extract(member, directory, filter="data")


def extract_submodule(checkout: str, revision: str, base: str, directory: Path) -> None:
    """Write the configurations of the submodule `verl` of a revision, if it has one."""
    listed = git(checkout, "ls-tree", revision, "verl").decode().split()
    if listed and listed[1] == "commit":
        has_commit = (
            subprocess.run(["git", "-C", base, "cat-file", "-e", listed[2]], capture_output=True).returncode == 0
        )
        extract(base, listed[2] if has_commit else FORK_BASE, directory / "verl", (VERL_CONFIG,))


def hydra_table(file: Path, override: str) -> Table:
    """Return the table of a configuration, composed by Hydra."""
    for path in Path().rglob("*.yaml"):
        if path.is_file() and "pkg://verl.trainer.config" in (text := path.read_text(encoding="utf-8")):
            path.write_text(text.replace("pkg://verl.trainer.config", f"file://{VERL_CONFIG}"), encoding="utf-8")
    GlobalHydra.instance().clear()
    warnings.simplefilter("ignore")
    searched = [
        f"file://{Path(each).absolute()}" for each in (VERL_CONFIG, f"verl/{VERL_CONFIG}") if Path(each).is_dir()
    ]
    overrides = [f"hydra.searchpath=[{','.join(searched)}]", *filter(None, [override])]
    with initialize_config_dir(str(file.parent.absolute()), version_base=None):
        config = compose(file.stem, overrides)
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return {key: value for key, value in leaves(tree) if not key.startswith(f"{ENVIRONMENTS}.")}


def file_tables(framework: str) -> Iterator[tuple[str, Table]]:
    """Yield the tables of the configurations below the working directory."""
    for entry, files in ENTRIES[framework].items():
        file = next((Path(each) for each in files if Path(each).is_file()), None)
        engine = entry.partition("model_engine=")[2]
        if file is not None and (not engine or Path(VERL_CONFIG, "model_engine", f"{engine}.yaml").is_file()):
            table = hydra_table(file, entry.partition(" ")[2])
            if any(key.startswith(FORMATS.get(entry, "")) for key in table):
                yield entry, table


def release_modules(framework: str, checkout: str, revision: str) -> set[str]:
    """Return the trainers that a release has."""
    paths = set(git(checkout, "ls-tree", "-r", "--name-only", revision).decode().splitlines())
    return {name for name in DIALECTS[framework].trainers if f"{name.replace('.', '/')}.py" in paths}


def record(framework: str, checkout: str, base: str) -> dict[str, Any]:
    """Return the tables of all releases, the newest first, each as differences, and the releases of each trainer."""
    tables: dict[tuple[str, str], Table] = {}
    modules: dict[str, list[str]] = {}
    for release in reversed(load_releases(framework).releases):
        if release.name.startswith("main") and framework not in WITH_MAIN:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(os.path.realpath(temporary))
            extract(checkout, release.commit, directory, PATHS[framework])
            extract_submodule(checkout, release.commit, base, directory)
            with chdir(directory):
                dialect = DIALECTS[framework]
                classes = class_tables(directory, dialect.class_files, dialect.classes)
                found = classes.items() if dialect.classes else file_tables(framework)
                tables |= {(entry, release.name): dict(table) for entry, table in found}
        for module in release_modules(framework, checkout, release.commit):
            modules.setdefault(module, []).append(release.name)
    return {"modules": dict(sorted(modules.items())), "tables": differences(tables)}


def differences(tables: dict[tuple[str, str], Table]) -> dict[str, dict[str, Any]]:
    """Return each table as its differences from that one before it to which it has the fewest."""
    recorded: dict[str, dict[str, Any]] = {}
    stored: list[tuple[str, str]] = []
    for (entry, release), table in tables.items():
        whole = {"set": unflatten(dict(sorted(table.items())))}
        candidates = [difference(tables[other], table, other) for other in stored]
        best = min((whole, *candidates), key=lambda each: len(json.dumps(each)))
        recorded.setdefault(entry, {})[release] = best
        stored.append((entry, release))
    return recorded


def difference(old: Table, new: Table, name: tuple[str, str]) -> dict[str, Any]:
    changed = {key: value for key, value in sorted(new.items()) if key not in old or not same(old[key], value)}
    present = {section for key in new for section in (*sections_around(key), key)}
    dropped = sorted(
        {min(each for each in (*sections_around(key), key) if each not in present) for key in old if key not in present}
    )
    changes = {"from": list(name), "set": unflatten(changed), "drop": dropped}
    return {key: value for key, value in changes.items() if value}


def same(old: Any, new: Any) -> bool:
    """Whether values are equal and of one type: 1 is not true, and not 1.0 either."""
    return json.dumps(old) == json.dumps(new)


def main() -> int:
    framework, checkout, *base = sys.argv[1:]
    text = json.dumps(record(framework, checkout, *base or [checkout]), indent=0, ensure_ascii=False)
    (DIALECT_FILES / framework / "defaults.json").write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
