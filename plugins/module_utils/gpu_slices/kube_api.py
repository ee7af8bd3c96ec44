"""A small Kubernetes API client: kubeconfig in, JSON out, and errors a person can act on.

It exists for speed and for its messages. Importing the ``kubernetes`` package costs half a second on a small
machine before a byte is sent, each time a module runs; this file needs only the standard library and PyYAML.
It runs on the controller only.

Every error is an :class:`ApiFault`; no other exception leaves this module.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import http.client
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import tempfile
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import yaml

IN_CLUSTER = "/var/run/secrets/kubernetes.io/serviceaccount"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXEC_CERTIFICATE = (
    ("clientCertificateData", "client-certificate-data"),
    ("clientKeyData", "client-key-data"),
)

_KIND_BY_STATUS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    422: "invalid",
    429: "server",
}


class ApiFault(Exception):
    """What went wrong, in one sentence that says what to do.

    ``kind`` is one of config, unreachable, tls, unauthorized, forbidden, not_found, conflict, invalid,
    server. ``status`` is the HTTP status, or 0 when no answer came.
    """

    def __init__(self, kind: str, message: str, status: int = 0, body: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status
        self.body = body or {}


@dataclass
class Connection:
    """Where the API server is and how to prove who we are."""

    server: str
    source: str
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    client_certificate: bytes = b""
    proxy: str = ""


# ------------------------------------------------------------------------------------------- kubeconfig


def load_connection(kubeconfig: str = "", context: str = "") -> Connection:
    """Resolve a kubeconfig the way the kubernetes.core modules do, so that both talk to the same cluster.

    A path that is named wins; else K8S_AUTH_KUBECONFIG, the pod's own service account, KUBECONFIG (several
    files are merged) and ~/.kube/config are tried in this order.
    """
    named = kubeconfig or os.environ.get("K8S_AUTH_KUBECONFIG", "")
    context = context or os.environ.get("K8S_AUTH_CONTEXT", "")
    if not named and not context and os.path.exists(os.path.join(IN_CLUSTER, "token")):
        return _in_cluster()
    paths = [named] if named else os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
    paths = [os.path.expanduser(path) for path in paths if path]
    return _from_config(_merge(paths, bool(named)), context, os.pathsep.join(paths))


def _in_cluster() -> Connection:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    if not host:
        raise ApiFault("config", "A service account is mounted but KUBERNETES_SERVICE_HOST is not set.")
    if ":" in host:
        host = f"[{host}]"
    with open(os.path.join(IN_CLUSTER, "token"), encoding="utf-8") as handle:
        token = handle.read().strip()
    context = ssl.create_default_context(cafile=os.path.join(IN_CLUSTER, "ca.crt"))
    return Connection(
        f"https://{host}:{port}",
        "the pod's service account",
        context,
        headers={"Authorization": f"Bearer {token}"},
    )


def _merge(paths: list[str], named: bool) -> dict[str, Any]:
    """Merge kubeconfig files; the first file to define a name wins, as with kubectl."""
    merged: dict[str, Any] = {"clusters": {}, "users": {}, "contexts": {}, "current-context": ""}
    found = [path for path in paths if os.path.exists(path)]
    if not found:
        where = " or ".join(paths) or "KUBECONFIG (empty)"
        fix = "correct gpu_slices_kubeconfig" if named else "set gpu_slices_kubeconfig or KUBECONFIG"
        raise ApiFault("config", f"There is no kubeconfig at {where}; {fix}.")
    for path in found:
        try:
            with open(path, encoding="utf-8") as handle:
                document = yaml.safe_load(handle) or {}
        except OSError as error:
            raise ApiFault("config", f"The kubeconfig {path} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ApiFault("config", f"The kubeconfig {path} is not valid YAML: {reason}") from error
        if not isinstance(document, dict):
            raise ApiFault("config", f"The kubeconfig {path} holds no kubeconfig (a mapping was expected).")
        base = os.path.dirname(os.path.abspath(path))
        for section, key in (("clusters", "cluster"), ("users", "user"), ("contexts", "context")):
            for entry in document.get(section) or []:
                if isinstance(entry, dict) and entry.get("name") is not None:
                    value = dict(entry.get(key) or {})
                    value["__base"] = base
                    merged[section].setdefault(str(entry["name"]), value)
        merged["current-context"] = merged["current-context"] or document.get("current-context") or ""
    return merged


def _from_config(config: dict[str, Any], context: str, source: str) -> Connection:
    name = context or config["current-context"]
    known = ", ".join(sorted(config["contexts"])) or "none"
    if not name:
        raise ApiFault(
            "config", f"{source} sets no current-context (contexts there: {known}); set gpu_slices_context."
        )
    if name not in config["contexts"]:
        raise ApiFault("config", f"{source} has no context '{name}' (contexts there: {known}).")
    chosen = config["contexts"][name]
    cluster = config["clusters"].get(str(chosen.get("cluster")))
    if not cluster or not cluster.get("server"):
        raise ApiFault(
            "config",
            f"Context '{name}' in {source} names cluster '{chosen.get('cluster')}', "
            "which has no server there.",
        )
    user = config["users"].get(str(chosen.get("user")))
    if user is None:
        if chosen.get("user"):
            raise ApiFault(
                "config",
                f"Context '{name}' in {source} names user '{chosen['user']}', which is not defined there.",
            )
        user = {}
    server = str(cluster["server"]).rstrip("/")
    parts = urllib.parse.urlsplit(server)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ApiFault(
            "config",
            f"The server of context '{name}' in {source} is '{server}', which is no http(s) address.",
        )
    connection = Connection(server, source, proxy=str(cluster.get("proxy-url") or _proxy_for(parts)))
    _authenticate(connection, user, name)
    if parts.scheme == "https":
        _set_up_tls(connection, cluster, user)
    return connection


def _authenticate(connection: Connection, user: dict[str, Any], name: str) -> None:
    """Fill the headers; an exec plugin may also hand out a client certificate (put back into ``user``)."""
    token = str(user.get("token") or "")
    if user.get("tokenFile"):
        token = _read(str(user["tokenFile"]), user, "token file").decode().strip()
    if user.get("exec") and not token:
        credential = _run_exec(user["exec"], connection, name, str(user.get("__base", ".")))
        token = str(credential.get("token") or "")
        for source, target in _EXEC_CERTIFICATE:
            if credential.get(source):
                user[target] = base64.b64encode(str(credential[source]).encode()).decode()
    if user.get("auth-provider") and not token:
        raise ApiFault(
            "config",
            f"Context '{name}' uses an auth-provider, which Kubernetes has removed; "
            "use the exec plugin of your provider.",
        )
    if token:
        connection.headers["Authorization"] = f"Bearer {token}"
    elif user.get("username"):
        pair = f"{user['username']}:{user.get('password', '')}".encode()
        connection.headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    if user.get("as"):
        connection.headers["Impersonate-User"] = str(user["as"])


def _run_exec(spec: dict[str, Any], connection: Connection, name: str, base: str) -> dict[str, Any]:
    version = spec.get("apiVersion") or EXEC_VERSIONS[0]
    if version not in EXEC_VERSIONS:
        raise ApiFault(
            "config",
            f"Context '{name}' wants exec credentials of {version}; known are {' and '.join(EXEC_VERSIONS)}.",
        )
    command = str(spec.get("command") or "")
    if os.sep in command and not os.path.isabs(command):
        command = os.path.join(base, command)
    environment = dict(os.environ)
    environment.update({str(item["name"]): str(item["value"]) for item in spec.get("env") or []})
    info = {
        "apiVersion": version,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": connection.server}},
    }
    environment["KUBERNETES_EXEC_INFO"] = json.dumps(info)
    arguments = [command] + [str(argument) for argument in spec.get("args") or []]
    try:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, timeout=60, check=True, text=True
        )
        return dict(json.loads(done.stdout).get("status") or {})
    except FileNotFoundError as error:
        hint = spec.get("installHint") or "install it or choose another context"
        raise ApiFault(
            "config", f"Context '{name}' needs the program '{command}', which is not here: {hint}"
        ) from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout or "").strip().splitlines()[-1:]
        said = f": {reason[0]}" if reason else ""
        raise ApiFault(
            "config",
            f"The credential program '{command}' of context '{name}' ended with {error.returncode}{said}",
        ) from error
    except (subprocess.TimeoutExpired, OSError, ValueError, AttributeError) as error:
        raise ApiFault(
            "config", f"The credential program '{command}' of context '{name}' gave no credential: {error}"
        ) from error


def _read(path: str, entry: dict[str, Any], what: str) -> bytes:
    path = os.path.join(str(entry.get("__base", ".")), os.path.expanduser(path))
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError as error:
        raise ApiFault(
            "config", f"The {what} {path} named in the kubeconfig cannot be read: {error.strerror}."
        ) from error


def _material(entry: dict[str, Any], key: str, what: str) -> bytes:
    """A PEM from ``<key>-data`` (base64) or from the file ``<key>``; empty if neither is given."""
    if entry.get(f"{key}-data"):
        try:
            return base64.b64decode(str(entry[f"{key}-data"]), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiFault("config", f"{key}-data in the kubeconfig is not base64: {error}.") from error
    return _read(str(entry[key]), entry, what) if entry.get(key) else b""


def _set_up_tls(connection: Connection, cluster: dict[str, Any], user: dict[str, Any]) -> None:
    authority = _material(cluster, "certificate-authority", "CA certificate")
    try:
        context = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ApiFault(
            "config", "certificate-authority in the kubeconfig holds no PEM certificate."
        ) from error
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    connection.tls_server_name = str(cluster.get("tls-server-name") or "")
    certificate = _material(user, "client-certificate", "client certificate")
    key = _material(user, "client-key", "client key")
    if certificate:
        connection.client_certificate = certificate
        # The ssl module takes certificates from files only.
        with tempfile.NamedTemporaryFile(prefix="gpu-slices-", suffix=".pem") as handle:
            os.fchmod(handle.fileno(), 0o600)
            handle.write(certificate + b"\n" + key)
            handle.flush()
            try:
                context.load_cert_chain(handle.name)
            except (ssl.SSLError, OSError) as error:
                raise ApiFault(
                    "config",
                    "The client certificate and key in the kubeconfig cannot be loaded "
                    f"(damaged, or they do not belong together): {error}",
                ) from error
    connection.tls = context


def _proxy_for(parts: urllib.parse.SplitResult) -> str:
    """The proxy of the environment for this server; NO_PROXY may hold names, suffixes, addresses, CIDRs."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme, "")
    host = (parts.hostname or "").lower()
    if not proxy or host == "localhost":
        return ""
    address = None
    try:
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return ""
    except ValueError:
        pass
    for rule in (item.strip().lower() for item in proxies.get("no", "").split(",")):
        if not rule:
            continue
        if rule in ("*", host) or host.endswith("." + rule.lstrip("*").lstrip(".")):
            return ""
        if address is not None and "/" in rule:
            try:
                if address in ipaddress.ip_network(rule, strict=False):
                    return ""
            except ValueError:
                continue
    return proxy


