"""Measure what LoRA fine-tunes really take on a GPU, beside the estimate of slice_for_model.

Needs a CUDA GPU, torch, transformers and peft; no model and no network, for the weights are random: memory
does not depend on their values. Each case runs in a process of its own, so that peaks do not mix::

    python3 tests/device/measure_lora.py                 # all cases
    python3 tests/device/measure_lora.py qwen2.5-0.5b    # some of them

Prints one line of JSON a case and a table. Exit status 1 when an estimate is below what was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins/module_utils"))
from gpu_slices import model_size


def _llama(*sizes: int, tied: bool) -> dict[str, Any]:
    names = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size"),
    )
    return {**dict(zip(names, sizes)), "tie_word_embeddings": tied}


MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, 151936, tied=True),
    "llama3.2-3b": _llama(3072, 28, 24, 8, 8192, 128256, tied=True),
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, 32000, tied=False),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, tied=False),
}
CASES: list[dict[str, Any]] = [
    *({"model": name, "batch": 1, "sequence": 512} for name in MODELS),
    {"model": "qwen2.5-0.5b", "batch": 4, "sequence": 1024},
    {"model": "qwen2.5-0.5b", "batch": 1, "sequence": 512, "gradient_checkpointing": False},
    {"model": "qwen2.5-1.5b", "batch": 2, "sequence": 2048},
    {"model": "llama2-7b", "batch": 2, "sequence": 2048},
    {"model": "llama2-7b", "batch": 1, "sequence": 1024, "gradient_checkpointing": False},
    {"model": "qwen2.5-1.5b", "batch": 1, "sequence": 512, "lora_rank": 64},
]
STEPS = 4


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Train some steps of one case; runs in the child process."""
    # Not needed to print the help, nor by the parent of the processes that measure.
    import pynvml  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    config = MODELS[case["model"]]
    gpt = "n_embd" in config
    settings = (transformers.GPT2Config if gpt else transformers.LlamaConfig)(**config, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    targets = ["c_attn", "c_proj", "c_fc"] if gpt else "all-linear"
    if case.get("gradient_checkpointing", True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    model = get_peft_model(
        model,
        LoraConfig(
            r=case.get("lora_rank", 8), target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=gpt
        ),
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.data = parameter.data.float()
    model.train()
    optimizer = torch.optim.AdamW(trainable, lr=1e-4)
    # What building the model took for a moment is not part of the training.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, used = [], 0
    for _ in range(STEPS):
        tokens = torch.randint(config["vocab_size"], (case["batch"], case["sequence"]), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss), 4))
        used = max(used, pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    reserved = torch.cuda.max_memory_reserved()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": reserved,
        "device": used - before,
        "context": used - before - torch.cuda.memory_reserved(),
        "weights": weights,
        "trainable": sum(p.numel() for p in trainable),
        "losses": losses,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def estimated(case: dict[str, Any]) -> dict[str, Any]:
    """The estimate for the same case."""
    options = {key: value for key, value in case.items() if key != "model"}
    config = MODELS[case["model"]]
    if "n_embd" in config:
        options["lora_target"] = ["c_attn", "c_proj", "c_fc"]
    return model_size.estimate(config=config, **options)


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="peak memory of LoRA fine-tunes, measured and estimated")
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(json.loads(arguments.case))))
        return 0
    low = False
    rows = []
    for case in CASES:
        if arguments.models and case["model"] not in arguments.models:
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(case)],
            capture_output=True,
            text=True,
            check=False,
        )
        guess = estimated(case)
        if done.returncode:
            print(json.dumps({"case": case, "failed": done.stderr.strip().splitlines()[-1:]}), flush=True)
            low = True
            continue
        real = json.loads(done.stdout.strip().splitlines()[-1])
        print(json.dumps({"case": case, "real": real, "estimate": guess}), flush=True)
        low |= guess["needed"] < real["device"]
        name = case["model"] + "".join(f" {key}={value}" for key, value in case.items() if key != "model")
        rows.append(
            (name, real["allocated"], real["reserved"], real["device"], guess["total"], guess["needed"])
        )
    heads = ("allocated", "reserved", "device", "estimate", "needed")
    print(f"\n{'case':64} " + " ".join(f"{head:>10}" for head in heads) + "  GiB")
    for name, *sizes in rows:
        print(f"{name:64} " + " ".join(f"{size / 2**30:10.2f}" for size in sizes))
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
