"""If these fail, keys without effect on an environment service are accepted in silence."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.errors import ConfigError

SERVICE = "service: {urls: ['http://127.0.0.1:5000']}"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (f"env={{processes: 3, {SERVICE}}}", "env.processes.max_processes = 3"),
        (f"envs.lake.env={{processes: {{step_timeout_seconds: 2.0}}, {SERVICE}}}", "lake.env.processes.step_timeout"),
    ],
)
def test_worker_processes_of_the_run_beside_a_service_are_remarked(words: str, key: str) -> None:
    remarks = [remark for remark in load_experiment(None, (words,)).remarks if "has no effect" in remark]
    assert any(key in remark and "service.urls" in remark for remark in remarks), remarks
    assert not any("processes" in remark for remark in load_experiment(None, (f"env={{{SERVICE}}}",)).remarks)
    custom = f"env={{name: custom, path: 'a.py:A', {SERVICE}}}"
    assert not any("processes" in remark for remark in load_experiment(None, (custom,)).remarks)


def test_a_service_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"env\.service\.urls"):
        load_experiment(None, ("env.service.urls=[]",))
    with pytest.raises(ConfigError, match=r"env\.service\.urls"):
        load_experiment(None, ("env.service.max_retries=2",))
    assert load_experiment(None, ("env.service.urls=http://a:1",)).experiment.env.service.urls == ("http://a:1",)
