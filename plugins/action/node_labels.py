"""Label GPU nodes for the DRA driver, all nodes in one task.

Arguments: ``kubeconfig``, ``context``; ``nodes``, names of Kubernetes nodes; ``labels`` that each is to have,
values as text; ``chart_values`` of a driver that is about to be installed or upgraded, whose
kubeletPlugin.nodeSelector and affinity are then obeyed too; ``state`` present or absent.

Sets the inventory's labels and those that the driver's DaemonSet asks for. What was set, and what was there
before, is kept in the annotation gpu-slices.dev/labels of each node; ``absent`` puts it back. Returns
``nodes`` {name: {changed {label: value or null}, ours [labels]}} and ``daemonset`` (namespace/name, or
empty).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.cluster import MANAGER, read
from gpu_slices.cluster_action import ClusterAction
from gpu_slices.driver_state import find_plugin
from gpu_slices.kube_api import MERGE_PATCH, ApiFault, KubeApi
from gpu_slices.node_labels import (
    LabelError,
    former_labels,
    labels_to_obey,
    patch_for,
    pick_nodes,
    plan_node,
    planned_daemonset,
    show_labels,
)


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "nodes": {"type": "list", "elements": "str", "required": True},
        "labels": {"type": "dict", "default": {}},
        "chart_values": {"type": "dict", "default": {}},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    }
    FAULTS = (ApiFault, LabelError)

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Bring every node to the wanted labels: read, plan, patch."""
        facts = read(api, ["nodes", "daemonsets"])
        for question, fault in facts["errors"].items():
            raise LabelError(f"{question} cannot be read: {fault['message']}")
        plugin = find_plugin(facts)
        if arguments["state"] == "present":
            nodes = pick_nodes(facts["nodes"], arguments["nodes"])
            planned = planned_daemonset(arguments["chart_values"])
            wanted = {
                name: labels_to_obey(former_labels(node), arguments["labels"], plugin, planned)
                for name, node in nodes.items()
            }
        else:
            nodes = {name: facts["nodes"][name] for name in arguments["nodes"] if name in facts["nodes"]}
            wanted = {name: {} for name in nodes}
        plans = {name: plan_node(node, wanted[name]) for name, node in nodes.items()}
        patches = {name: patch_for(node, plans[name]) for name, node in nodes.items()}
        changed = [name for name, patch in patches.items() if patch]
        if not self._task.check_mode:
            _, faults = api.parallel({name: partial(_patch, api, name, patches[name]) for name in changed})
            for fault in faults.values():
                raise fault
        return {
            "changed": bool(changed),
            "nodes": {
                name: {"changed": plan["labels"], "ours": sorted(plan["record"])}
                for name, plan in plans.items()
            },
            "daemonset": f"{plugin['namespace']}/{plugin['name']}" if plugin else "",
            "diff": {
                "before": "".join(show_labels(nodes[name], plans[name], after=False) for name in changed),
                "after": "".join(show_labels(nodes[name], plans[name], after=True) for name in changed),
            },
        }


def _patch(api: KubeApi, name: str, patch: dict[str, Any]) -> None:
    params = {"fieldManager": MANAGER}
    api.request("PATCH", f"/api/v1/nodes/{name}", patch, params=params, content_type=MERGE_PATCH)
