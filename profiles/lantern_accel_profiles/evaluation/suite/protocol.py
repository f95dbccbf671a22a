"""What papers measure with: protocols (captions, resizing, networks), published rows, files of weights.

``papers.json`` has them with their sources. The figures of two protocols cannot be compared: resizing
alone moves FID by more than the methods do. Published rows stand next to measured ones as a yardstick of
ratios. Another model, card, code or protocol gives other values, so nothing is subtracted from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lantern_accel.files import read_json_file
from lantern_accel.records import Frozen, Record

Resample = Literal["lanczos", "bicubic", "bilinear"]
#: How an image is resized to a network's input: ``network`` leaves that to the network itself.
ToNetwork = Literal["network", "bicubic", "bilinear"]


class Preprocessing(Frozen):
    """What is done to an image, real or generated, before a network sees it; all with Pillow.

    It decides the value of FID, and so it is written into the table.
    """

    crop: Literal["centre square", "none"] = "centre square"
    size: int | None = Field(256, ge=8, description="side after cropping; None: as it is")
    resample: Resample = Field("lanczos", description="Pillow's filter of this resizing")
    to_network: ToNetwork = Field(
        "bicubic",
        description="to the network's input: a Pillow filter, with antialiasing and rounded to 8 "
        "bits, or `network`: the network's own",
    )

    def text(self) -> str:
        """Return the steps in words."""
        steps = ["centre crop to a square"] if self.crop != "none" else []
        if self.size is not None:
            steps.append(f"{self.resample} to {self.size} x {self.size}")
        last = "the network's own resizing" if self.to_network == "network" else self.to_network
        return ", ".join([*steps, f"{last} to the network's input"])


class Protocol(Frozen):
    """One paper's way to measure; ``network`` and ``manifold`` name feature networks."""

    name: str
    summary: str
    source: str
    caption: Literal["longest", "first"] = Field(description="of the captions of one image")
    count: int = Field(description="images of the published tables")
    network: str = Field(description="of FID, KID and the Inception score")
    preprocessing: Preprocessing
    manifold: str = Field(description="of precision and recall")
    manifold_preprocessing: Preprocessing
    k: int = 3
    is_splits: int = 10
    clip: str = Field(description="open_clip's name of the model, with OpenAI's weights")
    clip_prefix: str = ""
    clip_preprocessing: Preprocessing


class PublishedRow(Record):
    """A row that somebody else published; never comparable unless protocol and model agree."""

    method: str
    model: str
    source: str
    exact: bool
    drafter: bool
    hardware: str | None = None
    speedup: float | None = None
    tokens_per_step: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    note: str = ""


class Weights(Frozen):
    """One file of weights: what it is, how large, under which licence, and where it is published."""

    key: str
    title: str
    size: str
    licence: str
    repo: str | None = None
    file: str = ""
    url: str = ""

    def __str__(self) -> str:
        where = f"{self.repo}: {self.file}" if self.repo else self.url
        return f"{self.title}, {self.size}, {self.licence} ({where})"


_PAPERS = read_json_file(Path(__file__).with_name("papers.json"))
PROTOCOLS = {row["name"]: Protocol.model_validate(row) for row in _PAPERS["protocols"]}
WEIGHTS = {row["key"]: Weights.model_validate(row) for row in _PAPERS["weights"]}
#: The protocol of a suite, unless another one is named.
USUAL = {"coco": "lantern", "imagenet": "adm", "prompts": "lantern"}


def published_rows(suite: str) -> list[PublishedRow]:
    """Return what was published for a suite; nothing where we know of no table."""
    return [PublishedRow.model_validate(row) for row in _PAPERS.get(suite, ())]
