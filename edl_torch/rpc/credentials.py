"""Credentials of master and trainers: certificates for TLS, and a token that every call carries.

Files are read once; their contents are never shown.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

import grpc

from edl_torch.errors import InvalidArgument

METADATA_KEY = "authorization"
LEAST_TOKEN = 16  # characters; shorter ones can be guessed over the network

_Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class AccessToken:
    """Shared secret. Comparing takes the same time wherever the difference is; it is never pickled."""

    _value: bytes = field(repr=False)

    @classmethod
    def read(cls, path: _Path) -> Self:
        """Return the token in a file, without the white space around it.

        Raises InvalidArgument, also for a file that its group may write to, or others read (a group may read:
        so Kubernetes gives secrets to a pod that is not root).
        """
        value = _read(path, "token", keeps_secret=True).strip()
        if len(value) < LEAST_TOKEN or not value.isascii() or any(not 32 < byte < 127 for byte in value):
            raise InvalidArgument(
                f"the token file '{path}' must hold one word of {LEAST_TOKEN} or more ASCII characters; "
                f"make one with: umask 077; "
                f"python -c 'import secrets; print(secrets.token_urlsafe())' > '{path}'"
            )
        return cls(value)

    @property
    def header(self) -> str:
        """Value that a call carries under `METADATA_KEY`."""
        return f"Bearer {self._value.decode()}"

    def opens(self, header: str | bytes) -> bool:
        """Return whether a call carries this token."""
        given = header.encode("utf-8", "replace") if isinstance(header, str) else header
        return hmac.compare_digest(given, self.header.encode())

    def __reduce__(self) -> NoReturn:
        raise TypeError("the master's token stays in the process that has read it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of a trainer: how it recognises the master, and how the master recognises it.

    Attributes:
        token: sent with every call.
        tls: whether the channel is encrypted.
        insecure: whether the token may cross a network that is not.
        ca: PEM of the authority that signed the master's certificate; None: those of the system.
        cert, key: PEM of the trainer's own certificate, where the master asks for one.
        name: that the master's certificate must have; None: the host of its address.
    """

    token: AccessToken | None = None
    tls: bool = False
    insecure: bool = False
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    name: str | None = None

    @classmethod
    def read(
        cls,
        *,
        token_file: _Path | None = None,
        tls: bool = False,
        insecure: bool = False,
        tls_ca: _Path | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
        tls_name: str | None = None,
    ) -> Self:
        """Read them from files. Raises InvalidArgument that names the file, or the one that is missing."""
        if (tls_cert is None) != (tls_key is None):
            raise InvalidArgument("a TLS certificate and its key belong together: give both, or neither")
        cert, key, ca = _read_files(tls_cert, tls_key, tls_ca)
        encrypted = tls or tls_ca is not None or tls_cert is not None
        if tls_name is not None and not encrypted:
            raise InvalidArgument(
                f"a name for the master's certificate is given ({tls_name!r}), but no TLS: give its authority"
            )
        return cls(
            token=None if token_file is None else AccessToken.read(token_file),
            insecure=insecure,
            tls=encrypted,
            name=tls_name,
            ca=ca,
            cert=cert,
            key=key,
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read `EDL_MASTER_TOKEN_FILE`, `EDL_MASTER_TLS_CA`, `…_TLS_CERT`, `…_TLS_KEY` and `…_TLS_NAME`.

        `EDL_MASTER_TLS=1` trusts the authorities of the system, `EDL_MASTER_INSECURE=1` sends a token without
        TLS.
        """
        text = partial(text_from_env, env=env)

        def switch(name: str) -> bool:
            value = text(name) or "0"
            if value not in ("0", "1"):
                raise InvalidArgument(f"EDL_MASTER_{name} is {value!r}: it must be 0 or 1")
            return value == "1"

        return cls.read(
            token_file=text("TOKEN_FILE"),
            tls=switch("TLS"),
            insecure=switch("INSECURE"),
            tls_ca=text("TLS_CA"),
            tls_cert=text("TLS_CERT"),
            tls_key=text("TLS_KEY"),
            tls_name=text("TLS_NAME"),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return them for grpc; None without TLS."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert) if self.tls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCredentials:
    """Credentials of a master, which decide who may call it.

    Attributes:
        token: without it a call learns nothing; None: no token is asked for.
        cert, key: PEM of the master's certificate; None: no TLS.
        client_ca: PEM of the authority whose certificates callers must have; None: any caller.
    """

    token: AccessToken | None = None
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    client_ca: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls,
        *,
        token_file: _Path | None = None,
        tls_cert: _Path | None = None,
        tls_key: _Path | None = None,
        tls_client_ca: _Path | None = None,
    ) -> Self:
        """Read them from files. Raises InvalidArgument that names the file, or the one that is missing."""
        if (tls_cert is None) != (tls_key is None):
            raise InvalidArgument("--tls-cert and --tls-key belong together: give both, or neither")
        if tls_client_ca is not None and tls_cert is None:
            raise InvalidArgument("--tls-client-ca needs --tls-cert and --tls-key")
        cert, key, ca = _read_files(tls_cert, tls_key, tls_client_ca)
        token = None if token_file is None else AccessToken.read(token_file)
        return cls(token=token, cert=cert, key=key, client_ca=ca)

    @property
    def encrypted(self) -> bool:
        """Whether callers speak TLS."""
        return self.cert is not None

    @property
    def closed(self) -> bool:
        """Whether strangers on the network are kept out: by TLS, and by callers that authenticate."""
        return self.encrypted and (self.token is not None or self.client_ca is not None)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return them for a server of Python's own; None without TLS."""
        if self.cert is None or self.key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        with tempfile.TemporaryDirectory(prefix="edl_torch_") as folder:  # ssl reads files alone; only we can
            cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
            cert.write_bytes(self.cert)
            key.write_bytes(self.key)
            context.load_cert_chain(cert, key)
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return them for grpc; None without TLS."""
        if self.cert is None or self.key is None:
            return None
        asks = self.client_ca is not None
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.client_ca, require_client_auth=asks)


def text_from_env(name: str, env: Mapping[str, str]) -> str | None:
    """Return the variable `EDL_MASTER_…` of that name; None where it is not set, or empty."""
    return env.get(f"EDL_MASTER_{name}", "").strip() or None


def _read_files(
    cert: _Path | None, key: _Path | None, ca: _Path | None
) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return what is in them. Raises InvalidArgument that names the file which TLS cannot use.

    grpc would say so late, or nowhere.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = None if ca is None else _read_pem(ca, "CA certificate")
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as exc:
            raise InvalidArgument(f"the CA certificate file '{ca}' is damaged: {_reason(exc)}") from exc
    if cert is None or key is None:
        return None, None, authority
    pair = _read_pem(cert, "certificate"), _read_pem(key, "private key")
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        raise InvalidArgument(
            f"the certificate '{cert}' and the private key '{key}' do not belong together, or one is "
            f"damaged: {_reason(exc)}"
        ) from exc
    return *pair, authority


def _no_password() -> str:
    raise InvalidArgument(
        "the private key is encrypted: give one without a pass phrase, in a file of yours alone"
    )


def _reason(error: ssl.SSLError) -> str:
    return error.reason or "it cannot be read"


def _read(path: _Path, what: str, *, keeps_secret: bool = False) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if keeps_secret and mode & (stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
                raise InvalidArgument(
                    f"others may read or write the {what} file '{path}' (mode {mode:04o}): chmod 600 '{path}'"
                )
            return file.read()
    except OSError as exc:
        raise InvalidArgument(f"the {what} file '{path}' cannot be read: {exc.strerror}") from exc


def _read_pem(path: _Path, what: str) -> bytes:
    content = _read(path, what)
    if b"-----BEGIN " not in content:
        raise InvalidArgument(f"the {what} file '{path}' is no PEM file: it has no '-----BEGIN …' line")
    return content
