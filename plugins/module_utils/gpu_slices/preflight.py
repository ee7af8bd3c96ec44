"""Facts of a cluster in, checks out: may the stages run, and if not, why and what to do.

Checks are as in checks.py.

``facts`` is what :func:`cluster.read` returns, ``settings``::

    {"nodes": [Kubernetes node names], "stages": [...], "namespace": "gpu-slices", "namespace_create": True,
     "driver_install": False, "driver_namespace": "…", "mig_manage": True,
     "profiles": ["1g.6gb"], "mode": "mig" | "shared", "strategy": "TimeSlicing" | "MPS"}
"""

from __future__ import annotations

from typing import Any, Dict, Iterable

from . import kueue
from .callers import VOLCANO_GROUP
from .checks import Check, check
from .cluster import (
    DRA_GROUP,
    DRA_RESOURCES,
    KUEUE_NAMESPACE,
    MANAGED_BY,
    MANAGER,
    PLUGIN_CONTAINER,
    PLUGIN_NAMESPACE,
)
from .driver_gates import GATES, MPS, RESET, is_on, read_gates, setting
from .kube_version import KUBERNETES_ADVISED, KUBERNETES_NEEDED, kubernetes_verdict, runtime_cdi, show
from .resource_slices import profile_slug

Object = Dict[str, Any]

_READ = ("get", "list", "watch")
_WRITE = ("get", "create", "patch", "delete")
# Whoever hands out rights that he does not hold himself needs these two as well.
_GRANT = (*_WRITE, "escalate", "bind")
# Stages that run pods in our namespace, and those of them that do it through Kubeflow Trainer.
WORKLOADS = {"smoke", "sft", "crowd", "shared", "quota", "callers", "recipe"}
TRAINJOBS = {"sft", "crowd", "shared", "quota", "recipe"}
# (verbs, API group, resource, where); where is "" for the whole cluster, "own" for the workloads' namespace,
# "driver" for that of the driver, "kueue" for that of Kueue, "isolation" for that of the root pod.
_Right = Any
_CLAIMING: list[_Right] = [
    ((*_WRITE, *_READ), DRA_GROUP, "resourceclaimtemplates", "own"),
    (_READ, DRA_GROUP, "resourceclaims", "own"),
    (_WRITE, "", "configmaps", "own"),
    (_READ, "", "pods", "own"),
    (("get",), "", "pods/log", "own"),
    (_READ, "", "events", "own"),
]
_TRAINING: list[_Right] = [
    *_CLAIMING,
    (_WRITE, "trainer.kubeflow.org", "trainingruntimes", "own"),
    ((*_WRITE, *_READ), "trainer.kubeflow.org", "trainjobs", "own"),
    (("get", "list"), "jobset.x-k8s.io", "jobsets", "own"),
]
RIGHTS: dict[str, list[_Right]] = {
    "preflight": [
        (("list",), "", "nodes", ""),
        (("list",), "apps", "daemonsets", ""),
        (("list",), DRA_GROUP, "deviceclasses", ""),
        (("list",), DRA_GROUP, "resourceslices", ""),
        (("list",), DRA_GROUP, "resourceclaims", ""),
        (("get",), "", "namespaces", ""),
        (("get",), "apiextensions.k8s.io", "customresourcedefinitions", ""),
    ],
    "enable-driver": [
        (("get", "patch"), "", "nodes", ""),
        (("list", "delete"), "", "pods", "driver"),
        (("get",), "", "pods/log", "driver"),
        (("list",), "", "events", "driver"),
    ],
    "driver_install": [
        ((*_WRITE, "list"), "", "secrets", "driver"),
        (_WRITE, "", "serviceaccounts", "driver"),
        (_WRITE, "apps", "daemonsets", "driver"),
        (_GRANT, "rbac.authorization.k8s.io", "roles", "driver"),
        (_WRITE, "rbac.authorization.k8s.io", "rolebindings", "driver"),
        (_GRANT, "rbac.authorization.k8s.io", "clusterroles", ""),
        (_WRITE, "rbac.authorization.k8s.io", "clusterrolebindings", ""),
        (_WRITE, DRA_GROUP, "deviceclasses", ""),
        (_WRITE, "admissionregistration.k8s.io", "validatingadmissionpolicies", ""),
        (_WRITE, "admissionregistration.k8s.io", "validatingadmissionpolicybindings", ""),
        (("create",), "apiextensions.k8s.io", "customresourcedefinitions", ""),
        (("create", "patch"), "", "namespaces", ""),
    ],
    "namespace_create": [(("create", "patch"), "", "namespaces", "")],
    "smoke": [*_CLAIMING, (_WRITE, "", "pods", "own")],
    "sft": _TRAINING,
    "crowd": [*_TRAINING, (_WRITE, "", "pods", "own")],
    "crowd_root": [
        ((*_WRITE, "list"), DRA_GROUP, "resourceclaimtemplates", "isolation"),
        (_READ, DRA_GROUP, "resourceclaims", "isolation"),
        (_WRITE, "", "configmaps", "isolation"),
        ((*_WRITE, *_READ), "", "pods", "isolation"),
        (("get",), "", "pods/log", "isolation"),
        (_READ, "", "events", "isolation"),
    ],
    "shared": [*_TRAINING, (_WRITE, DRA_GROUP, "resourceclaims", "own")],
    "shared_mps": [(("list",), "apps", "deployments", "driver")],
    "quota": [
        *_TRAINING,
        (("list",), "apps", "deployments", ""),
        (("get",), "", "configmaps", "kueue"),
        (("list",), "", "pods", "kueue"),
        ((*_WRITE, "list"), DRA_GROUP, "deviceclasses", ""),
        ((*_WRITE, "list"), kueue.GROUP, "resourceflavors", ""),
        ((*_WRITE, "list"), kueue.GROUP, "clusterqueues", ""),
        ((*_WRITE, "list"), kueue.GROUP, "workloadpriorityclasses", ""),
        ((*_WRITE, "list"), kueue.GROUP, "localqueues", "own"),
        (_READ, kueue.GROUP, "workloads", "own"),
    ],
    "kueue_configure": [
        (("get", "patch"), "", "configmaps", "kueue"),
        (("get", "patch"), "apps", "deployments", "kueue"),
    ],
    "callers": [
        *_CLAIMING,
        (_WRITE, "", "pods", "own"),
        ((*_WRITE, *_READ), "batch", "jobs", "own"),
        ((*_WRITE, *_READ), "batch", "cronjobs", "own"),
        ((*_WRITE, *_READ), VOLCANO_GROUP, "jobs", "own"),
    ],
    "recipe": [*_TRAINING, (_WRITE, "", "persistentvolumeclaims", "own")],
}


