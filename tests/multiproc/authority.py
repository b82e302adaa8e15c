"""Certificates for a test, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


class Authority:
    """Signs certificates of nodes; all its files lie in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / f"{name}.pem"
        self._folder = folder
        self._name = name
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def node(self, name: str = "node", days: str = "2") -> dict[str, str]:
        """The settings of a node with a certificate of its own, which ends in so many days."""
        key, request, certificate = (
            self._folder / f"{self._name}-{name}.{kind}" for kind in ("key", "csr", "pem")
        )
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name} of {self._name}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-out", certificate),
        )
        return {
            "BYTEPS_TLS_CERT": str(certificate),
            "BYTEPS_TLS_KEY": str(key),
            "BYTEPS_TLS_CA": str(self.certificate),
        }
