"""The folder of a pool's own certificate authority: `ca.pem`, `ca.key`, `revoked.pem`, and one
folder per member with what that member's machine needs (`livescale.common.credentials`).

Keys are of the curve P-256, and never leave the folder they were written to but by the user's hand.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from livescale.common.credentials import (
    CA_FILE,
    CERTIFICATE_FILE,
    GATEWAY_ROLE,
    HEAD_ROLE,
    KEY_FILE,
    REVOKED_FILE,
    write_whole,
)
from livescale.common.errors import UserError

CA_KEY_FILE = "ca.key"
HEAD = "head"
DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
# Clocks of machines differ.
_SLACK = datetime.timedelta(hours=1)
_Key = ec.EllipticCurvePrivateKey


class ClusterError(UserError):
    """The folder cannot be made or used so; the message says why."""

    exit_status = 2


class ClusterFolder:
    """The authority in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def init(self, days: int = DAYS) -> Path:
        """Make the authority and the member "head"; its folder. Raises ClusterError."""
        # A key alone is what an `init` left that was interrupted, unless it has signed for members.
        if (self._path / CA_FILE).exists() or self._member_folders():
            raise ClusterError(
                f"{self._path} has a certificate authority already. Give another --folder, "
                "or use this authority"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        ca = _authority(key, days)
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path / CA_KEY_FILE, _key_text(key), 0o600)
            write_whole(self._path / REVOKED_FILE, _revoked(ca, key, [], _now()), 0o644)
            # Last: what is interrupted before can be called again.
            write_whole(self._path / CA_FILE, _pem(ca), 0o600)
        except OSError as error:
            raise ClusterError(f"{self._path}: {error.strerror}") from error
        return self.add(HEAD, is_head=True, days=days)

    def add(
        self, name: str, *, is_head: bool = False, is_gateway: bool = False, days: int = DAYS
    ) -> Path:
        """Make what the machine of a new member needs, in a folder: of one that may be the head
        besides, or of one that may be a gateway only. Raises ClusterError."""
        if not _NAME.fullmatch(name) or name in (HEAD_ROLE, GATEWAY_ROLE):
            raise ClusterError(
                f"'{name}' is an invalid machine name. Use letters, digits, '-' and '.'"
            )
        folder = self._path / name
        if (folder / CERTIFICATE_FILE).exists():
            raise ClusterError(
                f"{folder}: this machine has a certificate already. Revoke that, or choose another"
                " name"
            )
        ca, ca_key = self._authority()
        key = ec.generate_private_key(ec.SECP256R1())
        names = [name, *[HEAD_ROLE] * is_head, *[GATEWAY_ROLE] * is_gateway]
        certificate = _member(ca, ca_key, key, names, days)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(folder / CA_FILE, _pem(ca), 0o600)
            write_whole(folder / KEY_FILE, _key_text(key), 0o600)
            shutil.copy(self._path / REVOKED_FILE, folder / REVOKED_FILE)
            # Last: what is interrupted before can be called again.
            write_whole(folder / CERTIFICATE_FILE, _pem(certificate), 0o600)
        except OSError as error:
            raise ClusterError(f"{folder}: {error.strerror}") from error
        return folder

    def revoke(self, name: str) -> Path:
        """The member is none any more: pools that run with a folder in here learn of it within
        two seconds, others when they get the list, which is returned. Raises ClusterError."""
        path = self._path / name / CERTIFICATE_FILE
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            raise ClusterError(
                f"{path} is missing: no certificate was made for that name"
            ) from None
        listed = self._listed()
        numbers = [entry.serial_number for entry in listed]
        if certificate.serial_number not in numbers:
            numbers.append(certificate.serial_number)
        # Members keep the latest list that they got: a clock that was set back makes no older one.
        # Lists of one time are told apart by their number, which grows.
        now = max(_now(), listed.last_update_utc)
        text = _revoked(*self._authority(), numbers, now)
        try:
            for folder in [self._path, *self._member_folders()]:
                write_whole(folder / REVOKED_FILE, text, 0o644)
            os.replace(path, path.with_suffix(".revoked"))
        except OSError as error:
            raise ClusterError(f"{self._path}: {error.strerror}") from error
        return self._path / REVOKED_FILE

    # -- helpers --------------------------------------------------------------------------------

    def _authority(self) -> tuple[x509.Certificate, _Key]:
        try:
            ca = x509.load_pem_x509_certificate((self._path / CA_FILE).read_bytes())
            text = (self._path / CA_KEY_FILE).read_bytes()
            key = serialization.load_pem_private_key(text, None)
        except (OSError, ValueError):
            raise ClusterError(
                f"{self._path} is missing or unreadable. Make an authority with: "
                f"livescale cluster init --folder {self._path}"
            ) from None
        if not isinstance(key, _Key):
            raise ClusterError(
                f"{self._path}: the authority was not made by `livescale cluster`. Make one "
                "with `livescale cluster init`"
            )
        return ca, key

    def _listed(self) -> x509.CertificateRevocationList:
        path = self._path / REVOKED_FILE
        try:
            return x509.load_pem_x509_crl(path.read_bytes())
        except (OSError, ValueError):
            raise ClusterError(
                f"{path} is not a valid list of revoked certificates. Restore it from a backup"
            ) from None

    def _member_folders(self) -> list[Path]:
        return [path.parent for path in self._path.glob(f"*/{KEY_FILE}")]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _revoked(ca: x509.Certificate, key: _Key, numbers: list[int], now: datetime.datetime) -> bytes:
    """The list of these certificates, as of now."""
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now)
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(len(numbers)), critical=False)
    )
    for number in numbers:
        entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
        made = made.add_revoked_certificate(entry.build())
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _authority(key: _Key, days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "LiveScale pool")])
    return (
        _builder(days)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )


def _member(
    ca: x509.Certificate, ca_key: _Key, key: _Key, names: list[str], days: int
) -> x509.Certificate:
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    of_ca = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(days)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(of_ca, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(days: int) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_text(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
