"""A few rounds of the fuzz in every run of the tests; `make fuzz` runs many."""

from pathlib import Path

import pytest

from tests.engine.fuzz import Setting, run_round, settings
from tests.engine.harness import TinyModel


@pytest.mark.parametrize("setting", list(settings(12, seed=1))[::3] + list(settings(12, seed=100))[1::5], ids=str)
def test_nothing_is_lost_leaked_or_wrong(tiny: TinyModel, tmp_path: Path, setting: Setting) -> None:
    result = run_round(tiny, setting, tmp_path)
    assert result.wrong == []
    assert result.embeddings > 15
    assert result.generations > 10
