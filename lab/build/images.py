"""The container images of the lab, each as an OCI archive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lab.build.oci import Entry, ImageConfig, write_archive, write_layer
from lab.build.process import output, run
from lab.build.recipe import HOME, LAYER
from lab.build.steps import Site, Step

PREFIX = "docker.io/lab"
ARCHIVE = "image.tar"

# What a tag names is settled by the seed of containerd, which is made anew whenever an image changes; fixed
# tags let inventories and charts name images without asking the builder.
REFERENCES = {
    "pause": f"{PREFIX}/pause:1.0",
    "coredns": f"{PREFIX}/coredns:v1.14.7",
    "jobset": f"{PREFIX}/jobset:v0.12.0",
    "trainer": f"{PREFIX}/trainer-controller-manager:v2.3.0",
    "kueue": f"{PREFIX}/kueue:v0.17.0",
    "dra-driver": f"{PREFIX}/dra-driver-nvidia-gpu:v0.4.1",
    "train": f"{PREFIX}/train:1.13",
    "llamafactory": f"{PREFIX}/llamafactory:0.9.1",  # after train: it has that image's layer only by name
}

# Their charts demand that the image itself names a user other than root.
UNPRIVILEGED = "65532:65532"

# Busybox programs that the driver's scripts and templates use.
APPLETS = (
    "basename",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dirname",
    "echo",
    "env",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mknod",
    "mount",
    "mv",
    "ps",
    "pwd",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "sh",
    "sleep",
    "sort",
    "tail",
    "tee",
    "test",
    "touch",
    "tr",
    "true",
    "umount",
    "uname",
    "wc",
    "which",
    "xargs",
)

LIBRARIES = "usr/lib/x86_64-linux-gnu"


def write_image(site: Site, name: str, entries: list[Entry], config: ImageConfig) -> None:
    """Write a one-layer image."""
    site.say("writing the image")
    layer = site.out / "layer.tar"
    write_layer(layer, entries)
    write_archive(site.out / ARCHIVE, REFERENCES[name], [layer], config)
    layer.unlink()


def build_pause(site: Site) -> None:
    """The sandbox image."""
    program = site.out / "pause"
    source = site.repo / "lab" / "images" / "pause" / "pause.c"
    run(
        ["gcc", "-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source)],
        site.log,
    )
    write_image(site, "pause", [Entry("pause", program)], ImageConfig(entrypoint=("/pause",)))
    program.unlink()


def build_coredns(site: Site) -> None:
    """CoreDNS alone; as root, so that it may bind port 53."""
    program = Entry("coredns", site.needs["coredns"] / "bin" / "coredns")
    write_image(site, "coredns", [program], ImageConfig(entrypoint=("/coredns",)))


def build_manager(site: Site, name: str, program: str) -> None:
    """A controller that its chart starts as /manager, and a /tmp for its certificates."""
    entries = [Entry("manager", site.needs[name] / "bin" / program), Entry("tmp", mode=0o1777)]
    write_image(site, name, entries, ImageConfig(entrypoint=("/manager",), user=UNPRIVILEGED))


def build_jobset(site: Site) -> None:
    """JobSet's controller."""
    build_manager(site, "jobset", "jobset")


def build_trainer(site: Site) -> None:
    """Trainer's controller."""
    build_manager(site, "trainer", "trainer-controller-manager")


def build_kueue(site: Site) -> None:
    """Kueue's controller."""
    build_manager(site, "kueue", "kueue")


