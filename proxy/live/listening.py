"""The port that clients connect to."""

from __future__ import annotations

import errno
import socket

from aegis.core.errors import UserError

_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


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
        raise _refused(host, port, error) from error
    return listener


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:  # the latter for what cannot be the name of a host
        listener.close()
        raise _refused(host, port, error) from error
    return listener


def _refused(host: str, port: int, error: OSError | UnicodeError) -> UserError:
    if isinstance(error, UnicodeError):
        return UserError(f"cannot listen on {host}:{port}: no host can have that name; choose another --host")
    option = "--port" if error.errno in _OF_THE_PORT else "--host"
    return UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {option}")
