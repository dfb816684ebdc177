"""Compare plans of files from public projects with what their own trainers would read from them.

    python benchmarks/project_files.py CHECKOUTS --seed 0 --count 40 --out benchmarks/results/project_files.json
    python benchmarks/project_files.py CHECKOUTS --again benchmarks/results/project_files.json --out FILE

CHECKOUTS is a directory of git repositories without work trees, `owner+name/repo`: projects that build on the
frameworks, and the frameworks themselves. Files that are identical to one in a framework's history are left out. The
expected values of a file come from other programs than Quintet's reader: bash runs a script, with a `python3` that
prints its arguments; Hydra composes the project's own configuration tree with them (`project_programs.py`); and
`project_values.py` and `project_yaml_values.py` have the formulas of the trainer's code. `--again` compares the files
of a table once more. Needs Linux, root, hydra-core.

Outcomes: `equal` and `different` (the values that the plan has otherwise); `refused`, though the framework takes the
file; `framework refuses`: Hydra does not compose it; `not derived`: the expected values are not known, and why.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from machine import machine
from project_programs import TRAINER, bash_arguments, composed, program_of
from project_values import TrainerCode, are_equal, expected, is_missing, planned, ragen_values
from project_yaml_values import MARKS, register_resolvers, rlinf_values, roll_values
from quintet.cli.configuration import inspect_config
from quintet.config.native.experiment import Experiment
from quintet.errors import UserError
from real_files import directories

FRAMEWORKS = ("RAGEN-AI+RAGEN", "RAGEN-AI+VAGEN", "RLinf+RLinf", "alibaba+ROLL", "mll-lab-nu+RAGEN", "mll-lab-nu+VAGEN")
FRAMEWORKS += ("volcengine+verl", "verl-project+verl", "verl-project+verl-recipe", "JamesKrW+verl")
MAX_PER_PROJECT = 4
TIME_LIMIT = 600
REFUSED_BY_CODE = {
    "TIGER-AI-Lab/verl-tool/examples/train/mathcoder/train_1.5b.sh": "no module registers a reward manager mathcoder",
    "nuoyanLyu/MultiGame-Reasoning/config/_22_MINT_test.yaml": "train.py asserts that a mini-batch is not larger",
}
"""Files that Hydra composes and the project's code refuses when it runs, as was read there."""
DERIVED = ("equal", "different", "refused")
"""Outcomes of files whose expected values are known; files are tried until there are as many as asked for."""
AGAIN = ("different", "refused")
OF_FORK = re.compile(r"waits: (key|value) of")
RUN_NAME = re.compile(r"^  (\S+:\d+(?::\d+)?)  ", re.MULTILINE)
"""How Quintet's message names each run of a script with several."""
UNSET = re.compile(
    r"^(\S+) \(.*\$(\d) is given where the script|\$(\w+) is set neither in the script|set what it depends on: (\w+)=",
    re.MULTILINE,
)
"""Positional arguments, with the keys that they set, and variables that Quintet's message names."""
NUMBERS = re.compile(
    r"size|gpu|max_res|node|num|len|batch|step|epoch|world|rank|token|bs|tp|turns|coef|ratio|\.n$|\.lr$", re.IGNORECASE
)
"""Names of variables and keys that are given a number; others are given a directory."""
FRACTIONS = re.compile(r"^(LR|KL_COE|ENTROPY|GPU_UT|TEMPERATURE)$")
"""Names of variables that are given a fraction."""
MAX_MISSING = 5
"""Messages about missing values of a script that are followed."""
NUMBER, FRACTION, DIRECTORY = "4", "0.5", "data"
ARGUMENTS = {
    "Alibaba-NLP/ZeroSearch": [
        *(
            "NUM_GPUS_PER_NODE",
            "4",
            "MODEL_PATH",
            "models/llama",
            "DATA_PATH",
            "data",
            "TOTAL_STEPS",
            "203",
            "IP",
            "localhost",
        ),
        *(
            "SEARCH_MODE",
            "simulate_prompt",
            "SIMULATION_LLM",
            "models/qwen",
            "START_THRESHOLD",
            "0",
            "END_THRESHOLD",
            "0.5",
        ),
    ],
}
"""Arguments of scripts whose documentation gives them."""


