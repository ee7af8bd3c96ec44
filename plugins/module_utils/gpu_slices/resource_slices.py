"""What the DRA driver publishes, who holds it, and what is free.

Input are plain ResourceSlice and ResourceClaim objects of ``resource.k8s.io/v1`` as the API returns them.

A *device* here is a dict::

    {"driver": "gpu.nvidia.com", "pool": "a30", "node": "a30", "device": "gpu-0-mig-1g6gb-14-0",
     "type": "mig", "profile": "1g.6gb", "uuid": "MIG-…", "parent_uuid": "GPU-…", "memory_bytes": 6241124352,
     "product": "NVIDIA A30", "slices": [0],
     "attributes": {"profile": "1g.6gb", …}, "capacity": {"memory": "5952Mi", …},
     "taints": [{"key", "value", "effect"}], "partitionable": False,
     "holder": None | {"namespace", "claim", "pods": [names]}}

``slices`` are the memory slices of the GPU that a static MIG device covers. ``partitionable`` marks devices
that draw on shared counters (DynamicMIG): they exist only once claimed.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Tuple

from .quantity import format_bytes, parse_bytes

DRIVER = "gpu.nvidia.com"
DEVICE_CLASS_MIG = "mig.nvidia.com"

Object = Dict[str, Any]
Device = Dict[str, Any]
DeviceKey = Tuple[str, str, str]

_BLOCKING = ("NoSchedule", "NoExecute")


def merge_slices(slices: Iterable[Object], driver: str = DRIVER) -> Object:
    """Merge ResourceSlices into pools, as the scheduler sees them.

    A pool counts with its newest generation only, and only if all its slices are there. A generation that is
    still being written makes the pool incomplete, even if an older one is complete: the scheduler waits too.
    Returns ``{"pools": [{name, generation, slices, expected, complete, node, devices}], "devices": [device…],
    "incomplete": [one sentence each]}``; ``devices`` holds those of complete pools, in a stable order.
    """
    by_pool: dict[str, list[Object]] = {}
    for item in slices:
        spec = item.get("spec") or {}
        if spec.get("driver") == driver:
            by_pool.setdefault(str((spec.get("pool") or {}).get("name", "")), []).append(item)
    pools, devices, incomplete = [], [], []
    for name in sorted(by_pool):
        members = by_pool[name]
        newest = max(_generation(item) for item in members)
        current = [item for item in members if _generation(item) == newest]
        expected = max(int(item["spec"]["pool"].get("resourceSliceCount") or 0) for item in current)
        found = [device for item in current for device in _devices(item, driver, name)]
        found.sort(key=lambda device: (device["node"], device["device"]))
        complete = len(current) == expected
        nodes = sorted({str(item["spec"].get("nodeName") or "") for item in current} - {""})
        pools.append(
            {
                "name": name,
                "generation": newest,
                "slices": len(current),
                "expected": expected,
                "complete": complete,
                "node": nodes[0] if len(nodes) == 1 else "",
                "devices": len(found),
            }
        )
        if complete:
            devices.extend(found)
        else:
            incomplete.append(
                f"pool {name}: {len(current)} of {expected} ResourceSlices of generation {newest} are there"
            )
    return {"pools": pools, "devices": devices, "incomplete": incomplete}


def _generation(item: Object) -> int:
    return int((item["spec"].get("pool") or {}).get("generation") or 0)


def _devices(item: Object, driver: str, pool: str) -> list[Device]:
    spec = item["spec"]
    return [_device(raw, driver, pool, str(spec.get("nodeName") or "")) for raw in spec.get("devices") or []]


def _device(raw: Object, driver: str, pool: str, node: str) -> Device:
    """Flatten one published device; v1beta1 keeps its facts one level deeper, under ``basic``."""
    facts = raw.get("basic") or raw
    attributes = {_bare(key, driver): _value(value) for key, value in (facts.get("attributes") or {}).items()}
    capacity = {
        _bare(key, driver): str(value.get("value", "") if isinstance(value, dict) else value)
        for key, value in (facts.get("capacity") or {}).items()
    }
    return {
        "driver": driver,
        "pool": pool,
        "node": node or str(raw.get("nodeName") or ""),
        "device": str(raw.get("name", "")),
        "type": str(attributes.get("type", "")),
        "profile": str(attributes.get("profile", "")),
        "uuid": str(attributes.get("uuid", "")),
        "parent_uuid": str(attributes.get("parentUUID", "")),
        "memory_bytes": _memory(capacity.get("memory", "")),
        "product": str(attributes.get("productName", "")),
        "slices": sorted(int(key[11:]) for key in capacity if re.match(r"^memorySlice\d+$", key)),
        "attributes": attributes,
        "capacity": capacity,
        "taints": list(facts.get("taints") or []),
        "partitionable": bool(facts.get("consumesCounters")),
        "holder": None,
    }


def _bare(key: str, driver: str) -> str:
    """``gpu.nvidia.com/profile`` and ``profile`` are the same attribute."""
    prefix = driver + "/"
    return key[len(prefix) :] if key.startswith(prefix) else key


def _value(typed: Any) -> Any:
    """``{"string": "1g.6gb"}`` is ``"1g.6gb"``; the API allows exactly one key."""
    if isinstance(typed, dict) and len(typed) == 1:
        return next(iter(typed.values()))
    return typed


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        return 0


# ------------------------------------------------------------------------------------------------- holders


def allocations(claims: Iterable[Object]) -> dict[DeviceKey, Object]:
    """Which claim holds which device: ``{(driver, pool, device): {namespace, claim, pods}}``.

    Claims of every namespace must be given. Admin access does not take a device away from anybody.
    """
    held: dict[DeviceKey, Object] = {}
    for claim in claims:
        metadata, status = claim.get("metadata") or {}, claim.get("status") or {}
        allocation = status.get("allocation") or {}
        holder = {
            "namespace": str(metadata.get("namespace", "")),
            "claim": str(metadata.get("name", "")),
            "pods": [str(user.get("name", "")) for user in status.get("reservedFor") or []],
        }
        for result in (allocation.get("devices") or {}).get("results") or []:
            if not result.get("adminAccess"):
                key = (str(result.get("driver")), str(result.get("pool")), str(result.get("device")))
                held[key] = holder
    return held


def with_holders(devices: Iterable[Device], claims: Iterable[Object]) -> list[Device]:
    """The devices, each with its ``holder`` filled in."""
    held = allocations(claims)
    return [
        {**device, "holder": held.get((device["driver"], device["pool"], device["device"]))}
        for device in devices
    ]


def claimed_devices(
    devices: Iterable[Device], claims: Iterable[Object], driver: str = DRIVER
) -> list[dict[str, str]]:
    """The devices that pods hold by a claim, whether or not a process uses them: ``[{node, uuid, holder}]``.

    A claim that nobody has reserved counts for nothing: its device can be given back. ``uuid`` is empty where
    a held device is not published (any more); its node is then taken from the allocation.
    """
    published = {(device["pool"], device["device"]): device for device in devices}
    held = []
    for claim in claims:
        metadata, status = claim["metadata"], claim.get("status") or {}
        allocation = status.get("allocation") or {}
        namespace = str(metadata.get("namespace", ""))
        users = [f"{namespace}/{user.get('name', '')}" for user in status.get("reservedFor") or []]
        if not users:
            continue
        holder = (
            f"claim {namespace}/{metadata['name']}, pod{'s' if len(users) > 1 else ''} {', '.join(users)}"
        )
        for result in (allocation.get("devices") or {}).get("results") or []:
            if result.get("driver") != driver or result.get("adminAccess"):
                continue
            pool = str(result.get("pool"))
            device = published.get((pool, str(result.get("device"))))
            nodes = [device["node"]] if device else _allocation_nodes(allocation) or [pool]
            uuid = (device["uuid"] or device["parent_uuid"]) if device else ""
            held += [{"node": node, "uuid": uuid, "holder": holder} for node in nodes]
    return held


def _allocation_nodes(allocation: Object) -> list[str]:
    """The nodes that an allocation is bound to by name."""
    return [
        str(name)
        for term in (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
        for field in term.get("matchFields") or []
        if field.get("key") == "metadata.name" and field.get("operator") == "In"
        for name in field.get("values") or []
    ]


def blocked(device: Device) -> str:
    """Why the scheduler would not give this device to an ordinary claim; empty if it would."""
    for taint in device["taints"]:
        if taint.get("effect") in _BLOCKING:
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"device taint {taint.get('key')}{value}:{taint['effect']}"
    return ""


def tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    """Whether one of a pod's tolerations covers a node's taint, by the rules of Kubernetes."""
    for toleration in tolerations:
        if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
            continue
        if toleration.get("key") and toleration["key"] != taint.get("key"):
            continue
        if toleration.get("operator", "Equal") == "Exists":
            return True
        if toleration.get("key") and str(toleration.get("value", "")) == str(taint.get("value") or ""):
            return True
    return False


def node_blocked(node: Object | None, tolerations: Iterable[Object] = ()) -> str:
    """Why a pod with these tolerations cannot run on a node (a trimmed one); empty if it can."""
    if node is None:
        return "the node does not exist"
    if not node.get("ready", True):
        return "the node is not Ready"
    if node.get("unschedulable"):
        return "the node is cordoned"
    for taint in node.get("taints") or []:
        if taint.get("effect") in _BLOCKING and not tolerated(taint, tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"node taint {taint.get('key')}{value}:{taint['effect']}"
    return ""


# ------------------------------------------------------------------------------------------------- choosing


def profile_slug(profile: str) -> str:
    """A profile as part of an object's name: ``1g.6gb+me`` is ``1g-6gb-me``."""
    return profile.replace(".", "-").replace("+", "-").lower()


