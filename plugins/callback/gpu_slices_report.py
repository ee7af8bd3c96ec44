"""Keep the report of a run: report.json with every row, junit.xml and report.html when the run ends.

Collects what gpu_check, workload_follow and gpu_report hand over in their results, and turns any other
failed task of a run that recorded rows, or of one of the stages, into a failed row. Does nothing in check
mode and in playbooks that record nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ansible.release
from ansible import context
from ansible.errors import AnsibleError
from ansible.plugins.callback import CallbackBase
from ansible.template import Templar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices.report import (
    STAGES,
    Recorder,
    artifacts_directory,
    counts,
    now,
    stage_of,
    summary,
)

PROJECT = Path(__file__).resolve().parents[2]

DOCUMENTATION = """
name: gpu_slices_report
type: aggregate
short_description: Keep the report of a run
description: See the file's docstring.
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """See the module's docstring."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpu_slices_report"
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self) -> None:
        """Start with nothing to report."""
        super().__init__()
        self._recorder: Recorder | None = None
        self._variables: Any = None
        self._play: Any = None
        self._playbook = ""
        self._started = now()
        self._failures: dict[str, dict[str, Any]] = {}
        self._summarised = False
        self._mark = time.monotonic()
        self._role = ""

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Remember the playbook's name for the header."""
        self._playbook = Path(playbook._file_name).name

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Remember where the play's variables are."""
        self._play = play
        self._variables = play.get_variable_manager()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """A new role starts a new clock: the seconds of its first row count from here."""
        role = task._role.get_name() if task._role else ""
        if role != self._role:
            self._role, self._mark = role, time.monotonic()

    def v2_runner_on_ok(self, result: Any) -> None:
        """Take over rows."""
        self._take(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Take over rows."""
        self._take(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Take over rows, or note the failure as one."""
        if not self._take(result) and not ignore_errors:
            self._note(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Note the failure."""
        self._note(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Add the failures that nothing rescued, write all three files, and say where they are."""
        self._settle([host for host in self._failures if stats.failures.get(host) or stats.dark.get(host)])
        if self._recorder is None:
            return
        self._recorder.finish()
        self._recorder.write(complete=True)
        if not self._summarised:
            failed = counts(self._recorder.report)["fail"]
            for line in summary(self._recorder.report, self._recorder.directory):
                self._display.display(line, color="red" if failed and line.startswith("total") else None)

    def _take(self, result: Any) -> bool:
        payload = (_data(result).get("invocation") or {}).get("gpu_report")
        if not isinstance(payload, dict):
            return False
        if context.CLIARGS.get("check"):
            return True
        recorder = self._open(self._directory(result))
        silicon = self._variable(result, "gpu_slices_silicon")
        recorder.header({**payload.get("header", {}), "silicon": silicon})
        elapsed, self._mark = time.monotonic() - self._mark, time.monotonic()
        for index, row in enumerate(payload.get("rows", ())):
            if row.get("seconds") is None:
                row["seconds"] = 0.0 if index else round(elapsed, 2)
            recorder.add(dict(row))
        if "devices" in payload:
            recorder.devices(payload["devices"])
        if "allocations" in payload:
            recorder.allocations(payload["allocations"], current=bool(payload.get("summarise")))
        if payload.get("summarise"):
            # Other hosts may have failed while this one went on; the summary is to say so.
            self._settle([host for host, row in self._failures.items() if not row["rescuable"]])
        recorder.write(complete=bool(payload.get("summarise")))
        if payload.get("summarise"):
            self._summarised = True
            for line in summary(recorder.report, recorder.directory):
                self._display.display(line)
        return True

    def _settle(self, hosts: list[str]) -> None:
        """Turn noted failures that nothing will rescue into rows."""
        for host in hosts:
            row = self._failures.pop(host)
            ours, directory, silicon = row.pop("ours"), row.pop("directory"), row.pop("silicon")
            row.pop("rescuable")
            if self._recorder or ours:
                recorder = self._open(directory)
                recorder.header({"silicon": silicon})
                recorder.add(row)
                # A summary that was printed before does not have it.
                self._summarised = False

    def _note(self, result: Any) -> None:
        if context.CLIARGS.get("check"):
            return
        task, host, data = result._task, result._host.get_name(), _data(result)
        role = task._role.get_name() if task._role else ""
        name = task.get_name()
        stage = stage_of(task.tags, role)
        self._failures[host] = {
            "stage": stage,
            "id": f"task-{host}",
            "status": "fail",
            "asked": name,
            "found": str(data.get("msg") or data.get("module_stderr") or "the task failed"),
            "needed": "the task to succeed",
            "fix": "read the task's message",
            "evidence": {"host": host, "role": role, "path": _inside(task.get_path())},
            "seconds": round(time.monotonic() - self._mark, 2),
            "at": now(),
            "directory": self._directory(result),
            "silicon": self._variable(result, "gpu_slices_silicon"),
            "ours": stage in STAGES,
            "rescuable": _rescuable(task),
        }

    def _open(self, directory: Path) -> Recorder:
        if self._recorder is None:
            self._recorder = Recorder(directory, self._started)
            self._recorder.header(
                {
                    "playbook": self._playbook,
                    "versions": {
                        "ansible-core": ansible.release.__version__,
                        "python": ".".join(map(str, sys.version_info[:3])),
                    },
                }
            )
        return self._recorder

    def _directory(self, result: Any) -> Path:
        return artifacts_directory(self._variable(result, "gpu_slices_artifacts_dir"), PROJECT)

    def _variable(self, result: Any, name: str) -> str:
        """An inventory value as text; one that cannot be worked out is read as unset."""
        if self._variables is None:
            return ""
        values = self._variables.get_vars(play=self._play, host=result._host, task=result._task)
        try:
            value = Templar(loader=self._play.get_loader(), variables=values).template(values.get(name))
        except AnsibleError:
            return ""
        return str(value or "")


def _rescuable(task: Any) -> bool:
    """Whether a block around the task has a rescue."""
    parent = task._parent
    while parent is not None:
        if getattr(parent, "rescue", None):
            return True
        parent = parent._parent
    return False


def _data(result: Any) -> dict[str, Any]:
    data = result._result
    return data if isinstance(data, dict) else {}


def _inside(path: str | None) -> str:
    """A task's place without the part of the path that only this computer has."""
    return str(path or "").replace(f"{PROJECT}/", "")
