"""Record the default values of a framework's releases: `python scripts/record_defaults.py FRAMEWORK CHECKOUT [BASE]`.

CHECKOUT is a clone of the framework with its tags, BASE one of the framework whose files it composes as a submodule
(verl, for RAGEN and VAGEN). Of each release in `releases.yaml`, each configuration of `ENTRIES` is composed by Hydra,
or read from the fields of dataclasses. Nothing of the framework is executed. The script writes `defaults.json` beside
`releases.yaml`: each table is stored as its differences from another one, mostly that of the next release.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import chdir
from io import BytesIO
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_tables import ANY_NAME, leaves
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
    "vagen": {"ppo_trainer": ("vagen/trainer/config/ppo_trainer.yaml",)},
    "ragen": {"base": ("config/base.yaml",)},
    "roll": {
        "rlvr": ("RLVRConfig",),
        "agentic": ("AgenticConfig",),
        "distill": ("DistillConfig",),
        "dpo": ("DPOConfig",),
        "sft": ("SFTConfig",),
    },
}
"""Files of each configuration, of which a release has one; for ROLL, its class."""
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


class Dataclasses:
    """Dataclasses of a framework's Python files, read without executing them."""

    def __init__(self, files: Iterator[Path]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        for file in files:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node

    def tree(self, name: str) -> dict[str, Any]:
        """Return the defaults of a class, those of its bases first."""
        node = self.classes[name]
        tree: dict[str, Any] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                tree |= self.tree(base.id)
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                tree |= self._field(field.target.id, field.annotation, field.value)
        return tree

    def _field(self, name: str, annotation: ast.expr, default: ast.expr) -> dict[str, Any]:
        named = re.search(r"Dict\[str, (\w+)\]", ast.unparse(annotation))
        if named and named[1] in self.classes:
            return {name: {ANY_NAME: self.tree(named[1])}}
        value = self._value(default)
        return {} if value is NotImplemented else {name: value}

    def _value(self, node: ast.expr) -> Any:
        """Return a value, a tree for an object of a class, or NotImplemented for what has to be executed."""
        if isinstance(node, ast.Lambda):
            return self._value(node.body)
        if isinstance(node, ast.Call):
            named = {word.arg: word.value for word in node.keywords if word.arg}
            called = ast.unparse(node.func)
            if called == "field":
                factory = named.get("default_factory")
                return self._value(named["default"]) if factory is None else self._object(factory, {})
            return self._object(node.func, named)
        try:
            value = ast.literal_eval(node)
        except ValueError:
            return NotImplemented
        return list(value) if isinstance(value, tuple) else value

    def _object(self, factory: ast.expr, fields: Mapping[str, ast.expr]) -> Any:
        """Return what a class or a function without arguments returns."""
        name = ast.unparse(factory)
        if isinstance(factory, ast.Lambda):
            return self._value(factory.body)
        if name in ("list", "dict") and not fields:
            return [] if name == "list" else {}
        if name not in self.classes:
            return NotImplemented
        values = {key: self._value(value) for key, value in fields.items()}
        return self.tree(name) | {key: value for key, value in values.items() if value is not NotImplemented}


def class_tables(directory: Path) -> Iterator[tuple[str, Table]]:
    classes = Dataclasses(directory.rglob("*.py"))
    for entry, (name,) in ENTRIES["roll"].items():
        if name in classes.classes:
            yield entry, dict(leaves(classes.tree(name)))


def file_tables(framework: str) -> Iterator[tuple[str, Table]]:
    """Yield the tables of the configurations below the working directory."""
    for entry, files in ENTRIES[framework].items():
        file = next((Path(each) for each in files if Path(each).is_file()), None)
        engine = entry.partition("model_engine=")[2]
        if file is not None and (not engine or Path(VERL_CONFIG, "model_engine", f"{engine}.yaml").is_file()):
            yield entry, hydra_table(file, entry.partition(" ")[2])


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
                found = class_tables(directory) if framework == "roll" else file_tables(framework)
                tables |= {(entry, release.name): table for entry, table in found}
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
