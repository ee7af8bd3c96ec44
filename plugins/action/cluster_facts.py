"""Read what the roles need to know of a cluster, all questions in one task and at once.

Arguments: ``kubeconfig``, ``context``; ``want``, the questions (see gpu_slices.cluster.WANTS); and what some
questions need: ``namespace``, ``rights`` [{verb, group, resource, namespace}], ``objects`` [{id, path}],
``release`` and ``release_namespace``. ``refresh_discovery`` (with the question apis) removes the discovery
cache of kubernetes.core if it describes an earlier cluster at this address.

Returns ``facts``, one key a question; ``facts.errors`` holds the questions that the server refused. A server
that cannot be reached, a kubeconfig that cannot be used and credentials that are refused fail the task with
one sentence. An action and not a module: it runs in Ansible's own process, which has to load the kubernetes
package just once a run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.cluster import WANTS, drop_stale_discovery, read
from gpu_slices.cluster_action import ClusterAction
from gpu_slices.kube_api import KubeApi


class ActionModule(ClusterAction):
    """See the module's docstring."""

    SPEC: ClassVar[dict[str, Any]] = {
        "want": {"type": "list", "elements": "str", "required": True, "choices": list(WANTS)},
        "namespace": {"type": "str"},
        "rights": {"type": "list", "elements": "dict", "default": []},
        "objects": {"type": "list", "elements": "dict", "default": []},
        "release": {"type": "str"},
        "release_namespace": {"type": "str"},
        "refresh_discovery": {"type": "bool", "default": False},
    }

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Ask and return the facts."""
        facts = read(api, arguments["want"], arguments)
        stale = ""
        if arguments["refresh_discovery"] and "apis" in facts:
            stale = drop_stale_discovery(api, facts["apis"]["groups"])
        return {"changed": False, "facts": facts, "stale_cache": stale}
