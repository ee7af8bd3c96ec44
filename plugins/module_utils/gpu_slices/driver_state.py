"""Is the DRA driver working, and does it publish what the hardware holds?

Pure functions from facts (:func:`cluster.read`) to checks (:mod:`preflight`).
"""

from __future__ import annotations

import calendar
import time
from typing import Any, Dict, Iterable, Mapping

from .checks import Check, check
from .cluster import PLUGIN_CONTAINER, digest
from .kube_version import NVIDIA_ADVISED, at_least, show
from .node_labels import selects
from .resource_slices import DRIVER, compare_with_hardware, describe_profiles, tolerated

Object = Dict[str, Any]

STALE = "the slices differ from the hardware"
# Seconds within which a plugin pod that has become Ready publishes its devices.
SETTLE = 5.0
# Class name -> the type its CEL expression must select.
CLASSES = {"gpu.nvidia.com": "gpu", "mig.nvidia.com": "mig"}


def find_plugin(facts: Object) -> Object | None:
    """The DaemonSet that serves GPUs: by its component label and its ``gpus`` container, never by name."""
    plugins = [item for item in facts.get("daemonsets") or [] if item["role"] == "dra"]
    serving = [item for item in plugins if PLUGIN_CONTAINER in item["containers"]]
    return serving[0] if serving else None


def plugin_pods(facts: Object) -> dict[str, Object]:
    """The plugin pod of each node; one that is being deleted does not count."""
    return {pod["node"]: pod for pod in facts.get("plugin_pods") or [] if not pod["deleting"]}


def comparable(facts: Object, hardware: Mapping[str, list[Object]]) -> dict[str, list[Object]]:
    """The hardware of nodes whose slices must mirror it: not those where the driver cuts GPUs by itself."""
    dynamic = {device["node"] for device in facts["slices"]["devices"] if device["partitionable"]}
    return {node: gpus for node, gpus in hardware.items() if node not in dynamic}


def stale_nodes(facts: Object, hardware: Mapping[str, list[Object]]) -> dict[str, list[str]]:
    """Nodes that publish something else than their hardware holds: node -> differences."""
    devices = facts["slices"]["devices"]
    differences = {
        node: compare_with_hardware(devices, gpus, node) for node, gpus in comparable(facts, hardware).items()
    }
    return {node: found for node, found in differences.items() if found}


def waiting_for(facts: Object, nodes: Iterable[str], hardware: Mapping[str, list[Object]]) -> dict[str, str]:
    """What each node still lacks: node -> reason. Empty when the driver is up and tells the truth."""
    pods = plugin_pods(facts)
    published = {pool["node"]: pool for pool in facts["slices"]["pools"] if pool["node"]}
    stale = stale_nodes(facts, hardware)
    plugin = find_plugin(facts)
    # A pod that its DaemonSet is about to replace knows nothing of the new gates.
    gates = plugin.get("feature_gates") if plugin and plugin.get("rolling") else None
    lacking = {}
    for node in nodes:
        pod = pods.get(node)
        if pod is None:
            lacking[node] = "no plugin pod"
        elif not pod["ready"]:
            lacking[node] = "the plugin pod is not Ready"
        elif gates is not None and pod.get("feature_gates", gates) != gates:
            lacking[node] = "the plugin pod has the former feature gates"
        elif node not in published:
            lacking[node] = "no ResourceSlice"
        elif not published[node]["complete"]:
            lacking[node] = "its pool is incomplete"
        elif node in stale:
            lacking[node] = STALE
    return lacking


def next_step(
    facts: Object,
    nodes: list[str],
    hardware: Mapping[str, list[Object]],
    *,
    restarted: Iterable[str],
    now: float,
) -> tuple[str, list[str]]:
    """What to do next: ``done``, ``restart`` (these nodes), ``wait`` or ``stop`` (waiting cannot help).

    A plugin pod that has just become Ready has not published yet, so only one that has been Ready for SETTLE
    seconds (``now`` is a Unix time) is restarted, and each at most once. Where the DaemonSet does not want to
    run there is nothing to wait for.
    """
    lacking = waiting_for(facts, nodes, hardware)
    if not lacking:
        return "done", []
    pods = plugin_pods(facts)
    stale = [node for node, reason in lacking.items() if reason == STALE and node not in set(restarted)]
    settled = [node for node in stale if now - _unix(pods[node]["ready_since"]) > SETTLE]
    if settled:
        return "restart", settled
    plugin = find_plugin(facts)
    if plugin is None:
        return "stop", []
    known = facts["nodes"]
    hopeless = [node for node in lacking if node not in known or not selects(plugin, known[node]["labels"])]
    return ("stop", []) if len(hopeless) == len(lacking) else ("wait", [])


