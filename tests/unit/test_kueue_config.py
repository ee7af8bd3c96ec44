"""Kueue's configuration: what it says, and additions that leave the rest of the text alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from gpu_slices import kueue_config
from gpu_slices.kueue_config import ConfigError, with_argument_gate, with_gate, with_mapping
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# As the chart of Kueue 0.17 writes it, with an administrator's remarks.
CHART = """\
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
# ours since spring
controller:
  groupKindConcurrency:
    Job.batch: 5   # five
integrations:
  frameworks:
  - batch/job
  - trainer.kubeflow.org/trainjob
  # - pod
resources:
  excludeResourcePrefixes: []
  # transformations: none yet
manageJobsWithoutQueueName: false
"""
MAPPED = CHART.replace(
    "  excludeResourcePrefixes: []\n",
    "  excludeResourcePrefixes: [ephemeral-storage, example.com/]\n"
    "  deviceClassMappings:\n"
    "  - name: team.example/slice\n"
    "    deviceClassNames:\n"
    "    - mig-1g-6gb.nvidia.com   # A30\n",
)
RESOURCE, CLASS = "gpu-slices.dev/mig-1g-18gb", "mig-1g-18gb.nvidia.com"
GATE = "DynamicResourceAllocation"


class TestReading:
    def test_what_is_mapped(self) -> None:
        assert kueue_config.mappings(kueue_config.parse(MAPPED)) == {
            "mig-1g-6gb.nvidia.com": "team.example/slice"
        }
        assert kueue_config.mappings(kueue_config.parse(CHART)) == {}

    def test_a_mapping_that_counts_something_else_than_devices(self) -> None:
        config = {"resources": {"deviceClassMappings": [{"name": "a/b", "sources": [{"counter": {}}]}]}}
        assert kueue_config.counted_otherwise(config, "a/b")
        assert not kueue_config.counted_otherwise(config, "a/c")

    def test_frameworks(self) -> None:
        assert kueue_config.FRAMEWORK in kueue_config.frameworks(kueue_config.parse(CHART))
        assert kueue_config.frameworks({}) == ["batch/job"]
        assert kueue_config.frameworks({"integrations": {"frameworks": []}}) == ["batch/job"]

    def test_resources_left_out_of_quotas(self) -> None:
        config = kueue_config.parse(MAPPED)
        assert kueue_config.excluded(config, "example.com/gpu")
        assert not kueue_config.excluded(config, "cpu")
        assert not kueue_config.excluded({}, "cpu")

    @pytest.mark.parametrize("config", [{}, {"resources": None}, {"resources": []}, {"featureGates": "x"}])
    def test_odd_forms_hold_nothing(self, config: dict[str, Any]) -> None:
        assert kueue_config.mappings(config) == {}
        assert kueue_config.gates(config) == {}

    @pytest.mark.parametrize(
        ("text", "said"), [("a: [", "not valid YAML"), ("- a", "it is a list"), ("", "it is a NoneType")]
    )
    def test_what_is_no_configuration_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            kueue_config.parse(text)


class TestAdding:
    def test_a_first_mapping_goes_where_it_belongs(self) -> None:
        made = with_mapping(CHART, RESOURCE, CLASS)
        added = (
            "  deviceClassMappings:\n"
            f"  - name: {RESOURCE}\n"
            f"    deviceClassNames: [{CLASS}]\n"
            "  # transformations"
        )
        assert made == CHART.replace("  # transformations", added)

    def test_tagged_text_is_written_as_text(self) -> None:
        class Tagged(str):
            """As Ansible hands it out."""

        assert with_mapping(CHART, Tagged(RESOURCE), Tagged(CLASS)) == with_mapping(CHART, RESOURCE, CLASS)

    def test_a_second_mapping_follows_the_first(self) -> None:
        made = with_mapping(MAPPED, RESOURCE, CLASS)
        lines = [line for line in made.splitlines() if line not in MAPPED.splitlines()]
        assert lines == [f"  - name: {RESOURCE}", f"    deviceClassNames: [{CLASS}]"]

    def test_a_class_joins_the_mapping_of_its_name(self) -> None:
        made = with_mapping(MAPPED, "team.example/slice", CLASS)
        assert made == MAPPED.replace("# A30\n", f"# A30\n    - {CLASS}\n")

    def test_what_is_there_stays_as_it_is(self) -> None:
        assert with_mapping(MAPPED, "other/name", "mig-1g-6gb.nvidia.com") == MAPPED
        on = with_gate(CHART, GATE)
        assert with_gate(on, GATE) == on

    def test_a_gate_goes_to_the_end_or_to_its_fellows(self) -> None:
        assert with_gate(CHART, GATE) == CHART + f"featureGates: {{{GATE}: true}}\n"
        text = "featureGates:\n  A: false  # why\nkind: x\n"
        assert with_gate(text, GATE) == f"featureGates:\n  A: false  # why\n  {GATE}: true\nkind: x\n"

    def test_a_gate_that_somebody_switched_off_is_not_switched_on(self) -> None:
        with pytest.raises(ConfigError, match="switched off"):
            with_gate(f"featureGates: {{{GATE}: false}}\n", GATE)

    @pytest.mark.parametrize(
        "text",
        [
            "resources:\nkind: x\n",
            "resources: null   # nothing\nkind: x\n",
            "resources: ~\n",
            "resources: {}\nkind: x\n",
            "resources: {transformations: [], deviceClassMappings: []}   # short\n",
            "resources:\n  deviceClassMappings:\n  transformations: []\n",
            "resources:\n    deviceClassMappings:\n      - name: a/b\n        deviceClassNames: [c]\nkind: x",
            "kind: x",
            "{kind: x}",
            "text: |\n  resources:\n    - no\n\n\n",
            "text: >-\n  folded\n  text\n",
            "---\nkind: x\n# the end\n",
        ],
    )
    def test_every_way_to_write_it(self, text: str) -> None:
        made = with_gate(with_mapping(text, RESOURCE, CLASS), GATE)
        config, before = kueue_config.parse(made), kueue_config.parse(text)
        assert kueue_config.mappings(config) == {**kueue_config.mappings(before), CLASS: RESOURCE}
        assert kueue_config.gates(config) == {GATE: True}
        assert {k: config[k] for k in before if k != "resources"} == {
            k: v for k, v in before.items() if k != "resources"
        }

    @pytest.mark.parametrize("text", ["kind: x\n...\n", "resources: 5\n", "resources: [1]\n"])
    def test_what_cannot_be_added_to_is_left_alone(self, text: str) -> None:
        with pytest.raises(ConfigError):
            with_mapping(text, RESOURCE, CLASS)

    def test_shared_parts_are_not_changed_together(self) -> None:
        # The addition would appear in both places: refused, not half done.
        text = "a: &x\n  excludeResourcePrefixes: []\nresources: *x\n"
        with pytest.raises(ConfigError):
            with_mapping(text, RESOURCE, CLASS)

    def test_kueues_own_limits(self) -> None:
        many = {"deviceClassMappings": [{"name": f"a/{n}", "deviceClassNames": [f"c{n}"]} for n in range(16)]}
        with pytest.raises(ConfigError, match="16 mappings"):
            with_mapping(yaml.safe_dump({"resources": many}), RESOURCE, CLASS)
        full = {"deviceClassMappings": [{"name": RESOURCE, "deviceClassNames": [f"c{n}" for n in range(8)]}]}
        with pytest.raises(ConfigError, match="8 classes"):
            with_mapping(yaml.safe_dump({"resources": full}), RESOURCE, CLASS)


_WORDS = st.text("abcxyz/.-", min_size=1, max_size=8)
_SCALARS = st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=12))
_TREES: st.SearchStrategy[Any] = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=2),
    st.dictionaries(_WORDS, _SCALARS, max_size=2),
    st.just([{"a": []}]),
)
_ENTRIES = st.builds(
    lambda name, classes: {"name": name, "deviceClassNames": classes},
    _WORDS,
    st.lists(_WORDS, min_size=1, max_size=3, unique=True),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tree=st.dictionaries(_WORDS, _TREES, max_size=3),
    entries=st.lists(_ENTRIES, max_size=3, unique_by=lambda entry: entry["name"]),
    style=st.sampled_from([True, False, None]),
    indent=st.sampled_from([2, 4]),
)
def test_nothing_is_ever_lost(
    tree: dict[str, Any], entries: list[dict[str, Any]], style: bool | None, indent: int
) -> None:
    config = {**copy.deepcopy(tree), "resources": {"deviceClassMappings": entries}, "zz": 1}
    text = yaml.safe_dump(config, default_flow_style=style, indent=indent, allow_unicode=True)
    try:
        made = with_gate(with_mapping(text, RESOURCE, CLASS), GATE)
    except ConfigError:
        return
    read = kueue_config.parse(made)
    assert read.pop("featureGates") == {GATE: True}
    assert read["resources"]["deviceClassMappings"].pop() == {"name": RESOURCE, "deviceClassNames": [CLASS]}
    assert read == kueue_config.parse(text)
    if style is False and entries:
        # In block style nothing but whole lines is added.
        rest = made.splitlines()
        for line in text.splitlines():
            while rest and rest[0] != line:
                rest.pop(0)
            assert rest, line


class TestArguments:
    def test_reading(self) -> None:
        assert kueue_config.argument_gates(["--config=/x"]) is None
        assert kueue_config.argument_gates([f"--feature-gates=A=false,{GATE}=true"]) == {
            "A": False,
            GATE: True,
        }
        assert kueue_config.argument_gates(["--feature-gates", "A=TRUE"]) == {"A": True}
        assert kueue_config.argument_gates(["--feature-gates="]) == {}

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (["--config=/x"], ["--config=/x", f"--feature-gates={GATE}=true"]),
            (["--feature-gates=A=false"], [f"--feature-gates=A=false,{GATE}=true"]),
            (["--feature-gates="], [f"--feature-gates={GATE}=true"]),
            (["--feature-gates", "A=true", "-v"], ["--feature-gates", f"A=true,{GATE}=true", "-v"]),
            ([f"--feature-gates={GATE}=true"], [f"--feature-gates={GATE}=true"]),
        ],
    )
    def test_adding(self, before: list[str], after: list[str]) -> None:
        assert with_argument_gate(before, GATE) == after
        assert (kueue_config.argument_gates(after) or {})[GATE] is True