def build_driver(site: Site) -> None:
    """NVIDIA's DRA driver, laid out as in its own image: static bash, busybox, plugin, C library.

    The C library is that of this machine, against which the plugin has just been linked.
    """
    driver, shell = site.needs["driver"], site.needs["shell"] / "bin"
    entries = [
        *(Entry(name, link=f"usr/{name}") for name in ("bin", "sbin", "lib", "lib64")),
        *(Entry(path) for path in ("dev", "etc", "proc", "sys", "usr/sbin", "var/run")),
        Entry("tmp", mode=0o1777),
        Entry("LICENSE", driver / "LICENSE", mode=0o644),
        Entry("usr/bin/bash", shell / "bash-static"),
        Entry("usr/bin/busybox", shell / "busybox"),
        *(Entry(f"usr/bin/{name}", link="busybox") for name in APPLETS),
        Entry("usr/bin/gpu-kubelet-plugin", driver / "bin" / "gpu-kubelet-plugin"),
        Entry("usr/bin/nvidia-cdi-hook", site.needs["cdi-hook"] / "bin" / "nvidia-cdi-hook"),
        Entry("usr/bin/kubelet-plugin-prestart.sh", driver / "hack" / "kubelet-plugin-prestart.sh"),
        *(
            Entry(f"templates/{file.name}", file, mode=0o644)
            for file in sorted((driver / "templates").iterdir())
        ),
        Entry("usr/lib64/ld-linux-x86-64.so.2", library("ld-linux-x86-64.so.2")),
        *(Entry(f"{LIBRARIES}/{name}", library(name)) for name in ("libc.so.6", "libm.so.6")),
    ]
    # As in NVIDIA's own image.
    env = {
        "NVIDIA_DISABLE_REQUIRE": "true",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    write_image(site, "dra-driver", entries, ImageConfig(env=env))


def library(name: str) -> Path:
    """Where the C compiler finds one of this machine's libraries."""
    return Path(output(["gcc", f"-print-file-name={name}"])).resolve()


def build_train(site: Site) -> None:
    """The training image, whose only layer is the root file system."""
    site.say("writing the image")
    config = ImageConfig(
        cmd=("python3",),
        env={
            "HF_HUB_OFFLINE": "1",
            "HOME": "/home/train",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED": "1",
        },
        user="1000:1000",
        workdir="/home/train",
    )
    write_archive(
        site.out / ARCHIVE, REFERENCES["train"], [site.needs["train-rootfs"] / "rootfs.tar"], config
    )


def build_llamafactory_image(site: Site) -> None:
    """The recipe's image: the training image's layer, LlamaFactory, a base model with a data set."""
    site.say("writing the image")
    config = ImageConfig(
        cmd=("llamafactory-cli", "help"),
        env={
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HUB_OFFLINE": "1",
            "HOME": "/home/train",
            "PATH": f"/{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"/{HOME}/lib",
            "PYTHONUNBUFFERED": "1",
        },
        user="1000:1000",
        workdir="/home/train",
    )
    layers = [
        site.needs["train-rootfs"] / "rootfs.tar",
        site.needs["llamafactory"] / LAYER,
        site.needs["base-model"] / LAYER,
    ]
    write_archive(site.out / ARCHIVE, REFERENCES["llamafactory"], layers, config, known=1)


def image_name(name: str) -> str:
    """The step that makes an image."""
    return f"{name}-image"


def image_steps(repo: Path) -> list[Step]:
    """One step an image."""

    def step(
        name: str,
        build: Callable[[Site], None],
        gib: float,
        *needs: str,
        parts: tuple[object, ...] = (),
        **files: Path,
    ) -> Step:
        return Step(
            kind="image",
            name=image_name(name),
            lane="image",
            build=build,
            gib=gib,
            needs=needs,
            files=tuple(files.values()),
            values=(REFERENCES[name], UNPRIVILEGED, *APPLETS),
            recipe=(write_image, write_layer, write_archive, *parts),
        )

    return [
        step("pause", build_pause, 0.01, source=repo / "lab" / "images" / "pause" / "pause.c"),
        step("coredns", build_coredns, 0.1, "coredns"),
        step("jobset", build_jobset, 0.1, "jobset", parts=(build_manager,)),
        step("trainer", build_trainer, 0.1, "trainer", parts=(build_manager,)),
        step("kueue", build_kueue, 0.1, "kueue", parts=(build_manager,)),
        step("dra-driver", build_driver, 0.1, "driver", "cdi-hook", "shell", parts=(library,)),
        step("train", build_train, 1.4, "train-rootfs"),
        step("llamafactory", build_llamafactory_image, 0.8, "train-rootfs", "llamafactory", "base-model"),
    ]
