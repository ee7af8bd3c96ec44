"""A LoRA fine-tune that proves the slice it runs in. Needs no model, no data and no network.

Builds a small causal language model (GPT-2 architecture, seeded random weights), adds LoRA adapters with
peft and trains them on a synthetic language: each sequence walks a fixed cycle of some tokens from a random
start, so every next token follows from the one before. Asserts that exactly one device is visible and is
the slice of the wanted profile, that the loss on held-out sequences fell by the stated factor, that the
base weights did not move, and that the peak memory stayed inside the slice. Runs on torch 1.13 (CPU) to
current torch with CUDA, alone or under torchrun.

Prints the lines of the guide, one ``[proof]`` line of JSON, and ends with ``DRA LoRA SFT on GPU slice: OK``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from slice_device import DeviceError, Nvml, gib, only_device

VOCABULARY, CYCLE, WIDTH, LAYERS, HEADS = 512, 24, 256, 4, 4
OK = "DRA LoRA SFT on GPU slice: OK"


class ProofError(RuntimeError):
    """The run worked but does not prove what it should; the message says found and needed."""


@dataclass(frozen=True)
class Settings:
    """What a run depends on. Same settings, same software, same device: same losses."""

    steps: int = 40
    batch: int = 16
    length: int = 32
    rank: int = 8
    learning_rate: float = 5e-3
    loss_factor: float = 0.4
    seed: int = 2026
    log_every: int = 10
    # Go on training at least this long, for workloads that are to be seen side by side.
    min_seconds: float = 0.0
    out: str = ""
    profile: str = ""


def parse(arguments: Sequence[str]) -> Settings:
    """Command line to settings; the profile comes from GPU_SLICES_PROFILE."""
    parser = argparse.ArgumentParser(description="LoRA fine-tune that proves its GPU slice")
    default = Settings()
    for name in ("steps", "batch", "length", "rank", "seed", "log_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    for name in ("learning_rate", "loss_factor", "min_seconds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name))
    parser.add_argument("--out", default=default.out, help="folder for the adapter; empty: do not save")
    values = parser.parse_args(arguments)
    return Settings(profile=os.environ.get("GPU_SLICES_PROFILE", ""), **vars(values))


@dataclass(frozen=True)
class Group:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Group:
        """As torchrun sets it. Trainer's variables without torchrun would mean that each pod trains alone."""
        if "RANK" in environment:
            return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
        nodes = environment.get("PET_NNODES", "1")
        if nodes not in {"", "1"}:
            raise ProofError(f"found PET_NNODES={nodes} without RANK; needed to be started by torchrun")
        return cls()


def sequences(torch: Any, settings: Settings, count: int, seed: int) -> Any:
    """``count`` sequences of the synthetic language, as token ids of shape (count, length)."""
    fixed = torch.Generator().manual_seed(settings.seed)
    cycle = torch.randperm(VOCABULARY, generator=fixed)[:CYCLE]
    starts = torch.randint(CYCLE, (count, 1), generator=torch.Generator().manual_seed(seed))
    return cycle[(starts + torch.arange(settings.length)) % CYCLE]


def build(torch: Any, settings: Settings) -> Any:
    """The model: frozen random GPT-2 with trainable LoRA adapters on all its linear layers."""
    # Slow to import, and not needed to say that the device is the wrong one.
    from peft import LoraConfig, TaskType, get_peft_model  # noqa: PLC0415
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    torch.manual_seed(settings.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=settings.length,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        lora_dropout=0.0,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    model = get_peft_model(model, adapters)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProofError("found no trainable parameter; needed LoRA adapters")
    return model


def fingerprint(model: Any) -> float:
    """A sum over the frozen weights, which training must leave as they are."""
    frozen = (p.detach() for p in model.parameters() if not p.requires_grad)
    return float(sum(weights.double().abs().sum().item() for weights in frozen))


def train(torch: Any, settings: Settings, backend: str, group: Group) -> dict[str, Any]:
    """Train; returns loss_first and loss_last (held out), steps, trainable, and the span in epoch seconds."""
    if settings.min_seconds and group.world > 1:
        raise ProofError(
            "found --min-seconds with several processes; needed one, for they would not end together"
        )
    model = build(torch, settings).to(backend)
    if group.rank == 0:
        model.print_trainable_parameters()
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = fingerprint(model)
    held_out = sequences(torch, settings, 64, settings.seed - 1).to(backend)
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate)
    losses: list[float] = []
    first = evaluate(torch, model, held_out)
    started, step = time.time(), 0
    while step < settings.steps or time.time() - started < settings.min_seconds:
        step += 1
        seed = settings.seed + step * group.world + group.rank
        batch = sequences(torch, settings, settings.batch, seed).to(backend)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        if group.world > 1:
            average_gradients(torch, trainable, group.world)
        optimizer.step()
        losses.append(float(loss.item()))
        if group.rank == 0 and step % settings.log_every == 0:
            print({"loss": round(losses[-1], 4), "step": step}, flush=True)
    ended = time.time()
    last = evaluate(torch, model, held_out)
    if fingerprint(model) != frozen:
        raise ProofError("found changed base weights; needed only the adapters to train")
    if settings.out and group.rank == 0:
        model.save_pretrained(settings.out, save_embedding_layers=False)
        if not any(Path(settings.out).glob("adapter_model.*")):
            raise ProofError(f"found no adapter in {settings.out}; needed adapter_model.*")
    return {
        "loss_first": round(first, 4),
        "loss_last": round(last, 4),
        "trainable": sum(p.numel() for p in trainable),
        "steps": step,
        "started_at": round(started, 3),
        "ended_at": round(ended, 3),
    }


