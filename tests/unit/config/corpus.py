"""The configurations in `examples/`, as people of each framework have them on disk."""

from __future__ import annotations

from pathlib import Path

__all__ = ["EXAMPLES", "NAMES", "corpus"]

EXAMPLES = Path(__file__).parents[3] / "examples"
SUFFIXES = {".yaml", ".sh", ".txt"}


def corpus() -> list[Path]:
    """Every file that a command can be given: not those that others of them bring along."""
    return sorted(path for path in EXAMPLES.rglob("*") if path.suffix in SUFFIXES and not _is_brought(path))


def _is_brought(path: Path) -> bool:
    """Whether it is a recipe for a cluster, or an env's own file: VAGEN's lies beside its script, RLinf's in a folder
    that its configurations search."""
    beside = [other for other in path.parent.iterdir() if other.suffix in {".sh", ".txt"}]
    return (path.name == "env_config.yaml" and bool(beside)) or path.parent.name in ("env", "cluster")


NAMES = {path: str(path.relative_to(EXAMPLES)) for path in corpus()}
