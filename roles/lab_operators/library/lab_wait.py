"""Wait, in one call, until a cluster's nodes, deployments and webhooks work."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.kube_api import APPLY_PATCH, MERGE_PATCH, ApiFault, KubeApi

DOCUMENTATION = """
module: lab_wait
short_description: Wait until nodes are Ready, deployments and APIs are available and webhooks answer
description:
  - Asks for everything in turn until all of it is so, and says what is still missing when time is up.
  - A webhook answers when a dry run of an object that it has to admit is accepted.
  - First looks whether what O(fingerprint) stands for was put into the cluster last, and waits only if so.
  - With O(record) it waits in any case, and notes the fingerprint in the cluster at the end.
  - With O(jobs) it only waits until these have ended, and fails then if one has failed.
  - In either case it sees to it meanwhile that pods of O(deployments) find their certificates soon.
options:
  kubeconfig: {description: Kubeconfig of the cluster., type: path, required: true}
  nodes: {description: Nodes that must be Ready., type: list, elements: str, default: []}
  started: {description: Those that were just started., type: list, elements: str, default: []}
  since: {description: "When they were started, seconds since 1970.", type: float, default: 0}
  deployments: {description: "As namespace/name.", type: list, elements: str, default: []}
  apis: {description: APIServices that must answer., type: list, elements: str, default: []}
  jobs: {description: Running asynchronous tasks as registered., type: list, elements: dict, default: []}
  probes: {description: Objects whose creation must be accepted., type: list, elements: dict, default: []}
  fingerprint: {description: Hash of what should have been put into the cluster., type: str, required: true}
  record: {description: Whether to record the fingerprint at the end., type: bool, default: false}
  timeout: {description: Seconds., type: int, default: 180}
author: gpu-slices
"""
EXAMPLES = """
- name: Wait for the nodes
  lab_wait:
    kubeconfig: /var/cache/gpu-slices/run/lab/kubeconfig
    nodes: [control, a30]
    fingerprint: 1f0c2a
"""
RETURN = """
seconds: {description: How long it took until each thing was so., returned: success, type: dict}
recorded: {description: Whether the cluster has what was asked about., returned: without jobs, type: bool}
"""

Check = Callable[[], str]


def ready(api: KubeApi) -> str:
    """Ask the API server whether it is ready, RBAC's own roles included."""
    return "" if api.text("/readyz") == "ok" else "is not ready"


def lease_fault(lease: Mapping[str, Any] | None, since: float) -> str:
    """Why the node's kubelet is not known to have spoken since a time; "" when it has.

    The cluster calls a node Ready for most of a minute after its kubelet has died.
    """
    renewed = (lease or {}).get("spec", {}).get("renewTime")
    if not renewed or datetime.datetime.fromisoformat(renewed).timestamp() < since:
        return f"has not been heard of since it was started (last: {renewed or 'never'})"
    return ""


def node_fault(node: Mapping[str, Any] | None) -> str:
    """Why the node is not ready; "" when it is."""
    if node is None:
        return "has not registered"
    for condition in node.get("status", {}).get("conditions") or []:
        if condition["type"] == "Ready":
            return "" if condition["status"] == "True" else f"is not ready: {condition.get('message', '')}"
    return "has no conditions yet"


def deployment_fault(deployment: Mapping[str, Any] | None) -> str:
    """Why the deployment is not available in its newest form; "" when it is."""
    if deployment is None:
        return "does not exist"
    status = deployment.get("status", {})
    wanted = deployment.get("spec", {}).get("replicas", 1)
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return "has not been looked at by its controller"
    ready = min(status.get("availableReplicas", 0), status.get("updatedReplicas", 0))
    return "" if ready >= wanted else f"has {ready} of {wanted} replicas available"


def api_fault(service: Mapping[str, Any] | None) -> str:
    """Why an API that another server answers for is not available; "" when it is."""
    if service is None:
        return "is not registered"
    for condition in service.get("status", {}).get("conditions") or []:
        if condition["type"] == "Available":
            return (
                "" if condition["status"] == "True" else f"is not available: {condition.get('message', '')}"
            )
    return "has not been tried yet"