def choose_slice(
    devices: Iterable[Device],
    claims: Iterable[Object],
    nodes: dict[str, Object],
    profile: str = "auto",
    memory: str = "5Gi",
    *,
    driver_found: bool = True,
    tolerations: Iterable[Object] = (),
) -> Object:
    """Choose the MIG profile for a claim: ``auto`` is the smallest one with at least ``memory``.

    ``nodes`` maps names to trimmed nodes; with an empty map no device is left out for its node's sake.
    Returns ``{profile, devices (free), published, free, reason, kind}``; ``kind``
    names the reason: "", no_driver, slice_empty, no_mig, profile_not_published, none_big_enough,
    devices_exhausted, node_excluded. A profile is taken only if one of its devices is free; ``auto`` moves on
    to the next larger one.
    """
    published = with_holders(devices, claims)
    slices = [device for device in published if device["type"] == "mig"]
    listing = describe_profiles(slices)
    empty: Object = {"profile": "", "devices": [], "published": listing, "free": 0}
    if not published:
        if not driver_found:
            return {**empty, "kind": "no_driver", "reason": f"no ResourceSlice of {DRIVER} is published"}
        return {**empty, "kind": "slice_empty", "reason": f"the ResourceSlices of {DRIVER} hold no device"}
    if not slices:
        whole = ", ".join(sorted({device["product"] or "?" for device in published}))
        return {
            **empty,
            "kind": "no_mig",
            "reason": f"{len(published)} devices are published ({whole}) and none is a MIG slice",
        }
    if profile == "auto":
        wanted = parse_bytes(memory)
        fitting = [device for device in slices if device["memory_bytes"] >= wanted]
        if not fitting:
            reason = f"no published slice has {memory}; published are {listing}"
            return {**empty, "kind": "none_big_enough", "reason": reason}
    else:
        fitting = [device for device in slices if device["profile"] == profile]
        if not fitting:
            reason = f"no device of profile {profile} is published; published are {listing}"
            return {**empty, "kind": "profile_not_published", "reason": reason}
    idle = [device for device in fitting if device["holder"] is None and not blocked(device)]
    tolerations = list(tolerations)
    barred = {
        name: node_blocked(nodes.get(name), tolerations) for name in {device["node"] for device in idle}
    }
    usable = [device for device in idle if not nodes or not barred[device["node"]]]
    if not usable:
        return {**empty, **_why_none_free(fitting, idle, barred)}
    best = min(usable, key=lambda device: (device["memory_bytes"], device["profile"]))["profile"]
    free = [device for device in usable if device["profile"] == best]
    return {
        "profile": best,
        "devices": free,
        "published": listing,
        "free": len(free),
        "kind": "",
        "reason": "",
    }


