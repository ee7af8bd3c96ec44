"""The Kubernetes API as plain JSON, with errors a person can act on.

Everything that is hard about reaching a cluster (kubeconfig, contexts, exec credentials, TLS, proxies) is
left to the ``kubernetes`` package; this file asks by path, not by class, and turns each failure into one
sentence. It runs on the controller only. Every error is an :class:`ApiFault`; nothing else leaves it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import config as kube_config
from kubernetes.client import ApiClient, Configuration

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)

# Parts of OpenSSL that read certificates and keys; what goes wrong on the wire is of "SSL".
_FILE_LIBRARIES = ("X509", "PEM", "ASN1")

_KIND_BY_STATUS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    422: "invalid",
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


def _load(kubeconfig: str, context: str, scratch: str | None) -> tuple[Configuration, str]:
    """Read the configuration the way the kubernetes.core modules do, so that both reach the same cluster."""
    named = kubeconfig or os.environ.get("K8S_AUTH_KUBECONFIG", "")
    context = context or os.environ.get("K8S_AUTH_CONTEXT", "")
    settings = Configuration()
    if not named and not context:
        try:
            kube_config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except kube_config.ConfigException:
            pass
        else:
            return settings, "the pod's service account"
    source = named or os.environ.get("KUBECONFIG", "") or "~/.kube/config"
    paths = [os.path.expanduser(path) for path in source.split(os.pathsep) if path]
    if not any(os.path.exists(path) for path in paths):
        fix = "correct gpu_slices_kubeconfig" if named else "set gpu_slices_kubeconfig or KUBECONFIG"
        raise ApiFault("config", f"There is no kubeconfig at {source}; {fix}.")
    try:
        kube_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=os.pathsep.join(paths),
            context=context or None,
            client_configuration=settings,
            persist_config=False,
            temp_file_path=scratch,
        )
    except yaml.YAMLError as error:
        raise ApiFault(
            "config", f"The kubeconfig {source} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    # The loader reports a damaged file as whatever Python error it stumbled upon.
    except (
        kube_config.ConfigException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        said = " ".join(str(error).split())
        if isinstance(error, (TypeError, KeyError, AttributeError)):
            said = f"it is not built like a kubeconfig ({said})"
        raise ApiFault(
            "config",
            f"The kubeconfig {source} cannot be used"
            f"{f' with context {context!r}' if context else ''}: {said}; "
            "correct it, or choose another with gpu_slices_kubeconfig and gpu_slices_context.",
        ) from error
    return settings, source


class KubeApi:
    """JSON requests to one API server. Threads may share it."""

    def __init__(self, settings: Configuration, source: str, timeout: float = 20.0) -> None:
        self.settings = settings
        self.source = source
        self.timeout = timeout
        self.server = str(settings.host).rstrip("/")
        try:
            self._client = ApiClient(settings)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ApiFault(
                "config", f"The certificates or keys of {source} cannot be loaded: {error}."
            ) from error

    @classmethod
    def from_kubeconfig(
        cls, kubeconfig: str = "", context: str = "", timeout: float = 20.0, scratch: str | None = None
    ) -> KubeApi:
        """Open the cluster that the kubeconfig names. Nothing is sent yet.

        Certificates and keys that the kubeconfig itself holds become files in the folder ``scratch``. Without
        it they lie in /tmp until Python ends, so whoever ends in another way (a worker of Ansible) names one
        that somebody else removes.
        """
        return cls(*_load(kubeconfig, context, scratch), timeout)

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
        with self._open(
            method, path, params=params, body=body, content_type=content_type, accept=accept
        ) as answer:
            data = answer.read()
        try:
            decoded = json.loads(data)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise ApiFault(
                "server",
                f"{self.server}{path} answered something that is no JSON object; "
                "is this a Kubernetes API server?",
            )
        return decoded

    def text(self, path: str, params: dict[str, str] | None = None) -> str:
        """GET something that is not JSON (a log)."""
        with self._open("GET", path, params=params) as answer:
            return bytes(answer.read()).decode("utf-8", "replace")

    def stream_lines(
        self, path: str, params: dict[str, str] | None = None, read_timeout: float | None = None
    ) -> Iterator[str]:
        """Yield the lines of a long answer (a watch, a followed log) as they come.

        The iterator ends when the server closes the stream, or after ``read_timeout`` seconds of silence.
        """
        pending = b""
        with self._open("GET", path, params=params, timeout=read_timeout) as answer:
            try:
                # read1 hands over what has arrived instead of waiting for a full block.
                while data := answer.read1(65536):
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        yield line.decode("utf-8", "replace").rstrip("\r")
            except urllib3.exceptions.ReadTimeoutError:
                return
        if pending:
            yield pending.decode("utf-8", "replace").rstrip("\r")

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

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "*/*",
        timeout: float | None = None,
    ) -> Iterator[Any]:
        url = self.server + path
        if params:
            url += ("&" if "?" in path else "?") + urlencode(params)
        headers = {"Accept": accept, "User-Agent": "gpu-slices"}
        settings: dict[str, Any] = dict(self.settings.auth_settings())
        for setting in settings.values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        payload = None
        if body is not None:
            payload = json.dumps(body)
            headers["Content-Type"] = content_type
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=payload,
                headers=headers,
                timeout=urllib3.Timeout(connect=self.timeout, read=timeout or self.timeout),
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise self._no_answer(error) from error
        try:
            if answer.status >= 300:
                raise self._refused(method, path, answer.status, answer.read())
            yield answer
        except urllib3.exceptions.HTTPError as error:
            raise self._no_answer(error) from error
        finally:
            # A half-read answer (a watch) must not go back into the pool.
            answer.close()
            answer.release_conn()

    def _no_answer(self, error: Exception) -> ApiFault:
        cause: BaseException | None = error
        chain: list[BaseException] = []
        while cause is not None and cause not in chain:
            chain.append(cause)
            inner = cause.args[0] if cause.args and isinstance(cause.args[0], BaseException) else None
            cause = inner or cause.__cause__ or cause.__context__
        tls = next((link for link in chain if isinstance(link, ssl.SSLError)), None)
        if tls is not None:
            return ApiFault("tls", self._tls_reason(tls))
        if any(isinstance(link, (socket.gaierror, urllib3.exceptions.NameResolutionError)) for link in chain):
            reason = "its name cannot be resolved"
        elif any(isinstance(link, ConnectionRefusedError) for link in chain):
            reason = "the connection was refused (nothing listens there)"
        elif any(isinstance(link, OSError) and link.errno in _NO_ROUTE for link in chain):
            reason = "there is no route to it"
        # urllib3 derives its refused-connection error from its time-out, so this comes after it.
        elif any(isinstance(link, (socket.timeout, urllib3.exceptions.TimeoutError)) for link in chain):
            reason = f"no answer within {self.timeout:g} s"
        else:
            reason = " ".join(str(chain[-1]).split()) or type(error).__name__
        return ApiFault(
            "unreachable",
            f"The API server {self.server} ({self.source}) cannot be reached: {reason}. "
            "Check that the cluster is up and the address is right.",
        )

    def _tls_reason(self, error: ssl.SSLError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            said = str(error.verify_message)
            if "expired" in said:
                fix = "it has expired (or this machine's clock is wrong): renew it"
            elif "mismatch" in said or "not valid for" in said:
                fix = "use an address that is in the certificate, or set tls-server-name"
            else:
                fix = f"certificate-authority in {self.source} is not this server's: fetch a fresh kubeconfig"
            return f"The certificate of {self.server} is not trusted ({said}); {fix}."
        said = error.reason or str(error)
        if error.library in _FILE_LIBRARIES or "PEM" in said:
            return (
                f"The certificates or keys of {self.source} cannot be loaded ({said}); fetch a fresh "
                "kubeconfig."
            )
        if "ALERT" in said and "CERTIFICATE" in said:
            return (
                f"{self.server} refused our client certificate ({said}){self._expiry()}; "
                f"fetch a fresh kubeconfig for {self.source}."
            )
        return (
            f"{self.server} does not speak TLS as expected ({said}); "
            f"check the server address in {self.source}."
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
                f"The API server {self.server} does not accept our credentials (401){self._expiry()}; "
                f"fetch a fresh kubeconfig for {self.source}."
            )
        elif kind == "forbidden":
            message = f"Not allowed (403): {reason or path}. docs/rights.md lists the rights."
        else:
            message = f"{method} {path} failed ({status}): {reason or 'no reason given'}"
        return ApiFault(kind, message, status, body if isinstance(body, dict) else {})

    def _expiry(self) -> str:
        """A remark when our client certificate is past its end; the server itself never says so."""
        if not self.settings.cert_file:
            return ""
        try:
            from cryptography import x509  # noqa: PLC0415 - only needed to explain a refusal

            with open(self.settings.cert_file, "rb") as handle:
                end = x509.load_pem_x509_certificate(handle.read()).not_valid_after_utc
        except (ImportError, OSError, ValueError, AttributeError):
            return ""
        if end < datetime.datetime.now(datetime.timezone.utc):
            return f": the client certificate expired on {end:%Y-%m-%d %H:%M} UTC"
        return ""