def job_result(file: Path) -> dict[str, Any]:
    """What an asynchronous task has left in its result file; {} as long as it has not ended."""
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError):  # not there yet, or being written
        return {}
    return result if "rc" in result or result.get("failed") else {}


def job_checks(files: Iterable[Path]) -> dict[str, Check]:
    """One check for each task: whether it has ended, well or not."""

    def check(file: Path) -> Check:
        return lambda: "" if job_result(file) else "has not ended"

    return {f"job {file.name}": check(file) for file in files}


def job_failures(files: Iterable[Path]) -> list[str]:
    """What the tasks that failed have said."""
    faults = []
    for result in map(job_result, files):
        if result.get("failed") or result.get("rc"):
            said = (result.get("msg"), result.get("stderr"), result.get("stdout"))
            faults.append("\n".join(str(text) for text in said if text))
    return faults


def recorded(api: KubeApi, wanted: Mapping[str, Any]) -> bool:
    """Whether the cluster's record has the wanted fingerprint and the deployments still exist."""
    record = api.find("/api/v1/namespaces/kube-system/configmaps/lab-operators") or {}
    if record.get("data", {}).get("fingerprint") != wanted["fingerprint"]:
        return False
    return all(api.find(deployment_path(name)) for name in wanted["deployments"])


def write_record(api: KubeApi, fingerprint: str) -> None:
    """Note in the cluster what was put into it."""
    record = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "lab-operators", "namespace": "kube-system"},
        "data": {"fingerprint": fingerprint},
    }
    api.request(
        "PATCH",
        "/api/v1/namespaces/kube-system/configmaps/lab-operators",
        record,
        params={"fieldManager": "gpu-slices-lab"},
        content_type=APPLY_PATCH,
    )


def deployment_path(name: str) -> str:
    """API path of namespace/name."""
    namespace, _, short = name.partition("/")
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{short}"


def plural_path(api: KubeApi, definition: Mapping[str, Any]) -> str:
    """Path to create objects of this kind in the definition's namespace."""
    group = (
        f"/apis/{definition['apiVersion']}"
        if "/" in definition["apiVersion"]
        else f"/api/{definition['apiVersion']}"
    )
    for resource in api.get(group).get("resources") or []:
        if resource["kind"] == definition["kind"] and "/" not in resource["name"]:
            return f"{group}/namespaces/{definition['metadata']['namespace']}/{resource['name']}"
    raise ApiFault("not_found", f"{definition['apiVersion']} {definition['kind']} is not served")


def checks(api: KubeApi, wanted: Mapping[str, Any]) -> dict[str, Check]:
    """Every condition by the name it is reported under; each returns what is missing, or ""."""

    def node(name: str) -> Check:
        def ask() -> str:
            if name in wanted["started"]:
                lease = api.find(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}")
                if fault := lease_fault(lease, wanted["since"]):
                    return fault
            return node_fault(api.find(f"/api/v1/nodes/{name}"))

        return ask

    def deployment(name: str) -> Check:
        return lambda: deployment_fault(api.find(deployment_path(name)))

    def aggregated(name: str) -> Check:
        return lambda: api_fault(api.find(f"/apis/apiregistration.k8s.io/v1/apiservices/{name}"))

    def probe(definition: Mapping[str, Any]) -> Check:
        def ask() -> str:
            api.request("POST", plural_path(api, definition), dict(definition), params={"dryRun": "All"})
            return ""

        return ask

    result = {f"node {name}": node(name) for name in wanted["nodes"]}
    result |= {f"deployment {name}": deployment(name) for name in wanted["deployments"]}
    result |= {f"API {name}": aggregated(name) for name in wanted["apis"]}
    result |= {f"webhook for {item['kind']}": probe(item) for item in wanted["probes"]}
    return result


