"""Race the official LlamaGen sampler, and transformers' loop, against ours on random weights.

``python tools/race_official.py CLONE --size B --pixels 256 --device cpu --dtype bfloat16 -o race.json``
with a clone of FoundationVision/LlamaGen. Nothing of it is copied: it is imported from the clone. The
size ``bundled`` has the width, depth and codes of ``lantern-emoji``, and classes in place of captions.

Runners: ``official`` is ``generate`` as its sampling script calls it; ``gpt-fast`` compiles the official
``decode_one_token`` whole, sampling included, as gpt-fast does; ``transformers`` is ``generate`` of a
LlamaForCausalLM of the same sizes, with a static cache and guidance's rows, which are not combined;
``ours`` is the strategy vanilla, captured where the device captures. The last two need no clone.
``gpt-fast`` keeps the official caches between calls, which the official code makes again each time: this
favours it, since new caches would be compiled for again.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from racing import Done, Race, Runner, race

from lantern_accel.checkpoints.loading import fill
from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.cli.console import say
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend, dtype_policy
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.families.keys import LLAMA, recipes_of, rename_keys
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT, llamagen_config
from lantern_accel.nn.transformer import pack
from lantern_accel.strategy.values import Sampling, Strategy
from lantern_accel_profiles.measure.environment import describe
from lantern_accel_profiles.store import resume

RUNNERS = {
    "official": "eager, caches made again each call",
    "gpt-fast": "torch.compile(decode_one_token, mode=reduce-overhead, fullgraph=True), caches kept",
    "ours": "vanilla",
    "transformers": "generate of LlamaForCausalLM, static cache; guided rows are not combined",
}
#: Greedy tokens that are compared before the race.
GREEDY = 32
CLASSES = (207, 360, 387, 974, 88, 979, 417, 279)


def _modules(clone: Path) -> tuple[Any, Any]:
    """Import the official model and sampler from the clone."""
    if not (clone / "autoregressive" / "models" / "gpt.py").is_file():
        raise RequestError(
            f"{clone} has no autoregressive/models/gpt.py; give the folder of a clone of "
            "https://github.com/FoundationVision/LlamaGen"
        )
    sys.path.insert(0, str(clone))
    gpt = importlib.import_module("autoregressive.models.gpt")
    return gpt, importlib.import_module("autoregressive.models.generate")


def config_of(size: str, pixels: int) -> LlamaGenConfig:
    """Return the sizes of a published model, or of the bundled one with classes as conditions."""
    if size == "bundled":
        if pixels != 256:
            raise RequestError("the size bundled has 256 tokens: leave --pixels at 256")
        return LlamaGenConfig(
            dim=256, n_layer=16, n_head=4, vocab_size=2048, grid=16, conditioning="class",
            prefix_length=1,
        )  # fmt: skip
    return llamagen_config(size, pixels)


def official_model(gpt: Any, size: str, pixels: int, seed: int) -> Any:
    """Build the official model on the host in float32 with seeded random weights, head included."""
    config = config_of(size, pixels)
    torch.manual_seed(seed)
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "dim": config.dim}
    model = gpt.Transformer(
        gpt.ModelArgs(
            **sizes,
            vocab_size=config.vocab_size,
            block_size=config.num_tokens,
            num_classes=config.num_classes,
            cls_token_num=1,
            model_type="c2i",
        )
    )
    torch.nn.init.normal_(model.output.weight, std=0.05)  # the official initial head is zero
    return model.eval()


def our_target(
    official: Any, size: str, pixels: int, backend: Backend, dtype: torch.dtype
) -> LlamaGenGPT:
    """Build our target on the weights of the official model, or on random ones."""
    target = LlamaGenGPT(config_of(size, pixels), ops=backend)
    tables = target.rope_cos, target.rope_sin
    if official is None:
        with torch.no_grad():
            for weight in target.parameters():
                weight.normal_(std=0.02)
        target.to(backend.device, dtype)
    else:
        held = HeldFile(Path("the official model"), official.state_dict())
        fill(
            target,
            Checkpoint(held.path, [held]),
            recipes_of(rename_keys(held.tensors, LLAMA)),
            dtype=dtype,
            device=backend.device,
            what=held.path.name,
        )
    target.eval().requires_grad_(False)
    target.rope_cos, target.rope_sin = (table.to(backend.device) for table in tables)
    pack(target, backend)
    return target


def transformers_loop(
    given: argparse.Namespace, backend: Backend, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Return transformers' loop on random weights of the size, with as many rows as guidance has."""
    import transformers

    sizes = config_of(given.size, given.pixels)
    config = transformers.LlamaConfig(
        hidden_size=sizes.dim,
        intermediate_size=sizes.hidden_dim,
        num_hidden_layers=sizes.n_layer,
        num_attention_heads=sizes.n_head,
        num_key_value_heads=sizes.n_head,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.num_tokens + 1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(given.seed)
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(backend.device, dtype).eval()
    rows = given.batch * (2 if given.cfg > 1 else 1)
    start = torch.ones(rows, 1, dtype=torch.long, device=backend.device)
    settings = {"do_sample": True, "top_k": given.top_k, "cache_implementation": "static"}
    count = sizes.num_tokens

    @torch.inference_mode()
    def generate() -> torch.Tensor:
        mask = torch.ones_like(start)
        made = model.generate(
            start, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, **settings
        )
        tokens: torch.Tensor = made[: given.batch, 1:]
        return tokens

    return generate


def sibling(model: Any) -> Any:
    """Return a copy that has caches of its own and shares the weights."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def keep_caches(model: Any) -> None:
    """Let ``setup_caches`` do its work once only."""
    make = model.setup_caches
    made: list[bool] = []

    def once(**sizes: Any) -> None:
        if not made:
            make(**sizes)
            made.append(True)

    model.setup_caches = once


class Ours:
    """Our sampler: one engine, captured where the device captures."""

    def __init__(self, engine: Engine, backend: Backend, classes: torch.Tensor) -> None:
        g = engine.geometry
        self.engine = engine
        target: Any = engine.verifying.target
        free = torch.full_like(classes, target.config.num_classes)
        self.rows = torch.cat((classes, free)) if g.branches > 1 else classes
        self.mask = torch.ones(g.batch, g.prefix, dtype=torch.bool, device=backend.device)
        for name, one in engine.host_functions().items():
            engine.functions[name] = backend.capture(one, name)

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """Decode every image; int64 ``[B, tokens]`` on the host."""
        g = self.engine.geometry
        uniforms = self.engine.randomness(0, list(range(g.batch)))
        self.engine.start(self.rows, self.mask, uniforms)
        return self.engine.run().tokens


def same_tokens(
    gpt: Callable[[], torch.Tensor], ours: Ours, tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Compare greedy tokens; float32 must agree in all of them, or the models are not the same."""
    official = gpt().cpu().long()
    equal = int((official == ours()[:, :tokens]).sum())
    if dtype == torch.float32 and equal != official.numel():
        raise RequestError(
            f"in float32 only {equal} of {official.numel()} greedy tokens agree with the official "
            "model's: this is not a race of the same models"
        )
    return {"greedy_tokens": official.numel(), "greedy_tokens_equal": equal}


def run(given: argparse.Namespace) -> Race:
    """Build both, check that they are one model, race them."""
    gpt: Any = None
    sampler: Any = None
    if given.clone:
        gpt, sampler = _modules(Path(given.clone))
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in given.option)
    with open_backend(given.device, options) as backend, warnings.catch_warnings():
        # The official code asks for attention's backends by a name that torch wants replaced.
        warnings.filterwarnings("ignore", category=FutureWarning)
        dtype = dtype_policy(backend, given.dtype).compute
        tokens = config_of(given.size, given.pixels).num_tokens
        sampling = Sampling(temperature=1.0, top_k=given.top_k, cfg_scale=given.cfg)
        settings = {
            "size": given.size,
            "pixels": given.pixels,
            "batch": given.batch,
            "tokens": tokens,
            "sampling": sampling.model_dump(mode="json"),
            "seed": given.seed,
            "device": str(backend.device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "options": {k: str(v) for k, v in options.items()},
        }
        report = Race(settings=settings, environment=describe(backend, dtype))
        report = resume(given.output, report, lambda stored: stored.settings, "race_official.py")
        known = {runner.name for runner in report.runners}
        report.runners += [Runner(name=n, note=RUNNERS[n]) for n in given.runner if n not in known]
        base = gpt and official_model(gpt, given.size, given.pixels, given.seed).to(dtype)
        target = our_target(base, given.size, given.pixels, backend, dtype)
        classes = torch.tensor([CLASSES[i % len(CLASSES)] for i in range(given.batch)])
        classes = classes.to(backend.device)

        def ours(settings: Sampling) -> Ours:
            engine = Engine(
                target, None, backend, Strategy(name="vanilla"), settings, batch=given.batch
            )
            return Ours(engine, backend, classes)

        def official(model: Any, greedy: bool = False) -> Callable[[], torch.Tensor]:
            def generate() -> torch.Tensor:
                made: torch.Tensor = sampler.generate(
                    model,
                    classes,
                    GREEDY if greedy else tokens,
                    cfg_scale=given.cfg,
                    temperature=1.0,
                    top_k=0 if greedy else given.top_k,
                    top_p=1.0,
                    sample_logits=not greedy,
                )
                return made

            return generate

        if base is not None:
            base.to(backend.device)
            say("greedy tokens of both, compared", to_stderr=True, style="dim")
            greedy = ours(sampling.model_copy(update={"temperature": 0.0, "top_k": 0}))
            report.checks = same_tokens(official(base, greedy=True), greedy, GREEDY, dtype)
            del greedy
        torch.set_float32_matmul_precision("high")  # as the official script has it
        racers: dict[str, Callable[[], torch.Tensor]] = {}
        for name in given.runner:
            if name == "official":
                racers[name] = official(base)
            elif name == "gpt-fast":
                model = sibling(base)
                keep_caches(model)
                racers[name] = _gpt_fast(sampler, official(model))
            elif name == "transformers":
                racers[name] = transformers_loop(given, backend, dtype)
            else:
                racers[name] = ours(sampling)
        return race(
            backend,
            report,
            {name: partial(_count, racer) for name, racer in racers.items()},
            repeats=given.repeats,
            warmups=given.warmups,
            out=given.output,
            say=lambda text: say(text, to_stderr=True, style="dim"),
        )


def _count(decode: Callable[[], torch.Tensor]) -> Done:
    return {"tokens": decode().numel()}


def _gpt_fast(sampler: Any, generate: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Let the official loop call a compiled ``decode_one_token`` while ``generate`` runs."""
    eager = sampler.decode_one_token
    compiled: Any = torch.compile(eager, mode="reduce-overhead", fullgraph=True)

    def one_token(model: Any, x: torch.Tensor, *rest: Any, **sampling: Any) -> Any:
        # A replay overwrites the last one's output, which is this one's input.
        return compiled(model, x.clone(), *rest, **sampling)

    def run() -> torch.Tensor:
        sampler.decode_one_token = one_token
        try:
            return generate()
        finally:
            sampler.decode_one_token = eager

    return run


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, race, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clone", nargs="?", help="folder of a clone of FoundationVision/LlamaGen")
    parser.add_argument("--size", default="B", choices=["bundled", "B", "L", "XL", "XXL", "3B"])
    parser.add_argument("--pixels", type=int, default=256, choices=[256, 384, 512])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the backend; repeat for several",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--top-k", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runner", action="append", choices=list(RUNNERS), help="repeat; default: official, ours"
    )
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON; a race goes on")
    given = parser.parse_args(arguments)
    given.runner = given.runner or ["official", "ours"]
    if given.clone is None and {"official", "gpt-fast"} & {*given.runner}:
        parser.error("official code needs CLONE; without, give --runner transformers --runner ours")
    try:
        report = run(given)
    except LanternError as error:
        say(str(error), label="error", style="bold red", to_stderr=True)
        return 2
    print(report.table())
    print(f"greedy tokens alike: {report.checks}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
