"""The headers of the page: it runs its own script and style and nothing else, talks to this server alone, and cannot be
framed."""

import re
from base64 import b64encode
from hashlib import sha256

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_headers(html: str) -> dict[str, str]:
    """Script and style are allowed by their digests, so that text which became markup would still not run."""
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digests[kind].append(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(digests["script"]) or "'none'",
        "style-src": " ".join(digests["style"]) or "'none'",
        "img-src": "'self' data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
