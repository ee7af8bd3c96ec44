from __future__ import annotations

import lab_import
import pytest

lab_wait = lab_import.lab_wait()
lab_status = lab_import.lab_status()
plan = lab_import.lab_plan()
ApiFault = lab_wait.ApiFault


def node(name="a30", ready="True", cordoned=False, message=""):
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {
            "conditions": [{"type": "Ready", "status": ready, "message": message}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.3.7"},
            "addresses": [
                {"type": "Hostname", "address": name},
                {"type": "InternalIP", "address": "10.77.0.3"},
            ],
        },
    }


def deployment(generation=1, observed=1, available=1, updated=1):
    return {
        "metadata": {"generation": generation},
        "spec": {"replicas": 1},
        "status": {
            "observedGeneration": observed,
            "availableReplicas": available,
            "updatedReplicas": updated,
        },
    }


def test_a_node_is_ready_or_says_why_not():
    assert lab_wait.node_fault(node()) == ""
    assert lab_wait.node_fault(None) == "has not registered"
    assert lab_wait.node_fault(node(ready="False", message="no CNI")) == "is not ready: no CNI"
    assert lab_wait.node_fault({"status": {}}) == "has no conditions yet"


@pytest.mark.parametrize(
    ("renewed", "good"),
    [("2026-12-01T07:00:00.000000Z", False), ("2026-12-01T07:00:10.500000Z", True), (None, False)],
)
def test_a_restarted_node_must_have_spoken_since(renewed, good):
    since = 1796108405.0  # 2026-12-01T07:00:05Z
    lease = {"spec": {"renewTime": renewed}} if renewed else None
    assert (lab_wait.lease_fault(lease, since) == "") is good


def test_a_deployment_is_available_in_its_newest_form_only():
    assert lab_wait.deployment_fault(deployment()) == ""
    assert "does not exist" in lab_wait.deployment_fault(None)
    assert "looked at" in lab_wait.deployment_fault(deployment(generation=2))
    assert "0 of 1" in lab_wait.deployment_fault(deployment(available=0))
    assert "0 of 1" in lab_wait.deployment_fault(deployment(updated=0))


def api_service(*conditions):
    return {"status": {"conditions": [dict(zip(("type", "status", "message"), item)) for item in conditions]}}


@pytest.mark.parametrize(
    ("service", "fault"),
    [
        (api_service(("Available", "True", "all checks passed")), ""),
        (api_service(("Other", "True", ""), ("Available", "False", "no CA")), "is not available: no CA"),
        (api_service(("Other", "True", "")), "has not been tried yet"),
        ({}, "has not been tried yet"),
        (None, "is not registered"),
    ],
)
def test_an_api_of_another_server_is_available_or_says_why_not(service, fault):
    assert lab_wait.api_fault(service) == fault


@pytest.mark.parametrize(
    ("text", "fault", "said"),
    [
        (None, "has not ended", []),
        ("", "has not ended", []),
        ('{"started": 1, "finished": 0, "ansible_job_id": "j1"}', "has not ended", []),
        ('{"changed": true, "rc": 0, "stdout": "STATUS: deployed"}', "", []),
        (
            '{"failed": true, "rc": 1, "msg": "non-zero return code", "stderr": "Error: locked"}',
            "",
            ["Error: locked"],
        ),
        ('{"rc": 1, "stderr": "Error: locked"}', "", ["Error: locked"]),
        ('{"failed": 1, "msg": "timed out", "cmd": "helm"}', "", ["timed out"]),
    ],
)
def test_a_job_is_waited_for_and_says_why_it_failed(tmp_path, text, fault, said):
    file = tmp_path / "j1"
    if text is not None:
        file.write_text(text)
    assert {name: check() for name, check in lab_wait.job_checks([file]).items()} == {"job j1": fault}
    assert [message.splitlines()[-1] for message in lab_wait.job_failures([file])] == said


def test_only_deployments_that_are_not_there_are_looked_after():
    found = {"ns/up": deployment(), "ns/down": deployment(available=0), "ns/new": None}

    class Cluster:
        def find(self, path):
            return next(item for name, item in found.items() if lab_wait.deployment_path(name) == path)

    assert lab_wait.unready(Cluster(), found) == ["deployment ns/down", "deployment ns/new"]


