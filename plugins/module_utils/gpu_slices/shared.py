"""One full GPU for several jobs: what may be asked for, which GPU is free, whose the claim is, and the proof.

Pure functions; controller only. Sharing by DRA means one ResourceClaim that several pods name. A template
makes a claim, and so a GPU, for each pod. The sharing itself is the driver's: an opaque GpuConfig in the
claim.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Iterable, Mapping, Sequence

from . import workload_log
from .checks import Check, check
from .claim import difference, may_apply, namespace_plan
from .driver_gates import GATES, MPS, TIME_SLICING, has_gates
from .inputs import is_true
from .preflight import sharing_check
from .quantity import format_bytes, parse_bytes
from .resource_slices import DRIVER, blocked, describe_profiles, node_blocked

Object = Dict[str, Any]

MODES = ("mig", "shared")
MODE_VARIABLE = "DRA_SLICE_MODE"
DEVICE_CLASS_GPU = "gpu.nvidia.com"
CLAIM = "gpu-slices-shared"
REQUEST = "gpu-slice"
INTERVALS = ("Default", "Short", "Medium", "Long")
# As many pods as Kubernetes lets reserve one claim.
MOST_JOBS = 256

_PERCENTAGE = "defaultActiveThreadPercentage"
_LIMIT = "defaultPinnedDeviceMemoryLimit"
_LIMITS = "defaultPerDevicePinnedMemoryLimit"
_MODES_OF = {TIME_SLICING: "Default", MPS: "Exclusive_Process"}
_FIXES = {
    "facts_unreadable": "give this user the right to list them; before Kubernetes 1.34 upgrade the cluster",
    "no_driver": "install or repair the DRA driver (--tags enable-driver)",
    "no_class": "set resources.gpus.enabled=true and gpuResourcesEnabledOverride=true in the chart's values",
    "pool_incomplete": "wait for the driver, or restart its plugin pod",
    "slice_empty": "leave a GPU whole (mig-enabled: false for it in the layout of mig_config) and run "
    "--tags enable-driver",
    "no_gpu": "leave a GPU whole (mig-enabled: false for it in the layout of mig_config) and run --tags "
    "enable-driver",
    "gpus_taken": "wait until one is free, or leave another GPU whole (mig_config)",
    "node_excluded": "make these nodes schedulable, or tolerate their taints (gpu_slices_tolerations)",
}
# What a real run may mend, so that check mode goes on.
_MENDABLE = ("no_driver", "no_class", "slice_empty", "no_gpu", "pool_incomplete", "gate_off")


# -------------------------------------------------------------------------------------------------- inputs


def mode_faults(mode: str, named_by_inventory: bool) -> list[str]:
    """A mode that does not exist and comes from the environment; the inventory's is checked by its type."""
    if mode in MODES or named_by_inventory:
        return []
    return [
        f"The environment variable {MODE_VARIABLE} makes gpu_slices_mode '{mode}': needed is "
        f"{' or '.join(MODES)}; correct it, or unset it."
    ]


def input_faults(values: Mapping[str, Any], mode: str, profile: str) -> list[str]:
    """Settings of sharing that contradict each other or that the driver would refuse much later.

    ``values`` are the variables that the inventory sets.
    """
    strategy = str(values.get("shared_strategy", TIME_SLICING))
    interval = str(values.get("shared_interval") or "")
    faults = []
    if str(values.get("shared_claim_kind", "ResourceClaim")) == "ResourceClaimTemplate":
        faults.append(
            "shared_claim_kind is ResourceClaimTemplate: a template gives each pod a claim, and so a GPU, of "
            "its own, and nothing is shared; use ResourceClaim, one claim that all the jobs name."
        )
    if mode == "shared" and profile != "auto":
        faults.append(
            f"gpu_slices_profile is {profile} and gpu_slices_mode is shared: the GpuConfig that shares a GPU "
            "cannot be applied to a MIG device; leave the profile out (auto), or set gpu_slices_mode: mig."
        )
    if strategy == MPS and interval:
        faults.append(
            f"shared_interval is {interval} and shared_strategy is MPS: an interval belongs to TimeSlicing, "
            "and the driver refuses it with MPS; leave it out, or set shared_strategy: TimeSlicing."
        )
    mps = values.get("shared_mps") or {}
    if isinstance(mps, Mapping):
        given = sorted(str(name) for name, value in mps.items() if value not in (None, "", {}))
        if strategy == TIME_SLICING and given:
            faults.append(
                f"shared_mps sets {', '.join(given)} and shared_strategy is TimeSlicing: the driver refuses "
                "that; leave it out, or set shared_strategy: MPS."
            )
        faults += _mps_faults(mps)
    jobs = _whole(values.get("shared_jobs", 3))
    if jobs is not None and not 2 <= jobs <= MOST_JOBS:
        faults.append(
            f"shared_jobs is {jobs}: needed are at least 2 jobs to share a GPU, and at most {MOST_JOBS}, for "
            "no more pods can hold one claim."
        )
    return faults


