"""MLflow logger; writes to a local database unless `MLFLOW_TRACKING_URI` names a server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.tracking.atomic_files import write_atomic
from quintet.tracking.generations import LoggedGeneration
from quintet.tracking.logger import LoggerContext
from quintet.tracking.run_facts import flat_facts

RUN_ID_FILE = "mlflow_id"
"""File in the run directory with the id of MLflow's run, so that a resumed run continues it."""
MAX_PARAMETERS, MAX_PARAMETER_CHARACTERS = 100, 6000
"""MLflow's limits of a request and of a value."""


class MlflowLogger:
    """MLflow run of the experiment that is named as the project."""

    def __init__(self, context: LoggerContext) -> None:
        # MLflow sends statistics of its use unless this is set before its import
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._started = context.started
        folder = (context.files / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder}/mlflow.db")
        self._run = self._find_or_create_run(context, None if uri else (folder / "artifacts").as_uri())

    def _find_or_create_run(self, context: LoggerContext, artifacts: str | None) -> str:
        """Return the id of the run, which a resumed run continues."""
        path = context.directory / RUN_ID_FILE
        if context.resume_step is not None and path.is_file():
            run_id = path.read_text(encoding="ascii").strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(context.project)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(context.project, artifact_location=artifacts)
        )
        started, tags = int(context.started * 1000), dict(context.facts.get("run", {}))
        created = self._client.create_run(experiment_id, start_time=started, tags=tags, run_name=context.name)
        run_id = str(created.info.run_id)
        self._log_parameters(run_id, context.facts)
        write_atomic(path, run_id.encode())
        return run_id

    def _log_parameters(self, run_id: str, facts: Mapping[str, Any]) -> None:
        """Log the configuration as parameters, by which MLflow's page filters."""
        from mlflow.entities import Param

        values = ((name, str(value)) for name, value in flat_facts(facts) if not name.startswith("run."))
        parameters = [Param(_key(name), value[:MAX_PARAMETER_CHARACTERS]) for name, value in values]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + MAX_PARAMETERS])

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        milliseconds = int((self._started + time_seconds) * 1000)
        values = {**metrics, "time_seconds": time_seconds}
        records = [Metric(_key(name), value, milliseconds, step) for name, value in values.items()]
        # MLflow accepts 1,000 per request
        for first in range(0, len(records), 1000):
            self._client.log_batch(self._run, metrics=records[first : first + 1000])

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Log the artifact `val_step<step>.json` with a list of episodes, as verl does, and images next to it."""
        rows = [
            {"input": generation.input, "output": generation.output, "score": generation.score}
            for generation in generations
        ]
        self._client.log_text(self._run, json.dumps(rows), f"val_step{step}.json")
        for number, logged in enumerate(generations, 1):
            for index, image in enumerate(logged.images, 1):
                self._client.log_image(self._run, image, f"val_step{step}/image_{number}_{index}.png")

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._client.log_artifact(self._run, str(path), name)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _key(name: str) -> str:
    """Return a metric name with the characters that MLflow allows: `mean@8` becomes `mean_at_8`, as in verl."""
    return re.sub(r"[^\w./ :-]", "_", name.replace("@", "_at_"))
