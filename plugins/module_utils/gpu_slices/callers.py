"""Other callers of a slice: what each is made of, which of them run, and what they prove. Pure functions.

The pod that Kubeflow Pipelines would start is derived here from the compiled pipeline, as KFP's own driver
derives it; the rest is rendered by templates and only named here.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any, Dict, Iterable, Mapping, Sequence

from .checks import Check, check, judged
from .quantity import parse_quantity
from .workload_log import proof
from .workload_state import condition

CALLERS = ("pod", "job", "cronjob", "kfp", "volcano")
VOLCANO_GROUP = "batch.volcano.sh"
VOLCANO_ABSENT = "rendered and schema-checked, not run: Volcano not installed"
ORIGIN = "gpu-slices.dev/made-from"
# Pods that the Indexed Job starts at once.
JOB_PODS = 2

Object = Dict[str, Any]

_LABELS = {"app.kubernetes.io/managed-by": "gpu-slices", "app.kubernetes.io/component": "callers"}
_KINDS = {"pod": "Pod", "job": "Job", "cronjob": "Job", "kfp": "Pod", "volcano": "VolcanoJob"}
_PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
_TYPES = {"STRING": str, "STRUCT": Mapping, "LIST": list, "BOOLEAN": bool, "NUMBER_INTEGER": int}


class CallerError(ValueError):
    """A pipeline or manifest that cannot be used; the message says what was found and what is needed."""


# -- gate 1


def faults(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the stage's variables (those that are set), though their types are right."""
    found = []
    if "callers_enabled" in given and not _names(given["callers_enabled"]):
        found.append(
            f"callers_enabled is empty: name at least one of {', '.join(CALLERS)}, or leave the tag out."
        )
    hold, limit = given.get("callers_hold", 6), given.get("callers_timeout", 300)
    if _whole(hold) and _whole(limit) and not 0 <= 2 * int(hold) < int(limit):
        found.append(
            f"callers_hold is {hold}: needed is 0 or more and less than half of callers_timeout ({limit})."
        )
    queue = str(given.get("callers_volcano_queue", "default"))
    if not re.match(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", queue):
        found.append(f"callers_volcano_queue is '{queue}': needed is the name of a queue, as default.")
    resources = _mapping(given.get("callers_resources"))
    amounts = {
        f"{part}.{name}": amount
        for part in ("requests", "limits")
        for name, amount in _mapping(resources.get(part)).items()
    }
    wrong = sorted(
        [name for name in amounts if "/" in name]
        + [str(part) for part in resources if part not in {"requests", "limits"}]
    )
    if wrong:
        found.append(
            f"callers_resources holds {', '.join(wrong)}: needed are requests and limits of cpu and memory; "
            "the slice comes from the claim, and nothing else may ask for a device."
        )
    for name, amount in amounts.items():
        try:
            parse_quantity(amount)
        except ValueError as fault:
            found.append(f"callers_resources.{name}: {fault}.")
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or none: the types are checked elsewhere."""
    return value if isinstance(value, Mapping) else {}


def _names(enabled: Any) -> list[str]:
    """callers_enabled as a list: ``-e callers_enabled=pod,job`` hands it over as one string."""
    listed = enabled.split(",") if isinstance(enabled, str) else enabled
    return [str(name).strip() for name in listed or [] if str(name).strip()]


def _whole(value: Any) -> bool:
    return re.match(r"^-?\d+$", str(value)) is not None


# -- Kubeflow Pipelines


def executor_pod(documents: Iterable[Object], parameters: Mapping[str, Any]) -> Object:
    """The spec of the pod in which KFP runs the only task of a compiled pipeline.

    ``documents``: the pipeline's YAML documents (pipeline and platform specification). ``parameters``: the
    run's arguments. Container and volumes are those that KFP's driver makes of the executor and its
    Kubernetes configuration; the command is the one that KFP's launcher would start, without the launcher.
    A setting that is not handled here is an error: it must not get lost.
    """
    pipeline, platform = _documents(documents)
    values = _arguments(pipeline, parameters)
    tasks = pipeline["root"]["dag"]["tasks"]
    if len(tasks) != 1:
        raise CallerError(f"the pipeline has {len(tasks)} tasks; needed exactly one")
    task = next(iter(tasks.values()))
    inputs = {
        name: _value(reference, values)
        for name, reference in ((task.get("inputs") or {}).get("parameters") or {}).items()
    }
    label = pipeline["components"][task["componentRef"]["name"]]["executorLabel"]
    container = _container(pipeline["deploymentSpec"]["executors"][label]["container"], inputs)
    spec: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    _configure(spec, platform.get(label) or {}, values)
    return spec


def _documents(documents: Iterable[Object]) -> tuple[Object, Object]:
    pipeline: Object = {}
    platform: Object = {}
    for document in documents:
        if "root" in document:
            pipeline = document
        elif "platforms" in document:
            kubernetes = document["platforms"].get("kubernetes") or {}
            platform = (kubernetes.get("deploymentSpec") or {}).get("executors") or {}
    if not pipeline:
        raise CallerError("none of the documents is a pipeline: one with a root is needed")
    return pipeline, platform


def _arguments(pipeline: Object, parameters: Mapping[str, Any]) -> Object:
    """The run's arguments by name, of the right types, defaults filled in."""
    declared = (pipeline["root"].get("inputDefinitions") or {}).get("parameters") or {}
    unknown = sorted(set(parameters) - set(declared))
    if unknown:
        raise CallerError(f"the pipeline has no parameter {unknown[0]} (it has {', '.join(declared)})")
    values: Object = {}
    for name, definition in declared.items():
        if name not in parameters and "defaultValue" not in definition:
            raise CallerError(f"the pipeline's parameter {name} has no value")
        value = parameters.get(name, definition.get("defaultValue"))
        wanted = definition["parameterType"]
        if wanted not in _TYPES or not isinstance(value, _TYPES[wanted]):
            raise CallerError(f"the pipeline's parameter {name} is {value!r}; needed is a {wanted}")
        values[name] = value
    return values


def _value(reference: Object, values: Mapping[str, Any]) -> Any:
    """What a reference to a parameter stands for."""
    if "componentInputParameter" in reference:
        return values[reference["componentInputParameter"]]
    if "constant" in (reference.get("runtimeValue") or {}):
        return reference["runtimeValue"]["constant"]
    raise CallerError(f"the reference {json.dumps(reference)} is neither a parameter nor a constant")


def _fill(text: str, inputs: Mapping[str, Any]) -> str:
    """A string of the container with its placeholders replaced, as driver and launcher do it."""

    def one(match: Any) -> str:
        value = inputs.get(match.group(1))
        if value is None:
            raise CallerError(f"'{text}' names the input {match.group(1)}, which the task does not have")
        return value if isinstance(value, str) else json.dumps(value)

    filled = _PLACEHOLDER.sub(one, text)
    if "{{$" in filled:
        raise CallerError(f"'{filled}' holds a placeholder that only KFP's launcher can fill")
    return filled


def _container(executor: Object, inputs: Mapping[str, Any]) -> Object:
    unknown = sorted(set(executor) - {"image", "command", "args", "env", "resources"})
    if unknown:
        raise CallerError(f"the executor's setting {unknown[0]} is not handled")
    given = dict(executor.get("resources") or {})
    resources: Object = {"requests": {}, "limits": {}}
    for name, value in given.items():
        match = re.match(r"^resource(Cpu|Memory)(Request|Limit)$", name)
        if match:
            resources[f"{match.group(2).lower()}s"][match.group(1).lower()] = _fill(value, inputs)
        elif not re.match(r"^(cpu|memory)(Request|Limit)$", name):
            raise CallerError(
                f"the executor's resources hold {name}: a task that claims a slice asks for no other device"
            )
    return {
        "name": "main",
        "image": _fill(executor["image"], inputs),
        "command": [_fill(part, inputs) for part in executor.get("command") or []],
        "args": [_fill(part, inputs) for part in executor.get("args") or []],
        "env": [dict(entry) for entry in executor.get("env") or []],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _configure(spec: Object, configuration: Object, values: Mapping[str, Any]) -> None:
    """What the platform specification adds to the pod."""
    container = spec["containers"][0]
    for key, setting in configuration.items():
        if key == "imagePullPolicy":
            container["imagePullPolicy"] = setting
        elif key == "securityContext":
            # 64-bit numbers are strings in the JSON of a protobuf message.
            known = {"runAsUser": int, "runAsGroup": int, "runAsNonRoot": bool}
            container["securityContext"].update({name: known[name](value) for name, value in setting.items()})
        elif key == "configMapAsVolume":
            for entry in setting:
                name = _value(entry["configMapNameParameter"], values)
                optional = bool(entry.get("optional"))
                volume = {"name": name, "configMap": {"name": name, "optional": optional}}
                spec.setdefault("volumes", []).append(volume)
                mount = {"name": name, "mountPath": entry["mountPath"]}
                container.setdefault("volumeMounts", []).append(mount)
        elif key == "tolerations":
            for entry in setting:
                value = _value(entry["tolerationJson"], values) if "tolerationJson" in entry else entry
                listed = value if isinstance(value, list) else [value]
                spec.setdefault("tolerations", []).extend(copy.deepcopy(listed))
        elif key == "podResourceClaims":
            _claim(spec, setting, values)
        else:
            raise CallerError(f"the platform setting {key} is not handled")


def _claim(spec: Object, claims: Sequence[Object], values: Mapping[str, Any]) -> None:
    """Both hooks from podResourceClaims. KFP's driver names a claim in the pod like its template."""
    container = spec["containers"][0]
    for entry in claims:
        value = _value(entry["resourceClaimJson"], values) if "resourceClaimJson" in entry else entry
        for one in value if isinstance(value, list) else [value]:
            template = str(one.get("resourceClaimTemplateName") or "")
            if not template:
                raise CallerError(f"the claim {json.dumps(dict(one))} has no resourceClaimTemplateName")
            hook = {"name": template, "resourceClaimTemplateName": template}
            if hook in spec.setdefault("resourceClaims", []):
                raise CallerError(f"the claim {template} is there twice")
            spec["resourceClaims"].append(hook)
            container["resources"].setdefault("claims", []).append({"name": template})


def executor_manifest(
    documents: Iterable[Object],
    parameters: Mapping[str, Any],
    namespace: str,
    pull_secrets: Iterable[str] = (),
    pull_policy: str = "",
) -> Object:
    """The executor's pod as an object. Pull secrets: in KFP those of the runs' service account."""
    read = list(documents)
    pipeline, _ = _documents(read)
    spec = executor_pod(read, parameters)
    if list(pull_secrets):
        spec["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
    if pull_policy:
        spec["containers"][0]["imagePullPolicy"] = pull_policy
    spec["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    task = next(iter(pipeline["root"]["dag"]["tasks"]))
    origin = f"pipeline {pipeline['pipelineInfo']['name']}, task {task}, {pipeline['sdkVersion']}"
    metadata = {
        "name": "x",
        "namespace": namespace,
        "labels": dict(_LABELS),
        "annotations": {ORIGIN: origin},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


# -- CronJob


def job_of_cronjob(cronjob: Object, name: str, uid: str = "") -> Object:
    """The Job that ``kubectl create job NAME --from=cronjob/...`` makes; ``uid`` is the CronJob's."""
    template = cronjob["spec"]["jobTemplate"]
    metadata, owner = dict(template.get("metadata") or {}), cronjob["metadata"]
    reference = {"apiVersion": "batch/v1", "kind": "CronJob", "name": owner["name"], "controller": True}
    if uid:
        reference["uid"] = uid
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": owner["namespace"],
            "labels": dict(metadata.get("labels") or {}),
            "annotations": {
                "cronjob.kubernetes.io/instantiate": "manual",
                **dict(metadata.get("annotations") or {}),
            },
            "ownerReferences": [reference],
        },
        "spec": copy.deepcopy(dict(template["spec"])),
    }


# -- what runs


def plan(
    enabled: Iterable[str] | str,
    drafts: Mapping[str, Object],
    scripts: Object,
    claim: Mapping[str, Any],
    *,
    volcano_served: bool,
    schema: Mapping[str, Any],
    finished_jobs: Iterable[Object] = (),
) -> Object:
    """What is applied and followed, and the rows about what is not run.

    ``drafts``: caller -> manifest whose name does not matter yet. ``finished_jobs``: what is known of an
    earlier Indexed Job; one that has proved itself stays, though too few slices be free for another. Returns
    ``ground`` (what starts nothing: scripts and CronJob), ``callers`` (what starts pods, but not the
    CronJob's Job), ``cronjob`` (the CronJob) and ``manual`` (the Job to be made from it, without the owner's
    uid) or empty, ``manifests`` (all of them), ``workloads`` for workload_follow, ``rows`` for gpu_check,
    ``names`` (caller -> name).
    """
    made: Object = {
        "ground": [scripts],
        "callers": [],
        "cronjob": {},
        "manual": {},
        "workloads": [],
        "rows": [],
        "names": {},
    }
    proved = {job["metadata"]["name"] for job in finished_jobs if condition(job, "Complete")}
    wanted = [caller for caller in CALLERS if caller in _names(enabled)]
    if not wanted:
        raise CallerError(f"no caller is named; needed at least one of {', '.join(CALLERS)}")
    made["rows"].append(_hooks_row({caller: drafts[caller] for caller in wanted}, claim["template"]))
    for caller in wanted:
        draft = copy.deepcopy(dict(drafts[caller]))
        if caller == "volcano":
            made["rows"] += _volcano_rows(draft, schema, volcano_served)
            if not volcano_served:
                continue
        name = made["names"][caller] = f"gpu-slices-callers-{caller}-{_digest(scripts, draft)}"
        room = int(claim.get("free") or 0)
        if caller == "job" and room < JOB_PODS and name not in proved and not claim.get("predicted"):
            made["rows"].append(_too_few(claim["profile"], room))
            continue
        if caller == "cronjob":
            made["cronjob"], made["manual"] = draft, job_of_cronjob(draft, name)
            made["ground"].append(draft)
            made["rows"].append(_cronjob_row(draft, made["manual"]))
        else:
            draft["metadata"]["name"] = name
            made["callers"].append(draft)
        if caller == "kfp":
            made["rows"].append(_kfp_row(draft, claim["template"]))
        made["workloads"].append(
            {
                "kind": _KINDS[caller],
                "name": name,
                "container": "main" if caller == "kfp" else "caller",
                "profile": claim["profile"],
                "judge": "device",
                "world": JOB_PODS if caller == "job" else 1,
                "ok": f"slice claimed by {caller}: OK",
                "id": caller,
            }
        )
    made["manifests"] = [*made["ground"], *made["callers"], *([made["manual"]] if made["manual"] else [])]
    return made


def _digest(*objects: Object) -> str:
    text = json.dumps(objects, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _too_few(profile: str, free: int) -> Check:
    return check(
        "job",
        f"an Indexed Job claims {JOB_PODS} slices at once",
        f"free slices of {profile}: {free}",
        "skip",
        needed=f"{JOB_PODS}",
        fix="wait until more slices are free, or choose another profile (gpu_slices_profile)",
    )


def pod_spec(manifest: Object) -> Object:
    """The spec of the pods that an object leads to."""
    spec: Object = manifest["spec"]
    if manifest["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    if spec.get("tasks"):
        spec = spec["tasks"][0]
    return dict(spec["template"]["spec"]) if "template" in spec else spec


def _hooks_row(drafts: Mapping[str, Object], template: str) -> Check:
    faults = [
        f"{caller}: {fault}"
        for caller, draft in drafts.items()
        for fault in hook_faults(pod_spec(draft), template)
    ]
    return _row(
        "hooks",
        f"each caller's pod has both hooks, a claim from {template} and a container that uses it",
        f"in the pods of {', '.join(drafts)}",
        faults,
        "correct the caller's template in roles/callers",
    )


def _cronjob_row(cronjob: Object, job: Object) -> Check:
    same = job["spec"] == cronjob["spec"]["jobTemplate"]["spec"]
    return _row(
        "cronjob-job",
        "the CronJob's jobTemplate is proved without waiting for the clock",
        f"CronJob {cronjob['metadata']['name']} is applied suspended; Job {job['metadata']['name']} is made "
        "from its jobTemplate as kubectl create job --from makes one",
        [] if same else [f"Job {job['metadata']['name']} is not made from the jobTemplate"],
        "correct job_of_cronjob in gpu_slices/callers.py",
    )


def _kfp_row(pod: Object, template: str) -> Check:
    spec = pod["spec"]
    command = " ".join([*spec["containers"][0]["command"], *spec["containers"][0]["args"]])
    return _row(
        "kfp-pod",
        "the compiled pipeline's task carries the claim into its executor's pod",
        f"{pod['metadata']['annotations'][ORIGIN]}: {command}; run without KFP's launcher and Argo's "
        "containers",
        hook_faults(spec, template),
        "compile roles/callers/files/pipeline.py again",
    )


def _row(name: str, asked: str, found: str, faults: Sequence[str], fix: str) -> Check:
    return judged(name, not faults, asked=asked, found="; ".join(faults) or found, needed="no fault", fix=fix)


def _volcano_rows(draft: Object, schema: Mapping[str, Any], served: bool) -> list[Check]:
    rows = [
        _row(
            "volcano-schema",
            "the Volcano Job has only fields and values of Volcano's own type",
            f"no fault by the types of {schema['source']}",
            schema_faults(draft, schema),
            "correct roles/callers/templates/volcano.yaml.j2",
        )
    ]
    if not served:
        rows.append(
            check(
                "volcano",
                "a Volcano Job claims a slice",
                VOLCANO_ABSENT,
                "skip",
                needed=f"the API group {VOLCANO_GROUP}",
                fix="install Volcano to have it run",
            )
        )
    return rows


def hook_faults(spec: Object, template: str) -> list[str]:
    """Whether a pod's spec has both hooks: the claim from this template, and a container that uses it."""
    declared = {
        claim["name"]
        for claim in spec.get("resourceClaims") or []
        if claim.get("resourceClaimTemplateName") == template
    }
    used = {
        claim["name"]
        for container in spec.get("containers") or []
        for claim in (container.get("resources") or {}).get("claims") or []
    }
    if not declared:
        return [f"spec.resourceClaims has no claim from the template {template}"]
    return [] if declared & used else [f"no container has {sorted(declared)[0]} in resources.claims"]


def schema_faults(manifest: Object, schema: Mapping[str, Any]) -> list[str]:
    """What a JSON schema says is wrong with an object; [] if nothing."""
    import jsonschema  # noqa: PLC0415 - slow to load, and only this stage needs it

    validator = jsonschema.Draft202012Validator(dict(schema["schema"]))
    return [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(manifest)]


# -- what they prove together


def judge(members: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[Check]:
    """The Job's pods were in different slices. One row; none where the Job did not run."""
    checks = []
    for member in (one for one in members if one["id"] == "job"):
        seen = {
            pod["name"]: [str(d.get("uuid")) for d in proof(pod["log"] or "").get("devices") or []]
            for pod in member["pods"]
        }
        distinct = {uuid for uuids in seen.values() for uuid in uuids}
        ok = len(seen) == JOB_PODS and len(distinct) == JOB_PODS and all(len(u) == 1 for u in seen.values())
        checks.append(
            judged(
                "job-slices",
                ok,
                asked=f"the {JOB_PODS} pods of the Indexed Job are in different slices",
                found="; ".join(f"{pod}: {', '.join(uuids) or 'none'}" for pod, uuids in seen.items())
                or "no pod",
                needed=f"{JOB_PODS} different UUIDs",
                fix="leave slices free for both pods at once; a pod that waits gets the same one",
                evidence={"uuids": seen},
            )
        )
    return checks
