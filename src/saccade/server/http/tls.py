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
        self._stamps = self._look()
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._use_current  # called for every handshake, even without a name

    async def watch(self) -> None:
        """Reloads the files whenever they change. If they cannot be used, logs that and keeps the old ones."""
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Returns whether new files were loaded. While files are replaced one by one they do not match for a moment;
        the next change loads them."""
        try:
            stamps = self._look()
            if stamps == self._stamps:
                return False
            self._stamps = stamps
            self._current = self._read()
        except (OSError, ConfigError) as error:
            why = getattr(error, "strerror", None) or str(error)
            _log.warning("the TLS files changed and cannot be used (%s); the old certificate stays in use", why)
            return False
        _log.info("the TLS files changed; new connections use them")
        return True

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


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or "broken"
