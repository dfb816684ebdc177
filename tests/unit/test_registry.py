"""If these fail, a mistyped name or a missing package is met with a traceback."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from quintet.config.native.advantages import ADVANTAGES
from quintet.config.native.env_section import ENVS
from quintet.config.native.losses import LOSSES
from quintet.data.tasks.task import TASKS
from quintet.envs.simulators.registry import SIMULATORS
from quintet.errors import ConfigError, nearest
from quintet.registry import Registry, check_user_file, load_user_object, user_errors
from quintet.rewards.verifiers.registry import VERIFIERS
from quintet.rollout.engines.engine import ENGINES
from quintet.runtime.learners.learner_backends import LEARNER_BACKENDS
from quintet.tools.registry import TOOLS
from quintet.tools.users import USERS
from quintet.tracking.logger import LOGGERS

REGISTRIES: tuple[Registry[object], ...] = (
    ADVANTAGES, ENGINES, ENVS, LEARNER_BACKENDS, LOGGERS, LOSSES, SIMULATORS, TASKS, TOOLS, USERS, VERIFIERS,
)  # fmt: skip
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def make() -> Registry[float]:
    registry: Registry[float] = Registry("number")
    registry.add("one", lambda: 1.0, help="the first")
    registry.add("root", "math:sqrt", help="by address")
    registry.add("far", "nowhere:x", help="needs a package", requires=("no_such_package",), extra="megatron")
    return registry


def test_entries_load_objects_and_addresses() -> None:
    assert make().get("one").load()() == 1.0
    assert make().get("root").load()(9.0) == 3.0
    assert [entry.name for entry in make()] == ["far", "one", "root"]


def test_a_name_is_taken_once() -> None:
    registry = make()
    with pytest.raises(ValueError, match="twice"):
        registry.add("one", lambda: 2.0, help="again")


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'root'"):
        make().get("roots")


def test_a_missing_package_says_what_to_install() -> None:
    entry = make().get("far")
    assert entry.missing() == ("no_such_package",)
    with pytest.raises(ConfigError, match=r"pip install 'einops<1,>=0.8' megatron-core==0.16.1"):
        entry.load()


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_only_packages_that_may_be_missing_are_required(registry: Registry[object]) -> None:
    """Others come with Quintet, and a package of an extra says which one installs it."""
    dependencies = {re.split(r"[<>=!\[]", each)[0].replace("-", "_") for each in PYPROJECT["dependencies"]}
    for entry in registry.in_order():
        assert not dependencies.intersection(entry.requires), entry.name
        assert entry.extra is None or entry.extra in PYPROJECT["optional-dependencies"], entry.name
        assert entry.requires or (entry.extra, entry.how) == (None, None), entry.name


def test_an_exception_of_user_code_names_its_line_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import json\n\n\ndef load(text):\n    return json.loads(text)\n")
    reference = f"{path}:load"
    with pytest.raises(ConfigError) as caught, user_errors(reference, "a.key"):
        load_user_object(reference, "a.key")("{")
    assert caught.value.message.startswith(f"a.key = {reference!r} raised JSONDecodeError: ")
    assert caught.value.hint == f"correct the code: {path}:5: return json.loads(text)"


def test_a_mistyped_file_of_user_code_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "advantage.py").touch()
    with pytest.raises(ConfigError, match=r"there is no file .*\n  did you mean .*/advantage\.py\?"):
        load_user_object(f"{tmp_path / 'advantge.py'}:f", "a.key")


@pytest.mark.parametrize(
    "code",
    [
        "from elsewhere import score",
        "import elsewhere as score",
        "score = lambda **all: 1",
        "class score: pass",
        "if True:\n    async def score(): pass",
        "from elsewhere import *",
        "globals()['sc' + 'ore'] = print",
    ],
)
def test_code_that_defines_a_name_is_not_refused_before_it_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{code}\n")
    check_user_file(f"{tmp_path / 'mine.py'}:score", "a.key")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("score()\ndef other():\n    score = 1\ndef _hidden(): pass", "has no 'score'; it defines other"),
        ("def score(:\n    pass", r"SyntaxError: invalid syntax \(mine.py, line 1\)"),
    ],
)
def test_code_without_a_name_is_refused_before_it_runs(code: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{code}\n")
    with pytest.raises(ConfigError, match=message):
        check_user_file(f"{tmp_path / 'mine.py'}:score", "a.key")


def test_nearest_gives_nothing_rather_than_nonsense() -> None:
    assert nearest("stesp", ["steps", "seed"]) == "steps"
    assert nearest("zzzz", ["steps", "seed"]) is None
