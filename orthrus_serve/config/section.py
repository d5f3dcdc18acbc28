"""What every part of the configuration has in common. Leaves out the parts."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