def needed_rights(settings: Object) -> list[Object]:
    """The rights that the chosen stages use, as attributes of SelfSubjectAccessReviews, each once."""
    stages = ["preflight", *settings["stages"]]
    groups = list(stages)
    if "enable-driver" in stages and settings.get("driver_install"):
        groups.append("driver_install")
    if "shared" in stages and settings.get("strategy") == MPS:
        groups.append("shared_mps")
    if settings.get("namespace_create") and WORKLOADS & set(stages):
        groups.append("namespace_create")
        if "crowd" in stages and settings.get("isolation_namespace"):
            groups.append("crowd_root")
    if "quota" in stages and settings.get("kueue_configure"):
        groups.append("kueue_configure")
    places = {
        "": "",
        "own": str(settings.get("namespace", "")),
        # Somebody else's driver may be in any namespace: that is looked up when the rights are asked for.
        "driver": str(settings["driver_namespace"]) if settings.get("driver_install") else PLUGIN_NAMESPACE,
        "kueue": KUEUE_NAMESPACE,
        "isolation": str(settings.get("isolation_namespace") or ""),
    }
    rights: dict[tuple[str, str, str, str], Object] = {}
    for group in groups:
        for verbs, api_group, resource, where in RIGHTS.get(group, []):
            for verb in verbs:
                key = (verb, api_group, resource, places[where])
                rights[key] = dict(zip(("verb", "group", "resource", "namespace"), key))
    return list(rights.values())


