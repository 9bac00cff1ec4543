"""Nodes that meet over TLS: only those with a certificate of the job's authority are let in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.config.cluster import ClusterSettings, Meeting
from sentinel.errors import ConfigError
from tests.cluster.job import free_address, node_daemon
from tests.waiting import until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl"),
]


def make_authority(folder: Path) -> ClusterSettings:
    """Make an authority, and a key with a certificate that it signed; return settings with them."""
    folder.mkdir()
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for words in (
        f"req -x509 {new} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        f"req {new} -keyout node.key -out node.csr -subj /CN=node -addext subjectAltName=DNS:node",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days 2 -copy_extensions copy",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return ClusterSettings(tls_ca=folder / "ca.pem", tls_certificate=folder / "node.pem", tls_key=folder / "node.key")


def write_settings(folder: Path) -> Path:
    """Write a settings file with the certificate and key of an authority of its own."""
    make_authority(folder)
    file = folder / "sentinel.toml"
    file.write_text(
        "[daemon]\nhttp = 'off'\n[cluster]\ntls_ca = 'ca.pem'\ntls_certificate = 'node.pem'\ntls_key = 'node.key'\n"
    )
    return file


@pytest.mark.slow
def test_nodes_of_one_authority_meet_without_a_secret_and_one_of_another_gets_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    ours, theirs = (write_settings(tmp_path / name) for name in ("ours", "theirs"))
    address = free_address()
    with (
        node_daemon(0, 3, address, tmp_path, "--config", str(ours), secret="") as coordinator,
        node_daemon(1, 3, address, tmp_path, "--config", str(ours), secret="") as node,
        node_daemon(2, 3, address, tmp_path, "--config", str(theirs), secret="") as stranger,
    ):
        until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
        assert node.job()["no_orders"] == ""
        words = "the secret or the certificates' authority is another"
        until(lambda: words in stranger.job()["trouble"], "the stranger to know that it gets nowhere")
        until(lambda: words in stranger.rank.expect(wire.Notice).text, "the line on its terminal")
        assert set(coordinator.states()) == {0, 1}
        shown = subprocess.run(
            ["openssl", "s_client", "-connect", address, "-brief"], input=b"", capture_output=True, timeout=60
        )
        assert b"TLSv1.3" in shown.stderr


def test_a_missing_or_wrong_file_is_reported_with_its_setting(tmp_path: Path) -> None:
    settings = make_authority(tmp_path / "ours")
    assert settings.tls_ca is not None
    assert settings.tls_key is not None
    meeting = settings.find_meeting({"SENTINEL_CLUSTER": "a:1"})
    assert isinstance(meeting, Meeting)
    assert (meeting.secret, meeting.takes_orders) == ("", True)
    text = settings.tls_key.read_text()
    settings.tls_key.unlink()
    expect_refusal(settings, f"[cluster] tls_key: {settings.tls_key}: cannot be read (No such file or directory)")
    settings.tls_key.write_text("no key")
    expect_refusal(settings, f"tls_key: {settings.tls_key}: no certificate and its key, in PEM and without a password")
    settings.tls_key.write_text(text)
    locked = ["openssl", "ec", "-in", str(settings.tls_key), "-aes256", "-passout", "pass:secret"]
    settings.tls_key.write_bytes(subprocess.run(locked, check=True, capture_output=True).stdout)
    expect_refusal(settings, "in PEM and without a password")
    settings.tls_ca.write_text("no certificate")
    expect_refusal(settings, f"[cluster] tls_ca: {settings.tls_ca}: no certificate in PEM")


def expect_refusal(settings: ClusterSettings, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings.find_meeting({"SENTINEL_CLUSTER": "a:1"})
    assert words in str(error.value)
