"""A strategy as a value: a source of drafts, an acceptance rule, a residual and a coupling."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from lantern_accel.errors import StrategyError
from lantern_accel.records import Frozen
from lantern_accel.strategy.rules import Acceptance, Exact, validate_model
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.sources import AdaptiveSource, AnyKind, DraftConfig, DraftLength, NoTree

Residual = Literal["aggregate", "official", "optimal"]
#: ``invariant``: noise of the seed, the image, the position and the code decides every token, drafted or
#: not, so that no draft changes an image (Daliri, Musco, Suresh, arXiv 2408.07978). ``maximal``: drafts
#: are tested by a uniform each, and rejected ones replaced from the residual, as the papers have it.
Coupling = Literal["invariant", "maximal"]
#: ``decoder``: the space in which the decoder looks codes up (the unit sphere for LlamaGen); ``raw``: the
#: codebook's rows as they are stored, as the official tables are.
NeighbourSpace = Literal["decoder", "raw"]
#: The fastest of what is allowed, chosen for the device, the model, the batch and the image.
AUTO = "auto"
#: Strategies that draft in a window and need no drafter; exact.
WINDOW_STRATEGIES = ("sjd", "scd")
#: Drafts by a copy of the target's own quantized weights; exact.
SELF = "self"
_WINDOWS = ", ".join(map(repr, WINDOW_STRATEGIES))
#: For errors: the strategies that work on a model without a drafter.
NO_DRAFTER = f"'vanilla', {_WINDOWS}, {SELF!r}"


class Strategy(Frozen):
    """How a step drafts and accepts."""

    name: str = "custom"
    drafts: AnyKind = NoTree()
    acceptance: Acceptance = Exact()
    residual: Residual = "aggregate"
    coupling: Coupling | None = Field(
        None,
        description="how tokens and drafts are sampled together; None: invariant with exact acceptance, "
        "else maximal",
    )
    neighbour_space: NeighbourSpace | None = Field(
        None, description="where neighbours are measured; None: as the model says"
    )
    tv_budget: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="most total variation that relaxation may use per token; needs temperature > 0",
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_residual(cls, values: object) -> object:
        """Take the residual under which a budget is kept, in place of the default one."""
        if isinstance(values, dict) and values.get("tv_budget") is not None:
            if values.get("residual") == "official":
                raise ValueError(
                    "the official residual keeps no budget of total variation; use residual "
                    "optimal, or leave tv_budget out"
                )
            values = {**values, "residual": "optimal"}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Strategy:
        # Of auto it says what may be chosen: its windows are exact.
        relaxed = self.acceptance.relaxed and not (self.name == AUTO and self.drafts.windowed)
        if reason := self.drafts.refusal(relaxed, self.coupling):
            raise ValueError(reason)
        if self.tv_budget is not None and not self.acceptance.relaxed:
            raise ValueError(
                "exact acceptance uses no total variation; leave tv_budget out, or choose "
                "lantern or lantern++"
            )
        if self.coupling == "invariant" and self.acceptance.relaxed:
            raise ValueError(
                "with the coupling 'invariant' drafts are compared, not tested, so that nothing can be "
                "relaxed; choose the coupling 'maximal', or exact acceptance"
            )
        return self

    @property
    def needs_drafter(self) -> bool:
        """Whether drafts are a drafter's."""
        return self.drafts.needs_drafter

    def check_drafter(self, there: bool) -> None:
        """Raise :class:`StrategyError` where a drafter is needed and none is ``there``."""
        if self.needs_drafter and not there:
            raise StrategyError(
                f"the strategy {self.name!r} drafts tokens, but this model has no drafter; these "
                f"strategies need none: {NO_DRAFTER}; or train one with `lantern-accel train drafter`"
            )

    @property
    def invariant(self) -> bool:
        """Whether the image depends on the seed alone, and on no draft (:data:`Coupling`)."""
        if self.coupling is None:
            return self.drafts.windowed or not self.acceptance.relaxed
        return self.coupling == "invariant"

    @property
    def lengths(self) -> tuple[DraftLength, ...]:
        """The lengths between which the host moves; () where all steps are alike."""
        return self.drafts.draft_lengths if isinstance(self.drafts, AdaptiveSource) else ()

    def with_drafts(self, drafts: DraftConfig | None = None, **changes: object) -> Strategy:
        """Return it with other drafts, or with fields of its drafts changed; nothing is checked."""
        made = (drafts or self.drafts).model_copy(update=changes)
        return self.model_copy(update={"drafts": made})

    @property
    def detail(self) -> str:
        """Source of drafts and acceptance rule in a few words."""
        drafts, rule = self.drafts, self.acceptance
        nodes, deep = drafts.size
        words = [
            f"{drafts.kind}, {nodes - 1} drafts, {deep} deep" if nodes > 1 else "one token per step"
        ]
        words += [f"in {drafts.copy_weights}"] if drafts.copy_weights else []
        fields = rule.model_dump(exclude={"kind"}) if rule.relaxed else {}
        symbols = {"delta": "δ", "lam": "λ"}
        words += [
            f"{symbols.get(name, name)} {value:g}" if isinstance(value, float | int) else str(value)
            for name, value in fields.items()
        ]
        if self.tv_budget is not None:
            words.append(f"TV {self.tv_budget:g} at most")
        if fields and self.residual != "aggregate":
            words.append(f"{self.residual} residual")
        return ", ".join(words)

    @property
    def bucket(self) -> tuple[object, ...]:
        """What fixes the shape of a step: all but the name and the values that are data."""
        # What a length costs and adds is data: the host reads it.
        hidden = {"__all__": {"cost", "tokens_per_step"}}
        return (
            self.drafts.model_dump_json(exclude={"name": True, "draft_lengths": hidden}),
            self.acceptance.bucket,
            self.residual,
            self.invariant,
            self.neighbour_space,
            self.tv_budget is not None,
        )

    @property
    def neighbours(self) -> int:
        """Columns of the neighbour table that the acceptance rule and the residual read."""
        if not self.acceptance.k:
            return 0
        # The official residual removes one neighbour more than it may count.
        return self.acceptance.k + (1 if self.residual == "official" else 0)

    def override(self, **changes: object) -> Strategy:
        """Return this strategy with ``drafts``, ``window``, ``residual``, ``k``, ... changed.

        ``window`` is a window's length; another window as ``drafts`` changes what it was given.

        None leaves a field as it is. Raises :class:`StrategyError` where the acceptance rule has no
        such field, or the value is out of range.
        """
        values = self.model_dump()
        for key, value in changes.items():
            if value is None:
                continue
            if key == "drafts" and isinstance(value, DraftConfig):
                values["drafts"] = self._drafts_by(value)
            elif key == "window":
                if not self.drafts.windowed:
                    raise StrategyError(
                        f"the strategy {self.name!r} has no window; choose one of {_WINDOWS}"
                    )
                values["drafts"]["length"] = value
            elif key in values:
                values[key] = value.model_dump() if isinstance(value, BaseModel) else value
            elif (
                key in type(self.acceptance).model_fields
                and key != "kind"
                and self.acceptance.relaxed
            ):
                values["acceptance"][key] = value
            else:
                option = "lambda" if key == "lam" else key
                raise StrategyError(
                    f"the strategy {self.name!r} has no {option}: its acceptance rule is "
                    f"{self.acceptance.kind!r}; leave {option} out or choose another strategy",
                    field=key,
                )
        return validate_model(Strategy, values, "strategy")

    def _drafts_by(self, drafts: DraftConfig) -> dict[str, object]:
        """Return the values of other drafts: of a drafter in place of its own, else of the same kind."""
        if not (self.drafts.apart or drafts.apart):
            return drafts.model_dump()
        if type(self.drafts) is type(drafts):
            return {**self.drafts.model_dump(), **drafts.model_dump(exclude_unset=True)}
        other = _WINDOWS if drafts.windowed else repr(drafts.kind)
        ask = other if drafts.apart else "a strategy with a drafter, such as 'eagle' or 'lantern++'"
        raise StrategyError(
            f"the strategy {self.name!r} has drafts of the kind {self.drafts.kind!r} and takes none of "
            f"the kind {drafts.kind!r}; choose {ask}"
        )


def check_settings(strategy: Strategy, sampling: Sampling, vocab: int) -> None:
    """Raise :class:`StrategyError` for a setting that ``vocab`` codes cannot serve."""
    k = strategy.acceptance.k
    most = vocab - 1 - (strategy.neighbours - k)
    if k > most:
        raise StrategyError(
            f"k = {k} is too many for a codebook of {vocab} codes; choose k between 1 and {most}"
        )
    if sampling.top_k > vocab:
        raise StrategyError(
            f"top_k = {sampling.top_k} is more than the codebook's {vocab} codes; use 0 for all"
        )
    if strategy.tv_budget is not None and sampling.greedy:
        raise StrategyError(
            "a budget of total variation has no meaning at temperature 0, where the target has one "
            "token; leave tv_budget out or choose a temperature above 0"
        )
    widest = strategy.drafts.widest
    if widest > vocab:
        raise StrategyError(
            f"the drafts have {widest} siblings, but there are {vocab} codes; choose a narrower tree"
        )
