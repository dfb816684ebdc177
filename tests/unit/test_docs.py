"""If these fail, the reference pages say what isn't so any more."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from quintet.cli.configuration import inspect_config, load_config
from quintet.config.plan.placement import check_placement

ROOT = Path(__file__).parents[2]


def test_the_reference_is_made_from_the_code_as_it_is() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/write_reference.py", "--check"], check=True, timeout=60)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def commands(page: Path) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^\$ quintet (.+?)(?:\s+#.*)?$", page.read_text(), re.M)))


LONG = ("train", "sft")
"""Commands that tests/system runs; here they only have to begin."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    """One after another, in a directory that has the examples and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in commands(page):
        words = shlex.split(line)
        if words[0] in LONG:
            would_begin(words[1:])
            continue
        done = subprocess.run(
            [sys.executable, "-m", "quintet", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout, line


def would_begin(words: list[str]) -> None:
    config = next((word for word in words if word.endswith((".yaml", ".sh"))), None)
    folder = next((path for path in (ROOT, ROOT / "examples/custom") if config and (path / config).exists()), ROOT)
    path, overrides = config and str(folder / config), [word for word in words if "=" in word]
    if "--ray" in words:
        check_placement(inspect_config(path, overrides, None, "refuse").composed)
    else:
        load_config(path, overrides, None, "refuse")


def table_rows(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


MEASURED = {
    "reach_ppo": "PPO",
    "reach_ppo_blank_images": "PPO, black images",
    "reach_grpo": "GRPO",
    "reach_grpo_blank_images": "GRPO, black images",
}


def test_the_success_of_the_arm_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/embodied_arm.json").read_text())
    rows = table_rows("embodied.md")
    for name, label in MEASURED.items():
        for run in measured[name]:
            shares = [f"{share:.2f}" for _, share in run["validations"]]
            blank = [""] * (6 - len(shares))
            assert [label, str(run["seed"]), *shares, *blank, f"{run['cpu_seconds'] / 60:.1f}"] in rows


def test_rlinfs_names_stand_for_the_keys_that_they_set() -> None:
    keys: dict[str, object] = {}
    for file in (ROOT / "src/quintet/config/dialects/rlinf/keys").glob("*.yaml"):
        for name, spec in yaml.safe_load(file.read_text())["keys"].items():
            keys[name] = f"{keys.get(name, '')} {spec}"
    rows = table_rows("embodied.md")
    first = rows.index(["RLinf", "here"]) + 2
    named = [row for row in rows[first:] if row[0].startswith("`")]
    assert len(named) >= 20
    for foreign, native in named:
        key = foreign.split("`")[1]
        if not key.startswith("cluster."):
            assert native.strip("`") in str(keys[key]), key
