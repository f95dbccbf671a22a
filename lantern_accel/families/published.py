"""The entries of published models, as data: where their files are, how large, and under which licence.

Each family lists its own (:meth:`.Family.published`).

File sizes are those that the repositories list, rounded as they are there; where no listing was seen,
they are computed from the parameters and marked ``estimated``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from lantern_accel.records import Frozen

Kind = Literal["model", "drafter", "vq", "text"]
MB, GB = 10**6, 10**9


class RepoFile(Frozen):
    """One file of a repository on the Hugging Face Hub."""

    path: str
    nbytes: int = Field(ge=0)
    estimated: bool = False


class ModelEntry(Frozen):
    """A published model, or a part that models share.

    ``uses`` names the entries of the parts beside the model's own weights. ``config`` is for the
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
    def labels(self) -> dict[str, Any]:
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


#: Of Chameleon's weights, and of what LANTERN trained with them.
CHAMELEON_LICENCE = {
    "licence": "Chameleon Research License (non-commercial)",
    "licence_url": "https://ai.meta.com/resources/models-and-libraries/chameleon-license",
}


def repo_files(sizes: Mapping[str, float], estimated: Collection[str] = ()) -> tuple[RepoFile, ...]:
    """Return files of a repository by path; ``estimated``: those whose size is computed, not listed."""
    return tuple(
        RepoFile(path=path, nbytes=int(size), estimated=path in estimated)
        for path, size in sizes.items()
    )


def estimated_files(sizes: Mapping[str, float]) -> tuple[RepoFile, ...]:
    """Return files of a repository whose sizes are computed, not listed."""
    return repo_files(sizes, sizes)


def drafter_entry(
    name: str, family: str, of: str, nbytes: float, config: dict[str, Any]
) -> ModelEntry:
    """Return one of LANTERN's drafters, ``jadohu/NAME``."""
    return ModelEntry(
        name=name.replace("_", "-"),
        kind="drafter",
        family=family,
        summary=f"LANTERN's drafter for {of}",
        repo=f"jadohu/{name}",
        files=estimated_files({"config.json": 1000, "pytorch_model.bin": nbytes}),
        config=config,
        **CHAMELEON_LICENCE,
    )