def average_gradients(torch: Any, parameters: list[Any], world: int) -> None:
    """The mean over all processes. They share the seed, so equal gradients keep their weights equal.

    Not DistributedDataParallel: with gloo, torch 1.13 cannot broadcast the model's boolean buffers.
    """
    for parameter in parameters:
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world


def evaluate(torch: Any, model: Any, batch: Any) -> float:
    """Mean loss on a batch, without training on it."""
    model.eval()
    with torch.no_grad():
        loss = float(model(input_ids=batch, labels=batch).loss.item())
    model.train()
    return loss


def check_loss(settings: Settings, first: float, last: float) -> None:
    """The loss must have fallen to the stated part of what it was."""
    if not last <= first * settings.loss_factor:
        limit = first * settings.loss_factor
        found = f"a loss of {last} after {settings.steps} steps, from {first}"
        raise ProofError(f"found {found}; needed at most {limit:.4f}")


def peak_memory(torch: Any, backend: str) -> dict[str, Any]:
    """Peak memory in bytes: allocated on the CUDA device, or resident in this process where there is none."""
    if backend == "cuda":
        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "peak_kind": "cuda"}
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "peak_kind": "rss"}


def check_peak(peak: int, limit: int) -> None:
    """The peak must be inside the slice."""
    if peak > limit:
        raise ProofError(f"found a peak of {gib(peak)} GiB; needed at most the slice's {gib(limit)} GiB")


def choose_backend(torch: Any) -> str:
    """cuda or cpu; several CUDA devices are refused, for the claim was for one."""
    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() != 1:
        raise DeviceError(f"torch sees {torch.cuda.device_count()} CUDA devices; needed exactly one")
    return "cuda"


def run(settings: Settings, nvml: Nvml, group: Group) -> None:
    """Find the device, train in it, and print the proof."""
    devices = nvml.devices()
    device = only_device(devices, settings.profile)
    # Before CUDA starts: some matrix kernels are reproducible only with a fixed work space.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch  # noqa: PLC0415

    backend = choose_backend(torch)
    cuda_memory = int(torch.cuda.get_device_properties(0).total_memory) if backend == "cuda" else 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    total = gib(cuda_memory or device["memory_bytes"])
    print(f"[slice] device={device['name']} total_mem={total} GiB", flush=True)
    if backend == "cpu":
        print(f"[slice] torch {torch.__version__} has no CUDA here: training on the CPU", flush=True)
    if group.world > 1:
        torch.distributed.init_process_group("nccl" if backend == "cuda" else "gloo")
        print(f"[slice] rank {group.rank} of {group.world}", flush=True)
    try:
        result = train(torch, settings, backend, group)
    finally:
        if group.world > 1:
            torch.distributed.destroy_process_group()
    peak = peak_memory(torch, backend)
    kind = "" if backend == "cuda" else " (resident memory of the process)"
    print(f"[slice] peak_mem={gib(peak['peak_bytes'])} GiB{kind}", flush=True)
    proof = {
        **result,
        **peak,
        "devices": devices,
        "driver": nvml.driver_version(),
        "backend": backend,
        "torch": str(torch.__version__),
        "cuda_memory_bytes": cuda_memory,
        "rank": group.rank,
        "world": group.world,
        "seed": settings.seed,
        "loss_factor": settings.loss_factor,
    }
    print("[proof] " + json.dumps(proof, sort_keys=True), flush=True)
    check_loss(settings, result["loss_first"], result["loss_last"])
    check_peak(peak["peak_bytes"], device["memory_bytes"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 with OK as the last line, or 1 with the reason."""
    settings = parse(sys.argv[1:] if arguments is None else arguments)
    nvml = None
    try:
        group = Group.from_environment(dict(os.environ))
        # NVML stays open while training: the device counts as in use by this process.
        nvml = Nvml()
        run(settings, nvml, group)
    except ImportError as fault:
        print(f"DRA LoRA SFT on GPU slice: FAILED: the image lacks a Python package: {fault}", flush=True)
        return 1
    except (DeviceError, ProofError) as fault:
        print(f"DRA LoRA SFT on GPU slice: FAILED: {fault}", flush=True)
        return 1
    finally:
        if nvml is not None:
            with suppress(OSError):
                nvml.close()
    print(OK, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
