"""The socket of a server, and who may reach it."""

from __future__ import annotations

import socket

from nmoe.errors import UserError

LOCAL = ("127.0.0.1", "::1", "localhost")
"""The addresses that only this machine reaches."""


def check_key(host: str, key: str, variable: str, danger: str) -> None:
    """Raises UserError for an address that other machines reach, without a key for them; `danger` says what they could do."""
    if host not in LOCAL and not key:
        raise UserError(f"--host {host}: other machines could {danger}; set {variable} to a secret key")


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that connections reach from now on, before the server accepts them. Raises UserError if there is none at
    this address, such as where another program has the port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port}: cannot listen there: {error}; choose another --port, 0 for any, or another --host"
        ) from None
