"""Read what the roles need to know of a cluster, in one go, and cut it down to what they use.

Runs on the controller only. The functions named ``trim_…`` are pure; :func:`read` asks the API server, all
questions at once, and leaves judging to others.
"""

from __future__ import annotations

import base64
import calendar
import gzip
import hashlib
import json
import os
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable

from . import kueue
from .resource_slices import DRIVER, merge_slices, with_holders

if TYPE_CHECKING:
    # Filters import this file in every task; the kubernetes package behind it would cost each half a second.
    from .kube_api import KubeApi

Object = Dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "gpu-slices"
LABELS_ANNOTATION = "gpu-slices.dev/labels"
PLUGIN_CONTAINER = "gpus"
# In a right: whatever namespace the driver's kubelet plugin turns out to be in.
PLUGIN_NAMESPACE = "@driver"
# Whatever namespace Kueue's controller is in.
KUEUE_NAMESPACE = "@kueue"
DRA_GROUP = "resource.k8s.io"
DRA_RESOURCES = ("deviceclasses", "resourceclaims", "resourceclaimtemplates", "resourceslices")

WANTS = (
    "version",
    "apis",
    "nodes",
    "daemonsets",
    "device_classes",
    "slices",
    "claims",
    "namespace",
    "trainer",
    "access",
    "objects",
    "plugin_pods",
    "claim_templates",
    "helm_release",
    "kueue",
)

TRAINER_CRDS = {
    "trainjobs": "trainjobs.trainer.kubeflow.org",
    "trainingruntimes": "trainingruntimes.trainer.kubeflow.org",
    "jobsets": "jobsets.jobset.x-k8s.io",
}


# ------------------------------------------------------------------------------------------------ trimming


def trim_node(node: Object) -> Object:
    """The facts of a Node that matter here."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    info = status.get("nodeInfo") or {}
    ready: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {})
    annotations = metadata.get("annotations") or {}
    return {
        "name": metadata["name"],
        "labels": dict(metadata.get("labels") or {}),
        "added_labels": annotations.get(LABELS_ANNOTATION, ""),
        "ready": ready.get("status") == "True",
        "not_ready_reason": ""
        if ready.get("status") == "True"
        else str(ready.get("message", "no Ready condition")),
        "unschedulable": bool(spec.get("unschedulable")),
        "taints": list(spec.get("taints") or []),
        "kubelet": str(info.get("kubeletVersion", "")),
        "runtime": str(info.get("containerRuntimeVersion", "")),
        "os": str(info.get("osImage", "")),
        "allocatable": {
            key: str(value)
            for key, value in (status.get("allocatable") or {}).items()
            if key.startswith("nvidia.com/")
        },
    }


def affinity_terms(pod_spec: Object) -> list[list[Object]]:
    """The OR-ed terms of a pod's required node affinity, each a list of AND-ed expressions."""
    node_affinity = ((pod_spec.get("affinity") or {}).get("nodeAffinity")) or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [list(term.get("matchExpressions") or []) for term in required.get("nodeSelectorTerms") or []]


def trim_daemonset(daemonset: Object) -> Object:
    """The facts of a DaemonSet that matter here, with the part it plays for GPUs."""
    metadata, status = daemonset["metadata"], daemonset.get("status") or {}
    pod = (daemonset["spec"].get("template") or {}).get("spec") or {}
    containers = [str(container.get("name")) for container in pod.get("containers") or []]
    images = [str(container.get("image")) for container in pod.get("containers") or []]
    labels = dict(metadata.get("labels") or {})
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "labels": labels,
        "release": str(labels.get("app.kubernetes.io/instance", "")),
        "chart": str(labels.get("helm.sh/chart", "")),
        "role": _role(metadata["name"], labels, containers, images),
        "containers": containers,
        "images": images,
        "feature_gates": _environment(pod, PLUGIN_CONTAINER, "FEATURE_GATES"),
        "rolling": (daemonset["spec"].get("updateStrategy") or {}).get("type", "RollingUpdate") != "OnDelete",
        "selector": dict((daemonset["spec"].get("selector") or {}).get("matchLabels") or {}),
        "node_selector": dict(pod.get("nodeSelector") or {}),
        "affinity_terms": affinity_terms(pod),
        "tolerations": list(pod.get("tolerations") or []),
        "generation": int(metadata.get("generation") or 0),
        "observed_generation": int(status.get("observedGeneration") or 0),
        "desired": int(status.get("desiredNumberScheduled") or 0),
        "ready": int(status.get("numberReady") or 0),
        "updated": int(status.get("updatedNumberScheduled") or 0),
    }


