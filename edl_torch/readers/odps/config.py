"""Where a MaxCompute table is and who reads it: from arguments, else from the environment.

It must not know pyodps. Keys that come from the environment stay there: each process reads them where it
connects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl_torch.errors import InvalidArgument
from edl_torch.readers.secret import Secret

_PROJECT = ("ODPS_PROJECT_NAME", "ODPS_PROJECT", "MAXCOMPUTE_PROJECT")
_ENDPOINT = ("ODPS_ENDPOINT", "MAXCOMPUTE_ENDPOINT")
_TUNNEL_ENDPOINT = ("ODPS_TUNNEL_ENDPOINT", "MAXCOMPUTE_TUNNEL_ENDPOINT")
# Access id, key, temporary token. Never mixed: a key belongs to the id beside it.
_KEYS = (
    ("ODPS_ACCESS_ID", "ODPS_ACCESS_KEY", "ODPS_STS_TOKEN"),
    ("ODPS_STS_ACCESS_KEY_ID", "ODPS_STS_ACCESS_KEY_SECRET", "ODPS_STS_TOKEN"),
    ("MAXCOMPUTE_AK", "MAXCOMPUTE_SK", ""),
    ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN"),
)


@dataclass(frozen=True, kw_only=True)
class OdpsConfig:
    """A table and how to reach it. Its `repr` and its pickles on a disk are without secrets."""

    project: str
    table: str
    endpoint: str
    schema: str | None = None
    tunnel_endpoint: str | None = None
    quota_name: str | None = None
    timeout_s: float = 60.0
    access_id: str | None = field(default=None, repr=False)
    access_key: Secret = field(default_factory=Secret)
    sts_token: Secret = field(default_factory=Secret)

    @property
    def name(self) -> str:
        """`project.table`, or `project.schema.table`."""
        return ".".join(part for part in (self.project, self.schema, self.table) if part)

    def credentials(self, environment: Mapping[str, str] | None = None) -> Credentials | None:
        """The keys to sign with, or None where neither arguments nor environment have any."""
        key = self.access_key.reveal()
        if self.access_id and key:
            return Credentials(self.access_id, self.access_key, self.sts_token)
        return _credentials(os.environ if environment is None else environment, self.access_id)

    def hide_in(self, text: str) -> str:
        """`text` without the secrets of this table's reader."""
        credentials = self.credentials()
        for secret in (credentials.access_key, credentials.sts_token) if credentials else ():
            text = secret.hide_in(text)
        return text


@dataclass(frozen=True)
class Credentials:
    """What a request is signed with."""

    access_id: str
    access_key: Secret
    sts_token: Secret


def odps_config(
    table: str,
    *,
    project: str | None = None,
    schema: str | None = None,
    access_id: str | None = None,
    access_key: str | None = None,
    sts_token: str | None = None,
    endpoint: str | None = None,
    tunnel_endpoint: str | None = None,
    quota_name: str | None = None,
    timeout_s: float = 60.0,
) -> OdpsConfig:
    """The configuration from arguments, filled up from the environment.

    `table` may be `project.table` or `project.schema.table`. Raises InvalidArgument for what is missing, with
    the variables that would supply it, and for half a pair of keys.
    """
    *above, name = table.split(".")
    if not all((*above, name)) or len(above) > 2:
        raise InvalidArgument(f"table={table!r}: expected table, project.table or project.schema.table")
    if above:
        project, schema = above[0], (above[1] if len(above) == 2 else schema)
    for what, given in (("access_id", access_id), ("access_key", access_key), ("sts_token", sts_token)):
        if not isinstance(given, str | None):
            raise InvalidArgument(f"{what} is {type(given).__name__}, expected text: put it in quotes")
    if access_key and not access_id:
        raise InvalidArgument("access_key is given without access_id: give both, or neither")
    if sts_token and not access_key:
        raise InvalidArgument("sts_token is given without access_id and access_key: give all, or none")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidArgument(f"timeout_s={timeout_s!r}: expected a positive number of seconds")
    return OdpsConfig(
        project=_needed("project", project, _PROJECT),
        table=name,
        endpoint=_needed("endpoint", endpoint, _ENDPOINT),
        schema=schema,
        tunnel_endpoint=tunnel_endpoint or _first(os.environ, _TUNNEL_ENDPOINT),
        quota_name=quota_name,
        timeout_s=timeout_s,
        access_id=access_id,
        access_key=Secret(access_key),
        sts_token=Secret(sts_token),
    )


def missing_keys() -> InvalidArgument:
    """What to say where nothing can be signed."""
    pairs = "; ".join(f"{key_id} and {key}" for key_id, key, _ in _KEYS)
    return InvalidArgument(
        "there is no access key for MaxCompute in this process: give access_id and access_key, or set one "
        f"pair of {pairs}. A key given as an argument reaches child processes, but no pickle that is stored"
    )


def _credentials(environment: Mapping[str, str], access_id: str | None) -> Credentials | None:
    for id_name, key_name, token_name in _KEYS:
        found, key = environment.get(id_name), environment.get(key_name)
        if found and key and access_id in (None, "", found):
            return Credentials(found, Secret(key), Secret(environment.get(token_name) or None))
    return None


def _needed(what: str, given: str | None, names: tuple[str, ...]) -> str:
    found = given or _first(os.environ, names)
    if not found:
        raise InvalidArgument(
            f"the MaxCompute {what} is not known: give {what}=, or set {' or '.join(names)}"
        )
    return found


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
