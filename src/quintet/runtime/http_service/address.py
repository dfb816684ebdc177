"""Address of the server, and who may reach it."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from quintet.errors import ConfigError
from quintet.runtime.http_service.request_error import RequestError


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen on. Clients on other machines need the `token`."""

    host: str = "127.0.0.1"
    """Name or IP address of this machine."""
    port: int = 8000
    """0 selects a free port."""
    token: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Check that the address is protected by a token unless it is local.

        Raises:
            ConfigError: it is open to other machines without a token.
        """
        if self.token is None and not self.is_local:
            raise ConfigError(
                f"--host {self.host} is open to other machines, and there is no token",
                key="--host",
                value=self.host,
                hint="set the environment variable QUINTET_TOKEN, or listen on 127.0.0.1",
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ConfigError("--token: use ASCII letters, digits and punctuation", key="--token")

    def authenticate(self, authorization: str, host: str) -> None:
        """Check a request's token or, without one, its Host header.

        Raises:
            RequestError: the token is missing or wrong, or a browser sends the request for a web page.
        """
        if self.token is not None:
            sent = authorization.removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(errors="replace"), self.token.encode()):
                message = 'missing or wrong token: send the header "Authorization: Bearer <token>"'
                raise RequestError(message, status=401, kind="authentication_error", code="invalid_api_key")
        elif not is_loopback(_host_name(host or "localhost")):
            # DNS rebinding: a web page reaches this server under its own host name
            raise RequestError("the Host header names another machine", status=403, code="wrong_host")


def _host_name(host: str) -> str:
    """Return the name of a Host header without its port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
