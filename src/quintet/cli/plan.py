"""`quintet plan`: what a run would do, without torch and without Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quintet.cli.choices import missing_packages, unknown_choices
from quintet.cli.configuration import NATIVE, Asked, ask
from quintet.cli.plan_table import print_survey
from quintet.config.faults import Fault, raise_faults
from quintet.config.plan.memory import GIB
from quintet.config.plan.models import is_hub_name
from quintet.config.plan.survey import survey
from quintet.config.spread import start
from quintet.config.waiting import waiting

__all__ = ["run"]


def run(
    config: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    *,
    as_json: bool = False,
    device_memory: float | None = None,
) -> None:
    """Check the configuration and print what it comes to. What this version, or this machine, can't do is listed, not
    refused.

    Raises:
        ConfigError: something can't work anywhere, or doesn't fit into `device_memory` GiB.
    """
    asked = ask(config, overrides, dialect, unknown_keys)
    waits = [fault for fault in asked.waits if not fault.elsewhere]
    missing = (*(fault for fault in asked.waits if fault.elsewhere), *_missing(asked))
    found = survey(asked.composed, None if device_memory is None else int(device_memory * GIB))
    remarks = (*asked.composed.remarks, *asked.remarks)
    begun = start(asked.composed.experiment)
    if as_json:
        listed = {"start": begun, "not_yet": _told(waits), "not_here": _told(missing), "remarks": list(remarks)}
        print(json.dumps(found.as_json() | listed, indent=1))
    else:
        print_survey(found, start=begun, waits=waits, missing=missing, remarks=remarks)


def _told(faults: Sequence[Fault]) -> list[dict[str, object]]:
    return [{"key": one.key, "value": one.value, "source": one.source, "message": one.message} for one in faults]


def _missing(asked: Asked) -> tuple[Fault, ...]:
    """What isn't on this machine but may be on the one that runs it. A native configuration that names what isn't
    anywhere is refused; names of other frameworks, models of the hub and what waits are not looked for."""
    pending = {each.key for each in waiting(asked.composed.experiment)}
    unknown = [fault for fault in unknown_choices(asked.composed) if fault.key.removesuffix(".name") not in pending]
    unknown = [fault for fault in unknown if fault.key not in pending and not _on_hub(fault)]
    if asked.dialect == NATIVE:
        raise_faults(unknown)
        unknown = []
    return (*unknown, *missing_packages(asked.composed))


def _on_hub(fault: Fault) -> bool:
    return fault.key == "policy.path" and isinstance(fault.value, str) and is_hub_name(fault.value)