def _why_none_free(fitting: list[Device], idle: list[Device], barred: dict[str, str]) -> Object:
    names = ", ".join(sorted({device["profile"] for device in fitting}))
    if idle:
        reasons = sorted(f"{name}: {reason}" for name, reason in barred.items())
        reason = f"{len(idle)} devices of {names} are free, on nodes a pod cannot use ({'; '.join(reasons)})"
        return {"kind": "node_excluded", "reason": reason}
    holders = sorted(
        {
            f"{device['holder']['namespace']}/{device['holder']['claim']}"
            for device in fitting
            if device["holder"]
        }
    )
    tainted = sorted({f"{device['device']}: {blocked(device)}" for device in fitting if blocked(device)})
    parts = []
    if holders:
        parts.append("held by " + _some(holders))
    if tainted:
        parts.append("tainted: " + _some(tainted))
    reason = f"all {len(fitting)} devices of {names} are taken ({'; '.join(parts)})"
    return {"kind": "devices_exhausted", "reason": reason}


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def describe_profiles(devices: Iterable[Device]) -> str:
    """``4 x 1g.6gb (5.81 GiB), 2 x 3g.71gb (69.75 GiB)``, smallest first; ``none`` for nothing."""
    counts: dict[tuple[int, str], int] = {}
    for device in devices:
        key = (device["memory_bytes"], device["profile"] or device["type"] or "?")
        counts[key] = counts.get(key, 0) + 1
    return (
        ", ".join(
            f"{count} x {name} ({format_bytes(size)})" for (size, name), count in sorted(counts.items())
        )
        or "none"
    )