def named_objects(settings: Object) -> list[Object]:
    """The objects whose names this run is going to use and that can be known beforehand.

    ``settings["profiles"]`` are the profiles a claim may ask for. Each is ``{id, kind, namespace, name,
    path}``.
    """
    namespace = settings["namespace"]
    dra = f"/apis/{DRA_GROUP}/v1"
    wanted = {
        ("ResourceClaimTemplate", f"mig-{profile_slug(p)}", dra) for p in settings.get("profiles") or []
    }
    if "shared" in settings["stages"]:
        wanted.add(("ResourceClaim", "gpu-slices-shared", dra))
    for stage in WORKLOADS.intersection(settings["stages"]):
        wanted.add(("ConfigMap", f"gpu-slices-{stage}", "/api/v1"))
        if stage == "callers":
            wanted.add(("CronJob", "gpu-slices-callers", "/apis/batch/v1"))
        if stage == "crowd":
            wanted.add(("ConfigMap", "gpu-slices-crowd-isolation", "/api/v1"))
        if stage in TRAINJOBS:
            wanted.add(("TrainingRuntime", f"gpu-slices-{stage}", "/apis/trainer.kubeflow.org/v1alpha1"))
    return [
        {
            "id": f"{kind}/{name}",
            "kind": kind,
            "namespace": namespace,
            "name": name,
            "path": f"{base}/namespaces/{namespace}/{kind.lower()}s/{name}",
        }
        for kind, name, base in sorted(wanted)
    ] + (_quota_objects(settings) if "quota" in settings["stages"] else [])


def _quota_objects(settings: Object) -> list[Object]:
    """The objects of the stage quota that are not of every stage; most have no namespace."""
    dra, queues = f"/apis/{DRA_GROUP}/v1", f"/apis/{kueue.GROUP}/{kueue.VERSIONS[0]}"
    profiles = settings.get("profiles") or []
    own = str(settings["namespace"])
    classes = [] if settings.get("kueue_class") else [kueue.class_name(p) for p in profiles]
    teams = [f"gpu-slices-quota-{team}" for team in ("team-a", "team-b")]
    levels = [f"gpu-slices-quota-{level}" for level in ("low", "high")]
    wanted = [
        *(("DeviceClass", name, f"{dra}/deviceclasses", "") for name in classes),
        *(
            (
                "ResourceClaimTemplate",
                f"gpu-slices-quota-{profile_slug(p)}",
                f"{dra}/namespaces/{own}/resourceclaimtemplates",
                own,
            )
            for p in profiles
        ),
        ("ResourceFlavor", "gpu-slices-quota", f"{queues}/resourceflavors", ""),
        *(
            ("ClusterQueue", f"{kueue.cohort(own)}-{team}", f"{queues}/clusterqueues", "")
            for team in ("team-a", "team-b")
        ),
        *(("LocalQueue", name, f"{queues}/namespaces/{own}/localqueues", own) for name in teams),
        *(("WorkloadPriorityClass", name, f"{queues}/workloadpriorityclasses", "") for name in levels),
    ]
    return [
        {
            "id": f"{kind}/{name}",
            "kind": kind,
            "namespace": where,
            "name": name,
            "path": f"{collection}/{name}",
        }
        for kind, name, collection, where in wanted
    ]


# -------------------------------------------------------------------------------------------------- checks


def preflight_checks(facts: Object, settings: Object) -> list[Check]:
    """Every check of gate 2, in the order in which a person would make them."""
    stages = set(settings["stages"])
    checks = [_api(facts)]
    nodes = _nodes(facts, settings)
    checks += [_nodes_ready(facts, settings), _kubelets(nodes), _runtimes(nodes), _rights(facts)]
    if stages & {"enable-driver", *WORKLOADS}:
        checks.append(_driver(facts, settings))
        checks.append(_owners(facts, nodes))
    if "shared" in stages:
        checks.append(sharing_check(facts, settings))
    if "enable-driver" in stages and settings.get("mig_manage"):
        checks.append(_static(facts, settings))
    if stages & WORKLOADS:
        checks.append(_namespace(facts, settings))
        checks.append(_names(facts, settings))
    if stages & TRAINJOBS:
        checks.append(_trainer(facts))
    if "quota" in stages:
        checks += _quota(facts, settings)
    return checks


