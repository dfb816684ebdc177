"""Rules about the state of a run, and the memory of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Iterator

from quintet import hardware
from quintet.contained_files import open_contained
from quintet.diagnosis.findings import Finding
from quintet.diagnosis.rule_specs import Limits
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.series import median, percent, text
from quintet.diagnosis.system_rules import MEMORY, STEP
from quintet.errors import MachineError
from quintet.tracking.progress import duration
from quintet.tracking.run_status import RunState, RunStatus

ENDED: dict[RunState, str] = {
    "failed": "The run failed",
    "died": "The run died",
    "stopped": "The run was stopped before its end",
}
LOG_BYTES = 20_000


def run_ended_early(run: RunData, status: RunStatus, limits: Limits) -> Iterator[Finding]:
    """Report a run that failed, died or was stopped, with its last error."""
    if status.state not in ENDED:
        return
    progress = status.progress
    reached = f" after {progress.done} of {progress.total} {progress.unit}s" if progress else ""
    checkpoint = f"; last checkpoint: {status.checkpoint.path}" if status.checkpoint else "; there is no checkpoint"
    error = _last_error(status)
    yield run.finding(
        "run-ended-early",
        f"{status.state}{reached}: {status.message or 'without a message'}{checkpoint}{error}",
        steps=run.last_steps,
        critical=status.state != "stopped",
        # the same command would fail again
        remedies=["fix-error" if status.state == "failed" else "restart"],
        title=ENDED[status.state],
    )


def _last_error(status: RunStatus) -> str:
    """Return the last line of an error in the logs of the run."""
    for log in status.logs:
        if log.suffix != ".log":
            continue
        try:
            with open_contained(status.directory.path, log.relative_to(status.directory.path)) as file:
                file.seek(max(0, log.stat().st_size - LOG_BYTES))
                lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        except (OSError, MachineError):
            continue
        errors = [line for line in lines if "Error" in line or "Exception" in line]
        if errors:
            return f"; {log.name}: {errors[-1].strip()}"
    return ""


def run_hangs(run: RunData, status: RunStatus, limits: Limits) -> Iterator[Finding]:
    """Report a run without progress for much longer than a step."""
    age = status.progress_age_seconds
    steps = run.series(STEP)
    limit = max(limits["seconds"], limits["times"] * median(steps.values) if len(steps) else 0.0)
    if status.state == "running" and age is not None and age > limit:
        suspended = [record.process.role for record in status.running if record.state == "suspended"]
        why = f"; suspended: {', '.join(suspended)}" if suspended else ""
        usual = f", where a step takes {duration(median(steps.values))}" if len(steps) else ""
        yield run.finding(
            "run-hangs", f"the last progress was {duration(age)} ago{usual}{why}", steps=run.last_steps, critical=True
        )


def memory_full(run: RunData, status: RunStatus, limits: Limits) -> Iterator[Finding]:
    """Compare the memory of all ranks on this machine, each as large as the first, with the machine's memory."""
    memory = run.series(MEMORY)
    ranks = sum(record.process.is_local for record in status.ranks)
    if not len(memory) or not ranks:
        return
    used, available = ranks * max(memory.values), hardware.memory_bytes() / 1e9
    if used > limits["share"] * available:
        processes = f"{ranks} processes with {text(max(memory.values))} GB each" if ranks > 1 else f"{text(used)} GB"
        yield run.finding(
            "memory-full",
            f"{processes} are {percent(used / available)} of the {text(available)} GB of this machine ({MEMORY})",
            metric=MEMORY,
            steps=memory.steps,
            critical=used > limits["worse"] * available,
        )
