"""API keys: stored as hashes, all compared every time, in constant time."""

import hashlib
import hmac
from collections.abc import Mapping

from saccade.server.http_errors import HttpError
from saccade.server.page.page_files import page_files

# The pages are static files without secrets: their users type a key into them.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready", *(f"/page/{name}" for name in page_files())})
ADMIN = "administrator"
ADMIN_PATHS = frozenset({"/abort_request", "/server_info", "/start_profile", "/stop_profile", "/trace"})
_NO_KEY = "the API key is missing or wrong (Authorization: Bearer KEY, or x-api-key: KEY)"


class Keys:
    """Without user keys everybody may call; without an admin key nobody may administer."""

    def __init__(self, users: Mapping[str, str], admin: str) -> None:
        """`users` maps each key to its name."""
        self._users = [(_digest(key.encode()), name) for key, name in users.items()]
        self._admin = _digest(admin.encode()) if admin else None

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> str | None:
        """The name of the key, or None if none is needed. Raises if the key is missing or wrong. `path` is decoded and
        without the root path."""
        if path in OPEN_PATHS:
            return None
        given = _given(headers)
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        found = [name for key, name in self._users if hmac.compare_digest(given, key)]  # compares all: constant time
        if self._users and not found and not is_admin:
            raise HttpError(401, _NO_KEY, code="invalid_api_key")
        if path in ADMIN_PATHS and not is_admin:
            raise HttpError(403, "this route needs the administrator's key (--admin-api-key)", code="admin_only")
        if found:
            return found[0]
        return ADMIN if is_admin else None


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    return _digest(key)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
