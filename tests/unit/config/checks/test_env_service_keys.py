"""If these fail, keys without effect on an environment service are accepted in silence."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment, unread_remarks
from quintet.errors import ConfigError

SERVICE = "service: {urls: ['http://127.0.0.1:5000']}"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (f"env={{processes: 3, {SERVICE}}}", "env.processes = 3"),
        (f"envs.lake.env={{processes: {{step_timeout_seconds: 2.0}}, {SERVICE}}}", "lake.env.processes.step_timeout"),
    ],
)
def test_worker_processes_of_the_run_beside_a_service_are_remarked(words: str, key: str) -> None:
    remarks = [*unread_remarks(load_experiment(None, (words,)))]
    assert any(key in remark and "an environment service has worker processes" in remark for remark in remarks), remarks
    assert not any(unread_remarks(load_experiment(None, (f"env={{{SERVICE}}}",))))
    custom = f"env={{name: custom, path: 'a.py:A', {SERVICE}}}"
    assert not any(unread_remarks(load_experiment(None, (custom,))))


def test_a_service_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"env\.service\.urls"):
        load_experiment(None, ("env.service.urls=[]",))
    with pytest.raises(ConfigError, match=r"env\.service\.urls"):
        load_experiment(None, ("env.service.max_retries=2",))
    assert load_experiment(None, ("env.service.urls=http://a:1",)).experiment.env.service.urls == ("http://a:1",)
