"""How a workload is doing, from the objects the API shows. Pure functions; controller only.

Objects are plain API objects. A *trouble* is {id, found, fix, grace}: something that keeps the workload
from running, and the seconds it may last before it counts as a failure (None: only the time limit ends it).
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Sequence

from .resource_slices import describe_profiles, with_holders

Object = Dict[str, Any]
Trouble = Dict[str, Any]

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_BY_CONDITION = ("TrainJob", "Job")
_VOLCANO_ENDS = {
    "Completed": "succeeded",
    **dict.fromkeys(("Failed", "Aborted", "Terminated"), "failed"),
}
_IMAGE_FINAL = {"InvalidImageName", "ErrImageNeverPull"}
_IMAGE_RETRIED = {"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"}
_CREATE = {"CreateContainerError", "CreateContainerConfigError", "RunContainerError"}


def newest_pods(pods: Iterable[Object]) -> list[Object]:
    """One pod a completion index, of the newest attempt, in the order of the index."""
    best: dict[int, Object] = {}
    for pod in pods:
        index = completion_index(pod)
        if index not in best or _age(pod) > _age(best[index]):
            best[index] = pod
    return [best[index] for index in sorted(best)]


def completion_index(pod: Object) -> int:
    """The pod's index in its Job; 0 where there is none."""
    metadata = pod.get("metadata") or {}
    for place in ("labels", "annotations"):
        value = str((metadata.get(place) or {}).get(COMPLETION_INDEX, ""))
        if value.isdigit():
            return int(value)
    return 0


def _age(pod: Object) -> tuple[int, str, str]:
    metadata = pod.get("metadata") or {}
    attempt = str((metadata.get("labels") or {}).get(RESTART_ATTEMPT, "0"))
    return (
        int(attempt) if attempt.isdigit() else 0,
        str(metadata.get("creationTimestamp", "")),
        str(metadata.get("name")),
    )


def phase(pod: Object) -> str:
    """The pod's phase; "Pending" while the API has none."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def finished(item: Object) -> str:
    """How a workload ended: "succeeded", "failed" or "" while it has not."""
    if item.get("kind") in _BY_CONDITION:
        if condition(item, "Failed"):
            return "failed"
        return "succeeded" if condition(item, "Complete") else ""
    if item.get("kind") == "VolcanoJob":
        return _VOLCANO_ENDS.get(_volcano_state(item)[0], "")
    return {"Succeeded": "succeeded", "Failed": "failed"}.get(phase(item), "")


def _volcano_state(item: Object) -> tuple[str, str]:
    """Phase and message of a Volcano Job, which has no conditions."""
    now = (item.get("status") or {}).get("state") or {}
    return str(now.get("phase") or ""), str(now.get("message") or now.get("reason") or "")


def condition(item: Object, kind: str) -> Object | None:
    """The condition of this type if it is true."""
    for entry in (item.get("status") or {}).get("conditions") or []:
        if entry.get("type") == kind and str(entry.get("status")) == "True":
            return dict(entry)
    return None


def readable(pod: Object, container: str = "") -> bool:
    """Is there a log to read: has the container (by default any) started, now or before?"""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if container in ("", status.get("name")):
            state = status.get("state") or {}
            if "running" in state or "terminated" in state:
                return True
    return False


def times(pod: Object, container: str) -> dict[str, str]:
    """When the pod was created and given its node, and its container started and finished; "" if not yet."""
    status = pod.get("status") or {}
    scheduled = next(
        (
            str(entry.get("lastTransitionTime") or "")
            for entry in status.get("conditions") or []
            if entry.get("type") == "PodScheduled" and str(entry.get("status")) == "True"
        ),
        "",
    )
    state: Object = next(
        (e.get("state") or {} for e in status.get("containerStatuses") or [] if e.get("name") == container),
        {},
    )
    run: Object = state.get("terminated") or state.get("running") or {}
    return {
        "created": str((pod.get("metadata") or {}).get("creationTimestamp") or ""),
        "scheduled": scheduled,
        "started": str(run.get("startedAt") or ""),
        "finished": str(run.get("finishedAt") or ""),
    }


def end_text(item: Object, container: str = "") -> str:
    """How it ended, in words: a pod's exit code, a job's condition with reason and message."""
    if item.get("kind") == "VolcanoJob":
        return ": ".join(text for text in _volcano_state(item) if text) or "no state yet"
    if item.get("kind") in _BY_CONDITION:
        for kind in ("Failed", "Complete"):
            entry = condition(item, kind)
            if entry:
                message = f": {entry['message']}" if entry.get("message") else ""
                return f"{kind} ({entry.get('reason')}){message}"
        return "no condition yet"
    status = item.get("status") or {}
    for entry in status.get("containerStatuses") or []:
        ended = (entry.get("state") or {}).get("terminated")
        if ended and (not container or entry.get("name") == container):
            text = f"{phase(item)}: exit code {ended.get('exitCode')} ({ended.get('reason')})"
            signal = " by the memory limit" if ended.get("reason") == "OOMKilled" else ""
            return text + signal
    reason = " ".join(str(status.get(k)) for k in ("reason", "message") if status.get(k))
    return f"{phase(item)} {reason}".strip()


def pod_trouble(pod: Object) -> Trouble | None:
    """What the pod's own status says keeps it from running."""
    status = pod.get("status") or {}
    name = (pod.get("metadata") or {}).get("name")
    for group in ("initContainerStatuses", "containerStatuses"):
        for entry in status.get(group) or []:
            waiting = (entry.get("state") or {}).get("waiting") or {}
            reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
            text = f"pod {name}: {reason}: {message}".rstrip(": ")
            if reason in _IMAGE_FINAL | _IMAGE_RETRIED:
                fix = (
                    f"make image {entry.get('image')} available to the node (gpu_slices_image, pull secrets)"
                )
                return _trouble("image", text, fix, 0 if reason in _IMAGE_FINAL else 60)
            if reason in _CREATE:
                if "unresolvable CDI devices" in message:
                    fix = (
                        "the runtime does not find the driver's CDI spec: check that its cdi_spec_dirs hold "
                        "/var/run/cdi; after a reboot delete the pod so that the device is prepared again"
                    )
                    return _trouble("cdi-unresolvable", text, fix, 60)
                return _trouble(
                    "container-create", text, "read the message: the runtime refuses the container", 60
                )
    for entry in status.get("conditions") or []:
        if entry.get("type") == "PodScheduled" and entry.get("reason") == "Unschedulable":
            return _trouble(
                "unschedulable", f"pod {name}: {entry.get('message')}", "free a device or a node", None
            )
    return None


