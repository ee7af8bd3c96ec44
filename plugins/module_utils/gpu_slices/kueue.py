"""Kueue as it is installed: its version, its DRA gate, its mappings, and whether it goes with Trainer.

Pure functions; controller only. *Facts* are what :func:`trim` makes of API objects::

    {"served": ["v1beta2", "v1beta1"],
     "guests": [names of ClusterQueues in our cohort that are not ours],
     "managers": [{"namespace", "name", "image", "version", "version_from", "container", "arguments",
                   "config_map", "config_key", "ready": bool}],
     "config": {"found": bool, "text": "...", "edited": "2026-12-01T12:00:00Z", "version": "resourceVersion"},
     "started": "2026-12-01T12:00:05Z"}

Checks are as in checks.py.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Mapping, Sequence

from . import kueue_config
from .checks import Check, check
from .kube_version import Version, at_least, parse_version, show
from .kueue_config import ConfigError
from .quantity import parse_quantity
from .resource_slices import DRIVER, profile_slug

Object = Dict[str, Any]

GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
# The cohort of our ClusterQueues (roles/quota/templates/queues.yaml.j2).
CONFIG_KEY = "controller_manager_config.yaml"
FIRST_WITH_DRA: Version = (0, 14)
_LABEL, _MANAGER = "app.kubernetes.io/managed-by", "gpu-slices"
_OLD_GATE, _NEW_GATE = "DynamicResourceAllocation", "KueueDRAIntegration"
_GATE_RENAMED: Version = (0, 18)

# From which release on Kueue writes which field of a TrainJob, and the Trainer whose API it was built with.
PAIRS: tuple[tuple[Version, str, str], ...] = (
    ((0, 14), "podSpecOverrides", "2.0"),
    ((0, 15), "podTemplateOverrides", "2.1"),
    ((0, 17), "runtimePatches", "2.2 or later"),
)
_TRAINER_OF = {field: trainer for _, field, trainer in PAIRS}
_KUEUE_OF = {
    "podSpecOverrides": "0.14",
    "podTemplateOverrides": "0.15 or 0.16",
    "runtimePatches": "0.17 or later",
}

_IMAGE_VERSION = re.compile(r":(v?\d+\.\d+\.\d+[^@]*)(@.*)?$")
_CHART_VERSION = re.compile(r"-(v?\d+\.\d+\.\d+.*)$")
_MANAGER_IMAGE = re.compile(r"(^|/)kueue(-manager|-controller)?([:@]|$)")


_SUBDOMAIN = re.compile(r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_LABEL_NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")


def input_faults(values: Mapping[str, Any]) -> list[str]:
    """Faults of the stage's variables that types do not show. ``values``: those that are set."""
    faults = []
    device_class = str(values.get("quota_device_class") or "")
    if device_class and not _SUBDOMAIN.match(device_class):
        faults.append(
            f"quota_device_class is '{device_class}': needed is the name of a DeviceClass, as "
            "mig-1g-6gb.example.com."
        )
    resource = str(values.get("quota_resource") or "")
    prefix, slash, name = resource.rpartition("/")
    if resource and not (_LABEL_NAME.match(name) and (not slash or _SUBDOMAIN.match(prefix))):
        faults.append(f"quota_resource is '{resource}': needed is a resource's name, as example.com/slice.")
    resources = values.get("quota_resources")
    if not isinstance(resources, Mapping):
        resources = {}  # The types are checked elsewhere.
    for part in ("requests", "limits"):
        given = resources.get(part) or {}
        if not isinstance(given, Mapping):
            faults.append(f"quota_resources.{part} is no mapping: write it like {{cpu: 250m, memory: 1Gi}}.")
            continue
        for key, amount in given.items():
            if str(key).startswith("nvidia.com/"):
                faults.append(
                    f"quota_resources.{part} holds {key}: the slice comes from the claim, and no other GPU "
                    "may be asked for."
                )
            try:
                parse_quantity(amount)
            except ValueError as error:
                faults.append(f"quota_resources.{part}.{key}: {error}.")
    odd = ", ".join(sorted(str(key) for key in set(resources) - {"requests", "limits"}))
    if odd:
        faults.append(f"quota_resources has {odd}: needed are requests and limits.")
    shared_memory = values.get("quota_shared_memory", "2Gi")
    try:
        parse_quantity(shared_memory)
    except ValueError as error:
        faults.append(f"quota_shared_memory: {error}.")
    hold, limit = values.get("quota_hold_seconds", 15), values.get("quota_timeout", 600)
    try:
        if float(hold) >= float(limit):
            faults.append(
                f"quota_hold_seconds is {hold} and quota_timeout {limit}: the jobs have to end within it."
            )
    except (TypeError, ValueError):
        pass  # The types are checked elsewhere.
    return faults


