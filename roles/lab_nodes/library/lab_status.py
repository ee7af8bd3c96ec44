"""How the lab is, as a table for people."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.kube_api import ApiFault, KubeApi
from ansible.module_utils.gpu_slices.resource_slices import merge_slices, with_holders
from ansible.module_utils.lab_host import HostError, containers, living_pids
from ansible.module_utils.lab_plan import LABEL_NODE, Found

DOCUMENTATION = """
module: lab_status
short_description: Describe the lab in a few lines
description:
  - Containers as Podman has them; nodes, versions, operators, driver, free devices as the cluster has them.
  - Changes nothing, and says what it cannot reach in place of failing.
options:
  instance: {description: Name of the lab., type: str, required: true}
  kubeconfig: {description: Kubeconfig of the cluster., type: path, required: true}
author: gpu-slices
"""
EXAMPLES = """
- name: Look at the lab
  lab_status:
    instance: lab
    kubeconfig: /var/cache/gpu-slices/run/lab/kubeconfig
"""
RETURN = """
lines: {description: The table., returned: always, type: list, elements: str}
up: {description: Whether every node runs and is Ready., returned: always, type: bool}
"""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns of equal width; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def ready(node: Mapping[str, Any]) -> str:
    """Ready, or what is wrong, with a note when it is cordoned."""
    conditions = {item["type"]: item for item in node.get("status", {}).get("conditions") or []}
    word = "Ready" if conditions.get("Ready", {}).get("status") == "True" else "NotReady"
    return f"{word},cordoned" if node.get("spec", {}).get("unschedulable") else word


def device_summary(devices: Iterable[Mapping[str, Any]]) -> str:
    """Free and all devices by kind, for example `1g.6gb 3/4 free`."""
    totals: dict[str, list[int]] = {}
    for device in devices:
        count = totals.setdefault(str(device.get("profile") or device.get("type") or "?"), [0, 0])
        count[0] += device.get("holder") is None
        count[1] += 1
    return ", ".join(f"{kind} {free}/{total} free" for kind, (free, total) in sorted(totals.items())) or "-"


def container_word(found: Found | None) -> str:
    if found is None:
        return "missing"
    return "running" if found.state == "running" and found.alive else f"not running ({found.state})"


def node_rows(
    boxes: Mapping[str, Found],
    nodes: Iterable[Mapping[str, Any]],
    devices: Iterable[Mapping[str, Any]],
) -> list[list[str]]:
    """One row a node, known to Podman or to the cluster or to both."""
    known = {node["metadata"]["name"]: node for node in nodes}
    devices = list(devices)
    rows = [["NODE", "CONTAINER", "KUBERNETES", "KUBELET", "RUNTIME", "ADDRESS", "DEVICES"]]
    for name in sorted(set(known) | set(boxes), key=lambda name: (name != "control", name)):
        node = known.get(name)
        info = (node or {}).get("status", {}).get("nodeInfo", {})
        addresses = (node or {}).get("status", {}).get("addresses") or []
        rows.append(
            [
                name,
                container_word(boxes.get(name)),
                ready(node) if node else "not registered",
                info.get("kubeletVersion", "-"),
                info.get("containerRuntimeVersion", "-").replace("://", " "),
                next((item["address"] for item in addresses if item["type"] == "InternalIP"), "-"),
                device_summary(device for device in devices if device["node"] == name),
            ]
        )
    return rows


def workload_rows(
    deployments: Iterable[Mapping[str, Any]], daemonsets: Iterable[Mapping[str, Any]]
) -> list[list[str]]:
    """Operators and the driver: how many of their pods are ready."""
    rows = [["WORKLOAD", "READY", "IMAGE"]]
    for item in deployments:
        status, wanted = item.get("status", {}), item["spec"].get("replicas", 1)
        rows.append(_row(item, f"{status.get('readyReplicas', 0)}/{wanted}"))
    for item in daemonsets:
        status = item.get("status", {})
        rows.append(_row(item, f"{status.get('numberReady', 0)}/{status.get('desiredNumberScheduled', 0)}"))
    return rows


def _row(item: Mapping[str, Any], ready_count: str) -> list[str]:
    metadata = item["metadata"]
    image = item["spec"]["template"]["spec"]["containers"][0]["image"]
    return [f"{metadata['namespace']}/{metadata['name']}", ready_count, image]


def read_cluster(api: KubeApi) -> dict[str, list[dict[str, Any]]]:
    paths = {
        "nodes": "/api/v1/nodes",
        "deployments": "/apis/apps/v1/deployments",
        "daemonsets": "/apis/apps/v1/daemonsets",
        "slices": "/apis/resource.k8s.io/v1/resourceslices",
        "claims": "/apis/resource.k8s.io/v1/resourceclaims",
    }
    return {name: list(api.get(path).get("items") or []) for name, path in paths.items()}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instance": {"type": "str", "required": True},
            "kubeconfig": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    instance = module.params["instance"]
    try:
        living = living_pids()
        boxes = {
            item["Config"]["Labels"][LABEL_NODE]: Found.of(item, living) for item in containers(instance)
        }
    except HostError as error:
        module.exit_json(changed=False, up=False, lines=[f"lab {instance}: {error}"])
    if not boxes:
        module.exit_json(changed=False, up=False, lines=[f"lab {instance}: down (`make lab` brings it up)"])
    lines = [f"lab {instance}: {len(boxes)} node containers; silicon: emulated"]
    try:
        api = KubeApi.from_kubeconfig(kubeconfig=module.params["kubeconfig"], timeout=5)
        version = api.get("/version").get("gitVersion", "?")
        seen = read_cluster(api)
    except ApiFault as fault:
        lines += ["", *table(node_rows(boxes, [], [])), "", f"cluster: {fault.message}"]
        module.exit_json(changed=False, up=False, lines=lines)
    devices = with_holders(merge_slices(seen["slices"])["devices"], seen["claims"])
    lines[0] += f"; Kubernetes {version}; kubeconfig {module.params['kubeconfig']}"
    lines += ["", *table(node_rows(boxes, seen["nodes"], devices)), ""]
    lines += table(workload_rows(seen["deployments"], seen["daemonsets"]))
    up = all(ready(node).startswith("Ready") for node in seen["nodes"]) and all(
        container_word(box) == "running" for box in boxes.values()
    )
    module.exit_json(changed=False, up=up and len(seen["nodes"]) >= len(boxes), lines=lines)


if __name__ == "__main__":
    main()
