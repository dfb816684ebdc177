"""Submit a run as a Ray job to the job endpoint of a cluster, and follow it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.errors import SIGNALLED, MachineError
from quintet.hardware import extra_packages, install_command
from quintet.runtime.ray_cluster.launcher import FORWARDED
from quintet.runtime.signals import StopRequest, stop_on_signals

POLL_SECONDS = 1.0
"""Interval at which output and state of the job are fetched."""
LOST_SECONDS = 60.0
"""Time without an answer of the endpoint after which the command gives up; the job goes on."""
STOP_SECONDS = 3600
"""Time that Ray gives a stopped job to finish its step and its checkpoint."""
SECRET_PARTS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of names of variables that are not sent, since Ray's dashboard shows the variables of a job."""
ADDRESS_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray would prefer to the address of the command line."""


def submit_job(address: str, argv: Sequence[str], directory: str, show: Callable[[str], None]) -> int:
    """Run a command as a job in a directory that the cluster shares; return its exit status.

    A signal stops the job, which ends as if the signal had been sent to the command.

    Args:
        address: URL of the job endpoint.
        argv: Program and arguments.
        show: Prints the output of the job.

    Raises:
        MachineError: the endpoint does not answer, or refuses the job.
    """
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    entrypoint = f"cd {shlex.quote(directory)} && exec {shlex.join(argv)}"
    with stop_on_signals() as stop:
        client, job_id = _submit(address, entrypoint)
        show(f"quintet: submitted as job {job_id} to {address}\n")
        return _Job(client, job_id, show).follow(stop)


def _submit(address: str, entrypoint: str) -> tuple[Any, str]:
    """Submit the job; return the client of the endpoint and the name of the job.

    Raises:
        MachineError: Ray is not installed, or the endpoint does not answer, or refuses the job.
    """
    try:
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise MachineError("--ray needs the package ray", install_command(extra_packages("ray"))) from None
    try:
        client = JobSubmissionClient(address)
        return client, client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": _job_environment(os.environ)})
    except (OSError, RuntimeError, ValueError, AuthenticationError) as error:
        raise _refused(address, error) from error


def _refused(address: str, error: Exception) -> MachineError:
    hint = (
        "the URL is that of Ray's dashboard, http://HEAD:8265, which needs `pip install 'ray[default]'` on the head; a "
        "cluster with a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here, too"
    )
    reason = str(error).strip().partition("\n")[0]
    return MachineError(f"--ray {address}: cannot submit a job: {reason}", hint)


def _job_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the job receives from this process."""
    names = [name for name in variables if name.startswith(FORWARDED)]
    public = {name: variables[name] for name in names if not any(part in name for part in SECRET_PARTS)}
    return {**public, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}


@dataclass(slots=True)
class _Job:
    """A submitted job, and how much of its output has been shown."""

    client: Any
    job_id: str
    show: Callable[[str], None]
    _shown: int = 0
    _is_stopped: bool = False

    def follow(self, stop: StopRequest) -> int:
        """Show the output until the job has ended; return its exit status.

        Raises:
            MachineError: the endpoint does not answer any more.
        """
        answered_at = time.monotonic()
        while True:
            try:
                if stop and not self._is_stopped:
                    self.client.stop_job(self.job_id)
                    self._is_stopped = True
                details = self.client.get_job_info(self.job_id)
                self._show_output()
                answered_at = time.monotonic()
            except (OSError, RuntimeError) as error:
                if time.monotonic() - answered_at > LOST_SECONDS:
                    raise self._lost(error) from error
            else:
                if details.status.is_terminal():
                    return self._exit_status(details, stop)
            time.sleep(POLL_SECONDS)

    def _show_output(self) -> None:
        output = self.client.get_job_logs(self.job_id)
        if len(output) > self._shown:
            self.show(output[self._shown :])
            self._shown = len(output)

    def _exit_status(self, details: Any, stop: StopRequest) -> int:
        """Return the exit status of the job; for a stopped job, the status of a process that the signal ended."""
        if details.driver_exit_code is not None:
            return int(details.driver_exit_code)
        if stop.number is not None:
            return SIGNALLED + stop.number
        self.show(f"quintet: job {self.job_id}: {details.status.lower()}: {details.message}\n")
        return MachineError.exit_status

    def _lost(self, error: Exception) -> MachineError:
        reason = str(error).strip().partition("\n")[0]
        return MachineError(
            f"no answer of the job endpoint for {LOST_SECONDS:g} seconds ({reason}); job {self.job_id} may still run",
            "`quintet status` shows the run on machines that share its directory, and `quintet stop` stops it",
        )
