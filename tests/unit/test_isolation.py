"""What pods reached of slices that are not theirs, judged: good logs and every way in which one is bad."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from gpu_slices import isolation, judges
from test_workload_log import GIVEN, smoke_log

MIB = 2**20
SIZE = 5952 * MIB
GPU = {"path": "/dev/nvidia0", "major": 195, "minor": 0}


def caps(*minors: int) -> list[dict[str, Any]]:
    return [{"path": f"/dev/nvidia-caps/nvidia-cap{n}", "major": 236, "minor": n} for n in minors]


def nvml(uuid: str, memory: int = SIZE) -> dict[str, Any]:
    shown = {"kind": "mig", "name": "NVIDIA A30 MIG 1g.6gb", "uuid": uuid, "memory_bytes": memory}
    return {"loaded": True, "devices": [shown], "error": ""}


BARE: dict[str, Any] = {
    "nodes": [],
    "nvml": {"loaded": False, "devices": [], "error": "libnvidia-ml.so.1 cannot be loaded"},
    "smi": {"path": "", "listed": [], "said": "not found"},
    "cuda": {"loaded": False, "count": 0, "said": "libcuda.so.1: cannot open"},
    "visible_devices": "",
}
SLICE: dict[str, Any] = {
    "nodes": [*caps(39, 40), GPU],
    "path": {"tried": 2413, "answers": {"ENOENT": 2413}, "reached": []},
    "mknod": {
        "tried": 2413,
        "answers": {"mknod EPERM": 2413},
        "reached": [],
        "folder": "/scratch",
        "control": {"/dev/nvidia0": "mknod EPERM", "/dev/nvidia-caps/nvidia-cap39": "mknod EPERM"},
    },
    "nvml": nvml("MIG-A"),
    "cuda": {"loaded": False, "count": 0, "said": "libcuda.so.1: cannot open"},
    "uid": 1000,
    "spans": [[100.0, 100.2], [101.2, 101.4], [102.4, 102.6]],
    "differing": 0,
}
NEIGHBOUR: dict[str, Any] = {
    "nodes": [*caps(30, 31), GPU],
    "started_at": 101.0,
    "ended_at": 111.0,
    "loss_first": 6.4,
    "loss_last": 1.5,
    "steps": 60,
}
OVER = {
    "got_bytes": 5500 * MIB,
    "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB.",
}


def member(role: str, seen: dict[str, Any] | None, uuid: str = "", **pod: Any) -> dict[str, Any]:
    given = [{"uuid": uuid, "parent_uuid": "GPU-1", "memory_bytes": SIZE}] if uuid else []
    log = "nothing" if seen is None else f"[proof] {json.dumps(seen)}\n{isolation.DONE}\n"
    return {"id": f"pod-{role}", "name": role, "pods": [{"node": "a30", "log": log, "devices": given, **pod}]}


def members(**changed: Any) -> list[dict[str, Any]]:
    """The three pods; ``slice={...}`` and so on changes what one of them saw."""
    seen = {"bare": BARE, "slice": SLICE, "neighbour": NEIGHBOUR}
    seen = {name: {**copy.deepcopy(facts), **changed.get(name, {})} for name, facts in seen.items()}
    return [
        member("no-claim", seen["bare"]),
        member("neighbour", seen["neighbour"], "MIG-B"),
        member("slice", seen["slice"], "MIG-A"),
    ]


def judged(silicon: str = "emulated", **changed: Any) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in isolation.judge(members(**changed), {"silicon": silicon})}


def failing(silicon: str = "emulated", **changed: Any) -> list[str]:
    return [name for name, row in judged(silicon, **changed).items() if row["status"] == "fail"]


def test_on_emulated_silicon_all_but_cuda_is_proved() -> None:
    rows = judged()
    assert {name: row["status"] for name, row in rows.items()} == {
        "no-claim": "pass",
        "other-nodes-listed": "pass",
        "other-nodes-by-path": "pass",
        "other-nodes-by-mknod": "pass",
        "nvml-view": "pass",
        "over-allocation": "skip",
        "neighbour": "pass",
    }
    assert rows["over-allocation"]["found"].startswith("silicon is emulated: no CUDA")
    assert "emulated" in rows["over-allocation"]["evidence"]["proved"]
    assert rows["nvml-view"]["evidence"]["proved"] == "emulated silicon"
    assert rows["no-claim"]["evidence"]["proved"].startswith("real")
    assert rows["neighbour"]["found"] == (
        "2 of 3 rounds lay inside its training of 10.0 s; it ended OK, loss 6.4 -> 1.5 in 60 steps"
    )


def test_on_real_silicon_cuda_refuses_at_the_size_of_the_slice() -> None:
    rows = judged("real", slice={"over": OVER})
    assert {row["status"] for row in rows.values()} == {"pass"}
    assert rows["over-allocation"]["found"] == (
        "5.37 GiB were granted, then OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB."
    )
    assert rows["nvml-view"]["evidence"]["proved"] == "real silicon"


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"bare": {"nodes": [GPU]}}, ["no-claim"]),
        ({"bare": {"nvml": nvml("MIG-A")}}, ["no-claim"]),
        (
            {"bare": {"smi": {"path": "/usr/bin/nvidia-smi", "listed": ["GPU 0: (UUID: GPU-1)"]}}},
            ["no-claim"],
        ),
        ({"bare": {"cuda": {"loaded": True, "count": 1, "said": "code 0"}}}, ["no-claim"]),
        ({"slice": {"nodes": [*caps(39, 40, 30), GPU]}}, ["other-nodes-listed"]),
        ({"slice": {"nodes": [*caps(39, 40), GPU, {**GPU, "path": "/dev/nvidia1"}]}}, ["other-nodes-listed"]),
        ({"slice": {"nodes": [*caps(30, 31), GPU]}}, ["other-nodes-listed"]),
        ({"slice": {"nodes": []}}, ["other-nodes-listed"]),
        ({"neighbour": {"nodes": []}}, ["other-nodes-listed", "other-nodes-by-path"]),
        (
            {"slice": {"path": {"tried": 9, "answers": {}, "reached": ["/dev/nvidia1: OK"]}}},
            ["other-nodes-by-path"],
        ),
        ({"slice": {"path": {}}}, ["other-nodes-by-path"]),
        ({"slice": {"mknod": {**SLICE["mknod"], "reached": ["cap 30: ENXIO"]}}}, ["other-nodes-by-mknod"]),
        ({"slice": {"mknod": {}}}, ["other-nodes-by-mknod"]),
        ({"slice": {"uid": 0}}, ["other-nodes-by-mknod"]),
        ({"slice": {"nvml": nvml("MIG-B")}}, ["nvml-view"]),
        (
            {"slice": {"nvml": {"loaded": False, "devices": [], "error": "x"}}},
            ["nvml-view", "over-allocation"],
        ),
        ({"slice": {"nvml": nvml("MIG-A", 24 * 2**30)}}, ["over-allocation"]),
        ({"slice": {"spans": [[90.0, 90.2], [111.5, 111.7]]}}, ["neighbour"]),
        ({"slice": {"spans": [[100.9, 101.1]]}}, ["neighbour"]),
        ({"slice": {"spans": []}}, ["neighbour"]),
        ({"slice": {"differing": 1}}, ["neighbour"]),
        ({"neighbour": {"started_at": None}}, ["neighbour"]),
    ],
)
def test_every_hole_is_seen(change: dict[str, Any], rows: list[str]) -> None:
    assert failing(**change) == rows
    assert all(judged(**change)[row]["fix"] for row in rows)


@pytest.mark.parametrize(
    ("over", "good"),
    [
        ({}, True),
        ({"error": "RuntimeError: CUDA out of memory."}, True),
        ({"got_bytes": 6200 * MIB}, False),
        ({"got_bytes": 3000 * MIB}, False),
        ({"error": ""}, False),
        ({"error": "RuntimeError: CUDA error: device-side assert"}, False),
    ],
)
def test_the_refusal_must_be_one_of_memory_at_the_size_of_the_slice(over: dict[str, Any], good: bool) -> None:
    assert failing("real", slice={"over": {**OVER, **over}}) == ([] if good else ["over-allocation"])


def test_on_real_silicon_cuda_must_be_there() -> None:
    row = judged("real")["over-allocation"]
    assert (row["status"], row["evidence"]["proved"]) == ("fail", "nothing")


def test_another_node_proves_nothing_about_this_one() -> None:
    given = members()
    given[0]["pods"][0]["node"] = "h200"
    rows = {row["id"]: row for row in isolation.judge(given, {"silicon": "emulated"})}
    assert rows["no-claim"]["status"] == "fail"


@pytest.mark.parametrize(
    "devices", [[], [{"uuid": "MIG-B", "parent_uuid": "GPU-2"}], [{"uuid": "MIG-A", "parent_uuid": "GPU-1"}]]
)
def test_the_neighbour_must_have_another_slice_of_the_same_gpu(devices: list[Any]) -> None:
    given = members()
    given[1]["pods"][0]["devices"] = devices
    rows = {row["id"]: row for row in isolation.judge(given, {"silicon": "emulated"})}
    assert rows["neighbour"]["status"] == "fail"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_pod_that_tells_nothing(index: int) -> None:
    given = members()
    given[index]["pods"][0]["log"] = None
    (row,) = isolation.judge(given, {})
    assert (row["id"], row["status"]) == ("attempts", "fail")


ROOT: dict[str, Any] = {
    **SLICE,
    "uid": 0,
    "mknod": {
        "tried": 2413,
        "answers": {"EPERM": 2413},
        "reached": [],
        "folder": "/dev",
        "control": {"/dev/nvidia0": "ENXIO", "/dev/nvidia-caps/nvidia-cap39": "ENXIO"},
    },
}


def root(silicon: str = "emulated", **changed: Any) -> dict[str, Any]:
    arguments = {"silicon": silicon, "neighbour": [*caps(30, 31), GPU]}
    (row,) = isolation.judge_root([member("root", {**ROOT, **changed})], arguments)
    return row


class TestRoot:
    def test_the_device_rules_refuse_all_others_and_not_its_own(self) -> None:
        row = root()
        assert row["status"] == "pass"
        assert row["found"] == (
            "2413 others: EPERM 2413 times; 2 of its own: ENXIO; those of the neighbour are minors 30, 31 of "
            "236 (ENXIO: allowed, and no kernel driver behind it, for the silicon is emulated)"
        )

    def test_on_real_silicon_its_own_can_be_opened(self) -> None:
        control = dict.fromkeys(ROOT["mknod"]["control"], "OK")
        row = root("real", mknod={**ROOT["mknod"], "control": control})
        assert row["status"] == "pass"
        assert "2 of its own: OK" in row["found"]
        assert "ENXIO" not in row["found"]

    @pytest.mark.parametrize(
        "change",
        [
            {"mknod": {**ROOT["mknod"], "reached": ["cap 30: ENXIO"]}},
            {"mknod": {**ROOT["mknod"], "control": {**ROOT["mknod"]["control"], "/dev/nvidia0": "EPERM"}}},
            {"mknod": {**ROOT["mknod"], "control": {}}},
            {"mknod": {**ROOT["mknod"], "tried": 0}},
            {"uid": 1000},
            {"mknod": {}},
        ],
    )
    def test_what_was_reached_or_not_tried(self, change: dict[str, Any]) -> None:
        row = root(**change)
        assert row["status"] == "fail"
        assert row["fix"]

    def test_where_root_may_make_no_node_at_all_the_rules_were_not_asked(self) -> None:
        control = dict.fromkeys(ROOT["mknod"]["control"], "mknod EPERM")
        row = root(mknod={**ROOT["mknod"], "answers": {"mknod EPERM": 2413}, "control": control})
        assert (row["status"], row["evidence"]["proved"]) == ("skip", "nothing")

    def test_its_other_rows_are_called_after_it(self) -> None:
        rows = isolation.root_rows([{"id": "pod-root"}, {"id": "completed"}, root()])
        assert [row["id"] for row in rows] == ["pod-root", "root-completed", "device-rules"]

    @pytest.mark.parametrize(
        ("namespace", "options", "words"),
        [
            ({"found": False}, {"create": True}, ""),
            ({"found": True}, {"create": True, "ours": True}, ""),
            ({"found": False}, {"create": False}, "gpu_slices_namespace_create is false"),
            ({"found": True}, {"create": True}, "exists and is not ours"),
            ({"found": True, "terminating": True}, {"create": True, "ours": True}, "being deleted"),
            ({"found": False}, {"create": True, "pull_secrets": ["s"]}, "has no such secret"),
        ],
    )
    def test_where_it_may_not_run_the_row_says_why(
        self, namespace: dict[str, Any], options: dict[str, Any], words: str
    ) -> None:
        reason = isolation.root_reason({"name": "second", **namespace}, **options)
        assert words in reason
        assert bool(reason) == bool(words)
        row = isolation.skipped(reason or "x")
        assert (row["status"], row["id"], row["evidence"]["proved"]) == ("skip", "device-rules", "nothing")


def test_the_table_is_for_people() -> None:
    rows = [*judged().values(), root(), {"id": "pod-slice", "status": "pass", "asked": "", "found": ""}]
    lines = isolation.table_lines(rows)
    assert len(lines) == 4 * 8
    assert lines[0] == "PASS  A pod without a claim on node a30 looks for a GPU"
    assert lines[1].strip() == "expected: no device node, nothing through NVML, nvidia-smi or CUDA"


def test_the_neighbours_nodes_are_handed_on() -> None:
    assert isolation.neighbour_nodes(judged().values()) == NEIGHBOUR["nodes"]
    assert isolation.neighbour_nodes([]) == []


class TestSmoke:
    """The smoke pod holds a container without the claim too."""

    def rows(self, log: str | None) -> dict[str, str]:
        return {row["id"]: row["status"] for row in judges.WORKLOAD["smoke"](log, [GIVEN], False, {})}

    def test_it_sees_nothing(self) -> None:
        rows = self.rows(smoke_log())
        assert rows["no-claim"] == "pass"
        assert list(rows)[-1] == "log"

    @pytest.mark.parametrize("seen", [{}, {**BARE, "nodes": [GPU]}])
    def test_what_it_sees_or_does_not_tell_is_a_warning(self, seen: dict[str, Any]) -> None:
        assert self.rows(smoke_log(without_claim=seen))["no-claim"] == "warn"

    def test_a_log_that_cannot_be_read(self) -> None:
        assert self.rows(None) == {"log": "fail"}
