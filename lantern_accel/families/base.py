"""Model families: everything about a kind of model that decoding itself does not need to know.

A family recognises its files, builds its parts, turns prompts into conditions and tokens into pixels.
The step engine names no family; what it reads of a target is listed at :class:`Manifest`. Families are
plug-ins: :mod:`lantern_accel.families.spec` says how one presents itself.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lantern_accel.checkpoints.layouts import (
    OWN_CONFIG,
    OWN_WEIGHTS,
    drafter_weights,
    explain_sizes,
    read_json,
)
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import CheckpointError, ModelError, RequestError
from lantern_accel.families.keys import Change, Rule, recipes_of, rename_keys
from lantern_accel.families.manifest import Manifest, ManifestT
from lantern_accel.families.published import ModelEntry, entries_in
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.records import first_wrong
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image

Prompt = str | int
#: Width and height of an image in pixels.
Size = tuple[int, int]
#: What to do about a drafter that cannot be used.
OTHER_DRAFTER = "name another with --use drafter=PATH, or decode without one: --use drafter=none"
#: Parts that are modules of ours, in the order in which they are loaded.
PARTS = ("target", "drafter", "vq")


@dataclass(frozen=True)
class Parts:
    """Parts that a user names next to the model, each a file or a folder; None: look for it.

    ``no_drafter`` decodes without one, ``no_head`` without a draft head. ``text_device``: where a large
    text encoder runs. ``embeddings``: a file with the prompts' features, in place of a text encoder.
    ``entry``: the published model that the files are, where the user says so.
    """

    vq: Path | None = None
    drafter: Path | None = None
    no_drafter: bool = False
    head: Path | None = None
    no_head: bool = False
    text: Path | None = None
    embeddings: Path | None = None
    text_device: Literal["device", "cpu"] = "device"
    entry: ModelEntry | None = None


@dataclass
class Found(Generic[ManifestT]):
    """What lies at a path: the manifest, and the file or folder of every part.

    ``missing`` says by part what is not there and how to get it. Without its ``vq`` a model generates
    nothing; without a ``drafter`` or ``text`` encoder some requests are refused.
    """

    manifest: ManifestT
    files: dict[str, Path]
    parts: Parts = Parts()
    missing: dict[str, str] = field(default_factory=dict)


#: See :attr:`lantern_accel.device.operations.Ops.text_encoder`.
Adapt: TypeAlias = Callable[[nn.Module], nn.Module] | None


class TextSource(Protocol):
    """Where caption features come from: a text encoder, or a file of features."""

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return features ``[n, prefix, C]``, left-padded and zero there, and a mask bool [n, prefix]."""
        ...

    def release(self) -> None:
        """Free what encoding held, if it is large: called where decoding needs its memory."""
        return None  # most hold little


@dataclass
class Model(Generic[ManifestT]):
    """A model in memory: target, drafter and tokenizer on the device; ``missing`` is Found's.

    ``rounding``: the quality loss of the target's quantized weights; None: they are the model's own.
    ``trunk``: a fingerprint of the target's weights as its files have them.
    """

    manifest: ManifestT
    target: Any
    drafter: Any
    vq: Any
    text: TextSource | None
    weights_hash: str
    family: Family[ManifestT]
    missing: Mapping[str, str] = field(default_factory=dict)
    rounding: Any = None
    trunk: str = ""

    def __post_init__(self) -> None:
        self.family.pair(self)


@dataclass(frozen=True)
class Conditions:
    """One condition per prompt, on the device: ``condition [n, ...]``, ``mask`` bool ``[n, prefix]``.

    ``shape`` says what networks they need (:meth:`Family.target_for_shape`) where a model has several.
    """

    condition: Tensor
    mask: Tensor
    shape: Hashable = None

    def pick(self, index: Sequence[int]) -> Conditions:
        """Return the conditions of these prompts, in this order."""
        chosen = list(index)
        return replace(self, condition=self.condition[chosen], mask=self.mask[chosen])


@dataclass(frozen=True)
class Rows:
    """What an engine starts from: ``condition [R, ...]`` (``[cond; uncond]``) and ``mask``.

    ``mask`` is bool ``[B, prefix]`` where the guidance branches share it, else ``[R, prefix]``.
    """

    condition: Tensor
    mask: Tensor


