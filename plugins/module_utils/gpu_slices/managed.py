"""Which kinds of objects this project makes, and the order in which they can go. Controller only."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple

from . import kueue

LABEL, MANAGER = "app.kubernetes.io/managed-by", "gpu-slices"
SELECTOR = f"{LABEL}={MANAGER}"


class Kind(NamedTuple):
    """A kind: API prefix ("/api/v1"), plural, kind, and whether it has namespaces.

    ``optional``: who may list it neither everywhere nor in the own namespaces has not made any either.
    """

    prefix: str
    plural: str
    kind: str
    namespaced: bool = True
    optional: bool = False

    def path(self, namespace: str = "") -> str:
        """API path of all its objects, or of those in one namespace."""
        inside = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return f"{self.prefix}{inside}/{self.plural}"


_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
_RESOURCE = "/apis/resource.k8s.io/v1"
_KUEUE = f"/apis/{kueue.GROUP}/{kueue.VERSIONS[0]}"

# A pod can end only while the driver is there to take its device back, and a runtime or claim template is in
# use as long as there are pods: so one step after the other, each gone before the next begins.
STEPS: tuple[tuple[Kind, ...], ...] = (
    (
        Kind(_TRAINER, "trainjobs", "TrainJob", optional=True),
        Kind("/apis/batch/v1", "cronjobs", "CronJob", optional=True),
        Kind("/apis/batch/v1", "jobs", "Job", optional=True),
        Kind("/apis/batch.volcano.sh/v1alpha1", "jobs", "Volcano Job", optional=True),
        Kind("/api/v1", "pods", "Pod"),
    ),
    (
        Kind(_RESOURCE, "resourceclaims", "ResourceClaim"),
        Kind(_RESOURCE, "resourceclaimtemplates", "ResourceClaimTemplate"),
        Kind(_TRAINER, "trainingruntimes", "TrainingRuntime", optional=True),
        Kind("/api/v1", "configmaps", "ConfigMap"),
        # Only the recipe's own, with its adapters; a claim of the user's carries no label of ours.
        Kind("/api/v1", "persistentvolumeclaims", "PersistentVolumeClaim", optional=True),
        Kind(_KUEUE, "localqueues", "LocalQueue", optional=True),
    ),
    # A ResourceFlavor stays as long as a ClusterQueue names it.
    (
        Kind(_KUEUE, "clusterqueues", "ClusterQueue", namespaced=False, optional=True),
        Kind(_KUEUE, "workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False, optional=True),
        Kind(_RESOURCE, "deviceclasses", "DeviceClass", namespaced=False, optional=True),
    ),
    (Kind(_KUEUE, "resourceflavors", "ResourceFlavor", namespaced=False, optional=True),),
    (Kind("/api/v1", "namespaces", "Namespace", namespaced=False),),
)


def steps(kueue_versions: Iterable[str]) -> tuple[tuple[Kind, ...], ...]:
    """STEPS with the version of Kueue's API that is served."""
    served = list(kueue_versions)
    version = next((v for v in kueue.VERSIONS if v in served), kueue.VERSIONS[0])
    here = f"/apis/{kueue.GROUP}/{version}"
    return tuple(
        tuple(kind._replace(prefix=here) if kind.prefix == _KUEUE else kind for kind in step)
        for step in STEPS
    )


def ours(item: Mapping[str, Any]) -> bool:
    """Does the object carry our label, as SELECTOR asks?"""
    return ((item.get("metadata") or {}).get("labels") or {}).get(LABEL) == MANAGER


def removable(item: Mapping[str, Any]) -> bool:
    """Is the object ours to delete? What has an owner goes with its owner."""
    return not (item.get("metadata") or {}).get("ownerReferences")


# What Kubernetes, or the distribution, puts into each namespace by itself, and what comes and goes unasked.
_MADE_ALONE = {
    "ConfigMap": {"kube-root-ca.crt", "openshift-service-ca.crt"},
    "ServiceAccount": {"default", "builder", "deployer"},
}
_PASSING = {"Endpoints", "EndpointSlice", "Event", "Lease"}
_ACCOUNT = "kubernetes.io/service-account.name"


def holdable(discovery: Iterable[Mapping[str, Any]]) -> list[Kind]:
    """The kinds that somebody can put into a namespace and take away, from lists of API groups.

    ``discovery`` holds documents of kind APIGroupDiscoveryList (v2). Of each group the version that the
    server prefers counts.
    """
    kinds: dict[tuple[str, str], Kind] = {}
    for group in (group for document in discovery for group in document.get("items") or []):
        name = (group.get("metadata") or {}).get("name", "")
        for version in group.get("versions") or []:
            prefix = f"/apis/{name}/{version['version']}" if name else f"/api/{version['version']}"
            for resource in version.get("resources") or []:
                # Pod metrics and their like can be read and not removed: they only mirror something.
                if resource.get("scope") != "Namespaced" or not {"list", "delete"} <= set(resource["verbs"]):
                    continue
                kind = Kind(prefix, resource["resource"], resource["responseKind"]["kind"])
                if kind.kind not in _PASSING:
                    kinds.setdefault((name, kind.plural), kind)
    return list(kinds.values())


def foreign(kind: Kind, item: Mapping[str, Any]) -> bool:
    """Would somebody miss the object if the namespace went? Not what is ours, goes already, or comes alone.

    What has an owner goes with its owner, which is looked at itself.
    """
    metadata = item["metadata"]
    if ours(item) or not removable(item) or metadata.get("deletionTimestamp"):
        return False
    if kind.kind == "Secret":
        account = (metadata.get("annotations") or {}).get(_ACCOUNT)
        return account not in _MADE_ALONE["ServiceAccount"]
    if kind.kind in {"Role", "RoleBinding"} and metadata["name"].startswith("system:"):
        return False
    return metadata["name"] not in _MADE_ALONE.get(kind.kind, ())


def holds_text(names: Iterable[str], limit: int = 6) -> str:
    """Why a namespace stays, by the names of what it holds."""
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return f"it holds {', '.join(listed[:limit])}{more}, not made by {MANAGER}"


def describe(kind: Kind, item: Mapping[str, Any]) -> str:
    """``Pod gpu-slices/x``."""
    metadata = item["metadata"]
    place = f"{metadata['namespace']}/" if metadata.get("namespace") else ""
    return f"{kind.kind} {place}{metadata['name']}"


def stuck_text(names: Iterable[str], seconds: int) -> str:
    """Why objects may not go, and what to do."""
    return (
        f"Still there {seconds} s after their deletion: {', '.join(names)}. A pod with a claim ends only "
        "while the DRA driver's plugin runs on its node: put the driver back (playbooks/enable_driver.yml) "
        "if it was removed first; otherwise see the finalizers of these objects, and run the teardown again."
    )
