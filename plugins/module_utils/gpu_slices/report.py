"""The report of a run: rows, merging with earlier runs, and its three files.

Controller only, standard library only. A report is plain JSON data:

``header``       date, finished, playbook, cluster, silicon (real|emulated), versions {name: text}
``checks``       rows {stage, id, asked, found, needed, fix, status (pass|warn|skip|fail), seconds, at,
                 evidence {}}
``devices``      published devices {node, pool, device, type, product, profile, uuid, parent_uuid,
                 memory_bytes, slices [memory slices covered, counted from 0]}
``allocations``  who held what {node, pool, device, uuid, namespace, pod, claim, stage, at, now}

A later run replaces the rows of the stages it touches and keeps the others, unless it met another cluster.
``date`` is the start of the run: rows with an older ``at`` are of an earlier one, and are called so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Sequence

from .report_html import html

STATUSES = ("pass", "warn", "skip", "fail")
TEARDOWN = "teardown"
STAGES = (
    *("inputs", "preflight", "enable-driver", "smoke", "sft"),
    *("crowd", "shared", "quota", "callers", "recipe", TEARDOWN),
)
ROW_TEXTS = ("asked", "found", "needed", "fix")

Row = Dict[str, Any]
Report = Dict[str, Any]

_XML_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class ReportError(ValueError):
    """A row or a payload that cannot be recorded; the message names the field."""


def now() -> str:
    """The time in UTC, seconds resolution, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def empty() -> Report:
    """A report without rows."""
    return {"header": {"versions": {}}, "checks": [], "devices": [], "allocations": []}


def make_row(given: Mapping[str, Any], stage: str) -> Row:
    """Check what a task handed over as one check and fill it up to a row.

    ``given`` holds id, status, asked, found and optionally stage, needed, fix, evidence, seconds.
    Raises ReportError naming the field that is missing or wrong.
    """
    unknown = sorted(set(given) - {"id", "stage", "status", "evidence", "seconds", *ROW_TEXTS})
    if unknown:
        raise ReportError(f"unknown field {unknown[0]!r} in check {given.get('id', '?')!r}")
    row: Row = {"stage": str(given.get("stage") or stage), "id": str(given.get("id") or "")}
    if not row["id"] or not row["stage"]:
        raise ReportError(f"a check needs an id and a stage, got id {row['id']!r} and stage {row['stage']!r}")
    row["status"] = given.get("status")
    if row["status"] not in STATUSES:
        raise ReportError(f"check {row['id']!r}: status {row['status']!r} is none of {', '.join(STATUSES)}")
    for field in ROW_TEXTS:
        value = given.get(field)
        row[field] = "" if value is None else value if isinstance(value, str) else _compact(value)
    evidence = given.get("evidence") or {}
    row["evidence"] = dict(evidence) if isinstance(evidence, Mapping) else {"text": evidence}
    seconds = given.get("seconds")
    row["seconds"] = None if seconds is None else round(float(seconds), 2)
    row["at"] = now()
    return row


def verdict_line(row: Mapping[str, Any]) -> str:
    """One line for the console."""
    text = f"{row['status'].upper():4}  {row['stage']}/{row['id']}: {row['asked'] or row['id']}"
    if row["found"]:
        text += f" -> {_one_line(row['found'])}"
    return text


def failure_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """All failing rows as one message: found, needed, do."""
    parts = []
    for row in rows:
        if row["status"] != "fail":
            continue
        text = f"{row['id']}: found {row['found'] or 'nothing'}; needed {row['needed'] or row['asked']}"
        if row["fix"]:
            text += f"; do: {row['fix']}"
        parts.append(text)
    return "\n".join(parts)


def stage_of(tags: Iterable[str], role: str) -> str:
    """The stage of a task that recorded nothing itself: by tag, then by role."""
    tagset = set(tags)
    for stage in reversed(STAGES):
        if stage in tagset or stage == role:
            return stage
    if role in {"gpu_nodes", "mig", "dra_driver"}:
        return "enable-driver"
    return role or "playbook"


