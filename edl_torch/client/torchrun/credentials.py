"""Certificate and token of a master that a job starts for itself, from the variables that its trainers have.

All nodes of a job are alike: the certificate that a trainer shows is its node's, and the master's there too.
It must not know where the master listens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edl_torch.errors import InvalidArgument
from edl_torch.rpc.credentials import Credentials, text_from_env


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarCredentials:
    """Files of the job's own master for TLS and its token.

    Attributes:
        token_file: of the token that it asks for; None: it asks for none.
        cert, key: its certificate; None: no TLS.
        ca: the authority of the certificates that it asks callers for; None: for none.
        insecure: whether the user said that the network is his own.
    """

    token_file: str | None = None
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    insecure: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SidecarCredentials:
        """From the variables of `Credentials.from_env`. Raises InvalidArgument where they do not fit."""
        env = os.environ if environ is None else environ
        given = Credentials.from_env(env)  # its checks
        own = cls(
            token_file=text_from_env("TOKEN_FILE", env),
            cert=text_from_env("TLS_CERT", env),
            key=text_from_env("TLS_KEY", env),
            ca=text_from_env("TLS_CA", env),
            insecure=given.insecure,
        )
        if given.tls and own.cert is None:
            raise InvalidArgument(
                "TLS is asked for, but the master that this job starts has no certificate, and it may be on "
                "any node: give all nodes EDL_MASTER_TLS_CERT and EDL_MASTER_TLS_KEY, a certificate for "
                "servers and clients, and in EDL_MASTER_TLS_NAME the name in it (see docs/torchrun.md); or "
                "start `edl-torch master` yourself and name it in EDL_MASTER_ADDR"
            )
        return own

    def with_token(self, file: Path) -> SidecarCredentials:
        """The same, with another token."""
        return replace(self, token_file=str(file))

    def options(self, *, exposed: bool) -> list[str]:
        """For `edl-torch master`. `exposed` says that other machines can reach it."""
        options = []
        if self.token_file is not None:
            options += ["--token-file", self.token_file]
        if self.cert is not None and self.key is not None:
            options += ["--tls-cert", self.cert, "--tls-key", self.key]
            if self.ca is not None:
                options += ["--tls-client-ca", self.ca]
        elif exposed:  # no wider open than the job's own store, which is torch's: docs/decisions/0020
            options += ["--insecure"]
        return options
