#!/usr/bin/python
"""Remove every Kubernetes object this project made, by label, in an order in which nothing hangs."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.kube_api import ApiFault, KubeApi
from ansible.module_utils.gpu_slices.managed import (
    SELECTOR,
    Kind,
    describe,
    foreign,
    holdable,
    holds_text,
    ours,
    removable,
    steps,
    stuck_text,
)

DOCUMENTATION = r"""
module: managed_objects
short_description: Remove every Kubernetes object this project made
description:
  - Finds objects of all namespaces by the label C(app.kubernetes.io/managed-by=gpu-slices) and deletes them.
  - Workloads go first, and are gone with their pods and claims before what they use is deleted.
  - What another object owns goes with its owner.
  - A namespace that holds something else as well stays, and so does one whose content cannot be listed.
options:
  kubeconfig:
    description: Path of the kubeconfig. Empty takes KUBECONFIG or ~/.kube/config.
    type: path
  context:
    description: Context in the kubeconfig.
    type: str
  namespaces:
    description:
      - Namespaces to look in where objects of all namespaces may not be listed.
      - In all but the first one what may not be listed is passed over; the namespace stays then.
    type: list
    elements: str
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
    namespaces: [gpu-slices, gpu-slices-isolation]
"""

RETURN = r"""
removed:
  description: What was removed, as Kind namespace/name.
  type: list
  elements: str
  returned: success
kept:
  description: Namespaces of ours that stay, and why.
  type: list
  elements: dict
  returned: success
  contains:
    namespace:
      description: Its name.
      type: str
    because:
      description: What it holds that is not ours, or what could not be listed.
      type: str