def event_trouble(event: Object) -> Trouble | None:
    """What an event says keeps the workload from running; None for events that are no trouble."""
    reason, message = str(event.get("reason")), str(event.get("message") or event.get("note") or "")
    about = (event.get("involvedObject") or event.get("regarding") or {}).get("name")
    text = f"{about}: {reason}: {message}"
    if reason == "FailedPrepareDynamicResources":
        if "is not registered" in message:
            fix = (
                "the driver's plugin pod on that node is not running: start it (playbooks/enable_driver.yml)"
            )
        else:
            fix = (
                "the driver refuses the device: when slices and hardware differ, restart the plugin pod "
                "(playbooks/enable_driver.yml); else read the log of its container 'gpus'"
            )
        return _trouble("prepare-failed", text, fix, 150)
    if reason == "FailedResourceClaimCreation":
        return _trouble(
            "template-missing", text, "create the ResourceClaimTemplate in the pod's namespace", 45
        )
    if reason == "TrainJobResourcesCreationFailed":
        return _trouble(
            "trainjob-resources", text, "Trainer cannot make the JobSet: read the message of its webhook", 45
        )
    if reason == "FailedCreate":
        return _trouble("pod-refused", text, "the pod is refused: read the message (quota, admission)", 45)
    return None


def about(event: Object, names: Iterable[str]) -> bool:
    """Is the event about one of these objects, or about one named after it (its JobSet, Job, pods)?"""
    target = str((event.get("involvedObject") or event.get("regarding") or {}).get("name") or "")
    return any(target == name or target.startswith(name + "-") for name in names)


