"""Routes of the viewer for runs, metrics, findings, settings, phases and traces."""

# the annotations of routes are evaluated by FastAPI
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from quintet.diagnosis.diagnose import diagnose_run, read_coverage, read_run
from quintet.tracking.metrics import describe, healthy_text
from quintet.viewer.metrics_file import Curve
from quintet.viewer.run_catalog import RunCatalog, ViewedRun, differences, run_row
from quintet.viewer.timeline import step_phases
from quintet.viewer.traces import list_traces, read_trace

MAX_POINTS = 2000
Runs = Annotated[list[str], Query(alias="run")]


def metric_routes(catalog: RunCatalog) -> APIRouter:
    """Return the routes for the runs of a catalog."""
    router = APIRouter(prefix="/api")

    @router.get("/runs")
    def list_runs() -> list[dict[str, Any]]:
        return [_locked_row(run) for run in catalog.runs()]

    @router.get("/metrics")
    def list_metrics(run: Runs) -> list[dict[str, Any]]:
        names: set[str] = set()
        for viewed in map(catalog.get, run):
            with viewed.lock:
                names.update(viewed.metrics.names())
        return [_definition(name) for name in sorted(names)]

    @router.get("/curves", response_model=None)
    def curves(
        run: Runs, metric: Annotated[list[str], Query()], points: Annotated[int, Query(ge=2)] = MAX_POINTS
    ) -> Response:
        """Return each metric of each run: steps, seconds since the start, values."""
        result: dict[str, Any] = {}
        for viewed in map(catalog.get, run):
            with viewed.lock:
                result[viewed.name] = {name: _points(viewed.metrics.curve(name), points) for name in metric}
        # FastAPI would copy every number
        return Response(json.dumps(result), media_type="application/json")

    @router.get("/findings")
    def findings(run: str) -> dict[str, Any]:
        """Return the findings in a run, what is true without one, and what is not judged yet."""
        path = catalog.get(run).directory.path
        stages = read_run(path)
        coverage = read_coverage(path, stages)
        waiting = coverage.waiting_lines()
        return {"findings": [*map(asdict, diagnose_run(path, stages))], "verdict": coverage.verdict, "waiting": waiting}

    @router.get("/config")
    def config(run: Runs) -> dict[str, Any]:
        """Return the settings of one run, or those that differ between several."""
        configs = [catalog.get(name).config() for name in run]
        values = {key: value._asdict() for key, value in configs[0].items()} if len(configs) == 1 else {}
        return {"values": values, "differences": differences(configs)}

    _add_timeline_routes(router, catalog)
    return router


def _add_timeline_routes(router: APIRouter, catalog: RunCatalog) -> None:
    @router.get("/timeline")
    def timeline(run: str, first: int = 0, count: int = 200) -> dict[str, Any]:
        viewed = catalog.get(run)
        with viewed.lock:
            metrics = viewed.metrics.columns()
            lines = [metrics.line(number) for number in range(len(metrics))[first : first + count]]
        return {"rows": len(metrics), "steps": step_phases(lines)}

    @router.get("/traces")
    def traces(run: str) -> list[dict[str, int]]:
        return list_traces(catalog.get(run).directory.profile)

    @router.get("/trace")
    def trace(run: str, step: int, rank: int) -> dict[str, Any]:
        return read_trace(catalog.get(run).directory, step, rank)


def _points(curve: Curve, points: int) -> dict[str, Sequence[float]]:
    shown = curve.downsampled(min(points, MAX_POINTS))
    return {"steps": list(shown.steps), "seconds": list(shown.seconds), "values": list(shown.values)}


def _locked_row(run: ViewedRun) -> dict[str, Any]:
    with run.lock:
        return run_row(run)


def _definition(name: str) -> dict[str, Any]:
    """Return the definition of a metric as its chart shows it."""
    try:
        metric = describe(name)
    except KeyError:  # logged by a newer version or by user code
        return {"name": name}
    return {
        "name": name,
        "meaning": metric.meaning,
        "unit": metric.unit,
        "healthy": healthy_text(metric.healthy),
        "bounds": None if isinstance(metric.healthy, str) else metric.healthy,
    }
