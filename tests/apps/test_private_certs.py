"""`deepseal private certs`: what it writes, what it refuses, and that the files work."""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from deepseal.errors import InputError
from deepseal.secure_inference.transport import Kind, Tls, connect, listen
from deepseal.secure_inference.transport.certificates import make_certificates


def deepseal(*arguments, cwd):
    command = [sys.executable, "-m", "deepseal", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def load(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_command_writes_a_ca_and_two_parties(tmp_path):
    done = deepseal("private", "certs", "--out", "keys", "--days", 30, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    folder = tmp_path / "keys"
    assert (record["kind"], record["status"]) == ("private.certs", "ok")
    names = {"ca.pem", "garbler.pem", "garbler.key", "evaluator.pem", "evaluator.key"}
    assert {path.name for path in folder.iterdir()} == names
    assert mode(folder) == 0o700
    assert [mode(folder / f"{name}.key") for name in ("garbler", "evaluator")] == [0o600, 0o600]
    assert record["results"]["ca_key"] is None
    assert record["results"]["keys"] == {name: f"keys/{name}.key" for name in ("garbler", "evaluator")}
    ca = load(folder / "ca.pem")
    for name in ("garbler", "evaluator"):
        certificate = load(folder / f"{name}.pem")
        certificate.verify_directly_issued_by(ca)
        key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert key.public_key() == certificate.public_key()
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name]
        days = certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
        assert datetime.timedelta(days=29) < days <= datetime.timedelta(days=30)
        assert record["fingerprints"][name] == certificate.fingerprint(certificate.signature_hash_algorithm).hex()
    assert "PRIVATE" not in done.stdout + done.stderr
    assert "delete the others' keys" in done.stderr

    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = deepseal("private", "certs", "--out", "keys", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.count("\n") == 1 and "add --force" in again.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    forced = deepseal("private", "certs", "--out", "keys", "--force", cwd=tmp_path)
    assert forced.returncode == 0 and "certificates.garbler" in forced.stdout
    assert all(path.read_bytes() != content for path, content in before.items())


def test_help_needs_neither_torch_nor_cryptography(tmp_path):
    code = (
        "import sys; sys.argv = ['deepseal', 'private', '--help']\n"
        "from deepseal.apps.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'numpy', 'cryptography', 'ssl'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "certs" in done.stdout and done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"names": ["A"]}, "the name of a party as in DNS; found 'A'"),
        ({"names": ["../x"]}, "as in DNS"),
        ({"names": ["a..b"]}, "as in DNS"),
        ({"names": ["-a"]}, "as in DNS"),
        ({"names": ["a\n"]}, "as in DNS"),
        ({"names": ["x" * 64]}, "as in DNS"),
        ({"names": []}, "at least one name"),
        ({"names": ["a", "a"]}, "found one twice"),
        ({"names": ["ca"]}, "the authority's"),
        ({"days": 0}, "from 1 to 3650 days; found 0"),
        ({"days": 3651}, "found 3651"),
    ],
)
def test_bad_input(options, text, tmp_path):
    with pytest.raises(InputError, match=text):
        make_certificates(tmp_path / "keys", **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_when_one_file_is_in_the_way(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "evaluator.key").write_text("mine")
    with pytest.raises(InputError, match="add --force"):
        make_certificates(folder)
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="found the file"):
        make_certificates(tmp_path / "file")
    with pytest.raises(InputError, match="no such file"):
        make_certificates(tmp_path / "none" / "keys")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """The fourth file cannot be written: no file gets its name, and the new folder goes away."""
    from pathlib import Path

    write, calls = Path.write_bytes, []

    def fails(path, data):
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(InputError, match="the disk is full"):
        make_certificates(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []


def test_ca_key_is_kept_by_choice_only(tmp_path):
    kept = make_certificates(tmp_path / "kept", keep_ca_key=True)
    assert kept.ca_key is not None and mode(kept.ca_key) == 0o600
    key = serialization.load_pem_private_key(kept.ca_key.read_bytes(), None)
    assert key.public_key() == load(kept.ca).public_key()
    with pytest.raises(InputError, match="no key of another CA"):
        make_certificates(tmp_path / "kept", force=True)
    assert key.public_key() == load(kept.ca).public_key()


def test_one_party_more_and_the_files_work(tmp_path):
    made = make_certificates(tmp_path / "keys", ("bank-1.example", "client", "auditor"), days=1)
    one, two = (
        Tls(made.certificates[name], made.keys[name], made.ca, peer_name=peer)
        for name, peer in (("bank-1.example", "auditor"), ("auditor", "bank-1.example"))
    )
    got = []
    with listen("0", tls=one, timeout=5) as listener:

        def serve():
            with listener.accept() as channel:
                got.append(channel.receive(Kind.OT, at_most=5))

        thread = threading.Thread(target=serve)
        thread.start()
        with connect(listener.address, tls=two, timeout=5) as channel:
            channel.send(Kind.OT, b"hello")
        thread.join(10)
    assert got == [b"hello"]