class Recorder:
    """Merges what one run records into the report kept in a directory.

    Rows of a stage from an earlier run go when this run records its first row of that stage.
    """

    def __init__(self, directory: Path, started: str = "") -> None:
        """``started``: when the run began, as now() tells it; default: just now."""
        self.directory = directory
        self.report = load(directory / "report.json")
        self.begun: set[str] = set()
        # A failure outside every stage belongs to its run alone.
        self.report["checks"] = [row for row in self.report["checks"] if row["stage"] in STAGES]
        self.report["header"].pop("finished", None)
        self.report["header"]["date"] = started or now()

    def header(self, values: Mapping[str, Any]) -> None:
        """Merge header values. Another cluster, or other silicon, than before starts the report afresh."""
        header = self.report["header"]
        for key in ("cluster", "silicon"):
            if values.get(key) and header.get(key) and values[key] != header[key]:
                kept = [row for row in self.report["checks"] if row["stage"] in self.begun]
                self.report = empty()
                self.report["checks"] = kept
                self.report["header"]["date"] = header["date"]
                header = self.report["header"]
                break
        for key, value in values.items():
            if key == "versions":
                header.setdefault("versions", {}).update({k: str(v) for k, v in dict(value).items() if v})
            elif value:
                header[key] = value

    def add(self, row: Row) -> None:
        """Record one row; a row of the same stage and id is replaced, for the last reading counts."""
        # A clock that is set back during a run makes none of its rows an earlier one.
        row["at"] = max(str(row.get("at") or ""), self.report["header"]["date"])
        if row["stage"] not in self.begun:
            self.begun.add(row["stage"])
            down = row["stage"] == TEARDOWN
            self.report["checks"] = [
                r
                for r in self.report["checks"]
                if r["stage"] in self.begun - {row["stage"]}
                # What was set up is gone after a teardown, and the other way round.
                or (r["stage"] != row["stage"] and (r["stage"] == TEARDOWN) == down)
            ]
            self.report["allocations"] = [
                a for a in self.report["allocations"] if a.get("stage") != row["stage"] or a.get("fresh")
            ]
        rows = self.report["checks"]
        same = [i for i, r in enumerate(rows) if (r["stage"], r["id"]) == (row["stage"], row["id"])]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        rows.sort(key=lambda r: STAGES.index(r["stage"]) if r["stage"] in STAGES else len(STAGES))

    def devices(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Replace the published devices by a newer reading."""
        self.report["devices"] = [dict(d) for d in devices]

    def allocations(self, allocations: Sequence[Mapping[str, Any]], current: bool = False) -> None:
        """Add holders of devices. With ``current`` they are all there are now, and earlier such ones go."""
        if current:
            self.report["allocations"] = [a for a in self.report["allocations"] if not a.get("now")]
        for new in allocations:
            key = _holder(new)
            others = [a for a in self.report["allocations"] if _holder(a) != key]
            self.report["allocations"] = [*others, {**new, "fresh": True}]

    def finish(self) -> None:
        """Stamp the end of the run."""
        self.report["header"]["finished"] = now()

    def write(self, complete: bool) -> list[Path]:
        """Write report.json, and with ``complete`` junit.xml and report.html; returns the paths."""
        public = {
            **self.report,
            "allocations": [{k: v for k, v in a.items() if k != "fresh"} for a in self.report["allocations"]],
        }
        texts = {"report.json": json.dumps(public, indent=2, sort_keys=False, default=str) + "\n"}
        if complete:
            texts["junit.xml"] = junit(public)
            texts["report.html"] = html(public)
        paths = []
        for name, text in texts.items():
            write_atomic(self.directory / name, text)
            paths.append(self.directory / name)
        return paths


def load(path: Path) -> Report:
    """Read a report; a missing or damaged one is an empty one (it is rewritten by this run)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty()
    report = empty()
    if isinstance(data, dict):
        for key, default in report.items():
            if isinstance(data.get(key), type(default)):
                report[key] = data[key]
        report["header"].setdefault("versions", {})
        needed = {"stage", "id", "status", "asked", "found"}
        report["checks"] = [r for r in report["checks"] if isinstance(r, dict) and needed <= set(r)]
    return report


def earlier(row: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    """Whether a row was recorded before the run that the report is of."""
    return str(row.get("at") or "") < str(header.get("date") or "")


def counts(report: Mapping[str, Any]) -> dict[str, int]:
    """Rows by status."""
    return {status: sum(row["status"] == status for row in report["checks"]) for status in STATUSES}


def summary(report: Mapping[str, Any], directory: Path) -> list[str]:
    """The console summary: a line a stage, what is not a pass, totals, files."""
    lines = []
    stages = list(dict.fromkeys(row["stage"] for row in report["checks"]))
    width = max([len(s) for s in stages] + [5])
    for stage in stages:
        rows = [row for row in report["checks"] if row["stage"] == stage]
        total = sum(row.get("seconds") or 0 for row in rows)
        tally = ", ".join(f"{n} {s}" for s in STATUSES if (n := sum(r["status"] == s for r in rows)))
        old = f"  (of an earlier run, {rows[0].get('at')})" if earlier(rows[0], report["header"]) else ""
        lines.append(f"{stage:{width}}  {len(rows):3} checks  {total:6.1f} s  {tally}{old}")
        lines += [
            f"{'':{width}}  {row['status'].upper()} {row['id']}: {_one_line(row['found'] or row['asked'])}"
            for row in rows
            if row["status"] != "pass"
        ]
    tally = ", ".join(f"{n} {s}" for s, n in counts(report).items() if n) or "nothing was checked"
    old_rows = sum(earlier(row, report["header"]) for row in report["checks"])
    tally += f"  ({old_rows} of them of earlier runs)" if old_rows else ""
    lines.append(f"{'total':{width}}  {len(report['checks']):3} checks  {tally}")
    lines.append(f"silicon: {report['header'].get('silicon') or 'not stated'}")
    lines.append(f"report: {directory}/report.html, report.json, junit.xml")
    return lines


def junit(report: Mapping[str, Any]) -> str:
    """JUnit XML: a test suite a stage, a test case a row; warnings pass and carry their text."""
    root = ET.Element("testsuites", name="gpu-slices")
    header = report["header"]
    total = counts(report)
    root.set("tests", str(len(report["checks"])))
    root.set("failures", str(total["fail"]))
    root.set("skipped", str(total["skip"]))
    for stage in dict.fromkeys(row["stage"] for row in report["checks"]):
        rows = [row for row in report["checks"] if row["stage"] == stage]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=stage,
            tests=str(len(rows)),
            errors="0",
            failures=str(sum(r["status"] == "fail" for r in rows)),
            skipped=str(sum(r["status"] == "skip" for r in rows)),
            time=f"{sum(r.get('seconds') or 0 for r in rows):.2f}",
            timestamp=str(rows[0].get("at", "")).rstrip("Z"),
        )
        properties = ET.SubElement(suite, "properties")
        facts = {name: header.get(name) or "not stated" for name in ("silicon", "cluster")}
        facts["run"] = "earlier" if earlier(rows[0], header) else "this"
        for name, value in facts.items():
            ET.SubElement(properties, "property", name=name, value=_xml(value))
        for row in rows:
            case = ET.SubElement(
                suite,
                "testcase",
                classname=stage,
                name=_xml(row["id"]),
                time=f"{row.get('seconds') or 0:.2f}",
            )
            if row["status"] == "fail":
                failure = ET.SubElement(case, "failure", message=_xml(row["found"]))
                failure.text = _xml(failure_text([{**dict.fromkeys(ROW_TEXTS, ""), **row}]))
            elif row["status"] == "skip":
                ET.SubElement(case, "skipped", message=_xml(row.get("found")))
            ET.SubElement(case, "system-out").text = _xml(
                json.dumps({k: row.get(k) for k in ("asked", "found", "evidence")}, indent=1, default=str)
            )
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes 0600; reports are to be read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def artifacts_directory(value: str | None, project: Path) -> Path:
    """The directory named by the inventory, or ``artifacts`` in the project."""
    return Path(value).expanduser().absolute() if value else project / "artifacts"


def _holder(allocation: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(allocation.get(k) for k in ("node", "pool", "device", "namespace", "pod", "stage"))


def _compact(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, sort_keys=True, default=str)
    return str(value)


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _xml(text: Any) -> str:
    return _XML_FORBIDDEN.sub("\ufffd", str(text or ""))
