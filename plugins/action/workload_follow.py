"""Prepare, follow and judge the workloads of a stage.

``phase: prepare`` looks at what is there. A workload of the same name that succeeded is judged again, from
its log and from what was recorded on it; if that still holds (the device it was given is still published) it
is not run again, and when that is so of all, ``settled`` is true. Failed or doubtful ones, and ones of
another name of the same component, are deleted. ``phase: follow`` follows the workloads side by side to
their end, judges them and records what they were given.

Arguments: ``phase``, ``stage``, ``part`` (for a stage that follows several groups: names its files),
``namespace``, ``workloads`` [{``kind`` Pod | TrainJob | Job | VolcanoJob, ``name``, ``container``, ``judge``
(a name in judges.WORKLOAD), ``profile``, ``world`` (pods that it has), ``ok`` (last line of its log, for the
judges that take it), ``id`` (its row among several)}], ``manifests`` (rendered objects), ``together``
(several workloads prove something only together: all run again, or none), ``judge`` and ``judge_arguments``
(what they prove together: a name in judges.STAGE), ``timeout`` and ``schedule_timeout`` (s; of several,
counted from when no other one is at work any more), ``clear`` [{``kind``, ``namespace``}] (where else
unfinished ones of this stage must be gone before these are made anew), ``require_cuda``, ``kubeconfig``,
``context``.

Returns ``checks`` for gpu_check (the verdict is gpu_check's: a workload that failed does not fail this
task), ``settled``, ``exists``, ``pods`` [{name, node, devices}]. In check mode nothing is deleted and nothing
followed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import inputs, judges
from gpu_slices.cluster_action import ClusterAction, saying
from gpu_slices.kube_api import ApiFault, KubeApi
from gpu_slices.workload_follow import KINDS
from gpu_slices.workload_run import Run, RunFault

_WORKLOAD = {
    "kind": {"choices": list(KINDS), "required": True},
    "name": {"required": True},
    "container": {"required": True},
    "judge": {"choices": list(judges.WORKLOAD), "required": True},
    "profile": {"default": ""},
    "world": {"type": "int", "default": 1},
    "ok": {"default": ""},
    "id": {"default": ""},
}
_PLACE = {"kind": {"choices": list(KINDS), "required": True}, "namespace": {"required": True}}


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "phase": {"choices": ["prepare", "follow"], "required": True},
        "stage": {"choices": list(inputs.STAGES), "required": True},
        "part": {"default": ""},
        "namespace": {"required": True},
        "workloads": {"type": "list", "elements": "dict", "options": _WORKLOAD, "required": True},
        "clear": {"type": "list", "elements": "dict", "options": _PLACE, "default": []},
        "manifests": {"type": "list", "elements": "dict", "default": []},
        "together": {"type": "bool", "default": True},
        "judge": {"choices": ["", *judges.STAGE], "default": ""},
        "judge_arguments": {"type": "dict", "default": {}},
        "timeout": {"type": "int", "default": 600},
        "schedule_timeout": {"type": "int", "default": 120},
        "require_cuda": {"type": "bool", "default": False},
    }
    FAULTS = (ApiFault, RunFault)

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Dispatch on the phase."""
        check_mode = bool(self._task.check_mode)
        if arguments["phase"] == "follow" and check_mode:
            return {"changed": False, "skipped": True}
        run = Run(api, arguments, self.artifacts(variables), saying(arguments["stage"]))
        return run.prepare(check_mode) if arguments["phase"] == "prepare" else run.follow()
