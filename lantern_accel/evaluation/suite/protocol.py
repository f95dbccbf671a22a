"""Papers as data, with sources: their protocols (captions, resizing, networks) and published rows.

The figures of two protocols cannot be compared: resizing alone moves FID by more than the methods do.
Published rows stand next to measured ones as a yardstick of ratios. Another model, card, code or protocol
gives other values, so nothing is subtracted from them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lantern_accel.records import Frozen, Record

Resample = Literal["lanczos", "bicubic", "bilinear"]
#: What brings a picture to a network's input: ``network`` leaves that to the network itself.
ToNetwork = Literal["network", "bicubic", "bilinear"]


class Preprocessing(Frozen):
    """What is done to a picture, real or generated, before a network sees it; all with Pillow.

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


LANTERN = Protocol(
    name="lantern",
    summary="LANTERN's own scripts: clean-fid after a crop to 256, CLIP ViT-B/32, HPSv2.1, VGG16",
    source="jadohu/LANTERN 3a56e45: data/prompts/preprocess.py, entrypoints/eval_fid_clip.py, "
    "eval_prec_recall.py, eval_hpsv2.py",
    caption="longest",
    count=5000,
    network="inception",
    preprocessing=Preprocessing(),
    manifold="vgg16",
    manifold_preprocessing=Preprocessing(crop="none", size=None, to_network="bilinear"),
    clip="ViT-B-32",
    clip_prefix="A photo depicts ",
    clip_preprocessing=Preprocessing(to_network="network"),
)
SJD = Protocol(
    name="sjd",
    summary="SJD's and SJD-PAC's scripts: pytorch-fid without a crop, CLIP ViT-B/16",
    source="KangJialiang/SJD-PAC, evaluation_metrics.py (pytorch-fid and torchmetrics); its Inception "
    "score resizes without antialiasing, ours as FID does",
    caption="first",
    count=5000,
    network="inception",
    preprocessing=Preprocessing(crop="none", size=None, to_network="network"),
    manifold="inception",
    manifold_preprocessing=Preprocessing(crop="none", size=None, to_network="network"),
    clip="ViT-B-16",
    clip_preprocessing=Preprocessing(crop="none", size=None, to_network="network"),
)
ADM = Protocol(
    name="adm",
    summary="ADM's evaluator for ImageNet: samples of 256 x 256, one Inception for all figures",
    source="openai/guided-diffusion 1b61a43, evaluations/evaluator.py; its sFID is left out",
    caption="first",
    count=50_000,
    network="inception",
    preprocessing=Preprocessing(crop="centre square", size=256, to_network="network"),
    manifold="inception",
    manifold_preprocessing=Preprocessing(crop="centre square", size=256, to_network="network"),
    clip="ViT-B-32",
    clip_preprocessing=Preprocessing(to_network="network"),
)
PROTOCOLS = {one.name: one for one in (LANTERN, SJD, ADM)}
#: The protocol of a suite, unless another one is named.
USUAL = {"coco": "lantern", "imagenet": "adm", "prompts": "lantern"}


# --- published rows: quality where we have seen the table itself --------------------------------


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


_NO_QUALITY = "the quality of this table was not at hand"
#: Method, exact, speed-up when sampling, speed-up when greedy.
_LANTERN_ROWS = (("EAGLE-2", True, 0.93, 1.29), ("LANTERN", False, 1.69, 2.26))
#: Method, tokens per step, speed-up, FID, CLIP score, exact, with a drafter.
_PAC_ROWS = (
    ("autoregressive", 1.00, 1.00, 30.79, 31.31, True, False),
    ("EAGLE", 2.94, 2.10, 30.68, 31.73, True, True),
    ("SJD", 2.22, 2.05, 31.13, 31.33, True, False),
    ("LANTERN++", 3.19, 2.28, 29.96, 30.11, False, True),
    ("GSD", 3.39, 3.62, 33.12, 31.25, False, False),
    ("SJD2", 4.02, 2.81, 31.40, 31.80, False, True),
    ("SJD-PAC", 4.51, 3.80, 30.69, 31.21, True, False),
)
COCO = (
    *(
        PublishedRow(
            method=method,
            model="LlamaGen-XL stage I",
            source="arXiv 2410.03355, MS-COCO captions, sampling",
            exact=exact,
            drafter=True,
            hardware="RTX 3090",
            speedup=speedup,
            note=f"greedy: {greedy}x; {_NO_QUALITY}",
        )
        for method, exact, speedup, greedy in _LANTERN_ROWS
    ),
    PublishedRow(
        method="LANTERN++ (best)",
        model="LlamaGen-XL",
        source="arXiv 2502.06352",
        exact=False,
        drafter=True,
        speedup=2.56,
        tokens_per_step=3.63,
        note=_NO_QUALITY,
    ),
    *(
        PublishedRow(
            method=method,
            model="Lumina-mGPT 7B 768",
            source="KangJialiang/SJD-PAC, README.md (arXiv 2603.18599)",
            exact=exact,
            drafter=drafter,
            speedup=speedup,
            tokens_per_step=compression,
            metrics={"fid": fid, "clip": clip},
            note="protocol sjd",
        )
        for method, compression, speedup, fid, clip, exact, drafter in _PAC_ROWS
    ),
)


def published_rows(suite: str) -> list[PublishedRow]:
    """Return what was published for a suite; nothing where we know of no table."""
    return list(COCO) if suite == "coco" else []
