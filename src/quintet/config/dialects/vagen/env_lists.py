"""VAGEN's lists of environments since 2026: YAML files with names, numbers, seeds, limits and options."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.config.dialects.vagen.key_values import LISTS
from quintet.config.dotted import get_value
from quintet.config.yaml_reader import read_file
from quintet.errors import ConfigError

LAST_SEED = 2**31 - 1


def sections_of_lists(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections `train_envs` and `val_envs` by their files, with the entries of these files below what the
    configuration sets itself.

    Raises:
        ConfigError: a file has no list `envs`, or an entry is no section.
        MachineError: a file cannot be read.
    """
    sections: dict[str, dict[str, Any]] = {}
    for section, key in LISTS.items():
        paths = [path for path in list_files(get_value(tree, key)) if path.is_file()]
        entries = [entry for path in paths for entry in _entries(path, key)]
        written = tree.get(section)
        if entries:
            merged = {f"env{number}": entry for number, entry in enumerate(entries, 1)}
            source = ", ".join(map(str, paths))
            laid_over = _laid_over(merged, written if isinstance(written, Mapping) else {})
            sections.setdefault(source, {})[section] = laid_over
    return sections


def list_files(files: Any) -> list[Path]:
    """Return the paths that a key of data files names."""
    names = [files] if isinstance(files, str) else files if isinstance(files, Sequence) else []
    return [Path(name).expanduser() for name in names if isinstance(name, str)]


def _entries(path: Path, key: str) -> Iterator[dict[str, Any]]:
    entries = read_file(path, {}).get("envs")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        hint = "write envs: [{name: FrozenLake, n_envs: 100, seed: [1, 100, 1], config: {}}]"
        raise ConfigError(f"{key}: {path} has no list envs of environments", key=key, value=str(path), hint=hint)
    yield from ({str(name): value for name, value in entry.items()} for entry in entries)


def _laid_over(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for name, value in changes.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _laid_over(below, value) if isinstance(below, Mapping) and both else value
    return merged


def seed_problem(n_envs: int, seed: Sequence[int], seed_list: Sequence[int] | None) -> tuple[str, str] | None:
    """Return what VAGEN refuses about the seeds of an entry, as the option and the problem; None if nothing."""
    if seed_list is not None:
        return None if len(seed_list) > n_envs else ("seed_list", f"must have more than n_envs = {n_envs} seeds")
    if len(seed) > 3:
        return "seed", "must have one, two or three numbers"
    if len(seed) > 1 and seed[1] < seed[0]:
        return "seed", "the last seed of the range is before the first one"
    if len(seed) == 3 and (seed[2] < 1 or (seed[1] - seed[0] + 1) * seed[2] < n_envs):
        return (
            "seed",
            f"a range of {seed[1] - seed[0] + 1} seeds, each at most {seed[2]} times, is too small for {n_envs}",
        )
    return None


def num_seeds(
    name: str, number: int, n_envs: int, seed: Sequence[int], seed_list: Sequence[int] | None, base_seed: int
) -> int:
    """Return the number of different seeds of an entry, the `number`-th of its list, as `AgenticDataset` draws them."""
    if seed_list is not None:
        return len(set(seed_list[:n_envs]))
    payload = f"{base_seed}|{number}|{name}|seed-{list(seed)}"
    digest = hashlib.blake2b(payload.encode(), digest_size=8).digest()
    return len(set(_seeds(random.Random(int.from_bytes(digest, "little")), n_envs, seed)))  # noqa: S311 - no secret


def _seeds(rng: random.Random, n_envs: int, seed: Sequence[int]) -> Iterator[int]:
    first, last = (0, LAST_SEED) if len(seed) == 1 else seed[:2]
    if len(seed) < 3:
        yield from (rng.randrange(first, last + 1) for _ in range(n_envs))
    elif seed[2] == 1:
        yield from rng.sample(range(first, last + 1), n_envs)
    else:
        yield from _limited_seeds(rng, n_envs, first, last, seed[2])


def _limited_seeds(rng: random.Random, n_envs: int, first: int, last: int, limit: int) -> Iterator[int]:
    counts: Counter[int] = Counter()
    drawn = 0
    while drawn < n_envs:
        seed = rng.randint(first, last)
        if counts[seed] < limit:
            counts[seed] += 1
            drawn += 1
            yield seed
