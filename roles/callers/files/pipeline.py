"""A KFP v2 pipeline whose one task claims a GPU slice. Written for kfp and kfp-kubernetes 2.17.3.

``python pipeline.py OUTPUT.yaml`` compiles it; pipeline.yaml beside this file is what comes out.
"""

import sys  # no "annotations" from __future__: kfp reads the types of the functions below
from typing import Any

from google.protobuf import json_format
from kfp import compiler, dsl, kubernetes
from kfp.kubernetes.common import parse_k8s_parameter_input


def claim_slice(task: dsl.PipelineTask, claim: Any) -> dsl.PipelineTask:
    """Give a task's pod one claim. ``claim``: a pipeline parameter {resourceClaimTemplateName: NAME}.

    kfp-kubernetes 2.17.3 has no function for it, and its message KubernetesExecutorConfig no such field. In
    KFP's source both are there since September 2026, with a driver that knows the field podResourceClaims:
    this writes what add_resource_claim_json() writes there. Call it after every other function of
    kfp.kubernetes on the same task: those parse the settings into the message, which refuses the field.
    """
    reference = json_format.MessageToDict(parse_k8s_parameter_input(claim, task))
    configuration = task.platform_config.setdefault("kubernetes", {})
    configuration.setdefault("podResourceClaims", []).append({"resourceClaimJson": reference})
    return task


@dsl.container_component
def prove(profile: str, hold: int) -> dsl.ContainerSpec:
    """The component: any container whose image has Python."""
    return dsl.ContainerSpec(
        image="set-by-the-pipeline",
        command=["python3", "/opt/gpu-slices/caller.py"],
        args=["--caller=kfp", "--profile", profile, "--hold", hold],
    )


@dsl.pipeline(name="gpu-slice", description="Proves the slice that its task claims")
def gpu_slice(  # noqa: PLR0917
    image: str, profile: str, hold: int, claim: dict, scripts: str, tolerations: list
) -> None:
    """One task. All that differs between clusters is a parameter."""
    task = prove(profile=profile, hold=hold)
    task.set_display_name("prove the slice").set_caching_options(enable_caching=False)
    task.set_container_image(image)
    task.set_cpu_request("100m").set_cpu_limit("1").set_memory_request("128Mi").set_memory_limit("1Gi")
    task.set_env_variable("PYTHONUNBUFFERED", "1")
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.set_security_context(task, run_as_user=1000, run_as_group=1000, run_as_non_root=True)
    kubernetes.use_config_map_as_volume(task, config_map_name=scripts, mount_path="/opt/gpu-slices")
    kubernetes.add_toleration_json(task, tolerations)
    claim_slice(task, claim)


if __name__ == "__main__":
    compiler.Compiler().compile(gpu_slice, package_path=sys.argv[1])
