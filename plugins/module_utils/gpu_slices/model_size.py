"""How much GPU memory a fine-tune needs, and the smallest slice that holds it. Pure functions.

The estimate is for one process that trains a causal language model on one device: LoRA adapters on frozen
weights, or QLoRA where the weights are quantised. It adds up, in bytes:

========== ==========================================================================================
weights    linear layers in their precision, embeddings and norms in the computing precision
lora       the adapters themselves
gradients  one per adapter weight
optimizer  what the optimizer remembers of each adapter weight
activation the hidden states kept for the backward pass, and the layer that is being computed
logits     scores over the vocabulary with their loss and gradients
overhead   CUDA context, kernels, work spaces
========== ==========================================================================================

docs/recipe.md has the formulae with their sources and the numbers measured beside them.
"""

from __future__ import annotations

import math
import re
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Sequence

from .mig_geometry import KNOWN_CARDS
from .quantity import format_bytes

Object = Dict[str, Any]

GIB = 2**30

# Bytes of one weight of a linear layer. nf4 holds half a byte and the constants of its blocks of 64, which
# are quantised as well (double quantisation): 8 bits a block, and 32 bits for each 256 blocks.
PRECISIONS: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1.0,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
}
_QUANTISED = ("int8", "nf4")

# Bytes that an optimizer keeps of each trained weight, for weights of 32 bits.
OPTIMIZERS: dict[str, float] = {"adamw": 8.0, "adamw_8bit": 2.0, "lion": 4.0, "adafactor": 4.0, "sgd": 0.0}

# Scores over the vocabulary for one token: 16-bit scores, their 32-bit copy, the logarithms of the softmax,
# the gradient in 32 bits, and the gradient in 16 bits. Newer transformers need less (12 measured with 5.17).
_LOGIT_BYTES = 16.0

# CUDA context with its kernels: 767 MiB measured on an H200, where it is larger than on smaller cards.
OVERHEAD_BYTES = 800 * 2**20
HEADROOM = 0.1

_ATTENTION = ("q", "k", "v", "o")
_MLP = ("gate", "up", "down")
_TARGET_NAMES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*_ATTENTION, *_MLP)},
    **{f"{name}_proj": (name,) for name in (*_ATTENTION, *_MLP)},
    "all": (*_ATTENTION, *_MLP),
    "attention": _ATTENTION,
    "mlp": _MLP,
    # GPT-2 and its kin: q, k and v in one; both projections are called c_proj.
    "c_attn": ("q", "k", "v"),
    "c_proj": ("o", "down"),
    "c_fc": ("up",),
}


class ModelSizeError(ValueError):
    """An input that nothing can be said about; the message says what was found and what is needed."""


class Shape(NamedTuple):
    """What the estimate needs to know of a model's inside."""

    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    vocabulary: int
    heads: int
    tied: bool
    gated: bool

    @property
    def embedding_parameters(self) -> int:
        """Weights of the input embedding and, where it has its own, of the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers between the embeddings."""
        attention = 2 * self.hidden * self.query + 2 * self.hidden * self.key_value
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.mlp)

    @property
    def parameters(self) -> int:
        """All weights; norms and biases are too few to matter."""
        return self.embedding_parameters + self.linear_parameters


# The largest dimensions found among well known open models of up to so many parameters. Used where no
# config.json is given, so it errs to the large side. No column may fall: a larger model would seem smaller.
# Families with vocabularies of 250 thousand words are left out: their logits would be asked for by all.
_SHAPES: tuple[tuple[float, Shape], ...] = (
    (0.2e9, Shape(30, 768, 768, 768, 3072, 50304, 12, True, True)),
    (0.4e9, Shape(32, 1024, 1024, 1024, 4096, 50304, 16, True, True)),
    (0.9e9, Shape(36, 1280, 2048, 1280, 5120, 151936, 20, True, True)),
    (1.3e9, Shape(36, 2048, 2048, 1280, 8192, 151936, 32, True, True)),
    (2.2e9, Shape(36, 2048, 2048, 1280, 8960, 151936, 32, True, True)),
    (3.6e9, Shape(36, 3072, 3072, 1280, 11008, 151936, 32, True, True)),
    (5.0e9, Shape(36, 3072, 4096, 1280, 11008, 151936, 32, False, True)),
    (9.5e9, Shape(42, 4096, 4096, 4096, 18944, 152064, 32, False, True)),
    (16e9, Shape(48, 5120, 5120, 5120, 18944, 152064, 40, False, True)),
    (36e9, Shape(64, 7168, 8192, 5120, 27648, 152064, 64, False, True)),
    (75e9, Shape(80, 8192, 8192, 5120, 29568, 152064, 64, False, True)),
    (math.inf, Shape(128, 16384, 16384, 16384, 65536, 152064, 128, False, True)),
)

