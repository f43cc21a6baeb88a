"""Checks a request's signature against the key: version 2 of the service's scheme, which pyodps uses.

Made from the scheme, without pyodps's own signing, so that a client that signs wrongly is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlparse

_SIGNED = ("content-type", "content-md5", "date")


@dataclass(frozen=True, repr=False)
class Account:
    """Who may use the server."""

    access_id: str
    access_key: str
    sts_token: str | None = None

    def admits(self, method: str, target: str, headers: Mapping[str, str]) -> bool:
        """Whether it was signed with this account's key. `target`: path and query below the endpoint."""
        lower = {name.lower(): value for name, value in headers.items()}
        if self.sts_token is not None and lower.get("authorization-sts-token") != self.sts_token:
            return False
        scheme, _, rest = lower.get("authorization", "").partition(" ")
        credential, _, signature = rest.rpartition(":")
        if scheme != "ODPS" or credential != self.access_id:
            return False
        text = canonical(method, target, lower)
        made = hmac.new(self.access_key.encode(), text.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(base64.b64encode(made).decode(), signature)


def canonical(method: str, target: str, headers: Mapping[str, str]) -> str:
    """The text that is signed; `headers` with lower-case names."""
    address = urlparse(unquote(target), allow_fragments=False)
    params = dict(parse_qsl(address.query, keep_blank_values=True))
    query = "&".join(f"{name}={value}" if value else name for name, value in sorted(params.items()))
    signed = {name: headers.get(name, "") for name in _SIGNED}
    signed |= {name: value for name, value in headers.items() if name.startswith("x-odps-")}
    signed |= {name: value for name, value in params.items() if name.startswith("x-odps-")}
    lines = [
        f"{name}:{signed[name]}" if name.startswith("x-odps-") else signed[name] for name in sorted(signed)
    ]
    return "\n".join([method, *lines, f"{address.path}?{query}" if query else address.path])