def check_two_way(model: Model, sampling: Sampling) -> None:
    """Raise :class:`RequestError` for guidance by an image, of a model that knows prompts alone."""
    if sampling.branches == 3:
        raise RequestError(
            f"the model {model.manifest.name!r} has two-way guidance; leave cfg_scale_image out",
            field="cfg_scale_image",
        )


class Family(ABC, Generic[ManifestT]):
    """One kind of model: the abstract methods are all that one has to write, the others have defaults.

    Bases for common kinds: :class:`~lantern_accel.families.prompted_family.TokenFamily` (prompts of token
    ids, several image sizes), :class:`~lantern_accel.families.prompted_family.PromptedFamily` (and
    drafters), :class:`~lantern_accel.families.image_tokenizer.VQFamily` (pixels by a VQ decoder).
    """

    name: ClassVar[str]
    manifest_type: ClassVar[type[Manifest]]
    #: Whether its models can decode with guidance, so that rows without a prompt are worth training on.
    guided: ClassVar[bool] = True
    #: Files without which nothing can be generated.
    needs: ClassVar[tuple[str, ...]] = ("target", "vq")
    #: What :meth:`build` makes of the sizes of each part; without a drafter's none can be trained.
    target_type: ClassVar[type[nn.Module]]
    drafter_type: ClassVar[type[EagleDrafter] | None] = None
    vq_type: ClassVar[Callable[..., nn.Module]]
    #: By part the rules from the keys of its files to our names; a part without has our names.
    rules: ClassVar[Mapping[str, Sequence[Rule]]] = {}
    #: By part a pattern of keys that its file may hold for other parts.
    beside: ClassVar[Mapping[str, re.Pattern[str]]] = {}

    # --- files -> modules --------------------------------------------------------------------------

    @abstractmethod
    def detect(self, path: Path, parts: Parts) -> Found[ManifestT] | None:
        """Say what a file or folder in the family's own layout holds; None: not of this family.

        Reads headers only, and judges by keys and shapes. Raises :class:`CheckpointError` for files of
        this family that cannot be used.
        """

    def build(self, manifest: ManifestT, part: str, ops: TensorOps) -> nn.Module:
        """Build one of :data:`PARTS`; called under torch's ``meta`` device."""
        if part == "vq":
            return self.vq_type(manifest.vq)
        if part == "target":
            return self.target_type(manifest.target, ops=ops)
        assert self.drafter_type is not None  # no manifest of the family has one's sizes else
        return self.drafter_type(manifest.drafter, ops=ops)

    def recipes(
        self, part: str, checkpoint: Checkpoint, manifest: ManifestT
    ) -> Mapping[str, Recipe]:
        """Say by :meth:`names` and :meth:`changes` which keys every parameter of a part comes from."""
        named = self.names(part, checkpoint, manifest)
        return recipes_of(named, self.changes(part, checkpoint, manifest))

    def names(self, part: str, checkpoint: Checkpoint, manifest: ManifestT) -> dict[str, str]:
        """Return our names of a part's tensors with their keys, by :attr:`rules`."""
        return rename_keys(checkpoint, self.rules.get(part, ()))

    def changes(self, part: str, checkpoint: Checkpoint, manifest: ManifestT) -> Sequence[Change]:
        """Return what becomes of a part's tensors on their way: another order of rows, or fewer."""
        return ()

    def place_tables(self, module: nn.Module, device: torch.device) -> None:
        """Make the buffers that no checkpoint holds (rotary tables) on ``device``, in float32."""
        place = getattr(module, "place_tables", None)
        if place is not None:
            place(device)

    def pair(self, model: Model[ManifestT]) -> None:
        """Let a drafter read what it has of its target, once both are in memory."""

    # --- prompts -> conditions -> rows -> pixels ---------------------------------------------------

    @abstractmethod
    def examples(self, manifest: ManifestT) -> Sequence[Prompt]:
        """Return prompts that the model can generate, for measuring when the user names none."""

    @abstractmethod
    def conditions(
        self,
        model: Model[ManifestT],
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Turn prompts into conditions; ``size`` is the image's in pixels, None the model's own.

        Raises :class:`RequestError` for a prompt or a size that the model cannot take.
        """

    @abstractmethod
    def rows(self, model: Model[ManifestT], conditions: Conditions, sampling: Sampling) -> Rows:
        """Return the engine's rows: with guidance the unconditional ones follow."""

    @abstractmethod
    def pixels(self, model: Model[ManifestT], tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens, int64 ``[n, tokens]`` on the device, to uint8 ``[n, H, W, 3]`` there.

        ``shape`` is that of the conditions they were decoded from.
        """

    @abstractmethod
    def codebook(self, model: Model[ManifestT]) -> tuple[Tensor, bool]:
        """Return the codebook's raw rows ``[V, d]``, and whether the decoder normalises them."""

    def text(
        self, found: Found[ManifestT], device: torch.device, dtype: torch.dtype, adapt: Adapt = None
    ) -> TextSource | None:
        """Return what encodes prompts; None where the model takes no text, or has no encoder at hand.

        A large encoder is loaded on first use, not here. ``adapt``: the device's
        :attr:`~lantern_accel.device.operations.Ops.text_encoder`, for one that runs there.
        """
        return None

    def text_bytes(self, found: Found[ManifestT]) -> int:
        """Return the bytes of a large text encoder in float32; 0 where there is none."""
        return 0

    def join(self, model: Model[ManifestT], conditions: Sequence[Conditions]) -> Conditions:
        """Return conditions of one image size that were made apart as one."""
        first = conditions[0]
        condition = torch.cat([one.condition for one in conditions])
        return Conditions(condition, torch.cat([one.mask for one in conditions]), first.shape)

    def tokens(self, model: Model[ManifestT], codes: Tensor) -> Tensor:
        """Return the tokens ``[n, tokens]`` that an image of codes, int ``[n, rows, columns]``, has."""
        return codes.flatten(1)

    def pixels_together(self, model: Model[ManifestT]) -> int:
        """Return how many images :meth:`pixels` decodes at once; 0: all that it gets."""
        return 0

    def render_images(
        self,
        model: Model[ManifestT],
        tokens: Tensor,
        shape: Hashable,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
    ) -> list[Image] | None:
        """Return the images of tokens ``[n, tokens]`` where more than tokens is needed to make them.

        ``seeds``: one per image, of whatever randomness is left. None: :meth:`pixels` does. A family
        that cannot make images on this machine returns [] and says what is missing.
        """
        return None

    # --- image sizes -----------------------------------------------------------------------------

    def image_size(self, manifest: ManifestT, size: Size | None = None) -> Size:
        """Return width and height in pixels of the image by the manifest's ``grid``; None: its own.

        Raises :class:`RequestError` for a size that the model cannot generate.
        """
        rows, columns = manifest.grid(size)
        return columns * manifest.token_pixels, rows * manifest.token_pixels

    def target_for_shape(self, model: Model[ManifestT], shape: Hashable) -> tuple[Any, Any]:
        """Return target and drafter as the engine for conditions of this ``shape`` takes them."""
        return model.target, model.drafter

    def usual_shape(self, model: Model[ManifestT]) -> Hashable:
        """Return the shape that a usual request's conditions have, to plan memory with."""
        return None

    def shape_for(self, manifest: ManifestT, size: Size) -> Hashable:
        """Return the shape of a short prompt and an image of this size, to plan memory with.

        Raises :class:`RequestError` for a size that the model cannot generate.
        """
        manifest.grid(size)
        return None

    # --- models by name ----------------------------------------------------------------------------

    def list_published(self) -> Sequence[ModelEntry]:
        """Return the models that can be fetched by name: ``published.json`` in the family's folder."""
        return entries_in(Path(inspect.getfile(type(self))).parent, self.name)

    def from_entry(self, entry: ModelEntry) -> ManifestT:
        """Return the manifest of a published model, to plan with before anything is downloaded."""
        raise ModelError(f"the family {self.name!r} publishes no models")

    def manifest_of_size(
        self, name: str, values: Mapping[str, object] | None = None
    ) -> ManifestT | None:
        """Return the manifest of a model that is only a size, to measure with random weights.

        ``name``: a pattern of the family's, such as ``llamagen-l-512``; None: not of this family.
        ``values``: the target's configuration, which a file of this name holds.
        """
        return None

    @abstractmethod
    def tiny(self) -> ManifestT:
        """Return the manifest of a tiny model, which the conformance kit fills with random weights.

        Some tens of codes and tokens: what makes the family special (forced codes, masks, a drafter)
        should be in it, since this is what every device is checked with.
        """

    def tiny_conditions(self, model: Model[ManifestT], count: int, seed: int) -> Conditions:
        """Return random conditions of ``count`` prompts for the tiny model, fixed by ``seed``.

        The default takes the example prompts, which needs a tiny model that has its text encoder.
        """
        known = self.examples(model.manifest)
        chosen = [known[(seed + i) % len(known)] for i in range(count)]
        return self.conditions(model, chosen, torch.device("cpu"), torch.float32)

    # --- drafters ----------------------------------------------------------------------------------

    def drafters_near(self, found: Found[ManifestT]) -> Iterable[Path]:
        """Go through the folders and files that may hold a drafter of a model; here one next to it."""
        target = found.files["target"]
        return [(target if target.is_dir() else target.parent) / "drafter"]

    def with_drafter(self, manifest: ManifestT, path: Path) -> tuple[ManifestT, Path]:
        """Return a manifest with the drafter that lies at a path, and the checkpoint of its weights.

        Raises :class:`CheckpointError` for what is not a drafter, or one of another model.
        """
        if self.drafter_type is None:
            raise ModelError(f"models of the family {self.name!r} take no drafter")
        weights = drafter_weights(path)
        said = (weights if weights.is_dir() else weights.parent) / OWN_CONFIG
        if said.is_file():
            with explain_sizes(said, OTHER_DRAFTER):
                config = self.drafter_type.sizes.model_validate(read_json(said))
        else:
            config = self.published_drafter(weights, manifest.target)
        if (wrong := config.misfit(manifest.target)) is not None:
            raise CheckpointError(
                f"the drafter {weights} is of another model: {wrong}; {OTHER_DRAFTER}"
            )
        return manifest.model_copy(update={"drafter": config}), weights

    def published_drafter(self, path: Path, target: Any) -> EagleSizes:
        """Return the sizes of a drafter that others published, for a target of this configuration.

        Raises :class:`CheckpointError` for what is not one: here, for all.
        """
        raise CheckpointError(
            f"{path} is not a drafter for this model: it lacks {OWN_WEIGHTS} or {OWN_CONFIG}, which "
            f"`lantern-accel train drafter` writes; {OTHER_DRAFTER}"
        )

    def fitting_drafter(self, manifest: ManifestT) -> ManifestT:
        """Return a manifest with a drafter of one block as the target's are, where it has none."""
        if manifest.drafter is not None or self.drafter_type is None:
            return manifest
        sizes = self.drafter_type.sizes.fitting(manifest.target)
        return manifest.model_copy(update={"drafter": sizes})

    def fresh_drafter(self, target: Any, layers: int = 1, taps: Sequence[int] = ()) -> EagleDrafter:
        """Return an untrained drafter of some blocks that fits a target, in float32.

        Its embedding is the target's and stays as it is. ``taps``: blocks of the target that it reads.
        Raises :class:`ModelError` for blocks or taps that the family's drafters cannot have.
        """
        if self.drafter_type is None:
            raise ModelError(f"no drafter can be trained for models of the family {self.name!r}")
        try:
            sizes = self.drafter_type.sizes.fitting(target.config, layers, taps)
        except ValidationError as error:
            raise ModelError(
                f"a drafter for this model cannot have these blocks or taps: {first_wrong(error)}; "
                "change n_layer or taps"
            ) from None
        if (wrong := sizes.misfit(target.config)) is not None:
            raise ModelError(f"the drafter does not fit: {wrong}; name lower taps")
        drafter = self.drafter_type(sizes, ops=TensorOps())
        drafter.start(target)
        return drafter.train()
