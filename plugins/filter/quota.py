"""Filters of the stage quota: names and quantities, the jobs to be played, and the checks of Kueue."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import claim, kueue, managed, preflight, quantity
from gpu_slices.checks import check
from gpu_slices.resource_slices import profile_slug


def classes(
    facts: Mapping[str, Any], device_class: str, profile: str = "", resource: str = ""
) -> dict[str, str]:
    """The DeviceClass, and the name by which Kueue counts it or shall count it."""
    return {device_class: kueue.counted_as(facts, device_class) or resource or kueue.resource_name(profile)}


def checks(
    facts: Mapping[str, Any], wanted: Mapping[str, str], configure: bool = False, own_class: str = ""
) -> list[Any]:
    """Can Kueue, as it is or will be, count these classes? ``own_class`` has to be there already."""
    unread = preflight.unread_check(dict(facts), "kueue", "kueue", "Is Kueue installed?")
    if unread:
        return [unread]
    found = _asked(facts, wanted, configure)
    if own_class and own_class not in facts.get("device_classes", [own_class]):
        found.append(
            check(
                "class",
                "Is the DeviceClass that quota_device_class names there?",
                f"there is no DeviceClass {own_class}",
                "fail",
                needed="the class, with the selector of the profile",
                fix="create it, or leave quota_device_class empty",
                finding="class_missing",
            )
        )
    return found


def _asked(facts: Mapping[str, Any], wanted: Mapping[str, str], configure: bool) -> list[Any]:
    features = (facts.get("trainer") or {}).get("features") or {}
    return kueue.checks(facts.get("kueue") or {}, features, wanted, configure=configure)


def slices(made: dict[str, Any], profile: str, memory: str, required: bool, count: int) -> dict[str, Any]:
    """The choice of slices as a check, in the words of this stage."""
    found = claim.choice_check(made, profile, memory, required, count)
    if made.get("kind") == "too_few_free":
        found["fix"] = (
            "lower quota_team_a or quota_team_b, wait until more slices are free, or cut more (mig_config)"
        )
    return found


def profiles(devices: Iterable[Mapping[str, Any]], chosen: str = "") -> list[str]:
    """Every MIG profile that is published, and the chosen one."""
    published = {str(device["profile"]) for device in devices if device.get("type") == "mig"}
    return sorted(published | ({chosen} if chosen else set()))


def covered(resources: Mapping[str, Any], jobs: int) -> dict[str, str]:
    """What ``jobs`` pods ask for together, resource by resource; a limit counts where no request is made."""
    needs = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    total = {}
    for name in sorted(needs):
        try:
            amount = quantity.parse_quantity(needs[name]) * jobs
        except ValueError as fault:
            raise AnsibleFilterError(f"quota_resources: {name}: {fault}") from None
        total[str(name)] = quantity.format_quantity(amount, needs[name])
    return total


def usable(namespace: Mapping[str, Any]) -> bool:
    """Whether the namespace is still to be made or is ours: somebody else's gets no label of ours."""
    return not namespace["found"] or managed.ours({"metadata": namespace})


def named(manifests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each of the objects would be found, for cluster_facts; without the namespace."""
    found = []
    for manifest in manifests:
        kind, metadata, version = manifest["kind"], manifest["metadata"], str(manifest["apiVersion"])
        if kind == "Namespace":
            continue
        space = str(metadata.get("namespace") or "")
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        plural = f"{kind.lower()}{'es' if kind.endswith('s') else 's'}"
        place = f"{base}/namespaces/{space}" if space else base
        found.append(
            {
                "id": f"{kind}/{metadata['name']}",
                "kind": kind,
                "namespace": space,
                "name": metadata["name"],
                "path": f"{place}/{plural}/{metadata['name']}",
            }
        )
    return found


def runtime(manifests: Iterable[Mapping[str, Any]], grace: int) -> list[dict[str, Any]]:
    """The objects with a grace period in the runtime's pods: a preempted pod must not hold its slice."""
    made = [copy.deepcopy(dict(manifest)) for manifest in manifests]
    for manifest in made:
        if manifest["kind"] == "TrainingRuntime":
            for job in manifest["spec"]["template"]["spec"]["replicatedJobs"]:
                job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = grace
    return made


def jobs(draft: Mapping[str, Any], name: str, borrowers: int, hold: int) -> list[dict[str, Any]]:
    """The jobs in the order of their creation: ``{id, manifest}``.

    Those that fill the quota train for ``hold`` seconds, all from the queue of one team.
    """
    parts = [
        *((f"borrower-{number}", "team-b", "low", hold) for number in range(1, borrowers + 1)),
        ("waiting", "team-b", "low", 0),
        ("urgent", "team-a", "high", 0),
    ]
    made = []
    for identity, team, level, seconds in parts:
        manifest = copy.deepcopy(dict(draft))
        manifest["metadata"]["name"] = f"{name}-{identity}"
        manifest["metadata"]["labels"].update(
            {
                "kueue.x-k8s.io/queue-name": f"gpu-slices-quota-{team}",
                "kueue.x-k8s.io/priority-class": f"gpu-slices-quota-{level}",
            }
        )
        # Without Kueue nothing would start.
        manifest["spec"]["suspend"] = True
        if seconds:
            # Follows the arguments of the runtime's command.
            manifest["spec"]["trainer"]["args"] = [f"--min-seconds={seconds}"]
        made.append({"id": identity, "manifest": manifest})
    return made


class FilterModule:
    """What the role quota renders and judges."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "quota_class": kueue.class_name,
            "quota_cohort": kueue.cohort,
            "quota_expression": kueue.class_expression,
            "quota_slug": profile_slug,
            "quota_api": kueue.api_version,
            "quota_absent": kueue.absent,
            "quota_classes": classes,
            "quota_kueue": checks,
            "quota_slices": slices,
            "quota_profiles": profiles,
            "quota_covered": covered,
            "quota_usable": usable,
            "quota_named": named,
            "quota_names": preflight.names_check,
            "quota_runtime": runtime,
            "quota_jobs": jobs,
        }
