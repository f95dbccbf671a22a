"""Settings of the emoji model's target: its mixture of images, styles and scenes."""

from __future__ import annotations

from pydantic import Field, model_validator

from lantern_accel.errors import DataError
from lantern_accel.training.loop import seed_everything
from lantern_accel.training.target import TargetConfig, TextTarget
from lantern_emoji.captions import STYLES
from lantern_emoji.grow import widen


class EmojiTargetConfig(TargetConfig):
    """Settings of the target trainer, the mixture it learns from among them."""

    start_from: str | None = Field(
        None, description="folder there of a smaller trained target that this one grows out of"
    )
    scenes: int = Field(24000, ge=0, description="composed scenes to train on")
    scene_share: float = Field(0.3, ge=0, le=1, description="share of examples that are scenes")
    common_weight: float = Field(
        15.0, gt=0, description="factor on the sampling weight of common concepts"
    )
    group_weights: dict[str, float] = Field(
        default={
            "smileys-emotion": 2.5,
            "animals-nature": 2.0,
            "food-drink": 2.0,
            "objects": 0.7,
            "travel-places": 0.7,
            "people-body": 0.4,
        },
        description="factors on the records' sampling weights, by emoji group",
    )
    concept_weights: dict[str, float] = Field(
        default={}, description="further factors by concept name, such as {'red heart': 5}"
    )
    default_style: str | None = Field(
        None,
        description="style that a caption without a style word means; pictures of the others say theirs",
    )
    style_weights: dict[str, float] = Field(
        default={}, description="further factors by style, such as {'twemoji': 8}"
    )

    @model_validator(mode="after")
    def _styles_exist(self) -> EmojiTargetConfig:
        named = {*self.style_weights, *([self.default_style] if self.default_style else [])}
        if unknown := sorted(named - set(STYLES)):
            raise ValueError(f"no style is named {unknown[0]!r}; there are {', '.join(STYLES)}")
        return self


def fresh_target(
    config: EmojiTargetConfig,
    vocabulary: int,
    codes: int,
    grid: int,
    start: TextTarget | None = None,
) -> TextTarget:
    """Return the model to train: untrained, or grown out of ``start`` and computing the same.

    Raises :class:`DataError` where the configured sizes cannot grow out of those of ``start``.
    """
    seed_everything(config.seed)
    model = TextTarget.fresh(config, vocabulary, codes, grid)
    if start is not None:
        if start.text.config != model.text.config:
            raise DataError(
                f"the target to start from has the text encoder {start.text.config!r}, the "
                f"configuration asks for {model.text.config!r}; the text encoder cannot grow"
            )
        model.text.load_state_dict(start.text.state_dict())
        widen(model.gpt, start.gpt)
    return model
