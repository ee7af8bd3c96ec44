"""Who judges what: by the names that roles use, the functions that turn logs and facts into checks.

A workload's judge takes (log of one pod or None, its allocated devices, whether CUDA is required, the
workload as given) and is called once a pod. A stage's judge takes (members, arguments) and looks at all
workloads of the stage together; a member is what :class:`workload_run.Run` knows of one workload.
"""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Sequence

from . import callers, crowd, isolation, recipe, shared, workload_log
from .checks import Check

Member = Mapping[str, Any]
WorkloadJudge = Callable[[Any, Sequence[Mapping[str, Any]], bool, Mapping[str, Any]], List[Check]]
StageJudge = Callable[[Sequence[Member], Mapping[str, Any]], List[Check]]


def _smoke(log: Any, devices: Any, cuda: bool, workload: Mapping[str, Any]) -> list[Check]:
    checks = workload_log.judge_smoke(log, devices, cuda)
    if log is None:
        return checks
    seen = workload_log.proof(log).get("without_claim") or {}
    asked = "A container without the claim, in the same pod, looks for a GPU"
    # A cluster that gives GPUs to everybody has proved its slice all the same: the stage crowd fails for it.
    return [*checks[:-1], isolation.bare_check(seen, asked, wrong_is="warn"), checks[-1]]


def _sft(log: Any, devices: Any, cuda: bool, workload: Mapping[str, Any]) -> list[Check]:
    return workload_log.judge_sft(log, devices, cuda, int(workload.get("world") or 1))


def _device(log: Any, devices: Any, cuda: bool, workload: Mapping[str, Any]) -> list[Check]:
    end = workload_log.judge_end(log, str(workload["ok"]))
    return [end] if log is None else [*workload_log.judge_device(log, devices, cuda), end]


def _end(log: Any, devices: Any, cuda: bool, workload: Mapping[str, Any]) -> list[Check]:
    return [workload_log.judge_end(log, str(workload["ok"]))]


WORKLOAD: dict[str, WorkloadJudge] = {
    "smoke": _smoke,
    "sft": _sft,
    # One device, the allocated one, and ``ok`` as the last line.
    "device": _device,
    # ``ok`` as the last line, and nothing more.
    "end": _end,
    "recipe": recipe.judge,
}

STAGE: dict[str, StageJudge] = {
    "callers": callers.judge,
    "crowd": crowd.judge,
    "isolation": isolation.judge,
    "isolation_root": isolation.judge_root,
    "shared": shared.judge,
}
