"""The memory estimate of a fine-tune and the slice it asks for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from gpu_slices import model_size
from gpu_slices.model_size import ModelSizeError, estimate, parse_parameters, slice_for_model
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
A30 = ["1g.6gb", "2g.12gb", "4g.24gb"]

# From the models' own config.json.
QWEN_05B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


class TestTheGuidesRules:
    """What the guide says of an A30's profiles, with the defaults: batch 1, 512 tokens, rank 8."""

    @pytest.mark.parametrize(
        ("model", "profile"),
        [
            ("0.6B", "1g.6gb"),
            ("0.5B", "1g.6gb"),
            ("1.5B", "1g.6gb"),
            ({"config": QWEN_05B}, "1g.6gb"),
            ({"parameters": "7B", "precision": "nf4"}, "2g.12gb"),
            ({"config": QWEN_7B, "precision": "nf4"}, "2g.12gb"),
            ("3B", "2g.12gb"),
            ("7B", "4g.24gb"),
            ({"config": QWEN_7B}, "4g.24gb"),
            ({"config": LLAMA_8B}, "4g.24gb"),
            ("13B", ""),
            ({"parameters": "70B", "precision": "nf4"}, ""),
        ],
    )
    def test_the_smallest_profile(self, model, profile):
        assert slice_for_model(model, A30)["profile"] == profile

    def test_a_7b_in_16_bits_does_not_fit_2g_12gb(self):
        made = slice_for_model("7B", A30)
        assert "2g.12gb" not in made["fits"]
        assert made["parts"]["weights"] == 14_000_000_000

    def test_where_nothing_fits_it_says_what_to_do(self):
        made = slice_for_model("7B", ["1g.6gb", "2g.12gb"])
        assert made["profile"] == ""
        assert made["memory"] == 0
        assert "2g.12gb (11.69 GiB)" in made["reason"]
        assert "nf4" in made["reason"]

    def test_long_sequences_need_more(self):
        assert slice_for_model("1.5B", A30, sequence=4096)["profile"] == "4g.24gb"
        assert slice_for_model("0.6B", A30, batch=8, sequence=512)["profile"] != "1g.6gb"

    def test_without_gradient_checkpointing_all_layers_are_kept(self):
        kept = estimate("1.5B", sequence=2048, gradient_checkpointing=False)["parts"]["activations"]
        again = estimate("1.5B", sequence=2048)["parts"]["activations"]
        assert kept > 8 * again


MEASURED = json.loads((ROOT / "tests/fixtures/model-size/h200-lora.json").read_text())["rows"]


def _measured_case(row):
    spec = importlib.util.spec_from_file_location("measure_lora", ROOT / "tests/device/measure_lora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.estimated(row["case"])


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: " ".join(map(str, row["case"].values())))
class TestBesideAnH200:
    """What tests/device/measure_lora.py found on the real card."""

    def test_the_estimate_holds_what_was_used_and_wastes_little(self, row):
        made = _measured_case(row)
        assert row["device"] <= made["needed"] <= 1.25 * row["device"]

    def test_trained_weights_are_counted_right(self, row):
        if row["case"]["model"] != "gpt2-124m":
            assert _measured_case(row)["trainable"] == row["trainable"]


class TestPublicFigures:
    """Beside the table of LlamaFactory's README (GB): a tenth less to a half more."""

    @pytest.mark.parametrize(
        ("model", "precision", "published"),
        [
            *[("7B", "bf16", 16), ("14B", "bf16", 32), ("30B", "bf16", 64), ("70B", "bf16", 160)],
            *[("7B", "int8", 10), ("14B", "int8", 20), ("30B", "int8", 40), ("70B", "int8", 80)],
            *[("7B", "nf4", 6), ("14B", "nf4", 12), ("30B", "nf4", 24), ("70B", "nf4", 48)],
        ],
    )
    def test_the_estimate_is_near(self, model, precision, published):
        needed = estimate(model, precision=precision)["needed"] / 2**30
        assert 0.9 * published <= needed <= 1.5 * published

    def test_a_large_vocabulary_needs_the_config(self):
        gemma = {
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "vocab_size": 256000,
            "tie_word_embeddings": True,
        }
        assumed = estimate("2.6B")
        assert estimate("2.6B", gemma)["needed"] > assumed["needed"]
        assert "Gemma" in assumed["assumed"][0]