def unread_check(facts: Object, question: str, identity: str, asked: str) -> Check | None:
    """A check for facts that could not be read, or None when they are there."""
    if question in facts:
        return None
    fault = (facts.get("errors") or {}).get(question) or {}
    return check(
        identity,
        asked,
        str(fault.get("message") or "nothing could be read"),
        "fail",
        needed=f"an answer about {question}",
        fix="give this kubeconfig's user the right to read it",
        finding="facts_unreadable",
    )


def _api(facts: Object) -> Check:
    asked = f"Does the API server serve {DRA_GROUP}/v1?"
    unread = unread_check(facts, "apis", "dra_api", asked)
    if unread:
        return unread
    version = str((facts.get("version") or {}).get("git", "?"))
    served = facts["apis"]["groups"].get(DRA_GROUP, [])
    missing = sorted(set(DRA_RESOURCES) - set(facts["apis"]["dra_v1_resources"]))
    evidence = {"server": version, "served": served, "resources": facts["apis"]["dra_v1_resources"]}
    needed = f"{DRA_GROUP}/v1 with {', '.join(DRA_RESOURCES)}"
    fix = "upgrade the cluster to Kubernetes 1.34 or later (1.34.2 for NVIDIA's driver)"
    if "v1" not in served:
        only = " and ".join(served) if served else "no version of it"
        return check(
            "dra_api",
            asked,
            f"{version} serves {only}",
            "fail",
            needed=needed,
            fix=fix,
            finding="api_v1_missing",
            evidence=evidence,
        )
    if missing:
        return check(
            "dra_api",
            asked,
            f"{version} serves v1 without {', '.join(missing)}",
            "fail",
            needed=needed,
            fix="look for an API server flag --runtime-config that switches them off",
            finding="api_v1_missing",
            evidence=evidence,
        )
    return check("dra_api", asked, f"{version} serves v1 with all four resources", evidence=evidence)


def _nodes(facts: Object, settings: Object) -> list[Object]:
    known = facts.get("nodes") or {}
    return [known[name] for name in settings["nodes"] if name in known]


def _nodes_ready(facts: Object, settings: Object) -> Check:
    asked = "Are the inventory's GPU nodes in the cluster and Ready?"
    unread = unread_check(facts, "nodes", "nodes", asked)
    if unread:
        return unread
    known = facts["nodes"]
    missing = [name for name in settings["nodes"] if name not in known]
    broken = [node for node in _nodes(facts, settings) if not node["ready"]]
    evidence = {"wanted": list(settings["nodes"]), "cluster": sorted(known)}
    if missing:
        return check(
            "nodes",
            asked,
            f"not in the cluster: {', '.join(missing)} (its nodes: {', '.join(sorted(known)) or 'none'})",
            "fail",
            needed="a Node for each host",
            fix="correct the inventory; where names differ set gpu_slices_node_name for the host",
            finding="node_missing",
            evidence=evidence,
        )
    if broken:
        found = "; ".join(f"{node['name']} is not Ready ({node['not_ready_reason']})" for node in broken)
        return check(
            "nodes",
            asked,
            found,
            "fail",
            needed="Ready nodes",
            fix="bring the kubelet there up",
            finding="node_not_ready",
            evidence=evidence,
        )
    return check("nodes", asked, f"{', '.join(settings['nodes'])}: Ready", evidence=evidence)