@dataclass
class FileResult:
    """Outcome of one file."""

    project: str
    commit: str
    path: str
    dialect: str = ""
    outcome: str = ""
    message: str = ""
    given: dict[str, str] = field(default_factory=dict)
    """Variables and arguments that the script does not set, given to bash and to Quintet."""
    compared: dict[str, Any] = field(default_factory=dict)
    """Expected value by name."""
    different: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Expected and planned value by name."""
    waits: list[str] = field(default_factory=list)
    """Keys that wait for what this version lacks."""
    fork_keys: list[str] = field(default_factory=list)
    """Keys, and keys with values, that wait for the code of the fork."""
    typos: list[str] = field(default_factory=list)
    """Keys that Quintet calls typos."""


def candidates(checkouts: Path) -> Iterator[tuple[Path, str]]:
    """Yield repositories and paths of run scripts that start a trainer, and that no framework has."""
    histories = [checkouts / name / "repo" for name in FRAMEWORKS if (checkouts / name / "repo").exists()]
    for repository in sorted(checkouts.iterdir()):
        git = repository / "repo"
        if repository.name in FRAMEWORKS or not (git / "HEAD").exists():
            continue
        patterns = {"*.sh": rf"^[^#]*({TRAINER.pattern.replace('?:', '')})", "*.yaml": "|".join(MARKS.values())}
        paths = [path for kind, pattern in patterns.items() for path in _files_with(git, pattern, kind)]
        answer = _git(git, "rev-parse", *(f"HEAD:{path}" for path in paths)) if paths else ""
        ids = dict(zip(paths, answer.split(), strict=True))
        known = {each for history in histories for each in _present(history, ids.values())}
        yield from ((git, path) for path in paths if ids[path] not in known)


def _files_with(git: Path, pattern: str, kind: str) -> list[str]:
    lines = _git(git, "grep", "-lE", pattern, "HEAD", "--", kind, check=False).splitlines()
    return [line.removeprefix("HEAD:") for line in lines if "tests/" not in line]


def _present(git: Path, ids: Iterable[str]) -> set[str]:
    """Return the objects that a repository has."""
    command = ["git", f"--git-dir={git}", "cat-file", "--batch-check"]
    answer = subprocess.run(command, input="\n".join(ids), check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in answer.splitlines() if not line.endswith("missing")}


def _git(directory: Path, *arguments: str, check: bool = True) -> str:
    command = ["git", f"--git-dir={directory}", *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def choose(pairs: Sequence[tuple[Path, str]], seed: int) -> list[tuple[Path, str]]:
    """Return the files in a random order, with at most `MAX_PER_PROJECT` files of a project."""
    per_project: Counter[Path] = Counter()
    chosen: list[tuple[Path, str]] = []
    for git, path in random.Random(seed).sample(list(pairs), len(pairs)):
        if per_project[git] < MAX_PER_PROJECT:
            per_project[git] += 1
            chosen.append((git, path))
    return chosen


def unpack(git: Path, target: Path, commit: str = "HEAD") -> None:
    """Write the scripts, modules and YAML files of a repository; snapshots may lack other files."""
    lines = _git(git, "ls-tree", "-r", commit).splitlines()
    links = {line.partition("\t")[2] for line in lines if line.startswith("120000")}
    entries = [(line.split()[2], line.partition("\t")[2]) for line in lines if line.split()[1] == "blob"]
    entries = [entry for entry in entries if entry[1].endswith((".sh", ".py", ".yaml", ".yml", ".json"))]
    command = ["git", f"--git-dir={git}", "cat-file", "--batch"]
    stored = subprocess.run(
        command, input="\n".join(e[0] for e in entries).encode(), check=True, capture_output=True
    ).stdout
    stream = io.BytesIO(stored)
    for _, path in entries:
        header = stream.readline().split()
        if header[-1] == b"missing":
            continue
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        content = stream.read(int(header[2]))
        stream.read(1)
        if path not in links:
            file.write_bytes(content)
        elif target.resolve() in (file.parent / os.fsdecode(content)).resolve().parents:
            file.symlink_to(os.fsdecode(content))
    (target / "CHECKOUT").touch()


def unpack_submodules(git: Path, target: Path, checkouts: Path) -> None:
    """Write the frameworks that a repository has as submodules, at the commits that it names."""
    for line in _git(git, "ls-tree", "-r", "HEAD").splitlines():
        kind, commit, path = line.split()[1], line.split()[2], line.partition("\t")[2]
        owners = [checkouts / name / "repo" for name in FRAMEWORKS if kind == "commit"]
        for framework in (each for each in owners if each.exists() and _present(each, [commit])):
            unpack(framework, target / path, commit)
            break


def missing_values(message: str, project: str) -> tuple[dict[str, str], list[str]]:
    """Return values for the variables and arguments that a script does not set, as Quintet's message names them."""
    variables: dict[str, str] = {}
    arguments = [DIRECTORY] * 9
    has_arguments = False
    for match in UNSET.finditer(message):
        key, place, *names = match.groups()
        name = next(filter(None, names), key)
        value = FRACTION if FRACTIONS.search(name) else NUMBER if NUMBERS.search(name) else DIRECTORY
        if place:
            has_arguments, arguments[int(place) - 1] = True, value
        else:
            variables[name] = value
    return variables, ARGUMENTS.get(project, arguments) if has_arguments else []


