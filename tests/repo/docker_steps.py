"""Reads the Dockerfiles, and carries out their steps without a container engine: COPY into a folder, RUN in a chroot of it.

For where no engine runs. As root, with the base image's files in a folder (for `python:3.11-slim-bookworm`, a Debian 12 with
Python 3.11 will do; `--bind` and `--pass` give it what this machine needs to reach its package index):

    python -m tests.repo.docker_steps deploy/docker/Dockerfile.cpu --base BASE --work WORK [--bind DIR …] [--pass NAME …]

Guards: COPY takes what `.dockerignore` leaves, and fails on what is not there. Leaves out layers, capabilities, and what
HEALTHCHECK and EXPOSE do in a running container.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Step:
    """One instruction: its name in capitals, and what follows it."""

    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """What follows, split at spaces; of COPY, without its flags."""
        return [word for word in self.rest.split() if not word.startswith("--")]

    @property
    def source_stage(self) -> str | None:
        """The stage that COPY takes from, or None for the build context."""
        match = re.search(r"--from=(\S+)", self.rest)
        return match[1] if match else None


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str | None
    steps: list[Step] = field(default_factory=list)


def stages_of(text: str) -> list[Stage]:
    """A Dockerfile's stages. Comments are dropped and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    stages: list[Stage] = []
    for line in joined.splitlines():
        name, _, rest = line.strip().partition(" ")
        step = Step(name.upper(), " ".join(rest.split()))
        if step.name == "FROM":
            words = step.words
            stages.append(Stage(words[0], words[2] if len(words) > 2 else None))
        else:
            stages[-1].steps.append(step)
    return stages


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether `.dockerignore` keeps this path out. Knows names, `*` alone, `!name` and `**/name`, which is all there is."""
    ignored = False
    parts = path.split("/")
    for pattern in patterns:
        name = pattern.removeprefix("!")
        if name == "*" or name in (path, parts[0]) or (name.startswith("**/") and name[3:] in parts):
            ignored = not pattern.startswith("!")
    return ignored


def ignore_patterns() -> list[str]:
    """The lines of the repository's `.dockerignore`."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def environment_of(step: Step) -> dict[str, str]:
    """What ENV sets, or ARG gives as a default."""
    return dict(word.split("=", 1) for word in step.words if "=" in word)


def run_stage(stage: Stage, root: Path, built: dict[str, Path], passed: dict[str, str]) -> None:
    """Carries out one stage's steps in `root`, which holds its base."""
    environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", **passed}
    folder, user = "/", None
    for step in stage.steps:
        print(f"--- {step.name} {step.rest[:150]}", flush=True)
        if step.name in ("ENV", "ARG"):
            for key, value in environment_of(step).items():
                environment.setdefault(key, "")
                environment[key] = value.replace(f"${key}", environment[key]) or environment[key]
        elif step.name == "WORKDIR":
            folder = step.rest
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.name == "USER":
            user = step.rest
        elif step.name == "COPY":
            source = built[step.source_stage] if step.source_stage else None
            copy(step.words, root, folder, source)
        elif step.name == "RUN":
            run_in(root, step.rest, folder, environment, user)
        elif step.name == "CMD":
            # What the container starts must at least be there, for its user.
            program = json.loads(step.rest)[0]
            run_in(root, f"{program} --help > /dev/null && id -u", folder, environment, user)


def copy(words: list[str], root: Path, folder: str, source: Path | None) -> None:
    """COPY, from the build context or from another stage."""
    *names, target = words
    into = root / (Path(folder) / target).as_posix().lstrip("/")
    for name in names:
        found = (source or ROOT) / name.lstrip("/")
        if not found.exists():
            raise FileNotFoundError(f"COPY {name}: not there")
        to = into / found.name if len(names) > 1 else into
        to.parent.mkdir(parents=True, exist_ok=True)
        if source is not None:
            subprocess.run(["cp", "-al", str(found), str(to)], check=True)
        elif found.is_dir():
            shutil.copytree(found, to, ignore=_ignored_within)
        else:
            shutil.copy2(found, to)


def _ignored_within(folder: str, names: list[str]) -> list[str]:
    inside = Path(folder).relative_to(ROOT)
    patterns = ignore_patterns()
    return [name for name in names if is_ignored((inside / name).as_posix(), patterns)]


def run_in(root: Path, command: str, folder: str, environment: dict[str, str], user: str | None) -> None:
    """RUN: a shell within `root`."""
    as_user = [f"--userspec={user}"] if user else []
    script = f"cd {folder} && {command}"
    subprocess.run(["chroot", *as_user, str(root), "/bin/sh", "-ec", script], env=environment, check=True)


@contextlib.contextmanager
def bound(root: Path, folders: list[str]) -> Iterator[None]:
    """Shows folders of this machine within `root`."""
    mounted: list[Path] = []
    try:
        for name in folders:
            target = root / name.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", name, str(target)], check=True)
            mounted.append(target)
        yield
    finally:
        for target in reversed(mounted):
            subprocess.run(["umount", str(target)], check=True)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="the base image's files")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder, for one copy of them for each stage")
    parser.add_argument("--bind", nargs="*", default=[])
    parser.add_argument("--pass", nargs="*", default=[], dest="passed")
    args = parser.parse_args()
    passed = {name: os.environ[name] for name in args.passed if name in os.environ}
    built: dict[str, Path] = {}
    for number, stage in enumerate(stages_of(args.dockerfile.read_text(encoding="utf-8"))):
        root = args.work / str(number)
        subprocess.run(["cp", "-a", str(args.base), str(root)], check=True)
        with bound(root, args.bind):
            run_stage(stage, root, built, passed)
        built[stage.name or str(number)] = root
    print("all steps done")


if __name__ == "__main__":
    main()
