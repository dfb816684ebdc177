"""Record in which releases of a framework its keys exist: `python scripts/write_releases.py FRAMEWORK CHECKOUT`.

CHECKOUT is a clone of the framework with its tags. Of each release that `releases.yaml` lists, the YAML files, the
`key=value` words of shell scripts and the fields of configuration classes are read; nothing is executed. The script
replaces the ranges of `releases.yaml` and keeps the rest. Run `scripts/write_reference.py` afterwards.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import all_keys, load_releases
from quintet.config.dotted import flatten, sections_around

DIALECT_FILES = Path(__file__).parent.parent / "src/quintet/config/dialects"
PATHS = {
    "verl": r"(verl/trainer/config|verl/experimental|recipe|examples|tests)/.*\.(ya?ml|sh)",
    "rlinf": r"(examples|tests)/.*\.(ya?ml|sh)",
    "roll": r"(examples|tests)/.*\.(ya?ml|sh)|roll/(configs|pipeline)/.*(config|args).*\.py",
    "ragen": r"(config|scripts)/.*\.(ya?ml|sh)|[^/]*\.sh|ragen/env/.*config.*\.py",
    "vagen": r"(scripts|vagen|examples)/.*\.(ya?ml|sh)|vagen/env/.*config.*\.py|vagen/envs/.*_env\.py"
    r"|vagen/gym_agent_dataset\.py",
}
"""Files with keys."""
TREES = PATHS | {"verl": r"verl/trainer/config/.*\.ya?ml"}
"""Files that no longer have a key when a release has dropped it; an example may just not use it any more."""
ANY_NAME = re.compile(r"^(?:(?:custom_envs|rewards|env)\.[^.]+|env\d+)\.")
"""Sections with a name that the user chooses."""
WORDS = re.compile(r"(?:^|[\s'\"])\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=")
FIELDS = re.compile(r"^    (\w+)\s*:", re.MULTILINE)
LISTED_CLASSES = re.compile(r"vagen/(envs/|gym_agent_dataset\.py)")
"""Classes with the fields of an entry of VAGEN's lists of environments, and of its options."""


def read_files(checkout: str, revision: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the files of a revision."""
    git = ["git", "-C", checkout]
    listing = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", revision], capture_output=True, check=True, text=True
    )
    paths = [path for path in listing.stdout.splitlines() if re.fullmatch(pattern, path)]
    names = "".join(f"{revision}:{path}\n" for path in paths)
    contents = subprocess.run(
        [*git, "cat-file", "--batch"], input=names.encode(), capture_output=True, check=True
    ).stdout
    for path in paths:
        head, _, contents = contents.partition(b"\n")
        if not head.endswith(b"missing"):
            size = int(head.split()[-1])
            yield path, contents[:size].decode(errors="replace")
            contents = contents[size + 1 :]


def keys_of(path: str, text: str) -> Iterator[str]:
    """Yield the keys in a file; those of a file in a group also with the name of the group."""
    if path.endswith(".py"):
        kind = "entry" if LISTED_CLASSES.match(path) else "field"
        yield from (f"{kind} {name}" for name in FIELDS.findall(text))
    elif path.endswith(".sh"):
        yield from WORDS.findall(text)
    else:
        try:
            tree = yaml.load(text, yaml.CSafeLoader)
        except yaml.YAMLError:  # a template or a file of several documents
            return
        for key in flatten({str(name): value for name, value in tree.items()}) if isinstance(tree, dict) else ():
            yield from (key, f"{Path(path).parent.name}.{key}")


def release_keys(checkout: str, revision: str, pattern: str) -> frozenset[str]:
    """Return the keys and sections in the files of a release."""
    keys = {key for path, text in read_files(checkout, revision, pattern) for key in keys_of(path, text)}
    keys |= {section for key in keys for section in sections_around(key)}
    return frozenset(keys | {ANY_NAME.sub("*.", key) for key in keys})


def is_in(key: str, release: frozenset[str]) -> bool:
    """Return whether a release has a key, with any name of a section that the user names, or as a field of a class."""
    kind = "entry" if key.startswith("train_envs.") else "field"
    names = (key, ANY_NAME.sub("*.", key), f"*.{key}", f"{kind} {key.rpartition('.')[2]}")
    return any(name in release for name in names)


def ranges(framework: str, checkout: str) -> list[dict[str, object]]:
    """Return the keys by their first and last release."""
    releases = load_releases(framework).releases
    names = [release.name for release in releases]
    found = [release_keys(checkout, release.commit, PATHS[framework]) for release in releases]
    trees = [release_keys(checkout, release.commit, TREES[framework]) for release in releases]
    keys = defaultdict(set)
    # the tree of the framework beneath may no longer be in the repository
    base = DIALECTS[framework].base
    lasting = set() if base is None else {spec.key for _, spec in all_keys(base)}
    for _, spec in all_keys(DIALECTS[framework]):
        present = [index for index, release in enumerate(found) if is_in(spec.key, release)]
        if present:
            is_in_tree = spec.key not in lasting and any(is_in(spec.key, tree) for tree in trees)
            keys[present[0], present[-1] if is_in_tree else len(names) - 1].add(spec.key)
    return [
        ({"since": names[first]} if first else {})
        | ({"until": names[last]} if last < len(names) - 1 else {})
        | {"keys": sorted(keys[first, last])}
        for first, last in sorted(keys)
    ]


def main() -> int:
    framework, checkout = sys.argv[1:]
    path = DIALECT_FILES / framework / "releases.yaml"
    head = path.read_text(encoding="utf-8").partition("ranges:")[0]
    text = yaml.dump({"ranges": ranges(framework, checkout)}, sort_keys=False, width=120)
    path.write_text(head + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
