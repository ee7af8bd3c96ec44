"""Judge the DRA driver, and restart plugin pods that publish an outdated picture of the hardware.

Arguments: ``kubeconfig``, ``context``; ``nodes``, the Kubernetes nodes that the driver must serve;
``hardware`` {node: GPUs as module mig_layout returns them}, nodes left out are not compared; ``restart``
(true), whether plugin pods may be restarted; ``timeout`` (120), the longest wait in seconds.

Finds the DaemonSet by label and container, waits until each node has a Ready plugin pod and slices, and
compares these with the hardware. The driver looks at the GPUs only when it starts, so where they differ the
plugin pod is deleted, once, and the wait goes on until both agree. Never fails because the driver is wrong:
the verdict is in
``checks``, for gpu_check. In check mode nothing is restarted. Also returns ``restarted`` [nodes], ``devices``
(published, with their holders), ``daemonset`` (trimmed) and ``waited`` (seconds).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.cluster import read
from gpu_slices.cluster_action import ClusterAction
from gpu_slices.driver_state import driver_checks, find_plugin, next_step, plugin_pods, waiting_for
from gpu_slices.kube_api import ApiFault, KubeApi

WANT = ("nodes", "daemonsets", "device_classes", "slices", "claims", "plugin_pods")
PAUSE = 0.5
LOG_LINES = 8


class Driver:
    """The driver as one task sees it."""

    def __init__(self, api: KubeApi, params: dict[str, Any]) -> None:
        self.api = api
        self.nodes: list[str] = params["nodes"]
        self.hardware = {node: gpus for node, gpus in params["hardware"].items() if node in self.nodes}
        self.facts: dict[str, Any] = {}

    def look(self) -> None:
        """Read everything that the verdict needs."""
        facts = read(self.api, WANT)
        for question, fault in facts["errors"].items():
            raise ApiFault(fault["kind"], f"{question} cannot be read: {fault['message']}")
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
                # A container that never started has no log; its state says it all.
                if not stuck or stuck["state"] != "waiting" or stuck["restarts"]:
                    params = {"container": name, "tailLines": str(LOG_LINES)}
                    log = self.api.text(f"{base}/pods/{pod['name']}/log", params)
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


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "nodes": {"type": "list", "elements": "str", "required": True},
        "hardware": {"type": "dict", "default": {}},
        "restart": {"type": "bool", "default": True},
        "timeout": {"type": "int", "default": 120},
    }

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Look, wait for the driver, restart where the picture is old, wait again; return the verdict."""
        started = time.monotonic()
        driver = Driver(api, arguments)
        driver.look()
        restarted: list[str] = []
        while True:
            step, nodes = next_step(
                driver.facts, driver.nodes, driver.hardware, restarted=restarted, now=time.time()
            )
            if step == "restart":
                if not arguments["restart"]:
                    break
                restarted += nodes
                if not self._task.check_mode:
                    driver.restart(nodes)
            late = time.monotonic() - started > arguments["timeout"]
            if step in ("done", "stop") or self._task.check_mode or late:
                break
            time.sleep(PAUSE)
            driver.look()
        plugin = find_plugin(driver.facts)
        checks = driver_checks(driver.facts, driver.nodes, driver.hardware)
        if any(item["status"] == "fail" for item in checks) and plugin is not None:
            told = driver.explain()
            failing = [c for c in checks if c["status"] == "fail" and c["id"] != "device_classes"]
            for item in failing:
                item["evidence"]["nodes_explained"] = told
            if failing:
                failing[0]["found"] += _short(told)
        return {
            "changed": bool(restarted),
            "checks": checks,
            "restarted": restarted,
            "devices": driver.facts["slices"]["devices"],
            "daemonset": plugin or {},
            "waited": round(time.monotonic() - started, 2),
        }


def _short(told: dict[str, Any]) -> str:
    """The end of the log on each node that is in trouble, for the message."""
    parts = []
    for node, facts in told.items():
        for container, lines in (facts.get("log") or {}).items():
            end = " ".join(line.strip() for line in lines if line.strip())[-300:]
            if end:
                parts.append(f"{node} {container} log: …{end}")
    return f" ({'; '.join(parts)})" if parts else ""
