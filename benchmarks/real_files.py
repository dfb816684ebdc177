"""Plan the example files of a framework's repository, unchanged.

    python benchmarks/real_files.py verl CHECKOUT [--set NAME=VALUE ...] [--show] [--out FILE]

CHECKOUT is a checkout of the repository; nothing of it is executed. Each file is given to `quintet plan FILE`, in the
directory of the checkout. Of a script that trains several times, the first and the last run at each line of a call are
planned; it is in the class of the first that does not plan. RLinf's YAML files read the directories that its run
scripts set; `--set` sets further variables of the environment that files read.
Classes:

- `plans`: the file plans, and this version supports everything in it.
- `waits`: the file plans, and the plan names what this version lacks.
- `unknown keys`: refused for keys that are unknown or taken for typing errors.
- `no run`: refused because the file only has definitions for other files, or a script trains nothing.
- `input`: refused because a file, a path, an argument, a GPU or a variable of the environment is missing, or upstream
  cannot compose it.
- `refused`: refused for another reason.
- `fails`: ends with a traceback, or takes more than a minute.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

from machine import machine
from quintet.cli.configuration import inspect_config
from quintet.cli.main import main as command_line
from quintet.errors import UserError

FILES = {
    "verl": (
        *("examples/**/*.sh", "recipe/**/*.sh", "verl/experimental/**/*.sh"),
        *("examples/**/config/*.yaml", "recipe/**/config/*trainer*.yaml", "verl/experimental/**/config/*trainer*.yaml"),
        *("verl/trainer/config/*_trainer*.yaml", "verl/trainer/config/evaluation.yaml"),
        "verl/trainer/config/generation.yaml",
    ),
    "rlinf": (
        *("examples/*/config/*.yaml", "examples/*/*/config/*.yaml", "examples/*/*/*/config/*.yaml"),
        *("examples/reasoning/config/math/*.yaml", "examples/reasoning/config/vqa/*.yaml"),
    ),
    "roll": ("examples/**/*.yaml",),
    "ragen": ("config/*.yaml", "*.sh", "scripts/*.sh", "scripts/runs/*.sh"),
    "vagen": ("scripts/examples/**/*.sh", "examples/**/*.sh", "vagen/examples/**/*.sh", "vagen/configs/*.yaml"),
}
"""Where each framework keeps the files of its example runs."""

TIME_LIMIT = 60
"""Seconds after which planning a file counts as failed."""
RUNS = {"rlinf": re.compile(r"^(cluster|runner):", re.MULTILINE)}
"""Sections that YAML files of runs have, and other files, such as those of a communication library, have not."""
SCRIPT_DIRECTORIES = ("EMBODIED_PATH", "DIFFUSION_PATH", "REWARD_PATH", "VLM_PATH")
"""Variables in which RLinf's run scripts pass the directory that has the scripts and `config/`."""
LAUNCH = re.compile(r"python3?\s+(-\w\s+)*(-m\s+)?\S+|torchrun|ray job submit")
UNKNOWN = re.compile(r"unknown|did you mean|typo", re.IGNORECASE)
NO_RUN = re.compile(r"it is no run|no settings of a run|runs no known trainer|has no keys$", re.MULTILINE)
MANY_RUNS = re.compile(r"trains \d+ times:$", re.MULTILINE)
RUN = re.compile(r"^  (?P<name>\S+\.(?:sh|bash):(?P<line>\d+)(?::\d+)?)  ", re.MULTILINE)
"""How a script that trains many times names each of its runs."""
MISSING_FILE = re.compile(r"its defaults list names \S+, but \S+ does not exist|there is no \S+\.yaml")
"""A file that upstream's Hydra does not find either; the hint names a similar one."""
INPUT = re.compile(
    r"does not exist|not found|no such file|cannot be interpolated|cannot be composed"
    r"|is given where the script or the function is called|ends here before it trains"
    r"|set neither in the script|is read while the script runs"
    r"|is not an override"
    r"|= '' \(|a blank after the backslash|is set twice, at|there is no checkpoint to start from"
    r"|names no prompts to train on",
    re.IGNORECASE,
)
"""A missing file, variable, argument or path, and what the framework's own Hydra refuses, such as a key set twice."""


@dataclass(frozen=True)
class Outcome:
    """Result of planning one file."""

    file: str
    result: str
    seconds: float
    processor_seconds: float
    """Time of the processor, which other programs of the machine hardly change."""
    waits_for: tuple[str, ...] = ()
    message: str = ""
    runs: tuple[str, ...] = ()
    """The runs that were planned of a script with several."""


def example_files(checkout: Path, framework: str) -> list[Path]:
    """Return the YAML files, and the scripts that start something."""
    paths = {path for pattern in FILES[framework] for path in checkout.glob(pattern)}
    marks = {".yaml": RUNS.get(framework, re.compile("")), ".sh": LAUNCH}
    return sorted(path for path in paths if marks[path.suffix].search(path.read_text(errors="replace")))