def test_everything_asked_for_has_a_check_of_its_own():
    found = {
        "/apis/apiregistration.k8s.io/v1/apiservices/v1.x.io": api_service(("Available", "False", "down")),
        "/apis/apps/v1/namespaces/ns/deployments/op": deployment(),
        "/api/v1/nodes/a30": node(),
    }

    class Cluster:
        def find(self, path):
            return found[path]

    wanted = {
        "nodes": ["a30"],
        "started": [],
        "since": 0,
        "deployments": ["ns/op"],
        "apis": ["v1.x.io"],
        "probes": [],
    }
    todo = lab_wait.checks(Cluster(), wanted)
    assert {name: check() for name, check in todo.items()} == {
        "node a30": "",
        "deployment ns/op": "",
        "API v1.x.io": "is not available: down",
    }


def test_waiting_asks_until_everything_was_good_once():
    answers = iter(["not yet", "", "never asked again"])

    def refused_once():
        if calls.append(1) or len(calls) == 1:
            raise ApiFault("server", "no endpoints")
        return ""

    calls: list[int] = []
    seconds, missing = lab_wait.wait({"a": lambda: next(answers), "b": refused_once}, timeout=5, pause=0)
    assert missing == {}
    assert set(seconds) == {"a", "b"}


def test_waiting_ends_in_time_and_says_what_is_missing():
    def refuse():
        raise ApiFault("server", "webhook has no endpoints")

    seconds, missing = lab_wait.wait({"a": lambda: "", "b": refuse}, timeout=0, pause=0)
    assert set(seconds) == {"a"}
    assert missing == {"b": "webhook has no endpoints"}


class Api:
    def get(self, path):
        assert path == "/apis/trainer.kubeflow.org/v1alpha1"
        return {
            "resources": [
                {"kind": "TrainJob", "name": "trainjobs"},
                {"kind": "TrainJob", "name": "trainjobs/status"},
            ]
        }


def test_the_path_of_a_probe_comes_from_discovery():
    probe = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"namespace": "default"},
    }
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
    assert lab_wait.plural_path(Api(), probe) == path
    with pytest.raises(ApiFault, match="JobSet is not served"):
        lab_wait.plural_path(Api(), {**probe, "kind": "JobSet"})


def test_status_table_has_every_node_that_anyone_knows():
    boxes = {"a30": plan.Found("n", "id", "c", "exited", False, False)}
    devices = [
        {"node": "a30", "type": "mig", "profile": "1g.6gb", "holder": None},
        {"node": "a30", "type": "mig", "profile": "1g.6gb", "holder": {"claim": "x"}},
        {"node": "h200", "type": "gpu", "profile": "", "holder": None},
    ]
    rows = lab_status.node_rows(boxes, [node(cordoned=True), node("h200", ready="Unknown")], devices)
    assert rows[1][:3] == ["a30", "not running (exited)", "Ready,cordoned"]
    assert rows[1][-1] == "1g.6gb 1/2 free"
    assert rows[2][:3] == ["h200", "missing", "NotReady"]
    assert rows[2][-1] == "gpu 1/1 free"


def test_tables_line_up():
    assert lab_status.table([["A", "B"], ["long", "x"]]) == ["A     B", "long  x"]


def test_waiting_nudges_only_what_is_missing_and_survives_a_refusal():
    clock = iter([0, 0.5, 0.5, 2, 2, 2, 2.5, 2.5, 4, 4, 4, 4])
    named = []

    def meanwhile(missing):
        named.append(sorted(missing))
        raise ApiFault("conflict", "someone else was faster")

    answers = iter(["no", "no", "no", ""])
    original = lab_wait.time
    lab_wait.time = type("Clock", (), {"monotonic": lambda: next(clock, 9), "sleep": lambda _: None})
    try:
        _, missing = lab_wait.wait({"a": lambda: "", "b": lambda: next(answers)}, 99, 0, meanwhile)
    finally:
        lab_wait.time = original
    assert missing == {}
    assert named
    assert all(names == ["b"] for names in named)


def test_a_nudge_touches_the_pods_of_missing_deployments():
    patched = []

    class Pods:
        def get(self, path):
            assert path == "/api/v1/namespaces/jobset-system/pods"
            return {"items": [{"metadata": {"name": "p1"}}]}

        def request(self, method, path, body, content_type):
            patched.append((method, path, list(body["metadata"]["annotations"]), content_type))

    lab_wait.nudge(Pods(), ["deployment jobset-system/jobset-controller", "node a30"])
    assert patched == [
        (
            "PATCH",
            "/api/v1/namespaces/jobset-system/pods/p1",
            ["gpu-slices.lab/looked"],
            "application/merge-patch+json",
        )
    ]
