"""The recipe: what may be asked for, where its volume can be, how large its slice must be, what it proves.

Pure functions; controller only. A recipe names a base model and a data set by a URI:

``hf://org/name``      a repository of a hub
``file:///path``       a folder of the initializers' image, for sites without a way out
``pvc://claim/path``   a folder of another volume in the namespace
"""

from __future__ import annotations

import math
import re
from typing import Any, Dict, Iterable, Mapping, Sequence
from urllib.parse import ParseResult, urlparse

from . import model_size, workload_log
from .checks import Check, check
from .quantity import format_bytes, parse_bytes

Object = Dict[str, Any]

OK = "LlamaFactory LoRA SFT on GPU slice: OK"
CLAIM = "gpu-slices-recipe"
SCHEMES = ("hf", "file", "pvc")
# What Kubeflow Trainer's own images fetch.
TRAINER_SCHEMES = {"model": ("hf", "s3"), "dataset": ("hf", "s3", "cache")}
# ReadWriteOncePod would not do: both initializers hold the volume at the same time.
ACCESS_MODES = ("ReadWriteOnce", "ReadWriteMany")

# Set by the role: with other values the proof would be about something else, or would not come about.
FIXED = (
    *("stage", "do_train", "finetuning_type", "model_name_or_path", "dataset", "dataset_dir", "output_dir"),
    *("eval_dataset", "adapter_name_or_path", "tokenized_path", "template", "seed", "overwrite_output_dir"),
    *(
        "do_predict",
        "push_to_hub",
        "hf_hub_token",
        "streaming",
        "resume_from_checkpoint",
        "deepspeed",
        "fsdp",
    ),
    *("export_dir", "report_to", "load_best_model_at_end", "predict_with_generate", "trust_remote_code"),
)
_WHOLE_ABOVE_0 = (
    *("lora_rank", "lora_alpha", "cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("logging_steps", "max_samples"),
)
_ABOVE_0 = ("learning_rate", "num_train_epochs")

_DOTTED = re.compile(r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z", re.ASCII)
_FOLDER = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*\Z", re.ASCII)
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*\Z")
# Control characters, quotes, backslashes and blanks at an end would not survive YAML and environment.
_ODD = re.compile(r"[\x00-\x1f\x7f\"\\]|^\s|\s\Z")
# Names of variables with a value to keep, and values with a name and a password in a URL.
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s]*@")
_ENVIRONMENT = (
    *("STORAGE_URI", "TRAINJOB_NAME", "GPU_SLICES_PROFILE", "HOME", "HF_HOME", "HF_ENDPOINT"),
    *("HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE", "FORCE_TORCHRUN"),
    *("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"),
    *("TOKENIZERS_PARALLELISM", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
)
_ENDPOINT = re.compile(r"^https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]+)?(/[\w./~-]*)?\Z", re.ASCII)
_FORMS = "hf://org/name, file:///path or pvc://claim/path"


# ---------------------------------------------------------------------------------------------------- gate 1


def faults(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the recipe's variables. ``given``: those that are set, by name."""
    found: list[str] = []
    for kind in ("model", "dataset"):
        image = str(given.get(f"recipe_{kind}_initializer_image") or "")
        found += _source_faults(kind, given.get(f"recipe_{kind}"), own=not image)
    if not str(given.get("recipe_image") or given.get("gpu_slices_image") or ""):
        found.append(
            "recipe_image and gpu_slices_image are empty: name an image with LlamaFactory in one of them."
        )
    found += _storage_faults(given)
    found += _training_faults(given.get("recipe_training"))
    found += _size_faults(given)
    secret = str(given.get("recipe_hf_token_secret") or "")
    if secret and not _DOTTED.match(secret):
        found.append(
            "recipe_hf_token_secret is not the name of a Secret (its value is not shown, for it may be a "
            "token): put the token into a Secret with the key ACCESS_TOKEN and give the Secret's name."
        )
    endpoint = str(given.get("recipe_hf_endpoint") or "")
    if _LOGIN.search(endpoint):
        found.append(
            "recipe_hf_endpoint has a name or password in it (its value is not shown), which anyone who may "
            "read pods could see: leave it out; a token goes into the Secret that recipe_hf_token_secret "
            "names."
        )
    elif endpoint and not _ENDPOINT.match(endpoint):
        found.append(f"recipe_hf_endpoint is '{endpoint}': needed is a URL, as https://hub.example.com.")
    return found + _environment_faults(given.get("recipe_environment"))


def _source_faults(kind: str, value: Any, own: bool) -> list[str]:
    name = f"recipe_{kind}"
    uri = str(value or "")
    if not uri:
        return [f"{name} is empty: needed is {_FORMS}."]
    if _LOGIN.search(uri):
        return [
            f"{name} has something before an '@' (not shown, for it may be a token): needed is {_FORMS}; a "
            "token goes into the Secret that recipe_hf_token_secret names."
        ]
    parts = _parts(uri)
    schemes = SCHEMES if own else TRAINER_SCHEMES[kind]
    if parts.scheme not in schemes or not uri.startswith(f"{parts.scheme}://") or _ODD.search(uri):
        if parts.scheme in SCHEMES and not own:
            return [
                f"{name} is '{uri}', and {name}_initializer_image fetches only "
                f"{', '.join(f'{one}://' for one in schemes)}: leave the image out, or change the source."
            ]
        return [f"{name} is '{uri}': needed is {_FORMS}."]
    path = parts.path
    wrong = ""
    if ".." in path.split("/") or parts.query or parts.fragment or parts.params:
        wrong = "without '..', '?', '#' or ';'"
    elif parts.scheme == "hf" and not _REPOSITORY.match((parts.netloc + path).rstrip("/")):
        wrong = "hf://org/name, two names of letters, digits, dots, dashes and underscores"
    elif parts.scheme == "file" and (parts.netloc or len(path) < 2):
        wrong = "file:/// and an absolute path, three slashes in all"
    elif parts.scheme == "pvc" and not _DOTTED.match(parts.netloc):
        wrong = "pvc:// and the name of a PersistentVolumeClaim, then a path in it"
    return [f"{name} is '{uri}': needed is {wrong}."] if wrong else []


def _parts(uri: Any) -> ParseResult:
    """A URI's parts; none where brackets are not as they must be."""
    try:
        return urlparse(str(uri or ""))
    except ValueError:
        return urlparse("")


def _environment_faults(environment: Any) -> list[str]:
    found = []
    for name, value in environment.items() if isinstance(environment, Mapping) else ():
        text = str(name)
        if _SECRET.search(text) or _LOGIN.search(str(value)):
            found.append(
                f"recipe_environment sets {text}, which anyone who may read pods could see: put a token into "
                "a Secret and name it in recipe_hf_token_secret; leave names and passwords out of URLs."
            )
        elif text in _ENVIRONMENT or text.startswith("PET_") or not _VARIABLE.match(text):
            found.append(
                f"recipe_environment sets '{text}': needed is the name of a variable that neither Trainer "
                "nor the role sets, nor the driver."
            )
        elif value is None or isinstance(value, (Mapping, list)):
            found.append(f"recipe_environment.{text} is {value!r}: needed is text or a number.")
    return found


def _storage_faults(given: Mapping[str, Any]) -> list[str]:
    found = []
    claim = str(given.get("recipe_claim") or "")
    if claim and not _DOTTED.match(claim):
        found.append(f"recipe_claim is '{claim}': needed is the name of a PersistentVolumeClaim.")
    folder = str(given.get("recipe_claim_folder", CLAIM))
    if not _FOLDER.match(folder):
        found.append(f"recipe_claim_folder is '{folder}': needed is a relative path, as team/recipe.")
    storage_class = str(given.get("recipe_storage_class") or "")
    if storage_class and not _DOTTED.match(storage_class):
        found.append(f"recipe_storage_class is '{storage_class}': needed is the name of a StorageClass.")
    for kind in ("model", "dataset"):
        parts = _parts(given.get(f"recipe_{kind}"))
        if parts.scheme == "pvc" and parts.netloc == (claim or CLAIM) and not claim:
            found.append(
                f"recipe_{kind} is on {parts.netloc}, the volume that this role makes: name it in "
                "recipe_claim if it is yours."
            )
    size = given.get("recipe_storage_size", "20Gi")
    try:
        if parse_bytes(size) <= 0:
            found.append(f"recipe_storage_size is '{size}': needed is more than nothing, as 20Gi.")
    except ValueError as fault:
        found.append(f"recipe_storage_size: {fault}.")
    return found


def _training_faults(training: Any) -> list[str]:
    if not isinstance(training, Mapping):
        return []  # The types are checked elsewhere.
    found = []
    fixed = sorted(set(training) & set(FIXED))
    if fixed:
        found.append(
            f"recipe_training sets {', '.join(fixed)}, which the role sets itself: leave "
            f"{'it' if len(fixed) == 1 else 'them'} out (recipe_model, recipe_dataset, recipe_template and "
            "recipe_seed say what can be said)."
        )
    tokens = sorted(str(name) for name in training if str(name).endswith("token") and name not in FIXED)
    if tokens:
        found.append(
            f"recipe_training sets {', '.join(tokens)}, which anyone who may read ConfigMaps could see: "
            "nothing is fetched or pushed in training; a token for the sources goes into a Secret "
            "(recipe_hf_token_secret)."
        )
    for name in _WHOLE_ABOVE_0:
        value = training.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            found.append(f"recipe_training.{name} is {value!r}: needed is a whole number above 0.")
    for name in _ABOVE_0:
        value = training.get(name)
        if value is not None and not _positive(value):
            found.append(f"recipe_training.{name} is {value!r}: needed is a number above 0, as 0.0001.")
    bits = training.get("quantization_bit")
    if bits not in (None, 4, 8):
        found.append(f"recipe_training.quantization_bit is {bits!r}: needed is 4 or 8, or nothing.")
    return found


def _positive(value: Any) -> bool:
    # YAML reads 1e-4 as text; LlamaFactory would too.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _size_faults(given: Mapping[str, Any]) -> list[str]:
    parameters, config = given.get("recipe_model_parameters"), given.get("recipe_model_config")
    if parameters in (None, "") and not config:
        return []
    training = given.get("recipe_training")
    try:
        size(parameters, config, training if isinstance(training, Mapping) else {})
    except model_size.ModelSizeError as fault:
        return [f"recipe_model_parameters and what goes with it: {fault}."]
    return []


# ------------------------------------------------------------------------------------------------------ size

_OPTIMIZERS = {
    "sgd": "sgd",
    "adafactor": "adafactor",
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
}


def size_options(training: Mapping[str, Any]) -> Object:
    """LlamaFactory's words for what an estimate needs, in those of model_size. Defaults are the role's."""
    bits = training.get("quantization_bit")
    single = training.get("bf16") is False and training.get("fp16") is not True
    precision = (
        {4: "nf4", 8: "int8"}.get(bits, "fp32" if single else "bf16")
        if bits
        else ("fp32" if single else "bf16")
    )
    return {
        "precision": precision,
        "lora_rank": training.get("lora_rank", 8),
        "lora_target": training.get("lora_target", "all"),
        "optimizer": _OPTIMIZERS.get(str(training.get("optim", "adamw_torch")), "adamw"),
        "pure_bf16": bool(training.get("pure_bf16", False)),
        "batch": training.get("per_device_train_batch_size", 1),
        "sequence": training.get("cutoff_len", 512),
        "gradient_checkpointing": not training.get("disable_gradient_checkpointing", False),
        "attention": "eager" if training.get("flash_attn") == "disabled" else "sdpa",
    }


def size(parameters: Any, config: Any, training: Mapping[str, Any]) -> Object:
    """The estimate for a recipe, or {} when nothing is known of the model's size."""
    if parameters in (None, "") and not config:
        return {}
    return model_size.estimate(parameters, config or None, **size_options(training))


def size_check(estimate: Mapping[str, Any], memory: int) -> Check:
    """The estimate beside the chosen slice, as a row of the report."""
    fits = memory >= estimate["needed"]
    return check(
        "size",
        "Is the slice large enough for the fine-tune, by the estimate?",
        f"about {format_bytes(estimate['needed'])} with headroom, and the slice has {format_bytes(memory)}",
        "pass" if fits else "warn",
        needed=format_bytes(estimate["needed"]),
        fix="choose gpu_slices_profile: auto or a larger profile; see docs/recipe.md for what needs how much",
        evidence={
            "parts": model_size.parts_text(estimate),
            "trainable": estimate["trainable"],
            "assumed": list(estimate["assumed"]),
        },
    )


# --------------------------------------------------------------------------------------------------- storage


def claim_manifest(settings: Mapping[str, Any]) -> Object:
    """The PersistentVolumeClaim that the role makes where the user names none."""
    spec: Object = {
        "accessModes": [settings["access_mode"]],
        "resources": {"requests": {"storage": str(settings["size"])}},
    }
    if settings.get("storage_class"):
        spec["storageClassName"] = settings["storage_class"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": CLAIM,
            "namespace": settings["namespace"],
            "labels": {
                "app.kubernetes.io/managed-by": "gpu-slices",
                "app.kubernetes.io/component": "recipe",
            },
        },
        "spec": spec,
    }


def storage_plan(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Object:
    """Which volume, on which node, and whether that can work.

    ``facts``: ``claim`` (the PersistentVolumeClaim or None), ``volume`` (its PersistentVolume or None),
    ``classes`` (StorageClasses, None if they cannot be read), ``others`` {name: claim or None} of pvc://
    sources, ``labels`` {node: labels}. ``settings``: claim (the user's, or ""), namespace, storage_class,
    size, access_mode, ``devices`` [free ones of the chosen profile: {node}].

    Returns ``checks``, ``create`` (a manifest or {}), ``name``, ``uid`` (of the claim; "" while it is not
    there), ``nodes`` (where all pods may run).
    """
    own = not settings["claim"]
    name = str(settings["claim"] or CLAIM)
    claim = facts["claim"]
    plan: Object = {"checks": [], "create": {}, "name": name, "uid": "", "nodes": []}
    plan["checks"].append(_claim_check(facts, settings, name, own))
    for other, found in sorted(facts["others"].items()):
        plan["checks"].append(_other_check(other, found))
    if claim:
        plan["uid"] = str(claim["metadata"].get("uid") or "")
    elif own:
        plan["create"] = claim_manifest(settings)
    if settings["devices"]:
        modes = set(((claim or plan["create"] or {}).get("spec") or {}).get("accessModes") or [])
        plan["nodes"], row = _nodes(facts, settings["devices"], modes, name)
        plan["checks"].append(row)
    return plan


def _claim_check(facts: Mapping[str, Any], settings: Mapping[str, Any], name: str, own: bool) -> Check:
    claim, asked = facts["claim"], f"Is there a volume for the recipe, claim {name}?"
    if claim is None and not own:
        return check(
            "volume",
            asked,
            f"no PersistentVolumeClaim {name} in {settings['namespace']}",
            "fail",
            needed="the claim that recipe_claim names",
            fix="create it, or leave recipe_claim out to have one made",
            finding="claim_missing",
        )
    if claim is None:
        return _class_check(facts, settings, asked)
    metadata, spec = claim["metadata"], claim.get("spec") or {}
    phase = str((claim.get("status") or {}).get("phase") or "Pending")
    if metadata.get("deletionTimestamp"):
        return check(
            "volume",
            asked,
            f"{name} is being deleted",
            "fail",
            needed="a claim that stays",
            fix="delete the pods that use it, finished ones too (their TrainJobs), and run again",
            finding="claim_terminating",
        )
    labels = metadata.get("labels") or {}
    if own and labels.get("app.kubernetes.io/managed-by") != "gpu-slices":
        return check(
            "volume",
            asked,
            f"{name} exists and is not ours",
            "fail",
            needed="a claim of our own, or one named by you",
            fix=f"set recipe_claim: {name} to use it, or rename it",
            finding="name_taken",
        )
    if phase == "Lost":
        return check(
            "volume",
            asked,
            f"{name} has lost its volume {spec.get('volumeName')}",
            "fail",
            needed="a claim that is bound or waits for its first pod",
            fix="delete the claim",
            finding="claim_lost",
        )
    differs = _differences(claim, settings) if own else []
    if differs:
        return check(
            "volume",
            asked,
            f"{name} has {', '.join(differs)}",
            "fail",
            needed="what the inventory asks for",
            fix="keep the former values, enlarge the claim yourself where its class allows that, or delete "
            "it together with its adapters",
            finding="claim_differs",
        )
    size = ((claim.get("status") or {}).get("capacity") or {}).get("storage") or spec.get(
        "resources", {}
    ).get("requests", {}).get("storage")
    found = f"{name}: {phase}, {size}, {', '.join(spec.get('accessModes') or [])}"
    whose = "made by this role; the teardown removes it" if own else "the user's; it is never removed"
    return check("volume", asked, f"{found} ({whose})", evidence={"volume": spec.get("volumeName") or ""})


def _differences(claim: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """In what our claim is not as asked for. More room than that is welcome."""
    spec, found = claim.get("spec") or {}, []
    capacity = ((claim.get("status") or {}).get("capacity") or {}).get("storage")
    request = ((spec.get("resources") or {}).get("requests") or {}).get("storage")
    sizes = [size for size in (capacity, request) if size]
    if sizes and max(map(parse_bytes, sizes)) < parse_bytes(settings["size"]):
        found.append(f"a size of {max(sizes, key=parse_bytes)} (asked for: {settings['size']})")
    wanted = settings.get("storage_class")
    if wanted and spec.get("storageClassName") != wanted:
        found.append(f"storage class {spec.get('storageClassName')} (asked for: {wanted})")
    if settings["access_mode"] not in (spec.get("accessModes") or []):
        modes = ", ".join(spec.get("accessModes") or [])
        found.append(f"access mode {modes} (asked for: {settings['access_mode']})")
    return found


def _class_check(facts: Mapping[str, Any], settings: Mapping[str, Any], asked: str) -> Check:
    """No claim yet: can one be made?"""
    classes, wanted = facts["classes"], str(settings.get("storage_class") or "")
    made = f"this run makes {CLAIM}, {settings['size']} {settings['access_mode']}"
    if classes is None:
        return check(
            "volume", asked, f"{made}; the storage classes cannot be read", evidence={"class": wanted}
        )
    names = sorted(item["metadata"]["name"] for item in classes)
    if wanted:
        if wanted in names:
            return check("volume", asked, f"{made}, of class {wanted}")
        return check(
            "volume",
            asked,
            f"no StorageClass {wanted} (there: {', '.join(names) or 'none'})",
            "fail",
            needed="a class that makes volumes",
            fix="correct recipe_storage_class, or name a claim of your own (recipe_claim)",
            finding="storage_class_missing",
        )
    default = [
        item["metadata"]["name"]
        for item in classes
        if (item["metadata"].get("annotations") or {}).get("storageclass.kubernetes.io/is-default-class")
        == "true"
    ]
    if not default:
        return check(
            "volume",
            asked,
            f"no default StorageClass (there: {', '.join(names) or 'none'})",
            "fail",
            needed="a class that makes volumes",
            fix="name one (recipe_storage_class), or a claim of your own (recipe_claim)",
            finding="storage_class_missing",
        )
    return check("volume", asked, f"{made}, of the default class {default[0]}")


def _other_check(name: str, found: Mapping[str, Any] | None) -> Check:
    asked = f"Is the source volume {name} there?"
    if found is None:
        return check(
            f"source-{name}",
            asked,
            f"no PersistentVolumeClaim {name}",
            "fail",
            needed="the claim that a pvc:// source names",
            fix="create it in this namespace, or correct recipe_model or recipe_dataset",
            finding="claim_missing",
        )
    modes = ", ".join((found.get("spec") or {}).get("accessModes") or [])
    return check(f"source-{name}", asked, f"{(found.get('status') or {}).get('phase')}, {modes}")


def _volume_nodes(
    volume: Mapping[str, Any] | None, labels: Mapping[str, Mapping[str, str]]
) -> list[str] | None:
    """The nodes from which a bound volume can be reached; None: from any, or that is not said."""
    terms = ((((volume or {}).get("spec") or {}).get("nodeAffinity") or {}).get("required") or {}).get(
        "nodeSelectorTerms"
    )
    if not terms:
        return None
    return [
        node
        for node, have in labels.items()
        if any(all(_matches(rule, have) for rule in term.get("matchExpressions") or []) for term in terms)
    ]


def _matches(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values") or []
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }.get(str(rule["operator"]), True)


def _nodes(
    facts: Mapping[str, Any], devices: Iterable[Mapping[str, Any]], modes: set[str], name: str
) -> tuple[list[str], Check]:
    """Where the initializers and the training may run, so that each of them reaches the volume.

    The initializers come first and need no GPU. Left alone they could run, and with a volume that waits for
    its first consumer have it made, where there is no slice.
    """
    asked = "Can initializers and training reach the volume from a node with a slice?"
    free: dict[str, int] = {}
    for device in devices:
        free[device["node"]] = free.get(device["node"], 0) + 1
    reach = _volume_nodes(facts["volume"], facts["labels"])
    usable = [node for node in free if reach is None or node in reach]
    evidence = {"free": free, "volume": reach}
    if not usable:
        return [], check(
            "place",
            asked,
            f"the volume of {name} can be reached from {', '.join(reach or []) or 'no node'} only, and "
            f"slices of the profile are on {', '.join(sorted(free)) or 'no node'}",
            "fail",
            needed="a node with both",
            fix="choose another profile (gpu_slices_profile) or volume (recipe_claim), or delete the claim",
            finding="volume_elsewhere",
            evidence=evidence,
        )
    if "ReadWriteMany" in modes:
        nodes = sorted(usable)
        return nodes, check("place", asked, f"from each of {', '.join(nodes)}", evidence=evidence)
    # One node at a time may have such a volume: all three pods go to the same one.
    kept = str(
        (((facts["claim"] or {}).get("metadata") or {}).get("annotations") or {}).get(
            "volume.kubernetes.io/selected-node"
        )
        or ""
    )
    best = kept if kept in usable else min(usable, key=lambda node: (-free[node], node))
    found = f"all on {best}, since one node at a time can have a volume of {', '.join(sorted(modes))}"
    return [best], check("place", asked, found, evidence=evidence)


# ----------------------------------------------------------------------------------------------------- judge


def judge(
    log: str | None, allocated: Sequence[Mapping[str, Any]], cuda_required: bool, workload: Mapping[str, Any]
) -> list[Check]:
    """All checks of the training pod's log."""
    end = workload_log.judge_end(log, str(workload.get("ok") or OK))
    if log is None:
        return [end]
    seen = workload_log.proof(log)
    checks = workload_log.judge_device(log, allocated, cuda_required)
    checks += [_judge_loss(seen), _judge_adapter(seen)]
    if len(allocated) == 1:
        checks.append(_judge_peak(seen, int(allocated[0].get("memory_bytes") or 0)))
    return [*checks, end]


def _number(value: Any) -> bool:
    # A base model whose loss is infinite would make any other one look better.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _judge_loss(seen: Mapping[str, Any]) -> Check:
    before, after, factor = (seen.get(k) for k in ("loss_before", "loss_after", "loss_factor"))
    numbers = all(_number(n) for n in (before, after, factor))
    good = numbers and float(after or 0) <= float(before or 0) * float(factor or 0)
    keys = (
        *("rows_train", "rows_held_out", "rows_dropped", "held_out_tokens", "steps", "seed"),
        *("train_loss_first", "train_loss_last", "model", "dataset", "llamafactory", "launcher"),
    )
    return check(
        "held-out-loss",
        "the saved adapter, loaded again, lowers the loss on rows it never saw",
        f"{before} with the base model, {after} with the adapter, on {seen.get('rows_held_out')} rows"
        if numbers
        else "no losses in the proof line",
        "pass" if good else "fail",
        needed=f"at most {factor} of the former" if numbers else "losses",
        fix="" if good else "train longer (recipe_training), or look at the rows: the log shows one",
        evidence={k: seen.get(k) for k in keys},
    )


def _judge_adapter(seen: Mapping[str, Any]) -> Check:
    adapter = seen.get("adapter") or {}
    files = [f for f in adapter.get("files") or [] if isinstance(f, Mapping)]
    weights = [f for f in files if str(f.get("name", "")).startswith("adapter_model.")]
    good = (
        len(weights) == 1
        and int(weights[0].get("bytes") or 0) > 0
        and bool(re.match(r"^[0-9a-f]{64}$", str(weights[0].get("sha256"))))
        and int(seen.get("trainable") or 0) > 0
    )
    found = "no adapter in the proof line"
    if weights:
        found = (
            f"claim {adapter.get('claim')}, {adapter.get('path')}/{weights[0].get('name')}, "
            f"{weights[0].get('bytes')} bytes, "
            f"{seen.get('trainable')} weights, sha256 {weights[0].get('sha256')}"
        )
    return check(
        "adapter",
        "the adapter is on the volume",
        found,
        "pass" if good else "fail",
        needed="one adapter_model file with weights",
        fix="" if good else "read the log in the evidence",
        evidence={"adapter": adapter, "trainable": seen.get("trainable")},
    )


def _judge_peak(seen: Mapping[str, Any], limit: int) -> Check:
    peak = seen.get("peak_bytes")
    kind = {"cuda": "allocated on the device", "rss": "resident memory of the process (no CUDA)"}
    good = isinstance(peak, int) and 0 < peak <= limit
    return check(
        "peak-memory",
        "the peak memory stayed inside the slice",
        f"{format_bytes(peak)} {kind.get(str(seen.get('peak_kind')), '')}".strip()
        if isinstance(peak, int)
        else "no peak in the proof line",
        "pass" if good else "fail",
        needed=f"at most {format_bytes(limit)}",
        fix="" if good else "ask for a larger slice, or train a smaller batch",
        evidence={"peak_bytes": peak, "memory_bytes": limit},
    )


def sources(uris: Iterable[str]) -> list[str]:
    """The claims that pvc:// sources name."""
    parts = [_parts(uri) for uri in uris]
    return sorted({part.netloc for part in parts if part.scheme == "pvc"})