# ------------------------------------------------------------------------------------------------- trimming


def is_manager(deployment: Mapping[str, Any]) -> bool:
    """Whether a Deployment is Kueue's controller, by what runs in it and not by its name."""
    labels = (deployment.get("metadata") or {}).get("labels") or {}
    named = "kueue" in (labels.get("app.kubernetes.io/name"), labels.get("app.kubernetes.io/instance"))
    return any(
        _MANAGER_IMAGE.search(str(container.get("image", "")))
        or (named and any("--config" in argument for argument in _arguments(container)))
        for container in _containers(deployment)
    ) and not str((deployment.get("metadata") or {}).get("name", "")).startswith("kueue-viz")


def trim_manager(deployment: Mapping[str, Any]) -> Object:
    """The facts of Kueue's Deployment that matter here."""
    metadata, status = deployment["metadata"], deployment.get("status") or {}
    spec = deployment.get("spec") or {}
    containers = _containers(deployment)
    container = next(
        (c for c in containers if _MANAGER_IMAGE.search(str(c.get("image", "")))),
        next((c for c in containers if c.get("name") == "manager"), containers[0] if containers else {}),
    )
    arguments = _arguments(container)
    version, source = _version(str(container.get("image", "")), dict(metadata.get("labels") or {}))
    config_map, key = _config_source(deployment, container, arguments)
    wanted = _replicas(spec)
    return {
        "namespace": str(metadata["namespace"]),
        "name": str(metadata["name"]),
        "image": str(container.get("image", "")),
        "container": str(container.get("name", "")),
        "version": version,
        "version_from": source,
        "arguments": [str(argument) for argument in container.get("args") or []],
        "command": [str(argument) for argument in container.get("command") or []],
        "config_map": config_map,
        "config_key": key,
        "selector": dict((spec.get("selector") or {}).get("matchLabels") or {}),
        "ready": wanted > 0 and rolled_out(deployment),
        "state": f"{int(status.get('availableReplicas') or 0)} of {wanted} available",
        "helm": (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by") == "Helm",
    }


def rolled_out(deployment: Mapping[str, Any]) -> bool:
    """Whether a Deployment's newest pods are available and its older ones gone."""
    spec, status = deployment.get("spec") or {}, deployment.get("status") or {}
    wanted = _replicas(spec)
    observed = int(status.get("observedGeneration") or 0)
    counts = [int(status.get(k) or 0) for k in ("replicas", "updatedReplicas", "availableReplicas")]
    return observed >= int(deployment["metadata"].get("generation") or 0) and counts == [wanted] * 3


def _replicas(spec: Mapping[str, Any]) -> int:
    given = spec.get("replicas")
    return 1 if given is None else int(given)


def trim_config(config_map: Mapping[str, Any] | None, key: str) -> Object:
    """The configuration's text, and when its data was last written."""
    metadata = (config_map or {}).get("metadata") or {}
    data = (config_map or {}).get("data") or {}
    times = [
        str(entry.get("time") or "")
        for entry in metadata.get("managedFields") or []
        if "f:data" in (entry.get("fieldsV1") or {})
    ]
    return {
        "found": key in data,
        "text": str(data.get(key) or ""),
        "edited": max([*times, str(metadata.get("creationTimestamp") or "")]),
        "version": str(metadata.get("resourceVersion") or ""),
    }


def started(pods: Iterable[Mapping[str, Any]]) -> str:
    """When the oldest of Kueue's pods that are still at work started; "" if there is none."""
    times = [
        str((pod.get("status") or {}).get("startTime") or "")
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running"
        and not (pod.get("metadata") or {}).get("deletionTimestamp")
    ]
    return min(times) if times else ""


def cohort(namespace: str) -> str:
    """The cohort of the namespace's queues; the ClusterQueues are named after it too."""
    return f"{namespace}-quota"


def guests(queues: Iterable[Mapping[str, Any]], namespace: str) -> list[str]:
    """The ClusterQueues of our cohort that are not ours: what they lent or borrowed could be taken back."""
    found, ours = [], cohort(namespace)
    for item in queues:
        spec, labels = item.get("spec") or {}, item["metadata"].get("labels") or {}
        if ours in (spec.get("cohortName"), spec.get("cohort")) and labels.get(_LABEL) != _MANAGER:
            found.append(str(item["metadata"]["name"]))
    return sorted(found)


def _containers(deployment: Mapping[str, Any]) -> list[Object]:
    pod = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    return [dict(container) for container in pod.get("containers") or []]


def _arguments(container: Mapping[str, Any]) -> list[str]:
    return [str(item) for part in ("command", "args") for item in container.get(part) or []]


def _version(image: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Kueue's version and where it stands: the image's tag, else what the chart wrote into the labels."""
    found = _IMAGE_VERSION.search(image)
    if found:
        return found.group(1), "the image's tag"
    label = str(labels.get("app.kubernetes.io/version") or "")
    if re.match(r"^v?\d+\.\d+", label):
        return label, "the label app.kubernetes.io/version"
    chart = _CHART_VERSION.search(str(labels.get("helm.sh/chart") or ""))
    return (chart.group(1), "the label helm.sh/chart") if chart else ("", "")


def _config_source(
    deployment: Mapping[str, Any], container: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[str, str]:
    """The ConfigMap and its key that ``--config`` names, by the volume that is mounted there."""
    path = next((a.split("=", 1)[1] for a in arguments if a.startswith("--config=")), "")
    if not path and "--config" in arguments[:-1]:
        path = arguments[arguments.index("--config") + 1]
    pod = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    maps = {v.get("name"): (v.get("configMap") or {}).get("name", "") for v in pod.get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        where, name = str(mount.get("mountPath", "")), str(maps.get(mount.get("name")) or "")
        if name and path and (path == where or path.startswith(where.rstrip("/") + "/")):
            return name, str(mount.get("subPath") or path.rsplit("/", 1)[-1])
    return next((str(name) for name in maps.values() if name), ""), CONFIG_KEY


# --------------------------------------------------------------------------------------------------- judging


def gate_name(version: str) -> str:
    """The feature gate under which this release counts DRA devices; "" for one that cannot."""
    try:
        if not at_least(version, FIRST_WITH_DRA):
            return ""
        return _NEW_GATE if at_least(version, _GATE_RENAMED) else _OLD_GATE
    except ValueError:
        return _OLD_GATE


def gate(manager: Mapping[str, Any], config: Mapping[str, Any]) -> Object:
    """``{name, on, where}``: the gate, whether it is on, and what says so.

    ``where`` is arguments, configuration or default. Of an unknown release either name counts.
    """
    known = bool(manager["version"])
    names = [gate_name(str(manager["version"]))] if known else [_OLD_GATE, _NEW_GATE]
    given = kueue_config.argument_gates([*manager["command"], *manager["arguments"]])
    for where, states in (("arguments", given or {}), ("configuration", kueue_config.gates(config))):
        for name in names:
            if name in states:
                return {"name": name, "on": states[name], "where": where}
    on = bool(names[0] == _NEW_GATE)
    return {"name": names[0], "on": on, "where": "default"}


def pairing(version: str, written_field: str) -> Object:
    """Does this Kueue write the field that this Trainer reads? ``{ok, known, found, needed, fix}``.

    ``written_field`` is the override field in the installed TrainJob schema ("" if it has none).
    """
    try:
        number = parse_version(version)
        known = number >= FIRST_WITH_DRA
        field = max((since, name) for since, name, _ in PAIRS if since <= number)[1] if known else ""
    except ValueError:
        known, field = False, ""
    trainer = _TRAINER_OF.get(written_field, "of an unknown release")
    found = f"Kueue {version or 'of an unknown release'}, and Trainer {trainer} with " + (
        f"spec.{written_field}" if written_field else "no field for overrides"
    )
    if not known:
        return {"ok": written_field == PAIRS[-1][1], "known": False, "found": found, "field": "", "fix": ""}
    fix = (
        f"install Trainer {_TRAINER_OF[field]}"
        + (f", or Kueue {_KUEUE_OF[written_field]}" if written_field in _KUEUE_OF else "")
        + ": otherwise Kueue's change of the TrainJob is refused or lost when it admits it"
    )
    return {"ok": field == written_field, "known": True, "found": found, "field": field, "fix": fix}


def absent(facts: Mapping[str, Any] | None) -> str:
    """Why the stage has nothing to work with; "" if Kueue is there."""
    if not facts:
        return "nothing could be read about Kueue"
    if not facts["served"]:
        return f"Kueue is not installed: the API group {GROUP} is not served"
    return ""


def api_version(facts: Mapping[str, Any]) -> str:
    """``kueue.x-k8s.io/v1beta2``, or v1beta1 where that is all."""
    return f"{GROUP}/" + next((v for v in VERSIONS if v in facts.get("served", [])), VERSIONS[0])


def class_name(profile: str) -> str:
    """The name of the DeviceClass that holds the MIG profile's selector."""
    return f"mig-{profile_slug(profile)}.nvidia.com"


def resource_name(profile: str) -> str:
    """The name under which we let Kueue count the slices of a profile, if nobody chose another."""
    return f"gpu-slices.dev/mig-{profile_slug(profile)}"


def class_expression(profile: str) -> str:
    """The selector of that DeviceClass. Kueue refuses selectors in claims, so it stands here."""
    return (
        f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig' && "
        f"device.attributes['{DRIVER}'].profile == '{profile}'"
    )


def counted_as(facts: Mapping[str, Any], device_class: str) -> str:
    """The name under which Kueue counts a class now; "" if it does not."""
    try:
        return kueue_config.mappings(kueue_config.parse(facts["config"]["text"])).get(device_class, "")
    except (ConfigError, KeyError):
        return ""


def changes(facts: Mapping[str, Any], wanted: Mapping[str, str], configure: bool) -> Object:
    """What ``quota_kueue_configure`` has to do: ``{text, arguments, restart, said, fault}``.

    ``wanted``: DeviceClass -> resource name. ``text`` is the new configuration ("" if it stays),
    ``arguments`` the container's new arguments ([] if they stay), ``said`` the changes in words, ``fault``
    why they cannot be made.
    """
    plan: Object = {"text": "", "arguments": [], "restart": False, "said": [], "fault": ""}
    if not configure or absent(facts) or not facts["managers"] or not facts["config"]["found"]:
        return plan
    manager, old = facts["managers"][0], facts["config"]["text"]
    try:
        config, new = kueue_config.parse(old), old
        state = gate(manager, config)
        if not state["on"] and state["name"]:
            given = kueue_config.argument_gates(manager["arguments"])
            if state["where"] != "default":
                raise ConfigError(
                    f"{state['name']} is switched off in Kueue's {state['where']}: somebody meant that"
                )
            # Kueue does not start with gates in both places.
            if given is not None:
                plan["arguments"] = kueue_config.with_argument_gate(manager["arguments"], state["name"])
            else:
                new = kueue_config.with_gate(new, state["name"])
            plan["said"].append(f"the gate {state['name']}")
        for device_class, resource in wanted.items():
            if device_class not in kueue_config.mappings(config):
                new = kueue_config.with_mapping(new, resource, device_class)
                plan["said"].append(f"{device_class} counted as {resource}")
    except ConfigError as fault:
        return {**plan, "text": "", "arguments": [], "said": [], "fault": str(fault)}
    plan["text"] = new if new != old else ""
    plan["restart"] = bool(plan["said"]) or stale(facts)
    if stale(facts):
        plan["said"].append("a restart, so that Kueue reads what was edited")
    return plan


def stale(facts: Mapping[str, Any]) -> bool:
    """Whether the configuration was edited after Kueue had read it."""
    edited, begun = str(facts["config"].get("edited") or ""), str(facts.get("started") or "")
    return bool(edited and begun and begun < edited)


# ---------------------------------------------------------------------------------------------------- checks


def checks(
    facts: Mapping[str, Any],
    features: Mapping[str, Any],
    classes: Mapping[str, str],
    *,
    configure: bool = False,
    whole: bool = True,
) -> list[Check]:
    """What has to be right before a TrainJob can queue for slices.

    ``features``: of trainer_features(). ``classes``: DeviceClass -> the resource name it should get; with
    ``whole`` all of them have to be mapped, else one.
    """
    reason = absent(facts)
    if reason:
        asked = "Is Kueue installed?"
        return [check("kueue", asked, f"{reason}; nothing to prove", "skip", needed="Kueue 0.14 or later")]
    managers = facts["managers"]
    if len(managers) != 1:
        names = ", ".join(f"{m['namespace']}/{m['name']}" for m in managers)
        return [
            check(
                "kueue",
                "Is Kueue installed?",
                f"its API is served, and {'several controllers run: ' + names if names else 'no controller'}",
                "fail",
                needed="one Deployment of Kueue's controller",
                fix="install Kueue's controller once"
                if names
                else "install Kueue, or let this user list Deployments",
                finding="kueue_controller",
            )
        ]
    manager = managers[0]
    found = [_installed(facts, manager)]
    if found[0]["status"] == "fail":
        return found
    try:
        if not facts["config"]["found"]:
            place = f"{manager['namespace']}/{manager['config_map'] or '?'}"
            raise ConfigError(f"there is no key {manager['config_key']} in ConfigMap {place}")
        config = kueue_config.parse(facts["config"]["text"])
    except ConfigError as fault:
        return [
            *found,
            check(
                "kueue_config",
                "Can Kueue's configuration be read?",
                str(fault),
                "fail",
                needed="a Configuration in the ConfigMap that --config names",
                fix="give this user the right to read it, or correct it",
                finding="kueue_config_unread",
            ),
        ]
    plan = changes(facts, classes, configure)
    found += [
        _pairing(manager, features),
        _integration(config),
        _gate(manager, config, plan, configure),
        _mappings(config, classes, plan, configure=configure, whole=whole),
    ]
    if stale(facts):
        found.append(_stale(facts, configure))
    if facts.get("guests"):
        found.append(_guests(facts["guests"]))
    return found


def _guests(names: Sequence[str]) -> Check:
    return check(
        "kueue_cohort",
        "Is the cohort ours alone?",
        f"ClusterQueue {', '.join(names)} is in our cohort and not ours",
        "fail",
        needed="no other queue there: its jobs could be preempted by the proof",
        fix="move it to another cohort: kubectl edit clusterqueue",
        finding="kueue_cohort",
    )


def _installed(facts: Mapping[str, Any], manager: Mapping[str, Any]) -> Check:
    asked = "Is Kueue installed, with an API we can use?"
    name = f"Deployment {manager['namespace']}/{manager['name']}"
    version = f"{manager['version']} (by {manager['version_from']})" if manager["version"] else "unknown"
    evidence = {"image": manager["image"], "served": facts["served"], "arguments": manager["arguments"]}
    usable = [v for v in VERSIONS if v in facts["served"]]
    if not usable:
        return check(
            "kueue",
            asked,
            f"{GROUP} is served as {', '.join(facts['served'])}",
            "fail",
            needed=" or ".join(VERSIONS),
            fix="install Kueue 0.14 or later",
            finding="kueue_api",
            evidence=evidence,
        )
    if manager["version"] and not gate_name(manager["version"]):
        return check(
            "kueue",
            asked,
            f"{name}, version {version}",
            "fail",
            needed=f"{show(FIRST_WITH_DRA)} or later, which counts devices of claims",
            fix="upgrade Kueue (with a Trainer that goes with it, docs/quota.md)",
            finding="kueue_version",
            evidence=evidence,
        )
    if not manager["ready"]:
        return check(
            "kueue",
            asked,
            f"{name} is not available: {manager['state']}",
            "fail",
            needed="Kueue's controller at work",
            fix=f"see kubectl -n {manager['namespace']} describe deployment {manager['name']}",
            finding="kueue_not_ready",
            evidence=evidence,
        )
    return check(
        "kueue",
        asked,
        f"{name}, version {version}, {usable[0]}",
        "pass" if manager["version"] else "warn",
        needed="a version that can be read" if not manager["version"] else "",
        fix="tag the image with Kueue's version, or label the Deployment app.kubernetes.io/version"
        if not manager["version"]
        else "",
        finding="" if manager["version"] else "kueue_version_unknown",
        evidence=evidence,
    )


def _pairing(manager: Mapping[str, Any], features: Mapping[str, Any]) -> Check:
    asked = "Do Kueue and Kubeflow Trainer go together?"
    verdict = pairing(str(manager["version"]), str(features.get("pod_overrides") or ""))
    if verdict["ok"]:
        return check("kueue_trainer", asked, verdict["found"])
    if not verdict["known"]:
        return check(
            "kueue_trainer",
            asked,
            verdict["found"],
            "warn",
            needed="releases that are known to go together (docs/quota.md)",
            fix="tag Kueue's image with its version",
            finding="kueue_trainer_unknown",
        )
    return check(
        "kueue_trainer",
        asked,
        verdict["found"],
        "fail",
        needed=f"a Trainer whose TrainJob has spec.{verdict['field']}, which this Kueue writes",
        fix=verdict["fix"],
        finding="kueue_trainer_pair",
    )


def _integration(config: Mapping[str, Any]) -> Check:
    asked = "Does Kueue look after TrainJobs?"
    served = kueue_config.frameworks(config)
    if kueue_config.FRAMEWORK in served:
        return check("kueue_integration", asked, f"yes: {kueue_config.FRAMEWORK}")
    return check(
        "kueue_integration",
        asked,
        f"integrations.frameworks are {', '.join(served)}",
        "fail",
        needed=kueue_config.FRAMEWORK,
        fix=f"add {kueue_config.FRAMEWORK} there and restart Kueue; a TrainJob with a queue label would "
        "otherwise start at once, past every quota",
        finding="kueue_integration",
    )


def _gate(
    manager: Mapping[str, Any], config: Mapping[str, Any], plan: Mapping[str, Any], configure: bool
) -> Check:
    asked = "Does Kueue count devices of claims?"
    state = gate(manager, config)
    place = {
        "arguments": "in its arguments",
        "configuration": "in its configuration",
        "default": "by default",
    }[state["where"]]
    found = f"{state['name']} is {'on' if state['on'] else 'off'} {place}"
    if state["on"]:
        return check("kueue_gate", asked, found)
    if configure and not plan["fault"]:
        return check("kueue_gate", asked, f"{found}; this run switches it on")
    return check(
        "kueue_gate",
        asked,
        found + (f" ({plan['fault']})" if plan["fault"] else ""),
        "fail",
        needed=f"{state['name']}=true",
        fix=f"set controllerManager.featureGates [{{name: {state['name']}, enabled: true}}] in the chart's "
        f"values, or --feature-gates={state['name']}=true on the Deployment; or set "
        "quota_kueue_configure: true",
        finding="kueue_gate_off",
    )


def _mappings(
    config: Mapping[str, Any],
    classes: Mapping[str, str],
    plan: Mapping[str, Any],
    *,
    configure: bool,
    whole: bool,
) -> Check:
    asked = "Does Kueue count the slices' DeviceClass?"
    known = kueue_config.mappings(config)
    mapped = {name: known[name] for name in classes if name in known}
    missing = [name for name in classes if name not in known]
    evidence = {"mappings": known}
    other = sorted(r for r in set(mapped.values()) if kueue_config.counted_otherwise(config, r))
    if other:
        return check(
            "kueue_mapping",
            asked,
            f"{', '.join(other)} counts counters or capacity (sources)",
            "fail",
            needed="a mapping that counts devices",
            fix="map another class under a name without sources, and name it in quota_device_class",
            finding="kueue_mapping_sources",
            evidence=evidence,
        )
    hidden = sorted(r for r in {**classes, **mapped}.values() if kueue_config.excluded(config, r))
    if hidden:
        return check(
            "kueue_mapping",
            asked,
            f"{', '.join(hidden)} is left out of all quotas by resources.excludeResourcePrefixes",
            "fail",
            needed="a name that no excluded prefix matches",
            fix="take the prefix out of Kueue's configuration and restart it, or map the class otherwise",
            finding="kueue_mapping_excluded",
            evidence=evidence,
        )
    if classes and (not missing or (mapped and not whole)):
        listed = ", ".join(f"{name} as {known[name]}" for name in mapped)
        return check("kueue_mapping", asked, listed, evidence=evidence)
    if configure and not plan["fault"] and classes:
        added = ", ".join(f"{name} as {classes[name]}" for name in missing)
        return check("kueue_mapping", asked, f"not yet; this run adds {added}", evidence=evidence)
    if not classes:
        found = "no profile is chosen, so it is not known which class is to be counted"
        return check("kueue_mapping", asked, found, "skip", evidence=evidence)
    example = "; ".join(f"{{name: {classes[name]}, deviceClassNames: [{name}]}}" for name in missing[:2])
    return check(
        "kueue_mapping",
        asked,
        f"{', '.join(missing)} is not mapped"
        + (f" (mapped are {', '.join(sorted(known))})" if known else " (nothing is)")
        + (f"; {plan['fault']}" if plan["fault"] else ""),
        "fail",
        needed="a mapping in resources.deviceClassMappings",
        fix=f"add {example} to resources.deviceClassMappings of its configuration (in the chart's values "
        "managerConfig.controllerManagerConfigYaml) and restart Kueue; or set quota_kueue_configure: true",
        finding="kueue_deviceclass_unmapped",
        evidence=evidence,
    )


def _stale(facts: Mapping[str, Any], configure: bool) -> Check:
    asked = "Has Kueue read its present configuration?"
    found = f"it was edited at {facts['config']['edited']}, and Kueue started at {facts['started']}"
    if configure:
        return check("kueue_restart", asked, f"{found}; this run restarts it")
    return check(
        "kueue_restart",
        asked,
        found,
        "warn",
        needed="a start after the last edit: Kueue reads it once",
        fix="kubectl rollout restart its Deployment, or set quota_kueue_configure: true",
        finding="kueue_config_stale",
    )
