#!/usr/bin/python
"""Judge the DRA driver, and restart plugin pods that publish an outdated picture of the hardware."""

from __future__ import annotations

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.cluster import read
from ansible.module_utils.gpu_slices.driver_state import (
    driver_checks,
    find_plugin,
    next_step,
    plugin_pods,
    waiting_for,
)
from ansible.module_utils.gpu_slices.kube_api import ApiFault, KubeApi

DOCUMENTATION = r"""
module: dra_driver_state
short_description: Judge NVIDIA's DRA driver and bring its ResourceSlices up to date
description:
  - Finds the driver's DaemonSet by label and container, and waits until each node has a Ready plugin pod and
    slices.
  - Compares the slices with the hardware device by device. The driver looks at the GPUs only when it starts,
    so on nodes that differ the plugin pod is deleted and the module waits until slices and hardware agree.
  - Never fails because the driver is wrong; the verdict is in RV(checks). In check mode nothing is restarted.
options:
  kubeconfig:
    description: Path of the kubeconfig. Empty takes KUBECONFIG or ~/.kube/config.
    type: path
  context:
    description: Context in the kubeconfig.
    type: str
  nodes:
    description: Kubernetes nodes that the driver must serve.
    type: list
    elements: str
    required: true
  hardware:
    description: Per node the list of its GPUs as mig_layout returns it. Nodes left out are not compared.
    type: dict
    default: {}
  restart:
    description: Whether plugin pods may be restarted.
    type: bool
    default: true
  timeout:
    description: Longest wait, in seconds, for the driver as a whole.
    type: int
    default: 120
author: gpu-slices
"""

EXAMPLES = r"""
- name: Verify the driver
  dra_driver_state:
    nodes: [gpu-a]
    hardware:
      gpu-a: "{{ hostvars['gpu-a'].mig_gpus }}"
  register: driver
"""

RETURN = r"""
checks:
  description: One verdict a question, for gpu_check.
  type: list
  elements: dict
  returned: success
restarted:
  description: Nodes whose plugin pod was restarted (in check mode, would be).
  type: list
  elements: str
  returned: success
devices:
  description: Published devices with their holders.
  type: list
  elements: dict
  returned: success
daemonset:
  description: The DaemonSet that serves GPUs, trimmed; empty if there is none.
  type: dict
  returned: success
waited:
  description: Seconds spent waiting.
  type: float
  returned: success
"""


PAUSE = 0.5
LOG_LINES = 8


class Driver:
    """The driver as one run of the module sees it."""

    def __init__(self, module: Any) -> None:
        params = module.params
        self.module = module
        self.api = KubeApi.from_kubeconfig(params["kubeconfig"] or "", params["context"] or "")
        self.nodes: list[str] = params["nodes"]
        self.hardware = {node: gpus for node, gpus in params["hardware"].items() if node in self.nodes}
        self.plugin: dict[str, Any] | None = None
        self.facts: dict[str, Any] = {}

    def look(self) -> None:
        """Read everything; the plugin's pods too once its DaemonSet is known."""
        want = ["nodes", "daemonsets", "device_classes", "slices", "claims"]
        options: dict[str, Any] = {}
        if self.plugin:
            want.append("plugin_pods")
            options = {
                "plugin_selector": self.plugin["selector"],
                "plugin_namespace": self.plugin["namespace"],
            }
        facts = read(self.api, want, options)
        for question, fault in facts["errors"].items():
            raise ApiFault(fault["kind"], f"{question} cannot be read: {fault['message']}")
        first = self.plugin is None
        self.plugin = find_plugin(facts)
        if first and self.plugin:
            options = {
                "plugin_selector": self.plugin["selector"],
                "plugin_namespace": self.plugin["namespace"],
            }
            facts.update(read(self.api, ["plugin_pods"], options))
        self.facts = facts

    def restart(self, nodes: list[str]) -> None:
        """Delete the plugin pod of each node; the DaemonSet makes a new one."""
        pods = plugin_pods(self.facts)
        for node in nodes:
            if node in pods:
                path = f"/api/v1/namespaces/{pods[node]['namespace']}/pods/{pods[node]['name']}"
                try:
                    self.api.request("DELETE", path)
                except ApiFault as fault:
                    if fault.kind != "not_found":
                        raise

    def explain(self) -> dict[str, Any]:
        """Per node that still lacks something: the pod's containers, last log lines and events."""
        told: dict[str, Any] = {}
        pods = plugin_pods(self.facts)
        for node, reason in waiting_for(self.facts, self.nodes, self.hardware).items():
            told[node] = {"reason": reason}
            pod = pods.get(node)
            if pod is None:
                continue
            told[node]["pod"] = pod["name"]
            told[node]["containers"] = {
                c["name"]: " ".join(filter(None, [c["state"], c["reason"], c["message"]]))
                for c in pod["containers"]
            }
            base = f"/api/v1/namespaces/{pod['namespace']}"
            stuck = next(
                (c for c in pod["containers"] if not c["ready"] and c["state"] != "terminated"), None
            )
            name = stuck["name"] if stuck else "gpus"
            try:
                log = self.api.text(
                    f"{base}/pods/{pod['name']}/log", {"container": name, "tailLines": str(LOG_LINES)}
                )
                told[node]["log"] = {name: log.splitlines()}
                events = self.api.get(
                    f"{base}/events", {"fieldSelector": f"involvedObject.name={pod['name']}"}
                )
                told[node]["events"] = [
                    f"{item.get('reason')}: {item.get('message')}" for item in events.get("items") or []
                ][-5:]
            except ApiFault as fault:
                told[node]["log"] = {name: [fault.message]}
        return told


def run(module: Any) -> dict[str, Any]:
    """Look, wait for the driver, restart where the picture is old, wait again."""
    params = module.params
    started = time.monotonic()
    driver = Driver(module)
    driver.look()
    restarted: list[str] = []
    while True:
        step, nodes = next_step(
            driver.facts, driver.nodes, driver.hardware, restarted=restarted, now=time.time()
        )
        if step == "restart":
            if not params["restart"]:
                break
            restarted += nodes
            if not module.check_mode:
                driver.restart(nodes)
        if step in ("done", "stop") or module.check_mode or time.monotonic() - started > params["timeout"]:
            break
        time.sleep(PAUSE)
        driver.look()
    checks = driver_checks(driver.facts, driver.nodes, driver.hardware)
    if any(item["status"] == "fail" for item in checks) and driver.plugin is not None:
        told = driver.explain()
        for item in checks:
            if item["status"] == "fail" and item["id"] in ("plugin", "slices", "slices_match"):
                item["evidence"]["nodes_explained"] = told
                item["found"] += _short(told)
    return {
        "changed": bool(restarted),
        "checks": checks,
        "restarted": restarted,
        "devices": driver.facts["slices"]["devices"],
        "daemonset": driver.plugin or {},
        "waited": round(time.monotonic() - started, 2),
    }


def _short(told: dict[str, Any]) -> str:
    """The last log line of each node that is in trouble, for the message."""
    parts = []
    for node, facts in told.items():
        for container, lines in (facts.get("log") or {}).items():
            if lines:
                parts.append(f"{node} {container} log: {lines[-1].strip()[:200]}")
    return f" ({'; '.join(parts)})" if parts else ""


def main() -> None:
    """Run as an Ansible module."""
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "hardware": {"type": "dict", "default": {}},
            "restart": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except ApiFault as fault:
        module.fail_json(msg=fault.message)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
