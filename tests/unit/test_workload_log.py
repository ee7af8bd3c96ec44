"""What a log proves, for good logs and for every way in which one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import workload_log
from gpu_slices.resource_slices import merge_slices

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
MIB = 2**20
GIVEN: dict[str, Any] = {
    "driver": "gpu.nvidia.com",
    "node": "a30",
    "pool": "a30",
    "device": "gpu-0-mig-1g6gb-14-0",
    "type": "mig",
    "profile": "1g.6gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-1",
    "memory_bytes": 5952 * MIB,
    "attributes": {"productName": "NVIDIA A30"},
}
SEEN: dict[str, Any] = {
    "kind": "mig",
    "name": "NVIDIA A30 MIG 1g.6gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-1",
    "memory_bytes": 5952 * MIB,
}
SMI = "===== nvidia-smi -L =====\nGPU 0: NVIDIA A30 (UUID: GPU-1)\n  MIG 1g.6gb  Device  0: (UUID: MIG-1)\n"


def smoke_log(end: str = "matmul_on_slice: OK\n", smi: str = SMI, **proof: Any) -> str:
    facts = {
        "devices": [SEEN],
        "backend": "cpu",
        "torch": "1.13.0",
        "matmul": {"size": 768, "max_error": 0.0, "tolerance": 0.0},
        "without_claim": {
            "nodes": [],
            "nvml": {"loaded": False},
            "smi": {"path": ""},
            "cuda": {"loaded": False},
        },
        **proof,
    }
    return f"{smi}cuda_available: False\n[proof] {json.dumps(facts)}\n{end}"


def sft_log(end: str = "DRA LoRA SFT on GPU slice: OK\n\n", **proof: Any) -> str:
    facts = {
        "devices": [SEEN],
        "backend": "cpu",
        "torch": "1.13.0",
        "loss_first": 6.4,
        "loss_last": 1.5,
        "loss_factor": 0.4,
        "steps": 60,
        "world": 1,
        "rank": 0,
        "peak_bytes": 500 * MIB,
        "peak_kind": "rss",
        **proof,
    }
    return f"[slice] device=NVIDIA A30\n[proof] {json.dumps(facts)}\n{end}"


def failed(checks: list[dict[str, Any]]) -> list[str]:
    return [check["id"] for check in checks if check["status"] == "fail"]


@pytest.mark.parametrize(
    ("log", "last"),
    [("", ""), ("a\n \n\t\n", "a"), ("a\nb", "b"), (" OK  \r\n\n", "OK"), ("\n\n", "")],
)
def test_last_line(log: str, last: str) -> None:
    assert workload_log.last_line(log) == last


def test_proof_lines_add_up_and_bad_ones_are_left_out() -> None:
    log = '[proof] {"a": 1, "b": 1}\n[proof] not json\n[proof] [1]\n x [proof] {"c": 1}\n[proof] {"b": 2}'
    assert workload_log.proof(log) == {"a": 1, "b": 2}


def test_a_good_smoke_log_passes_every_check() -> None:
    checks = workload_log.judge_smoke(smoke_log(), [GIVEN], cuda_required=False)
    assert failed(checks) == []
    assert [c["id"] for c in checks] == [
        *("allocation", "one-device", "kind", "name", "uuid", "memory", "parent", "backend"),
        *("matmul", "nvidia-smi", "log"),
    ]


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        (smoke_log(end="matmul_on_slice: FAILED: x"), ["log"]),
        (smoke_log(end="matmul_on_slice: OK\nTraceback"), ["log"]),
        (smoke_log(devices=[SEEN, {**SEEN, "uuid": "MIG-2"}]), ["one-device"]),
        (smoke_log(devices=[]), ["one-device"]),
        (smoke_log(devices=[{**SEEN, "uuid": "MIG-2"}]), ["uuid"]),
        (smoke_log(devices=[{**SEEN, "parent_uuid": "GPU-2"}]), ["parent"]),
        (smoke_log(devices=[{**SEEN, "kind": "gpu"}]), ["kind"]),
        (smoke_log(devices=[{**SEEN, "name": "NVIDIA A30 MIG 2g.12gb"}]), ["name"]),
        (smoke_log(devices=[{**SEEN, "memory_bytes": 24 * 1024 * MIB}]), ["memory"]),
        (smoke_log(matmul={"size": 768, "max_error": 1.0, "tolerance": 0.0}), ["matmul"]),
        (smoke_log(matmul={"size": 768}), ["matmul"]),
        (smoke_log(matmul=None), ["matmul"]),
        (smoke_log(backend="abacus"), ["backend"]),
        (smoke_log(smi="===== nvidia-smi -L =====\n"), ["nvidia-smi"]),
        ("", ["one-device", "matmul", "nvidia-smi", "log"]),
    ],
)
def test_a_wrong_smoke_log_fails_where_it_is_wrong(log: str, wrong: list[str]) -> None:
    assert failed(workload_log.judge_smoke(log, [GIVEN], cuda_required=False)) == wrong


def test_an_unreadable_log_is_a_verdict_of_its_own() -> None:
    checks = workload_log.judge_smoke(None, [GIVEN], cuda_required=False)
    assert [(c["id"], c["status"], c["found"]) for c in checks] == [
        ("log", "fail", "the log could not be read")
    ]


@pytest.mark.parametrize("given", [[], [GIVEN, GIVEN]])
def test_nothing_passes_for_identity_without_one_recorded_device(given: list[dict[str, Any]]) -> None:
    checks = workload_log.judge_smoke(smoke_log(), given, cuda_required=False)
    assert "allocation" in failed(checks)
    assert "uuid" not in [c["id"] for c in checks]


@pytest.mark.parametrize(
    ("proof", "required", "good"),
    [
        ({"backend": "cpu"}, False, True),
        ({"backend": "cpu"}, True, False),
        ({"backend": "cuda", "cuda_memory_bytes": 5888 * MIB}, True, True),
        ({"backend": "cuda", "cuda_memory_bytes": 5888 * MIB}, False, True),
        ({"backend": "cuda", "cuda_memory_bytes": 24 * 1024 * MIB}, False, False),
        ({"backend": "cuda"}, True, False),
    ],
)
def test_what_the_work_ran_on(proof: dict[str, Any], required: bool, good: bool) -> None:
    checks = workload_log.judge_smoke(smoke_log(**proof), [GIVEN], required)
    assert ("backend" not in failed(checks)) is good


def test_a_full_gpu_needs_no_parent_and_no_profile() -> None:
    given = {**GIVEN, "type": "gpu", "profile": "", "parent_uuid": "", "uuid": "GPU-1"}
    seen = {**SEEN, "kind": "gpu", "name": "NVIDIA A30", "uuid": "GPU-1", "parent_uuid": ""}
    assert failed(workload_log.judge_smoke(smoke_log(devices=[seen]), [given], cuda_required=False)) == []


def test_a_good_training_log_passes_every_check() -> None:
    checks = workload_log.judge_sft(sft_log(), [GIVEN], cuda_required=False)
    assert failed(checks) == []
    assert {"loss", "world", "peak-memory", "log", "uuid"} <= {c["id"] for c in checks}


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        (sft_log(loss_last=2.6), ["loss"]),
        (sft_log(loss_last=None), ["loss"]),
        (sft_log(loss_last="low"), ["loss"]),
        (sft_log(world=2), ["world"]),
        (sft_log(peak_bytes=6000 * MIB), ["peak-memory"]),
        (sft_log(peak_bytes=0), ["peak-memory"]),
        (sft_log(peak_bytes=None), ["peak-memory"]),
        (sft_log(devices=[{**SEEN, "uuid": "MIG-9"}]), ["uuid"]),
        (sft_log(end="DRA LoRA SFT on GPU slice: FAILED: x"), ["log"]),
        (sft_log(end="DRA LoRA SFT on GPU slice: OK\nKilled"), ["log"]),
    ],
)
def test_a_wrong_training_log_fails_where_it_is_wrong(log: str, wrong: list[str]) -> None:
    assert failed(workload_log.judge_sft(log, [GIVEN], cuda_required=False)) == wrong


def test_every_failed_check_says_what_to_do() -> None:
    logs = ["", sft_log(world=2, loss_last=9, peak_bytes=0, backend="x", devices=[{**SEEN, "uuid": "u"}])]
    for log in logs:
        for check in workload_log.judge_sft(log, [GIVEN], cuda_required=False):
            assert check["status"] == "pass" or (check["found"] and check["needed"] and check["fix"]), check


def test_versions_for_the_header() -> None:
    log = sft_log(driver="580.95.05")
    assert workload_log.versions(log) == {"torch": "1.13.0", "gpu-driver": "580.95.05"}


@pytest.mark.parametrize("stage", ["smoke", "sft"])
def test_a_real_gpu_is_judged_by_what_the_real_driver_published(stage: str) -> None:
    """Both scripts on a real H200 (CUDA, torch 2.11), and what the driver published for such a card."""
    log = (FIXTURES / f"logs/{stage}-h200-cuda.txt").read_text()
    published = yaml.safe_load((FIXTURES / "resourceslices/h200-real-full.yaml").read_text())
    (device,) = merge_slices(published.get("items", [published]))["devices"]
    judge = workload_log.judge_smoke if stage == "smoke" else workload_log.judge_sft
    checks = judge(log, [device], cuda_required=True)
    assert failed(checks) == []
    other = {**device, "uuid": "GPU-of-another-card"}
    assert "uuid" in failed(judge(log, [other], cuda_required=True))
