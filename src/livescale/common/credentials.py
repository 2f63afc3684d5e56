"""What a member proves who it is with: a certificate of the pool's own authority, and a list of
those that were revoked. Contexts for TLS 1.3, both ends with certificates; nothing older is spoken.

A folder holds `ca.pem`, `cert.pem`, `key.pem` and, where members were revoked, `revoked.pem`: files
of `livescale cluster`, or the user's own. The list is read again when its file changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from livescale.common.private_files import is_private
from livescale.common.proofs import NotAdmittedError, RevokedError
from livescale.common.settings import ConfigError

_log = logging.getLogger(__name__)

CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE = "ca.pem", "cert.pem", "key.pem", "revoked.pem"
HEAD_ROLE = "livescale-head"
"""A DNS name in the certificates of machines that may be the pool's head: no other can pose as
it."""
GATEWAY_ROLE = "livescale-gateway"
"""A DNS name in the certificates of machines that may be gateways, and nothing else."""
LOOK_S = 2.0
"""How often a process looks whether members were revoked. Each look wakes a process that may be at
rest: twice a second, looks were about a third of what TLS on wires cost (benchmarks/RESULTS.md)."""
_FILE_BYTES_MAX = 1 << 20


class Credentials:
    """Those in one folder. Used on one thread, but for `check`, which any may call."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, which never repeats a key."""
        self._folder = folder
        self._ca = _certificate(folder / CA_FILE)
        _refuse_readable(folder / KEY_FILE)
        #: SHA-256 of the authority's certificate
        self.fingerprint = hashlib.sha256(self._ca.public_bytes(Encoding.DER)).hexdigest()
        self.calling = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self.answering = self._context(ssl.PROTOCOL_TLS_SERVER)
        #: the list as it is on disk (empty: nothing was revoked), its serial numbers and its age
        self.revoked_list = b""
        self._revoked: frozenset[int] = frozenset()
        self._issued = (0.0, 0)
        self._mark: tuple[int, ...] | None = None
        self._problem = ""
        #: by the end of the connection: the number of the other end's certificate
        self._talking: weakref.WeakKeyDictionary[asyncio.StreamWriter, int] = (
            weakref.WeakKeyDictionary()
        )
        self._watchers: list[Callable[[], None]] = []
        self.look()
        if self._problem:
            raise ConfigError(self._problem)

    def check(
        self, certificate: bytes | None, *, is_head: bool = False, may_be_gateway: bool = False
    ) -> int:
        """The serial number of a certificate (DER) that TLS has verified. Raises NotAdmittedError
        for one that was revoked, for one that is not a head's where that is asked for, and for a
        gateway's where none has business."""
        if certificate is None:
            raise NotAdmittedError("shows no certificate")
        shown = x509.load_der_x509_certificate(certificate)
        if shown.serial_number in self._revoked:
            raise RevokedError(f"the certificate of {_name(shown)} was revoked")
        if is_head and HEAD_ROLE not in _dns_names(shown):
            raise NotAdmittedError(f"the certificate of {_name(shown)} is not a head node's")
        if not may_be_gateway and GATEWAY_ROLE in _dns_names(shown):
            raise NotAdmittedError(f"the certificate of {_name(shown)} is a gateway's")
        return shown.serial_number

    def admit(
        self,
        writer: asyncio.StreamWriter,
        *,
        is_head: bool = False,
        may_be_gateway: bool = False,
    ) -> None:
        """The other end of a connection that TLS protects may talk, until its certificate is
        revoked: then the connection is cut. Raises NotAdmittedError as `check` does."""
        self.look()
        end: ssl.SSLObject = writer.get_extra_info("ssl_object")
        shown = end.getpeercert(binary_form=True)
        self._talking[writer] = self.check(shown, is_head=is_head, may_be_gateway=may_be_gateway)

    @staticmethod
    def is_gateways(certificate: bytes | None) -> bool:
        """Of a machine that may be a gateway only (DER; None: of none)."""
        if certificate is None:
            return False
        return GATEWAY_ROLE in _dns_names(x509.load_der_x509_certificate(certificate))

    def watch(self, changed: Callable[[], None]) -> None:
        """Call this whenever the list is another one."""
        self._watchers.append(changed)

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the list if it has changed; connections of members that were revoked are cut. What
        cannot be read changes nothing, and is told once."""
        path = self._folder / REVOKED_FILE
        try:
            found = path.stat()
            mark = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if mark == self._mark:
                return
            text = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._tell(f"tls_dir {path}: {error.strerror}")
            return
        self._mark = mark
        self._take(text, str(path))

    def keep(self, text: bytes) -> None:
        """A list that another member has sent: taken over, on disk too, if the authority signed it
        later than the one that is here."""
        if text != self.revoked_list and not self._take(text, "the list of revoked members"):
            return
        path = self._folder / REVOKED_FILE
        try:
            write_whole(path, text, 0o644)
        except OSError as error:
            self._tell(
                f"tls_dir {path}: {error.strerror}. Running processes do not get new revocations"
            )

    # -- helpers --------------------------------------------------------------------------------

    def _take(self, text: bytes, where: str) -> bool:
        try:
            listed = x509.load_pem_x509_crl(text[:_FILE_BYTES_MAX])
            if not listed.is_signature_valid(self._ca.public_key()):  # type: ignore[arg-type]
                raise ValueError("the pool's authority did not sign it")
        except ValueError as error:
            self._tell(
                f"tls_dir {where} is not a valid list of revoked certificates: {error}. "
                "Restore it from the authority's folder"
            )
            return False
        issued = _issued(listed)
        if issued < self._issued:
            self._tell(
                f"tls_dir {where} is older than the list of revoked certificates in use, and is "
                "ignored. Copy the current list from the authority's folder"
            )
            return False
        self._problem, self._issued, self.revoked_list = "", issued, text
        self._revoked = frozenset(entry.serial_number for entry in listed)
        for writer, number in [*self._talking.items()]:
            if number in self._revoked:
                _log.warning("revoked certificate: the connection is closed")
                writer.transport.abort()
        for changed in self._watchers:
            changed()
        return True

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("%s", problem)
        self._problem = problem

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        # The authority is the pool's own: a certificate of it makes a member, wherever it is.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # No session is resumed, so that every connection shows its certificate.
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        try:
            context.load_verify_locations(self._folder / CA_FILE)
            # Without a password for the key: no terminal may be there to ask for one.
            context.load_cert_chain(
                self._folder / CERTIFICATE_FILE, self._folder / KEY_FILE, password=""
            )
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_dir {self._folder}: {CERTIFICATE_FILE} and {KEY_FILE} do not "
                f"match, or are not PEM files ({error.reason}). Make a new folder with "
                "`livescale cluster member`"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"tls_dir {self._folder / CERTIFICATE_FILE}: {error.strerror}"
            ) from error
        return context

    def __repr__(self) -> str:
        return f"<Credentials in {self._folder}, {len(self._revoked)} revoked>"


def write_whole(path: Path, text: bytes, mode: int) -> None:
    """All of the file or nothing, for a reader meanwhile, too. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            os.fchmod(descriptor, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()[:_FILE_BYTES_MAX])
    except OSError as error:
        raise ConfigError(f"tls_dir {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(
            f"tls_dir {path} is not a PEM certificate. Make a new folder with `livescale "
            "cluster member`"
        ) from None


def _refuse_readable(path: Path) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"tls_dir {path}: {error.strerror}") from error
    if not is_private(found.st_mode, found.st_uid, os.geteuid()):
        raise ConfigError(f"tls_dir {path} is readable by other users. Run: chmod 600 {path}")


def _issued(listed: x509.CertificateRevocationList) -> tuple[float, int]:
    """Grows from list to list: its time, which is in whole seconds, and its number, if it has
    one."""
    try:
        number = listed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        number = 0
    return listed.last_update_utc.timestamp(), number


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.DNSName)


def _name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or f"number {certificate.serial_number}"
