"""SVG code of the targets: icons drawn from a seed, or code from files, of which each split has its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from quintet.arrow_values import checked
from quintet.config.native.envs import SvgConfig
from quintet.envs.start_states import Split, layout_split, split_of
from quintet.errors import ConfigError

COLUMNS: Final = ("svg", "Svg")
"""Columns with code, the second one as in `starvector/svg-icons-simple`."""
SUFFIXES: Final = (".svg", ".parquet", ".arrow", ".jsonl")


def target_code(config: SvgConfig, seed: int) -> str:
    """Return the SVG code of a seed's target. The same code is in one split only.

    Raises:
        ConfigError: `env.dataset` cannot be read, or has no code for the split of the seed.
    """
    if config.dataset is None:
        return icon_code(seed, config.max_shapes)
    split = split_of(seed)
    codes = _codes(config.dataset)[split]
    if not codes:
        problem = f"none of its SVGs belongs to the {split} split, to which a hash of the code assigns a third of them"
        raise _error(config.dataset, problem, "use a data set with more SVGs")
    return codes[seed // len(Split) % len(codes)]


@lru_cache(maxsize=4)
def _codes(dataset: str) -> dict[Split, list[str]]:
    """Return the distinct codes of a data set by split, in an order that does not depend on the order of its rows."""
    codes: dict[Split, list[str]] = {split: [] for split in Split}
    for code in sorted(set(_read(dataset))):
        codes[layout_split(code)].append(code)
    for split, part in codes.items():
        random.Random(split).shuffle(part)  # noqa: S311 - an order, no secret
    return codes


def _read(dataset: str) -> Iterator[str]:
    path = Path(dataset)
    files = sorted(entry for entry in path.rglob("*") if entry.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not path.exists():
        problem = f"contains no file that ends in {', '.join(SUFFIXES)}" if path.is_dir() else "does not exist"
        hint = "put SVG files, or Parquet or JSON Lines files with a column svg there, or env.dataset=null draws icons"
        raise _error(dataset, problem, hint)
    for file in files:
        try:
            yield from filter(None, map(svg_part, _READERS[file.suffix](file)))
        except (OSError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
            reason = str(error) if isinstance(error, OSError) else f"it is no {file.suffix} file with a column svg"
            hint = f"use files that end in {', '.join(SUFFIXES)}, with code in a column {' or '.join(COLUMNS)}"
            raise _error(dataset, f"cannot read {file}: {reason}", hint) from error


def svg_part(text: str) -> str:
    """Return the part of a text from `<svg` to `</svg>`, without XML declarations; empty if there is none."""
    start, end = text.find("<svg"), text.rfind("</svg>")
    return text[start : end + len("</svg>")] if 0 <= start < end else ""


def _read_svg(file: Path) -> Iterator[str]:
    yield file.read_text("utf-8", errors="replace")


def _read_parquet(file: Path) -> Iterator[str]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        (column, *_) = [name for name in COLUMNS if name in parquet.schema_arrow.names]
        yield from _texts(checked(parquet.read([column])[column]))


def _read_arrow(file: Path) -> Iterator[str]:
    """Yield the code in a file of `datasets.save_to_disk`."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
        (column, *_) = [name for name in COLUMNS if name in table.column_names]
        yield from _texts(checked(table[column]))


def _texts(column: Any) -> Iterator[str]:
    yield from (value for value in column.to_pylist() if isinstance(value, str))


def _read_jsonl(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            row = json.loads(line)
            (code, *_) = [row[name] for name in COLUMNS if name in row]
            yield str(code)


_READERS: Final = {".svg": _read_svg, ".parquet": _read_parquet, ".arrow": _read_arrow, ".jsonl": _read_jsonl}


def _error(dataset: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"env.dataset = {dataset}: {problem}", key="env.dataset", value=dataset, hint=hint)


SIDE: Final = 16
"""Width and height of the view box, in the units of the shapes."""
COLORS: Final = ("red", "blue", "green", "orange", "purple", "black")
MAX_ATTEMPTS: Final = 1_000


def icon_code(seed: int, max_shapes: int) -> str:
    """Return the SVG code of a seed's icon, with up to `max_shapes` shapes. Seeds of different splits have different
    icons."""
    rng, split = random.Random(seed), split_of(seed)  # noqa: S311 - a drawing, no secret
    for _ in range(MAX_ATTEMPTS):
        shapes = "".join(_shape(rng) for _ in range(rng.randint(1, max_shapes)))
        code = f'<svg viewBox="0 0 {SIDE} {SIDE}">{shapes}</svg>'
        if layout_split(code) is split:
            return code
    raise AssertionError("a third of all icons belongs to each split")


def _shape(rng: random.Random) -> str:
    draw = rng.choice(_SHAPES)
    return draw(rng, rng.choice(COLORS))


def _circle(rng: random.Random, color: str) -> str:
    radius = rng.randrange(2, 7, 2)
    x, y = (rng.randrange(radius, SIDE - radius + 1, 2) for _ in "xy")
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}"/>'


def _rectangle(rng: random.Random, color: str) -> str:
    width, height = (rng.randrange(4, 13, 4) for _ in "xy")
    x, y = rng.randrange(0, SIDE - width + 1, 2), rng.randrange(0, SIDE - height + 1, 2)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}"/>'


def _triangle(rng: random.Random, color: str) -> str:
    side = rng.randrange(4, 13, 4)
    x, y = rng.randrange(0, SIDE - side + 1, 2), rng.randrange(side, SIDE + 1, 2)
    return f'<path d="M{x} {y} h{side} l{-side // 2} {-side} z" fill="{color}"/>'


_SHAPES: Final[tuple[Callable[[random.Random, str], str], ...]] = (_circle, _rectangle, _triangle)
