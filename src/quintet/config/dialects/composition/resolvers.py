"""OmegaConf resolvers that the frameworks' files use in `${…}`, and hints for failed interpolations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


RESOLVERS: Mapping[str, Any] = {
    "multiply": lambda a, b: _number(a) * _number(b),
    "int_div": lambda a, b: _number(a) // _number(b),
    "subtract": lambda a, b: _number(a) - _number(b),
    "not": lambda a: not a,
    # the name of a type remains text, so that torch is not imported
    "torch.dtype": str,
}
BUILT_IN = ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values")


def register_resolvers(environment: Mapping[str, str]) -> None:
    """Register the resolvers with OmegaConf; `${oc.env:…}` looks into `environment` first."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers.oc import env

    def look_up(key: str, *default: Any) -> Any:
        return environment[key] if key in environment else env(key, *default)

    for name, resolver in {**RESOLVERS, "oc.env": look_up}.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def first_line(error: BaseException) -> str:
    """Return the message of an error of Hydra or OmegaConf in one line."""
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply"
    said = str(error).strip() or str(error.__cause__ or "").strip()
    lines = re.sub(r"\w+ raised while resolving interpolation: ", "", said).splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].strip('"') if not lines[0].endswith(":") else " ".join(lines[:2])


def hint_for(problem: str) -> str:
    """Return a hint for a failed interpolation."""
    if "Unsupported interpolation type" in problem:
        return f"there are {', '.join([*RESOLVERS, *BUILT_IN])}"
    if problem.startswith("Environment variable"):
        return "set it, or write ${oc.env:NAME,DEFAULT}"
    return "fix the ${…} in it"
