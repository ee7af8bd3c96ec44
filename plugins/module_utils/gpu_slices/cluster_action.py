"""What action plugins that ask a cluster have in common. Controller only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from .kube_api import ApiFault, KubeApi
from .report import artifacts_directory

PROJECT = Path(__file__).resolve().parents[3]


class ClusterAction(ActionBase):  # type: ignore[misc]
    """An action with the arguments ``kubeconfig`` and ``context``, and those of its ``SPEC``.

    Faults of the kinds in ``FAULTS`` fail the task with their sentence.
    """

    _requires_connection = False
    _supports_check_mode = True

    SPEC: ClassVar[dict[str, Any]] = {}
    FAULTS: tuple[type[Exception], ...] = (ApiFault,)

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Check the arguments, open the API (nothing is sent yet) and act."""
        super().run(tmp, task_vars)
        spec = {"kubeconfig": {"type": "path", "default": ""}, "context": {"default": ""}, **self.SPEC}
        _, arguments = self.validate_argument_spec(argument_spec=spec)
        try:
            api = open_api(arguments)
            return self.act(api, arguments, task_vars or {})
        except self.FAULTS as fault:
            raise AnsibleActionFail(str(fault)) from None

    def act(self, api: KubeApi, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """What the action does; returns the task's result."""
        raise NotImplementedError

    def artifacts(self, variables: dict[str, Any]) -> Path:
        """Where this run's logs and evidence go."""
        named = self._templar.template(variables.get("gpu_slices_artifacts_dir") or "")
        return artifacts_directory(named, PROJECT)


def open_api(arguments: Mapping[str, Any]) -> KubeApi:
    """The API that the arguments name. What it keeps in files goes when ansible-playbook ends."""
    return KubeApi.from_kubeconfig(
        arguments["kubeconfig"], arguments["context"], scratch=constants.DEFAULT_LOCAL_TMP
    )


def saying(stage: str) -> Callable[[str, str], None]:
    """What shows ("log", line) and ("note", text) on the console."""

    def say(kind: str, text: str) -> None:
        if kind == "log":
            Display().display(f"  {stage} | {text}")
        else:
            Display().display(f"  {text}", color="cyan")

    return say