_LARGE_VOCABULARY = "models with a larger one, as Gemma, BLOOM and Command R, need their config"

_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_FACTOR = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST_PARAMETERS = 1e13
# More than any batch, sequence, rank or width is, and few enough to calculate with.
_MOST = 10**9


def _shown(value: Any) -> str:
    """A value for a message. Python refuses to write down numbers of thousands of digits."""
    try:
        text = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _quoted(value: Any) -> str:
    """The same, with text in quotes."""
    return f"'{_shown(value)}'" if isinstance(value, str) else _shown(value)


def parse_parameters(value: Any) -> int:
    """A number of parameters: ``0.6B``, ``494M``, ``7e9`` or a plain number."""
    needed = "needed is how many parameters the model has, as 0.6B, 494M or 7000000000"
    if isinstance(value, bool) or value is None:
        raise ModelSizeError(f"found parameters '{value}'; {needed}")
    shown = _shown(value)
    match = _NUMBER.match(shown)
    if match:
        number = float(match.group(1)) * _FACTOR[match.group(2).upper()]
    else:
        try:
            number = float(shown)
        except ValueError:
            raise ModelSizeError(f"found parameters '{shown}'; {needed}") from None
    if not math.isfinite(number) or not 1e3 <= number <= _MOST_PARAMETERS:
        raise ModelSizeError(f"found parameters '{shown}'; {needed} (a thousand to 10T)")
    return round(number)