def explain_unschedulable(
    message: str, profile: str, devices: Sequence[Object], claims: Iterable[Object]
) -> tuple[str, str]:
    """Why "cannot allocate all claims", and what to do.

    Nothing of the profile is published, all are held (by whom), or the free ones are on unusable nodes. With
    no profile full GPUs are meant. A claim that several pods name has its device before the next one comes.
    """
    if "Insufficient" in message and "cannot allocate all claims" not in message:
        return (
            "devices are not what is missing: the node lacks something else the pod asks for",
            "free resources on the node, or ask for less",
        )
    if "volume" in message.lower() and "cannot allocate all claims" not in message:
        return (
            "devices are not what is missing: the pod's claim for storage finds no volume it can use",
            "see kubectl get pvc,pv: another storage class, size or claim (recipe_storage_class, "
            "recipe_storage_size, recipe_claim), or a node that reaches the volume",
        )
    published = with_holders(devices, claims)
    fitting = [d for d in published if d["profile"] == profile and (profile or d["type"] == "gpu")]
    kind = f"profile {profile}" if profile else "type gpu"
    if not fitting:
        return (
            f"no device of {kind} is published; published are {describe_profiles(published)}",
            "cut such slices (mig_config) or set gpu_slices_profile to a published one"
            if profile
            else "leave a GPU whole (mig-enabled: false for it in the layout of mig_config)",
        )
    free = [d for d in fitting if not d["holder"]]
    if not free:
        holders = sorted(
            f"{d['holder']['namespace']}/{', '.join(d['holder']['pods']) or d['holder']['claim']}"
            for d in fitting
        )
        return (
            f"all {len(fitting)} published devices of {kind} are held by {'; '.join(holders)}",
            "wait for these pods or delete them"
            + (", or cut more slices of this profile" if profile else ""),
        )
    nodes = ", ".join(sorted({d["node"] for d in free}))
    text = f"{len(free)} of {len(fitting)} devices of {kind} are free, on {nodes}"
    barred = "taint" in message or "unschedulable" in message or "affinity" in message
    if barred and "Insufficient" not in message:
        return (
            f"{text}, but the scheduler may not use the node",
            "take the taint or the cordon off the node, or free a device on another",
        )
    return (
        f"{text}; the node lacks something else the pod asks for",
        "free resources on the node, or ask for less",
    )


def claimed_devices(claim: Object, devices: Sequence[Object]) -> list[Object]:
    """The devices a claim was allocated, each with all that is published about it, plus claim and pods."""
    metadata, status = claim.get("metadata") or {}, claim.get("status") or {}
    known = {(d["driver"], d["pool"], d["device"]): d for d in devices}
    found = []
    for result in ((status.get("allocation") or {}).get("devices") or {}).get("results") or []:
        key = (str(result.get("driver")), str(result.get("pool")), str(result.get("device")))
        found.append(
            {
                "driver": key[0],
                "pool": key[1],
                "device": key[2],
                **known.get(key, {}),
                "claim": str(metadata.get("name")),
                "namespace": str(metadata.get("namespace")),
                "pods": [str(u.get("name")) for u in status.get("reservedFor") or []],
            }
        )
    return found


def pods_of_claim(claim: Object) -> list[str]:
    """The pods of a claim: the one it was generated for, else those it is reserved for."""
    metadata = claim.get("metadata") or {}
    owners = [str(o.get("name")) for o in metadata.get("ownerReferences") or [] if o.get("kind") == "Pod"]
    return owners or [str(user.get("name")) for user in (claim.get("status") or {}).get("reservedFor") or []]


def made_for(claim: Object, pod: Object) -> bool:
    """Whether a claim is this pod's: made for it, or named in it. An earlier pod of its name had another."""
    metadata = claim.get("metadata") or {}
    owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("kind") == "Pod"]
    if owners:
        uids = {str(owner["uid"]) for owner in owners if owner.get("uid")}
        named = pod["metadata"]["name"] in (owner.get("name") for owner in owners)
        return named and (not uids or pod["metadata"]["uid"] in uids)
    named_in_pod = [c.get("resourceClaimName") for c in (pod.get("spec") or {}).get("resourceClaims") or []]
    if any(named_in_pod):
        return metadata.get("name") in named_in_pod
    return pod["metadata"]["name"] in pods_of_claim(claim)


def picture_device(device: Mapping[str, Any]) -> dict[str, Any]:
    """A published device as the report's picture wants it."""
    slices = [
        int(key[len("memorySlice") :])
        for key in device.get("capacity") or {}
        if key.startswith("memorySlice") and key[len("memorySlice") :].isdigit()
    ]
    keys = ("node", "pool", "device", "type", "profile", "uuid", "parent_uuid", "memory_bytes")
    return {
        **{k: device.get(k) for k in keys},
        "product": (device.get("attributes") or {}).get("productName", ""),
        "slices": sorted(slices),
    }


def _trouble(name: str, found: str, fix: str, grace: float | None) -> Trouble:
    return {"id": name, "found": " ".join(found.split()), "fix": fix, "grace": grace}
