"""The entries of published models: where their files are, how large, and under which licence.

Each family lists its own in ``published.json`` in its folder (:meth:`.Family.published`).

File sizes are those that the repositories list, rounded as they are there; where no listing was seen,
they are computed from the parameters and marked ``estimated``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lantern_accel.files import read_json_file
from lantern_accel.records import Frozen

Kind = Literal["model", "drafter", "vq", "text"]
#: A file is worth a word about its size from here on.
MB = 10**6


class RepoFile(Frozen):
    """One file of a repository on the Hugging Face Hub."""

    path: str
    nbytes: int = Field(ge=0)
    estimated: bool = False


class ModelEntry(Frozen):
    """A published model, or a part that models share.

    ``uses`` names the entries of the parts next to the model's own weights. ``config`` is for the
    family, which alone understands it.
    """

    name: str
    kind: Kind = "model"
    family: str
    summary: str
    repo: str
    files: tuple[RepoFile, ...]
    licence: str
    licence_url: str
    uses: tuple[str, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict)

    @property
    def labels(self) -> dict[str, object]:
        """What a manifest says of the model besides sizes."""
        return {"name": self.name, "summary": self.summary, "licence": self.licence}

    @property
    def nbytes(self) -> int:
        """Bytes of its own files."""
        return sum(file.nbytes for file in self.files)

    @property
    def estimated(self) -> bool:
        """Whether a size is computed rather than listed."""
        return any(file.estimated and file.nbytes > MB for file in self.files)


@functools.cache
def entries_in(folder: Path, family: str) -> tuple[ModelEntry, ...]:
    """Return the entries of a family that lie in its folder; none where it has no list."""
    path = folder / "published.json"
    listed = read_json_file(path) if path.is_file() else []
    return tuple(ModelEntry(family=family, **one) for one in listed)