def _environment(pod: Object, container: str, variable: str) -> str:
    """The value of a container's environment variable; "" where it has none or takes it from elsewhere."""
    for item in pod.get("containers") or []:
        if item.get("name") == container:
            for entry in item.get("env") or []:
                if entry.get("name") == variable:
                    return str(entry.get("value") or "")
    return ""


def _role(name: str, labels: dict[str, str], containers: list[str], images: list[str]) -> str:
    """``dra`` (NVIDIA's DRA kubelet plugin), ``device_plugin``, ``mig_manager`` or "".

    Release names and chart names moved between releases of the driver. What stayed is the component label
    ``<chart name>-component: kubelet-plugin``.
    """
    component = any(key.endswith("-component") and value == "kubelet-plugin" for key, value in labels.items())
    if component and ("dra" in name or any("dra" in key for key in labels)):
        return "dra"
    text = " ".join([name, *images])
    if PLUGIN_CONTAINER in containers and "dra-driver" in text:
        return "dra"
    if "mig-manager" in name:
        return "mig_manager"
    if "device-plugin" in text and ("nvidia" in text or "gpu" in text or "hami" in text):
        return "device_plugin"
    return ""


def trim_pod(pod: Object) -> Object:
    """The facts of a pod that explain why it does not run."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    statuses = list(status.get("initContainerStatuses") or []) + list(status.get("containerStatuses") or [])
    containers = []
    for container in statuses:
        state = container.get("state") or {}
        kind = next(iter(state), "unknown")
        detail = state.get(kind) or {}
        containers.append(
            {
                "name": str(container.get("name")),
                "ready": bool(container.get("ready")),
                "restarts": int(container.get("restartCount") or 0),
                "state": kind,
                "reason": str(detail.get("reason") or ""),
                "message": str(detail.get("message") or ""),
            }
        )
    ready: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {})
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": str(metadata.get("uid", "")),
        "node": str((pod.get("spec") or {}).get("nodeName") or ""),
        "feature_gates": _environment(pod.get("spec") or {}, PLUGIN_CONTAINER, "FEATURE_GATES"),
        "phase": str(status.get("phase", "")),
        "ready": ready.get("status") == "True",
        "ready_since": str(ready.get("lastTransitionTime") or ""),
        "deleting": bool(metadata.get("deletionTimestamp")),
        "containers": containers,
    }


def trim_claim(claim: Object) -> Object:
    """A claim with nothing but who it is, whether this project made it, and what it holds."""
    metadata, status = claim["metadata"], claim.get("status") or {}
    manager = (metadata.get("labels") or {}).get(MANAGED_BY, "")
    return {
        "metadata": {
            "namespace": metadata.get("namespace", ""),
            "name": metadata["name"],
            "labels": {MANAGED_BY: manager},
        },
        "status": {"allocation": status.get("allocation"), "reservedFor": status.get("reservedFor") or []},
    }


def trainer_features(crds: dict[str, Object | None]) -> Object:
    """What the installed Trainer and JobSet can do, read from their own schemas.

    ``crds`` holds the CustomResourceDefinition, or None, for each key of TRAINER_CRDS. Per key the answer has
    ``found``, ``versions`` (served) and ``established``; ``features`` holds what differs between releases.
    """
    answer: Object = {}
    for key in TRAINER_CRDS:
        crd = crds.get(key)
        versions = [v for v in (crd or {}).get("spec", {}).get("versions", []) if v.get("served")]
        conditions = (crd or {}).get("status", {}).get("conditions") or []
        answer[key] = {
            "found": crd is not None,
            "versions": [str(version["name"]) for version in versions],
            "established": any(
                c.get("type") == "Established" and c.get("status") == "True" for c in conditions
            ),
        }
    job = _schema(crds.get("trainjobs"), "spec")
    runtime = _schema(crds.get("trainingruntimes"), "spec")
    torch = _properties(runtime, "mlPolicy", "torch")
    per_node = _properties(job, "trainer").get("numProcPerNode") or {}
    pod_overrides = ("runtimePatches", "podTemplateOverrides", "podSpecOverrides")
    answer["features"] = {
        "torch_num_proc_per_node": "numProcPerNode" in torch,
        "job_num_proc_per_node": (
            "int_or_string" if per_node.get("x-kubernetes-int-or-string") else str(per_node.get("type") or "")
        ),
        "pod_overrides": next((name for name in pod_overrides if name in _properties(job)), ""),
        "ml_policy_torch": "torch" in _properties(runtime, "mlPolicy"),
    }
    return answer


def _schema(crd: Object | None, part: str) -> Object:
    for version in (crd or {}).get("spec", {}).get("versions", []):
        if version.get("served"):
            schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
            return dict((schema.get("properties") or {}).get(part) or {})
    return {}


def _properties(schema: Object, *path: str) -> Object:
    for step in path:
        schema = (schema.get("properties") or {}).get(step) or {}
    return dict(schema.get("properties") or {})


# ------------------------------------------------------------------------------------------------- reading


def read(api: KubeApi, want: Iterable[str], options: Object | None = None) -> Object:
    """Ask all that ``want`` names (see WANTS) at once and return the trimmed answers, one key each.

    ``options``: ``namespace`` (name), ``rights`` (list of {verb, group, resource, namespace}), ``objects``
    (list of {id, path}: API paths of single objects), ``release`` and ``release_namespace``. A question that
    the server refuses is left out and is explained under ``errors``: {question: {kind, message}}. Without any
    answer the first fault is raised.
    """
    options = options or {}
    wanted = list(want)
    questions = {name: _QUESTIONS[name](api, options) for name in wanted}
    answers, faults = api.parallel(questions)
    for fault in faults.values():
        if not answers or fault.kind in ("unreachable", "tls", "unauthorized", "config"):
            raise fault
    facts: Object = dict(answers)
    facts["errors"] = {name: {"kind": fault.kind, "message": fault.message} for name, fault in faults.items()}
    if "slices" in facts:
        facts["slices"]["devices"] = with_holders(facts["slices"]["devices"], facts.get("claims") or [])
    return facts


def _items(api: KubeApi, path: str, params: dict[str, str] | None = None) -> list[Object]:
    return list(api.get(path, params).get("items") or [])


def _ask_version(api: KubeApi, _options: Object) -> Callable[[], Any]:
    return lambda: {"git": str(api.get("/version").get("gitVersion", "")), "url": api.server}


def _ask_apis(api: KubeApi, _options: Object) -> Callable[[], Any]:
    def ask() -> Object:
        groups = {
            str(group["name"]): [str(version["version"]) for version in group.get("versions") or []]
            for group in api.get("/apis").get("groups") or []
        }
        resources = []
        if "v1" in groups.get(DRA_GROUP, []):
            listed = api.get(f"/apis/{DRA_GROUP}/v1").get("resources") or []
            resources = sorted(str(item["name"]) for item in listed if "/" not in item["name"])
        return {"groups": groups, "dra_v1_resources": resources}

    return ask


def _ask_nodes(api: KubeApi, _options: Object) -> Callable[[], Any]:
    return lambda: {node["metadata"]["name"]: trim_node(node) for node in _items(api, "/api/v1/nodes")}


def _ask_daemonsets(api: KubeApi, _options: Object) -> Callable[[], Any]:
    def ask() -> list[Object]:
        trimmed = [trim_daemonset(item) for item in _items(api, "/apis/apps/v1/daemonsets")]
        return [item for item in trimmed if item["role"]]

    return ask


def _ask_device_classes(api: KubeApi, _options: Object) -> Callable[[], Any]:
    return lambda: {
        item["metadata"]["name"]: [
            str((selector.get("cel") or {}).get("expression", ""))
            for selector in (item.get("spec") or {}).get("selectors") or []
        ]
        for item in _items(api, f"/apis/{DRA_GROUP}/v1/deviceclasses")
    }


def _ask_slices(api: KubeApi, _options: Object) -> Callable[[], Any]:
    params = {"fieldSelector": f"spec.driver={DRIVER}"}
    return lambda: merge_slices(_items(api, f"/apis/{DRA_GROUP}/v1/resourceslices", params))


def _ask_claims(api: KubeApi, _options: Object) -> Callable[[], Any]:
    return lambda: [
        trim_claim(item)
        for item in _items(api, f"/apis/{DRA_GROUP}/v1/resourceclaims")
        if (item.get("status") or {}).get("allocation")
    ]


def _ask_namespace(api: KubeApi, options: Object) -> Callable[[], Any]:
    name = str(options.get("namespace") or "")

    def ask() -> Object:
        found = api.find(f"/api/v1/namespaces/{name}") or {}
        metadata = found.get("metadata") or {}
        return {
            "name": name,
            "found": bool(found),
            "terminating": (found.get("status") or {}).get("phase") == "Terminating",
            "labels": dict(metadata.get("labels") or {}),
        }

    return ask


def _ask_trainer(api: KubeApi, _options: Object) -> Callable[[], Any]:
    def ask() -> Object:
        base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
        found, faults = api.parallel(
            {key: partial(api.find, base + name) for key, name in TRAINER_CRDS.items()}
        )
        for fault in faults.values():
            raise fault
        return trainer_features(found)

    return ask


def _ask_access(api: KubeApi, options: Object) -> Callable[[], Any]:
    def review(right: Object) -> bool:
        attributes = {key: right.get(key, "") for key in ("verb", "group", "resource", "namespace")}
        resource, _, sub = attributes["resource"].partition("/")
        attributes.update(resource=resource, subresource=sub)
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool((answer.get("status") or {}).get("allowed"))

    def ask() -> list[Object]:
        rights = list(options.get("rights") or [])
        asked = {right.get("namespace") for right in rights}
        if PLUGIN_NAMESPACE in asked:
            found = [item for item in _ask_daemonsets(api, options)() if item["role"] == "dra"]
            rights = _placed(rights, PLUGIN_NAMESPACE, found)
        if KUEUE_NAMESPACE in asked:
            deployments = _items(api, "/apis/apps/v1/deployments")
            managers = [kueue.trim_manager(item) for item in deployments if kueue.is_manager(item)]
            rights = _placed(rights, KUEUE_NAMESPACE, managers)
        # Whoever may do everything needs one question, not forty.
        if review({"verb": "*", "group": "*", "resource": "*"}):
            return [{**right, "allowed": True} for right in rights]
        answers, faults = api.parallel(
            {str(number): partial(review, right) for number, right in enumerate(rights)}
        )
        for fault in faults.values():
            raise fault
        return [{**right, "allowed": answers[str(number)]} for number, right in enumerate(rights)]

    return ask


def _placed(rights: list[Object], place: str, found: list[Object]) -> list[Object]:
    """The rights with the namespace of what was found filled in; without it nothing is needed there."""
    placed = []
    for right in rights:
        if right.get("namespace") != place:
            placed.append(right)
        elif found:
            placed.append({**right, "namespace": found[0]["namespace"]})
    return placed


def _ask_objects(api: KubeApi, options: Object) -> Callable[[], Any]:
    wanted = list(options.get("objects") or [])

    def ask() -> Object:
        answers, faults = api.parallel(
            {str(item["id"]): partial(api.find, str(item["path"])) for item in wanted}
        )
        for fault in faults.values():
            if fault.kind not in ("forbidden", "not_found"):
                raise fault
        return answers

    return ask


def _ask_plugin_pods(api: KubeApi, options: Object) -> Callable[[], Any]:
    """The pods of the DRA driver's kubelet plugin, wherever it is."""

    def ask() -> list[Object]:
        pods: list[Object] = []
        for plugin in _ask_daemonsets(api, options)():
            if plugin["role"] == "dra" and plugin["selector"]:
                selector = ",".join(f"{key}={value}" for key, value in sorted(plugin["selector"].items()))
                path = f"/api/v1/namespaces/{plugin['namespace']}/pods"
                pods += [trim_pod(item) for item in _items(api, path, {"labelSelector": selector})]
        return pods

    return ask


