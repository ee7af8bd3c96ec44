"""The report: rows, merging across runs, and the three files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import report, report_html

ROOT = Path(__file__).resolve().parents[2]


def row(stage: str = "smoke", name: str = "uuid", status: str = "pass", **more: Any) -> dict[str, Any]:
    return report.make_row({"id": name, "status": status, "asked": "a", "found": "b", **more}, stage)


def device(index: int, **more: Any) -> dict[str, Any]:
    return {
        "node": "a30",
        "pool": "a30",
        "device": f"gpu-0-mig-1g6gb-14-{index}",
        "type": "mig",
        "product": "NVIDIA A30",
        "profile": "1g.6gb",
        "uuid": f"MIG-{index}",
        "parent_uuid": "GPU-0",
        "memory_bytes": 5952 * 2**20,
        "slices": [index],
        **more,
    }


def holder(index: int, **more: Any) -> dict[str, Any]:
    return {
        "node": "a30",
        "pool": "a30",
        "device": f"gpu-0-mig-1g6gb-14-{index}",
        "uuid": f"MIG-{index}",
        "namespace": "ns",
        "pod": "p",
        "claim": "c",
        "stage": "smoke",
        **more,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"status": "pass"}, "needs an id"),
        ({"id": "x", "status": "ok"}, "status 'ok' is none of pass, warn, skip, fail"),
        ({"id": "x"}, "status None"),
        ({"id": "x", "status": "pass", "verdict": 1}, "unknown field 'verdict' in check 'x'"),
    ],
)
def test_a_bad_check_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(report.ReportError, match=re.escape(message)):
        report.make_row(given, "smoke")


def test_values_that_are_no_text_become_text() -> None:
    made = row(found=["a", 1], asked=3, evidence={"n": 1})
    assert (made["found"], made["asked"], made["evidence"]) == ('["a", 1]', "3", {"n": 1})


def test_all_failures_are_told_at_once() -> None:
    rows = [
        row(),
        row(name="one", status="fail", needed="n", fix="do it"),
        row(name="two", status="fail", found=""),
    ]
    assert report.failure_text(rows) == "one: found b; needed n; do: do it\ntwo: found nothing; needed a"


@pytest.mark.parametrize(
    ("tags", "role", "stage"),
    [
        (["enable-driver"], "mig", "enable-driver"),
        ([], "mig", "enable-driver"),
        (["sft"], "slice_claim", "sft"),
        ([], "inputs", "inputs"),
        ([], "", "playbook"),
    ],
)
def test_the_stage_of_a_failed_task(tags: list[str], role: str, stage: str) -> None:
    assert report.stage_of(tags, role) == stage


class TestRecorder:
    def test_a_run_of_one_stage_keeps_the_rows_of_the_others(self, tmp_path: Path) -> None:
        first = report.Recorder(tmp_path)
        first.header({"cluster": "c", "silicon": "emulated"})
        for made in (row("preflight", "api"), row("smoke", "uuid"), row("smoke", "old"), row("sft", "loss")):
            first.add(made)
        first.write(complete=True)
        second = report.Recorder(tmp_path)
        second.header({"cluster": "c", "silicon": "emulated"})
        second.add(row("smoke", "uuid", status="fail"))
        second.write(complete=True)
        kept = [(r["stage"], r["id"], r["status"]) for r in report.load(tmp_path / "report.json")["checks"]]
        assert kept == [("preflight", "api", "pass"), ("smoke", "uuid", "fail"), ("sft", "loss", "pass")]

    @pytest.mark.parametrize(("now", "kept"), [("teardown", ["teardown"]), ("smoke", ["smoke", "sft"])])
    def test_a_teardown_ends_what_was_set_up(self, tmp_path: Path, now: str, kept: list[str]) -> None:
        first = report.Recorder(tmp_path)
        for stage in ("teardown", "smoke", "sft"):
            first.add(row(stage))
        first.write(complete=False)
        second = report.Recorder(tmp_path)
        second.add(row(now))
        assert [r["stage"] for r in second.report["checks"]] == kept

    def test_another_cluster_starts_afresh(self, tmp_path: Path) -> None:
        first = report.Recorder(tmp_path)
        first.header({"cluster": "c"})
        first.add(row("preflight"))
        first.write(complete=False)
        second = report.Recorder(tmp_path)
        second.add(row("inputs"))
        second.header({"cluster": "d"})
        assert [r["stage"] for r in second.report["checks"]] == ["inputs"]

    def test_the_last_reading_of_a_check_counts(self, tmp_path: Path) -> None:
        recorder = report.Recorder(tmp_path)
        recorder.add(row(status="fail"))
        recorder.add(row(status="pass"))
        assert [r["status"] for r in recorder.report["checks"]] == ["pass"]

    def test_a_damaged_report_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "report.json").write_text('{"checks": [{"id": 1}, 3], "header": []}')
        recorder = report.Recorder(tmp_path)
        recorder.add(row())
        recorder.write(complete=True)
        assert len(json.loads((tmp_path / "report.json").read_text())["checks"]) == 1

    def test_present_holders_replace_former_present_holders(self, tmp_path: Path) -> None:
        recorder = report.Recorder(tmp_path)
        recorder.allocations([holder(0), holder(1, now=True)])
        recorder.allocations([], current=True)
        assert [a["device"] for a in recorder.report["allocations"]] == ["gpu-0-mig-1g6gb-14-0"]

    def test_a_stage_run_again_forgets_who_held_what_in_it(self, tmp_path: Path) -> None:
        first = report.Recorder(tmp_path)
        first.allocations([holder(0), holder(1, stage="sft")])
        first.write(complete=False)
        second = report.Recorder(tmp_path)
        second.allocations([holder(2)])
        second.add(row("smoke"))
        assert sorted(a["uuid"] for a in second.report["allocations"]) == ["MIG-1", "MIG-2"]

    def test_files_hold_no_rest_of_a_longer_one(self, tmp_path: Path) -> None:
        recorder = report.Recorder(tmp_path)
        recorder.add(row(evidence={"long": "x" * 4000}))
        recorder.write(complete=True)
        recorder.add(row(evidence={}))
        recorder.write(complete=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["junit.xml", "report.html", "report.json"]
        json.loads((tmp_path / "report.json").read_text())
        ET.parse(tmp_path / "junit.xml")  # noqa: S314 - our own file


def test_junit_counts_and_control_characters() -> None:
    data = report.empty()
    data["checks"] = [
        row(found="\x1b[31mred\x00"),
        row(name="b", status="fail", fix="mend"),
        row("sft", "c", status="skip"),
        row("sft", "d", status="warn"),
    ]
    root = ET.fromstring(report.junit(data).encode())  # noqa: S314 - our own text
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("4", "1", "1")
    assert [s.get("name") for s in root] == ["smoke", "sft"]
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text == "b: found b; needed a; do: mend"


def test_summary_names_what_is_no_pass_and_the_silicon() -> None:
    data = report.empty()
    data["header"]["silicon"] = "emulated"
    data["checks"] = [row(), row(name="b", status="fail", found="wrong"), row("sft", "c", status="warn")]
    lines = report.summary(data, Path("/x"))
    assert lines[0].split() == ["smoke", "2", "checks", "0.0", "s", "1", "pass,", "1", "fail"]
    assert "FAIL b: wrong" in lines[1]
    assert "silicon: emulated" in lines
    assert lines[-1] == "report: /x/report.html, report.json, junit.xml"


def test_rows_of_an_earlier_run_are_called_so() -> None:
    """A run that ends at a gate leaves the verdicts of an earlier one standing."""
    data = report.empty()
    data["header"]["date"] = "2026-12-01T09:00:00Z"
    data["checks"] = [
        {**row("preflight", "api", status="fail"), "at": "2026-12-01T09:00:00Z"},
        {**row("sft", "loss"), "at": "2026-12-01T08:59:59Z"},
    ]
    lines = report.summary(data, Path("/x"))
    assert [line for line in lines if "earlier" in line] == [lines[2], lines[3]]
    assert lines[2].startswith("sft ")
    assert lines[2].endswith("(of an earlier run, 2026-12-01T08:59:59Z)")
    assert lines[3].endswith("1 pass, 1 fail  (1 of them of earlier runs)")
    suites = ET.fromstring(report.junit(data).encode())  # noqa: S314 - our own text
    runs = [p.get("value") for p in suites.iter("property") if p.get("name") == "run"]
    assert runs == ["this", "earlier"]
    page = report_html.html(data)
    assert page.count("earlier run") == 1
    assert "<td>sft<div>earlier run, 2026-12-01T08:59:59Z</div></td>" in page


def test_a_run_is_dated_by_its_start(tmp_path: Path) -> None:
    recorder = report.Recorder(tmp_path, "2026-12-01T09:00:00Z")
    recorder.header({"cluster": "c"})
    recorder.add(row())
    data = recorder.report
    assert data["header"]["date"] == "2026-12-01T09:00:00Z"
    assert not report.earlier(data["checks"][0], data["header"])
    assert "earlier" not in "".join(report.summary(data, Path("/x")))


class TestPicture:
    def test_every_slice_is_drawn_at_its_place_with_its_holder(self) -> None:
        devices = [device(i) for i in (2, 0, 1, 3)]
        svg = ET.fromstring(report_html.pictures(devices, [holder(1)]))  # noqa: S314 - our own text
        groups = svg.findall("g")
        lefts = [float(g.find("rect").get("x")) for g in groups]  # type: ignore[union-attr, arg-type]
        assert lefts == sorted(lefts)
        assert len(set(lefts)) == 4
        titles = [g.findtext("title") or "" for g in groups]
        assert [("held by smoke: pod ns/p" in t) for t in titles] == [False, True, False, False]

    def test_a_holder_of_a_device_that_was_cut_anew_is_not_drawn(self) -> None:
        text = report_html.pictures([device(1)], [holder(1, uuid="MIG-former")])
        assert "not used in this run" in text

    @pytest.mark.parametrize(
        ("devices", "slices"),
        [
            ([device(0)], 4),
            ([device(0, product="NVIDIA H200")], 8),
            ([device(0, type="gpu", profile="", slices=[])], 1),
        ],
    )
    def test_slices_of_a_gpu(self, devices: list[dict[str, Any]], slices: int) -> None:
        assert report_html.slice_count(devices) == slices

    def test_place_by_name_where_no_slices_are_published(self) -> None:
        places = report_html.placements([device(3, slices=[]), device(0, slices=[])])
        assert [(start, size) for start, size, _ in places] == [(0, 1), (3, 1)]

    def test_text_is_escaped_and_the_page_loads_nothing(self) -> None:
        data = report.empty()
        data["checks"] = [row(found="<script>alert(1)</script>")]
        data["devices"] = [device(0, product="<b>")]
        page = report_html.html(data)
        assert "<script>" not in page
        assert "<b>" not in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert "src=" not in page
        assert "link " not in page


PLAY = [
    {
        "hosts": "localhost",
        "gather_facts": False,
        "vars": {"gpu_slices_silicon": "emulated", "gpu_slices_artifacts_dir": "{{ base }}/artifacts"},
        "tasks": [
            {
                "name": "Record",
                "gpu_check": {
                    "stage": "smoke",
                    "checks": [
                        {"id": "good", "status": "pass", "asked": "q", "found": "1"},
                        {
                            "id": "bad",
                            "status": "{{ verdict }}",
                            "asked": "q",
                            "found": "2",
                            "fix": "mend it",
                        },
                    ],
                },
            },
            {
                "name": "Rescue",
                "block": [{"name": "Stumble", "ansible.builtin.fail": {"msg": "stumbled"}}],
                "rescue": [{"name": "Stand up", "ansible.builtin.debug": {"msg": "up"}}],
            },
            {"name": "Fail plainly", "ansible.builtin.fail": {"msg": "fell"}, "when": "fall | bool"},
        ],
    }
]


# A node fails, and the controller goes on to the summary, whose cluster nobody answers for.
NODES = [
    PLAY[0],
    {
        "hosts": "node",
        "gather_facts": False,
        "tasks": [{"name": "Cut", "ansible.builtin.fail": {"msg": "busy"}, "tags": ["enable-driver"]}],
    },
    {
        "hosts": "localhost",
        "gather_facts": False,
        "tasks": [{"name": "Sum up", "gpu_report": {"kubeconfig": "{{ base }}/none"}}],
    },
]


def play(folder: Path, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump(extra.pop("plays", PLAY)))
    extra = {"base": str(folder), **extra}
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            "localhost,node,",
            "-c",
            "local",
            str(path),
            "-e",
            json.dumps(extra),
            *arguments,
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class TestThroughAnsible:
    def test_files_are_there_after_a_failed_check(self, tmp_path: Path) -> None:
        done = play(tmp_path, verdict="fail", fall="no")
        assert done.returncode != 0
        assert "bad: found 2; needed q; do: mend it" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        data = report.load(tmp_path / "artifacts/report.json")
        assert [(r["id"], r["status"]) for r in data["checks"]] == [("good", "pass"), ("bad", "fail")]
        assert data["header"]["silicon"] == "emulated"
        assert (tmp_path / "artifacts/junit.xml").exists()
        assert "silicon: emulated" in (tmp_path / "artifacts/report.html").read_text()

    def test_another_failed_task_is_a_row_and_a_rescued_one_is_not(self, tmp_path: Path) -> None:
        done = play(tmp_path, verdict="pass", fall="yes")
        assert done.returncode != 0
        rows = report.load(tmp_path / "artifacts/report.json")["checks"]
        failed = [(r["stage"], r["asked"], r["found"].split(": ")[-1]) for r in rows if r["status"] == "fail"]
        assert failed == [("playbook", "Fail plainly", "fell")]

    def test_the_summary_tells_of_a_node_that_failed_before_it(self, tmp_path: Path) -> None:
        done = play(tmp_path, plays=NODES, verdict="pass", fall="no")
        assert done.returncode == 2
        totals = [line for line in done.stdout.splitlines() if line.startswith("total ")]
        assert [line.split("checks")[1].strip() for line in totals] == ["2 pass, 1 fail"]
        rows = report.load(tmp_path / "artifacts/report.json")["checks"]
        assert ("enable-driver", "task-node", "fail") in {(r["stage"], r["id"], r["status"]) for r in rows}

    def test_check_mode_writes_nothing(self, tmp_path: Path) -> None:
        done = play(tmp_path, "--check", verdict="pass", fall="no")
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (tmp_path / "artifacts").exists()