def _kubelets(nodes: list[Object]) -> Check:
    asked = f"Is every kubelet at least {show(KUBERNETES_NEEDED)}?"
    verdicts = {node["name"]: (node["kubelet"], kubernetes_verdict(node["kubelet"])) for node in nodes}
    evidence = {name: version for name, (version, _) in verdicts.items()}
    low = [f"{name} {version}" for name, (version, verdict) in verdicts.items() if verdict == "fail"]
    edge = [f"{name} {version}" for name, (version, verdict) in verdicts.items() if verdict == "warn"]
    if low:
        return check(
            "kubelets",
            asked,
            ", ".join(low),
            "fail",
            needed=f"{show(KUBERNETES_NEEDED)} or later",
            fix="upgrade these nodes",
            finding="version_floor",
            evidence=evidence,
        )
    if edge:
        return check(
            "kubelets",
            asked,
            f"{', '.join(edge)}: below what NVIDIA's driver documents",
            "warn",
            needed=f"{show(KUBERNETES_ADVISED)} or later",
            fix="upgrade these nodes when you can",
            finding="version_floor",
            evidence=evidence,
        )
    if not nodes:
        return check("kubelets", asked, "none of the nodes could be looked at", "skip")
    return check("kubelets", asked, _each(evidence), evidence=evidence)


def _runtimes(nodes: list[Object]) -> Check:
    asked = "Does every container runtime inject CDI devices?"
    verdicts = {node["name"]: runtime_cdi(node["runtime"]) for node in nodes}
    evidence = {node["name"]: node["runtime"] for node in nodes}
    for status, fix in (
        ("fail", "use containerd 2.x or CRI-O"),
        (
            "warn",
            "set enable_cdi = true and cdi_spec_dirs = [/etc/cdi, /var/run/cdi] there, or use containerd 2.x",
        ),
    ):
        wrong = [f"{name}: {reason}" for name, (verdict, reason) in verdicts.items() if verdict == status]
        if wrong:
            return check(
                "runtimes",
                asked,
                "; ".join(wrong),
                status,
                needed="a runtime with CDI on",
                fix=fix,
                finding="runtime_cdi",
                evidence=evidence,
            )
    if not nodes:
        return check("runtimes", asked, "none of the nodes could be looked at", "skip")
    return check("runtimes", asked, _each(evidence), evidence=evidence)


def _each(values: Object) -> str:
    """``a30, h200: v1.36.3``: names that share a value together."""
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(str(value), []).append(name)
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in by_value.items())


def _rights(facts: Object) -> Check:
    asked = "May this user do what the chosen stages do?"
    unread = unread_check(facts, "access", "rights", asked)
    if unread:
        return unread
    rights = facts["access"]
    served = (facts.get("apis") or {}).get("groups") or {}
    # Where Volcano is not installed nothing is asked of it.
    missing = {VOLCANO_GROUP} - set(served)
    denied = [right for right in rights if not right["allowed"] and right["group"] not in missing]
    if not denied:
        return check(
            "rights", asked, f"all {len(rights)} rights are granted", evidence={"asked": len(rights)}
        )
    by_resource: dict[tuple[str, str, str], list[str]] = {}
    for right in denied:
        key = (right["group"], right["resource"], right["namespace"])
        by_resource.setdefault(key, []).append(right["verb"])
    lines = [
        f"{'/'.join(verbs)} {resource}{'.' + group if group else ''}{' in ' + place if place else ''}"
        for (group, resource, place), verbs in by_resource.items()
    ]
    return check(
        "rights",
        asked,
        f"refused: {'; '.join(lines)}",
        "fail",
        needed="these rights",
        fix="bind them to this user (docs/rights.md), or leave the stages out by tags",
        finding="rights_missing",
        evidence={"refused": lines},
    )


def _driver(facts: Object, settings: Object) -> Check:
    asked = "Is NVIDIA's DRA driver there, or will this run install it?"
    unread = unread_check(facts, "daemonsets", "driver", asked)
    if unread:
        return unread
    found = [item for item in facts["daemonsets"] if item["role"] == "dra"]
    serving = [item for item in found if PLUGIN_CONTAINER in item["containers"]]
    names = [f"{item['namespace']}/{item['name']}" for item in found]
    if len(serving) > 1:
        return check(
            "driver",
            asked,
            f"{len(serving)} kubelet plugins: {', '.join(names)}",
            "fail",
            needed="one",
            fix="uninstall all but one release of the driver",
            finding="plugin_twice",
            evidence={"daemonsets": names},
        )
    if serving:
        return check("driver", asked, f"DaemonSet {names[0]}", evidence={"image": serving[0]["images"]})
    if "enable-driver" in settings["stages"] and settings.get("driver_install"):
        return check("driver", asked, "not there yet; this run installs it")
    if found:
        return check(
            "driver",
            asked,
            f"{', '.join(names)} has no container {PLUGIN_CONTAINER}",
            "fail",
            needed="a driver that serves GPUs",
            fix="set resources.gpus.enabled=true and gpuResourcesEnabledOverride=true in the chart's values",
            finding="chart_gpus_disabled",
            evidence={"containers": found[0]["containers"]},
        )
    return check(
        "driver",
        asked,
        "no DaemonSet with the label …-component=kubelet-plugin in any namespace",
        "fail",
        needed="the driver",
        fix="set dra_driver_install: true, or install the chart yourself",
        finding="plugin_not_found",
    )


