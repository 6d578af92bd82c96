"""API keys: kept as hashes, compared in constant time, all of them every time."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from saccade.server.http_errors import HttpError

# The page is a file that comes with the package and holds no secrets: whoever loads it types a key into it.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
ADMIN_PATHS = frozenset({"/abort_request", "/server_info"})


class Keys:
    """Who may call what. Without user keys everybody may; without an admin key nobody may administer."""

    def __init__(self, users: Iterable[str], admin: str) -> None:
        self._users = [_digest(key.encode()) for key in users]
        self._admin = _digest(admin.encode()) if admin else None

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises what a caller without the right key gets. `path` is the decoded one, without a root path."""
        if path in OPEN_PATHS:
            return
        given = _given(headers)
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        num_equal = sum(hmac.compare_digest(given, key) for key in self._users)  # every key is compared
        is_user = num_equal > 0 or is_admin
        if self._users and not is_user:
            raise HttpError(401, "the API key is missing or wrong (Authorization: Bearer KEY)", code="invalid_api_key")
        if path in ADMIN_PATHS and not is_admin:
            raise HttpError(403, "this route needs the administrator's key (--admin-api-key)", code="admin_only")


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    return _digest(key)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
