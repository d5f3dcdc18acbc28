"""What every part of the configuration has in common, and how a path in it is read. Leaves out the parts."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def expand(path: str) -> str:
    """An absolute path; `~` stands for the home folder. Replicas start in other folders than the command line does."""
    return str(Path(path).expanduser().absolute())
