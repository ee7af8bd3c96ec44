"""Record checks in the report and fail on those that failed.

Arguments: ``stage`` and either one check (``id``, ``status``, ``asked``, ``found``, and as wished
``needed``, ``fix``, ``evidence``, ``seconds``) or ``checks``, a list of such. ``status`` is pass, warn,
skip or fail. ``run`` holds facts about the run as a whole: ``cluster`` and ``versions`` {name: text}.
``devices`` replaces the published devices in the picture. Prints one line a check; all failing checks of
the task make one failure. The rows are written by the callback gpu_slices_report, which finds them in the
result's ``invocation``: that key is the one part of a result that Ansible does not print.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.report import ReportError, failure_text, make_row, verdict_line

_COLOURS = {"pass": "green", "warn": "bright yellow", "skip": "cyan", "fail": "red"}
_CHECK = {
    "id": {"type": "str"},
    "stage": {"type": "str"},
    "asked": {"type": "raw"},
    "found": {"type": "raw"},
    "needed": {"type": "raw"},
    "fix": {"type": "raw"},
    "evidence": {"type": "raw"},
    "seconds": {"type": "raw"},
    "status": {"type": "str"},
}


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's docstring."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Print and return the rows; failed when one of them is."""
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            argument_spec={
                **_CHECK,
                "checks": {"type": "list", "elements": "dict"},
                "run": {"type": "dict"},
                "devices": {"type": "list", "elements": "dict"},
            },
            mutually_exclusive=[("checks", "id")],
        )
        stage = arguments["stage"] or ""
        given = arguments["checks"]
        if given is None:
            given = [{k: arguments[k] for k in _CHECK if arguments[k] is not None}] if arguments["id"] else []
        try:
            rows = [make_row(check, stage) for check in given]
        except ReportError as fault:
            raise AnsibleActionFail(f"gpu_check: {fault}") from None
        for row in rows:
            Display().display("  " + verdict_line(row), color=_COLOURS[row["status"]])
        payload: dict[str, Any] = {"rows": rows, "header": {**(arguments["run"] or {})}}
        if arguments["devices"] is not None:
            payload["devices"] = arguments["devices"]
        result: dict[str, Any] = {"changed": False, "invocation": {"gpu_report": payload}}
        message = failure_text(rows)
        if message:
            result.update(failed=True, msg=message)
        return result