def _ask_claim_templates(api: KubeApi, options: Object) -> Callable[[], Any]:
    path = f"/apis/{DRA_GROUP}/v1/namespaces/{options.get('namespace')}/resourceclaimtemplates"
    return lambda: {
        item["metadata"]["name"]: {
            "labels": dict(item["metadata"].get("labels") or {}),
            "spec": item.get("spec") or {},
        }
        for item in _items(api, path)
    }


def _ask_helm_release(api: KubeApi, options: Object) -> Callable[[], Any]:
    namespace, release = str(options.get("release_namespace")), str(options.get("release"))

    def ask() -> Object:
        params = {"labelSelector": f"owner=helm,name={release}"}
        secrets = _items(api, f"/api/v1/namespaces/{namespace}/secrets", params)
        return latest_release(secrets)

    return ask


def _ask_kueue(api: KubeApi, options: Object) -> Callable[[], Any]:
    """Kueue as it is installed (see kueue.py); without its API nothing but that."""

    def ask() -> Object:
        group = api.find(f"/apis/{kueue.GROUP}") or {}
        facts: Object = {
            "served": [str(version["version"]) for version in group.get("versions") or []],
            "managers": [],
            "config": kueue.trim_config(None, ""),
            "started": "",
        }
        if not facts["served"]:
            return facts
        if set(facts["served"]) & set(kueue.VERSIONS):
            queues = _items(api, f"/apis/{kueue.api_version(facts)}/clusterqueues")
            facts["guests"] = kueue.guests(queues, str(options.get("namespace") or ""))
        found = [item for item in _items(api, "/apis/apps/v1/deployments") if kueue.is_manager(item)]
        facts["managers"] = [kueue.trim_manager(item) for item in found]
        if len(found) == 1:
            manager = facts["managers"][0]
            base = f"/api/v1/namespaces/{manager['namespace']}"
            selector = ",".join(f"{key}={value}" for key, value in sorted(manager["selector"].items()))
            config = api.find(f"{base}/configmaps/{manager['config_map']}") if manager["config_map"] else None
            facts["config"] = kueue.trim_config(config, manager["config_key"])
            facts["started"] = kueue.started(_items(api, f"{base}/pods", {"labelSelector": selector}))
        return facts

    return ask


