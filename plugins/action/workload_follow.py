"""Prepare, follow and judge a workload of ours: a smoke Pod or a fine-tuning TrainJob.

``phase: prepare`` looks at what is there. A workload of the same name that succeeded is judged again, from
its log and from the allocation recorded on it; if that still holds (the device it was given is still
published), ``settled`` is true and nothing needs to run. A failed or doubtful one, and finished or running
ones of another name of the same component, are deleted. ``phase: follow`` follows the workload to its end,
judges it and records the allocation on it.

Arguments: ``phase``, ``stage`` (smoke | sft), ``kind`` (Pod | TrainJob), ``name``, ``namespace``,
``container``, ``manifests`` (rendered objects), ``profile``, ``timeout`` and ``schedule_timeout`` (s),
``require_cuda``, ``world`` (processes that train together), ``kubeconfig``, ``context``.

Returns ``checks`` for gpu_check (the verdict is gpu_check's: a workload that failed does not fail this
task), ``settled``, ``exists``, ``pods`` [{name, node, devices}]. In check mode nothing is deleted and
nothing followed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import workload_log, workload_state
from gpu_slices.kube_api import MERGE_PATCH, ApiFault, KubeApi
from gpu_slices.report import artifacts_directory, now, write_atomic
from gpu_slices.resource_slices import merge_slices
from gpu_slices.workload_follow import RESOURCE, Follower, Outcome, Target, read_log

PROJECT = Path(__file__).resolve().parents[2]
EVIDENCE = "gpu-slices.dev/evidence"
COMPONENT = "app.kubernetes.io/component"
PREFIX = "gpu-slices-"
_DELETE_SECONDS = 120

Check = dict[str, Any]


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's docstring."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Dispatch on the phase."""
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                "phase": {"choices": ["prepare", "follow"], "required": True},
                "stage": {"choices": ["smoke", "sft"], "required": True},
                "kind": {"choices": ["Pod", "TrainJob"], "required": True},
                "name": {"required": True},
                "namespace": {"required": True},
                "container": {"required": True},
                "manifests": {"type": "list", "elements": "dict", "default": []},
                "profile": {"default": ""},
                "timeout": {"type": "int", "default": 600},
                "schedule_timeout": {"type": "int", "default": 120},
                "require_cuda": {"type": "bool", "default": False},
                "world": {"type": "int", "default": 1},
                "kubeconfig": {"default": ""},
                "context": {"default": ""},
            }
        )
        variables = task_vars or {}
        directory = variables.get("gpu_slices_artifacts_dir") or ""
        work = _Work(arguments, artifacts_directory(self._templar.template(directory), PROJECT))
        check_mode = bool(self._task.check_mode)
        try:
            work.connect()
            if arguments["phase"] == "prepare":
                return work.prepare(check_mode)
            return {"changed": False, "skipped": True} if check_mode else work.follow()
        except ApiFault as fault:
            raise AnsibleActionFail(fault.message) from None


