"""If this fails, an error of one rank leaves the controller waiting for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintet.errors import MachineError
from quintet.runtime import torchrun_transport
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.torchrun_transport import TorchrunTransport


def test_a_corrupted_result_ends_the_run_instead_of_hanging_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller aborts requests while the error ends the run, and must not wait for the same results again."""
    results: list[Any] = [MachineError("rank 1: a result was changed on its way"), [None]]
    monkeypatch.setattr(torchrun_transport, "send", lambda call, group: None)

    def receive_results(group: object) -> list[Any]:
        result = results.pop(0)
        if isinstance(result, MachineError):
            raise result
        return cast("list[Any]", result)

    monkeypatch.setattr(torchrun_transport, "receive_results", receive_results)
    rendezvous = SimpleNamespace(control_group=None, death_cause=lambda error: None)
    transport = TorchrunTransport(cast("Any", None), cast("Any", rendezvous))
    with pytest.raises(MachineError, match="rank 1"):
        transport.call_others(RemoteCall("engine", "step"))()
    assert transport.call_others(RemoteCall("engine", "abort"))() == [None]