def latest_release(secrets: Iterable[Object]) -> Object:
    """What Helm recorded about the newest revision of a release.

    Returns ``{found, status, revision, chart, version, values}``; ``values`` is a digest of those that the
    user gave (:func:`digest`), for they may hold what belongs in no log.
    Helm keeps each revision in a Secret, as gzipped JSON that is base64 within base64.
    """
    empty: Object = {"found": False, "status": "", "revision": 0, "chart": "", "version": "", "values": ""}
    newest: Object | None = None
    for secret in secrets:
        labels = secret["metadata"].get("labels") or {}
        revision = int(labels.get("version") or 0)
        if newest is None or revision > int(newest["metadata"]["labels"]["version"]):
            newest = secret
    if newest is None:
        return empty
    try:
        packed = base64.b64decode(base64.b64decode(newest["data"]["release"]))
        release = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
    except (KeyError, ValueError, OSError):
        return {**empty, "found": True, "status": "unreadable"}
    chart = (release.get("chart") or {}).get("metadata") or {}
    return {
        "found": True,
        "status": str((release.get("info") or {}).get("status") or ""),
        "revision": int(release.get("version") or 0),
        "chart": str(chart.get("name") or ""),
        "version": str(chart.get("version") or ""),
        "values": digest(release.get("config") or {}),
    }