class _Work:
    """One workload and what is to be done with it."""

    def __init__(self, arguments: dict[str, Any], artifacts: Path) -> None:
        self.arguments = arguments
        self.stage = str(arguments["stage"])
        self.artifacts = artifacts
        self.target = Target(
            kind=arguments["kind"],
            namespace=arguments["namespace"],
            name=arguments["name"],
            container=arguments["container"],
            profile=arguments["profile"],
        )
        self.api: KubeApi

    def connect(self) -> None:
        """Open the API; nothing is sent yet."""
        self.api = KubeApi.from_kubeconfig(self.arguments["kubeconfig"], self.arguments["context"])

    # -- prepare

    def prepare(self, check_mode: bool) -> dict[str, Any]:
        """See what is there, judge or remove it, and keep the rendered manifests."""
        text = yaml.safe_dump_all(json.loads(json.dumps(self.arguments["manifests"])), sort_keys=False)
        answers = self._read()
        existing, others = answers["item"], self._others(answers["others"])
        settled, pods, checks = False, [], []
        if existing and workload_state.finished(existing) == "succeeded":
            pods = self._recorded(existing, answers["slices"])
            checks = self._judge(pods, note=f"not run again: done {_completed(existing)}")
            settled = bool(pods) and not any(check["status"] == "fail" for check in checks)
            checks.insert(0, self._judge_end(existing))
        if settled:
            _say(
                "note",
                f"not run again: {self.target.kind} {self.target.name}, done {_completed(existing)}, holds",
            )
            for pod in pods:
                _say("log", workload_log.last_line(pod["log"] or ""), self.stage)
        running = existing and not workload_state.finished(existing) and not _deleting(existing)
        stale = [] if settled or running or not existing else [existing]
        if not check_mode:
            write_atomic(self.artifacts / "manifests" / f"{self.stage}.yaml", text)
            self._delete([*stale, *others])
        result: dict[str, Any] = {
            "changed": bool(stale or others) or (check_mode and not settled and not running),
            "settled": settled,
            "exists": bool(running),
            "checks": checks if settled else [],
            "pods": _brief(pods) if settled else [],
            "removed": [item["metadata"]["name"] for item in [*stale, *others]],
        }
        if check_mode and not settled and not running:
            result["diff"] = {"before": "", "after": text, "after_header": f"{self.stage} in the cluster"}
        if settled and not check_mode:
            result["invocation"] = {"gpu_report": self._payload(pods, answers["slices"])}
        return result

    def _read(self) -> dict[str, Any]:
        target, selector = self.target, {"labelSelector": f"{COMPONENT}={self.stage}"}
        api = self.api
        answers, faults = api.parallel(
            {
                "item": lambda: api.find(target.path),
                "others": lambda: api.find(target.collection, selector) or {},
                "slices": lambda: api.find(f"{RESOURCE}/resourceslices") or {},
            }
        )
        for fault in faults.values():
            raise fault
        if answers["item"]:
            answers["item"]["kind"] = target.kind
        answers["slices"] = merge_slices(answers["slices"].get("items") or [])["devices"]
        return answers

    def _others(self, listing: dict[str, Any]) -> list[dict[str, Any]]:
        """Ours, of the same component, under another name: made from other inputs than now."""
        return [
            item
            for item in listing.get("items") or []
            if item["metadata"]["name"] != self.target.name
            and item["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "gpu-slices"
            and not item["metadata"].get("ownerReferences")
        ]

    def _recorded(self, item: dict[str, Any], published: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pods of an earlier run with their logs, if what they were given is still published."""
        try:
            evidence = json.loads((item["metadata"].get("annotations") or {}).get(EVIDENCE, ""))
            pods = list(evidence["pods"])
            facts = {(d["pool"], d["device"], d["uuid"]): d for d in published}
            return [
                {
                    "name": pod["name"],
                    "node": pod["node"],
                    "at": evidence["at"],
                    "log": read_log(self.api, self.target, pod["name"]),
                    "devices": [{**facts[d["pool"], d["device"], d["uuid"]], **d} for d in pod["devices"]],
                }
                for pod in pods
            ]
        except (ValueError, KeyError, TypeError):
            return []

    def _delete(self, items: list[dict[str, Any]]) -> None:
        """Delete, and wait until they and their pods are gone: their slices are free only then."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        for item in items:
            path = f"{self.target.collection}/{item['metadata']['name']}"
            _say("note", f"removing {self.target.kind} {item['metadata']['name']} of an earlier run")
            try:
                self.api.request("DELETE", path, body)
            except ApiFault as fault:
                if fault.kind != "not_found":
                    raise
            limit = time.monotonic() + _DELETE_SECONDS
            while self.api.find(path) is not None:
                if time.monotonic() > limit:
                    name = f"{self.target.kind} {item['metadata']['name']}"
                    raise AnsibleActionFail(
                        f"{name} is still there {_DELETE_SECONDS} s after its deletion; "
                        "see its finalizers and pods: a pod whose DRA driver is gone cannot end."
                    )
                time.sleep(0.3)

    # -- follow

    def follow(self) -> dict[str, Any]:
        """Follow to the end, judge, and record the evidence."""
        self._clear()
        follower = Follower(
            self.api,
            self.target,
            _prefixed(self.stage),
            timeout=self.arguments["timeout"],
            schedule_timeout=self.arguments["schedule_timeout"],
        )
        outcome = follower.run()
        checks = [self._judge_outcome(outcome)]
        if outcome.result == "succeeded":
            checks += self._judge(outcome.pods)
        for pod in outcome.pods:
            if pod["log"]:
                write_atomic(self.artifacts / "logs" / f"{self.stage}-{pod['name']}.log", pod["log"])
        if any(check["status"] == "fail" for check in checks):
            checks[0]["evidence"]["files"] = self._save(outcome)
        else:
            self._annotate(outcome)
        return {
            "changed": False,
            "settled": False,
            "checks": checks,
            "pods": _brief(outcome.pods),
            "seconds": outcome.seconds,
            "invocation": {"gpu_report": self._payload(outcome.pods, outcome.published)},
        }

    def _clear(self) -> None:
        """Drop logs and evidence of this stage's earlier runs: the report is about this one."""
        for path in (self.artifacts / "logs").glob(f"{self.stage}-{PREFIX}*.log"):
            path.unlink()
        for path in (self.artifacts / "evidence").glob(f"{self.stage}-{PREFIX}*"):
            shutil.rmtree(path)

    def _judge_end(self, item: dict[str, Any]) -> Check:
        return {
            "id": "completed",
            "status": "pass",
            "asked": f"{self.target.kind} {self.target.name} succeeds",
            "found": f"{workload_state.end_text(item, self.target.container)}, not run again",
            "needed": "success",
            "fix": "",
            "evidence": {},
        }

    def _judge_outcome(self, outcome: Outcome) -> Check:
        trouble = outcome.trouble or {}
        last = "; ".join(_end(self.target, pod) for pod in outcome.pods if pod["node"])
        done = workload_state.end_text(outcome.item, self.target.container) if outcome.item else ""
        good = outcome.result == "succeeded"
        return {
            "id": "completed" if good else trouble.get("id", "completed"),
            "status": "pass" if good else "fail",
            "asked": f"{self.target.kind} {self.target.name} succeeds",
            "found": done if good else f"{trouble.get('found')}" + (f"; {last}" if last else ""),
            "needed": "success",
            "fix": trouble.get("fix", ""),
            "seconds": outcome.seconds,
            "evidence": {
                "pods": [{k: p[k] for k in ("name", "node", "end")} for p in outcome.pods],
                **({} if good else {"tail": _tail(outcome)}),
            },
        }

    def _judge(self, pods: list[dict[str, Any]], note: str = "") -> list[Check]:
        cuda = bool(self.arguments["require_cuda"])
        world = int(self.arguments["world"]) if self.stage == "sft" else 1
        if len(pods) != world:
            return [
                {
                    "id": "pods",
                    "status": "fail",
                    "asked": f"the logs of {world} pods can be judged",
                    "found": f"{len(pods)} pods ({', '.join(p['name'] for p in pods) or 'none'})",
                    "needed": f"{world} pods",
                    "fix": "run again; nothing else may delete the pods meanwhile",
                    "evidence": {},
                }
            ]
        checks: list[Check] = []
        for index, pod in enumerate(pods):
            if self.stage == "smoke":
                judged = workload_log.judge_smoke(pod["log"], pod["devices"], cuda)
            else:
                judged = workload_log.judge_sft(pod["log"], pod["devices"], cuda, world)
            for check in judged:
                check["id"] += f"-{index}" if len(pods) > 1 else ""
                check["evidence"].update(
                    {"pod": pod["name"], "node": pod["node"], **({"note": note} if note else {})}
                )
            checks += judged
        return checks

    def _annotate(self, outcome: Outcome) -> None:
        """Keep the allocation on the workload, for a second run: the claims are gone by then."""
        evidence = {
            "at": now(),
            "pods": [
                {
                    "name": pod["name"],
                    "node": pod["node"],
                    "devices": [
                        {k: d[k] for k in ("pool", "device", "uuid", "claim")} for d in pod["devices"]
                    ],
                }
                for pod in outcome.pods
            ],
        }
        body = {"metadata": {"annotations": {EVIDENCE: json.dumps(evidence, sort_keys=True)}}}
        self.api.request(
            "PATCH",
            self.target.path,
            body,
            params={"fieldManager": "gpu-slices-evidence"},
            content_type=MERGE_PATCH,
        )

    def _save(self, outcome: Outcome) -> list[str]:
        """Everything a person wants to see after a failure, as files; returns their names."""
        folder = self.artifacts / "evidence" / f"{self.stage}-{self.target.name}"
        wanted: dict[str, Callable[[], Any]] = {
            "workload.yaml": lambda: self.api.find(self.target.path),
            "pods.yaml": lambda: self.api.get(self.target.pods, self.target.pod_selector),
            "claims-now.yaml": lambda: self.api.get(f"{RESOURCE}/resourceclaims"),
            "slices.yaml": lambda: self.api.get(f"{RESOURCE}/resourceslices"),
        }
        answers, faults = self.api.parallel(wanted)
        texts = {name: yaml.safe_dump(answer, sort_keys=False) for name, answer in answers.items() if answer}
        texts["claims-recorded.yaml"] = yaml.safe_dump_all(outcome.claims, sort_keys=False)
        texts["events.txt"] = "\n".join([*outcome.events, *(f.message for f in faults.values())]) + "\n"
        for pod in outcome.pods:
            texts[f"log-{pod['name']}.txt"] = pod["log"] or "the log could not be read\n"
        for name, text in texts.items():
            write_atomic(folder / name, text)
        _say("note", f"evidence: {folder}")
        return [str((folder / name).relative_to(self.artifacts)) for name in sorted(texts)]

    def _payload(self, pods: list[dict[str, Any]], published: list[dict[str, Any]]) -> dict[str, Any]:
        held = [
            {
                **{k: device.get(k) for k in ("node", "pool", "device", "uuid", "claim")},
                "namespace": self.target.namespace,
                "pod": pod["name"],
                "stage": self.stage,
                "at": pod.get("at") or now(),
            }
            for pod in pods
            for device in pod["devices"]
        ]
        payload: dict[str, Any] = {"allocations": held, "header": {"cluster": self.api.server}}
        for pod in pods:
            payload["header"]["versions"] = workload_log.versions(pod["log"] or "")
        if published:
            payload["devices"] = [workload_state.picture_device(d) for d in published]
        return payload


def _prefixed(stage: str) -> Callable[[str, str], None]:
    def say(kind: str, text: str) -> None:
        _say(kind, text, stage)

    return say


def _say(kind: str, text: str, stage: str = "") -> None:
    if kind == "log":
        Display().display(f"  {stage} | {text}")
    else:
        Display().display(f"  {text}", color="cyan")


def _end(target: Target, pod: dict[str, Any]) -> str:
    """How a pod ended, where the workload does not say so itself, and its last words."""
    end = "" if target.kind == "Pod" else f"pod {pod['name']} on {pod['node']} {pod['end']}, "
    line = workload_log.last_line(pod["log"] or "")
    return end + (f"last line of its log: {line}" if line else "no log")


def _tail(outcome: Outcome, lines: int = 20) -> list[str]:
    return [line for pod in outcome.pods[:1] for line in (pod["log"] or "").splitlines()[-lines:]]


def _brief(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("node", "pool", "device", "uuid", "profile", "claim")
    return [
        {"name": p["name"], "node": p["node"], "devices": [{k: d.get(k) for k in keys} for d in p["devices"]]}
        for p in pods
    ]


def _deleting(item: dict[str, Any]) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def _completed(item: dict[str, Any]) -> str:
    entry = workload_state.condition(item, "Complete") or {}
    for status in (item.get("status") or {}).get("containerStatuses") or []:
        ended = (status.get("state") or {}).get("terminated") or {}
        if ended.get("finishedAt"):
            return str(ended["finishedAt"])
    return str(entry.get("lastTransitionTime") or "earlier")