def sharing_check(facts: Object, settings: Object) -> Check:
    """Whether the driver lets a GPU be shared as asked: it says no only when it prepares the device."""
    strategy = str(settings.get("strategy") or "TimeSlicing")
    gate, also = GATES[strategy], ""
    asked = f"Does the driver let a GPU be shared by {strategy}?"
    unread = unread_check(facts, "daemonsets", "sharing_gate", asked)
    if unread:
        return unread
    plugins = [item for item in facts["daemonsets"] if item["role"] == "dra"]
    serving = next((item for item in plugins if PLUGIN_CONTAINER in item["containers"]), None)
    shared = settings.get("mode") == "shared"
    installs = bool("enable-driver" in settings["stages"] and settings.get("driver_install"))
    if serving is None:
        text = f"this run installs it with {setting(gate)}" if installs and shared else "there is none"
        return check("sharing_gate", asked, text, "pass" if installs and shared else "skip")
    name = f"{serving['namespace']}/{serving['name']}"
    told = read_gates(serving)
    version = f"driver {told['version'] or 'of unknown version'}"
    evidence = {"daemonset": name, **told}
    if not told["has_gates"]:
        return check(
            "sharing_gate", asked, f"{version} has no gate for it: it is always on", evidence=evidence
        )
    if not is_on(told["gates"], gate):
        if installs and shared:
            return check(
                "sharing_gate", asked, f"{gate} is off in {name}; this run switches it on", evidence=evidence
            )
        on = ", ".join(sorted(key for key, value in told["gates"].items() if value)) or "none"
        return check(
            "sharing_gate",
            asked,
            f"{gate} is off in {name} ({version}; gates that are on: {on})",
            "fail",
            needed=f"the driver's gate {gate}, without which it refuses to prepare the GPU",
            fix=_gate_fix(serving, gate, settings),
            finding="gate_off",
            evidence=evidence,
        )
    if strategy == MPS and is_on(told["gates"], "DynamicMIG"):
        also = "DynamicMIG is on as well, and the driver does not start with both"
        fix = "switch featureGates.DynamicMIG off"
    elif not is_on(told["gates"], RESET):
        also = f"{RESET} is off: the GPU stays in compute mode EXCLUSIVE_PROCESS when the jobs are done"
        fix = f"set {setting(RESET)} too; then the driver sets the mode back"
    if also:
        return check(
            "sharing_gate",
            asked,
            f"{gate} is on in {name} ({version}); {also}",
            "warn",
            needed=f"{gate} with {RESET}, without DynamicMIG",
            fix=fix,
            finding="gate_beside",
            evidence=evidence,
        )
    return check("sharing_gate", asked, f"{gate} is on in {name} ({version})", evidence=evidence)


def _gate_fix(plugin: Object, gate: str, settings: Object) -> str:
    """How the gate is switched on, by who installs the driver here."""
    if settings.get("driver_install") and settings.get("mode") == "shared":
        return f"run with --tags enable-driver,shared: the driver is then installed with {setting(gate)}"
    if settings.get("driver_install"):
        return (
            f"set gpu_slices_mode: shared, or featureGates: {{{gate}: true}} in dra_driver_values, and run "
            "with --tags enable-driver,shared"
        )
    release = plugin["release"] or "RELEASE"
    return (
        f"set {setting(gate)} in the driver's chart: helm upgrade {release} CHART --namespace "
        f"{plugin['namespace']} --reuse-values --set {setting(gate)}"
    )


