"""Share a real GPU between several fine-tunes, and let the judge of stage shared look at their logs.

Needs a CUDA GPU, torch, transformers and peft, and no cluster: the processes stand for the pods of the jobs,
and what NVML lists stands for the allocation, so the claim itself is not proved here::

    python3 tests/device/share_gpu.py [--jobs 3] [--seconds 15]

First the processes share by time-slicing, as the GPU is set up; then, where NVIDIA's control daemon is there
and starts, by MPS. The daemon has pipes and logs of its own and is ended again. Nothing about the GPU is set
or changed, so with MPS too it stays in compute mode Default, where NVIDIA's DRA driver would set
Exclusive_Process. Prints a line a check and at the end ``sharing a real GPU: OK``; exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins/module_utils"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles/smoke/files"))
from gpu_slices import shared, workload_log
from slice_device import Nvml, only_device

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "roles/sft/files/train_lora.py"
DAEMON = "nvidia-cuda-mps-control"
OK = "sharing a real GPU: OK"


def train(jobs: int, seconds: float, environment: dict[str, str]) -> list[str]:
    """Start the fine-tunes together; their logs."""
    environment = {**environment, "PYTHONPATH": str(ROOT / "roles/smoke/files"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(TRAINING), f"--min-seconds={seconds}"]
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(jobs)
    ]
    return [process.communicate(timeout=300)[0] for process in processes]


def judge(logs: list[str], device: dict[str, Any], strategy: str) -> list[dict[str, Any]]:
    """All checks that the stage would make of these logs."""
    given = {
        **{
            "node": "here",
            "pool": "here",
            "device": "gpu-0",
            "type": "gpu",
            "profile": "",
            "uuid": device["uuid"],
        },
        **{"memory_bytes": device["memory_bytes"], "attributes": {"productName": device["name"]}},
        **{"claim": shared.CLAIM, "namespace": "none"},
    }
    checks, members = [], []
    for number, log in enumerate(logs, 1):
        for check in workload_log.judge_sft(log, [given], True):
            checks.append({**check, "id": f"job-{number}-{check['id']}"})
        pod = {"name": f"job-{number}", "node": "here", "log": log, "devices": [given]}
        members.append({"name": f"job-{number}", "pods": [pod]})
    return checks + shared.judge(members, {"namespace": "none", "strategy": strategy})


def tell(checks: list[dict[str, Any]], accepted: tuple[str, ...] = ()) -> bool:
    """Print the checks; whether all are good. Those of ``accepted`` may fail."""
    good = True
    for check in checks:
        if not check["id"].startswith("job-") or check["status"] == "fail":
            print(
                f"{check['status'].upper()} {check['id']}: {check['asked']} -> {check['found']}", flush=True
            )
        good = good and (check["status"] != "fail" or check["id"] in accepted)
    return good


def by_mps(jobs: int, seconds: float, device: dict[str, Any]) -> bool:
    """The same under a control daemon of its own; True also where there is none to be had."""
    if not shutil.which(DAEMON):
        print(f"SKIP MPS: there is no {DAEMON} here")
        return True
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        started = subprocess.run([DAEMON, "-d"], env=environment, capture_output=True, text=True, check=False)
        time.sleep(2)
        print("pipes of the daemon:", sorted(path.name for path in Path(f"{folder}/pipe").iterdir()))
        try:
            if started.returncode != 0:
                print(f"SKIP MPS: the daemon does not start: {(started.stdout + started.stderr).strip()}")
                return True
            logs = train(jobs, seconds, environment)
        finally:
            subprocess.run([DAEMON], input="quit\n", env=environment, text=True, timeout=60, check=False)
            for log in sorted(Path(f"{folder}/log").iterdir()):
                print(f"--- {log.name}", *log.read_text().splitlines()[-12:], sep="\n")
        # The compute mode is the driver's to set, and it was not asked.
        return tell(judge(logs, device, "MPS"), accepted=("strategy",))


def main() -> int:
    """Both ways, one after the other."""
    parser = argparse.ArgumentParser(description="Share a real GPU between several fine-tunes")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    nvml = Nvml()
    device = only_device(nvml.devices())
    nvml.close()
    print(json.dumps(device))
    listed = subprocess.run(
        ["nvidia-smi", "compute-policy", "--list"], capture_output=True, text=True, check=False
    )
    print(f"nvidia-smi compute-policy --list: status {listed.returncode}\n{listed.stdout}{listed.stderr}")
    good = tell(judge(train(options.jobs, options.seconds, dict(os.environ)), device, "TimeSlicing"))
    good = by_mps(options.jobs, options.seconds, device) and good
    print(OK if good else "sharing a real GPU: FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
