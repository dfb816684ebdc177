"""Compare plans of run scripts from public projects with what their own trainers would read from them.

    python benchmarks/project_files.py CHECKOUTS --seed 0 --count 40 --out benchmarks/results/project_files.json

CHECKOUTS is a directory of bare git repositories, named `owner+name`, of projects that build on verl. The values expected
of a script come from other programs than Quintet's reader: bash runs the script, without network, as another user, and
with a PATH of harmless commands in which `python3` prints its arguments; Hydra composes the project's own configuration
tree with them; and the formulas below are those of verl's trainer at that release. Needs Linux, root and hydra-core.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

COMMANDS = (
    "basename",
    "cat",
    "cut",
    "date",
    "dirname",
    "env",
    "expr",
    "head",
    "realpath",
    "sed",
    "seq",
    "tail",
    "tr",
    "wc",
)
FRAMEWORKS = ("RAGEN-AI+RAGEN", "RAGEN-AI+VAGEN", "RLinf+RLinf", "alibaba+ROLL", "mll-lab-nu+RAGEN", "mll-lab-nu+VAGEN")
FRAMEWORKS += ("volcengine+verl", "verl-project+verl", "verl-project+verl-recipe", "JamesKrW+verl")
NOBODY = 65534
MAX_PER_PROJECT = 4
STUB = """#!/bin/bash
printf '%s\\0' "$@" >> {out}
printf '\\n' >> {out}
"""


@dataclass
class FileResult:
    """Outcome of one script."""

    project: str
    commit: str
    path: str
    outcome: str = ""
    """`equal`, `different`, `waits`, `refused`, or what the framework's own programs refuse."""
    message: str = ""
    compared: dict[str, Any] = field(default_factory=dict)
    different: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Expected and planned value by name."""


def scripts(checkouts: Path) -> Iterator[tuple[Path, str]]:
    """Yield repositories and paths of run scripts that start a `main_ppo`, at most a few of each project."""
    for repository in sorted(checkouts.iterdir()):
        if repository.name in FRAMEWORKS or not (repository / "repo" / "HEAD").exists():
            continue
        git = repository / "repo"
        for line in _git(git, "grep", "-lE", r"^[^#]*main_ppo", "HEAD", "--", "*.sh", check=False).splitlines():
            if "tests/" not in line:
                yield git, line.removeprefix("HEAD:")


def _git(directory: Path, *arguments: str, check: bool = True) -> str:
    command = ["git", f"--git-dir={directory}", *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def choose(pairs: Sequence[tuple[Path, str]], count: int, seed: int) -> list[tuple[Path, str]]:
    """Return a random sample with at most `MAX_PER_PROJECT` scripts of a project."""
    shuffled = random.Random(seed).sample(list(pairs), len(pairs))
    per_project: dict[Path, int] = {}
    chosen = []
    for git, path in shuffled:
        if per_project.get(git, 0) < MAX_PER_PROJECT and len(chosen) < count:
            per_project[git] = per_project.get(git, 0) + 1
            chosen.append((git, path))
    return chosen


def unpack(git: Path, target: Path) -> None:
    """Write the scripts, modules and YAML files of a repository; snapshots may lack other files."""
    for line in _git(git, "ls-tree", "-r", "HEAD").splitlines():
        kind, path = line.split()[1], line.partition("\t")[2]
        if kind == "blob" and path.endswith((".sh", ".py", ".yaml", ".yml")):
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_git(git, "show", f"HEAD:{path}", check=False))


def bash_arguments(checkout: Path, script: str) -> list[list[str]]:
    """Return the arguments of each Python program that bash starts for a script."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        out = directory / "calls"
        out.touch()
        shutil.chown(out, NOBODY)
        for command in ("python", "python3", "torchrun"):
            (directory / command).write_text(STUB.format(out=out))
            (directory / command).chmod(0o755)
        for command in COMMANDS:
            if program := shutil.which(command):
                (directory / command).symlink_to(program)
        command = ["unshare", "-n", "setpriv", f"--reuid={NOBODY}", "--clear-groups"]
        command += ["/usr/bin/env", "-i", f"PATH={name}", "HOME=/nonexistent", "/bin/bash", script]
        subprocess.run(command, cwd=checkout, capture_output=True, timeout=20, stdin=subprocess.DEVNULL, check=False)
        calls = out.read_text(errors="replace").split("\0\n")
    return [call.split("\0") for call in calls if call]


def composed(checkout: Path, arguments: Sequence[str]) -> Any:
    """Return Hydra's composition for the arguments of a Python program.

    Raises:
        LookupError: the arguments start no trainer of the checkout.
        HydraException, OmegaConfBaseException: Hydra refuses the arguments.
    """
    start = next(place for place, part in enumerate(arguments) if "main_ppo" in part)
    module = arguments[start].removesuffix(".py").replace(".", "/") + ".py"
    files = [path for path in checkout.rglob("*.py") if str(path).endswith(f"/{module.removeprefix('./')}")]
    if not files:
        raise LookupError(f"{arguments[start]} is not in the checkout")
    file = min(files, key=lambda path: len(path.parts))
    options, overrides = _split(arguments[start + 1 :])
    folder, name = _hydra_main(file)
    directory = Path(options.get("config-path", folder))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str((file.parent / directory).resolve()), version_base=None):
        return compose(options.get("config-name", name).removesuffix(".yaml"), overrides)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return Hydra's own options and the overrides."""
    options, overrides, rest = {}, [], list(arguments)
    while rest:
        part = rest.pop(0)
        if match := re.fullmatch(r"--(config-path|config-name)(?:=(.*))?", part):
            options[match[1]] = match[2] or rest.pop(0)
        elif part:
            overrides.append(part)
    return options, overrides