def digest(data: Any) -> str:
    """A hash of plain data, the same for equal data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


_QUESTIONS: dict[str, Callable[[KubeApi, Object], Callable[[], Any]]] = {
    "version": _ask_version,
    "apis": _ask_apis,
    "nodes": _ask_nodes,
    "daemonsets": _ask_daemonsets,
    "device_classes": _ask_device_classes,
    "slices": _ask_slices,
    "claims": _ask_claims,
    "namespace": _ask_namespace,
    "trainer": _ask_trainer,
    "access": _ask_access,
    "objects": _ask_objects,
    "plugin_pods": _ask_plugin_pods,
    "claim_templates": _ask_claim_templates,
    "helm_release": _ask_helm_release,
    "kueue": _ask_kueue,
}


# --------------------------------------------------------------------------------------- discovery cache


def drop_stale_discovery(api: KubeApi, groups: dict[str, list[str]]) -> str:
    """Remove the discovery cache of kubernetes.core when it describes an earlier cluster at this address.

    The collection keeps what a server offers in a file named after the server's address and the user, and
    never asks again: after a cluster was rebuilt at the same address, or a CRD went away, its modules act on
    an API that is no longer there. Returns the removed path, or "" when the cache was right or absent.
    """
    path = os.path.join(tempfile.gettempdir(), f"k8srcp-{_cache_id(api.server)}.json")
    try:
        written = os.stat(path).st_mtime
        with open(path, encoding="utf-8") as handle:
            cached = (json.load(handle).get("resources") or {}).get("apis") or {}
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        written, cached = 0.0, {}
    gone = [
        name
        for name, versions in cached.items()
        if name and not set(versions if isinstance(versions, dict) else []) <= set(groups.get(name, []))
    ]
    if gone or written < _cluster_born(api):
        try:
            os.unlink(path)
        except OSError:
            return ""
        return path
    return ""


def _cluster_born(api: KubeApi) -> float:
    created = str(api.get("/api/v1/namespaces/kube-system")["metadata"].get("creationTimestamp") or "")
    try:
        return float(calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def _cache_id(server: str) -> str:
    """The file name's hash, with the user found as kubernetes.core finds it."""
    user = ""
    for find in (os.getlogin, os.getuid):
        try:
            user = str(find())
        except OSError:
            continue
        if user:
            break
    return hashlib.sha256(f"{server}-{user}".encode()).hexdigest()
