"""TLS: the server's certificate and optionally a CA for those of clients, reloaded when the files change."""

import asyncio
import logging
import ssl
from pathlib import Path

from saccade.errors import ConfigError
from saccade.server.server_settings import ServerSettings

CHECK_S = 5.0
CLIENT_CERTIFICATES = {
    **dict.fromkeys(("none", "0"), ssl.CERT_NONE),
    **dict.fromkeys(("optional", "1"), ssl.CERT_OPTIONAL),
    **dict.fromkeys(("required", "2"), ssl.CERT_REQUIRED),
}

_log = logging.getLogger(__name__)
Stamps = tuple[tuple[int, int, int], ...]


class TlsFiles:
    """The listener uses `context`, and each handshake switches to the certificates that were read last. Open
    connections keep theirs."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        names = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        self._files = [Path(name) for name in names if name]
        self._stamps = self._look()  # of the files in use
        self._problem = ""  # why the present files cannot be used
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._use_current  # called for every handshake, even without a name

    async def watch(self) -> None:
        """Reloads the files whenever they change. While they cannot be used, the old ones stay in use."""
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Returns whether new files were loaded. While files are replaced one by one they do not match for a moment;
        a later call loads them. A problem is logged when it begins and when it becomes another one."""
        try:
            stamps = self._look()
            has_changed = stamps != self._stamps
            if has_changed:
                self._current = self._read()
                self._stamps = stamps
        except (OSError, ConfigError) as error:
            self._note_problem(_problem(error))
            return False
        if has_changed:
            _log.info("the TLS files changed; new connections use them")
        elif self._problem:
            _log.info("the TLS files are again those in use")
        self._problem = ""
        return has_changed

    def _note_problem(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("the TLS files cannot be used (%s); the old certificate stays in use", problem)
        self._problem = problem

    def _use_current(self, link: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        link.context = self._current

    def _look(self) -> Stamps:
        found = [file.stat() for file in self._files]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def _read(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
        except OSError as error:  # includes SSLError
            what = f"{settings.ssl_certfile}, {settings.ssl_keyfile}"
            raise ConfigError(f"cannot use the TLS files {what}: {_why(error)} (--ssl-certfile)") from None
        if settings.ssl_ca_certs:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except OSError as error:
                what = settings.ssl_ca_certs
                raise ConfigError(f"cannot use the certificates in {what}: {_why(error)} (--ssl-ca-certs)") from None
            context.verify_mode = CLIENT_CERTIFICATES[settings.ssl_cert_reqs or "required"]
        return context


def _no_password() -> str:
    """Without this, OpenSSL would prompt on the terminal."""
    raise ConfigError("the TLS key has a password; use one without, readable only by the server (--ssl-keyfile)")


def _problem(error: OSError | ConfigError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or "broken"
