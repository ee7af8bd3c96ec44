"""Allocate more memory than a real GPU has, in one process, while another one trains on it.

Needs a CUDA GPU, torch, transformers and peft, and no cluster. The neighbour is the fine-tune of the roles
and the allocation is that of the isolation pods, each in a process of its own::

    python3 tests/device/over_allocation.py

On a GPU without MIG both share one device, so the bound is the card's memory and not a slice's: what is
proved is that CUDA refuses, that the refusal stays in the process that asked, and that the neighbour trains
on to its end. Nothing about the GPU is set or changed. Prints what happened, one line of JSON, and at the end
``over-allocation beside a training: OK``; exit status 1 and a reason otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POD = ROOT / "roles/smoke/files"
TRAINING = ROOT / "roles/sft/files/train_lora.py"
OK = "over-allocation beside a training: OK"
_GIB = 2**30
# What CUDA, the context and the neighbour itself may have of the memory that was free.
_SHARE = 0.9


class ProofError(Exception):
    """What was seen does not prove what it should."""


def intrude(rounds: int) -> None:
    """The process that asks for too much; runs as a child."""
    sys.path.insert(0, str(POD))
    import isolation  # noqa: PLC0415
    import torch  # noqa: PLC0415

    for _ in range(rounds):
        free, total = torch.cuda.mem_get_info()
        started = time.time()
        seen = isolation.over_allocate(torch, 256 * 2**20)
        print(
            json.dumps({**seen, "free_bytes": free, "card_bytes": total, "span": [started, time.time()]}),
            flush=True,
        )
    product = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    print(json.dumps({"afterwards": float(product.sum().item())}), flush=True)


class Neighbour:
    """The fine-tune, in a process of its own; its lines are kept with the times at which they came."""

    def __init__(self, seconds: float) -> None:
        environment = {**os.environ, "PYTHONPATH": str(POD), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(TRAINING), f"--min-seconds={seconds}"]
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or []:
            self.lines.append((time.time(), line.rstrip()))

    def wait_until_it_trains(self, seconds: float = 180) -> None:
        """Its first steps are done; raises where it ends before."""
        limit = time.time() + seconds
        while not any("'step':" in line for _, line in self.lines):
            if self.process.poll() is not None or time.time() > limit:
                raise ProofError(f"the neighbour does not train: {[line for _, line in self.lines[-5:]]}")
            time.sleep(0.2)

    def end(self) -> dict[str, Any]:
        """Its proof, after its end."""
        code = self.process.wait(timeout=300)
        time.sleep(0.5)
        text = [line for _, line in self.lines]
        if code != 0 or not text or text[-1] != "DRA LoRA SFT on GPU slice: OK":
            raise ProofError(f"the neighbour ended with {code}: {text[-5:]}")
        return dict(json.loads(next(line for line in text if line.startswith("[proof] "))[len("[proof] ") :]))


def judge(rounds: list[dict[str, Any]], proof: dict[str, Any], steps: list[float]) -> None:
    """Every round was refused for want of memory, at about what was free, and inside the training."""
    for seen in rounds:
        if "OutOfMemoryError" not in seen["error"]:
            raise ProofError(
                f"found '{seen['error']}' after {seen['got_bytes']} bytes; needed an OutOfMemoryError"
            )
        if not seen["free_bytes"] * _SHARE <= seen["got_bytes"] <= seen["card_bytes"]:
            raise ProofError(f"found {seen['got_bytes']} bytes granted; needed about {seen['free_bytes']}")
        began, ended = seen["span"]
        if not proof["started_at"] < began < ended < proof["ended_at"]:
            raise ProofError(
                f"found a round at {began}..{ended}; needed within {proof['started_at']}..{proof['ended_at']}"
            )
        if not any(began < step < ended for step in steps):
            raise ProofError(f"found no step of the neighbour within {seen['span']}; needed it to train on")
    if proof["backend"] != "cuda":
        raise ProofError(f"found a training on {proof['backend']}; needed cuda")


def main() -> int:
    """Run both, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="how long the neighbour trains at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--intruder", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.intruder:
        intrude(options.rounds)
        return 0
    neighbour = Neighbour(options.seconds)
    try:
        neighbour.wait_until_it_trains()
        command = [sys.executable, __file__, "--intruder", f"--rounds={options.rounds}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise ProofError(f"the process that allocates ended with {done.returncode}: {done.stderr[-800:]}")
        *rounds, after = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        proof = neighbour.end()
        steps = [at for at, line in neighbour.lines if "'step':" in line]
        judge(rounds, proof, steps)
        if after["afterwards"] != 512.0**3:
            raise ProofError(f"found {after}; needed a right product afterwards in the refused process")
    except ProofError as fault:
        print(f"over-allocation beside a training: FAILED: {fault}")
        return 1
    finally:
        if neighbour.process.poll() is None:
            neighbour.process.kill()
    for number, seen in enumerate(rounds, 1):
        began, ended = (round(at - proof["started_at"], 1) for at in seen["span"])
        trained = sum(seen["span"][0] < at < seen["span"][1] for at in steps) * 10
        print(
            f"round {number}: {seen['got_bytes'] / _GIB:.2f} of {seen['card_bytes'] / _GIB:.2f} GiB granted "
            f"({seen['free_bytes'] / _GIB:.2f} free), then {seen['error']}\n"
            f"         {began} s to {ended} s of the neighbour's training: {trained} steps meanwhile"
        )
    print(
        f"neighbour: {proof['steps']} steps in {proof['ended_at'] - proof['started_at']:.1f} s on "
        f"{proof['devices'][0]['name']}, loss {proof['loss_first']} -> {proof['loss_last']}, ended OK"
    )
    print(json.dumps({"rounds": rounds, "neighbour": proof}, sort_keys=True))
    print(OK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
