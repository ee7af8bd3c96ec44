"""The action dra_driver_state against a cluster that lives: plugin pods that go, come back and publish."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_slices.kube_api import ApiFault

PATH = Path(__file__).resolve().parents[2] / "plugins/action/dra_driver_state.py"
spec = importlib.util.spec_from_file_location("dra_driver_state", PATH)
action = importlib.util.module_from_spec(spec)
spec.loader.exec_module(action)

CEL = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '{}'"
LABELS = {"dra-driver-nvidia-gpu-component": "kubelet-plugin"}


def stamp(ago):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))


class Cluster:
    """One node; a deleted plugin pod is followed by a new one that publishes ``after`` the next few looks."""

    server = "https://10.0.0.1:6443"

    def __init__(self, published, after=None, ready=True, since=3600):
        self.published, self.after, self.ready, self.since = published, after, ready, since
        self.deleted, self.looks, self.coming = [], 0, 0

    def parallel(self, questions):
        self.looks += 1
        if self.coming:
            self.coming -= 1
            if not self.coming:
                self.published = self.after
        return {name: question() for name, question in questions.items()}, {}

    def pods(self):
        state = {"running": {}} if self.ready else {"waiting": {"reason": "CrashLoopBackOff"}}
        return [
            {
                "metadata": {"name": f"plugin-{len(self.deleted)}", "namespace": "dra"},
                "spec": {"nodeName": "a30"},
                "status": {
                    "phase": "Running",
                    "conditions": [
                        {
                            "type": "Ready",
                            "status": str(self.ready and not self.coming),
                            "lastTransitionTime": stamp(self.since),
                        }
                    ],
                    "containerStatuses": [
                        {"name": "gpus", "ready": self.ready, "restartCount": 4, "state": state}
                    ],
                },
            }
        ]

    def slices(self):
        attributes = {
            "type": {"string": "mig"},
            "profile": {"string": "1g.6gb"},
            "parentUUID": {"string": "G"},
            "driverVersion": {"version": "580.95.5"},
        }
        devices = [
            {"name": uuid.lower(), "attributes": {**attributes, "uuid": {"string": uuid}}}
            for uuid in self.published
        ]
        pool = {"name": "a30", "generation": 1, "resourceSliceCount": 1}
        return [{"spec": {"driver": "gpu.nvidia.com", "nodeName": "a30", "pool": pool, "devices": devices}}]

    def get(self, path, params=None, accept=""):
        containers = [{"name": "gpus", "image": "i"}]
        template = {"spec": {"containers": containers}}
        daemonset = {
            "metadata": {"name": "d", "namespace": "dra", "labels": LABELS, "generation": 1},
            "spec": {"selector": {"matchLabels": LABELS}, "template": template},
            "status": {"desiredNumberScheduled": 1, "numberReady": 1, "observedGeneration": 1},
        }
        classes = [
            {
                "metadata": {"name": f"{n}.nvidia.com"},
                "spec": {"selectors": [{"cel": {"expression": CEL.format(n)}}]},
            }
            for n in ("gpu", "mig")
        ]
        answers = {
            "nodes": [{"metadata": {"name": "a30"}}],
            "daemonsets": [daemonset],
            "deviceclasses": classes,
            "resourceslices": self.slices(),
            "resourceclaims": [],
            "pods": self.pods(),
            "events": [{"reason": "BackOff", "message": "Back-off restarting failed container"}],
        }
        return {"items": answers[path.rsplit("/", 1)[1]]}

    def text(self, path, params=None):
        return "starting\nError: ensureNVML failed: Unknown Error\n"

    def request(self, method, path, body=None, **_):
        assert method == "DELETE"
        self.deleted.append(path)
        self.coming = 2
        return {}


def judge(cluster, monkeypatch, *, check_mode=False, **params):
    monkeypatch.setattr(action, "PAUSE", 0.01)
    module = object.__new__(action.ActionModule)
    module._task = SimpleNamespace(check_mode=check_mode)
    gpus = [
        {"uuid": "G", "mig_mode_current": "Enabled", "mig_devices": [{"uuid": "MIG-1", "profile": "1g.6gb"}]}
    ]
    wish = {
        "nodes": ["a30"],
        "hardware": {"a30": gpus},
        "restart": True,
        "timeout": 5,
    }
    result = module.act(cluster, {**wish, **params}, {})
    return result, {check["id"]: check["status"] for check in result["checks"]}


def test_a_driver_that_tells_the_truth_is_looked_at_once(monkeypatch):
    cluster = Cluster(["MIG-1"])
    result, statuses = judge(cluster, monkeypatch)
    assert set(statuses.values()) == {"pass"}
    assert (result["changed"], cluster.looks, cluster.deleted) == (False, 1, [])


def test_an_outdated_plugin_is_restarted_once_and_waited_for(monkeypatch):
    cluster = Cluster(["MIG-0"], after=["MIG-1"])
    result, statuses = judge(cluster, monkeypatch)
    assert set(statuses.values()) == {"pass"}
    assert result["changed"]
    assert result["restarted"] == ["a30"]
    assert cluster.deleted == ["/api/v1/namespaces/dra/pods/plugin-0"]


def test_check_mode_says_what_it_would_restart_and_leaves_it(monkeypatch):
    cluster = Cluster(["MIG-0"], after=["MIG-1"])
    result, statuses = judge(cluster, monkeypatch, check_mode=True)
    assert result["restarted"] == ["a30"]
    assert cluster.deleted == []
    assert statuses["slices_match"] == "fail"


def test_without_leave_nothing_is_restarted(monkeypatch):
    cluster = Cluster(["MIG-0"], after=["MIG-1"])
    result, statuses = judge(cluster, monkeypatch, restart=False)
    assert (result["changed"], cluster.deleted) == (False, [])
    assert statuses["slices_match"] == "fail"


def test_a_plugin_that_stays_wrong_is_told_after_the_time_is_up(monkeypatch):
    cluster = Cluster(["MIG-0"], after=["MIG-0"])
    result, statuses = judge(cluster, monkeypatch, timeout=0.2)
    assert statuses["slices_match"] == "fail"
    assert len(cluster.deleted) == 1
    assert result["waited"] >= 0.2


def test_a_crashing_plugin_is_explained_with_its_log_and_events(monkeypatch):
    result, statuses = judge(Cluster(["MIG-1"], ready=False), monkeypatch, timeout=0.1)
    check = next(check for check in result["checks"] if check["id"] == "plugin")
    assert statuses["plugin"] == "fail"
    assert "CrashLoopBackOff" in check["found"]
    assert "ensureNVML failed" in check["found"]
    told = check["evidence"]["nodes_explained"]["a30"]
    assert told["events"] == ["BackOff: Back-off restarting failed container"]


def test_a_question_that_is_refused_ends_the_task(monkeypatch):
    cluster = Cluster(["MIG-1"])
    fault = ApiFault("forbidden", "Not allowed (403).", 403)
    monkeypatch.setattr(cluster, "parallel", lambda questions: ({"nodes": {}}, {"slices": fault}))
    with pytest.raises(ApiFault, match="slices cannot be read"):
        judge(cluster, monkeypatch)
