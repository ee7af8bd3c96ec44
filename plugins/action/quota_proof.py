"""Prove a slice quota: create TrainJobs in turn, watch what Kueue makes of them, and judge it.

``phase: prepare`` looks at what is there, as workload_follow does: TrainJobs of the same names that have
proved all of it are judged again from their logs and from what was recorded on them, and ``settled`` is true;
anything else of this stage is deleted. ``phase: play`` creates the jobs, each in its turn, follows them to
their end and records what happened.

Arguments: ``phase``, ``namespace``, ``jobs`` [{``id`` (borrower-1 ... | waiting | urgent), ``manifest``}],
``manifests`` (all rendered objects), ``container``, ``profile``, ``resource`` (the name that Kueue counts),
``limit`` (devices of all queues together), ``kueue_version`` (v1beta2 | v1beta1), ``timeout`` and
``schedule_timeout`` (s), ``require_cuda``, ``kubeconfig``, ``context``.

Returns ``checks`` for gpu_check, ``settled``, ``pods``. In check mode nothing is deleted and nothing played.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.cluster_action import ClusterAction, saying
from gpu_slices.kube_api import ApiFault, KubeApi
from gpu_slices.kueue import VERSIONS
from gpu_slices.quota_run import QuotaRun
from gpu_slices.workload_run import RunFault

STAGE = "quota"


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "phase": {"choices": ["prepare", "play"], "required": True},
        "namespace": {"required": True},
        "jobs": {"type": "list", "elements": "dict", "required": True},
        "manifests": {"type": "list", "elements": "dict", "default": []},
        "container": {"default": "node"},
        "profile": {"default": ""},
        "resource": {"required": True},
        "limit": {"type": "int", "required": True},
        "kueue_version": {"choices": list(VERSIONS), "default": VERSIONS[0]},
        "timeout": {"type": "int", "default": 600},
        "schedule_timeout": {"type": "int", "default": 120},
        "require_cuda": {"type": "bool", "default": False},
    }
    FAULTS = (ApiFault, RunFault)

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Dispatch on the phase."""
        check_mode = bool(self._task.check_mode)
        if arguments["phase"] == "play" and check_mode:
            return {"changed": False, "skipped": True}
        run = QuotaRun(api, _settings(arguments), self.artifacts(variables), saying(STAGE))
        if arguments["phase"] == "prepare":
            return run.prepare(check_mode)
        return {**run.follow(), "changed": True}


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    # Ansible hands out tagged subclasses of str and int; JSON makes them plain.
    jobs: list[dict[str, Any]] = json.loads(json.dumps(arguments["jobs"]))
    return {
        **{k: arguments[k] for k in ("namespace", "manifests", "resource", "limit", "kueue_version")},
        **{k: arguments[k] for k in ("timeout", "schedule_timeout", "require_cuda")},
        "stage": STAGE,
        "together": True,
        "jobs": {job["manifest"]["metadata"]["name"]: job["manifest"] for job in jobs},
        "workloads": [
            {
                "id": str(job["id"]),
                "kind": "TrainJob",
                "name": job["manifest"]["metadata"]["name"],
                "container": arguments["container"],
                "judge": "sft",
                "profile": arguments["profile"],
                "world": 1,
            }
            for job in jobs
        ],
    }