def _mps_faults(mps: Mapping[str, Any]) -> list[str]:
    faults = []
    percentage = _whole(mps.get(_PERCENTAGE))
    if percentage is not None and not 1 <= percentage <= 100:
        faults.append(f"shared_mps.{_PERCENTAGE} is {percentage}: needed is 1 to 100.")
    limits = mps.get(_LIMITS)
    named = [(_LIMIT, mps.get(_LIMIT))]
    if isinstance(limits, Mapping):
        for device, limit in limits.items():
            named.append((f"{_LIMITS}[{device}]", limit))
            if str(device) != "0" and not str(device).startswith("GPU-"):
                faults.append(
                    f"shared_mps.{_LIMITS} names device '{device}': needed is 0, for the claim has one GPU, "
                    "or that GPU's UUID."
                )
    for name, limit in named:
        if limit in (None, ""):
            continue
        try:
            if parse_bytes(limit) < 2**20:
                faults.append(f"shared_mps.{name} is {limit}: needed is at least 1Mi.")
        except ValueError as error:
            faults.append(f"shared_mps.{name}: {error}.")
    return faults


def gate_faults(values: Mapping[str, Any], mode: str) -> list[str]:
    """Chart values that keep the driver from sharing, where this run is to install it."""
    strategy = str(values.get("shared_strategy", TIME_SLICING))
    version = str(values.get("dra_driver_chart_version") or "")
    if mode != "shared" or strategy not in GATES or not has_gates(version.lstrip("v")):
        return []
    chart = values.get("dra_driver_values")
    given = chart.get("featureGates") if isinstance(chart, Mapping) else None
    given = given if isinstance(given, Mapping) else {}
    gate, faults = GATES[strategy], []
    if gate in given and not is_true(given[gate]):
        faults.append(
            f"dra_driver_values switches featureGates.{gate} off, without which the driver refuses "
            f"shared_strategy {strategy}: drop that value, or set gpu_slices_mode: mig."
        )
    # With MPSSupport among the user's own values the same clash is found there.
    if strategy == MPS and is_true(given.get("DynamicMIG", False)) and not is_true(given.get(gate, False)):
        faults.append(
            "dra_driver_values switches featureGates.DynamicMIG on and shared_strategy is MPS: the driver "
            "does not start with both DynamicMIG and MPSSupport; drop DynamicMIG, or share by TimeSlicing."
        )
    return faults


def _whole(value: Any) -> int | None:
    """A whole number, or None for what the type check tells about."""
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (OverflowError, TypeError, ValueError):
        return None


def sharing(strategy: str, interval: str = "", mps: Mapping[str, Any] | None = None) -> Object:
    """The ``sharing`` part of a GpuConfig.

    The driver decodes it strictly, and an empty ``timeSlicingConfig`` stops its plugin (it looks at the
    interval that is not there), so what is not set is left out.
    """
    made: Object = {"strategy": strategy}
    if strategy == TIME_SLICING and interval:
        made["timeSlicingConfig"] = {"interval": interval}
    settings: Object = {}
    for name, value in (mps or {}).items():
        if value in (None, "", {}):
            continue
        if name == _PERCENTAGE:
            settings[name] = int(value)
        elif name == _LIMITS:
            settings[name] = {str(device): str(limit) for device, limit in value.items()}
        else:
            settings[name] = str(value)
    if strategy == MPS and settings:
        made["mpsConfig"] = settings
    return made


# -------------------------------------------------------------------------------------------------- the GPU


def choose(
    facts: Object, settings: Object, *, tolerations: Iterable[Object] = (), predict: bool = False
) -> Object:
    """Is a full GPU free for the claim, and does the driver let it be shared?

    ``settings``: ``strategy``, ``mode``, ``driver_install``. The gate is looked at here too, since not every
    play of this stage has gate 2 before it.

    What our own claim holds counts as free for it. Returns ``{gpus (usable), kind, reason, published,
    predicted}``; the scheduler picks among the usable ones. In check mode (``predict``) what a real run may
    bring is taken for granted.
    """
    made = _choose(facts, list(tolerations))
    if made["gpus"]:
        gate = sharing_check(facts, {**settings, "stages": ["shared"]})
        if gate["status"] == "fail":
            reason = gate["found"].rpartition(" [")[0]
            made = {
                **_none("gate_off", reason, made["published"]),
                "fix": gate["fix"],
                "needed": gate["needed"],
            }
    made["predicted"] = bool(predict and made["kind"] in _MENDABLE)
    return made