# ----------------------------------------------------------------------------------------------- requests


class KubeApi:
    """JSON requests to one API server. Threads may share it: each request has its own connection."""

    def __init__(self, connection: Connection, timeout: float = 20.0) -> None:
        self.connection = connection
        self.timeout = timeout

    @classmethod
    def from_kubeconfig(cls, kubeconfig: str = "", context: str = "", timeout: float = 20.0) -> KubeApi:
        """Open the cluster that the kubeconfig names. Nothing is sent yet."""
        return cls(load_connection(kubeconfig, context), timeout)

    def get(
        self, path: str, params: dict[str, str] | None = None, accept: str = "application/json"
    ) -> dict[str, Any]:
        """GET ``path`` and return the decoded JSON object."""
        return self.request("GET", path, params=params, accept=accept)

    def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
        """As :meth:`get`, but ``None`` when the server says 404."""
        try:
            return self.get(path, params)
        except ApiFault as fault:
            if fault.kind == "not_found":
                return None
            raise

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> dict[str, Any]:
        """Send one request; the answer is the decoded JSON object."""
        wire, answer = self._open(
            method,
            path,
            timeout=self.timeout,
            params=params,
            body=body,
            content_type=content_type,
            accept=accept,
        )
        try:
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        finally:
            wire.close()
        return self._decode(data, path)

    def text(self, path: str, params: dict[str, str] | None = None) -> str:
        """GET something that is not JSON (a log)."""
        wire, answer = self._open("GET", path, timeout=self.timeout, params=params)
        try:
            return answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        finally:
            wire.close()

    def stream_lines(
        self, path: str, params: dict[str, str] | None = None, read_timeout: float | None = None
    ) -> Iterator[str]:
        """Yield the lines of a long answer (a watch, a followed log) as they come.

        The iterator ends when the server closes the stream, or after ``read_timeout`` seconds of silence.
        """
        wire, answer = self._open("GET", path, timeout=read_timeout or self.timeout, params=params)
        try:
            for line in answer:
                yield line.decode("utf-8", "replace").rstrip("\r\n")
        except socket.timeout:
            return
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        finally:
            wire.close()

    def parallel(self, questions: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, ApiFault]]:
        """Ask several questions at once. Returns the answers and, for those that failed, the faults."""
        answers: dict[str, Any] = {}
        faults: dict[str, ApiFault] = {}
        with ThreadPoolExecutor(max_workers=min(12, len(questions) or 1)) as pool:
            running = {name: pool.submit(question) for name, question in questions.items()}
            for name, future in running.items():
                try:
                    answers[name] = future.result()
                except ApiFault as fault:
                    faults[name] = fault
        return answers, faults

    # -- inside

    def _open(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        params: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "*/*",
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(self.connection.server)
        target = parts.path.rstrip("/") + path
        if params:
            target += ("&" if "?" in target else "?") + urllib.parse.urlencode(params)
        headers = {"Accept": accept, "User-Agent": "gpu-slices", **self.connection.headers}
        payload = None
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        wire = self._wire(parts, timeout)
        try:
            wire.request(method, target, body=payload, headers=headers)
            answer = wire.getresponse()
        except (OSError, http.client.HTTPException) as error:
            wire.close()
            raise self._no_answer(error) from error
        if answer.status >= 300:
            try:
                data = answer.read()
            except (OSError, http.client.HTTPException):
                data = b""
            wire.close()
            raise self._refused(method, path, answer.status, data)
        return wire, answer

    def _wire(self, parts: urllib.parse.SplitResult, timeout: float) -> http.client.HTTPConnection:
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        proxy = urllib.parse.urlsplit(self.connection.proxy) if self.connection.proxy else None
        near_host, near_port = (proxy.hostname or "", proxy.port or 3128) if proxy else (host, port)
        wire: http.client.HTTPConnection
        if self.connection.tls is not None:
            wire = _TlsConnection(near_host, near_port, timeout, self.connection)
        else:
            wire = http.client.HTTPConnection(near_host, near_port, timeout=timeout)
        if proxy:
            wire.set_tunnel(host, port)
        return wire

    def _no_answer(self, error: Exception) -> ApiFault:
        server, source = self.connection.server, self.connection.source
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = str(error.verify_message)
            if "expired" in reason:
                fix = "the server's certificate has expired (or this machine's clock is wrong): renew it"
            elif "mismatch" in reason or "not valid for" in reason:
                fix = "use an address that is in the server's certificate, or set tls-server-name"
            else:
                fix = f"certificate-authority in {source} is not this server's: fetch a fresh kubeconfig"
            return ApiFault("tls", f"The certificate of {server} is not trusted ({reason}); {fix}.")
        if isinstance(error, ssl.SSLError):
            reason = error.reason or str(error)
            if "ALERT" in reason and "CERTIFICATE" in reason:
                return ApiFault(
                    "tls",
                    f"{server} refused our client certificate ({reason}){self._expiry()}; "
                    f"fetch a fresh kubeconfig for {source}.",
                )
            return ApiFault(
                "tls",
                f"{server} does not speak TLS as expected ({reason}); check the server address in {source}.",
            )
        if isinstance(error, socket.gaierror):
            reason = f"the name cannot be resolved ({error.strerror})"
        elif isinstance(error, socket.timeout):
            reason = f"no answer within {self.timeout:g} s"
        elif isinstance(error, ConnectionRefusedError):
            reason = "the connection was refused (nothing listens there)"
        else:
            reason = str(error) or type(error).__name__
        return ApiFault(
            "unreachable",
            f"The API server {server} ({source}) cannot be reached: {reason}. "
            "Check that the cluster is up and the address is right.",
        )

    def _refused(self, method: str, path: str, status: int, data: bytes) -> ApiFault:
        try:
            body = json.loads(data)
            reason = str(body.get("message") or body.get("reason") or "")
        except (ValueError, AttributeError):
            body, reason = {}, " ".join(data.decode("utf-8", "replace").split())[:300]
        kind = _KIND_BY_STATUS.get(status, "server")
        if kind == "unauthorized":
            message = (
                f"The API server {self.connection.server} does not accept our credentials "
                f"(401){self._expiry()}; "
                f"fetch a fresh kubeconfig for {self.connection.source}."
            )
        elif kind == "forbidden":
            message = f"Not allowed (403): {reason or path}. docs/inventory.md lists the rights."
        else:
            message = f"{method} {path} failed ({status}): {reason or 'no reason given'}"
        return ApiFault(kind, message, status, body if isinstance(body, dict) else {})

    def _expiry(self) -> str:
        """A remark when our client certificate is past its end; the server itself never says so."""
        if not self.connection.client_certificate:
            return ""
        try:
            from cryptography import x509  # noqa: PLC0415 - only needed to explain a refusal

            certificate = x509.load_pem_x509_certificate(self.connection.client_certificate)
            end = getattr(certificate, "not_valid_after_utc", None)
            if end is None:
                end = certificate.not_valid_after.replace(tzinfo=datetime.timezone.utc)
        except (ImportError, ValueError):
            return ""
        if end < datetime.datetime.now(datetime.timezone.utc):
            return f": the client certificate expired on {end:%Y-%m-%d %H:%M} UTC"
        return ""

    def _decode(self, data: bytes, path: str) -> dict[str, Any]:
        try:
            decoded = json.loads(data)
        except ValueError as error:
            raise ApiFault(
                "server",
                f"{self.connection.server}{path} answered something that is not JSON; "
                "is this a Kubernetes API server?",
            ) from error
        if not isinstance(decoded, dict):
            raise ApiFault("server", f"{self.connection.server}{path} answered no JSON object.")
        return decoded


class _TlsConnection(http.client.HTTPSConnection):
    """HTTPS whose certificate may be checked against another name than the address."""

    def __init__(self, host: str, port: int, timeout: float, connection: Connection) -> None:
        context = connection.tls or ssl.create_default_context()
        super().__init__(host, port, timeout=timeout, context=context)
        self._gpu_slices_context = context
        self._gpu_slices_name = connection.tls_server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        # After a CONNECT through a proxy the certificate belongs to the far end, not to the proxy.
        far_end = getattr(self, "_tunnel_host", None) or self.host
        name = self._gpu_slices_name or far_end
        self.sock = self._gpu_slices_context.wrap_socket(self.sock, server_hostname=name)
