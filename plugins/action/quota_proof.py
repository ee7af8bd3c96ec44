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
from typing import Any, Callable

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.kube_api import ApiFault, KubeApi
from gpu_slices.kueue import VERSIONS
from gpu_slices.quota_run import QuotaRun
from gpu_slices.report import artifacts_directory
from gpu_slices.workload_run import RunFault

PROJECT = Path(__file__).resolve().parents[2]
STAGE = "quota"


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's docstring."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Dispatch on the phase."""
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
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
                "kubeconfig": {"default": ""},
                "context": {"default": ""},
            }
        )
        directory = self._templar.template((task_vars or {}).get("gpu_slices_artifacts_dir") or "")
        check_mode = bool(self._task.check_mode)
        if arguments["phase"] == "play" and check_mode:
            return {"changed": False, "skipped": True}
        try:
            api = KubeApi.from_kubeconfig(arguments["kubeconfig"], arguments["context"])
            run = QuotaRun(api, _settings(arguments), artifacts_directory(directory, PROJECT), _saying())
            if arguments["phase"] == "prepare":
                return run.prepare(check_mode)
            return {**run.follow(), "changed": True}
        except ApiFault as fault:
            raise AnsibleActionFail(fault.message) from None
        except RunFault as fault:
            raise AnsibleActionFail(str(fault)) from None


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


def _saying() -> Callable[[str, str], None]:
    def say(kind: str, text: str) -> None:
        if kind == "log":
            Display().display(f"  {STAGE} | {text}")
        else:
            Display().display(f"  {text}", color="cyan")

    return say
