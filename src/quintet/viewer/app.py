"""The viewer's web application: its page, and the data that the page requests as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from quintet.errors import MachineError, UserError
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.request_error import RequestError
from quintet.viewer.episode_routes import EpisodeRoutes
from quintet.viewer.metric_routes import metric_routes
from quintet.viewer.page import assets, page_html, security_policy
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
    hint = error.hint if isinstance(error, UserError) else None
    return JSONResponse({"error": str(error), "hint": hint}, status_code=404)


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
