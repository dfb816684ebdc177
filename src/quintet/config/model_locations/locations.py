"""Directories of models that a configuration names, and their `config.json`.

A model is a Hugging Face directory, a GGUF file, a name of the Hugging Face hub (`organisation/name`, also with
`@revision`) or a name in `published_models.yaml`. All but the first have a directory in a cache once they are there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from quintet.cache_directory import user_cache_directory
from quintet.config.model_locations.gguf_config import UnsupportedGGUFError, gguf_architectures, read_gguf_config
from quintet.config.model_locations.gguf_header import UnreadableGGUFError
from quintet.config.model_locations.published_models import PublishedModel, published_models

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w.-]+)?", re.ASCII)
GGUF = ".gguf"
CONVERSION = "1"
"""Version of the conversion of GGUF files; models that another one has converted are not used."""
MAX_CONFIG_BYTES = 1 << 20
"""Larger `config.json` files are not read."""
MODEL_FORMS = (
    f"a Hugging Face directory, a {GGUF} file of {', '.join(gguf_architectures())}, a name of the hub"
    f" (organisation/name or organisation/name@revision), or {', '.join(published_models())}"
)
"""What a key of a model may be, for messages."""


class UnreadableConfigError(Exception):
    """A `config.json` lacks a required size, or has an invalid one."""


def published_model(path: str) -> PublishedModel | None:
    """Return the published model of that name; None if there is none, or a directory of that name."""
    return None if os.path.exists(path) else published_models().get(path)


def is_gguf_file(path: str) -> bool:
    """Return whether a path is a GGUF file, by its name."""
    return path.endswith(GGUF) and not os.path.isdir(os.path.expanduser(path))


def is_hub_name(path: str) -> bool:
    """Return whether a path may be a model on the hub: `organisation/name`, and not an existing directory."""
    return HUB_NAME.fullmatch(path) is not None and not os.path.exists(path) and not is_gguf_file(path)


def hub_revision(path: str) -> tuple[str, str]:
    """Return name and revision of a model of the hub.

    >>> hub_revision("org/small"), hub_revision("org/small@v2")
    (('org/small', 'main'), ('org/small', 'v2'))
    """
    name, _, revision = path.partition("@")
    return name, revision or "main"


def is_hub_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` forbids the use of the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def models_cache() -> Path:
    """Return the directory of converted models, without creating it."""
    return user_cache_directory() / "models"


def published_directory(model: PublishedModel) -> Path:
    """Return where a published model is after its download. It is named as in the cache of the hub, from which run
    names and model cards take the name of a model."""
    entry = f"models--{model.hub_name.replace('/', '--')}"
    return models_cache() / entry / "snapshots" / f"{model.sha256[:16]}-{CONVERSION}"


def gguf_directory(path: str) -> Path:
    """Return where a GGUF file is after its conversion; another directory after each change of the file."""
    file = Path(os.path.expanduser(path)).resolve()
    status = file.stat() if file.is_file() else None
    identity = f"{CONVERSION}\0{file}\0{status and (status.st_size, status.st_mtime_ns)}"
    return models_cache() / hashlib.sha256(identity.encode()).hexdigest()[:16] / file.stem


def model_directory(path: str) -> Path:
    """Return the directory of a model, which may be missing. In the cache of `huggingface_hub`, it is the snapshot that
    the revision refers to; without a revision else any one with a `config.json`."""
    if model := published_model(path):
        return published_directory(model)
    if is_gguf_file(path):
        return gguf_directory(path)
    return _hub_directory(path) if is_hub_name(path) else Path(os.path.expanduser(path))


def _hub_directory(path: str) -> Path:
    name, revision = hub_revision(path)
    hf_home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(hf_home) / "hub"))
    model = cache / f"models--{name.replace('/', '--')}"
    reference = model / "refs" / revision
    commit = reference.read_text(encoding="utf-8", errors="replace").strip() if reference.is_file() else revision
    snapshots = sorted(file.parent for file in model.glob("snapshots/*/config.json"))
    matching = [snapshot for snapshot in snapshots if snapshot.name == commit]
    if not matching and "@" not in path:
        matching = snapshots
    return matching[-1] if matching else model


def config_file(path: str) -> Path | None:
    """Return the `config.json` of a model that is on this machine, None if missing."""
    file = model_directory(path) / "config.json"
    return file if os.path.exists(file) else None


def is_in_cache(path: str) -> bool:
    """Return whether the directory of a model is, or will be, in a cache: it is named in another way."""
    return published_model(path) is not None or is_gguf_file(path) or is_hub_name(path)


def local_directory(path: str) -> str | None:
    """Return the directory in a cache of a model that is named in another way; None if it is not there."""
    if not is_in_cache(path):
        return None
    file = config_file(path)
    return None if file is None else str(file.parent)


def read_model_config(path: str) -> dict[str, Any] | None:
    """Return the `config.json` of a model, also if it is still to be downloaded or converted; None if it is unknown.

    Raises:
        UnreadableConfigError: it is too large, or not a mapping; or a GGUF file is damaged or not supported.
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    if (file := config_file(path)) is not None:
        return read_config(file)
    if (model := published_model(path)) is not None:
        return dict(model.config)
    if not is_gguf_file(path) or not os.path.exists(os.path.expanduser(path)):
        return None
    try:
        return read_gguf_config(Path(os.path.expanduser(path)))
    except (UnreadableGGUFError, UnsupportedGGUFError) as error:
        raise UnreadableConfigError(str(error)) from error


def read_config(file: Path) -> dict[str, Any]:
    """Parse a `config.json`.

    Raises:
        UnreadableConfigError: it is too large, or not a mapping.
        ValueError: it is not JSON.
    """
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise UnreadableConfigError(f"it is larger than {MAX_CONFIG_BYTES >> 20} MiB")
    config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UnreadableConfigError("it is not a mapping")
    return config
