"""Parts that all HTML pages for people share: their style, and the policy that admits nothing foreign."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def with_style(text: str) -> str:
    """Return a page with the common style in its place."""
    style = resources.files("edl_torch.master.web").joinpath("base.css").read_text("utf-8")
    return text.replace("/* base.css */\n", style, 1)


def hashes(text: str, tag: str) -> str:
    """Return the sources of a Content-Security-Policy that admit these elements of a page and no others."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    digests = [hashlib.sha256(body.encode()).digest() for body in found]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