def _choose(facts: Object, tolerations: list[Object]) -> Object:
    errors = facts.get("errors") or {}
    for question in ("slices", "claims", "namespace", "device_classes", "daemonsets"):
        if question not in facts:
            fault = errors.get(question) or {}
            return _none("facts_unreadable", str(fault.get("message") or f"{question} could not be read"))
    slices = facts["slices"]
    devices = slices["devices"]
    published = describe_profiles(devices)
    if not devices and slices["incomplete"]:
        return _none("pool_incomplete", "; ".join(slices["incomplete"]))
    if not devices and slices["pools"]:
        return _none("slice_empty", f"the ResourceSlices of {DRIVER} hold no device")
    if not devices:
        return _none("no_driver", f"no ResourceSlice of {DRIVER} is published")
    if DEVICE_CLASS_GPU not in facts["device_classes"]:
        return _none("no_class", f"there is no DeviceClass {DEVICE_CLASS_GPU}", published)
    gpus = [device for device in devices if device["type"] == "gpu"]
    if not gpus:
        reason = f"no device of type gpu is published; published are {published}"
        return _none("no_gpu", reason, published)
    own = {"namespace": facts["namespace"].get("name"), "claim": CLAIM}
    states = {device["device"] + " on " + (device["node"] or device["pool"]): device for device in gpus}
    taken, barred, usable = [], [], []
    for name, device in states.items():
        holder = device["holder"]
        if holder and any(holder[key] != own[key] for key in own):
            pods = f" (pods {', '.join(holder['pods'])})" if holder["pods"] else ""
            taken.append(f"{name} is held by claim {holder['namespace']}/{holder['claim']}{pods}")
        elif blocked(device):
            taken.append(f"{name}: {blocked(device)}")
        elif facts.get("nodes") and node_blocked(facts["nodes"].get(device["node"]), tolerations):
            barred.append(f"{name}: {node_blocked(facts['nodes'].get(device['node']), tolerations)}")
        else:
            usable.append(device)
    if usable:
        return {**_none("", "", published), "gpus": usable}
    if barred:
        reason = f"no device of type gpu is free where a pod can run ({'; '.join([*barred, *taken])})"
        return _none("node_excluded", reason, published)
    return _none("gpus_taken", f"no device of type gpu is free ({'; '.join(taken)})", published)


def _none(kind: str, reason: str, published: str = "none") -> Object:
    return {"gpus": [], "kind": kind, "reason": reason, "published": published, "predicted": False}


def choice_check(made: Object, required: bool) -> Check:
    """The choice as one check: pass, skip with the reason, or fail where a GPU is required."""
    asked = "Is a full GPU free, and may it be shared?"
    if made["predicted"]:
        return check("gpu", asked, f"{made['reason']}; check mode: a real run may bring one", "skip")
    evidence = {"published": made["published"], "free": [gpu["device"] for gpu in made["gpus"]]}
    if made["gpus"]:
        texts = []
        for gpu in made["gpus"]:
            ours = ", held by our own claim" if gpu["holder"] else ""
            size = format_bytes(gpu["memory_bytes"])
            texts.append(f"{gpu['device']} on {gpu['node']} ({gpu['product']}, {size}{ours})")
        return check("gpu", asked, "; ".join(texts), evidence=evidence)
    status = "fail" if required or made["kind"] == "facts_unreadable" else "skip"
    return check(
        "gpu",
        asked,
        made["reason"],
        status,
        needed=made.get("needed") or "a published device of type gpu that no other claim holds",
        fix=made.get("fix") or _FIXES[made["kind"]],
        finding=made["kind"],
        evidence=evidence,
    )


# ------------------------------------------------------------------------------------------------ the claim


