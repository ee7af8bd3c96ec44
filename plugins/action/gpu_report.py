"""Finish the report: read the published devices and who holds them now, write the files, print the summary.

Arguments: ``kubeconfig``, ``context``. A cluster that does not answer costs the picture, not the report.
The files are written and the summary is printed by the callback gpu_slices_report.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.cluster_action import open_api
from gpu_slices.kube_api import ApiFault, KubeApi
from gpu_slices.report import now
from gpu_slices.resource_slices import merge_slices, with_holders
from gpu_slices.workload_state import picture_device

_RESOURCE = "/apis/resource.k8s.io/v1"


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's docstring."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Hand the reading over to the callback."""
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={"kubeconfig": {"default": ""}, "context": {"default": ""}}
        )
        payload: dict[str, Any] = {"summarise": True}
        result: dict[str, Any] = {"changed": False, "invocation": {"gpu_report": payload}}
        try:
            payload.update(_reading(open_api(arguments)))
        except ApiFault as fault:
            result["warnings"] = [f"The picture shows what was read earlier: {fault.message}"]
        return result


def _reading(api: KubeApi) -> dict[str, Any]:
    answers, faults = api.parallel(
        {
            "slices": lambda: api.find(f"{_RESOURCE}/resourceslices") or {},
            "claims": lambda: api.find(f"{_RESOURCE}/resourceclaims") or {},
            "version": lambda: api.get("/version"),
        }
    )
    for fault in faults.values():
        raise fault
    published = merge_slices(answers["slices"].get("items") or [])["devices"]
    devices = with_holders(published, answers["claims"].get("items") or [])
    held = [
        {
            **{key: device[key] for key in ("node", "pool", "device", "uuid")},
            "namespace": device["holder"]["namespace"],
            "pod": ", ".join(device["holder"]["pods"]),
            "claim": device["holder"]["claim"],
            "now": True,
            "at": now(),
        }
        for device in devices
        if device["holder"]
    ]
    return {
        "devices": [picture_device(device) for device in devices],
        "allocations": held,
        "header": {
            "cluster": api.server,
            "versions": {"kubernetes": answers["version"].get("gitVersion", "")},
        },
    }