# ------------------------------------------------------------------------------------------------- hardware


def compare_with_hardware(devices: Iterable[Device], gpus: Iterable[Object], node: str) -> list[str]:
    """Device by device, what a node publishes against what its GPUs hold. No difference: an empty list.

    ``gpus`` is the node's ``mig_gpus``. A GPU in MIG mode must publish exactly its MIG devices, each with the
    same uuid, profile and parent; a GPU out of MIG mode must publish itself.
    """
    published = {
        device["uuid"]: device
        for device in devices
        if device["node"] == node and device["type"] in ("mig", "gpu")
    }
    differences = []
    expected: dict[str, tuple[str, str, str]] = {}
    for gpu in gpus:
        uuid = str(gpu["uuid"])
        if str(gpu.get("mig_mode_current", "")).lower() in ("enabled", "1", "true"):
            for instance in gpu.get("mig_devices") or []:
                expected[str(instance["uuid"])] = ("mig", str(instance["profile"]), uuid)
        else:
            expected[uuid] = ("gpu", "", "")
    for uuid in sorted(expected):
        kind, profile, parent = expected[uuid]
        name = f"MIG device {profile} {uuid}" if kind == "mig" else f"GPU {uuid}"
        device = published.get(uuid)
        if device is None:
            differences.append(f"{node}: {name} is on the hardware and not published")
            continue
        if device["type"] != kind:
            differences.append(f"{node}: {name} is published as type {device['type']}")
        elif kind == "mig" and device["profile"] != profile:
            differences.append(f"{node}: {name} is published as {device['profile'] or 'no profile'}")
        elif kind == "mig" and device["parent_uuid"] != parent:
            differences.append(
                f"{node}: {name} lies on {parent} and is published with parent {device['parent_uuid']}"
            )
    for uuid in sorted(set(published) - set(expected)):
        device = published[uuid]
        what = device["profile"] or device["type"]
        differences.append(f"{node}: {what} {uuid} ({device['device']}) is published and not on the hardware")
    return differences
