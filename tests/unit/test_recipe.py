"""The recipe on the controller: gate 1, sizes, the volume's place, and the judge."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from gpu_slices import judges, managed, recipe

GIVEN = {
    "gpu_slices_image": "registry.example/train:1",
    "recipe_model": "hf://org/model-0.6B",
    "recipe_dataset": "file:///data/alpaca",
}


def faults(**changed):
    return recipe.faults({**GIVEN, **changed})


class TestGate1:
    def test_a_good_recipe(self):
        assert faults() == []
        assert (
            faults(
                recipe_model="pvc://models/team/base",
                recipe_claim="mine",
                recipe_claim_folder="team/run-1",
                recipe_storage_class="fast.example.com",
                recipe_hf_token_secret="hub-token",  # noqa: S106 - the name of a Secret
                recipe_hf_endpoint="https://hub.example.com",
                recipe_training={"lora_rank": 16, "learning_rate": 0.0001, "quantization_bit": 4},
                recipe_model_parameters="0.6B",
                recipe_environment={"HTTPS_PROXY": "http://proxy:3128", "OMP_NUM_THREADS": "1"},
            )
            == []
        )

    @pytest.mark.parametrize(
        ("uri", "message"),
        [
            ("", "recipe_model is empty: needed is hf://org/name, file:///path or pvc://claim/path."),
            ("Qwen/Qwen3-0.6B", "needed is hf://org/name, file:///path or pvc://claim/path."),
            ("s3://bucket/x", "needed is hf://org/name"),
            ("hf://", "two names of letters"),
            ("hf://org/name/more", "two names of letters"),
            ("hf://org/na me", "two names of letters"),
            ("file://host/path", "three slashes in all"),
            ("file:///", "three slashes in all"),
            ("file:///a/../b", "without '..'"),
            ("pvc:///path", "the name of a PersistentVolumeClaim"),
            ("pvc://Claim_1/path", "the name of a PersistentVolumeClaim"),
            ("pvc://gpu-slices-recipe/x", "the volume that this role makes"),
            ("hf://org/name?token=abc", "without '..', '?'"),
            ("PVC://mine/base", "needed is hf://org/name"),
            ("pvc://[mine/base", "needed is hf://org/name"),
            (" file:///a", "needed is hf://org/name"),
            ("file:///a\n", "needed is hf://org/name"),
            ('file:///a"b', "needed is hf://org/name"),
        ],
    )
    def test_sources(self, uri, message):
        (fault,) = faults(recipe_model=uri)
        assert fault.startswith("recipe_model")
        assert message in fault

    @pytest.mark.parametrize("uri", ["s3://bucket/data", "cache://schema/table", "hf://org/data"])
    def test_trainers_own_image_fetches_more(self, uri):
        assert faults(recipe_dataset=uri, recipe_dataset_initializer_image="ghcr.example/init:1") == []

    def test_trainers_own_image_fetches_no_files(self):
        (fault,) = faults(recipe_model="file:///x", recipe_model_initializer_image="ghcr.example/init:1")
        assert "fetches only hf://, s3://" in fault

    def test_a_claim_of_the_users_may_hold_the_source_too(self):
        assert faults(recipe_claim="mine", recipe_model="pvc://mine/base") == []

    def test_no_image(self):
        (fault,) = faults(gpu_slices_image="")
        assert "recipe_image and gpu_slices_image are empty" in fault
        assert faults(gpu_slices_image="", recipe_image="x/y:1") == []

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("recipe_claim", "Not_A_Name", "needed is the name of a PersistentVolumeClaim"),
            ("recipe_claim_folder", "/abs", "needed is a relative path"),
            ("recipe_claim_folder", "a/../b", "needed is a relative path"),
            ("recipe_claim_folder", "", "needed is a relative path"),
            ("recipe_storage_class", "A B", "needed is the name of a StorageClass"),
            ("recipe_storage_size", "20 gigs", "is not a Kubernetes quantity"),
            ("recipe_storage_size", "0", "needed is more than nothing"),
            ("recipe_hf_endpoint", "hub.example.com", "needed is a URL"),
            ("recipe_training", {"output_dir": "/x", "stage": "dpo"}, "sets output_dir, stage"),
            ("recipe_training", {"lora_rank": 0}, "recipe_training.lora_rank is 0"),
            ("recipe_training", {"cutoff_len": "long"}, "recipe_training.cutoff_len is 'long'"),
            ("recipe_training", {"learning_rate": "1e-4"}, "recipe_training.learning_rate is '1e-4'"),
            ("recipe_training", {"learning_rate": -1}, "recipe_training.learning_rate is -1"),
            ("recipe_training", {"quantization_bit": 3}, "needed is 4 or 8"),
            ("recipe_model_parameters", "huge", "found parameters 'huge'"),
            ("recipe_model_config", {"hidden_size": 8}, "found no num_hidden_layers"),
            ("recipe_environment", {"STORAGE_URI": "x"}, "neither Trainer nor the role sets"),
            ("recipe_environment", {"PET_NNODES": "2"}, "neither Trainer nor the role sets"),
            ("recipe_environment", {"TOKENIZERS_PARALLELISM": "true"}, "neither Trainer nor the role sets"),
            ("recipe_environment", {"1X": "2"}, "neither Trainer nor the role sets"),
            ("recipe_environment", {"NVIDIA_VISIBLE_DEVICES": "all"}, "nor the driver"),
            ("recipe_environment", {"A": None}, "needed is text or a number"),
            ("recipe_training", {"quantization_bit": [4]}, "needed is 4 or 8"),
            ("recipe_claim", "mine\n", "needed is the name of a PersistentVolumeClaim"),
        ],
    )
    def test_other_values(self, name, value, message):
        (fault,) = faults(**{name: value})
        assert message in fault

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("recipe_model", "hf://hf_verysecret@org/name"),
            ("recipe_model", "hf://me:hf_verysecret@org/name"),
            ("recipe_hf_endpoint", "https://me:hf_verysecret@hub.example.com"),
            ("recipe_environment", {"HTTPS_PROXY": "http://me:hf_verysecret@proxy:3128"}),
            ("recipe_environment", {"WANDB_API_KEY": "hf_verysecret"}),
            ("recipe_environment", {"AWS_SECRET_ACCESS_KEY": "hf_verysecret"}),
            ("recipe_environment", {"DB_PASSWORD": "hf_verysecret"}),
            ("recipe_training", {"hub_token": "hf_verysecret"}),
            ("recipe_training", {"ms_hub_token": "hf_verysecret"}),
        ],
    )
    def test_secrets_are_refused_and_not_shown(self, name, value):
        (fault,) = faults(**{name: value})
        assert fault.startswith(name)
        assert "verysecret" not in fault

    @pytest.mark.parametrize("endpoint", ["https://", "https://[hub", "https://hub b", "https://hub?token=x"])
    def test_endpoints(self, endpoint):
        (fault,) = faults(recipe_hf_endpoint=endpoint)
        assert "needed is a URL" in fault
        assert faults(recipe_hf_endpoint="http://[::1]:8080/hub") == []

    def test_settings_that_only_sound_like_tokens(self):
        assert faults(recipe_training={"skip_special_tokens": True, "max_new_tokens": 5}) == []

    def test_a_token_in_the_wrong_place_is_not_shown(self):
        for wrong in (
            {"recipe_hf_token_secret": "hf_VerySecretToken"},
            {"recipe_environment": {"HF_TOKEN": "hf_VerySecretToken"}},
        ):
            (fault,) = faults(**wrong)
            assert "VerySecret" not in fault
            assert "Secret" in fault

    def test_what_sizes_cannot_say_without_a_size(self):
        # A target of a model that the estimate does not know is no fault as long as no estimate is wanted.
        odd = {"recipe_training": {"lora_target": "query_key_value"}}
        assert faults(**odd) == []
        (fault,) = faults(recipe_model_parameters="7B", **odd)
        assert "found lora_target 'query_key_value'" in fault


class TestSize:
    def test_nothing_known(self):
        assert recipe.size("", {}, {}) == {}

    @pytest.mark.parametrize(
        ("training", "option", "value"),
        [
            ({}, "precision", "bf16"),
            ({"quantization_bit": 4}, "precision", "nf4"),
            ({"quantization_bit": 8}, "precision", "int8"),
            ({"bf16": False}, "precision", "fp32"),
            ({"bf16": False, "fp16": True}, "precision", "bf16"),
            ({"per_device_train_batch_size": 4}, "batch", 4),
            ({"cutoff_len": 2048}, "sequence", 2048),
            ({}, "sequence", 512),
            ({"optim": "paged_adamw_8bit"}, "optimizer", "adamw_8bit"),
            ({"optim": "adamw_torch_fused"}, "optimizer", "adamw"),
            ({"disable_gradient_checkpointing": True}, "gradient_checkpointing", False),
            ({"flash_attn": "disabled"}, "attention", "eager"),
            ({"pure_bf16": True}, "pure_bf16", True),
        ],
    )
    def test_llamafactorys_words(self, training, option, value):
        assert recipe.size_options(training)[option] == value

    def test_defaults_are_those_of_the_role(self):
        path = Path(__file__).resolve().parents[2] / "roles/recipe/vars/main.yml"
        role = yaml.safe_load(path.read_text())["__recipe_training_own"]
        assert recipe.size_options(role) == recipe.size_options({})

    def test_the_row(self):
        made = recipe.size("0.6B", {}, {})
        assert recipe.size_check(made, 6 * 2**30)["status"] == "pass"
        row = recipe.size_check(made, 2**30)
        assert row["status"] == "warn"
        assert "gpu_slices_profile: auto" in row["fix"]
        assert "logits" in row["evidence"]["parts"]


SETTINGS = {
    "claim": "",
    "namespace": "ns",
    "storage_class": "",
    "size": "20Gi",
    "access_mode": "ReadWriteOnce",
    "devices": [{"node": "a"}, {"node": "b"}, {"node": "b"}],
}
DEFAULT = {
    "metadata": {
        "name": "fast",
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    }
}
FACTS = {
    "claim": None,
    "volume": None,
    "classes": [DEFAULT, {"metadata": {"name": "slow"}}],
    "others": {},
    "labels": {n: {"kubernetes.io/hostname": n} for n in ("a", "b", "c")},
}


def claim(**changed):
    made = {
        "metadata": {
            "name": "gpu-slices-recipe",
            "uid": "u-1",
            "labels": {"app.kubernetes.io/managed-by": "gpu-slices"},
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": "20Gi"}},
        },
        "status": {"phase": "Bound", "capacity": {"storage": "20Gi"}},
    }
    for path, value in changed.items():
        part = made
        *way, last = path.split("__")
        for step in way:
            part = part.setdefault(step, {})
        part[last] = value
    return made


def volume(*nodes):
    terms = [
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}]}
    ]
    return {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}}


def plan(facts=None, settings=None):
    made = recipe.storage_plan({**FACTS, **(facts or {})}, {**SETTINGS, **(settings or {})})
    return made, {row["id"]: row for row in made["checks"]}


class TestVolume:
    @pytest.mark.parametrize(
        ("size", "status"), [("20Gi", "pass"), ("5Gi", "pass"), ("21474836480", "pass"), ("50Gi", "fail")]
    )
    def test_more_room_asked_for_than_our_claim_has_is_told(self, size, status):
        _, rows = plan({"claim": claim()}, {"size": size})
        assert rows["volume"]["status"] == status
        if status == "fail":
            assert "a size of 20Gi (asked for: 50Gi)" in rows["volume"]["found"]
            assert "enlarge the claim yourself" in rows["volume"]["fix"]

    def test_the_size_of_a_claim_of_the_users_is_the_users(self):
        _, rows = plan({"claim": claim()}, {"size": "50Gi", "claim": "mine"})
        assert rows["volume"]["status"] == "pass"

    def test_a_claim_is_made_where_most_slices_are_free(self):
        made, rows = plan()
        assert made["create"]["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "20Gi"}},
        }
        assert made["create"]["metadata"]["labels"]["app.kubernetes.io/component"] == "recipe"
        assert (made["nodes"], made["uid"], made["name"]) == (["b"], "", "gpu-slices-recipe")
        assert {row["status"] for row in rows.values()} == {"pass"}
        assert "default class fast" in rows["volume"]["found"]

    def test_a_class_by_name(self):
        made, rows = plan(settings={"storage_class": "slow"})
        assert made["create"]["spec"]["storageClassName"] == "slow"
        assert "of class slow" in rows["volume"]["found"]

    @pytest.mark.parametrize(
        ("facts", "settings", "message"),
        [
            ({}, {"storage_class": "none"}, "no StorageClass none (there: fast, slow)"),
            ({"classes": []}, {}, "no default StorageClass (there: none)"),
            ({"classes": [{"metadata": {"name": "slow"}}]}, {}, "no default StorageClass (there: slow)"),
            ({}, {"claim": "mine"}, "no PersistentVolumeClaim mine in ns"),
            ({"claim": claim(metadata__deletionTimestamp="x")}, {}, "is being deleted"),
            ({"claim": claim(metadata__labels={})}, {}, "exists and is not ours"),
            ({"claim": claim(status__phase="Lost")}, {}, "has lost its volume"),
            ({"claim": claim()}, {"storage_class": "slow"}, "storage class fast (asked for: slow)"),
            ({"claim": claim()}, {"access_mode": "ReadWriteMany"}, "(asked for: ReadWriteMany)"),
        ],
    )
    def test_what_cannot_work(self, facts, settings, message):
        _, rows = plan(facts, settings)
        assert rows["volume"]["status"] == "fail"
        assert message in rows["volume"]["found"]
        assert rows["volume"]["needed"]
        assert rows["volume"]["fix"]

    def test_classes_that_cannot_be_read_are_no_failure(self):
        _, rows = plan({"classes": None})
        assert rows["volume"]["status"] == "pass"

    def test_a_claim_of_ours_is_kept(self):
        made, rows = plan({"claim": claim()})
        assert made["create"] == {}
        assert made["uid"] == "u-1"
        assert "the teardown removes it" in rows["volume"]["found"]

    def test_a_users_claim_is_used_whatever_its_labels(self):
        mine = claim(metadata__labels={}, metadata__name="mine")
        made, rows = plan({"claim": mine}, {"claim": "mine", "storage_class": "other"})
        assert (made["create"], made["name"]) == ({}, "mine")
        assert "never removed" in rows["volume"]["found"]

    def test_a_bound_local_volume_decides_the_node(self):
        made, _ = plan({"claim": claim(), "volume": volume("a")})
        assert made["nodes"] == ["a"]

    def test_a_volume_where_no_slice_is(self):
        made, rows = plan({"claim": claim(), "volume": volume("c")})
        assert made["nodes"] == []
        assert rows["place"]["status"] == "fail"
        assert "from c only, and slices of the profile are on a, b" in rows["place"]["found"]

    def test_the_node_that_the_scheduler_chose_stays(self):
        kept = claim(metadata__annotations={"volume.kubernetes.io/selected-node": "a"})
        assert plan({"claim": kept})[0]["nodes"] == ["a"]
        gone = claim(metadata__annotations={"volume.kubernetes.io/selected-node": "gone"})
        assert plan({"claim": gone})[0]["nodes"] == ["b"]

    def test_a_volume_for_many_nodes_leaves_the_choice(self):
        made, _ = plan(settings={"access_mode": "ReadWriteMany"})
        assert made["nodes"] == ["a", "b"]

    def test_before_anything_is_published_nothing_is_said_of_nodes(self):
        made, rows = plan(settings={"devices": []})
        assert made["nodes"] == []
        assert "place" not in rows

    def test_sources_on_other_claims_must_be_there(self):
        _, rows = plan({"others": {"models": None, "data": claim(metadata__name="data")}})
        assert rows["source-models"]["status"] == "fail"
        assert rows["source-data"]["status"] == "pass"

    @pytest.mark.parametrize(
        ("operator", "values", "nodes"),
        [
            ("In", ["a"], ["a"]),
            ("NotIn", ["a"], ["b", "c"]),
            ("Exists", [], ["a", "b", "c"]),
            ("DoesNotExist", [], []),
        ],
    )
    def test_node_affinity(self, operator, values, nodes):
        made = volume()
        rule = made["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]
        rule.update(operator=operator, values=values)
        assert recipe._volume_nodes(made, FACTS["labels"]) == nodes

    def test_the_teardown_takes_our_claim_after_its_pods(self):
        steps = [[kind.kind for kind in step] for step in managed.STEPS]
        (place,) = (i for i, kinds in enumerate(steps) if "PersistentVolumeClaim" in kinds)
        assert place > next(i for i, kinds in enumerate(steps) if "Pod" in kinds)
        made = recipe.claim_manifest(SETTINGS)
        assert managed.ours(made)
        assert not managed.ours(claim(metadata__labels={"team": "x"}))

    def test_claims_of_sources(self):
        assert recipe.sources(["hf://a/b", "pvc://x/y", "pvc://x/z", "file:///p"]) == ["x"]


DEVICE = {
    "node": "h200",
    "pool": "h200",
    "device": "gpu-1-mig-3g71gb-9-0",
    "type": "mig",
    "profile": "3g.71gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-1",
    "memory_bytes": 71424 * 2**20,
    "attributes": {"productName": "NVIDIA H200"},
}
PROOF = {
    "devices": [
        {
            "kind": "mig",
            "name": "NVIDIA H200 MIG 3g.71gb",
            "uuid": "MIG-1",
            "parent_uuid": "GPU-1",
            "memory_bytes": 71424 * 2**20,
        }
    ],
    "backend": "cpu",
    "torch": "1.13.0",
    "cuda_memory_bytes": 0,
    "loss_before": 5.26,
    "loss_after": 4.57,
    "loss_factor": 0.92,
    "rows_held_out": 64,
    "trainable": 82944,
    "peak_bytes": 700_000_000,
    "peak_kind": "rss",
    "adapter": {
        "claim": "mine",
        "path": "gpu-slices-recipe/runs/x/adapter",
        "files": [
            {"name": "adapter_config.json", "bytes": 700, "sha256": "0" * 64},
            {"name": "adapter_model.safetensors", "bytes": 337_000, "sha256": "a" * 64},
        ],
    },
}


def log(**changed):
    return f"[data] x\n[proof] {json.dumps({**copy.deepcopy(PROOF), **changed})}\n{recipe.OK}\n"


def judged(text, cuda=False):
    return {row["id"]: row for row in recipe.judge(text, [DEVICE], cuda, {"ok": ""})}


class TestJudge:
    def test_a_good_log(self):
        rows = judged(log())
        assert {row["status"] for row in rows.values()} == {"pass"}
        assert {"held-out-loss", "adapter", "peak-memory", "uuid", "log"} <= set(rows)
        assert "5.26 with the base model, 4.57 with the adapter" in rows["held-out-loss"]["found"]
        assert "claim mine, gpu-slices-recipe/runs/x/adapter/adapter_model" in rows["adapter"]["found"]
        assert "sha256 aaaa" in rows["adapter"]["found"]

    @pytest.mark.parametrize(
        ("changed", "row"),
        [
            ({"loss_after": 4.9}, "held-out-loss"),
            ({"loss_after": float("nan")}, "held-out-loss"),
            ({"loss_after": None}, "held-out-loss"),
            ({"loss_before": "5"}, "held-out-loss"),
            ({"adapter": {}}, "adapter"),
            ({"adapter": {"path": "x", "files": PROOF["adapter"]["files"][:1]}}, "adapter"),
            ({"trainable": 0}, "adapter"),
            ({"peak_bytes": 72 * 2**30}, "peak-memory"),
            ({"peak_bytes": None}, "peak-memory"),
            ({"devices": []}, "one-device"),
        ],
    )
    def test_what_proves_nothing(self, changed, row):
        assert judged(log(**changed))[row]["status"] == "fail"

    def test_on_real_silicon_cuda_is_needed(self):
        assert judged(log(), cuda=True)["backend"]["status"] == "fail"

    def test_a_log_without_its_end(self):
        assert (
            judged(log().replace(recipe.OK, "LlamaFactory LoRA SFT on GPU slice: FAILED"))["log"]["status"]
            == "fail"
        )
        (row,) = recipe.judge(None, [DEVICE], False, {})
        assert row["status"] == "fail"

    def test_the_log_of_a_real_h200(self):
        path = Path(__file__).resolve().parents[1] / "fixtures/logs/recipe-h200-cuda.txt"
        given = {
            "device": "gpu-0",
            "type": "gpu",
            "uuid": "GPU-00000000-0000-0000-0000-000000000001",
            "memory_bytes": 150754820096,
            "attributes": {"productName": "NVIDIA H200"},
        }
        rows = {row["id"]: row for row in recipe.judge(path.read_text(), [given], True, {})}
        assert {row["status"] for row in rows.values()} == {"pass"}
        assert "on cuda" in rows["backend"]["found"]
        assert "allocated on the device" in rows["peak-memory"]["found"]

    def test_it_is_registered(self):
        assert judges.WORKLOAD["recipe"] is recipe.judge
