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
from pretrained_model import unavailable

from quintet.cli.configuration import inspect_config, load_config
from quintet.cli.main import main
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import all_keys
from quintet.config.plan.placement import check_placement
from quintet.policies.tiny_models import create_preset_policy

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
    """Return the commands of a page, with the variables of the environment before them."""
    return list(dict.fromkeys(re.findall(r"^\$ ((?:[A-Z_]+=\S+ )*quintet .+?)(?:\s+#.*)?$", page.read_text(), re.M)))


def write_files(page: Path, directory: Path) -> None:
    """Write the files that a page shows: blocks whose first line is a comment with the name."""
    for text, name in re.findall(r"^```\w+\n(# (\S+\.(?:sh|yaml))\n.*?)^```", page.read_text(), re.M | re.S):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


MODEL = "models/mine"
"""Directory of a model in commands of pages."""


FOLLOWED = ("first-model",)
"""Pages whose commands are all run by tests/system."""


LONG = ("train", "sft", "view")
"""Commands that tests/system runs; here they only have to begin."""


BRIEF = ("plan", "explain", "translate")
"""Commands that need no process of their own."""


@pytest.mark.parametrize("page", (page for page in pages() if page.stem not in FOLLOWED), ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another, in a directory that has the examples, the files of the page, and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_files(page, tmp_path)
    if MODEL in page.read_text():
        create_preset_policy("numbers-1m", tmp_path / MODEL, ["3 + 4 = ? Write the result: <answer> 7 </answer>"], 0)
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        variables, _, arguments = line.partition("quintet ")
        argv = shlex.split(arguments)
        if argv[:2] == ["model", "get"] and unavailable():
            continue
        with monkeypatch.context() as patch:
            for variable in shlex.split(variables):
                patch.setenv(*variable.split("=", 1))
            if argv[0] in LONG:
                would_begin(argv[1:], tmp_path)
            elif argv[0] in BRIEF:
                patch.setattr(sys, "argv", ["quintet", *argv])
                with pytest.raises(SystemExit) as end:
                    main()
                shown = capsys.readouterr()
                assert not end.value.code, f"{line}: {shown.err}"
                assert shown.out, line
            else:
                command = [sys.executable, "-m", "quintet", *argv]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, f"{line}: {done.stderr}"
                assert done.stdout, line


def would_begin(arguments: list[str], directory: Path) -> None:
    config = next((word for word in arguments if word.endswith((".yaml", ".sh"))), None)
    folders = (directory, ROOT, ROOT / "examples/custom")
    folder = next((path for path in folders if config and (path / config).exists()), ROOT)
    path, overrides = config and str(folder / config), [word for word in arguments if "=" in word]
    if "--ray" in arguments:
        check_placement(inspect_config(path, overrides, None, "refuse").composed)
    else:
        load_config(path, overrides, None, "refuse")


@pytest.mark.parametrize("framework", DIALECTS)
def test_names_of_a_framework_stand_for_the_keys_that_they_set(framework: str) -> None:
    dialect = DIALECTS[framework]
    native: dict[str, set[str]] = {}
    for each in filter(None, (dialect, dialect.base)):
        for _, spec in all_keys(each):
            native.setdefault(spec.key, set()).update(spec.native)
    rows = [row for row in table_rows(f"coming-from-{framework}.md") if len(row) == 3 and row[0].startswith("`")]
    assert len(rows) >= 12
    for foreign, here, _ in rows:
        key, name = foreign.strip("`"), re.sub(r"^\[?`|`.*$", "", here)
        assert name in native[key], key


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
