"""`quintet export`."""

from __future__ import annotations

import os
from pathlib import Path

from quintet.errors import ConfigError

__all__ = ["run"]

TYPES = ("float32", "bfloat16", "float16")


def run(source: str, target: str, dtype: str | None) -> None:
    """Write the model, and say what was written.

    Raises:
        ConfigError: there is no such type.
        MachineError: there is no such model, or something lies at the target.
    """
    if dtype is not None and dtype not in TYPES:
        raise ConfigError(f"--dtype {dtype}: no such type", key="--dtype", value=dtype, hint=f"take {', '.join(TYPES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from quintet.pipelines.export import export

    found = export(source, Path(target), dtype)
    step = "" if found.step is None else f", step {found.step}"
    print(f"{found.source}{step} → {found.target}")
    print(f"{found.parameters:,} parameters, {found.size / 2**20:,.1f} MiB, {dtype or 'types as they were'}")
