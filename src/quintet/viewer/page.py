"""The viewer's page and its files: modules without dependencies, which browsers load as they are."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template

PREFIX = "view/"
"""Modules import each other by `view/NAME`, which the import map resolves; in an exported page to data URLs."""


@cache
def assets() -> Mapping[str, str]:
    """Return the texts of all scripts and style sheets by name, and of the page and the tiles of grids."""
    folder = resources.files("quintet.viewer") / "static"
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
    tiles = (resources.files("quintet.tracking") / "assets" / "tiles.svg").read_text(encoding="utf-8")
    return texts | {"tiles.svg": Template(tiles).substitute(boards="")}


@cache
def page_html() -> str:
    """Return the page that loads its scripts from the server."""
    return Template(assets()["index.html"]).substitute(
        style='<link rel="stylesheet" href="/static/view.css">' + _preloads(),
        tiles=assets()["tiles.svg"],
        import_map=_import_map(),
        stored="",
        script='<script type="module" src="/static/main.js"></script>',
    )


def _modules() -> list[str]:
    return sorted(name for name in assets() if name.endswith(".js"))


def _preloads() -> str:
    """Return links by which the browser requests all modules at once, instead of one after the other as they are
    imported."""
    return "".join(f'<link rel="modulepreload" href="/static/{name}">' for name in _modules())


def _import_map() -> str:
    return json.dumps({"imports": {PREFIX + name: f"/static/{name}" for name in _modules()}})


@cache
def security_policy() -> str:
    """Return the Content-Security-Policy: scripts, data and images come from this server only."""
    digest = base64.b64encode(hashlib.sha256(_import_map().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; media-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
