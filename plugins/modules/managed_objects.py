#!/usr/bin/python
"""Remove every Kubernetes object this project made, by label, in an order in which nothing hangs."""

from __future__ import annotations

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.kube_api import ApiFault, KubeApi
from ansible.module_utils.gpu_slices.managed import (
    SELECTOR,
    STEPS,
    Kind,
    describe,
    ours,
    removable,
    stuck_text,
)

DOCUMENTATION = r"""
module: managed_objects
short_description: Remove every Kubernetes object this project made
description:
  - Finds objects of all namespaces by the label C(app.kubernetes.io/managed-by=gpu-slices) and deletes them.
  - Workloads go first, and are gone with their pods and claims before what they use is deleted.
  - What another object owns goes with its owner.
options:
  kubeconfig:
    description: Path of the kubeconfig. Empty takes KUBECONFIG or ~/.kube/config.
    type: path
  context:
    description: Context in the kubeconfig.
    type: str
  namespace:
    description: Namespace to look in where objects of all namespaces may not be listed.
    type: str
    required: true
  timeout:
    description: Seconds each step may take until its objects are gone.
    type: int
    default: 180
author: gpu-slices
"""

EXAMPLES = r"""
- name: Remove our objects
  managed_objects:
    namespace: gpu-slices
"""

RETURN = r"""
removed:
  description: What was removed, as Kind namespace/name.
  type: list
  elements: str
  returned: success
"""

_PAUSE = 0.3


class RemovalError(Exception):
    """An object that does not go; the message says which, and what may hold it."""


def main() -> None:
    """List, delete, wait; step by step."""
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "namespace": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        api = KubeApi.from_kubeconfig(params["kubeconfig"] or "", params["context"] or "")
        found = [_list(api, step, params["namespace"]) for step in STEPS]
        names = [describe(kind, item) for step in found for kind, item in step]
        if not module.check_mode:
            for step, items in zip(STEPS, found):
                _remove(api, step, items, params)
    except (ApiFault, RemovalError) as error:
        module.fail_json(msg=str(error))
    result: dict[str, Any] = {"changed": bool(names), "removed": names}
    if names:
        result["diff"] = {"before": "".join(f"{name}\n" for name in names), "after": ""}
    module.exit_json(**result)


def _list(
    api: KubeApi, kinds: tuple[Kind, ...], namespace: str, everything: bool = False
) -> list[tuple[Kind, dict[str, Any]]]:
    """Our objects of these kinds; those that others own only with ``everything``. Unknown kinds hold none."""
    answers, faults = api.parallel({kind.plural: _question(api, kind, namespace) for kind in kinds})
    for fault in faults.values():
        raise fault
    return [
        (kind, item)
        for kind in kinds
        for item in (answers[kind.plural] or {}).get("items") or []
        if everything or removable(item)
    ]


def _question(api: KubeApi, kind: Kind, namespace: str) -> Any:
    def ask() -> dict[str, Any] | None:
        found: dict[str, Any] | None
        try:
            found = api.find(kind.path(), {"labelSelector": SELECTOR})
        except ApiFault as fault:
            if fault.kind != "forbidden":
                raise
            if kind.namespaced:
                return api.find(kind.path(namespace), {"labelSelector": SELECTOR})
            # A namespace can often be read by who may not list them all.
            one = api.find(f"{kind.path()}/{namespace}")
            found = {"items": [one] if one and ours(one) else []}
        return found

    return ask


def _remove(
    api: KubeApi, step: tuple[Kind, ...], items: list[tuple[Kind, dict[str, Any]]], params: dict[str, Any]
) -> None:
    if not items:
        return
    for kind, item in items:
        metadata = item["metadata"]
        path = f"{kind.path(metadata.get('namespace', ''))}/{metadata['name']}"
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": metadata["uid"]},
        }
        try:
            api.request("DELETE", path, body)
        except ApiFault as fault:
            # Gone already, or replaced by another of that name since we looked.
            if fault.kind not in {"not_found", "conflict"}:
                raise
    limit = time.monotonic() + params["timeout"]
    while left := _list(api, step, params["namespace"], everything=True):
        if time.monotonic() > limit:
            raise RemovalError(stuck_text([describe(kind, item) for kind, item in left], params["timeout"]))
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