def claim_plan(facts: Object, manifests: list[Object], *, check_mode: bool = False) -> Object:
    """What to do so that the manifests (a Namespace, our ResourceClaim) are in the cluster.

    Returns ``{apply [manifests], missing, replace, foreign, users}``. ``replace``: our claim is there
    with another spec, which cannot be changed, so it is deleted first. ``foreign``: a claim of that name is
    not ours. ``users``: pods that are not ours hold the claim that was to be replaced, so it stays.
    """
    plan: Object = {"apply": [], "missing": False, "replace": False, "foreign": "", "users": ""}
    found = next(iter((facts.get("objects") or {}).values()), None)
    live = None
    if found is not None:
        live = {"spec": found["spec"], "labels": (found.get("metadata") or {}).get("labels") or {}}
    for manifest in manifests:
        if manifest["kind"] == "Namespace":
            plan["apply"] += namespace_plan(facts["namespace"], manifest)
            continue
        where = f"ResourceClaim {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
        what = difference(manifest, live)
        users = _foreign_users(found) if found and what == "spec" else []
        if what == "foreign":
            plan["foreign"] = f"{where} exists and is not ours"
        elif users:
            plan["users"] = (
                f"{where} is to be replaced and is held by {', '.join(users)}, not by jobs of ours"
            )
        elif what:
            plan["missing"], plan["replace"] = what == "absent", what == "spec"
            if may_apply(what, facts["namespace"], check_mode):
                plan["apply"].append(manifest)
    return plan


def _foreign_users(claim: Object) -> list[str]:
    """The pods that hold the claim and are not our jobs'; by their names, which we gave."""
    users = [str(user.get("name", "")) for user in (claim.get("status") or {}).get("reservedFor") or []]
    return sorted(f"pod {user}" for user in users if not user.startswith(f"{CLAIM}-"))


def claim_check(plan: Object, namespace: str) -> Check:
    """Whether the claim can be had as it is rendered."""
    asked = f"Is the claim {namespace}/{CLAIM} ours to use?"
    if plan["foreign"]:
        return check(
            "claim",
            asked,
            plan["foreign"],
            "fail",
            needed="no such object, or one of ours",
            fix="rename or remove it, or choose another gpu_slices_namespace",
            finding="name_taken",
        )
    if plan["users"]:
        return check(
            "claim",
            asked,
            plan["users"],
            "fail",
            needed="nobody else on it: a claim's settings cannot be changed",
            fix="delete these pods, keep the former settings, or choose another gpu_slices_namespace",
            finding="claim_in_use",
        )
    applied = any(manifest["kind"] == "ResourceClaim" for manifest in plan["apply"])
    does = "is replaced" if plan["replace"] else "is applied" if applied or plan["missing"] else "is there"
    return check("claim", asked, f"it {does}")


# ------------------------------------------------------------------------------------------------ the proof


def judge(members: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[Check]:
    """What the jobs prove together: one GPU, at one time, shared as asked.

    ``arguments``: ``namespace``, ``strategy``, ``interval``.
    """
    rows = [_facts(member) for member in members]
    return [
        _one_gpu(rows, str(arguments["namespace"])),
        _overlap(rows),
        _strategy(rows, str(arguments["strategy"]), str(arguments.get("interval") or "")),
        _memory(rows, str(arguments["strategy"])),
    ]


def _facts(member: Mapping[str, Any]) -> Object:
    """One job as the judge sees it, from its log and from its recorded allocation."""
    pods = list(member.get("pods") or [])
    seen = workload_log.proof(pods[0]["log"] or "") if pods else {}
    visible = [device for device in seen.get("devices") or [] if isinstance(device, dict)]
    given = [device for pod in pods for device in pod["devices"]]
    first = given[0] if given else {}
    return {
        "job": str(member["name"]),
        "node": pods[0]["node"] if pods else "",
        "logged": [str(device.get("uuid")) for device in visible],
        "allocated": [str(device.get("uuid")) for device in given],
        "claims": [f"{device.get('namespace') or ''}/{device.get('claim')}".lstrip("/") for device in given],
        "device": str(first.get("device") or ""),
        "product": str((first.get("attributes") or {}).get("productName") or ""),
        "memory_bytes": int(first.get("memory_bytes") or 0),
        "start": _number(seen.get("started_at")),
        "end": _number(seen.get("ended_at")),
        "peak": seen.get("peak_bytes") if isinstance(seen.get("peak_bytes"), int) else None,
        "peak_kind": str(seen.get("peak_kind") or ""),
        "sharing": dict((visible[0].get("sharing") if visible else None) or {}),
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _one_gpu(rows: Sequence[Object], namespace: str) -> Check:
    asked = f"Did all {len(rows)} jobs work on one and the same GPU, by one claim?"
    needed = "one UUID in every log and every recorded allocation, through one claim"
    uuids = {uuid for row in rows for uuid in [*row["logged"], *row["allocated"]]}
    claims = {claim.rpartition("/")[2] for row in rows for claim in row["claims"]}
    blind = [row["job"] for row in rows if len(row["logged"]) != 1 or len(row["allocated"]) != 1]
    evidence = {
        "jobs": [
            {
                **{key: row[key] for key in ("job", "node", "logged", "allocated", "claims")},
                "started": _clock(row["start"]),
                "ended": _clock(row["end"]),
            }
            for row in rows
        ]
    }
    if blind or len(uuids) != 1 or claims != {CLAIM}:
        per_job = "; ".join(
            f"{row['job']}: log {', '.join(row['logged']) or 'none'}, allocated "
            f"{', '.join(row['allocated']) or 'nothing'} by {', '.join(row['claims']) or 'no claim'}"
            for row in rows
        )
        return check(
            "one-gpu",
            asked,
            per_job or "no job",
            "fail",
            needed=needed,
            fix="see which claim the pods name; nothing else may give them a GPU",
            finding="not_one_gpu",
            evidence=evidence,
        )
    first = rows[0]
    found = (
        f"{next(iter(uuids))} ({first['product']}, {first['device']} on {first['node']}) in all {len(rows)} "
        f"logs and allocations, by claim {namespace}/{CLAIM}"
    )
    return check("one-gpu", asked, found, needed=needed, evidence=evidence)


def _clock(at: float | None) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at)) + f".{int(at * 10) % 10}" if at is not None else "?"


