"""`quintet export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from quintet.cli.messages import warn
from quintet.cli.transformers_setup import silence_transformers
from quintet.errors import ConfigError
from quintet.runtime.signals import stop_on_signals

if TYPE_CHECKING:
    from quintet.pipelines.export import ExportCheck

DTYPES = ("float32", "bfloat16", "float16")


def run(source: str, target: str, dtype: str | None, *, trust_remote_code: bool) -> None:
    """Export a model, print a summary and how it was checked.

    Raises:
        ConfigError: `dtype` is not supported.
        MachineError: There is no model at `source`, `target` exists, or the export failed its check.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype}: unknown dtype", key="--dtype", value=dtype, hint=f"valid: {', '.join(DTYPES)}"
        )
    silence_transformers()
    from quintet.pipelines.export import export

    with stop_on_signals(_interrupt):
        exported = export(source, Path(target), dtype, trust_remote_code=trust_remote_code, warn=warn)
    step = "" if exported.step is None else f", step {exported.step}"
    print(f"{exported.source}{step} → {exported.target}")
    print(f"{exported.parameters:,} parameters, {exported.size / 2**20:,.1f} MiB, {dtype or 'dtype unchanged'}")
    print(_describe(exported.check))


def _interrupt() -> NoReturn:
    """End the export, which removes the incomplete directory, also at SIGTERM."""
    raise KeyboardInterrupt


def _describe(check: ExportCheck) -> str:
    if check.rounding is None:
        return f"checked: the weights in the files, not the logits: {check.reason}"
    rounding = f"; rounding the weights changes them by up to {check.rounding:.2g}" if check.rounding else ""
    return f"checked: transformers computes the logits of the trained policy from it{rounding}"