def _owners(facts: Object, nodes: list[Object]) -> Check:
    """Warn when something else hands out the same GPUs (device plugin, HAMi, MIG manager)."""
    asked = "Does anything else hand out the GPUs of these nodes?"
    if "daemonsets" not in facts or not nodes:
        return check("gpu_owners", asked, "nothing could be read", "skip")
    owned = []
    for node in nodes:
        counted = [
            f"{key}={value}" for key, value in sorted(node["allocatable"].items()) if value not in ("", "0")
        ]
        if counted:
            owned.append(f"{node['name']} offers {', '.join(counted)}")
    others = [
        f"{item['namespace']}/{item['name']}"
        for item in facts.get("daemonsets") or []
        if item["role"] == "device_plugin" and any(_selects(item, node) for node in nodes)
    ]
    managers = [
        f"{item['namespace']}/{item['name']}"
        for item in facts.get("daemonsets") or []
        if item["role"] == "mig_manager" and any(_selects(item, node) for node in nodes)
    ]
    parts = list(owned)
    if others:
        parts.append(f"device plugin {', '.join(others)} runs there")
    if managers:
        parts.append(f"{', '.join(managers)} may change the MIG layout too")
    if not parts:
        return check("gpu_owners", asked, "nothing")
    return check(
        "gpu_owners",
        asked,
        "; ".join(parts),
        "warn",
        needed="one owner of a GPU",
        fix="keep the device plugin and the MIG manager off these nodes, or leave the nodes out",
        finding="double_owner",
        evidence={"allocatable": owned, "daemonsets": others + managers},
    )


def _selects(daemonset: Object, node: Object) -> bool:
    """Whether a DaemonSet's node selector admits a node (affinity is not looked at: rather warn)."""
    return all(node["labels"].get(key) == value for key, value in daemonset["node_selector"].items())


def _static(facts: Object, settings: Object) -> Check:
    asked = "Does the driver leave the MIG layout to us?"
    if "slices" not in facts:
        return check("static_mig", asked, "the ResourceSlices could not be read", "skip")
    dynamic = sorted(
        {
            device["node"]
            for device in (facts.get("slices") or {}).get("devices") or []
            if device.get("partitionable") and device["node"] in settings["nodes"]
        }
    )
    if dynamic:
        return check(
            "static_mig",
            asked,
            f"DynamicMIG is on at {', '.join(dynamic)}",
            "fail",
            needed="a driver that does not cut GPUs itself",
            fix="switch featureGates.DynamicMIG off, or set mig_manage: false for these nodes",
            finding="dynamic_mig",
            evidence={"nodes": dynamic},
        )
    return check("static_mig", asked, "yes")


def _namespace(facts: Object, settings: Object) -> Check:
    name = settings["namespace"]
    asked = f"Is namespace {name} usable?"
    unread = unread_check(facts, "namespace", "namespace", asked)
    if unread:
        return unread
    namespace = facts["namespace"]
    if namespace["terminating"]:
        return check(
            "namespace",
            asked,
            f"{name} is being deleted",
            "fail",
            needed="a namespace that stays",
            fix="wait until it is gone, or choose another (gpu_slices_namespace)",
            finding="namespace_terminating",
        )
    if namespace["found"]:
        return check("namespace", asked, f"{name} exists", evidence={"labels": namespace["labels"]})
    if settings.get("namespace_create"):
        return check("namespace", asked, f"{name} does not exist; this run creates it")
    return check(
        "namespace",
        asked,
        f"{name} does not exist",
        "fail",
        needed="the namespace",
        fix="create it, or set gpu_slices_namespace_create: true",
        finding="namespace_missing",
    )


def _names(facts: Object, settings: Object) -> Check:
    return names_check(named_objects(settings), facts.get("objects") or {})


