"""The viewer's web application: its page, and the data that the page requests as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from quintet.errors import MachineError, UserError
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.server import LimitedServer
from quintet.viewer.episode_routes import EpisodeRoutes
from quintet.viewer.metric_routes import metric_routes
from quintet.viewer.run_catalog import RunCatalog

COOKIE = "quintet_token"
COMPRESSION = 4
"""Level of gzip: curves are 5 % larger than at level 9, which takes three times as long."""


class _JsonOfRuns(JSONResponse):
    """Values of files of runs, of which some are no JSON: NaN and infinity become null."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:  # also of the half of a surrogate pair, which UTF-8 cannot express
            return json.dumps(_finite(content), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_app(catalog: RunCatalog, address: Address) -> FastAPI:
    """Return the application that shows the runs of a catalog."""
    options: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="Quintet viewer", default_response_class=_JsonOfRuns, **options)
    app.add_middleware(GZipMiddleware, compresslevel=COMPRESSION)
    app.middleware("http")(_guard(address))
    app.exception_handler(UserError)(_error_response)
    app.exception_handler(RecursionError)(_error_response)
    _add_page_routes(app)
    app.include_router(metric_routes(catalog))
    app.include_router(EpisodeRoutes(catalog).router())
    return app


def _guard(address: Address) -> Callable[..., Awaitable[Response]]:
    """Return the middleware that checks the token, or the Host header without one, and adds security headers.

    A token in the address of the page becomes a cookie, so that it does not stay in the browser's address bar.
    """

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        sent = request.query_params.get("token")
        header = request.headers.get("authorization") or f"Bearer {sent or request.cookies.get(COOKIE, '')}"
        try:
            address.authenticate(header, request.headers.get("host", ""))
        except RequestError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        if sent is not None:
            # a path that begins with `//` would name another host
            response: Response = RedirectResponse("/" + request.url.path.lstrip("/\\"))
            response.set_cookie(COOKIE, sent, httponly=True, samesite="strict")
            return response
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = security_policy()
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-cache"
        return response

    return guard


def _error_response(_: Request, error: Exception) -> JSONResponse:
    message, hint = (error.message, error.hint) if isinstance(error, UserError) else (str(error), None)
    return JSONResponse({"error": message, "hint": hint}, status_code=404)


def _add_page_routes(app: FastAPI) -> None:
    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return page_html()

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        text = assets().get(name)
        if text is None:
            raise MachineError(f"the viewer has no file {name}")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(text, media_type=f"{kind}; charset=utf-8")

    @app.get("/api/assets")
    def all_assets() -> dict[str, str]:
        return dict(assets())


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


def serve(catalog: RunCatalog, address: Address, listener: socket.socket) -> None:
    """Serve the viewer until the process is interrupted."""
    LimitedServer(build_app(catalog, address)).run(sockets=[listener])
