"""`quintet export`."""

from __future__ import annotations

from pathlib import Path

from quintet.cli.messages import warn
from quintet.cli.transformers_setup import silence_transformers
from quintet.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def run(source: str, target: str, dtype: str | None) -> None:
    """Export a model and print a summary.

    Raises:
        ConfigError: `dtype` is not supported.
        MachineError: There is no model at `source`, or `target` exists.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype}: unknown dtype", key="--dtype", value=dtype, hint=f"valid: {', '.join(DTYPES)}"
        )
    silence_transformers()
    from quintet.pipelines.export import export

    exported = export(source, Path(target), dtype, warn=warn)
    step = "" if exported.step is None else f", step {exported.step}"
    print(f"{exported.source}{step} → {exported.target}")
    print(f"{exported.parameters:,} parameters, {exported.size / 2**20:,.1f} MiB, {dtype or 'dtype unchanged'}")