def _hydra_main(file: Path) -> tuple[str, str]:
    """Return folder and name in the decorator `@hydra.main` of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            values = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
            return values["config_path"], values["config_name"]
    raise LookupError(f"{file.name} has no @hydra.main")


def expected(config: Any, source: str) -> dict[str, Any]:
    """Return what verl's trainer reads from a composed configuration, by native name; `source` is its `ray_trainer.py`.

    A key that the tree does not have is one of another release, and is left out.
    """
    get = lambda key, default=None: OmegaConf.select(config, key, default=default)  # noqa: E731
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    prompts, loss_kl = get("data.train_batch_size"), bool(get(f"{actor}.use_kl_loss"))
    reward_kl = get("algorithm.use_kl_in_reward")
    if reward_kl is None and "use_kl_in_reward" not in source:  # before verl 0.4
        reward_kl = not loss_kl
    clip = get(f"{actor}.clip_ratio")
    steps = get("trainer.total_training_steps")
    values = {
        "training.groups_per_step": prompts,
        "training.samples_per_group": get(f"{rollout}.n", 1),
        "training.mini_batches": -(-prompts // get(f"{actor}.ppo_mini_batch_size")),
        "training.epochs": get(f"{actor}.ppo_epochs"),
        "kl in rewards": get("algorithm.kl_ctrl.kl_coef") if reward_kl else None,
        "kl in the loss": get(f"{actor}.kl_loss_coef") if loss_kl else None,
        "algorithm.entropy_coefficient": get(f"{actor}.entropy_coeff", 0),
        "clip": [get(f"{actor}.clip_ratio_low", clip), get(f"{actor}.clip_ratio_high", clip)],
        "algorithm.advantage.name": get("algorithm.adv_estimator"),
        "rollout.temperature": get(f"{rollout}.temperature"),
        "rollout.top_p": get(f"{rollout}.top_p"),
        "rollout.top_k": max(get(f"{rollout}.top_k"), 0),
        "rollout.max_prompt_tokens": get("data.max_prompt_length"),
        "rollout.max_response_tokens": get("data.max_response_length"),
        "actor.optimizer.learning_rate": get(f"{actor}.optim.lr"),
        "actor.budget.tokens": get(f"{actor}.ppo_max_token_len_per_gpu") if get(f"{actor}.use_dynamic_bsz") else None,
        "steps" if steps else "epochs over the data": steps or get("trainer.total_epochs"),
        "devices": get("trainer.nnodes") * get("trainer.n_gpus_per_node"),
        "rollout.engine_options.tensor_parallel": get(f"{rollout}.tensor_model_parallel_size"),
    }
    if values["algorithm.advantage.name"] == "gae":
        values |= {f"algorithm.advantage.{name}": get(f"algorithm.{name}") for name in ("gamma", "lam")}
    return values


def planned(native: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the same of a native configuration."""
    algorithm, placement = native["algorithm"], native["placement"]
    kl, loss = algorithm.get("kl") or {}, algorithm["loss"]
    coefficients = {kl.get("apply_to"): kl.get("coefficient")}
    derived = {
        "kl in rewards": (algorithm.get("reward_kl") or {}).get("coefficient", coefficients.get("reward")),
        "kl in the loss": coefficients.get("loss"),
        "clip": [loss.get("clip_low"), loss.get("clip_high")],
        "devices": placement["nodes"] * placement["devices_per_node"],
        "steps": native["training"]["steps"],
        "epochs over the data": (native.get("data") or {}).get("epochs"),
    }
    return {name: derived[name] if name in derived else _select(native, name) for name in names}


def _select(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def translated(checkout: Path, script: str) -> tuple[dict[str, Any] | None, str]:
    """Return the native configuration of a script, and what Quintet says of it."""
    command = [sys.executable, "-m", "quintet", "translate", script]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)
    return (yaml.safe_load(done.stdout) if done.stdout.strip() else None), done.stderr.strip()


def compare(git: Path, script: str) -> FileResult:
    """Compare one script."""
    project = next(part for part in git.parts if "+" in part).replace("+", "/")
    result = FileResult(project, _git(git, "rev-parse", "HEAD").strip(), script)
    with tempfile.TemporaryDirectory() as name:
        checkout = Path(name)
        checkout.chmod(0o755)
        unpack(git, checkout)
        calls = [call for call in bash_arguments(checkout, script) if any("main_ppo" in part for part in call)]
        trainers = list(checkout.rglob("ray_trainer.py"))
        try:
            config = composed(checkout, calls[0]) if calls else None
            wanted = expected(config, trainers[0].read_text() if trainers else "") if config else None
        except (HydraException, OmegaConfBaseException, LookupError, AttributeError, TypeError) as error:
            wanted, result.message = None, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        native, message = translated(checkout, script)
    if wanted is None:
        result.outcome = "not composed" if calls else "starts no trainer"
    elif native is None:
        result.outcome, result.message = "refused or waits", message[:400]
    else:
        found = planned(native, list(wanted))
        result.compared = wanted
        result.different = {key: (wanted[key], found[key]) for key in wanted if not _equal(wanted[key], found[key])}
        result.outcome = "different" if result.different else "equal"
    return result


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and not isinstance(one, str):
        return isinstance(other, Sequence) and all(map(_equal, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for git, script in choose(list(scripts(arguments.checkouts)), arguments.count, arguments.seed):
        results.append(compare(git, script))
        print(results[-1].outcome, results[-1].project, script, results[-1].different or results[-1].message)
    if arguments.out:
        rows = [asdict(result) for result in results]
        arguments.out.write_text(json.dumps({"seed": arguments.seed, "files": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
