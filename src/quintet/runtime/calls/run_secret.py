"""Secret of a run, by which the controller and its workers know each other. It never goes through the rendezvous store,
which anybody who knows its port can read and write."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quintet.errors import MachineError

VARIABLE = "QUINTET_RUN_SECRET"
"""Environment variable with the secret, which Ray's launcher sets for all ranks."""
MIN_CHARACTERS = 16
_TOKEN_CHARACTERS = 64
POLL_SECONDS = 0.05
_NAME, _TOKEN = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
_HINT = f"use a run directory that all nodes share, or set {VARIABLE} to the same random value on all nodes"


@dataclass(frozen=True, slots=True)
class RunSecret:
    """Source of the secret: its value, or a directory that all processes of the run share."""

    value: str | None = None
    directory: Path | None = None

    @classmethod
    def taken_from_environment(cls, directory: Path) -> RunSecret:
        """Return the secret of this process, and remove it from the environment of processes that it starts.

        Raises:
            MachineError: the variable is too short to be a secret.
        """
        value = os.environ.pop(VARIABLE, None)
        if value is not None and len(value) < MIN_CHARACTERS:
            message = f"{VARIABLE} has {len(value)} characters"
            raise MachineError(message, f"set it to the same {MIN_CHARACTERS} or more random characters on all nodes")
        return cls(value, directory)

    def create(self) -> tuple[str, str]:
        """Return the secret and the name by which the other processes find it; the name is no secret.

        Raises:
            MachineError: the file cannot be written, or would not be private.
        """
        if self.value is not None or self.directory is None:
            return self.value or secrets.token_hex(32), ""
        token, name = secrets.token_hex(32), secrets.token_hex(16)
        file = self._file(self.directory, name)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for earlier in self.directory.glob("secret_*"):
                with suppress(OSError):  # of another user, or no file; nobody asks for its name
                    earlier.unlink()
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
                _check_private(opened.fileno(), file)
                opened.write(token)
        except OSError as error:
            raise MachineError(f"cannot write the secret of the run to {file}: {error.strerror}", _HINT) from error
        return token, name

    def remove(self, name: str) -> None:
        """Remove the file of `create`, if there is one."""
        if self.directory is not None and name:
            with suppress(OSError):
                self._file(self.directory, name).unlink()

    def find(self, name: str, timeout_seconds: float) -> str:
        """Return the secret that the controller has created under a name.

        Raises:
            MachineError: this process cannot know it, or somebody else may.
        """
        if self.value is not None:
            return self.value
        deadline = time.monotonic() + timeout_seconds
        while self.directory is not None and _NAME.fullmatch(name):
            with suppress(OSError):
                if _TOKEN.fullmatch(token := _read_private(self._file(self.directory, name))):
                    return token
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        raise MachineError(
            f"this process does not know the secret of the run: there is no file in {self.directory}", _HINT
        )

    @staticmethod
    def _file(directory: Path, name: str) -> Path:
        return directory / f"secret_{name}"


def _read_private(file: Path) -> str:
    """
    Raises:
        OSError: it cannot be read, or is a link.
        MachineError: somebody else may have written or read it.
    """
    # a pipe in its place would stop this process
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="ascii", errors="replace") as opened:
        _check_private(opened.fileno(), file)
        return opened.read(_TOKEN_CHARACTERS + 1)


def _check_private(descriptor: int, file: Path) -> None:
    """
    Raises:
        MachineError: the open file does not belong to this user, or others can read it.
    """
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        problem = f"user {status.st_uid}, mode {mode:o}; this process is user {os.geteuid()}"
        raise MachineError(
            f"the secret of the run at {file} is not private ({problem})",
            f"use a run directory on a file system with owners and permissions, or set {VARIABLE} to the same random "
            "value on all nodes",
        )


def proof(token: str, *parts: str) -> str:
    """Return what only a process with the secret can compute from the parts."""
    return hmac.new(token.encode(), "\n".join(parts).encode(), "sha256").hexdigest()


def is_proof(sent: str, token: str, *parts: str) -> bool:
    """Return whether a proof is that of the parts."""
    return hmac.compare_digest(sent.encode(), proof(token, *parts).encode())