def _overlap(rows: Sequence[Object]) -> Check:
    asked = f"Did all {len(rows)} jobs train at one moment?"
    needed = "a moment at which every job was between its first and its last step"
    spans = "; ".join(f"{row['job']} {_clock(row['start'])} to {_clock(row['end'])}" for row in rows)
    evidence: Object = {"spans": {row["job"]: [row["start"], row["end"]] for row in rows}}
    if not rows or any(row["start"] is None or row["end"] is None for row in rows):
        return check(
            "overlap",
            asked,
            f"not every log tells when it trained: {spans or 'no job'}",
            "fail",
            needed=needed,
            fix="read the logs: their [proof] line has started_at and ended_at",
            finding="no_overlap",
            evidence=evidence,
        )
    begin, end = max(row["start"] for row in rows), min(row["end"] for row in rows)
    if begin >= end:
        return check(
            "overlap",
            asked,
            f"no: {spans}",
            "fail",
            needed=needed,
            fix=f"raise shared_seconds by more than {begin - end:.0f}: the jobs do not start together",
            finding="no_overlap",
            evidence=evidence,
        )
    found = f"for {end - begin:.1f} s, from {_clock(begin)} to {_clock(end)} UTC ({spans})"
    return check(
        "overlap", asked, found, needed=needed, evidence={**evidence, "seconds": round(end - begin, 3)}
    )


def _strategy(rows: Sequence[Object], strategy: str, interval: str) -> Check:
    """What the pods could see of the strategy: compute mode, time slice, the pipes of the MPS daemon."""
    seen = [row["sharing"] for row in rows]
    evidence = {"seen": {row["job"]: row["sharing"] for row in rows}}
    asked = f"Was the GPU shared by {strategy}" + (f" with interval {interval}?" if interval else "?")
    wanted_mode = _MODES_OF[strategy]
    wrong, unknown = [], []
    for row, one in zip(rows, seen):
        mode, pipe = str(one.get("compute_mode") or ""), str(one.get("mps_pipe_directory") or "")
        if mode and mode != wanted_mode:
            wrong.append(f"{row['job']} saw compute mode {mode}")
        if not mode:
            unknown.append("the compute mode")
        if strategy == MPS:
            if not pipe:
                wrong.append(f"{row['job']} has no CUDA_MPS_PIPE_DIRECTORY")
            elif not one.get("mps_daemon"):
                wrong.append(f"{row['job']} found no control daemon in {pipe}")
            continue
        if pipe:
            wrong.append(f"{row['job']} has CUDA_MPS_PIPE_DIRECTORY={pipe}")
        slice_seen = str(one.get("timeslice") or "")
        if slice_seen and slice_seen != (interval or "Default"):
            wrong.append(f"{row['job']} saw time slice {slice_seen}")
        if not slice_seen:
            unknown.append("the time slice")
    if strategy == MPS:
        needed = (
            f"compute mode {wanted_mode}, CUDA_MPS_PIPE_DIRECTORY and a control daemon behind it, in each pod"
        )
        found = f"each pod saw compute mode {wanted_mode} and the control daemon in " + ", ".join(
            sorted({str(one.get("mps_pipe_directory")) for one in seen})
        )
    else:
        needed = f"compute mode {wanted_mode} and time slice {interval or 'Default'} in each pod, no MPS"
        found = f"each pod saw compute mode {wanted_mode} and time slice {interval or 'Default'}"
    if wrong or not rows:
        return check(
            "strategy",
            asked,
            "; ".join(wrong) or "no job",
            "fail",
            needed=needed,
            fix="see the claim's config and the log of the plugin's container gpus; somebody else may have "
            "changed the GPU's settings meanwhile",
            finding="strategy_not_applied",
            evidence=evidence,
        )
    if unknown:
        what = " and ".join(sorted(set(unknown)))
        # Nothing was asked for that would have to show.
        vital = strategy == MPS or interval not in ("", "Default")
        return check(
            "strategy",
            asked,
            f"{what} cannot be read in the pods; nothing that can be read speaks against it",
            "warn" if vital else "pass",
            needed=needed,
            fix="on the node: nvidia-smi -q -d COMPUTE, nvidia-smi compute-policy -l",
            finding="strategy_unseen",
            evidence=evidence,
        )
    return check("strategy", asked, found, needed=needed, evidence=evidence)


