"""Acceptance rules as values: each says how much mass near a drafted code may count for it.

A rule is one class, registered by its ``kind`` when it is defined. The command line, JSON, evaluation and
reports then take it, as ``--accept KIND:field=value,...`` and as ``{"kind": KIND, ...}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    WithJsonSchema,
)

from lantern_accel.bounds import MOST_CODES, whole
from lantern_accel.errors import StrategyError, did_you_mean, show, what_is_wrong
from lantern_accel.records import Frozen

if TYPE_CHECKING:
    from torch import Tensor

Model = TypeVar("Model", bound=BaseModel)
#: Fields whose name on the command line differs from the one in Python.
OPTION_NAMES = {"lam": "lambda"}


class Registered(Frozen):
    """A value whose class is registered by its ``kind`` when it is defined."""

    kind: str

    registry: ClassVar[dict[str, Any]]
    """Every class of a sort, by kind."""
    sort: ClassVar[str]
    """What errors call one of them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str):
            cls.registry[kind] = cls

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what follows ``KIND:`` on the command line: ``field=value,...``, in any order.

        A number alone is the value of the next field of integers, and another word that of the field
        which knows it: ``16,int6`` of a source with a length and weights.
        """
        kind = str(cls.model_fields["kind"].default)
        fields = {
            OPTION_NAMES.get(name, name): (name, field.annotation)
            for name, field in cls.model_fields.items()
            if name not in ("kind", "draft_lengths")
        }
        words = {word: name for name, of in fields.values() for word in get_args(of)}
        numbers = [name for name, of in fields.values() if of is int]
        values: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            option, equals, value = (piece.strip() for piece in part.partition("="))
            number = whole(value if equals else option)
            if equals and option in fields:
                values[fields[option][0]] = value if number is None else number
            elif not equals and option in words:
                values[words[option]] = option
            elif not equals and number is not None and numbers:
                values[numbers.pop(0)] = number
            else:
                known = (
                    f"{name}={'|'.join(map(str, get_args(of))) or '...'}"
                    for name, (_, of) in fields.items()
                )
                raise StrategyError(
                    f"the {cls.sort} {kind!r} has no field {show(option)}; it has "
                    + (", ".join(known) or "no fields")
                )
        return validate_model(cls, values, kind)

    @classmethod
    def of_kind(cls, kind: object) -> type[Self]:
        """Return the class of a kind, from a file or the command line; raises StrategyError."""
        if isinstance(kind, str) and kind in cls.registry:
            found: type[Self] = cls.registry[kind]
            return found
        near = did_you_mean(str(kind), cls.registry)
        raise StrategyError(f"no {cls.sort} is named {show(kind)}{near}")

    @classmethod
    def read_value(cls, value: object) -> object:
        """Return the value that a mapping or a text describes; any other passes as it is."""
        try:
            if isinstance(value, str):
                return cls.read(value)
            if isinstance(value, dict):
                return cls.of_kind(value.get("kind")).model_validate(value)
        except StrategyError as error:  # which would pass through what validates a whole file
            raise ValueError(str(error)) from None
        return value

    @classmethod
    def read(cls, text: str) -> Self:
        """Read one from text: ``exact``, ``lantern:k=100,delta=0.2``, ``lantern++:k=10,lambda=2``.

        Raises :class:`StrategyError` that names the kind, the field or the value that is wrong.
        """
        kind, _, rest = text.strip().partition(":")
        return cls.of_kind(kind).parse(rest)


@dataclass(frozen=True)
class Tried:
    """What a rule may look at when a draft is tested, on the device, in float32.

    ``px [...]`` is p(x), the target's probability of the drafted code; ``qx [...]`` the probability with
    which it was sampled (1 where it is certain); ``near [..., k]`` the probabilities of its ``k`` nearest
    neighbours, nearest first; ``p [..., V]`` the whole distribution, ``x [...]`` the code, ``depth``
    the level of the draft: 0 for the first after the root, and ``q [..., V]`` what it was sampled from,
    None where it is certain.
    """

    px: Tensor
    qx: Tensor
    near: Tensor
    p: Tensor
    x: Tensor
    depth: int | Tensor = 0
    q: Tensor | None = None


#: Every rule that is defined, by kind.
RULES: dict[str, type[AcceptanceRule]] = {}


class AcceptanceRule(Registered):
    """A rule for keeping a draft x: with probability ``min(1, A(x) / q(x))``, where ``A(x) >= p(x)``.

    A subclass gives ``kind`` (a ``Literal`` with a default), its fields, and :meth:`borrowed`.
    """

    k: int = Field(
        0, ge=0, le=MOST_CODES, description="nearest codes that may count for a drafted one"
    )

    registry: ClassVar[dict[str, Any]] = RULES
    sort: ClassVar[str] = "acceptance rule"
    #: Fields whose values may change from request to request without a new compilation, in the order in
    #: which :meth:`borrowed` gets them; all other fields fix the shape of the step.
    runtime_params: ClassVar[tuple[str, ...]] = ()
    #: Whether the rule can keep a draft that the exact test would reject.
    relaxed: ClassVar[bool] = True
    #: Whether :meth:`borrowed` reads ``Tried.p`` or ``q``; elsewhere p may have no columns.
    reads_distribution: ClassVar[bool] = False

    def count_neighbours(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many neighbours count (int32 ``[...]``) and the mass that they add, A(x) - p(x).

        ``runtime_params`` float32 ``[P]`` has the values of :attr:`runtime_params` on the device.
        """
        raise NotImplementedError(f"the rule {self.kind!r} does not say what neighbours add")

    def runtime_values(self) -> list[float]:
        """Return the values of :attr:`runtime_params`."""
        values = dict(self)
        return [float(values[name]) for name in self.runtime_params]

    @property
    def bucket(self) -> tuple[object, ...]:
        """What of the rule fixes the shape of a step: everything but its runtime_params."""
        rest = self.model_dump(exclude=set(self.runtime_params))
        return tuple(sorted(rest.items()))


