"""Filters of the other callers. Each only calls the function of the same purpose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import callers


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ansible's values made plain first: they are lazy and tagged, and go into hashes and copies."""

    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*json.loads(json.dumps(arguments)), **json.loads(json.dumps(named)))
        except callers.CallerError as fault:
            raise AnsibleFilterError(str(fault)) from None

    return called


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "kfp_executor": _plain(callers.executor_manifest),
            "callers_plan": _plain(callers.plan),
            "cronjob_job": _plain(callers.job_of_cronjob),
        }