class TestParts:
    def test_they_add_up(self):
        made = estimate("0.6B")
        assert sum(made["parts"].values()) == made["total"]
        assert made["needed"] == pytest.approx(made["total"] * 1.1, abs=1)
        assert all(isinstance(size, int) for size in made["parts"].values())

    @pytest.mark.parametrize(
        ("config", "parameters"),
        [(QWEN_05B, 494e6), (QWEN_7B, 7.616e9), (LLAMA_8B, 8.03e9), (GPT2, 124e6)],
    )
    def test_parameters_counted_from_a_config(self, config, parameters):
        assert estimate(config=config)["parameters"] == pytest.approx(parameters, rel=0.01)

    def test_lora_of_a_known_model(self):
        # peft prints 4,399,104 for Qwen2.5-0.5B with rank 8 on all linear layers.
        assert estimate(config=QWEN_05B)["trainable"] == 4_399_104

    def test_lora_of_gpt2(self):
        # 12 layers x (c_attn 768+2304, c_proj 768+768, c_fc 768+3072, mlp c_proj 3072+768) x 8, as q, k, v
        # are counted one by one here: 3 x (768 + 768) in place of 768 + 2304.
        made = estimate(config=GPT2, lora_target=["c_attn", "c_proj", "c_fc"])
        assert made["trainable"] == 12 * 8 * (3 * 1536 + 1536 + 3840 + 3840)

    @pytest.mark.parametrize(
        ("optimizer", "pure", "each"),
        [("adamw", False, 8), ("adamw_8bit", False, 2), ("sgd", False, 0), ("adamw", True, 4)],
    )
    def test_optimizers(self, optimizer, pure, each):
        made = estimate("0.6B", optimizer=optimizer, pure_bf16=pure)
        assert made["parts"]["optimizer"] == made["trainable"] * each
        assert made["parts"]["lora"] == made["trainable"] * (2 if pure else 4)

    @pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
    def test_precisions(self, precision, each):
        made = estimate(config=QWEN_7B, precision=precision)
        assert made["parts"]["weights"] == made["parameters"] * each

    def test_nf4_leaves_the_embeddings_in_16_bits(self):
        made = estimate(config=QWEN_7B, precision="nf4")
        embeddings = 2 * 152064 * 3584
        least = embeddings * 2 + (made["parameters"] - embeddings) * 0.5
        assert least < made["parts"]["weights"] < least * 1.08

    def test_eager_attention_keeps_the_scores(self):
        sdpa, eager = (estimate("0.6B", sequence=2048, attention=name)["total"] for name in ("sdpa", "eager"))
        assert eager > sdpa + 2**29

    def test_what_was_assumed_is_said(self):
        assert "no config was given" in estimate("0.6B")["assumed"][0]
        assert "counted from the config" in estimate(config=GPT2)["assumed"][0]
        assert estimate("0.5B", QWEN_05B)["assumed"] == []

    def test_text_config_of_a_multimodal_model(self):
        assert estimate(config={"text_config": QWEN_05B, "vision_config": {}})["trainable"] == 4_399_104

    def test_parts_in_words(self):
        assert model_size.parts_text(estimate("7B")).startswith("weights 13.04 GiB, logits")


