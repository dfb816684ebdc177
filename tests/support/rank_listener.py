"""Listener for the ranks of a test, which torchrun has started without the command line of Quintet."""

from __future__ import annotations

from quintet.runtime.calls.listener import WorkerListener
from quintet.runtime.calls.run_secret import RunSecret
from quintet.training.parallel.rendezvous import Rendezvous


def listen_at(rendezvous: Rendezvous, secret: RunSecret) -> WorkerListener:
    """Listen for the other ranks of a rendezvous, and publish the address in its store."""
    ranks = {process.rank: process.components for process in rendezvous.processes[1:]}
    fingerprint = rendezvous.processes[0].fingerprint
    listener = WorkerListener(rendezvous.address, ranks, fingerprint, lost_seconds=60.0, secret=secret)
    listener.publish(rendezvous.shared_store)
    return listener
