#!/usr/bin/python
"""Label GPU nodes for the DRA driver, all nodes in one call."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.cluster import (
    MANAGER,
    PLUGIN_CONTAINER,
    read,
)
from ansible.module_utils.gpu_slices.kube_api import MERGE_PATCH, ApiFault, KubeApi
from ansible.module_utils.gpu_slices.node_labels import (
    LabelError,
    patch_for,
    plan_node,
    show_labels,
    wanted_labels,
)

DOCUMENTATION = r"""
module: node_labels
short_description: Label GPU nodes for the DRA driver
description:
  - Sets the inventory's labels, and those that the driver's DaemonSet asks for, on all nodes in one call.
  - Records on each node, in the annotation C(gpu-slices.dev/labels), what was set and what was there before.
  - With O(state=absent) puts the former labels back and removes the record.
options:
  kubeconfig:
    description: Path of the kubeconfig. Empty takes KUBECONFIG or ~/.kube/config.
    type: path
  context:
    description: Context in the kubeconfig.
    type: str
  nodes:
    description: Names of the Kubernetes nodes.
    type: list
    elements: str
    required: true
  labels:
    description: Labels that each node is to have. Values are taken as text.
    type: dict
    default: {}
  chart_values:
    description: >-
      Chart values of a driver that is not installed yet; its C(kubeletPlugin.nodeSelector) is then obeyed.
      Ignored once the DaemonSet is there.
    type: dict
    default: {}
  state:
    description: Whether the labels are to be there.
    type: str
    choices: [present, absent]
    default: present
author: gpu-slices
"""

EXAMPLES = r"""
- name: Label the GPU nodes
  node_labels:
    nodes: [gpu-a, gpu-b]
    labels:
      nvidia.com/gpu.present: "true"
"""

RETURN = r"""
nodes:
  description: Per node the labels that were set (a null one was removed) and all that we answer for.
  type: dict
  returned: success
daemonset:
  description: The DaemonSet whose selectors were obeyed, as namespace/name; empty if there is none.
  type: str
  returned: success
"""


def main() -> None:
    """Read, plan, patch."""
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "labels": {"type": "dict", "default": {}},
            "chart_values": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    try:
        result = apply(module)
    except (ApiFault, LabelError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


def apply(module: Any) -> dict[str, Any]:
    """Bring every node to the wanted labels; returns the module's result."""
    params = module.params
    api = KubeApi.from_kubeconfig(params["kubeconfig"] or "", params["context"] or "")
    facts = read(api, ["nodes", "daemonsets"])
    for question, fault in facts["errors"].items():
        raise LabelError(f"{question} cannot be read: {fault['message']}")
    missing = [name for name in params["nodes"] if name not in facts["nodes"]]
    if missing and params["state"] == "present":
        raise LabelError(
            f"The cluster has no node {', '.join(missing)} (its nodes: {', '.join(sorted(facts['nodes']))}); "
            "correct the inventory, or set gpu_slices_node_name"
        )
    daemonset = next(
        (
            item
            for item in facts["daemonsets"]
            if item["role"] == "dra" and PLUGIN_CONTAINER in item["containers"]
        ),
        None,
    )
    found = f"{daemonset['namespace']}/{daemonset['name']}" if daemonset else ""
    if daemonset is None:
        selector = (params["chart_values"].get("kubeletPlugin") or {}).get("nodeSelector") or {}
        if selector:
            daemonset = {
                "namespace": "chart",
                "name": "values",
                "node_selector": {str(key): str(value) for key, value in selector.items()},
                "affinity_terms": [],
            }
    report, before, after, patches = {}, "", "", {}
    for name in params["nodes"]:
        node = facts["nodes"].get(name)
        if node is None:
            continue
        wanted = {}
        if params["state"] == "present":
            wanted = wanted_labels(node["labels"], params["labels"], daemonset)
        plan = plan_node(node, wanted)
        patch = patch_for(node, plan)
        report[name] = {"changed": plan["labels"], "ours": sorted(plan["record"])}
        if patch:
            patches[name] = patch
            header = f"node {name}\n"
            before += header + show_labels(node["labels"], plan["labels"])
            after += header + show_labels({**node["labels"], **plan["labels"]}, plan["labels"])
    if patches and not module.check_mode:
        for name, patch in patches.items():
            params_ = {"fieldManager": MANAGER}
            api.request("PATCH", f"/api/v1/nodes/{name}", patch, params=params_, content_type=MERGE_PATCH)
    result: dict[str, Any] = {"changed": bool(patches), "nodes": report, "daemonset": found}
    if patches:
        result["diff"] = {"before": before, "after": after}
    return result


if __name__ == "__main__":
    main()