def _unix(stamp: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def driver_checks(facts: Object, nodes: list[str], hardware: Mapping[str, list[Object]]) -> list[Check]:
    """The verdict on the driver, one check a question.

    ``nodes`` are the inventory's Kubernetes nodes, ``hardware`` the ``mig_gpus`` of those that were read.
    """
    plugin = find_plugin(facts)
    if plugin is None:
        return [
            check(
                "plugin",
                "Does the kubelet plugin run on every GPU node?",
                f"no DaemonSet with the label …-component=kubelet-plugin and a container {PLUGIN_CONTAINER}",
                "fail",
                needed="NVIDIA's DRA driver with GPUs enabled",
                fix="set dra_driver_install: true, or install the chart with resources.gpus.enabled=true",
                finding="plugin_not_found",
            )
        ]
    return [
        _plugin(facts, plugin, nodes),
        _classes(facts),
        _slices(facts, nodes),
        _nvidia_driver(facts, nodes),
        _hardware(facts, nodes, hardware),
    ]


def _plugin(facts: Object, plugin: Object, nodes: list[str]) -> Check:
    asked = "Does the kubelet plugin run on every GPU node?"
    name = f"{plugin['namespace']}/{plugin['name']}"
    selected = [key for key, node in facts["nodes"].items() if selects(plugin, node["labels"])]
    outside = [node for node in nodes if node not in selected]
    evidence = {
        "daemonset": name,
        "image": plugin["images"],
        "desired": plugin["desired"],
        "ready": plugin["ready"],
        "nodes": selected,
        "pods": {node: pod["name"] for node, pod in plugin_pods(facts).items()},
    }
    if plugin["desired"] == 0 or outside:
        terms = sorted({str(item["key"]) for term in plugin["affinity_terms"] for item in term})
        missing = ", ".join([f"{k}={v}" for k, v in plugin["node_selector"].items()] + terms)
        where = f", not on {', '.join(outside)}" if outside else ""
        return check(
            "plugin",
            asked,
            f"{name} wants {plugin['desired']} nodes{where}",
            "fail",
            needed="every GPU node labelled for it",
            fix=f"label them (role gpu_nodes does); it looks at: {missing or 'nothing'}",
            finding="plugin_no_nodes",
            evidence=evidence,
        )
    pods = plugin_pods(facts)
    if plugin["desired"] != len(selected):
        without = [node for node in selected if node not in pods]
        return check(
            "plugin",
            asked,
            f"{name} wants {plugin['desired']} nodes and its selector picks {len(selected)} "
            f"({', '.join(selected)}){_left_out(facts, plugin, without)}",
            # As with pods that are not Ready: nodes that are not the inventory's do not stop the run.
            "fail" if set(without) & set(nodes) else "warn",
            needed="a plugin pod on each node with its labels",
            fix="tolerate the taints of these nodes (kubeletPlugin.tolerations of the chart), or take "
            "the labels off them",
            finding="plugin_nodes_differ",
            evidence=evidence,
        )
    broken = [
        f"{node}: {_pod_state(pods.get(node))}" for node in nodes if not (pods.get(node) or {}).get("ready")
    ]
    if broken:
        return check(
            "plugin",
            asked,
            f"{name}: {'; '.join(broken)}",
            "fail",
            needed="a Ready plugin pod on each GPU node",
            fix=_advice(pods.get(node) for node in nodes),
            finding="plugin_not_ready",
            evidence=evidence,
        )
    if plugin["ready"] != plugin["desired"] or plugin["observed_generation"] < plugin["generation"]:
        return check(
            "plugin",
            asked,
            f"{name}: {plugin['ready']} of {plugin['desired']} pods are Ready, the inventory's among them",
            "warn",
            needed="all of them",
            fix="look at the plugin pods on the other nodes",
            finding="plugin_not_ready",
            evidence=evidence,
        )
    return check(
        "plugin", asked, f"{name}: {plugin['ready']} of {plugin['desired']} Ready", evidence=evidence
    )


def _left_out(facts: Object, plugin: Object, without: list[str]) -> str:
    """The picked nodes that have no plugin pod, with the taints that keep it away."""
    parts = []
    for node in without:
        taints = [
            f"{taint.get('key')}:{taint.get('effect')}"
            for taint in facts["nodes"][node].get("taints") or []
            if taint.get("effect") in ("NoSchedule", "NoExecute")
            # Those that come and go with a node's state, a DaemonSet tolerates by itself.
            and not str(taint.get("key")).startswith("node.kubernetes.io/")
            and not tolerated(taint, plugin.get("tolerations") or [])
        ]
        parts.append(f"{node} ({', '.join(taints)})" if taints else node)
    return f"; no plugin pod on {', '.join(parts)}" if parts else ""


def _pod_state(pod: Object | None) -> str:
    if pod is None:
        return "no pod"
    waiting = [c for c in pod["containers"] if not c["ready"] and c["state"] != "terminated"]
    if not waiting:
        return f"{pod['name']} is {pod['phase']}"
    container = waiting[0]
    reason = container["reason"] or container["state"]
    restarts = f", {container['restarts']} restarts" if container["restarts"] else ""
    return f"{pod['name']}: container {container['name']} {reason}{restarts}"


def _advice(pods: Iterable[Object | None]) -> str:
    """The likely cause of a plugin pod that does not come up, by where it stands."""
    for pod in pods:
        for container in (pod or {}).get("containers") or []:
            if container["ready"] or container["state"] == "terminated":
                continue
            if container["reason"] in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
                return (
                    f"make the image of the plugin available: {container['message'] or container['reason']}"
                )
            if container["name"].startswith("init"):
                return (
                    "the init container waits for the NVIDIA driver: see its log, and set nvidiaDriverRoot "
                    "to where the driver is (/run/nvidia/driver with the GPU Operator)"
                )
            if container["reason"] == "CrashLoopBackOff":
                return f"read the log of container {container['name']}"
    return "look at the events of the pods"


def _classes(facts: Object) -> Check:
    asked = "Are the DeviceClasses there, each selecting its kind?"
    classes = facts["device_classes"]
    missing = sorted(set(CLASSES) - set(classes))
    if missing:
        return check(
            "device_classes",
            asked,
            f"missing: {', '.join(missing)} (there are: {', '.join(sorted(classes)) or 'none'})",
            "fail",
            needed=" and ".join(CLASSES),
            fix="set resources.gpus.enabled=true and gpuResourcesEnabledOverride=true in the chart's values",
            finding="deviceclass_missing",
            evidence={"classes": sorted(classes)},
        )
    wrong = []
    for name, kind in CLASSES.items():
        text = " ".join(classes[name]).replace('"', "'").replace(" ", "")
        if f"'{DRIVER}'" not in text or f"type=='{kind}'" not in text:
            wrong.append(f"{name} selects {' and '.join(classes[name]) or 'anything'}")
    if wrong:
        return check(
            "device_classes",
            asked,
            "; ".join(wrong),
            "fail",
            needed=f"driver {DRIVER} and the type in each",
            fix="reinstall the chart, which owns these objects",
            finding="deviceclass_changed",
            evidence={"classes": classes},
        )
    return check(
        "device_classes", asked, ", ".join(CLASSES), evidence={name: classes[name] for name in CLASSES}
    )


def _slices(facts: Object, nodes: list[str]) -> Check:
    asked = "Does every GPU node publish its devices?"
    slices = facts["slices"]
    by_node = {
        node: describe_profiles(device for device in slices["devices"] if device["node"] == node)
        for node in nodes
    }
    evidence = {"pools": slices["pools"], "devices": by_node}
    if slices["incomplete"]:
        return check(
            "slices",
            asked,
            "; ".join(slices["incomplete"]),
            "fail",
            needed="complete pools",
            fix="wait for the driver; if it lasts, restart the plugin pod",
            finding="pool_incomplete",
            evidence=evidence,
        )
    published = {pool["node"] for pool in slices["pools"]}
    absent = [node for node in nodes if node not in published]
    if absent:
        return check(
            "slices",
            asked,
            f"no ResourceSlice of {', '.join(absent)}",
            "fail",
            needed="one pool a node",
            fix="read the log of the plugin pod there",
            finding="slice_missing",
            evidence=evidence,
        )
    empty = [node for node in nodes if by_node[node] == "none"]
    if empty:
        return check(
            "slices",
            asked,
            f"{', '.join(empty)} publishes no device",
            "fail",
            needed="at least one device",
            fix="MIG mode is on with no instance there: give the node a layout (mig_config), or turn MIG off",
            finding="slice_empty",
            evidence=evidence,
        )
    text = "; ".join(f"{node}: {listed}" for node, listed in by_node.items())
    return check("slices", asked, text, evidence=evidence)


def _nvidia_driver(facts: Object, nodes: list[str]) -> Check:
    asked = f"Is NVIDIA's kernel driver at least {show(NVIDIA_ADVISED)}?"
    versions: dict[str, str] = {}
    for device in facts["slices"]["devices"]:
        if device["node"] in nodes and device["attributes"].get("driverVersion"):
            versions[device["node"]] = str(device["attributes"]["driverVersion"])
    if not versions:
        return check("nvidia_driver", asked, "no published device tells its version", "skip")
    text = ", ".join(f"{node}: {version}" for node, version in versions.items())
    if not all(at_least(version, NVIDIA_ADVISED) for version in versions.values()):
        return check(
            "nvidia_driver",
            asked,
            text,
            "warn",
            needed=f"{show(NVIDIA_ADVISED)} or later, as the DRA driver documents",
            fix="upgrade the kernel driver there",
            finding="version_floor",
            evidence=versions,
        )
    return check("nvidia_driver", asked, text, evidence=versions)


def _hardware(facts: Object, nodes: list[str], hardware: Mapping[str, list[Object]]) -> Check:
    asked = "Do the slices equal the hardware, device by device?"
    compared = [node for node in nodes if node in comparable(facts, hardware)]
    if not compared:
        reason = "the driver cuts these GPUs by itself" if hardware else "the nodes' hardware was not read"
        return check("slices_match", asked, f"{reason}; the slices were checked by themselves", "skip")
    stale = stale_nodes(facts, {node: hardware[node] for node in compared})
    left_out = [node for node in nodes if node not in compared]
    evidence = {"compared": compared, "not_compared": left_out}
    if stale:
        lines = [line for found in stale.values() for line in found]
        return check(
            "slices_match",
            asked,
            "; ".join(lines[:12]) + (f" and {len(lines) - 12} more" if len(lines) > 12 else ""),
            "fail",
            needed="the same devices on both sides",
            fix="restart the plugin pod there; it looks at the GPUs only when it starts",
            finding="slice_stale",
            evidence={**evidence, "differences": lines},
        )
    count = sum(device["node"] in compared for device in facts["slices"]["devices"])
    tail = f" ({', '.join(left_out)} not compared)" if left_out else ""
    return check(
        "slices_match", asked, f"{count} devices on {len(compared)} nodes agree{tail}", evidence=evidence
    )


def verdict(state: Object, check_mode: bool = False) -> list[Check]:
    """The checks of module dra_driver_state, with what it did.

    In check mode nothing was installed, labelled or restarted, so what is amiss may be just what a real run
    mends: it warns instead of failing.
    """
    checks = []
    for item in state["checks"]:
        one = dict(item)
        if check_mode and one["status"] == "fail":
            one["status"] = "warn"
            one["found"] += "; check mode: a real run may mend it"
        if one["id"] == "slices_match" and state.get("restarted"):
            did = "would be" if check_mode else "was"
            one["found"] += f"; the plugin pod {did} restarted on {', '.join(state['restarted'])}"
        checks.append(one)
    return checks


def release_differs(facts: Object, version: str, values: Mapping[str, Any]) -> bool:
    """Whether Helm has something to do, by its own record (:func:`cluster.latest_release`)."""
    release = facts.get("helm_release")
    if not release or not release["found"] or release["status"] != "deployed":
        return True
    same_version = str(release["version"]).lstrip("v") == str(version).lstrip("v")
    return not same_version or release["values"] != digest(values)


def release_damaged(facts: Object) -> bool:
    """Whether a release that is deployed by Helm's record lacks its plugin or DeviceClasses in the cluster.

    Somebody removed them, and Helm puts them back only when told to: its record shows nothing amiss.
    """
    release = facts.get("helm_release")
    if not release or not release["found"] or "daemonsets" not in facts or "device_classes" not in facts:
        return False
    return find_plugin(facts) is None or not set(CLASSES) <= set(facts["device_classes"])
