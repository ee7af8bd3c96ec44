"""The API client against a small HTTP server: answers, refusals, streams, and kubeconfigs that are wrong."""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lab_import
import pytest
import urllib3
import yaml
from gpu_slices.kube_api import MERGE_PATCH, ApiFault, KubeApi

ROOT = Path(__file__).resolve().parents[2]


class _Api(BaseHTTPRequestHandler):
    """Answers by path; keeps what it was asked in ``server.seen``."""

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        self.server.seen.append((self.command, self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        if path == "/stream":
            self.send_response(200)
            self.end_headers()
            for number in range(3):
                self.wfile.write(f"line {number}\n".encode())
                self.wfile.flush()
                time.sleep(0.05)
            self.wfile.write(b"last")
            return
        if path == "/silent":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"one\n")
            self.wfile.flush()
            time.sleep(1.5)
            return
        status, text = {
            "/version": (200, json.dumps({"gitVersion": "v1.36.3"})),
            "/html": (200, "<html>not an API</html>"),
            "/list": (200, "[1]"),
            "/log": (200, "a\nb\n"),
            "/401": (401, json.dumps({"message": "Unauthorized"})),
            "/403": (
                403,
                json.dumps({"message": 'nodes is forbidden: User "bob" cannot list resource "nodes"'}),
            ),
            "/409": (409, json.dumps({"message": "Apply failed with 1 conflict"})),
            "/422": (422, json.dumps({"message": "spec is immutable"})),
            "/500": (500, "etcd is on fire"),
        }.get(path, (404, json.dumps({"message": "not found"})))
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer


@pytest.fixture(autouse=True)
def _no_ambient_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_CONTEXT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """A plain HTTP API on a free loopback port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as api:
        api.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=api.serve_forever, daemon=True)
        thread.start()
        yield api
        api.shutdown()


def _kubeconfig(path: Path, server: str, user: dict[str, Any] | None = None) -> str:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": user or {"token": "t0ken"}}],
            }
        )
    )
    return str(path)


@pytest.fixture
def api(server: ThreadingHTTPServer, tmp_path: Path) -> KubeApi:
    """A client of that server."""
    return KubeApi.from_kubeconfig(
        _kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.server_port}"), timeout=2
    )


def test_get_decodes_and_sends_the_token(api: KubeApi, server: Any) -> None:
    assert api.get("/version", {"a": "b c"}) == {"gitVersion": "v1.36.3"}
    method, path, headers, _ = server.seen[0]
    assert (method, path) == ("GET", "/version?a=b+c")
    assert headers["authorization"] == "Bearer t0ken" or headers["Authorization"] == "Bearer t0ken"


def test_request_sends_a_json_body(api: KubeApi, server: Any) -> None:
    api.request("PATCH", "/version", {"metadata": {"labels": {"a": "1"}}}, content_type=MERGE_PATCH)
    _, _, headers, body = server.seen[0]
    assert json.loads(body) == {"metadata": {"labels": {"a": "1"}}}
    assert headers["Content-Type"] == MERGE_PATCH


def test_find_turns_not_found_into_none_only(api: KubeApi) -> None:
    assert api.find("/nothing") is None
    with pytest.raises(ApiFault, match="403"):
        api.find("/403")


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/401", "unauthorized", "fetch a fresh kubeconfig"),
        ("/403", "forbidden", "cannot list resource"),
        ("/404", "not_found", "not found"),
        ("/409", "conflict", "Apply failed with 1 conflict"),
        ("/422", "invalid", "spec is immutable"),
        ("/500", "server", "etcd is on fire"),
        ("/html", "server", "is this a Kubernetes API server"),
        ("/list", "server", "no JSON object"),
    ],
)
def test_refusals_are_named(api: KubeApi, path: str, kind: str, text: str) -> None:
    with pytest.raises(ApiFault, match=text) as caught:
        api.get(path)
    assert caught.value.kind == kind
    assert "\n" not in caught.value.message


def test_text_and_stream(api: KubeApi) -> None:
    assert api.text("/log") == "a\nb\n"
    assert list(api.stream_lines("/stream")) == ["line 0", "line 1", "line 2", "last"]


def test_a_silent_stream_ends_after_the_read_timeout(api: KubeApi) -> None:
    began = time.monotonic()
    assert list(api.stream_lines("/silent", read_timeout=0.3)) == ["one"]
    assert time.monotonic() - began < 1.2


def test_parallel_keeps_answers_and_faults_apart(api: KubeApi) -> None:
    answers, faults = api.parallel({"good": lambda: api.get("/version"), "bad": lambda: api.get("/403")})
    assert answers == {"good": {"gitVersion": "v1.36.3"}}
    assert faults["bad"].kind == "forbidden"


def test_nothing_listens(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ApiFault, match="nothing listens") as caught:
        KubeApi.from_kubeconfig(_kubeconfig(tmp_path / "c", f"http://127.0.0.1:{port}")).get("/version")
    assert caught.value.kind == "unreachable"


def test_no_route_is_not_told_as_a_timeout(tmp_path: Path) -> None:
    api = KubeApi.from_kubeconfig(_kubeconfig(tmp_path / "c", "http://127.0.0.1:1"))
    pool = urllib3.connection.HTTPConnection("127.0.0.1")
    error = urllib3.exceptions.NewConnectionError(pool, "no")
    error.__cause__ = OSError(errno.EHOSTUNREACH, "No route to host")
    assert "there is no route to it" in api._no_answer(error).message


def test_plain_http_behind_an_https_address(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    config = _kubeconfig(tmp_path / "c", f"https://127.0.0.1:{server.server_port}")
    with pytest.raises(ApiFault, match="TLS") as caught:
        KubeApi.from_kubeconfig(config).get("/version")
    assert caught.value.kind == "tls"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Certificates of the lab's own making: a server on 127.0.0.1, and an administrator."""
    made = lab_import.lab_pki().Store(tmp_path_factory.mktemp("pki"), False)
    for name in ("ca", "front-proxy-ca"):
        made.authority(name)
    for leaf in lab_import.lab_pki().leaves("127.0.0.1", "control", [], "10.96.0.1"):
        made.leaf(leaf)
    return made


@pytest.fixture
def secured(server: ThreadingHTTPServer, authority: Any) -> str:
    """That API behind TLS; it wants a client certificate. Its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = authority.directory
    context.load_cert_chain(folder / "apiserver.crt", folder / "apiserver.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return f"https://127.0.0.1:{server.server_port}"


@pytest.fixture
def mtls(secured: str, authority: Any) -> tuple[str, Any]:
    """Its address, and who made the certificates."""
    return secured, authority


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _admin(authority: Any, path: Path, server: str, **changes: bytes) -> str:
    parts = {name: (authority.directory / name).read_bytes() for name in ("ca.crt", "admin.crt", "admin.key")}
    texts = [{**parts, **changes}[name] for name in parts]
    path.write_bytes(lab_import.lab_pki().kubeconfig(server, texts[0], "admin", *texts[1:]))
    return str(path)


def test_what_the_kubeconfig_holds_is_kept_in_the_named_folder(
    secured: str, authority: Any, tmp_path: Path, scratch: Path
) -> None:
    config, folder = _admin(authority, tmp_path / "c", secured), tmp_path / "named"
    folder.mkdir()
    api = KubeApi.from_kubeconfig(config, scratch=str(folder))
    assert api.get("/version") == {"gitVersion": "v1.36.3"}
    assert list(api.stream_lines("/stream")) == ["line 0", "line 1", "line 2", "last"]
    kept = {path.read_bytes(): path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert kept[(authority.directory / "admin.key").read_bytes()] == 0o600
    assert list(scratch.iterdir()) == []


def test_ansible_leaves_no_key_behind(
    secured: str, server: Any, authority: Any, tmp_path: Path, scratch: Path
) -> None:
    """Its workers end without Python's clean-up, which is what removes the files otherwise."""
    play = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "tasks": [
                {"cluster_facts": {"want": ["namespace"], "namespace": "ns", "kubeconfig": "{{ admin }}"}},
                {"gpu_report": {"kubeconfig": "{{ admin }}"}},
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    local = tmp_path / "local"
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "--inventory=localhost,",
            "--connection=local",
            f"--extra-vars=gpu_slices_artifacts_dir={tmp_path / 'artifacts'}",
            f"--extra-vars=admin={_admin(authority, tmp_path / 'c', secured)}",
            str(tmp_path / "play.yml"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_LOCAL_TEMP": str(local),
            "TMPDIR": str(scratch),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path for _, path, _, _ in server.seen} > {"/version"}
    key = (authority.directory / "admin.key").read_text()
    left = [path for folder in (scratch, local) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in left if key in path.read_text(errors="replace")] == []
    assert [path for path in left if path.name.startswith("tmp")] == []


def test_certificates_in_files_of_their_own(secured: str, authority: Any, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(_admin(authority, tmp_path / "c", secured)).read_text())
    for place, name, file in (
        ("clusters", "certificate-authority", "ca.crt"),
        ("users", "client-certificate", "admin.crt"),
        ("users", "client-key", "admin.key"),
    ):
        entry = config[place][0][place[:-1]]
        del entry[f"{name}-data"]
        entry[name] = str(authority.directory / file)
    (tmp_path / "d").write_text(yaml.safe_dump(config))
    assert KubeApi.from_kubeconfig(str(tmp_path / "d")).get("/version") == {"gitVersion": "v1.36.3"}
    assert (authority.directory / "admin.key").is_file()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("ca.crt", "front-proxy-ca.crt", "is not trusted .* is not this server's"),
        ("ca.crt", "nothing", "certificates or keys of .* cannot be loaded"),
        ("admin.crt", "nothing", "certificates or keys of .* cannot be loaded"),
        ("admin.key", "nothing", "certificates or keys of .* cannot be loaded"),
        ("admin.key", "scheduler.key", "certificates or keys of .* cannot be loaded"),
    ],
)
def test_certificates_that_do_not_fit(
    mtls: tuple[str, Any], tmp_path: Path, file: str, content: str, said: str
) -> None:
    address, authority = mtls
    other = authority.directory / content
    body = other.read_bytes() if other.is_file() else b"no certificate"
    config = _admin(authority, tmp_path / "c", address, **{file: body})
    with pytest.raises(ApiFault, match=said) as caught:
        KubeApi.from_kubeconfig(config, scratch=str(tmp_path)).get("/version")
    assert caught.value.kind == "tls"
    assert config in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_a_server_that_is_not_to_be_verified(
    secured: str, authority: Any, tmp_path: Path, scratch: Path
) -> None:
    config = yaml.safe_load(Path(_admin(authority, tmp_path / "c", secured)).read_text())
    cluster = config["clusters"][0]["cluster"]
    del cluster["certificate-authority-data"]
    (tmp_path / "d").write_text(yaml.safe_dump(config))
    with pytest.raises(ApiFault, match="is not trusted"):
        KubeApi.from_kubeconfig(str(tmp_path / "d")).get("/version")
    cluster["insecure-skip-tls-verify"] = True
    (tmp_path / "d").write_text(yaml.safe_dump(config))
    assert KubeApi.from_kubeconfig(str(tmp_path / "d")).get("/version") == {"gitVersion": "v1.36.3"}


