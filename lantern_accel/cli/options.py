"""Options that several commands take, and how a command takes a group of them as one value."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_accel.bounds import MOST_THREADS, whole
from lantern_accel.cli.console import bar, note, warn
from lantern_accel.errors import RequestError, StrategyError, did_you_mean
from lantern_accel.generation.settings import Settings
from lantern_accel.strategy.values import AUTO, SELF, STRATEGIES

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

#: One option that several commands have, as the type of a parameter or of a group's field.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
#: What ``--use`` names, as :func:`lantern_accel.load` takes it.
PARTS = ("vq", "drafter", "head", "text_encoder", "text_device", "embeddings")
Weights = Annotated[
    str,
    typer.Option(
        help="Weights of the target model: full, int8, int6 or int4. The quality loss of quantized "
        "weights is measured once."
    ),
]
OPTION = typer.Option(
    [], metavar="NAME=VALUE", help="Option of the backend, such as compile=on. Repeatable."
)
USE = typer.Option(
    [],
    metavar="NAME=PATH",
    help="Path of a model part: vq (image tokenizer), drafter, head, text-encoder or embeddings (text "
    "features of the prompts). drafter=none and head=none leave a part out. text-device=cpu keeps the "
    "text encoder off the device. Repeatable.",
)


def option(text: str | None, *names: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a group of options: ``text`` is its help; ``more`` as typer takes it."""
    metadata = {"option": typer.Option(default, *names, help=text, **more)}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OnDevice:
    """What a command computes on."""

    device: str = option(
        "Backend name, NAME:INDEX, gpu, or auto (the best here).", "--device", "-d", default="auto"
    )
    threads: int | None = option(
        "Processor threads, for backends that use them.", min=1, max=MOST_THREADS
    )
    option: list[str] = field(default_factory=list, metadata={"option": OPTION})

    @property
    def options(self) -> dict[str, Any]:
        """The backend's options by name; raises RequestError where one cannot be read."""
        return read_options(self.option, self.threads)


@dataclass(frozen=True)
class Loading(OnDevice):
    """What a command loads, and what it computes on."""

    model: str = option(
        "Model name from `lantern-accel models`, or a folder or file of weights.",
        "--model",
        "-m",
        default="lantern-emoji",
    )
    dtype: Dtype = "auto"

    def keywords(self) -> dict[str, Any]:
        """Return these options as :func:`lantern_accel.load` takes them."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        del given["threads"], given["option"]
        return {**given, "options": self.options}

    @contextmanager
    def open(self, quiet: bool = False, **more: Any) -> Iterator[Pipeline]:
        """Load the model with a bar, and lines for licences and downloads; close it after the block.

        ``more``: further keywords of :func:`lantern_accel.load`.
        """
        import lantern_accel

        given = {**self.keywords(), **more}
        with bar("loading", quiet, bytes_=True) as advance:
            loading = None if advance is None else lambda part, *far: advance(*far)
            pipeline = lantern_accel.load(**given, tell=note, on_loading=loading)
        with pipeline:
            if pipeline.backend.slowed and not quiet:
                warn(pipeline.backend.slowed, "slow")
            yield pipeline


@dataclass(frozen=True)
class LoadingParts(Loading):
    """A model whose parts may lie elsewhere, or be quantized."""

    weights: Weights = "full"
    use: list[str] = field(default_factory=list, metadata={"option": USE})

    def keywords(self) -> dict[str, Any]:
        given = super().keywords()
        parts = read_parts(given.pop("use"))
        return {**given, **parts}


def strategy_words(given: Sequence[str], presets: bool = False) -> list[str]:
    """Read ``--strategy``, repeated or with ``;`` between, and refuse unknown names before any work.

    Names alone may have commas between. A strategy with settings (``lantern++:k=10,lambda=2``) or a
    ``.json`` file stays whole and is not looked up; it and presets may stand where ``presets`` says so.
    Raises StrategyError and RequestError.
    """
    from lantern_accel.strategy.presets import PRESETS
    from lantern_accel.strategy.sources import named_sources

    found = []
    known = {AUTO, SELF, *STRATEGIES, *named_sources()}
    known |= {one.name for one in PRESETS} if presets else set()
    for text in (part.strip() for one in given for part in one.split(";")):
        if ":" in text or text.endswith(".json"):
            if "," in text.partition(":")[0]:
                raise StrategyError(
                    f"{text[:80]!r}: settings have commas between them, so strategies need ';', such as "
                    "'vanilla;lantern:k=10,delta=0.4'"
                )
            if not presets:
                raise StrategyError(
                    f"a strategy is a name alone here, not {text[:80]!r}; `generate` and `evaluate "
                    "--suite` take settings and files"
                )
            found.append(text)
            continue
        for word in words_of([text]):
            if word not in known:
                raise StrategyError(f"unknown strategy {word[:80]!r}{did_you_mean(word, known)}")
            found.append(word)
    if not found:
        raise RequestError(
            "no strategy is named; give names with commas between, such as vanilla,eagle"
        )
    return list(dict.fromkeys(found))


def words_of(given: Sequence[str]) -> list[str]:
    """Return the words of an option that is repeated, or has commas between them."""
    return [word.strip() for text in given for word in text.split(",") if word.strip()]


def read_options(given: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Read ``name=value`` pairs; raises RequestError for what is none."""
    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise RequestError(f"the option {text[:80]!r} is not of the form NAME=VALUE")
        number = whole(value)
        options[name] = value if number is None else number
    return options


