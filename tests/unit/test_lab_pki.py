from __future__ import annotations

import base64
import json

import lab_import
from cryptography import x509
from cryptography.x509.oid import NameOID

pki = lab_import.lab_pki()


def store(folder, dry=False):
    made = pki.Store(folder, dry)
    made.authority("ca")
    made.authority("front-proxy-ca")
    made.service_account_key()
    for leaf in pki.leaves("10.77.0.2", "control", ["control", "a30"], "10.96.0.1"):
        made.leaf(leaf)
    return made


def test_everything_is_made_once_and_then_kept(tmp_path):
    assert store(tmp_path).made
    assert store(tmp_path).made == []


def test_a_dry_run_writes_nothing(tmp_path):
    assert store(tmp_path, dry=True).made
    assert list(tmp_path.iterdir()) == []


def test_a_torn_certificate_is_replaced_and_no_other(tmp_path):
    store(tmp_path)
    (tmp_path / "scheduler.crt").write_text("-----BEGIN CERT")
    assert sorted(store(tmp_path).made) == ["scheduler.crt", "scheduler.key"]


def test_a_new_authority_replaces_all_it_signed(tmp_path):
    store(tmp_path)
    (tmp_path / "ca.key").unlink()
    made = store(tmp_path).made
    assert "ca.crt" in made
    assert "kubelet-a30.crt" in made
    assert "front-proxy-client.crt" not in made


def test_another_address_replaces_the_server_certificate(tmp_path):
    store(tmp_path)
    again = pki.Store(tmp_path, dry=False)
    again.authority("ca")
    leaf = pki.leaves("10.78.0.2", "control", [], "10.96.0.1")[0]
    certificate = x509.load_pem_x509_certificate(again.leaf(leaf)[0])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.78.0.2" in [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    assert "kubernetes.default.svc" in names.get_values_for_type(x509.DNSName)


def test_a_kubelet_is_who_the_node_authorizer_expects(tmp_path):
    store(tmp_path)
    subject = x509.load_pem_x509_certificate((tmp_path / "kubelet-a30.crt").read_bytes()).subject
    assert subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "system:node:a30"
    assert subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "system:nodes"


def test_keys_are_for_root_alone(tmp_path):
    store(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}


def test_kubeconfig_holds_all_it_needs():
    document = json.loads(pki.kubeconfig("https://10.77.0.2:6443", b"CA", "admin", b"CRT", b"KEY"))
    assert document["clusters"][0]["cluster"]["server"] == "https://10.77.0.2:6443"
    assert base64.b64decode(document["users"][0]["user"]["client-key-data"]) == b"KEY"
    assert document["current-context"] == document["contexts"][0]["name"]
