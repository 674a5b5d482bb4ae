"""The address of the broker: the URL of `--mqtt`, checked, and shown without the password."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from aegis.core.errors import UserError

SCHEMES = {"mqtt": 1883, "mqtts": 8883, "mqtt+unix": 0}
"""With their ports."""

_FORM = "give one like mqtt://user:password@host:1883 or mqtts://host"


class Address(Struct, frozen=True, kw_only=True):
    """A broker and how to be let in. `path` is that of a Unix socket; without one, `host` and `port` hold. `ca_file`
    has the certificates that its own must descend from; without one the system's do."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: bool = False
    user: str | None = None
    password: str | None = None
    ca_file: str | None = None

    def __str__(self) -> str:
        """The URL of the broker, without user and password."""
        if self.path:
            return f"mqtt+unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mqtt{'s' if self.tls else ''}://{host}:{self.port}"

    def __repr__(self) -> str:
        return f"Address({self})"


def parse(url: str, *, ca_file: str | None = None) -> Address:
    """Raises ValueError with one line that does not quote the URL, for it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"is no URL of a broker; {_FORM}") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"should begin with mqtt://, mqtts:// or mqtt+unix://; {_FORM}")
    if parts.query or parts.fragment:
        raise ValueError(f"should end with the port; {_FORM}")
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    if parts.scheme == "mqtt+unix":
        if parts.netloc.rpartition("@")[2] or len(parts.path) < 2:
            raise ValueError("should name a socket by its whole path, like mqtt+unix:///run/mosquitto.sock")
        return Address(path=unquote(parts.path), user=user, password=password)
    if not parts.hostname:
        raise ValueError(f"names no host; {_FORM}")
    if parts.path.strip("/"):
        raise ValueError("should end with the port; a prefix of topics is given with --mqtt-prefix")
    return Address(
        host=parts.hostname,
        port=port or SCHEMES[parts.scheme],
        tls=parts.scheme == "mqtts",
        user=user,
        password=password,
        ca_file=ca_file,
    )


def check_ca_file(file: str, where: str) -> None:
    """Of what a broker is trusted by, as `where` gives it: a connection would say that no broker answers. Raises
    UserError."""
    import ssl

    try:
        if not Path(file).is_file():  # nor a device, which may have no end
            raise UserError(f"{where}: there is no file {file}")
        ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        raise UserError(f"{where}: {file} holds no certificates, PEM") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {file!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
