"""`quintet diagnose`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quintet.cli.status import find_run
from quintet.diagnosis.coverage import Coverage
from quintet.diagnosis.diagnose import diagnose_run, read_coverage, read_run
from quintet.diagnosis.findings import Finding
from quintet.tracking.run_status import is_run_directory


def run(targets: Sequence[str], *, as_json: bool, fail: bool) -> int:
    """Print what looks wrong in runs; return 1 with `fail` if a finding is critical, otherwise 0.

    Raises:
        MachineError: a target is no run, or a file of it cannot be read.
    """
    judged = {path: _judge(path) for path in map(find_run, targets)}
    if as_json:
        reports = [
            {"path": str(path), "findings": [*map(asdict, findings)], "coverage": asdict(coverage)}
            for path, (findings, coverage) in judged.items()
        ]
        print(json.dumps(reports))
    else:
        print("\n\n".join(_report(path, findings, coverage) for path, (findings, coverage) in judged.items()))
    is_critical = any(finding.severity == "critical" for findings, _ in judged.values() for finding in findings)
    return int(fail and is_critical)


def _judge(path: Path) -> tuple[list[Finding], Coverage]:
    """Return the findings in a run and what could be judged; its metrics are read once."""
    stages = read_run(path) if is_run_directory(path) else None
    return diagnose_run(path, stages), read_coverage(path, stages)


def _report(path: Path, findings: Sequence[Finding], coverage: Coverage) -> str:
    lines = coverage.waiting_lines()
    not_judged = ["\n".join(["not judged yet", *(f"  {line}" for line in lines)])] if lines else []
    if not findings:
        return "\n\n".join([f"{path}: {coverage.verdict}", *not_judged])
    numbers = Counter(finding.severity for finding in findings)
    counts = ", ".join(f"{number} {severity}" for severity, number in numbers.items())
    return "\n\n".join([f"{path}: {counts}", *map(_describe, findings), *not_judged])


def _describe(finding: Finding) -> str:
    lines = [f"{finding.severity.upper():<8}  {finding.title}  ({finding.rule})", f"  {finding.evidence}"]
    if finding.first_step is not None and finding.first_step != finding.last_step:
        lines.append(f"  steps {finding.first_step} to {finding.last_step}")
    for number, suggestion in enumerate(finding.suggestions):
        lines.append(f"  {'try' if number == 0 else '   '}  {suggestion}")
    if finding.metric:
        lines.append(f"  more: quintet explain {finding.metric}")
    return "\n".join(lines)
