"""From cluster facts to the claim: which profile, which template, and whether there is anything to do."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Mapping

from .checks import check
from .cluster import MANAGED_BY, MANAGER
from .quantity import format_bytes, parse_bytes
from .resource_slices import DEVICE_CLASS_MIG, DRIVER, choose_slice, describe_profiles, profile_slug

Object = Dict[str, Any]

REQUEST = "gpu-slice"

_FIXES = {
    "facts_unreadable": "give this user the right to list them; before Kubernetes 1.34 upgrade the cluster",
    "class_missing": "let the driver's chart make it (--tags enable-driver)",
    "no_driver": "install or repair the DRA driver (--tags enable-driver)",
    "pool_incomplete": "wait for the driver, or restart its plugin pod",
    "slice_empty": "give the nodes a MIG layout (mig_config) and run --tags enable-driver",
    "no_mig": "give the nodes a MIG layout (mig_config) and run --tags enable-driver",
    "profile_not_published": "choose another profile (gpu_slices_profile), or change the layout (mig_config)",
    "none_big_enough": "ask for less (gpu_slices_memory), or cut larger slices (mig_config)",
    "too_few_free": "use fewer pods (sft_nodes), wait until more slices are free, or cut more (mig_config)",
    "devices_exhausted": "wait until a slice is free, or cut more",
    "node_excluded": "make these nodes schedulable, or tolerate their taints (gpu_slices_tolerations)",
}


def choice(
    facts: Object,
    profile: str,
    memory: str,
    layouts: Mapping[str, Iterable[str]] | None = None,
    *,
    tolerations: Iterable[Object] = (),
    predict: bool = False,
    count: int = 1,
    stage: str = "",
) -> Object:
    """Choose the profile from what is published; see :func:`resource_slices.choose_slice` for the answer.

    In check mode (``predict``) on a cluster where the layouts are still to be cut, the choice is made among
    the profiles that ``layouts`` (host -> profiles) will yield, and says so with ``predicted``.

    ``count`` slices of one profile are needed at the same time. What earlier pods of the same ``stage`` hold
    counts towards it (``ours``), for they are taken up again or removed; without enough, ``kind`` is
    too_few_free.
    """
    errors = facts.get("errors") or {}
    for question in ("slices", "claims", "namespace", "claim_templates"):
        if question not in facts:
            fault = errors.get(question) or {}
            reason = str(fault.get("message") or f"{question} could not be read")
            made = _nothing("facts_unreadable", reason)
            break
    else:
        slices = facts["slices"]
        made = choose_slice(
            slices["devices"],
            facts["claims"],
            facts.get("nodes") or {},
            profile,
            memory,
            driver_found=bool(slices["pools"]),
            tolerations=tolerations,
        )
        if made["profile"] and made["free"] < count:
            wish = (facts, profile, memory, list(tolerations))
            several = _choose_several(*wish, count=count, stage=stage)
            made = several or {**_too_few(*wish, count=count), "published": made["published"]}
        if slices["pools"] and DEVICE_CLASS_MIG not in facts.get("device_classes", [DEVICE_CLASS_MIG]):
            made = _nothing("class_missing", f"DeviceClass {DEVICE_CLASS_MIG} does not exist")
        if not made["profile"] and slices["incomplete"]:
            made = _nothing("pool_incomplete", "; ".join(slices["incomplete"]))
    made["predicted"] = False
    if predict and not made["profile"] and made["kind"] != "facts_unreadable":
        foreseen = _predict(profile, memory, layouts or {})
        # Slices that are there and taken will not be free after a run either.
        there = {device["profile"] for device in facts["slices"]["devices"]}
        if foreseen and not (made["kind"] in ("devices_exhausted", "too_few_free") and foreseen in there):
            return {**_nothing("", ""), "profile": foreseen, "predicted": True}
    return made


def _nothing(kind: str, reason: str) -> Object:
    return {"profile": "", "devices": [], "published": "none", "free": 0, "kind": kind, "reason": reason}


def _by_profile(facts: Object, profile: str, memory: str, claims: Any, tolerations: Any) -> list[Object]:
    """What choose_slice says of each profile that would do, smallest first; those with none free left out."""
    least = parse_bytes(memory) if profile == "auto" else 0
    devices = [d for d in facts["slices"]["devices"] if d["type"] == "mig" and d["memory_bytes"] >= least]
    sizes: dict[str, int] = {}
    for device in devices:
        if profile in ("auto", device["profile"]):
            sizes[device["profile"]] = min(
                device["memory_bytes"], sizes.get(device["profile"], device["memory_bytes"])
            )
    nodes = facts.get("nodes") or {}
    found = [
        choose_slice(devices, claims, nodes, name, memory, tolerations=tolerations)
        for name in sorted(sizes, key=lambda name: (sizes[name], name))
    ]
    return [made for made in found if made["profile"]]


def _choose_several(
    facts: Object, profile: str, memory: str, tolerations: list[Object], *, count: int, stage: str
) -> Object | None:
    """The smallest profile of which ``count`` are free or held by earlier pods of this stage."""
    namespace = facts["namespace"].get("name")
    others = [claim for claim in facts["claims"] if not _of_stage(claim, namespace, stage)]
    free = {
        made["profile"]: made for made in _by_profile(facts, profile, memory, facts["claims"], tolerations)
    }
    for made in _by_profile(facts, profile, memory, others, tolerations):
        if made["free"] >= count:
            now = free.get(made["profile"], {**made, "devices": [], "free": 0})
            listing = describe_profiles(d for d in facts["slices"]["devices"] if d["type"] == "mig")
            return {**made, "free": now["free"], "ours": made["free"] - now["free"], "published": listing}
    return None


def _of_stage(claim: Object, namespace: str, stage: str) -> bool:
    """Whether only pods of our own workload of this stage hold the claim; by their names, which we gave."""
    users = [str(user.get("name", "")) for user in (claim.get("status") or {}).get("reservedFor") or []]
    own = f"gpu-slices-{stage}-"
    return (
        bool(stage and users)
        and (claim.get("metadata") or {}).get("namespace") == namespace
        and all(user.startswith(own) for user in users)
    )


def _too_few(facts: Object, profile: str, memory: str, tolerations: list[Object], *, count: int) -> Object:
    free = _by_profile(facts, profile, memory, facts["claims"], tolerations)
    listed = ", ".join(f"{one['free']} of {one['profile']}" for one in free)
    wish = f"profile {profile}" if profile != "auto" else f"one profile with at least {memory}"
    reason = f"free are {listed}, and {count} slices of {wish} are needed at once"
    return _nothing("too_few_free", reason)


def _predict(profile: str, memory: str, layouts: Mapping[str, Iterable[str]]) -> str:
    """The profile that the layouts will yield; by the size in its name, as nothing better is known yet."""
    offered = {name for names in layouts.values() for name in names}
    if profile != "auto":
        return profile if profile in offered else ""
    sized = []
    for name in offered:
        match = re.match(r"^\d+g\.(\d+)gb", name)
        if match and int(match.group(1)) * 2**30 >= parse_bytes(memory):
            sized.append((int(match.group(1)), name))
    return min(sized)[1] if sized else ""


def choice_check(made: Object, profile: str, memory: str, required: bool, count: int = 1) -> Object:
    """The choice as one check: pass, skip with the reason, or fail when ``count`` slices are required."""
    wanted = f"profile {profile}" if profile != "auto" else f"at least {memory}"
    asked, needed = f"Is a slice with {wanted} free?", f"a free slice with {wanted}"
    if count > 1:
        alike = "" if profile != "auto" else ", all of one profile,"
        asked = f"Are {count} slices with {wanted}{alike} free?"
        needed = f"{count} free slices with {wanted}{alike.rstrip(',')}"
    if made["predicted"]:
        return check(
            "slice", asked, f"the layouts will yield {made['profile']}; none is published yet", "skip"
        )
    evidence = {"published": made["published"], "free": [device["device"] for device in made["devices"]]}
    if made["profile"]:
        size = format_bytes(made["devices"][0]["memory_bytes"])
        ours = f" and {made['ours']} held by earlier pods of this stage" if made.get("ours") else ""
        found = f"{made['free']} free of {made['profile']} ({size}){ours}; published: {made['published']}"
        return check("slice", asked, found, evidence=evidence)
    status = "fail" if required or made["kind"] == "facts_unreadable" else "skip"
    return check(
        "slice",
        asked,
        made["reason"],
        status,
        needed=needed,
        fix=_FIXES[made["kind"]],
        finding=made["kind"],
        evidence=evidence,
    )


def template_name(profile: str) -> str:
    """The name of the ResourceClaimTemplate for a profile. Its spec cannot change, so the name carries it."""
    return f"mig-{profile_slug(profile)}"


def template_plan(facts: Object, manifests: list[Object], *, check_mode: bool = False) -> Object:
    """What to do so that the manifests (a Namespace, a ResourceClaimTemplate) are in the cluster.

    Returns ``{"apply": [manifests to apply], "replace": bool, "foreign": ""|sentence}``. ``replace``: our own
    template is there with another spec, which the API refuses to change, so it is to be deleted first. In
    check mode nothing is applied into a namespace that does not exist yet.
    """
    plan: Object = {"apply": [], "replace": False, "foreign": ""}
    for manifest in manifests:
        metadata = manifest["metadata"]
        if manifest["kind"] == "Namespace":
            plan["apply"] += namespace_plan(facts["namespace"], manifest)
            continue
        what = difference(manifest, facts["claim_templates"].get(metadata["name"]))
        if what == "foreign":
            plan["foreign"] = (
                f"ResourceClaimTemplate {metadata['namespace']}/{metadata['name']} exists and is not ours"
            )
        elif what:
            plan["replace"] = plan["replace"] or what == "spec"
            if may_apply(what, facts["namespace"], check_mode):
                plan["apply"].append(manifest)
    return plan


def namespace_plan(live: Object, manifest: Object) -> list[Object]:
    """The manifest of a namespace, if that is not there, or ours and without a label. ``live``: a fact."""
    ours = live["labels"].get(MANAGED_BY) == MANAGER
    wanted = not live["found"] or (ours and not covers(manifest["metadata"]["labels"], live["labels"]))
    return [manifest] if wanted else []


def difference(manifest: Object, live: Object | None) -> str:
    """How an object {spec, labels} is not yet as rendered: absent, foreign, spec, labels; "": it is."""
    if live is None:
        return "absent"
    if live["labels"].get(MANAGED_BY) != MANAGER:
        return "foreign"
    if not covers(manifest["spec"], live["spec"]):
        return "spec"
    return "" if covers(manifest["metadata"]["labels"], live["labels"]) else "labels"


def may_apply(what: str, namespace: Object, check_mode: bool) -> bool:
    """Whether a dry run can be asked for: not in a namespace that is to come, nor over another spec."""
    return not check_mode or what == "labels" or (what == "absent" and namespace["found"])


def claim_checks(
    made: Object, plan: Object, profile: str, memory: str, required: bool, *, count: int = 1
) -> list[Object]:
    """The choice, and the template that goes with it, as checks."""
    checks = [choice_check(made, profile, memory, required, count)]
    if not made["profile"]:
        return checks
    name = template_name(made["profile"])
    asked = f"Is the claim template {name} ours to use?"
    if plan["foreign"]:
        checks.append(
            check(
                "template",
                asked,
                plan["foreign"],
                "fail",
                needed="no such object, or one of ours",
                fix="rename or remove it, or choose another gpu_slices_namespace",
                finding="name_taken",
            )
        )
    else:
        kinds = [manifest["kind"] for manifest in plan["apply"]]
        does = (
            "is replaced"
            if plan["replace"]
            else "is applied"
            if "ResourceClaimTemplate" in kinds
            else "is there"
        )
        checks.append(check("template", asked, f"it {does}"))
    return checks


def covers(wanted: Any, live: Any) -> bool:
    """Whether ``live`` says all that ``wanted`` says; the server adds defaults of its own."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and covers(value, live[key]) for key, value in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(live, (list, tuple))
            and len(wanted) == len(live)
            and all(covers(left, right) for left, right in zip(wanted, live))
        )
    return bool(wanted == live)


def result(made: Object, skip_reason: str = "") -> Object:
    """What the stages that use a slice are told (the fact ``slice_claim_result``)."""
    keys = (
        "node",
        "pool",
        "device",
        "uuid",
        "parent_uuid",
        "memory_bytes",
        "product",
        "attributes",
        "capacity",
    )
    return {
        "profile": made["profile"],
        "template": template_name(made["profile"]) if made["profile"] else "",
        "request": REQUEST,
        "device_class": DEVICE_CLASS_MIG,
        "driver": DRIVER,
        "free": made["free"],
        "devices": [{key: device[key] for key in keys} for device in made["devices"]],
        "published": made["published"],
        "predicted": made["predicted"],
        "skip_reason": skip_reason or ("" if made["profile"] else made["reason"]),
    }
