"""Hosts of a network on this machine: network namespaces that are connected by a bridge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

NETNS_FILES = Path("/etc/netns")
INTERFACE = "eth0"


def can_create() -> bool:
    """Whether this process may create network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"quintet-{os.getpid()}-probe"
    created = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if created:
        _ip("netns", "delete", name)
    return created


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Hosts `10.77.0.1` and so on, each a network namespace."""

    def __init__(self, count: int) -> None:
        self._prefix = f"quintet-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self.hosts = [f"10.77.0.{number}" for number in range(1, count + 1)]
        _ip("netns", "add", self._switch)
        self._in(self._switch, "link", "add", "bridge", "type", "bridge")
        self._in(self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts):
            self._add(self.namespace(host), host, f"port{number}")

    def namespace(self, host: str) -> str:
        """Name of a host's namespace."""
        return f"{self._prefix}-{self.hosts.index(host)}"

    def command(self, host: str, *arguments: str) -> list[str]:
        """A command that runs on the host."""
        return ["ip", "netns", "exec", self.namespace(host), *arguments]

    def disconnect(self, host: str) -> None:
        """Cut the host off: nothing reaches it, and its processes run on."""
        self._in(self._switch, "link", "set", f"port{self.hosts.index(host)}", "down")

    def close(self) -> None:
        """Kill all processes of the hosts and remove them."""
        for namespace in (*map(self.namespace, self.hosts), self._switch):
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-9", pid], capture_output=True)
            _ip("netns", "delete", namespace)
            shutil.rmtree(NETNS_FILES / namespace, ignore_errors=True)

    def _in(self, namespace: str, *arguments: str) -> None:
        _ip("-n", namespace, *arguments)

    def _add(self, namespace: str, host: str, port: str) -> None:
        # without these files each reverse lookup of an address takes seconds
        files = NETNS_FILES / namespace
        files.mkdir(parents=True)
        names = "".join(f"{other} host{number}\n" for number, other in enumerate(self.hosts))
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{host} {socket.gethostname()}\n{names}")
        (files / "resolv.conf").write_text("")
        (files / "nsswitch.conf").write_text("hosts: files\n")
        _ip("netns", "add", namespace)
        _ip("link", "add", INTERFACE, "netns", namespace, "type", "veth", "peer", "name", port, "netns", self._switch)
        self._in(self._switch, "link", "set", port, "master", "bridge", "up")
        self._in(namespace, "address", "add", f"{host}/24", "dev", INTERFACE)
        for interface in (INTERFACE, "lo"):
            self._in(namespace, "link", "set", interface, "up")