class TestInputs:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("0.6B", 600_000_000),
            ("494M", 494_000_000),
            ("7b", 7_000_000_000),
            (" 1.5 B ", 1_500_000_000),
            (7e9, 7_000_000_000),
            ("7e9", 7_000_000_000),
            (600_000_000, 600_000_000),
            ("1T", 10**12),
        ],
    )
    def test_numbers_of_parameters(self, text, number):
        assert parse_parameters(text) == number

    @pytest.mark.parametrize(
        "text", ["", None, True, "7 billion", "-1B", "0", 0, -5, "nan", "inf", "1e99", []]
    )
    def test_other_numbers_are_refused(self, text):
        with pytest.raises(ModelSizeError, match="needed is how many parameters"):
            parse_parameters(text)

    @pytest.mark.parametrize(
        ("model", "profiles", "options", "message"),
        [
            (10**5000, None, {}, "a number of thousands of digits"),
            ("9" * 5000, None, {}, "found parameters '999"),
            ("7B", None, {"parameters": "7B"}, "found the number of parameters twice"),
            ({1: 2}, None, {}, "found 1; known are"),
            ("7B", None, {"batch": 10**400}, "found batch 1000"),
            ("7B", None, {"batch": "9" * 5000}, "found batch '999"),
            ("7B", None, {"headroom": 10**400}, "found headroom 1000"),
            ("7B", ["1g." + "9" * 5000 + "gb"], {}, "found profile '1g.999"),
            ("7B", ["0g.0gb"], {}, "found profile '0g.0gb'"),
            ("7B", [{"profile": ["x"], "memory_bytes": 3}], {}, "needed is its name"),
            ({"config": {**QWEN_05B, "hidden_size": 10**400}}, None, {}, "found hidden_size: 1000"),
            ({"config": {**QWEN_05B, "tie_word_embeddings": "false"}}, None, {}, "needed is true or false"),
        ],
        ids=[f"nonsense-{number}" for number in range(12)],
    )
    def test_nonsense_is_refused_in_one_sentence(self, model, profiles, options, message):
        with pytest.raises(ModelSizeError) as fault:
            slice_for_model(model, profiles, **options)
        assert message in str(fault.value)
        assert len(str(fault.value)) < 400

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"precision": "int3"}, "found precision 'int3'; needed is one of fp32, bf16, fp16, int8, nf4"),
            ({"optimizer": "adam"}, "found optimizer 'adam'"),
            ({"attention": "flash"}, "found attention 'flash'"),
            ({"lora_rank": 0}, "found lora_rank 0; needed is a whole number above 0"),
            ({"batch": "two"}, "found batch 'two'"),
            ({"sequence": -1}, "found sequence -1"),
            ({"batch": True}, "found batch True"),
            ({"batch": 1.5}, "found batch 1.5"),
            ({"lora_target": "q_proj,x_proj"}, "found lora_target 'x_proj'"),
            ({"lora_target": []}, "found no lora_target"),
            ({"gradient_checkpointing": "yes"}, "needed is true or false"),
            ({"headroom": -0.1}, "found headroom -0.1"),
            ({"headroom": "much"}, "found headroom 'much'"),
            ({"seqence": 5}, "found seqence; known are attention, batch"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ModelSizeError, match=message.replace(".", r"\.")):
            estimate("0.6B", **options)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("x", "found a model config of type str"),
            ({"hidden_size": 8}, "found no num_hidden_layers or n_layer"),
            ({**QWEN_05B, "vocab_size": 0}, "found vocab_size: 0"),
            ({**QWEN_05B, "hidden_size": "896"}, "found hidden_size: '896'"),
            ({**QWEN_05B, "num_experts": 8}, "mixtures of experts are not estimated"),
        ],
    )
    def test_bad_configs(self, config, message):
        with pytest.raises(ModelSizeError, match=message):
            estimate(config=config)

    def test_neither_parameters_nor_config(self):
        with pytest.raises(ModelSizeError, match="found neither parameters nor a config"):
            estimate()

    @pytest.mark.parametrize(
        ("profiles", "message"),
        [
            ("1g.6gb", "needed is a list of names"),
            (["6gb"], "found profile '6gb'"),
            ([{"profile": "1g.6gb"}], "found memory_bytes None of 1g.6gb"),
            (7, "needed is a list"),
        ],
    )
    def test_bad_profiles(self, profiles, message):
        with pytest.raises(ModelSizeError, match=message):
            slice_for_model("0.6B", profiles)


