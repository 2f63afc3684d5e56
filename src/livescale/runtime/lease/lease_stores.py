"""Where a lease lies: a file of one host, or a Lease of Kubernetes. What is written is decided in
`control/cluster/lease.py`; here one version is replaced by the next, or not at all.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import msgspec

from livescale.common.settings import ConfigError
from livescale.control.cluster.lease import LeaseRecord, LeaseTerms
from livescale.values.types import Value

_FILE_BYTES_MAX = 64 << 10
_KIND = "livescale lease"
_KUBERNETES = "kubernetes:"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class LeaseStore(Protocol):
    """Both calls block, and raise OSError where the store cannot be reached, or is none."""

    def read(self) -> tuple[LeaseRecord | None, str]:
        """The record and its version (None, "": there is none yet)."""

    def write(self, record: LeaseRecord, version: str) -> str | None:
        """Replace this version. The new one, or None: the store has another version."""


def lease_store(lease: str, terms: LeaseTerms) -> LeaseStore:
    """By the setting: the path of a file, or `kubernetes:NAME`, or `kubernetes:NAMESPACE/NAME`.
    Raises ConfigError."""
    if not lease.startswith(_KUBERNETES):
        return FileLease(Path(lease))
    namespace, _, name = lease.removeprefix(_KUBERNETES).rpartition("/")
    if not _NAME.fullmatch(name) or (namespace and not _NAME.fullmatch(namespace)):
        raise ConfigError(
            f"lease {lease} is invalid. Write kubernetes:NAME or kubernetes:NAMESPACE/NAME"
        )
    return KubernetesLease(name, namespace, terms)


# -- a file ---------------------------------------------------------------------------------------


class _Document(Value, frozen=True):
    kind: str
    version: int
    record: LeaseRecord


class FileLease:
    """A file that all candidates reach, on a file system with locks. It is on the disk before a
    write is answered, so an epoch is never given twice."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a path where no lease can lie."""
        self._path = path
        # Locks of files keep other processes away, and no thread of this one: a renewal may still
        # be written when the lease is given back.
        self._using = threading.Lock()
        try:
            with self._locked():
                self._load()
        except OSError as error:
            raise ConfigError(f"lease {path}: {error.strerror or error}") from error

    def read(self) -> tuple[LeaseRecord | None, str]:
        with self._locked():
            document = self._load()
        return (None, "") if document is None else (document.record, str(document.version))

    def write(self, record: LeaseRecord, version: str) -> str | None:
        with self._locked():
            document = self._load()
            number = 0 if document is None else document.version
            if version != ("" if document is None else str(number)):
                return None
            self._keep(_Document(_KIND, number + 1, record))
            return str(number + 1)

    # -- helpers --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._using:
            descriptor = os.open(f"{self._path}.lock", flags, 0o600)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def _load(self) -> _Document | None:
        """To be called under the lock. Raises OSError, also for a file of another kind."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_FILE_BYTES_MAX)
        except FileNotFoundError:
            return None
        try:
            document = msgspec.json.decode(raw, type=_Document)
            if document.kind == _KIND:
                return document
        except msgspec.MsgspecError:
            pass
        raise OSError("not a valid lease file. Remove it, or set another `lease`")

    def _keep(self, document: _Document) -> None:
        new = f"{self._path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(document) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(new).replace(self._path)
        directory = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __repr__(self) -> str:
        return f"<FileLease {self._path}>"


# -- Kubernetes -----------------------------------------------------------------------------------


class KubernetesLease:
    """A Lease of coordination.k8s.io/v1, with the account that Kubernetes gives each pod: it needs
    get, create and update of leases. `leaseTransitions` is the epoch."""

    def __init__(
        self,
        name: str,
        namespace: str,
        terms: LeaseTerms,
        *,
        account: Path = _ACCOUNT,
        base_url: str | None = None,
    ) -> None:
        """`namespace` "": that of this pod. Raises ConfigError outside of Kubernetes."""
        self._name, self._account = name, account
        try:
            if base_url is None:
                host = os.environ["KUBERNETES_SERVICE_HOST"]
                port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
                base_url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
            namespace = namespace or (account / "namespace").read_text().strip()
            authority: Any = str(account / "ca.crt") if base_url.startswith("https:") else True
            timeout_s = terms.renewal_ns / 1e9
            self._client = httpx.Client(
                base_url=base_url, verify=authority, timeout=timeout_s, trust_env=False
            )
        except (KeyError, OSError) as error:
            raise ConfigError(
                f"lease {_KUBERNETES}{name} needs a Kubernetes pod with a service account ({error})"
            ) from error
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace)}/leases"
        self._namespace = namespace
        self._seconds = -(-terms.term_ns // 1_000_000_000)

    def read(self) -> tuple[LeaseRecord | None, str]:
        answer = self._ask("GET", f"{self._leases}/{quote(self._name)}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None, ""
        found = _checked(answer)
        spec = found.get("spec") or {}
        holder, epoch = spec.get("holderIdentity") or "", spec.get("leaseTransitions") or 0
        if not isinstance(holder, str) or not isinstance(epoch, int):
            raise OSError(
                f"the lease {self._name} was not written by LiveScale. Remove it, or set "
                "another `lease`"
            )
        return LeaseRecord(holder, epoch), _version(found)

    def write(self, record: LeaseRecord, version: str) -> str | None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": version} if version else {}),
            "spec": {
                "holderIdentity": record.holder,
                "leaseTransitions": record.epoch,
                "leaseDurationSeconds": self._seconds,
                # For people: clocks are not compared here.
                "renewTime": now,
            },
        }
        if version:
            answer = self._ask("PUT", f"{self._leases}/{quote(self._name)}", body)
        else:
            answer = self._ask("POST", self._leases, body)
        if answer.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND):
            return None
        return _version(_checked(answer))

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        # Kubernetes replaces the token while the pod runs.
        token = (self._account / "token").read_text().strip()
        try:
            return self._client.request(
                method, path, json=body, headers={"Authorization": f"Bearer {token}"}
            )
        except httpx.HTTPError as error:
            raise OSError(f"the API server: {error or type(error).__name__}") from error

    def __repr__(self) -> str:
        return f"<KubernetesLease {self._namespace}/{self._name}>"


def _checked(answer: httpx.Response) -> dict[str, Any]:
    """The object in an answer. Raises OSError for one that is a refusal."""
    if not answer.is_success:
        raise OSError(f"the API server: {answer.status_code} {answer.reason_phrase}")
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OSError("the API server's answer is not a JSON object")
    return found


def _version(found: dict[str, Any]) -> str:
    version = (found.get("metadata") or {}).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise OSError("the API server's answer has no version")
    return version
