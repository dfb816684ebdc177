"""The controller: the process that runs the algorithm, and its connection to the workers with learners and engines."""

from __future__ import annotations

from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_engines import RemoteEngines
from quintet.runtime.remote_interface import WORKER
from quintet.runtime.remote_learners import RemoteLearnerGroup
from quintet.runtime.torchrun_transport import TorchrunTransport
from quintet.runtime.transport import InProcessTransport, Transport
from quintet.runtime.worker import Worker
from quintet.training.parallel.rendezvous import Rendezvous


class Controller:
    """Builds learners and engines on the workers of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @classmethod
    def in_process(cls) -> Controller:
        """Return a controller whose only worker runs in this process."""
        return cls(InProcessTransport(Worker()))

    @classmethod
    def on_ranks(cls, rendezvous: Rendezvous) -> Controller:
        """Return a controller of all ranks; call it on rank 0 while the others are in `run_worker`."""
        return cls(TorchrunTransport(Worker(rendezvous.ranks), rendezvous))

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._transport.world_size

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> RemoteLearnerGroup:
        """Build the learners of the model at `policy` on all workers; with `sft` those of supervised fine-tuning."""
        arguments = {"config": config, "policy": policy, "sft": sft}
        self._transport.broadcast(RemoteCall(WORKER, "build_learners", arguments))
        return RemoteLearnerGroup(self._transport)

    def build_remote_engines(self, config: Experiment, policy: Path) -> RemoteEngines:
        """Start to build engines of the model at `policy` on all workers but that of rank 0, after the learners."""
        return RemoteEngines(self._transport, config, policy)

    def check_alive(self) -> None:
        """Check that all workers are alive.

        Raises:
            RankDiedError: a worker has died; the message names it.
        """
        self._transport.check_alive()

    def close(self) -> None:
        """Stop all workers; workers that have already ended are ignored."""
        self._transport.close()