def _memory(rows: Sequence[Object], strategy: str) -> Check:
    """Says plainly that nothing keeps the jobs out of each other's memory."""
    asked = "Is each job's memory its own?"
    peaks = [row["peak"] for row in rows]
    size = max((row["memory_bytes"] for row in rows), default=0)
    limits = (
        "MPS can limit what a client allocates (shared_mps) but a fault of one client ends all"
        if strategy == MPS
        else "the GPU's memory goes to whoever allocates first"
    )
    plain = f"No: memory is not isolated between these jobs; {limits}"
    evidence = {"peaks": {row["job"]: row["peak"] for row in rows}, "memory_bytes": size}
    if any(peak is None for peak in peaks) or not size:
        return check("memory", asked, f"{plain}. Not every log tells its peak", "warn", evidence=evidence)
    total = sum(peak for peak in peaks if peak is not None)
    host = " (resident memory of the processes: nothing ran on CUDA here)" if _on_host(rows) else ""
    found = f"{plain}. The peaks add up to {format_bytes(total)}{host} of the card's {format_bytes(size)}"
    if total > size:
        return check(
            "memory",
            asked,
            found,
            "warn",
            needed="peaks that fit the card together",
            fix="share the GPU among fewer jobs (shared_jobs), or give each a slice (gpu_slices_mode: mig)",
            finding="memory_overcommitted",
            evidence=evidence,
        )
    return check("memory", asked, found, needed="to be known: isolation needs MIG", evidence=evidence)


def _on_host(rows: Sequence[Object]) -> bool:
    return any(row["peak_kind"] != "cuda" for row in rows)


# ----------------------------------------------------------------------------------- the driver's MPS daemon


def daemons_of(deployments: Iterable[Object], claim_uid: str) -> list[Object]:
    """The Deployments that the driver made for a claim: their names carry its UID."""
    prefix = f"mps-control-daemon-{claim_uid}-"
    return [
        {
            "name": str(item["metadata"]["name"]),
            "namespace": str(item["metadata"]["namespace"]),
            "ready": int((item.get("status") or {}).get("readyReplicas") or 0),
        }
        for item in deployments
        if claim_uid and str(item["metadata"]["name"]).startswith(prefix)
    ]


def daemon_check(daemons: Sequence[Object]) -> Check:
    """The driver's control daemon, as it was seen while the jobs ran."""
    asked = "Does the driver run an MPS control daemon for the claim?"
    ready = [item for item in daemons if item["ready"] == 1]
    listed = ", ".join(f"{item['namespace']}/{item['name']} ({item['ready']} ready)" for item in daemons)
    if len(ready) == 1 and len(daemons) == 1:
        return check("mps-daemon", asked, f"Deployment {listed}", evidence={"daemons": list(daemons)})
    return check(
        "mps-daemon",
        asked,
        listed or "no Deployment mps-control-daemon-<UID of the claim>-... was seen",
        "fail",
        needed="one Deployment of the driver with one Ready pod",
        fix="see the Deployment's pod in the driver's namespace, and the log of the plugin's container gpus",
        finding="mps_daemon",
        evidence={"daemons": list(daemons)},
    )
