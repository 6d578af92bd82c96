"""TLS: client certificates, and files that are replaced while the server runs."""

import asyncio
import logging
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.server.http.tls import TlsFiles
from saccade.server.server_settings import ServerSettings

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl is needed to make certificates")


def make(folder: Path, name: str, *more: str) -> None:
    """Writes a self-signed certificate for localhost with the subject `name`."""
    assert OPENSSL is not None
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), "-days", "2"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([OPENSSL, "req", "-x509", *key, *files, *subject, *more], check=True, capture_output=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("first", "second", "alice", "bob"):
        make(folder, name)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    use(made, tmp_path, "first")
    shutil.copy(made / "alice.pem", tmp_path / "ca.pem")
    return tmp_path


def use(made: Path, folder: Path, name: str, kinds: tuple[str, ...] = ("key", "pem")) -> None:
    """Replaces the server's files as renewal tools do."""
    for kind in kinds:
        shutil.copy(made / f"{name}.{kind}", folder / "new")
        (folder / "new").replace(folder / f"server.{kind}")


def settings(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(ssl_keyfile=str(folder / "server.key"), ssl_certfile=str(folder / "server.pem"), **more)


@asynccontextmanager
async def listening(files: TlsFiles) -> AsyncIterator[int]:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=files.context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def greet(port: int, trusted: Path, client: Path | None = None) -> bytes:
    context = ssl.create_default_context(cafile=trusted)
    if client is not None:
        context.load_cert_chain(client, client.with_suffix(".key"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        return await reader.read()
    finally:
        writer.close()


def test_new_files_are_used_by_new_connections(made: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TlsFiles(settings(folder))

    async def run() -> None:
        async with listening(files) as port:
            assert await greet(port, made / "first.pem") == b"hello"
            assert not files.refresh(), "nothing changed"
            use(made, folder, "second", ("key",))
            with caplog.at_level(logging.WARNING):
                assert not files.refresh(), "a key without its certificate"
            assert "old certificate stays" in caplog.text
            assert await greet(port, made / "first.pem") == b"hello"
            use(made, folder, "second", ("pem",))
            assert files.refresh()
            assert await greet(port, made / "second.pem") == b"hello"
            with pytest.raises(ssl.SSLError):
                await greet(port, made / "first.pem")
            (folder / "server.pem").unlink()
            assert not files.refresh(), "a file that is gone"
            assert await greet(port, made / "second.pem") == b"hello"

    asyncio.run(run())


def test_a_problem_is_logged_when_it_begins_changes_and_ends(
    made: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="saccade.server.http.tls")
    files, certificate, away = TlsFiles(settings(folder)), folder / "server.pem", folder / "away.pem"

    def logged() -> list[str]:
        caplog.clear()
        for _ in range(3):
            files.refresh()
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    certificate.rename(away)
    (gone,) = logged()
    assert gone.startswith("WARNING") and f"{certificate}: No such file" in gone
    assert logged() == []
    certificate.write_text("garbage")
    (broken,) = logged()
    assert broken.startswith("WARNING") and "cannot use the TLS files" in broken
    assert logged() == []
    away.replace(certificate)
    assert logged() == ["INFO the TLS files are again those in use"]
    certificate.unlink()
    assert len(logged()) == 1, "it began again"
    use(made, folder, "second")
    assert logged() == ["INFO the TLS files changed; new connections use them"]


async def is_let_in(port: int, made: Path, name: str | None) -> bool:
    try:
        return await greet(port, made / "first.pem", None if name is None else made / f"{name}.pem") == b"hello"
    except (ssl.SSLError, ConnectionError):
        return False


def test_clients_need_a_certificate_from_the_given_authority(made: Path, folder: Path) -> None:
    async def run() -> None:
        files = TlsFiles(settings(folder, ssl_ca_certs=str(folder / "ca.pem")))
        async with listening(files) as port:
            assert [await is_let_in(port, made, name) for name in ("alice", "bob", None)] == [True, False, False]
            shutil.copy(made / "bob.pem", folder / "ca.pem")
            os.utime(folder / "ca.pem", (1, 1))
            assert files.refresh()
            found = [await is_let_in(port, made, name) for name in ("alice", "bob", None)]
            assert found == [False, True, False], "a removed authority is no longer trusted"
        optional = TlsFiles(settings(folder, ssl_ca_certs=str(folder / "ca.pem"), ssl_cert_reqs="1"))
        async with listening(optional) as port:
            assert [await is_let_in(port, made, name) for name in ("alice", "bob", None)] == [False, True, True]

    asyncio.run(run())


def test_unusable_tls_settings_are_refused_at_startup(made: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerSettings(ssl_ca_certs=str(folder / "ca.pem"))
    for more in ({"ssl_cert_reqs": "required"}, {"ssl_ca_certs": str(folder / "none.pem")}):
        with pytest.raises(ConfigError, match="--ssl-ca-certs"):
            settings(folder, **more)
    (folder / "ca.pem").write_text("garbage")
    with pytest.raises(ConfigError, match=r"cannot use the certificates.*--ssl-ca-certs"):
        TlsFiles(settings(folder, ssl_ca_certs=str(folder / "ca.pem")))
    use(made, folder, "second", ("key",))
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH.*--ssl-certfile"):
        TlsFiles(settings(folder))


def test_a_key_with_a_password_is_refused_without_a_prompt(made: Path, folder: Path) -> None:
    assert OPENSSL is not None
    locked = [OPENSSL, "ec", "-in", str(made / "first.key"), "-out", str(folder / "server.key"), "-aes256"]
    subprocess.run([*locked, "-passout", "pass:secret"], check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"password.*--ssl-keyfile"):
        TlsFiles(settings(folder))
