"""The lab's certificates and kubeconfigs: made once, kept as long as they are good."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Sequence

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    HAVE_CRYPTOGRAPHY = True
except ImportError:
    HAVE_CRYPTOGRAPHY = False

DOCUMENTATION = """
module: lab_pki
short_description: Make the certificates, keys and kubeconfigs of the lab's cluster
description:
  - An authority for the cluster, one for the aggregation layer, a client certificate for every component.
  - What is there and good is kept; what is missing, broken, for other names or about to expire is made anew.
options:
  directory: {description: Folder for certificates and component kubeconfigs., type: path, required: true}
  kubeconfig: {description: Path for the administrator's kubeconfig., type: path, required: true}
  address: {description: Address of the control node., type: str, required: true}
  control: {description: Name of the control node., type: str, required: true}
  nodes: {description: Names of all nodes., type: list, elements: str, required: true}
  service_address: {description: Address of the API's own Service., type: str, default: 10.96.0.1}
author: gpu-slices
"""
EXAMPLES = """
- name: Make the certificates
  lab_pki:
    directory: /var/cache/gpu-slices/run/lab/pki
    kubeconfig: /var/cache/gpu-slices/run/lab/kubeconfig
    address: 10.77.0.2
    control: control
    nodes: [control, a30]
"""
RETURN = """
made: {description: Names of the files that were written., returned: always, type: list, elements: str}
"""

YEARS = 10
RENEW_DAYS = 30


@dataclass(frozen=True)
class Leaf:
    """A certificate to have: its file name, subject and, for servers, the names it is good for."""

    file: str
    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ()
    authority: str = "ca"


def leaves(address: str, control: str, nodes: Sequence[str], service_address: str) -> list[Leaf]:
    """Every certificate of the cluster."""
    kubernetes = (
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    return [
        Leaf(
            "apiserver",
            "kube-apiserver",
            names=("localhost", control, *kubernetes, "127.0.0.1", address, service_address),
        ),
        Leaf("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
        Leaf("front-proxy-client", "front-proxy-client", authority="front-proxy-ca"),
        Leaf("admin", "lab-admin", "system:masters"),
        Leaf("controller-manager", "system:kube-controller-manager"),
        Leaf("scheduler", "system:kube-scheduler"),
        Leaf("kube-proxy", "system:kube-proxy"),
        *(Leaf(f"kubelet-{node}", f"system:node:{node}", "system:nodes") for node in nodes),
    ]


def write(path: Path, body: bytes, mode: int = 0o600) -> None:
    """Whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(body)
    scratch.chmod(mode)
    scratch.replace(path)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path.name} is not an elliptic curve key")
    return key


def alternative_names(names: Iterable[str]) -> list[x509.GeneralName]:
    result: list[x509.GeneralName] = []
    for name in names:
        try:
            result.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            result.append(x509.DNSName(name))
    return result


def subject(common_name: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def good(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate) -> bool:
    """Whether the certificate belongs to the key, comes from the issuer and has some time left."""
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    if left < datetime.timedelta(days=RENEW_DAYS) or certificate.public_key() != key.public_key():
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


class Store:
    """The folder with certificates. `made` collects what had to be written."""

    def __init__(self, directory: Path, dry: bool) -> None:
        self.directory = directory
        self.dry = dry
        self.made: list[str] = []
        self.authorities: dict[str, tuple[x509.Certificate, ec.EllipticCurvePrivateKey]] = {}

    def put(self, name: str, body: bytes) -> None:
        self.made.append(name)
        if not self.dry:
            write(self.directory / name, body)

    def authority(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            certificate = x509.load_pem_x509_certificate((self.directory / f"{name}.crt").read_bytes())
            key = load_key(self.directory / f"{name}.key")
            if good(certificate, key, certificate):
                self.authorities[name] = (certificate, key)
                return
        key = ec.generate_private_key(ec.SECP256R1())
        own = subject(f"gpu-slices lab {name}")
        certificate = (
            builder(own, own, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_usage(authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.put(f"{name}.key", key_pem(key))
        self.put(f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        self.authorities[name] = (certificate, key)

    def leaf(self, leaf: Leaf) -> tuple[bytes, bytes]:
        """Certificate and key as PEM."""
        issuer, issuer_key = self.authorities[leaf.authority]
        wanted = subject(leaf.common_name, leaf.organization)
        names = alternative_names(leaf.names)
        crt, key_file = self.directory / f"{leaf.file}.crt", self.directory / f"{leaf.file}.key"
        with contextlib.suppress(OSError, ValueError, x509.ExtensionNotFound):
            certificate = x509.load_pem_x509_certificate(crt.read_bytes())
            key = load_key(key_file)
            known: list[x509.GeneralName] = []
            if names:
                known = list(
                    certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                )
            if good(certificate, key, issuer) and certificate.subject == wanted and known == names:
                return crt.read_bytes(), key_file.read_bytes()
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        draft = (
            builder(wanted, issuer.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
            )
        )
        if names:
            draft = draft.add_extension(x509.SubjectAlternativeName(names), critical=False)
        body = draft.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.put(f"{leaf.file}.key", key_pem(key))
        self.put(f"{leaf.file}.crt", body)
        return body, key_pem(key)

    def service_account_key(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            key = load_key(self.directory / "sa.key")
            if (self.directory / "sa.pub").read_bytes() == _public_pem(key):
                return
        key = ec.generate_private_key(ec.SECP256R1())
        self.put("sa.key", key_pem(key))
        self.put("sa.pub", _public_pem(key))


def _public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def kubeconfig(server: str, authority: bytes, user: str, certificate: bytes, key: bytes) -> bytes:
    """A kubeconfig with everything inside. JSON is YAML, and needs no library."""

    def encoded(body: bytes) -> str:
        return base64.b64encode(body).decode()

    cluster = "gpu-slices-lab"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": cluster, "cluster": {"server": server, "certificate-authority-data": encoded(authority)}}
        ],
        "users": [
            {
                "name": user,
                "user": {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)},
            }
        ],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": user}}],
        "current-context": cluster,
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "kubeconfig": {"type": "path", "required": True},
            "address": {"type": "str", "required": True},
            "control": {"type": "str", "required": True},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "service_address": {"type": "str", "default": "10.96.0.1"},
        },
        supports_check_mode=True,
    )
    if not HAVE_CRYPTOGRAPHY:
        module.fail_json(msg=missing_required_lib("cryptography"))
    wanted = module.params
    directory, admin = Path(wanted["directory"]), Path(wanted["kubeconfig"])
    store = Store(directory, module.check_mode)
    if not module.check_mode:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    store.authority("ca")
    store.authority("front-proxy-ca")
    store.service_account_key()
    server = f"https://{wanted['address']}:6443"
    authority = store.authorities["ca"][0].public_bytes(serialization.Encoding.PEM)
    components = {
        "controller-manager",
        "scheduler",
        "kube-proxy",
        *(f"kubelet-{node}" for node in wanted["nodes"]),
    }
    for leaf in leaves(wanted["address"], wanted["control"], wanted["nodes"], wanted["service_address"]):
        certificate, key = store.leaf(leaf)
        target = admin if leaf.file == "admin" else directory / f"{leaf.file}.conf"
        if leaf.file == "admin" or leaf.file in components:
            body = kubeconfig(server, authority, leaf.common_name, certificate, key)
            if not target.exists() or target.read_bytes() != body:
                store.made.append(target.name)
                if not module.check_mode:
                    write(target, body)
    module.exit_json(changed=bool(store.made), made=store.made)


if __name__ == "__main__":
    main()
