"""Let Kueue count the devices of claims: its gate, its mappings, and a restart so that it reads them.

Nothing that is there is dropped: lines are added to the text of its configuration, and a gate goes where
gates are given already (the Deployment's arguments or the configuration). The configuration is written only
if nobody changed it since it was read. If Kueue does not come up with it, the old text is put back.

Arguments: ``facts`` (of cluster_facts' question kueue), ``classes`` {DeviceClass: name to count it by},
``timeout`` (s, for the restart), ``kubeconfig``, ``context``.

Returns ``changed``, ``said`` (the changes in words) and a diff. In check mode nothing is written.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import kueue
from gpu_slices.cluster import digest
from gpu_slices.cluster_action import ClusterAction
from gpu_slices.kube_api import MERGE_PATCH, KubeApi

STRATEGIC_PATCH = "application/strategic-merge-patch+json"
ANNOTATION = "gpu-slices.dev/kueue-config"
_PAUSE = 1.0


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "facts": {"type": "dict", "required": True},
        "classes": {"type": "dict", "required": True},
        "timeout": {"type": "int", "default": 180},
    }

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Plan, write, restart, wait."""
        facts = arguments["facts"]
        plan = kueue.changes(facts, arguments["classes"], configure=True)
        if plan["fault"]:
            raise AnsibleActionFail(f"Kueue's configuration is left alone: {plan['fault']}.")
        result: dict[str, Any] = {"changed": bool(plan["said"]), "said": plan["said"]}
        if not plan["said"]:
            return result
        old = facts["config"]["text"]
        before, after = [old, *facts["managers"][0]["arguments"]], [plan["text"] or old]
        after += plan["arguments"] or facts["managers"][0]["arguments"]
        result["diff"] = {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"}
        if not self._task.check_mode:
            _Change(api, facts, plan, arguments["timeout"]).make()
        return result


class _Change:
    """The writing of one plan."""

    def __init__(self, api: KubeApi, facts: dict[str, Any], plan: dict[str, Any], timeout: int) -> None:
        self.api, self.plan, self.timeout = api, plan, timeout
        self.manager, self.config = facts["managers"][0], facts["config"]
        space = self.manager["namespace"]
        self.map_path = f"/api/v1/namespaces/{space}/configmaps/{self.manager['config_map']}"
        self.path = f"/apis/apps/v1/namespaces/{space}/deployments/{self.manager['name']}"

    def make(self) -> None:
        """Write, restart and wait; put the old state back if Kueue does not come up."""
        if self.plan["text"]:
            self._write(self.plan["text"], self.config["version"])
        self._restart(self.plan["arguments"])
        Display().display(f"  Kueue restarts with {', '.join(self.plan['said'])}", color="cyan")
        state = self._wait()
        if not state:
            return
        if self.plan["text"]:
            self._write(self.config["text"])
        self._restart(self.manager["arguments"] if self.plan["arguments"] else [])
        raise AnsibleActionFail(
            f"Kueue ({self.manager['namespace']}/{self.manager['name']}) did not come up within "
            f"{self.timeout} s with {', '.join(self.plan['said'])}: {state}. Its former configuration was "
            "put back; see the log of its newest pod for what it refuses."
        )

    def _write(self, text: str, version: str = "") -> None:
        body: dict[str, Any] = {"data": {self.manager["config_key"]: text}}
        if version:
            # Refused if somebody else has changed it since.
            body["metadata"] = {"resourceVersion": version}
        params = {"fieldManager": "gpu-slices"}
        self.api.request("PATCH", self.map_path, body, params=params, content_type=MERGE_PATCH)

    def _restart(self, arguments: list[str]) -> None:
        """A new pod template: arguments if they change, and an annotation that differs with what is read."""
        text = self.api.get(self.map_path)["data"][self.manager["config_key"]]
        template: dict[str, Any] = {
            "metadata": {"annotations": {ANNOTATION: digest([text, time.time()])}},
        }
        if arguments:
            template["spec"] = {"containers": [{"name": self.manager["container"], "args": arguments}]}
        body = {"spec": {"template": template}}
        params = {"fieldManager": "gpu-slices"}
        self.api.request("PATCH", self.path, body, params=params, content_type=STRATEGIC_PATCH)

    def _wait(self) -> str:
        """Until the new pod is the only one; else how it stands."""
        limit = time.monotonic() + self.timeout
        while True:
            deployment = self.api.get(self.path)
            if kueue.rolled_out(deployment):
                return ""
            if time.monotonic() > limit:
                status = deployment.get("status") or {}
                return (
                    f"{status.get('updatedReplicas', 0)} updated, {status.get('availableReplicas', 0)} "
                    f"available of {deployment['spec'].get('replicas', 1)}"
                )
            time.sleep(_PAUSE)
