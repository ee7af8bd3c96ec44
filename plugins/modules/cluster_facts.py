#!/usr/bin/python
"""Read facts of a cluster, all questions in one call and at once."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_slices.cluster import WANTS, drop_stale_discovery, read
from ansible.module_utils.gpu_slices.kube_api import ApiFault, KubeApi

DOCUMENTATION = r"""
module: cluster_facts
short_description: Read what the roles need to know of a Kubernetes cluster
description:
  - Asks all questions at once and returns trimmed answers, never whole objects.
  - A question that the server refuses is reported under RV(facts.errors); an API server that cannot be
    reached, a kubeconfig that cannot be used and credentials that are refused fail the task with one
    sentence.
options:
  kubeconfig:
    description: Path of the kubeconfig. Empty takes KUBECONFIG or ~/.kube/config.
    type: path
  context:
    description: Context in the kubeconfig.
    type: str
  want:
    description: The questions.
    type: list
    elements: str
    required: true
    choices:
      - version
      - apis
      - nodes
      - daemonsets
      - device_classes
      - slices
      - claims
      - namespace
      - trainer
      - access
      - objects
      - plugin_pods
      - claim_templates
      - helm_release
  namespace:
    description: Namespace for the questions namespace and claim_templates.
    type: str
  rights:
    description: Rights for the question access; each has verb, group, resource and namespace.
    type: list
    elements: dict
    default: []
  objects:
    description: Single objects for the question objects; each has an id and an API path.
    type: list
    elements: dict
    default: []
  release:
    description: Helm release for the question helm_release.
    type: str
  release_namespace:
    description: Namespace of that release.
    type: str
  refresh_discovery:
    description: >-
      Whether to remove the discovery cache of kubernetes.core if it describes an earlier cluster at this
      address. Needs the question apis.
    type: bool
    default: false
author: gpu-slices
"""

EXAMPLES = r"""
- name: Read the published devices
  cluster_facts:
    want: [slices, claims, nodes]
  register: cluster
"""

RETURN = r"""
facts:
  description: One key a question; errors holds those that were refused.
  type: dict
  returned: success
stale_cache:
  description: Path of the discovery cache that was removed, or empty.
  type: str
  returned: success
"""


def main() -> None:
    """Read and return."""
    module = AnsibleModule(
        argument_spec={
            "kubeconfig": {"type": "path"},
            "context": {"type": "str"},
            "want": {"type": "list", "elements": "str", "required": True, "choices": list(WANTS)},
            "namespace": {"type": "str"},
            "rights": {"type": "list", "elements": "dict", "default": []},
            "objects": {"type": "list", "elements": "dict", "default": []},
            "release": {"type": "str"},
            "release_namespace": {"type": "str"},
            "refresh_discovery": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        api = KubeApi.from_kubeconfig(params["kubeconfig"] or "", params["context"] or "")
        facts = read(api, params["want"], params)
        stale = ""
        if params["refresh_discovery"] and "apis" in facts:
            stale = drop_stale_discovery(api, facts["apis"]["groups"])
    except ApiFault as fault:
        module.fail_json(msg=fault.message, kind=fault.kind)
    module.exit_json(changed=False, facts=facts, stale_cache=stale)


if __name__ == "__main__":
    main()
