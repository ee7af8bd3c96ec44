"""Where a recipe's volume is or will be, and on which nodes its pods can run.

Arguments: ``namespace``; ``claim`` (the user's PersistentVolumeClaim, empty to have one made),
``storage_class``, ``size``, ``access_mode`` of the one that is made; ``sources`` (URIs of model and data set:
claims that pvc:// names must be there); ``devices`` (free devices of the chosen profile, with ``node``);
``kubeconfig``, ``context``. Changes nothing.

Returns ``checks`` for gpu_check, ``name`` and ``uid`` of the claim, ``create`` (its manifest, or {} when it
is there), ``nodes`` (Kubernetes nodes where all pods of the recipe may run).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import recipe
from gpu_slices.cluster_action import ClusterAction
from gpu_slices.kube_api import ApiFault, KubeApi


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "namespace": {"type": "str", "required": True},
        "claim": {"type": "str", "default": ""},
        "storage_class": {"type": "str", "default": ""},
        "size": {"type": "str", "required": True},
        "access_mode": {"type": "str", "choices": list(recipe.ACCESS_MODES), "required": True},
        "sources": {"type": "list", "elements": "str", "default": []},
        "devices": {"type": "list", "elements": "dict", "default": []},
    }

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Read claims, volume, classes and nodes, and plan."""
        plan = recipe.storage_plan(_read(api, arguments), arguments)
        return {"changed": False, **plan}


def _read(api: KubeApi, wish: dict[str, Any]) -> dict[str, Any]:
    claims = f"/api/v1/namespaces/{wish['namespace']}/persistentvolumeclaims"
    name = wish["claim"] or recipe.CLAIM
    questions: dict[str, Callable[[], Any]] = {
        "claim": partial(api.find, f"{claims}/{name}"),
        "classes": lambda: api.get("/apis/storage.k8s.io/v1/storageclasses")["items"],
        "nodes": lambda: api.get("/api/v1/nodes")["items"],
    }
    others = [other for other in recipe.sources(wish["sources"]) if other != name]
    questions.update({f"other {other}": partial(api.find, f"{claims}/{other}") for other in others})
    answers, faults = api.parallel(questions)
    # Storage classes and volumes belong to the whole cluster: not everybody may read them.
    for question, fault in faults.items():
        if question != "classes" or fault.kind != "forbidden":
            raise fault
    volume = None
    bound = ((answers["claim"] or {}).get("spec") or {}).get("volumeName")
    if bound:
        try:
            volume = api.find(f"/api/v1/persistentvolumes/{bound}")
        except ApiFault as fault:
            if fault.kind != "forbidden":
                raise
    return {
        "claim": answers["claim"],
        "volume": volume,
        "classes": answers.get("classes"),
        "others": {other: answers[f"other {other}"] for other in others},
        "labels": {
            node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in answers["nodes"]
        },
    }
