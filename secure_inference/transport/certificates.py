"""A small certificate authority and one certificate a party, for TLS with certificates on both sides."""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deepseal.errors import InputError
from deepseal.files import check_writable, pending

_SKEW = datetime.timedelta(hours=1)  # clocks may differ
MOST_DAYS = 3650


@dataclass(frozen=True)
class Certificates:
    """The files that were written. The parties share ``ca``; each key belongs on its party's machine only.

    ``certificates`` and ``keys``: one file a party, by its name. ``ca_key``: None when it was not kept.
    ``fingerprints``: SHA-256 of each certificate (DER) in hexadecimal, by party, and "ca". ``expires``: UTC.
    """

    ca: Path
    ca_key: Path | None
    certificates: dict[str, Path]
    keys: dict[str, Path]
    fingerprints: dict[str, str]
    expires: datetime.datetime


def make_certificates(
    folder: Path,
    names: Sequence[str] = ("garbler", "evaluator"),
    *,
    days: int = 365,
    keep_ca_key: bool = False,
    force: bool = False,
    now: datetime.datetime | None = None,
) -> Certificates:
    """Make a CA and a certificate for each party: ECDSA on P-256, in PEM; keys can be read by their owner only.

    The CA's key is forgotten unless ``keep_ca_key``. Who has it can make further parties that both sides trust; without
    it the two sides trust exactly these certificates, and a new party means a new CA for all.

    Args:
        folder: where the files go: ca.pem, and NAME.pem and NAME.key for each party; made when it is missing.
        names: one name a party; it is also the DNS name in the certificate.
        days: how long the certificates are valid.
        keep_ca_key: write ca.key too.
        force: replace files that exist.
        now: the time of making (with a time zone); None: the clock's.

    Raises:
        InputError: bad names or days, or files that exist or cannot be written; then nothing is written.
    """
    _check(names, days)
    start = now or datetime.datetime.now(datetime.timezone.utc)
    expires = (start + datetime.timedelta(days=days)).replace(microsecond=0)
    validity = (start - _SKEW, expires)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, validity)
    contents: dict[Path, bytes] = {folder / "ca.pem": _pem(ca)}
    if keep_ca_key:
        contents[folder / "ca.key"] = _key_pem(ca_key)
    elif (folder / "ca.key").exists():
        do = "delete it, write the new one too (--keep-ca-key), or choose another folder"
        raise InputError(f"no key of another CA in {folder}", found="ca.key", do=do)
    fingerprints = {"ca": ca.fingerprint(hashes.SHA256()).hex()}
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _party(name, key, ca, ca_key, validity)
        contents[folder / f"{name}.pem"], contents[folder / f"{name}.key"] = _pem(certificate), _key_pem(key)
        fingerprints[name] = certificate.fingerprint(hashes.SHA256()).hex()
    _write_all(folder, contents, force=force)
    return Certificates(
        ca=folder / "ca.pem",
        ca_key=folder / "ca.key" if keep_ca_key else None,
        certificates={name: folder / f"{name}.pem" for name in names},
        keys={name: folder / f"{name}.key" for name in names},
        fingerprints=fingerprints,
        expires=expires,
    )


def _check(names: Sequence[str], days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise InputError(f"from 1 to {MOST_DAYS} days", found=str(days), do="choose another number of days")
    if not names:
        raise InputError("at least one name", found="none", do="name the parties, such as garbler and evaluator")
    for name in names:
        if not re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?", name) or ".." in name:
            do = "use small letters, digits, hyphens and dots"
            raise InputError("the name of a party as in DNS", found=ascii(name[:80]), do=do)
    if len(set(names)) != len(names) or "ca" in names:
        found = "ca, which is the authority's" if "ca" in names else "one twice"
        raise InputError("a different name for each party", found=found, do="choose other names")


def _authority(
    key: ec.EllipticCurvePrivateKey, validity: tuple[datetime.datetime, datetime.datetime]
) -> x509.Certificate:
    name = _name(f"DeepSeal CA {secrets.token_hex(4)}")
    return (
        _builder(name, name, key, validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _party(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    validity: tuple[datetime.datetime, datetime.datetime],
) -> x509.Certificate:
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # either party may listen
    return (
        _builder(_name(name), ca.subject, key, validity)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    validity: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    none = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none)


def _write_all(folder: Path, contents: dict[Path, bytes], *, force: bool) -> None:
    """Write all the files, or none: each gets its name only when all of them are on the disk."""
    created = _make_folder(folder)
    existed = {path for path in contents if path.exists()}
    try:
        for path in contents:
            check_writable(path, force=force)
        with contextlib.ExitStack() as stack:
            for path, data in contents.items():
                mode = 0o600 if path.suffix == ".key" else 0o644
                stack.enter_context(pending(path, force=force, mode=mode)).write_bytes(data)
    except BaseException:
        for path in contents.keys() - existed:
            if path.is_file() and path.read_bytes() == contents[path]:
                path.unlink()
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _make_folder(folder: Path) -> bool:
    """Whether the folder had to be made; it is then open to its owner only."""
    try:
        folder.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        if folder.is_dir():
            return False
        do = "choose another name"
        raise InputError("a folder for the certificates", found=f"the file {folder}", do=do) from None
    except OSError as error:
        found = (error.strerror or str(error)).lower()
        do = "choose another place"
        raise InputError(f"a folder {folder} that can be made", found=found, do=do) from error
    return True
