"""The port that clients connect to."""

from __future__ import annotations

import socket

from aegis.core.errors import UserError


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A `shared` port is listened on by every proxy, and the kernel deals connections to them (SO_REUSEPORT). Raises
    UserError, for the first of them also where another server shares it already."""
    if shared and port:
        _bound(host, port, shared=False).close()
    return share(host, port) if shared else _listening(_bound(host, port, shared=False))


def share(host: str, port: int) -> socket.socket:
    """One more that listens on it. Raises UserError."""
    return _listening(_bound(host, port, shared=True))


def _listening(listener: socket.socket) -> socket.socket:
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()  # from now on no other process can
    except OSError as error:
        raise _taken(host, port, error) from error
    return listener


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: OSError) -> UserError:
    return UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port")