def nudge(api: KubeApi, missing: Iterable[str]) -> None:
    """Make kubelets look again at the pods of deployments that are not there yet.

    An operator waits for the certificate that it has just put into its own mounted Secret; kubelet renews a
    mount when it next looks at the pod, which a change of the pod brings about.
    """
    for namespace in {
        name.split()[1].partition("/")[0] for name in missing if name.startswith("deployment ")
    }:
        for pod in api.get(f"/api/v1/namespaces/{namespace}/pods").get("items") or []:
            api.request(
                "PATCH",
                f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}",
                {"metadata": {"annotations": {"gpu-slices.lab/looked": f"{time.time():.1f}"}}},
                content_type=MERGE_PATCH,
            )


def unready(api: KubeApi, deployments: Iterable[str]) -> list[str]:
    """Which deployments are not there yet, each as its check is called."""
    return [f"deployment {name}" for name in deployments if deployment_fault(api.find(deployment_path(name)))]


def wait(
    todo: Mapping[str, Check],
    timeout: float,
    pause: float = 0.25,
    meanwhile: Callable[[Iterable[str]], None] | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Run the checks until each was good once; returns seconds by name, and by name what is missing.

    `meanwhile` is called about once a second with the names of what is missing.
    """
    begin = called = time.monotonic()
    missing = dict.fromkeys(todo, "not asked yet")
    seconds: dict[str, float] = {}
    while missing:
        for name in list(missing):
            try:
                missing[name] = todo[name]()
            except ApiFault as fault:
                missing[name] = fault.message
            if not missing[name]:
                del missing[name]
                seconds[name] = round(time.monotonic() - begin, 1)
        if missing and time.monotonic() - begin > timeout:
            break
        if missing and meanwhile and time.monotonic() - called > 1:
            called = time.monotonic()
            with contextlib.suppress(ApiFault):
                meanwhile(missing)
        if missing:
            time.sleep(pause)
    return seconds, missing


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path", "required": True},
            "nodes": {"type": "list", "elements": "str", "default": []},
            "started": {"type": "list", "elements": "str", "default": []},
            "since": {"type": "float", "default": 0},
            "deployments": {"type": "list", "elements": "str", "default": []},
            "apis": {"type": "list", "elements": "str", "default": []},
            "jobs": {"type": "list", "elements": "dict", "default": []},
            "probes": {"type": "list", "elements": "dict", "default": []},
            "fingerprint": {"type": "str", "required": True},
            "record": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    try:
        api = KubeApi.from_kubeconfig(kubeconfig=module.params["kubeconfig"])
        if module.params["jobs"]:

            def look_after(_: Iterable[str]) -> None:
                nudge(api, unready(api, module.params["deployments"]))

            files = [Path(job["results_file"]) for job in module.params["jobs"]]
            seconds, missing = wait(job_checks(files), module.params["timeout"], meanwhile=look_after)
            if failures := job_failures(files):
                module.fail_json(msg="\n".join(failures))
            finish(module, seconds, missing)
        seconds, missing = wait({"API server": lambda: ready(api)}, module.params["timeout"])
        there = not missing and not module.params["record"] and recorded(api, module.params)
        if not missing and (there or module.params["record"]):
            seconds, missing = wait(
                checks(api, module.params), module.params["timeout"], meanwhile=partial(nudge, api)
            )
        if not missing and module.params["record"] and not module.check_mode:
            write_record(api, module.params["fingerprint"])
    except ApiFault as fault:
        module.fail_json(msg=fault.message)
    finish(module, seconds, missing, recorded=there)


def finish(
    module: AnsibleModule, seconds: Mapping[str, float], missing: Mapping[str, str], **facts: Any
) -> None:
    """End the module with what was found."""
    if missing:
        lines = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        module.fail_json(msg=f"After {module.params['timeout']} s still missing: {lines}", missing=missing)
    module.exit_json(changed=module.params["record"], seconds=seconds, **facts)


if __name__ == "__main__":
    main()