class Exact(AcceptanceRule):
    """The ordinary speculative test; the output follows the target's distribution."""

    kind: Literal["exact"] = "exact"
    k: Literal[0] = 0
    relaxed: ClassVar[bool] = False

    def count_neighbours(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
        """Return nothing: A(x) = p(x)."""
        nothing = tried.px.new_zeros(tried.px.shape)
        return nothing.int(), nothing


#: How many neighbours may count.
Nearest = Annotated[
    int, Field(ge=1, le=MOST_CODES, description="nearest codes that may count for a drafted one")
]


class NearestCodes(AcceptanceRule):
    """A rule under which the nearest codes count, as many as keep their mass within a bound."""

    kind: str

    def bound_mass(self, px: Tensor, runtime_params: Tensor) -> Tensor:
        """Return the most mass that neighbours may add, ``[...]``."""
        raise NotImplementedError(f"the rule {self.kind!r} has no bound")

    def count_neighbours(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
        """Return J and c_J: the largest j with ``c_j <= B``, and the mass of the j nearest codes."""
        import torch  # rules are read where torch is not loaded yet

        mass = tried.near.cumsum(dim=-1)
        within = mass <= self.bound_mass(tried.px, runtime_params).unsqueeze(-1)
        count = within.sum(dim=-1, dtype=torch.int32)
        return count, (mass * within).amax(dim=-1)


class Lantern(NearestCodes):
    """LANTERN (arXiv 2410.03355): neighbours count while their mass is at most ``delta``."""

    kind: Literal["lantern"] = "lantern"
    k: Nearest = 1000
    delta: float = Field(0.2, gt=0, le=1, description="most mass that the neighbours may add")
    runtime_params: ClassVar[tuple[str, ...]] = ("delta",)

    def bound_mass(self, px: Tensor, runtime_params: Tensor) -> Tensor:
        """Return delta, whatever p(x) is."""
        return runtime_params[0].expand(px.shape)


class LanternPP(NearestCodes):
    """LANTERN++ (arXiv 2502.06352): a drafted code counts for at most ``lam`` times its probability."""

    kind: Literal["lantern++"] = "lantern++"
    k: Nearest = 10
    lam: float = Field(
        2.0,
        ge=1,
        le=1e30,
        allow_inf_nan=False,
        description="lambda: bound (lambda - 1) p(x) on the added mass",
    )
    runtime_params: ClassVar[tuple[str, ...]] = ("lam",)

    def bound_mass(self, px: Tensor, runtime_params: Tensor) -> Tensor:
        """Return ``(lambda - 1) p(x)``."""
        return (runtime_params[0] - 1.0) * px


_SCHEMA = {
    "type": "object",
    "required": ["kind"],
    "properties": {"kind": {"type": "string"}, "k": {"type": "integer", "minimum": 0}},
    "description": "an acceptance rule by its kind, with the fields of that rule",
}
Acceptance = Annotated[
    SerializeAsAny[AcceptanceRule],
    BeforeValidator(AcceptanceRule.read_value),
    WithJsonSchema(_SCHEMA),
]


def validate_model(model: type[Model], values: object, what: str) -> Model:
    """Build a pydantic model, turning its complaint into a one-sentence :class:`StrategyError`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        field = where.rpartition(".")[2] or None
        where = where.replace("lam", "lambda") if where.endswith("lam") else where
        where = f"{what}: {where}" if where else what
        raise StrategyError(f"{where}{what_is_wrong(first)}", field=field) from None