def read_parts(given: Sequence[str], known: Sequence[str] = PARTS) -> dict[str, Any]:
    """Read ``--use``, NAME=PATH; raises RequestError for a name that is not ``known``, or no path."""
    parts: dict[str, Any] = {}
    for text in given:
        name, _, path = text.partition("=")
        key = name.strip().replace("-", "_")
        if key not in known or not path:
            listed = ", ".join(one.replace("_", "-") for one in known)
            raise RequestError(
                f"--use takes NAME=PATH with one of the names {listed}, not {text[:80]!r}"
                f"{did_you_mean(key, known)}"
            )
        parts[key] = path
    return parts


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer read one option for every field of a parameter that is a dataclass.

    A field is ``Annotated`` with its option. A command that ends in ``**settings`` gets an option for
    every field of :class:`~lantern_accel.generation.settings.Settings`.
    """
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        p.name: p.annotation for p in own.parameters.values() if is_dataclass(p.annotation)
    }
    shown: list[inspect.Parameter] = []
    for one in own.parameters.values():
        if one.name in groups:
            shown += _group_parameters(groups[one.name])
        elif one.kind is inspect.Parameter.VAR_KEYWORD:
            shown += _settings_parameters()
        else:
            shown.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        return command(**given)

    flat.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in shown}
    return flat


def _group_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of a dataclass as typer's options."""
    kinds = typing.get_type_hints(group, include_extras=True)
    for one in fields(group):
        default = one.metadata.get("option", one.default)
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(one.name, kind, default=default, annotation=kinds[one.name])


def _settings_parameters() -> Iterator[inspect.Parameter]:
    """Yield the fields of :class:`Settings` as typer's options."""
    for name, field_ in Settings.model_fields.items():
        extra = field_.json_schema_extra
        if not isinstance(extra, dict):
            continue
        given = [str(one) for one in extra["names"]]  # type: ignore[union-attr]
        long = [] if any(one.startswith("--") for one in given) else [f"--{name.replace('_', '-')}"]
        # On the command line a field has the first plain type of its union.
        types = [t for t in typing.get_args(field_.annotation) if t in (bool, int, float, str)]
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, *long, *given, help=field_.description),
            annotation=next(iter(types), str) if extra["shown"] != "str" else str,
        )
