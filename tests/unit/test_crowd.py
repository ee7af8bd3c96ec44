"""A crowd of jobs: how many, on which card, and what they prove together, for good and for bad runs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from gpu_slices import crowd, inputs, preflight

NS = "gpu-slices"


def device(index: int, card: str = "GPU-A", node: str = "a30", **changed: Any) -> dict[str, Any]:
    return {
        "driver": "gpu.nvidia.com",
        "pool": node,
        "node": node,
        "device": f"{card}-mig-{index}",
        "type": "mig",
        "profile": "1g.6gb",
        "uuid": f"MIG-{card}-{index}",
        "parent_uuid": card,
        "memory_bytes": 5952 * 2**20,
        "product": "NVIDIA A30",
        "slices": [index],
        "attributes": {"profile": "1g.6gb"},
        "capacity": {},
        "taints": [],
        "partitionable": False,
        "holder": None,
        **changed,
    }


def claim_of(
    one: dict[str, Any], name: str, namespace: str = NS, manager: str = "gpu-slices"
) -> dict[str, Any]:
    result = {"driver": one["driver"], "pool": one["pool"], "device": one["device"]}
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": manager},
        },
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": name}],
        },
    }


def facts(devices: list[dict[str, Any]], claims: Any = (), **changed: Any) -> dict[str, Any]:
    return {
        "slices": {"devices": devices, "pools": [{"name": "a30"}], "incomplete": []},
        "claims": list(claims),
        "nodes": {},
        "namespace": {"name": NS, "found": True, "labels": {}},
        "claim_templates": {},
        "errors": {},
        **changed,
    }


FOUR = [device(index) for index in range(4)]


class TestPlan:
    def test_every_free_slice_is_used(self) -> None:
        made = crowd.plan(facts(FOUR), "1g.6gb", "5Gi", 16)
        assert (made["count"], made["card"], made["profile"]) == (4, "", "1g.6gb")
        assert made["isolation"] == {"card": "GPU-A", "node": "a30", "free": 4, "reason": ""}
        first, second = crowd.plan_checks(made, "1g.6gb", "5Gi", 16, required=False)
        assert (first["status"], second["status"]) == ("pass", "pass")
        assert second["found"] == "all 4 free slices of 1g.6gb, on a30 (GPU-A)"

    def test_what_others_hold_is_not_free_and_what_we_hold_is(self) -> None:
        claims = [claim_of(FOUR[0], "someone-x"), claim_of(FOUR[1], "gpu-slices-crowd-abc-1-node-0-0-x")]
        made = crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16)
        assert [d["uuid"] for d in made["devices"]] == [f"MIG-GPU-A-{n}" for n in (1, 2, 3)]

    def test_a_pod_of_our_name_in_another_namespace_is_somebody_elses(self) -> None:
        claims = [claim_of(FOUR[0], "gpu-slices-crowd-abc-1-node-0-0-x", "theirs")]
        assert crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16)["count"] == 3

    def test_somebody_elses_pod_of_such_a_name_in_our_namespace_is_not_ours(self) -> None:
        claims = [claim_of(FOUR[0], "gpu-slices-crowd-foreign-s-x", manager="")]
        assert crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16)["count"] == 3
        assert crowd.held(facts(FOUR, claims), NS) == []

    def test_what_the_root_pod_holds_counts_as_free(self) -> None:
        claims = [claim_of(FOUR[0], "gpu-slices-isolation-abc-root-x", "second")]
        assert crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16)["count"] == 3
        assert crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16, second="second")["count"] == 4

    def test_above_the_limit_only_the_fullest_card_is_used(self) -> None:
        devices = [*FOUR, *(device(n, "GPU-B", "h") for n in range(7)), device(0, "GPU-C", "h")]
        made = crowd.plan(facts(devices), "1g.6gb", "5Gi", 8)
        assert (made["count"], made["card"], made["free"]) == (7, "GPU-B", 12)
        assert {d["parent_uuid"] for d in made["devices"]} == {"GPU-B"}
        found = crowd.plan_checks(made, "1g.6gb", "5Gi", 8, required=False)[1]["found"]
        assert found == (
            "12 slices of 1g.6gb are free on 3 GPUs, more than crowd_limit (8): "
            "only the 7 of h (GPU-B) are used"
        )

    def test_a_card_is_never_divided(self) -> None:
        made = crowd.plan(facts(FOUR), "1g.6gb", "5Gi", 2)
        assert (made["count"], made["card"]) == (4, "GPU-A")
        assert "never divided" in crowd.plan_checks(made, "1g.6gb", "5Gi", 2, required=False)[1]["found"]

    @pytest.mark.parametrize("required", [False, True])
    def test_one_free_slice_is_no_crowd(self, required: bool) -> None:
        claims = [claim_of(one, f"other-{n}") for n, one in enumerate(FOUR[1:])]
        made = crowd.plan(facts(FOUR, claims), "1g.6gb", "5Gi", 16)
        (check,) = crowd.plan_checks(made, "1g.6gb", "5Gi", 16, required)
        assert made["profile"] == ""
        assert check["status"] == ("fail" if required else "skip")
        assert "2 slices of profile 1g.6gb are needed at once" in check["found"]
        assert "sft_nodes" not in check["fix"]

    @pytest.mark.parametrize(
        ("devices", "kind"), [([], "slice_empty"), ([device(0, profile="2g.12gb")], "profile_not_published")]
    )
    def test_nothing_to_be_had_is_a_skip_with_the_reason(self, devices: list[Any], kind: str) -> None:
        made = crowd.plan(facts(devices), "1g.6gb", "5Gi", 16)
        (check,) = crowd.plan_checks(made, "1g.6gb", "5Gi", 16, required=False)
        assert (made["kind"], check["status"]) == (kind, "skip")

    def test_auto_takes_the_smallest_profile_with_two_free(self) -> None:
        large = [device(n, "GPU-B", profile="2g.12gb", memory_bytes=11968 * 2**20) for n in range(2)]
        claims = [claim_of(one, f"other-{n}") for n, one in enumerate(FOUR[1:])]
        assert crowd.plan(facts([*FOUR, *large], claims), "auto", "5Gi", 16)["profile"] == "2g.12gb"
        assert crowd.plan(facts([*FOUR, *large]), "auto", "5Gi", 16)["profile"] == "1g.6gb"

    def test_what_cannot_be_read_is_no_skip(self) -> None:
        broken = facts(FOUR, errors={"claims": {"message": "Not allowed (403)."}})
        del broken["claims"]
        (check,) = crowd.plan_checks(
            crowd.plan(broken, "1g.6gb", "5Gi", 16), "1g.6gb", "5Gi", 16, required=False
        )
        assert (check["status"], check["found"]) == ("fail", "Not allowed (403). [facts_unreadable]")

    def test_slices_on_cards_of_their_own_have_no_neighbour(self) -> None:
        made = crowd.plan(facts([device(0, "GPU-A"), device(0, "GPU-B")]), "1g.6gb", "5Gi", 16)
        assert made["count"] == 2
        assert made["isolation"]["reason"] == "no GPU has two free slices, so there is no neighbour"

    def test_before_the_layouts_are_cut_the_least_crowd_is_shown(self) -> None:
        made = crowd.plan(facts([]), "1g.6gb", "5Gi", 16, {"a30": ["1g.6gb"]}, predict=True)
        assert (made["predicted"], made["count"], made["profile"]) == (True, 2, "1g.6gb")
        assert made["isolation"]["reason"] == "the slices are not published yet"
        (check,) = crowd.plan_checks(made, "1g.6gb", "5Gi", 16, required=True)
        assert check["status"] == "skip"


WAITING = "pod job-5-pod: 0/3 nodes are available: 1 node(s) had a taint, 2 cannot allocate all claims."


def member(number: int, uuid: str, start: float, end: float, **changed: Any) -> dict[str, Any]:
    """A job that trained from start to end, in seconds after noon, its pod there 5 s before and 2 s after."""
    noon = 1796126400
    seen = {
        "devices": [{"uuid": changed.pop("seen", uuid)}],
        "started_at": noon + start,
        "ended_at": noon + end,
    }
    clock = lambda second: f"2026-12-01T12:{int(second) // 60:02d}:{int(second) % 60:02d}Z"  # noqa: E731
    times = {
        "created": clock(0),
        "scheduled": clock(changed.pop("scheduled", 1)),
        "started": clock(start - 4),
        "finished": clock(end + 2),
    }
    pod = {
        "name": f"job-{number}-pod",
        "node": "a30",
        "log": f"[proof] {json.dumps(seen)}\nOK\n",
        "devices": [{"uuid": uuid, "device": f"gpu-0-mig-{uuid}"}],
        "times": times,
        "waited": changed.pop("waited", ""),
    }
    return {"name": f"crowd-{number}", "id": f"job-{number}", "pods": [{**pod, **changed}]}


def good() -> list[dict[str, Any]]:
    first = [member(n, f"MIG-{n}", 10 + n / 10, 20 + n / 10) for n in range(1, 5)]
    return [*first, member(5, "MIG-1", 27, 37, scheduled=23, waited=WAITING)]


def judged(members: list[dict[str, Any]], free: int = 4) -> dict[str, dict[str, Any]]:
    return {check["id"]: check for check in crowd.judge(members, {"free": free})}


def failing(members: list[dict[str, Any]], free: int = 4) -> list[str]:
    return [name for name, check in judged(members, free).items() if check["status"] == "fail"]


class TestJudge:
    def test_a_good_crowd(self) -> None:
        checks = judged(good())
        assert {check["status"] for check in checks.values()} == {"pass"}
        assert list(checks) == ["devices", "at-once", "one-more", "reason", "served"]
        assert checks["at-once"]["found"] == "4 trained at once from 12:00:10.4 to 12:00:20.1 UTC, 9.7 s"
        assert checks["one-more"]["found"] == "job-5 stayed Pending for 23 s; 4 slices were free for 5 jobs"
        assert checks["served"]["found"] == (
            "job-1 trained until 12:00:20.1, its pod ended at 12:00:22; job-5 was scheduled at 12:00:23 UTC "
            "on the same slice MIG-1 and ended OK"
        )
        table = checks["at-once"]["evidence"]["table"]
        assert [row["waited"] for row in table] == [1, 1, 1, 1, 23]

    def test_any_of_them_may_be_the_one_that_waits(self) -> None:
        members = good()
        assert failing([members[4], *members[:4]]) == []

    def test_the_table_is_for_people(self) -> None:
        lines = crowd.table_lines(judged(good()).values())
        assert lines[0].split() == ["job", "UUID", "node", "start", "(UTC)", "end", "(UTC)", "waited"]
        assert lines[5].split() == ["crowd-5", "MIG-1", "a30", "12:00:27.0", "12:00:37.0", "23", "s"]
        assert crowd.table_lines([{"id": "x", "evidence": {}}]) == []

    def test_one_device_twice(self) -> None:
        members = good()
        members[1] = member(2, "MIG-1", 10, 20)
        assert failing(members) == ["devices", "served"]

    def test_a_log_that_shows_another_device_than_was_given(self) -> None:
        members = good()
        members[1] = member(2, "MIG-2", 10, 20, seen="MIG-9")
        assert failing(members) == ["devices"]
        assert "job-2 was given MIG-2 and saw MIG-9" in judged(members)["devices"]["found"]

    def test_one_after_the_other(self) -> None:
        members = good()
        members[1] = member(2, "MIG-2", 21, 31)
        assert failing(members) == ["at-once"]
        assert (
            judged(members)["at-once"]["found"]
            == "the last began at 12:00:21.0, the first had ended at 12:00:20.1 UTC"
        )

    def test_nobody_had_to_wait(self) -> None:
        members = [*good()[:4], member(5, "MIG-5", 10, 20)]
        assert failing(members) == ["devices", "one-more"]
        assert "became free meanwhile" in judged(members)["one-more"]["fix"]

    def test_two_had_to_wait(self) -> None:
        members = good()
        members[3] = member(4, "MIG-2", 27, 37, scheduled=23, waited="0/3 nodes: 1 Insufficient cpu")
        assert failing(members) == ["devices", "one-more"]
        assert "job-4: 0/3 nodes: 1 Insufficient cpu" in judged(members)["one-more"]["found"]
        assert "crowd_resources" in judged(members)["one-more"]["fix"]

    @pytest.mark.parametrize(
        ("said", "status"),
        [
            (WAITING, "pass"),
            ("0/3 nodes are available: 1 Insufficient cpu, 2 cannot allocate all claims.", "warn"),
            ("0/3 nodes are available: 3 Insufficient memory.", "fail"),
            ("", "fail"),
        ],
    )
    def test_the_reason_must_be_the_device(self, said: str, status: str) -> None:
        members = good()
        members[4]["pods"][0]["waited"] = said
        check = judged(members)["reason"]
        assert check["status"] == status
        assert said in check["found"]
        assert bool(check["fix"]) == (status != "pass")

    def test_it_must_run_on_a_slice_that_another_left(self) -> None:
        members = [*good()[:4], member(5, "MIG-7", 27, 37, scheduled=23, waited=WAITING)]
        assert failing(members) == ["served"]

    @pytest.mark.parametrize(
        "change",
        [
            {"log": None},
            {"log": "no proof here"},
            {"devices": []},
            {"times": {}},
            {"times": {"created": "", "scheduled": "", "started": "", "finished": ""}},
        ],
    )
    def test_what_is_not_told_proves_nothing(self, change: dict[str, Any]) -> None:
        members = good()
        members[2]["pods"][0].update(change)
        assert failing(members) == ["together"]

    def test_a_job_without_its_pod_proves_nothing(self) -> None:
        members = good()
        members[2]["pods"] = []
        assert judged(members)["together"]["found"] == "crowd-3 has 0 pods"


class TestReleased:
    MADE = crowd.plan(facts(FOUR), "1g.6gb", "5Gi", 16)

    def test_nothing_is_left(self) -> None:
        check = crowd.released_check(facts(FOUR), self.MADE, NS, "second")
        assert (check["status"], check["found"]) == ("pass", "yes; 4 of the 4 slices are free")

    @pytest.mark.parametrize(
        ("namespace", "name"),
        [
            (NS, "gpu-slices-crowd-abc-5-node-0-0-x-gpu-slice-y"),
            ("second", "gpu-slices-isolation-abc-root-gpu-slice-y"),
        ],
    )
    def test_a_claim_of_ours_that_holds_a_slice(self, namespace: str, name: str) -> None:
        there = facts(FOUR, [claim_of(FOUR[0], name, namespace)])
        check = crowd.released_check(there, self.MADE, NS, "second")
        assert check["status"] == "fail"
        assert crowd.held(there, NS, "second") == [f"{namespace}/{name}"]

    def test_what_others_took_meanwhile_is_said(self) -> None:
        taken = copy.deepcopy(FOUR)
        taken[2]["holder"] = {"namespace": "theirs", "claim": "c", "pods": []}
        check = crowd.released_check(facts(taken, [claim_of(FOUR[2], "c", "theirs")]), self.MADE, NS)
        assert (check["status"], check["found"]) == (
            "pass",
            "yes; 3 of the 4 slices are free; GPU-A-mig-2 is held by theirs/c",
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"crowd_isolation_namespace": "good-name"}, []),
        ({"crowd_isolation_namespace": "Bad_name"}, ["crowd_isolation_namespace is 'Bad_name'"]),
        ({"crowd_isolation_namespace": ""}, ["crowd_isolation_namespace is ''"]),
        ({"crowd_isolation_namespace": NS}, ["as gpu_slices_namespace"]),
        ({"gpu_slices_namespace": "a" * 60}, ["too long"]),
        ({"gpu_slices_namespace": "a" * 60, "crowd_isolation_namespace": "b"}, []),
        ({"crowd_timeout": 60, "crowd_seconds": 30}, ["crowd_timeout is 60, crowd_seconds 30"]),
        ({"crowd_timeout": 61, "crowd_seconds": 30}, []),
        ({"crowd_timeout": "many", "crowd_seconds": 30}, []),
        ({"crowd_timeout": 60}, ["crowd_timeout is 60, crowd_seconds 30"]),
        ({"crowd_timeout": 60, "gpu_slices_silicon": "emulated"}, []),
        ({"crowd_seconds": 450}, ["crowd_timeout is 900, crowd_seconds 450"]),
    ],
)
def test_inputs(settings: dict[str, Any], words: list[str]) -> None:
    faults = crowd.faults({"gpu_slices_namespace": NS, **settings})
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults))


class TestGates:
    """What the gates ask and refuse for this stage."""

    SETTINGS: dict[str, Any] = {  # noqa: RUF012 - read only
        "stages": ["crowd"],
        "namespace": NS,
        "namespace_create": True,
        "isolation_namespace": "second",
        "profiles": [],
    }

    def places(self, **changed: Any) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for right in preflight.needed_rights({**self.SETTINGS, **changed}):
            if right["resource"] == "pods":
                found.setdefault(right["namespace"], set()).add(right["verb"])
        return found

    def test_pods_are_made_in_both_namespaces(self) -> None:
        everything = {"get", "create", "patch", "delete", "list", "watch"}
        assert self.places() == {NS: everything, "second": everything}

    def test_claim_templates_are_read_in_both_namespaces(self) -> None:
        rights = preflight.needed_rights(self.SETTINGS)
        read = {
            r["namespace"]
            for r in rights
            if r["resource"] == "resourceclaimtemplates" and r["verb"] == "list"
        }
        assert read == {NS, "second"}

    @pytest.mark.parametrize(
        "changed", [{"namespace_create": False}, {"isolation_namespace": ""}, {"stages": ["sft"]}]
    )
    def test_no_rights_are_asked_for_in_a_namespace_that_is_not_made(self, changed: dict[str, Any]) -> None:
        assert set(self.places(**changed)) == {NS}

    def test_the_names_that_are_known_beforehand(self) -> None:
        named = {item["id"] for item in preflight.named_objects(self.SETTINGS)}
        wanted = {"ConfigMap/gpu-slices-crowd", "ConfigMap/gpu-slices-crowd-isolation"}
        assert named == {*wanted, "TrainingRuntime/gpu-slices-crowd"}

    @pytest.mark.parametrize(
        ("name", "value", "wrong"),
        [
            ("crowd_limit", 1, True),
            ("crowd_limit", 2, False),
            ("crowd_seconds", 0, True),
            ("crowd_timeout", -1, True),
            ("crowd_isolation_seconds", float("nan"), True),
            ("crowd_isolation_seconds", 0.5, False),
        ],
    )
    def test_numbers(self, name: str, value: float, wrong: bool) -> None:
        faults = inputs.number_faults({name: value})
        assert bool(faults) is wrong
        assert all(fault.startswith(name) for fault in faults)