def plan_of(checkout: Path, name: str, variables: dict[str, str], arguments: Sequence[str]) -> dict[str, Any]:
    """Return what `quintet plan` would say of a file."""
    os.chdir(checkout)
    os.environ |= variables | {"HOME": "/nonexistent"}
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(errors):
        try:
            inspected = inspect_config(name, ["--", *arguments] if arguments else [], None, "refuse")
        except UserError as error:
            return {"refused": str(error)}
    native = inspected.composed.experiment.model_dump(mode="json")
    problems = [problem for problem in inspected.unsupported if not problem.elsewhere]
    of_fork = [problem.key for problem in problems if OF_FORK.search(problem.message)]
    waits = [problem.key for problem in problems if problem.key not in of_fork]
    release = inspected.composed.release
    return {"native": native, "waits": waits, "fork_keys": of_fork, "release": release, "dialect": inspected.dialect}


def wanted_of(checkout: Path, call: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    """Return the expected values of the call of a program, or of a YAML file, or why there are none."""
    os.chdir(checkout)  # search paths of Hydra are relative to it
    os.environ |= variables
    register_resolvers()
    try:
        return {"values": _wanted_of_yaml(checkout, call[0]) if len(call) == 1 else _wanted_of_call(checkout, call)}
    except (HydraException, OmegaConfBaseException) as error:
        return {"framework refuses": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    except (LookupError, TypeError, ValueError, SyntaxError, ZeroDivisionError) as error:
        return {"not derived": f"{type(error).__name__}: {error}"}


def _wanted_of_call(checkout: Path, call: Sequence[str]) -> dict[str, Any]:
    program = program_of(checkout, call[0])
    config = composed(program, call[1:])
    OmegaConf.resolve(config)
    code = TrainerCode.of(program)
    return ragen_values(config, code) if "es_manager" in config else expected(config, code)


def _wanted_of_yaml(checkout: Path, path: str) -> dict[str, Any]:
    file = checkout / path
    if re.search(MARKS["ragen"], file.read_text(), re.MULTILINE):
        return _wanted_of_call(checkout, ["train.py", f"--config-name={file.stem}"])
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(file.parent), version_base=None):
        config = compose(file.stem)
    OmegaConf.resolve(config)
    values = rlinf_values(config) if "runner" in config else roll_values(config, checkout)
    return {name: value for name, value in values.items() if not is_missing(value)}


def in_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the result of a function in a process of its own, which a crash or a long time ends."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        try:
            return pool.apply_async(function, arguments).get(TIME_LIMIT)
        except multiprocessing.TimeoutError:
            return {"refused": f"no answer in {TIME_LIMIT} seconds", "not derived": "timeout"}


def compare(git: Path, script: str, checkouts: Path) -> FileResult:
    """Compare the first and the last run of a script."""
    project = next(part for part in git.parts if "+" in part).replace("+", "/")
    result = FileResult(project, _git(git, "rev-parse", "HEAD").strip(), script)
    with tempfile.TemporaryDirectory() as name:
        checkout = Path(name)
        checkout.chmod(0o755)
        unpack(git, checkout)
        unpack_submodules(git, checkout, checkouts)
        given = directories(checkout, checkout / script)
        plan = in_process(plan_of, checkout, script, given, ())
        missing: dict[str, str] = {}
        arguments: list[str] = []
        for _ in range(MAX_MISSING):
            names, words = missing_values(plan.get("refused", ""), project)
            if not (names or words):
                break
            missing, arguments = missing | names, words or arguments
            plan = in_process(plan_of, checkout, script, given | missing, arguments)
        given |= missing
        result.given = missing | ({"arguments": " ".join(arguments)} if arguments else {})
        calls = bash_arguments(checkout, script, given, arguments) if script.endswith(".sh") else [[script]]
        runs = RUN_NAME.findall(plan.get("refused", "")) if " times:" in plan.get("refused", "") else [script]
        for place in (0, -1)[: min(2, len(runs))]:
            planned_run = plan if runs == [script] else in_process(plan_of, checkout, runs[place], given, arguments)
            wanted = (
                in_process(wanted_of, checkout, calls[place], given)
                if calls
                else {"not derived": "bash starts no trainer"}
            )
            _judge(result, wanted, planned_run)
            if result.outcome != "equal":
                break
    return result


def _judge(result: FileResult, wanted: dict[str, Any], plan: dict[str, Any]) -> None:
    """Set the outcome of a run."""
    refused = plan.get("refused", "")
    result.dialect = plan.get("dialect", "")
    result.waits, result.fork_keys = plan.get("waits", []), plan.get("fork_keys", [])
    result.typos = re.findall(r"unknown key (\S+) \(\S+\) looks like a typo", refused)
    if "values" not in wanted:
        result.outcome, reason = next(iter(wanted.items()))
        result.message = f"{reason}; Quintet: {refused[:600] or 'plans'}"
    elif reason := REFUSED_BY_CODE.get(f"{result.project}/{result.path}"):
        result.outcome, result.message = "framework refuses", f"{reason}; Quintet: {refused[:600] or 'plans'}"
    elif refused:
        result.outcome, result.message = "refused", refused[:1500]
    else:
        result.compared = dict(wanted["values"])
        if (
            "algorithm.adv_estimator" in result.fork_keys
        ):  # an estimator of the fork, for which the plan has another one
            result.compared = {name: value for name, value in result.compared.items() if "advantage" not in name}
        found = planned(plan["native"], list(result.compared))
        pairs = {name: (value, found[name]) for name, value in result.compared.items()}
        result.different = {name: pair for name, pair in pairs.items() if not are_equal(*pair)}
        result.outcome = "different" if result.different else "equal"
        result.message = plan["release"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), help="parts of PROJECT/PATH; other files are not compared")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", type=Path, help="a table whose files are compared, in place of random ones")
    parser.add_argument("--resume", action="store_true", help="compare those again that were different or refused")
    arguments = parser.parse_args()
    Experiment()  # imports what each process needs
    results: list[FileResult] = []
    rows = json.loads(arguments.out.read_text())["files"] if arguments.resume else []
    kept = {(row["project"], row["path"]): FileResult(**row) for row in rows if row["outcome"] not in AGAIN}
    if arguments.again:
        former = json.loads(arguments.again.read_text())
        seed, count = former["seed"], len(former["files"])
        chosen = [(repository_of(arguments.checkouts, row["project"]), row["path"]) for row in former["files"]]
    else:
        seed, count = arguments.seed, arguments.count
        chosen = choose(list(candidates(arguments.checkouts)), seed)
    for git, path in chosen:
        if arguments.only and not any(part in f"{git}/{path}" for part in arguments.only):
            continue
        if sum(result.outcome in DERIVED for result in results) == count:
            break
        project = git.parent.name.replace("+", "/")
        results.append(kept.get((project, path)) or compare(git, path, arguments.checkouts))
        print(results[-1].outcome, results[-1].project, path, results[-1].different or results[-1].message, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(table(results, seed), indent=1, default=str) + "\n")


def repository_of(checkouts: Path, project: str) -> Path:
    return checkouts / project.replace("/", "+") / "repo"


def table(results: Sequence[FileResult], seed: int) -> dict[str, Any]:
    """Return the results with their numbers."""
    typos = sum(len(result.typos) for result in results)
    return {
        "seed": seed,
        "machine": machine(),
        "outcomes": Counter(result.outcome for result in results),
        "dialects": Counter(result.dialect for result in results if result.outcome in DERIVED),
        "unknown_keys": typos + sum(len(result.fork_keys) for result in results),
        "called_typos": typos,
        "files": [{name: value for name, value in asdict(result).items() if value} for result in results],
    }


if __name__ == "__main__":
    main()
