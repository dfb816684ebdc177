"""Files of tables and texts that lie beside the modules that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(module_file: str, name: str | None = None) -> Any:
    """Return the contents of a YAML file beside a module, whose `__file__` is given: by default of the same name."""
    module = Path(module_file)
    text = (module.with_suffix(".yaml") if name is None else module.with_name(name)).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