class TestProfiles:
    def test_published_devices_count_by_their_own_memory(self):
        devices = [
            {"profile": "1g.6gb", "memory_bytes": 3 * 2**30},
            {"profile": "1g.6gb", "memory_bytes": 6 * 2**30},
            {"profile": "", "memory_bytes": 24 * 2**30},
            {"profile": "2g.12gb", "memory_bytes": 12 * 2**30},
        ]
        made = slice_for_model("0.6B", devices)
        assert (made["profile"], made["memory"], made["fits"]) == ("2g.12gb", 12 * 2**30, ["2g.12gb"])

    def test_without_a_list_all_known_cards_count(self):
        assert slice_for_model("0.6B")["profile"] == "1g.5gb"
        assert slice_for_model({"parameters": "70B", "precision": "nf4"})["profile"] in {"7g.80gb", "3g.71gb"}

    def test_no_profile_at_all(self):
        assert slice_for_model("0.6B", [])["reason"].endswith("or cut larger slices")

    def test_a_name_nobody_measured_counts_a_tenth_less(self):
        assert model_size.profile_memory("1g.100gb") == 90 * 2**30
        assert model_size.profile_memory("1g.6gb+me") == 5952 * 2**20

    def test_the_assumed_shapes_never_fall(self):
        shapes = [shape for _, shape in model_size._SHAPES]
        for smaller, larger in zip(shapes, shapes[1:]):
            for name in ("layers", "hidden", "query", "key_value", "mlp", "vocabulary", "heads"):
                assert getattr(smaller, name) <= getattr(larger, name), name


OPTIONS = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(sorted(model_size.PRECISIONS)),
        "lora_rank": st.integers(1, 256),
        "batch": st.integers(1, 64),
        "sequence": st.integers(1, 32768),
        "gradient_checkpointing": st.booleans(),
        "optimizer": st.sampled_from(sorted(model_size.OPTIMIZERS)),
        "attention": st.sampled_from(["sdpa", "eager"]),
    }
)


class TestMonotone:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1_000, 10**12), st.integers(1_000, 10**12), OPTIONS)
    def test_more_parameters_never_need_less(self, one, other, options):
        small, large = sorted((one, other))
        assert estimate(small, **options)["needed"] <= estimate(large, **options)["needed"]

    @settings(max_examples=200, deadline=None)
    @given(
        st.integers(10**6, 10**11),
        OPTIONS,
        st.sampled_from(["lora_rank", "batch", "sequence"]),
        st.integers(1, 64),
    )
    def test_more_work_never_needs_less(self, count, options, name, more):
        larger = {**options, name: options[name] + more}
        assert estimate(count, **options)["needed"] <= estimate(count, **larger)["needed"]

    @settings(max_examples=100, deadline=None)
    @given(st.integers(10**6, 10**11), OPTIONS)
    def test_quantising_never_needs_more_than_32_bits(self, count, options):
        sizes = [
            estimate(count, **{**options, "precision": name})["parts"]["weights"]
            for name in ("nf4", "int8", "bf16", "fp32")
        ]
        # A small model's one unpacked layer can outweigh what quantising saves.
        if count > 10**9:
            assert sizes == sorted(sizes)

    @settings(max_examples=100, deadline=None)
    @given(st.integers(10**6, 10**11), OPTIONS)
    def test_the_chosen_profile_holds_it_and_no_smaller_one_does(self, count, options):
        made = slice_for_model(count, **options)
        if made["profile"]:
            assert made["memory"] >= made["needed"]
        smaller = [n for n in model_size.known_profiles() if model_size.profile_memory(n) < made["memory"]]
        assert all(model_size.profile_memory(name) < made["needed"] for name in smaller)


def test_the_filter_raises_what_ansible_shows():
    spec = importlib.util.spec_from_file_location("model_filters", ROOT / "plugins/filter/model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    slice_filter = module.FilterModule().filters()["slice_for_model"]
    assert slice_filter("0.6B", A30)["profile"] == "1g.6gb"
    with pytest.raises(AnsibleFilterError, match="slice_for_model: found parameters 'big'"):
        slice_filter("big", A30)
