"""The address to listen on."""

import socket
from typing import Any


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """IPv4 where a name has both kinds. Raises OSError for a name that nobody knows."""
    if not host:
        return socket.AF_INET, ("", port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # a part of the name is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, "this is not a host name") from None
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address