def directories(checkout: Path, path: Path) -> dict[str, str]:
    """Return the variables that RLinf's run scripts set for a YAML file of the checkout."""
    if path.suffix != ".yaml" or "config" not in path.parts:
        return {}
    beside = checkout / path.relative_to(checkout).as_posix().partition("/config/")[0]
    return dict.fromkeys(SCRIPT_DIRECTORIES, str(beside)) | {"REPO_PATH": str(checkout)}


def plan(path: Path, checkout: Path, environment: dict[str, str]) -> Outcome:
    """Plan a file, or the first and the last run at each line of a script that trains many times."""
    environment = directories(checkout, path) | environment
    outcome = plan_run(str(path.relative_to(checkout)), checkout, environment)
    if not MANY_RUNS.search(outcome.message):
        return outcome
    names: dict[str, list[str]] = {}
    for run in RUN.finditer(outcome.message):
        names.setdefault(run["line"], []).append(run["name"])
    runs = [name for of_line in names.values() for name in dict.fromkeys([of_line[0], of_line[-1]])]
    outcomes = [plan_run(name, checkout, environment) for name in runs]
    failed = next((each for each in outcomes if each.result not in ("plans", "waits")), None)
    if failed is not None:
        return replace(failed, file=outcome.file, runs=tuple(runs))
    waits_for = tuple(sorted({capability for each in outcomes for capability in each.waits_for}))
    return replace(outcome, result="waits" if waits_for else "plans", waits_for=waits_for, message="", runs=tuple(runs))


def plan_run(name: str, checkout: Path, environment: dict[str, str]) -> Outcome:
    """Plan one run in a fork of this process, so that the time is without the imports and tables that runs share."""
    started = time.perf_counter()
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            run_command(["plan", name, "--json"], checkout, environment, output.fileno(), errors.fileno())
        _, status, usage = os.wait4(child, 0)
        seconds = round(time.perf_counter() - started, 2), round(usage.ru_utime + usage.ru_stime, 2)
        output.seek(0)
        errors.seek(0)
        text, error = (file.read().replace(f"{checkout}/", "") for file in (output, errors))
    message = error.partition("quintet: ")[2].strip()
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        waits_for = tuple(sorted({item["message"] for item in json.loads(text)["not_yet"]}))
        return Outcome(name, "waits" if waits_for else "plans", *seconds, waits_for)
    return Outcome(name, refusal(code, message), *seconds, (), message or error.strip()[-400:])


def run_command(
    arguments: list[str], directory: Path, environment: dict[str, str], output: int, errors: int
) -> NoReturn:
    """Run `quintet` with arguments in this process, which is a fork, and end it with the command's exit status."""
    status: object = 1
    try:
        signal.alarm(TIME_LIMIT)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(errors, sys.stderr.fileno())
        sys.argv = ["quintet", *arguments]
        command_line()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - a fork that goes on would plan all files, too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def refusal(status: int, message: str) -> str:
    """Return the class of a file that does not plan."""
    if status != 2:
        return "fails"
    if NO_RUN.search(message):
        return "no run"
    if MISSING_FILE.search(message):
        return "input"
    if UNKNOWN.search(message):
        return "unknown keys"
    return "input" if INPUT.search(message) else "refused"


def commit(checkout: Path) -> str:
    """Return the commit of a checkout and its date, or an empty string."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FILES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--repository", default="", help="such as volcengine/verl")
    parser.add_argument("--commit", help="commit and date of a checkout that is no repository: '1e47e41 2025-05-04'")
    parser.add_argument("--show", action="store_true", help="print the message of each file that does not plan")
    parser.add_argument("--out", type=Path, help="add the result to this file")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    environment = os.environ | dict(item.partition("=")[::2] for item in arguments.set)
    with suppress(UserError):  # imports modules and reads tables once for all forks
        inspect_config(str(example_files(checkout, arguments.framework)[0]), [], None, "refuse")
    jobs = [(path, checkout, environment) for path in example_files(checkout, arguments.framework)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        outcomes = pool.starmap(plan, jobs, chunksize=1)
    counts = Counter(outcome.result for outcome in outcomes)
    name, _, date = (arguments.commit or commit(checkout)).partition(" ")
    result = {
        "repository": arguments.repository,
        "commit": name,
        "date": date,
        "machine": machine(),
        "files": len(outcomes),
        "counts": dict(sorted(counts.items())),
        "median_seconds": statistics.median(outcome.seconds for outcome in outcomes),
        "median_processor_seconds": statistics.median(outcome.processor_seconds for outcome in outcomes),
        "largest_seconds": max(outcome.seconds for outcome in outcomes),
        "outcomes": [{key: value for key, value in asdict(outcome).items() if value} for outcome in outcomes],
    }
    if arguments.show:
        for outcome in outcomes:
            if outcome.result not in ("plans", "waits"):
                print(f"== {outcome.file}: {outcome.result}\n{outcome.message}")
    print(json.dumps({key: value for key, value in result.items() if key != "outcomes"}, indent=1))
    if arguments.out:
        table = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps(table | {arguments.framework: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