def names_check(named: list[Object], objects: Object) -> Check:
    """Whether the names are free or ours. ``objects``: by id what the cluster has (None: nothing)."""
    asked = "Are the names we use free, or ours?"
    foreign = []
    if not {item["id"] for item in named} <= set(objects):
        return check("names", asked, "the objects could not be read", "skip")
    for item in named:
        found = objects.get(str(item["id"]))
        labels = ((found or {}).get("metadata") or {}).get("labels") or {}
        if found and labels.get(MANAGED_BY) != MANAGER:
            place = f"{item['namespace']}/" if item["namespace"] else ""
            foreign.append(f"{item['kind']} {place}{item['name']}")
    if foreign:
        return check(
            "names",
            asked,
            f"{', '.join(foreign)} exists and is not ours",
            "fail",
            needed=f"no such object, or one labelled {MANAGED_BY}={MANAGER}",
            fix="rename or remove it"
            + (", or choose another gpu_slices_namespace" if any("/" in name for name in foreign) else "")
            + (
                " (for a DeviceClass: name it in quota_device_class)"
                if any(name.startswith("DeviceClass") for name in foreign)
                else ""
            ),
            finding="name_taken",
            evidence={"foreign": foreign},
        )
    return check("names", asked, "yes", evidence={"looked_at": [item["id"] for item in named]})


def _trainer(facts: Object) -> Check:
    asked = "Are Kubeflow Trainer v2 and JobSet installed, with a schema we can use?"
    unread = unread_check(facts, "trainer", "trainer", asked)
    if unread:
        return unread
    trainer = facts["trainer"]
    features = trainer["features"]
    evidence = {"features": features, "versions": {key: trainer[key]["versions"] for key in _CRD_NAMES}}
    missing = [name for key, name in _CRD_NAMES.items() if not trainer[key]["found"]]
    pending = [
        name for key, name in _CRD_NAMES.items() if trainer[key]["found"] and not trainer[key]["established"]
    ]
    if missing or pending:
        found = "; ".join(
            f"{words}: {', '.join(names)}"
            for words, names in (("no CRD", missing), ("not established", pending))
            if names
        )
        return check(
            "trainer",
            asked,
            found,
            "fail",
            needed="the CRDs of both",
            fix="install Kubeflow Trainer v2 with JobSet, or leave sft out (--skip-tags sft)",
            finding="trainer_missing",
            evidence=evidence,
        )
    if "v1alpha1" not in trainer["trainjobs"]["versions"] or not features["ml_policy_torch"]:
        return check(
            "trainer",
            asked,
            f"TrainJob is served as {', '.join(trainer['trainjobs']['versions'])}",
            "fail",
            needed="trainer.kubeflow.org/v1alpha1 with mlPolicy.torch",
            fix="install Trainer 2.0 to 2.3",
            finding="trainer_schema",
            evidence=evidence,
        )
    release = "2.0 or 2.1" if features["torch_num_proc_per_node"] else "2.2 or later"
    return check(
        "trainer",
        asked,
        f"Trainer {release}, JobSet {', '.join(trainer['jobsets']['versions'])}",
        evidence=evidence,
    )


def _quota(facts: Object, settings: Object) -> list[Check]:
    """Whether Kueue can do what the stage quota proves; which profile it is may be known only later."""
    unread = unread_check(facts, "kueue", "kueue", "Is Kueue installed?")
    if unread:
        return [unread]
    profiles = settings.get("profiles") or []
    classes = {kueue.class_name(p): kueue.resource_name(p) for p in profiles}
    if settings.get("kueue_class"):
        resource = settings.get("kueue_resource") or next(iter(classes.values()), "")
        classes = {str(settings["kueue_class"]): str(resource)}
    features = (facts.get("trainer") or {}).get("features") or {}
    configure = bool(settings.get("kueue_configure"))
    return kueue.checks(facts["kueue"], features, classes, configure=configure, whole=False)


_CRD_NAMES = {
    "trainjobs": "TrainJob",
    "trainingruntimes": "TrainingRuntime",
    "jobsets": "JobSet",
}


def failing(checks: Iterable[Check]) -> list[Check]:
    """Those that stop the run."""
    return [item for item in checks if item["status"] == "fail"]