def _whole(config: Mapping[str, Any], names: Sequence[str], default: int | None = None) -> int:
    """The first of these fields of a config that is there, as a number above nothing."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise ModelSizeError(
                f"found {name}: {_quoted(value)} in the model's config; needed is a number above 0 "
                f"(at most {_MOST})"
            )
        return int(value)
    if default is not None:
        return default
    raise ModelSizeError(
        f"found no {' or '.join(names)} in the model's config; needed is the config.json of a causal "
        "language model; leave the config out to have its shape assumed from the number of parameters"
    )


def shape_of(config: Any) -> Shape:
    """The shape that a ``config.json`` of transformers describes."""
    if not isinstance(config, Mapping):
        raise ModelSizeError(
            f"found a model config of type {type(config).__name__}; needed is the content of its config.json"
        )
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = inner
    experts = [n for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)]
    if experts:
        raise ModelSizeError(
            f"found {experts[0]}: {config[experts[0]]} in the model's config; mixtures of experts are not "
            "estimated: set the profile yourself"
        )
    hidden = _whole(config, ("hidden_size", "n_embd", "d_model"))
    layers = _whole(config, ("num_hidden_layers", "n_layer", "num_layers"))
    heads = _whole(config, ("num_attention_heads", "n_head", "num_heads"))
    head = _whole(config, ("head_dim",), max(1, hidden // heads))
    gpt = "n_embd" in config
    # transformers ties them unless told otherwise, but most configs of large models say false.
    tied = config.get("tie_word_embeddings", gpt)
    if not isinstance(tied, bool):
        raise ModelSizeError(
            f"found tie_word_embeddings: '{_shown(tied)}' in the model's config; needed is true or false"
        )
    return Shape(
        layers=layers,
        hidden=hidden,
        query=heads * head,
        key_value=_whole(config, ("num_key_value_heads",), heads) * head,
        mlp=_whole(config, ("intermediate_size", "n_inner", "ffn_dim"), 4 * hidden),
        vocabulary=_whole(config, ("vocab_size",)),
        heads=heads,
        tied=tied,
        gated=not gpt and "ffn_dim" not in config,
    )


def assumed_shape(parameters: int) -> Shape:
    """A shape that no well known model with so many parameters exceeds, but for large vocabularies."""
    return next(shape for most, shape in _SHAPES if parameters <= most)


def _targets(names: Any) -> tuple[str, ...]:
    given = names if isinstance(names, (list, tuple)) else str(names).split(",")
    found: list[str] = []
    for name in given:
        known = _TARGET_NAMES.get(str(name).strip())
        if known is None:
            listed = ", ".join(sorted(_TARGET_NAMES))
            raise ModelSizeError(f"found lora_target '{name}'; needed is all, or some of {listed}")
        found += known
    if not found:
        raise ModelSizeError("found no lora_target; needed is all, or names of layers as q_proj,v_proj")
    return tuple(dict.fromkeys(found))


def lora_parameters(shape: Shape, rank: int, targets: Iterable[str]) -> int:
    """Weights of the adapters: rank x (in + out) for each target of each layer."""
    sizes = {
        "q": (shape.hidden, shape.query),
        "k": (shape.hidden, shape.key_value),
        "v": (shape.hidden, shape.key_value),
        "o": (shape.query, shape.hidden),
        "gate": (shape.hidden, shape.mlp) if shape.gated else (0, 0),
        "up": (shape.hidden, shape.mlp),
        "down": (shape.mlp, shape.hidden),
    }
    return shape.layers * rank * sum(sum(sizes[name]) for name in targets)


def _positive(options: Mapping[str, Any], name: str) -> int:
    value = options[name]
    text = _shown(value).strip()
    if isinstance(value, bool) or not re.match(r"^[0-9]{1,10}$", text) or not 1 <= int(text) <= _MOST:
        raise ModelSizeError(
            f"found {name} {_quoted(value)}; needed is a whole number above 0 (at most {_MOST})"
        )
    return int(text)


def _choice(options: Mapping[str, Any], name: str, known: Iterable[str]) -> str:
    value = str(options[name])
    if value not in known:
        raise ModelSizeError(f"found {name} '{value}'; needed is one of {', '.join(known)}")
    return value


def _switch(options: Mapping[str, Any], name: str) -> bool:
    value = options[name]
    if not isinstance(value, bool):
        raise ModelSizeError(f"found {name} {value!r}; needed is true or false")
    return value


OPTIONS: Object = {
    "precision": "bf16",
    "lora_rank": 8,
    "lora_target": "all",
    "optimizer": "adamw",
    "pure_bf16": False,
    "batch": 1,
    "sequence": 512,
    "gradient_checkpointing": True,
    "attention": "sdpa",
    "headroom": HEADROOM,
}


def estimate(parameters: Any = None, config: Any = None, **options: Any) -> Object:
    """What a fine-tune needs, by part. See OPTIONS for what can be said of it, and their defaults.

    Returns ``parts`` {name: bytes}, ``total`` (their sum), ``needed`` (with headroom), ``parameters``,
    ``trainable``, and ``assumed``: sentences on what was not given.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ModelSizeError(f"found {', '.join(unknown)}; known are {', '.join(sorted(OPTIONS))}")
    wish = {**OPTIONS, **options}
    precision = _choice(wish, "precision", PRECISIONS)
    optimizer = _choice(wish, "optimizer", OPTIMIZERS)
    attention = _choice(wish, "attention", ("sdpa", "eager"))
    rank, batch, sequence = (_positive(wish, name) for name in ("lora_rank", "batch", "sequence"))
    checkpointing, pure = (_switch(wish, name) for name in ("gradient_checkpointing", "pure_bf16"))
    targets = _targets(wish["lora_target"])
    headroom = _headroom(wish["headroom"])
    shape, count, assumed = _model(parameters, config)

    compute = 4 if precision == "fp32" else 2
    embedding = (
        min(shape.embedding_parameters, count) if config else min(shape.embedding_parameters, count // 2)
    )
    weights = (count - embedding) * PRECISIONS[precision] + embedding * compute
    if precision in _QUANTISED:
        # One linear layer at a time is unpacked for its product.
        weights += max(shape.hidden * shape.mlp, shape.hidden * shape.query) * compute
    trainable = lora_parameters(shape, rank, targets)
    each = 2 if pure else 4
    parts = {
        "weights": weights,
        "lora": trainable * each,
        "gradients": trainable * each,
        "optimizer": trainable * OPTIMIZERS[optimizer] * (0.5 if pure and optimizer != "adamw_8bit" else 1),
        "activations": _activations(
            shape,
            batch * sequence,
            sequence,
            compute,
            checkpointing=checkpointing,
            eager=attention == "eager",
        ),
        "logits": batch * sequence * shape.vocabulary * _LOGIT_BYTES,
        "overhead": OVERHEAD_BYTES,
    }
    whole = {name: math.ceil(size) for name, size in parts.items()}
    total = sum(whole.values())
    return {
        "parts": whole,
        "total": total,
        "needed": math.ceil(total * (1 + headroom)),
        "parameters": count,
        "trainable": trainable,
        "assumed": assumed,
    }


def _headroom(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 2:
        raise ModelSizeError(f"found headroom {_quoted(value)}; needed is a share from 0 to 2, as 0.1")
    return number


def _model(parameters: Any, config: Any) -> tuple[Shape, int, list[str]]:
    given = parameters not in (None, "")
    if not config:
        if not given:
            raise ModelSizeError("found neither parameters nor a config; needed is one of them, as 0.6B")
        count = parse_parameters(parameters)
        shape = assumed_shape(count)
        text = (
            f"no config was given: {shape.layers} layers of {shape.hidden}, MLP {shape.mlp}, vocabulary "
            f"{shape.vocabulary}, which few models of this size exceed ({_LARGE_VOCABULARY})"
        )
        return shape, count, [text]
    shape = shape_of(config)
    if given:
        return shape, parse_parameters(parameters), []
    return shape, shape.parameters, [f"{shape.parameters} parameters, counted from the config"]


def _activations(
    shape: Shape, tokens: int, sequence: int, compute: int, *, checkpointing: bool, eager: bool
) -> float:
    """Bytes kept for the backward pass.

    What a layer keeps of each token: inputs and results of its norms (in 32 bits too) and of its linear
    layers with their adapters, and the states of attention; how many widths that makes was measured, and is
    rounded up. Without a fused kernel come the scores of every head. With gradient checkpointing only the
    inputs of the layers are kept, and one layer at a time is computed again.
    """
    widths = 14 * shape.hidden + 2 * shape.query + 2 * shape.key_value + (4 if shape.gated else 3) * shape.mlp
    layer = float(tokens * widths * compute)
    if eager:
        layer += tokens * sequence * shape.heads * (2 * compute + 4)
    if not checkpointing:
        return layer * shape.layers
    return layer + tokens * shape.hidden * compute * shape.layers


# ------------------------------------------------------------------------------------------------- profiles

# Memory that nvidia-smi gives for profiles of each name, the least where cards differ (docs/recipe.md).
_PROFILE_MIB: dict[str, int] = {
    **{"1g.5gb": 4864, "1g.6gb": 5952, "1g.10gb": 9728, "1g.18gb": 16384, "1g.20gb": 19968, "1g.35gb": 33280},
    **{"2g.10gb": 9856, "2g.12gb": 11968, "2g.20gb": 19968, "2g.35gb": 33280},
    **{"3g.20gb": 19968, "3g.40gb": 40192, "3g.71gb": 71424},
    **{"4g.20gb": 19968, "4g.24gb": 24000, "4g.40gb": 40192, "4g.71gb": 71424},
    **{"7g.40gb": 40192, "7g.80gb": 80384, "7g.141gb": 143360},
}
_NAME = re.compile(r"^[1-9][0-9]?g\.([1-9][0-9]{0,3})gb(?:\+[a-z0-9.]+)*\Z")


def profile_memory(name: Any) -> int:
    """Bytes of a profile by its name: measured where known, else a tenth less than the name says."""
    match = _NAME.match(_shown(name))
    if not match:
        raise ModelSizeError(f"found profile '{_shown(name)}'; needed is a MIG profile as 1g.6gb")
    base = str(name).split("+", 1)[0]
    if base in _PROFILE_MIB:
        return _PROFILE_MIB[base] * 2**20
    return int(match.group(1)) * GIB * 9 // 10


def known_profiles() -> list[str]:
    """The profiles of all known cards, without media extensions."""
    names = {p.name for card in KNOWN_CARDS for p in card.geometry.profiles if not p.media_extensions}
    return sorted(names, key=lambda name: (profile_memory(name), name))


def _sized(profiles: Any) -> list[tuple[int, str]]:
    """(bytes, name) of each profile, smallest first; the least memory counts where devices differ."""
    if isinstance(profiles, (str, bytes, Mapping)) or not isinstance(profiles, Iterable):
        raise ModelSizeError(
            f"found profiles '{_shown(profiles)}'; needed is a list of names as 1g.6gb, or of published "
            "devices"
        )
    sizes: dict[str, int] = {}
    for item in profiles:
        if isinstance(item, Mapping):
            name, memory = item.get("profile") or "", item.get("memory_bytes")
            if not name:
                continue  # A whole GPU is no slice.
            if not isinstance(name, str):
                raise ModelSizeError(f"found profile '{_shown(name)}'; needed is its name, as 1g.6gb")
            if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
                raise ModelSizeError(
                    f"found memory_bytes {_shown(memory)} of {name}; needed is a number of bytes"
                )
        else:
            name, memory = _shown(item), profile_memory(item)
        sizes[name] = min(memory, sizes.get(name, memory))
    return sorted((memory, name) for name, memory in sizes.items())


def slice_for_model(model: Any, profiles: Any = None, **options: Any) -> Object:
    """The smallest profile that holds a fine-tune of the model.

    ``model`` is a number of parameters (0.6B), or a mapping with ``parameters``, ``config`` (of its
    config.json) and any of OPTIONS; ``options`` come on top. ``profiles``: names, or devices with profile and
    memory_bytes as cluster_facts returns them; left out, the profiles of all known cards. Returns what
    :func:`estimate` does and ``profile`` ("" if none is large enough), ``memory`` of it, ``fits`` (all that
    would do, smallest first), and ``reason`` in words.
    """
    if not isinstance(model, Mapping):
        if "parameters" in options:
            raise ModelSizeError("found the number of parameters twice; needed once: left of the filter")
        model = {"parameters": model}
    wish = {str(name): value for name, value in {**model, **options}.items()}
    made = estimate(wish.pop("parameters", None), wish.pop("config", None), **wish)
    sized = _sized(known_profiles() if profiles is None else profiles)
    fits = [(memory, name) for memory, name in sized if memory >= made["needed"]]
    needs = f"the fine-tune needs about {format_bytes(made['needed'])}"
    listed = ", ".join(f"{name} ({format_bytes(memory)})" for memory, name in sized) or "no profile"
    if fits:
        reason = f"{needs}, and {fits[0][1]} has {format_bytes(fits[0][0])}"
    else:
        reason = (
            f"{needs}, and there is only {listed}: quantise the weights (nf4), shorten sequence or batch, "
            "or cut larger slices"
        )
    return {
        **made,
        "profile": fits[0][1] if fits else "",
        "memory": fits[0][0] if fits else 0,
        "fits": [name for _, name in fits],
        "reason": reason,
    }


def parts_text(made: Mapping[str, Any]) -> str:
    """The parts of an estimate in one line, largest first."""
    parts = sorted(made["parts"].items(), key=lambda part: (-part[1], part[0]))
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