def test_the_name_in_the_certificate_can_be_given(
    secured: str, authority: Any, tmp_path: Path, scratch: Path
) -> None:
    config = yaml.safe_load(Path(_admin(authority, tmp_path / "c", secured)).read_text())
    cluster = config["clusters"][0]["cluster"]
    for name, fits in (("kubernetes.default.svc", True), ("elsewhere", False)):
        cluster["tls-server-name"] = name
        (tmp_path / "d").write_text(yaml.safe_dump(config))
        api = KubeApi.from_kubeconfig(str(tmp_path / "d"))
        if fits:
            assert api.get("/version") == {"gitVersion": "v1.36.3"}
        else:
            with pytest.raises(ApiFault, match="tls-server-name"):
                api.get("/version")


def test_no_client_certificate_where_one_is_wanted(
    secured: str, authority: Any, tmp_path: Path, scratch: Path
) -> None:
    config = yaml.safe_load(Path(_admin(authority, tmp_path / "c", secured)).read_text())
    config["users"][0]["user"] = {"token": "t0ken"}
    (tmp_path / "d").write_text(yaml.safe_dump(config))
    with pytest.raises(ApiFault) as caught:
        KubeApi.from_kubeconfig(str(tmp_path / "d")).get("/version")
    assert caught.value.kind in {"tls", "unreachable"}


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        (None, "", "There is no kubeconfig at"),
        ("a: [", "", "not valid YAML"),
        ("just text", "", "cannot be used: it is not built like a kubeconfig"),
        ("{}", "", "cannot be used"),
        (
            "apiVersion: v1\nkind: Config\ncontexts: []\nclusters: []\nusers: []\n",
            "gone",
            "with context 'gone'",
        ),
    ],
)
def test_a_wrong_kubeconfig_is_named(tmp_path: Path, text: str | None, context: str, expected: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ApiFault, match=expected) as caught:
        KubeApi.from_kubeconfig(str(path), context)
    assert caught.value.kind == "config"
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
