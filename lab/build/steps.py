"""Steps: what can be built, from what, in which order."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from lab.build.cache import Cache, key_of
from lab.build.process import CHILDREN

HEARTBEAT_S = 20.0


@dataclass(frozen=True)
class Site:
    """Where a step works: its own output directory, its log, and what it may use."""

    out: Path
    log: Path
    repo: Path
    cache: Cache
    needs: Mapping[str, Path]  # step name -> its output directory
    say: Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One thing to build. Everything that `build` depends on must be in files, values, recipe or needs.

    `lane` names the one worker that runs it: compiling and fetching Debian packages overlap, two compiles
    do not. `gib` is the space it takes in the cache, with what it leaves in Go's caches.
    """

    kind: str
    name: str
    lane: str
    build: Callable[[Site], None]
    gib: float
    needs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    values: tuple[str, ...] = ()
    recipe: tuple[object, ...] = ()
    keep: int = 1
    present: Callable[[Path], bool] = field(default=Path.is_dir)


class Plan:
    """Steps with their keys and places; says which are missing and builds them."""

    def __init__(self, steps: Sequence[Step], repo: Path, cache: Cache) -> None:
        self.steps = {step.name: step for step in steps}
        self.repo = repo
        self.cache = cache
        self.paths: dict[str, Path] = {}
        keys: dict[str, str] = {}
        for step in steps:  # given in order: a step comes after what it needs
            facts = {
                "step": step.name,
                "values": list(step.values),
                "recipe": [inspect.getsource(part) for part in (step.build, *step.recipe)],  # type: ignore[arg-type]
                "needs": {name: keys[name] for name in step.needs},
            }
            files = {str(file.relative_to(repo)): file for file in step.files}
            keys[step.name] = key_of(facts, files)
            self.paths[step.name] = cache.path(step.kind, step.name, keys[step.name])

    def is_built(self, name: str) -> bool:
        """Whether a step's current output is there."""
        return self.steps[name].present(self.paths[name])

    def missing(self, targets: Sequence[str]) -> list[str]:
        """The steps to build for the targets, each after what it needs.

        What only an already built thing needed is not wanted again.
        """
        order: list[str] = []

        def visit(name: str) -> None:
            if name in order or self.is_built(name):
                return
            for need in self.steps[name].needs:
                visit(need)
            order.append(name)

        for target in targets:
            visit(target)
        return order

    def run(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        """Build the named steps, one at a time in each lane; the first failure ends all and is raised."""
        try:
            self._run(list(names), say)
        finally:
            CHILDREN.allow()

    def _run(self, waiting: list[str], say: Callable[[str], None]) -> None:
        busy: dict[Future[None], str] = {}
        with ThreadPoolExecutor(max_workers=8) as pool:
            try:
                while waiting or busy:
                    lanes = {self.steps[name].lane for name in busy.values()}
                    for name in list(waiting):
                        step = self.steps[name]
                        unready = any(need in waiting or need in busy.values() for need in step.needs)
                        if step.lane in lanes or unready:
                            continue
                        lanes.add(step.lane)
                        waiting.remove(name)
                        busy[pool.submit(self._build, step, say)] = name
                    done, _ = wait(busy, return_when=FIRST_COMPLETED)
                    for future in done:
                        del busy[future]
                        future.result()
            except BaseException:
                CHILDREN.stop()
                raise

    def _build(self, step: Step, say: Callable[[str], None]) -> None:
        def waiting() -> None:
            say(f"{step.name}: another builder is at it, waiting")

        with self.cache.locked(step.kind, step.name, waiting):
            if self.is_built(step.name):
                return
            started = time.monotonic()
            self._build_locked(step, say)
            say(f"{step.name}: built in {time.monotonic() - started:.0f} s")
            self.cache.drop_old(step.kind, step.name, self.paths[step.name], step.keep)

    def _build_locked(self, step: Step, say: Callable[[str], None]) -> None:
        self.cache.logs.mkdir(parents=True, exist_ok=True)
        log = self.cache.logs / f"{step.name}.log"
        log.write_bytes(b"")
        started = time.monotonic()
        doing = ["starting"]

        def note(text: str) -> None:
            doing[0] = text
            say(f"{step.name}: {text}")

        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT_S):
                say(f"{step.name}: still {doing[0]} ({time.monotonic() - started:.0f} s)")

        threading.Thread(target=beat, daemon=True).start()
        try:
            with self.cache.new(self.paths[step.name]) as out:
                needs = {name: self.paths[name] for name in step.needs}
                step.build(Site(out, log, self.repo, self.cache, needs, note))
        finally:
            ended.set()