"""

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
# Names and owners suffice: what is in a Secret is nobody's business here.
_NAMES = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_PAUSE = 0.3


class RemovalError(Exception):
    """An object that does not go; the message says which, and what may hold it."""


def main() -> None:
    """List, delete, wait; step by step."""
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "namespaces": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        api = KubeApi.from_kubeconfig(params["kubeconfig"] or "", params["context"] or "")
        names, kept = _clear(api, params, module.check_mode)
    except (ApiFault, RemovalError) as error:
        module.fail_json(msg=str(error))
    result: dict[str, Any] = {"changed": bool(names), "removed": names, "kept": kept}
    if names:
        result["diff"] = {"before": "".join(f"{name}\n" for name in names), "after": ""}
    module.exit_json(**result)


def _clear(api: KubeApi, params: dict[str, Any], check_mode: bool) -> tuple[list[str], list[dict[str, str]]]:
    """Remove step by step what is there now. Returns what went, and the namespaces that stay."""
    versions = (api.find("/apis/kueue.x-k8s.io") or {}).get("versions") or []
    order = steps(version["version"] for version in versions)
    found = [_list(api, step, params["namespaces"]) for step in order]
    names: list[str] = []
    kept: dict[str, str] = {}
    theirs: set[str] = set()
    for step, items in zip(order, found):
        # Looked at only now, when our own objects are gone.
        kept.update(
            _kept(api, [item["metadata"]["name"] for kind, item in items if kind.kind == "Namespace"])
        )
        going = [(kind, item) for kind, item in items if not _stays(kind, item, kept)]
        if not check_mode:
            theirs |= _remove(api, step, going, params, kept)
        names += [
            describe(kind, item)
            for kind, item in going
            if not _stays(kind, item, kept) and item["metadata"].get("uid") not in theirs
        ]
    return names, [{"namespace": name, "because": because} for name, because in kept.items()]


def _stays(kind: Kind, item: dict[str, Any], kept: dict[str, str]) -> bool:
    return kind.kind == "Namespace" and item["metadata"]["name"] in kept


def _of_others(kind: Kind, item: dict[str, Any], namespaces: list[str]) -> bool:
    """Can the object be of others who use this project? Some can be listed cluster-wide by everybody."""
    place = item["metadata"].get("namespace")
    return place not in namespaces if place else kind.optional


def _kept(api: KubeApi, namespaces: list[str]) -> dict[str, str]:
    """Those of our namespaces that must stay, and why."""
    if not namespaces:
        return {}
    kinds = holdable([api.get("/api", accept=_DISCOVERY), api.get("/apis", accept=_DISCOVERY)])
    if not kinds:
        return dict.fromkeys(namespaces, "the API server does not tell which kinds of objects it may hold")
    kept = {}
    for namespace in namespaces:
        paths = {kind.path(namespace): kind for kind in kinds}
        answers, faults = api.parallel({path: partial(api.get, path, accept=_NAMES) for path in paths})
        others = [
            describe(paths[path], item)
            for path, answer in answers.items()
            for item in answer.get("items") or []
            if foreign(paths[path], item)
        ]
        unread = [fault.message for fault in faults.values() if fault.kind != "not_found"]
        if others:
            kept[namespace] = holds_text(others)
        elif unread:
            kept[namespace] = f"what it holds cannot be listed: {unread[0]}"
    return kept


def _list(
    api: KubeApi, kinds: tuple[Kind, ...], namespaces: list[str], everything: bool = False
) -> list[tuple[Kind, dict[str, Any]]]:
    """Our objects of these kinds; those that others own only with ``everything``. Unknown kinds hold none."""
    answers, faults = api.parallel({kind.path(): _question(api, kind, namespaces) for kind in kinds})
    for fault in faults.values():
        raise fault
    return [
        (kind, item)
        for kind in kinds
        for item in (answers[kind.path()] or {}).get("items") or []
        if everything or removable(item)
    ]


def _question(api: KubeApi, kind: Kind, namespaces: list[str]) -> Any:
    """Our objects of a kind: everywhere, or, for who may not list that, in these namespaces."""

    def inside(namespace: str) -> list[dict[str, Any]]:
        if not kind.namespaced:
            # A namespace can often be read by who may not list them all.
            one = None if kind.optional else api.find(f"{kind.path()}/{namespace}")
            return [one] if one and ours(one) else []
        try:
            return list(
                (api.find(kind.path(namespace), {"labelSelector": SELECTOR}) or {}).get("items") or []
            )
        except ApiFault as fault:
            if fault.kind != "forbidden" or not (kind.optional or namespace != namespaces[0]):
                raise
            return []

    def ask() -> dict[str, Any] | None:
        try:
            found: dict[str, Any] | None = api.find(kind.path(), {"labelSelector": SELECTOR})
        except ApiFault as fault:
            if fault.kind != "forbidden":
                raise
            return {"items": [item for namespace in namespaces for item in inside(namespace)]}
        return found

    return ask


def _remove(
    api: KubeApi,
    step: tuple[Kind, ...],
    items: list[tuple[Kind, dict[str, Any]]],
    params: dict[str, Any],
    kept: dict[str, str],
) -> set[str]:
    """Delete and wait. Returns the UIDs of what others made with this project and we may not delete."""
    theirs: set[str] = set()
    if not items:
        return theirs
    for kind, item in items:
        metadata = item["metadata"]
        path = f"{kind.path(metadata.get('namespace', ''))}/{metadata['name']}"
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # Trainer makes a JobSet anew as long as its TrainJob is there: one that waited for its dependents
            # would never be gone while it still runs.
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        try:
            api.request("DELETE", path, body)
        except ApiFault as fault:
            if fault.kind == "forbidden" and kind.kind == "Namespace":
                kept[metadata["name"]] = f"it is empty, and this user may not delete it: {fault.message}"
            elif fault.kind == "forbidden" and _of_others(kind, item, params["namespaces"]):
                theirs.add(metadata["uid"])
            # Gone already, or replaced by another of that name since we looked.
            elif fault.kind not in {"not_found", "conflict"}:
                raise
    limit = time.monotonic() + params["timeout"]
    while left := [
        (kind, item)
        for kind, item in _list(api, step, params["namespaces"], everything=True)
        if not _stays(kind, item, kept) and item["metadata"].get("uid") not in theirs
    ]:
        if time.monotonic() > limit:
            raise RemovalError(stuck_text([describe(kind, item) for kind, item in left], params["timeout"]))
        time.sleep(_PAUSE)
    return theirs


if __name__ == "__main__":
    main()
