"""The certificate by which clients know the server, read again when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from aegis.core.errors import UserError
from aegis.telemetry.logs import log
from proxy.http.settings import TlsFiles

LOOK_S = 1.0
_logger = logging.getLogger(__name__)

_Stamps = tuple[tuple[int, int, int] | None, ...]


class Certificate:
    """`context` is what connections that are accepted from now on are made with."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises UserError if they are not a certificate and its key."""
        self._files = files
        self._stamps = self._look()
        self.context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)

    async def watch(self) -> None:
        """Runs until it is cancelled. What cannot be used is said once and changes nothing: a renewal may replace one
        file before the other."""
        while True:
            await asyncio.sleep(LOOK_S)
            if (stamps := self._look()) == self._stamps:
                continue
            self._stamps = stamps
            try:
                await asyncio.to_thread(_loaded, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._files)
                _loaded(self.context, self._files)
            except UserError as error:
                _logger.warning("the certificate stays as it was: %s", error.message)
            else:
                log(_logger, logging.INFO, "certificate renewed", {"file": self._files.certificate})

    def _look(self) -> _Stamps:
        return tuple(_stamp(Path(file)) for file in (self._files.certificate, self._files.key) if file)


def _loaded(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    for option, file in (("--ssl-certfile", files.certificate), ("--ssl-keyfile", files.key)):
        if file:
            _refuse_unreadable(option, Path(file))
    try:
        context.load_cert_chain(files.certificate, files.key or None, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        if not files.key and _is_without_key(Path(files.certificate)):
            raise UserError(
                f"--ssl-certfile {files.certificate}: it holds no private key; name the file of its key with "
                "--ssl-keyfile",
                param="ssl_certfile",
            ) from None
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        if isinstance(error, ssl.SSLError) and not error.reason:  # for a file without a certificate or key in it
            reason = "one of them is no PEM"
        told = str(reason).lower().replace("_", " ")
        raise UserError(
            f"--ssl-certfile {files.certificate}: cannot be used with its key: {told}; both have to be PEM, the key "
            "without a password",
            param="ssl_certfile",
        ) from None
    return context


def _refuse_unreadable(option: str, file: Path) -> None:
    """Raises UserError, which names the file: OpenSSL does not say which of the two it could not read."""
    param = option.removeprefix("--").replace("-", "_")
    try:
        if not file.is_file():
            raise UserError(f"{option}: there is no file {file}", param=param)
        file.open("rb").close()
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be read: {error.strerror}", param=param) from None


def _is_without_key(file: Path) -> bool:
    """Whether it is PEM, of certificates only."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return b"CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
