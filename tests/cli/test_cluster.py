"""`livescale cluster`, and settings that name its files: one sentence for what cannot be."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from commands import livescale
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from livescale.common.credentials import Credentials, write_whole
from livescale.common.proofs import NotAdmittedError, RevokedError
from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.gateway.http.https import check_https
from livescale.runtime.join.cluster_folder import ClusterError, ClusterFolder
from no_room import no_room

KEY_BYTES = 300
"""Enough for a private key, and not for a certificate."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    assert livescale("cluster", "init", "--folder", path)[0] == 0
    return path


def refusal(*words: object) -> str:
    code, _, error = livescale("cluster", *words)
    assert code == 2
    return error.strip().splitlines()[-1]


def test_members_are_made_and_revoked(folder: Path) -> None:
    code, out, _ = livescale("cluster", "member", "alice", "--folder", folder)
    assert code == 0
    assert f"Copy {folder / 'alice'} to alice" in out
    assert Credentials(folder / "alice").fingerprint == Credentials(folder / "head").fingerprint
    assert livescale("cluster", "revoke", "alice", "--folder", folder)[0] == 0
    assert livescale("cluster", "member", "alice", "--folder", folder)[0] == 0, "a new one"
    Credentials(folder / "alice")


def test_a_machine_may_be_a_gateway_only_or_a_head(folder: Path) -> None:
    for role in ("head", "gateway"):
        words = ("member", f"a-{role}", f"--{role}", "--folder", folder)
        assert livescale("cluster", *words)[0] == 0
    shown = {name: der(folder / name / "cert.pem") for name in ("head", "a-head", "a-gateway")}
    known = Credentials(folder / "head")
    for name, certificate in shown.items():
        is_gateways = name == "a-gateway"
        assert Credentials.is_gateways(certificate) == is_gateways
        known.check(certificate, is_head=not is_gateways, may_be_gateway=is_gateways)
    for wrong in ({"is_head": True, "may_be_gateway": True}, {}):
        with pytest.raises(NotAdmittedError):
            known.check(shown["a-gateway"], **wrong)
    said = refusal("member", "x", "--folder", folder, "--head", "--gateway")
    assert "--gateway: not allowed with argument --head" in said


def test_revoking_has_effect_after_the_clock_was_set_back(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("alice", "bob"):
        assert livescale("cluster", "member", name, "--folder", folder)[0] == 0
    bob = der(folder / "bob" / "cert.pem")
    running = Credentials(folder / "head")
    before = (folder / "head" / "revoked.pem").read_bytes()
    list_of_tomorrow(folder)
    running.look()
    assert livescale("cluster", "revoke", "bob", "--folder", folder)[0] == 0
    running.look()
    with pytest.raises(RevokedError):
        running.check(bob)
    assert caplog.text == ""
    running.keep(before)
    assert "is older than the list of revoked certificates in use" in caplog.text
    with pytest.raises(RevokedError):
        running.check(bob)


def list_of_tomorrow(folder: Path) -> None:
    """What the authority wrote while its clock was a day ahead."""
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    made = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1))
        .next_update(ca.not_valid_after_utc)
        .sign(key, hashes.SHA256())
    )
    for place in (folder, folder / "head"):
        write_whole(place / "revoked.pem", made.public_bytes(serialization.Encoding.PEM), 0o644)


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_what_exists_is_kept(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes()
    assert "has a certificate authority already" in refusal("init", "--folder", folder)
    assert "has a certificate" in refusal("member", "head", "--folder", folder)
    assert (folder / "ca.pem").read_bytes() == before


def test_an_authority_that_a_full_disk_does_not_take_is_made_later(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with no_room(KEY_BYTES), pytest.raises(ClusterError, match=str(path)):
        ClusterFolder(path).init()
    assert (path / "ca.key").exists()
    assert livescale("cluster", "init", "--folder", path)[0] == 0
    known = Credentials(path / "head")
    known.check(der(path / "head" / "cert.pem"), is_head=True)


def test_a_key_that_has_signed_for_members_is_not_replaced(folder: Path) -> None:
    (folder / "ca.pem").unlink()
    before = (folder / "ca.key").read_bytes()
    assert "has a certificate authority already" in refusal("init", "--folder", folder)
    assert (folder / "ca.key").read_bytes() == before


@pytest.mark.parametrize(
    "name", ["", "../x", "a b", "livescale-head", "livescale-gateway", "-x" * 40]
)
def test_what_is_no_name(folder: Path, name: str) -> None:
    assert "is an invalid machine name" in refusal("member", "--folder", folder, "--", name)


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    assert "is missing or unreadable" in refusal("member", "x", "--folder", tmp_path / "no")
    assert "no certificate was made for that name" in refusal(
        "revoke", "nobody", "--folder", folder
    )
    assert "--days is 0" in refusal("member", "x", "--folder", folder, "--days", 0)


def test_folders_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    head = folder / "head"
    with pytest.raises(ConfigError, match=r"ca.pem: No such file"):
        Credentials(tmp_path)
    (head / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match=r"is readable by other users\. Run: chmod 600"):
        Credentials(head)
    (head / "key.pem").chmod(0o600)
    (head / "key.pem").write_bytes((folder / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match="do not match"):
        Credentials(head)
    (head / "revoked.pem").write_text("nonsense")
    with pytest.raises(ConfigError):
        Credentials(head)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"data_plane_tls": "on"}, "data_plane_tls on requires certificates"),
        ({"data_plane_tls": "maybe"}, "data_plane_tls is 'maybe', not one of"),
    ],
)
def test_settings_that_do_not_go_together(
    tiny_model: Path, flags: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [str(tiny_model)], {}, flags)


def test_certificates_of_the_api_are_looked_at_first(folder: Path, tmp_path: Path) -> None:
    check_https(None, None)
    cert, key = str(folder / "head" / "cert.pem"), str(folder / "head" / "key.pem")
    check_https(cert, key)
    with pytest.raises(ConfigError, match="must both be set"):
        check_https(None, key)
    with pytest.raises(ConfigError, match=r"ssl_keyfile .*: No such file"):
        check_https(cert, str(tmp_path / "no.pem"))
    with pytest.raises(ConfigError, match="are not a PEM certificate with its key"):
        check_https(cert, str(folder / "ca.key"))
