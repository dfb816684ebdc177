"""What bash and Hydra read of a run script: the arguments of its trainer, and the configuration that follows from them.

bash runs the script, without network, as another user, and with a PATH of harmless commands.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

PROGRAMS = (
    *("basename", "cat", "cut", "date", "dirname", "env", "expr", "grep", "head", "nohup", "realpath", "sed", "seq"),
    *("awk", "bash", "hostname", "mktemp", "nproc", "rev", "tail", "tr", "wc"),
)
"""Programs that scripts may run."""
TRAINER_PROGRAMS = ("python", "python3", "torchrun", "ray")
IGNORED_PROGRAMS = (
    *("mkdir", "sleep", "pip", "pip3", "conda", "wandb", "git", "curl", "wget", "kill", "pkill", "rm", "cp", "mv"),
    *("touch", "chmod", "tee", "huggingface-cli", "apt-get", "lsof", "fuser", "ssh", "scp", "unzip", "tar"),
)
"""Programs that succeed and do nothing."""
TRAINER = re.compile(r"main_(?:\w+_)?ppo|main_dapo")
NOBODY = 65534
TMUX = """#!/bin/bash
[ "$1" = has-session ] && exit 1
[ "$1" = send-keys ] && bash -c "$4"
exit 0
"""
"""Runs the command that a script sends to a terminal."""
OUTPUT = re.compile(r"(&?>>?) *[/~$][^\s&|;]*")
"""Redirection to a file in a directory that this machine may lack; without its directory, bash starts no trainer."""
RECORD = """#!/bin/bash
printf '%s\\0' "$@" >> {out}
printf '\\n' >> {out}
"""


def bash_arguments(checkout: Path, script: str, variables: dict[str, str], arguments: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each trainer that bash starts for a script, without its program."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        out = directory / "calls"
        out.touch()
        shutil.chown(out, NOBODY)
        texts = dict.fromkeys(TRAINER_PROGRAMS, RECORD.format(out=out)) | dict.fromkeys(
            IGNORED_PROGRAMS, "#!/bin/bash\n"
        )
        texts["tmux"] = TMUX
        for command, text in texts.items():
            (directory / command).write_text(text)
            (directory / command).chmod(0o755)
        for command in PROGRAMS:
            if program := shutil.which(command):
                (directory / command).symlink_to(program)
        command = ["unshare", "-n", "setpriv", f"--reuid={NOBODY}", "--clear-groups"]
        command += [
            "/usr/bin/env",
            "-i",
            f"PATH={name}",
            "HOME=/nonexistent",
            *(f"{k}={v}" for k, v in variables.items()),
        ]
        command += [shutil.which("timeout") or "timeout", "60", "/bin/bash", script, *arguments]
        file = checkout / script
        file.write_text(OUTPUT.sub(r"\1 /dev/null", file.read_text()))
        subprocess.run(command, cwd=checkout, capture_output=True, input=b"\n" * 99, check=False)
        calls = [call.split("\0") for call in out.read_text(errors="replace").split("\0\n") if call]
    starts = [next((place for place, part in enumerate(call) if TRAINER.search(part)), None) for call in calls]
    unique = {tuple(call[start:]): None for call, start in zip(calls, starts, strict=True) if start is not None}
    return [list(call) for call in unique]


def program_of(checkout: Path, name: str) -> Path:
    """Return the file of a module or program.

    Raises:
        LookupError: the checkout lacks it.
    """
    module = name.removesuffix(".py").removeprefix("./").replace(".", "/").lstrip("/")
    files = [path for path in checkout.rglob(f"{module.rpartition('/')[2]}.py") if str(path).endswith(f"/{module}.py")]
    if not files:
        raise LookupError(f"{name} is not in the checkout")
    return min(files, key=lambda path: len(path.parts))


def composed(program: Path, arguments: Sequence[str]) -> Any:
    """Return Hydra's composition for the arguments of a program.

    Raises:
        HydraException, OmegaConfBaseException: Hydra refuses the arguments.
        LookupError: the program is not one of Hydra's.
    """
    options, overrides = _split(arguments)
    folder, name = _hydra_main(program)
    directory = Path(options.get("config-path", folder))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str((program.parent / directory).resolve()), version_base=None):
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
