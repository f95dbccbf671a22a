"""Race the official LANTERN loop against ours: the same weights, the same tree, one image per lap.

``python tools/race_lantern.py CLONE --size XL --device cpu -o race.json`` with a clone of
jadohu/LANTERN and transformers 4 installed. Nothing of the clone is copied: it is imported. Its text
encoder is replaced by given features and its table of neighbours by ours, which is as wide as needed.

Weights are random (``--size``) or a folder's (``--weights``: target, drafter and captions as
safetensors, configurations as JSON). A lap times the steps, without text and prefill; a step's cost
depends on how many drafts are accepted, so it stands next to the tokens per step of both. Random
numbers differ, so the images do; with ``--temperature 0`` and no padding the tokens are the same.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
from race_weights import (
    PREFIX,
    Weights,
    hugging_face_names,
    random_weights,
    stored_weights,
)
from racing import Lap, Race, Runner, race
from torch import Tensor

from lantern_accel.cli.console import say
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.families.llamagen.model import LlamaGenConfig, llamagen_config
from lantern_accel.measure.environment import describe
from lantern_accel.nn.transformer import pack
from lantern_accel.store import resume
from lantern_accel.strategy.rules import Acceptance, Exact, LanternPP
from lantern_accel.strategy.trees import parse_tree
from lantern_accel.strategy.values import Sampling, StaticTree, Strategy

# --- the official side --------------------------------------------------------------------------


class _Captions:
    """Takes the place of the official T5 encoder; returns the one caption."""

    found: tuple[Tensor, Tensor]

    def __init__(self, **settings: Any) -> None:
        pass

    def get_text_embeddings(self, prompt: list[str]) -> tuple[Tensor, Tensor]:
        return self.found


def _official_modules(clone: Path) -> Any:
    """Import the official LlamaGen decoder without the other models of its package."""
    if not (clone / "models" / "ea_model_llamagen.py").is_file():
        raise RequestError(
            f"{clone} has no models/ea_model_llamagen.py; give the folder of a clone of "
            "https://github.com/jadohu/LANTERN"
        )
    try:
        importlib.import_module("transformers")
    except ImportError:
        raise RequestError(
            "the official code needs transformers; install it with: pip install 'transformers<5'"
        ) from None
    sys.path.insert(0, str(clone))
    # The package's own __init__ loads every model it has, with all that they need.
    package = types.ModuleType("models")
    package.__path__ = [str(clone / "models")]
    sys.modules["models"] = package
    for name, word, stand_in in (("t5", "T5Embedder", _Captions), ("vq_model", "VQ_16", None)):
        module = types.ModuleType(f"models.base_models.llamagen.{name}")
        setattr(module, word, stand_in)
        sys.modules[module.__name__] = module
    return importlib.import_module("models.ea_model_llamagen")


class Official:
    """The official EaModel on our weights; a call decodes one image."""

    def __init__(self, module: Any, weights: Weights, backend: Backend, given: Any) -> None:
        self.backend, self.given = backend, given
        config = _official_config(weights.target.config)
        with torch.device("cpu"):
            base = module.KVLlamaForCausalLM(config)
        missing, unknown = base.load_state_dict(
            hugging_face_names(weights.target, "model."), strict=False
        )
        if missing or unknown:
            raise RequestError(f"the official model takes other keys: {missing} {unknown}")
        base.to(device=backend.device, dtype=given.compute).eval()
        drafter = {
            **vars(config),
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "intermediate_size": weights.drafter.config.ffn_dim,
            "rms_norm_eps": weights.drafter.config.norm_eps,
        }
        keep = {k: v for k, v in drafter.items() if isinstance(v, int | float | str | list)}
        # The table is loaded from a fixed place under the working directory; int64, since torch
        # refuses to index by the published uint16.
        table = weights.neighbours.to(torch.int64).numpy()
        load, module.np.load = module.np.load, lambda path: table
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps({k: v for k, v in keep.items() if not k.startswith("_")}))
            file.flush()
            try:
                self.model = module.EaModel(
                    base, "", file.name, 59, 4, 10, 1.0, hugging_face_names(weights.drafter, "")
                )
            finally:
                module.np.load = load
        self.model.to(device=backend.device, dtype=given.compute).eval()
        _Captions.found = (
            weights.caption.unsqueeze(0).to(device=backend.device, dtype=given.compute),
            weights.mask.long().unsqueeze(0).to(backend.device),
        )
        self.tokens = weights.target.config.num_tokens
        self.made = torch.zeros(0)
        self._watch()

    def _watch(self) -> None:
        """Count steps and note when the first begins, by the call that every step begins with."""
        begin = self.model.generate_candidates

        def counted(*arguments: Any) -> Any:
            if not self.steps:
                self.backend.synchronize()
                self.began = time.perf_counter(), time.process_time()
            self.steps += 1
            return begin(*arguments)

        self.model.generate_candidates = counted

    def __call__(self) -> Lap:
        given = self.given
        self.steps = 0
        self.made, compression, _ = self.model.generate(
            prompt=[""],
            max_length=self.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=1.0,
            cfg=given.cfg,
            lantern=given.lam > 1,
            lantern_k=given.k,
            lantern_delta=given.lam,
            static_tree=True,
            tree_choices=[list(path) for path in given.paths],
        )
        self.backend.synchronize()
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        made = float(compression) * self.steps
        return Lap(seconds=wall, cpu_seconds=cpu, work={"steps": self.steps, "tokens": made})


def _official_config(config: LlamaGenConfig) -> Any:
    """Return the configuration that LANTERN's checkpoints carry."""
    transformers = importlib.import_module("transformers")
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        rms_norm_eps=config.norm_eps,
        block_size=config.num_tokens,
        num_classes=config.num_classes,
        cls_token_num=PREFIX,
        input_type="t2i" if config.grid == 16 else "t2i2",
        caption_dim=config.caption_dim,
        rope_base=config.rope_base,
        token_dropout_p=0.0,
        attn_dropout_p=0.0,
        resid_dropout_p=0.0,
        ffn_dropout_p=0.0,
        drop_path_rate=0.0,
        class_dropout_p=0.1,
    )


# --- our side -----------------------------------------------------------------------------------


class Ours:
    """Our engine on the same weights, captured where the device captures."""

    def __init__(self, weights: Weights, backend: Backend, given: Any, sampling: Sampling) -> None:
        for part in (weights.target, weights.drafter):
            tables = part.rope_cos, part.rope_sin
            part.to(device=backend.device, dtype=given.compute).eval().requires_grad_(False)
            pack(part, backend)
            part.rope_cos, part.rope_sin = (table.to(backend.device) for table in tables)
            part.ops = backend
        rule: Acceptance = LanternPP(k=given.k, lam=given.lam) if given.lam > 1 else Exact()
        strategy = Strategy(
            name="lantern++", tree=given.tree_value, acceptance=rule, residual=given.residual
        )
        table = weights.neighbours.to(backend.device)
        self.engine = Engine(
            weights.target, weights.drafter, backend, strategy, sampling, neighbours=table
        )
        # Left padding: the tokens of the caption end where the image begins.
        pads = int((~weights.mask).sum())
        order = torch.arange(PREFIX).roll(pads)
        mask = weights.mask[order]
        features = (weights.caption[order] * mask.unsqueeze(-1)).unsqueeze(0)
        features = features.to(device=backend.device, dtype=given.compute)
        free = weights.target.unconditional(1).to(features.dtype)
        self.rows = torch.cat((features, free)) if sampling.guided else features
        self.mask = mask.unsqueeze(0).to(backend.device)
        self.prefill = backend.capture(self.engine.prefill, "prefill")
        self.step = backend.capture(self.engine.step, "step")
        self.backend = backend
        self.seed = 0
        self.made = torch.zeros(0)

    @torch.inference_mode()
    def __call__(self) -> Lap:
        self.seed += 1
        self.engine.start(
            self.rows, self.mask, self.engine.randomness(self.seed, [0]), self.prefill
        )
        with self.backend.stopwatch() as watch:
            cpu = time.process_time()
            done = self.engine.run(self.step)
            cpu = time.process_time() - cpu
        self.made = done.tokens
        steps = float(done.steps.sum())
        tokens = float(done.tokens.numel() - 1)
        return Lap(seconds=watch.seconds, cpu_seconds=cpu, work={"steps": steps, "tokens": tokens})


def run(given: argparse.Namespace) -> Race:
    """Build both, race them."""
    module = _official_modules(Path(given.clone))
    tree = parse_tree(given.tree)
    if not isinstance(tree, StaticTree):
        raise RequestError(f"the tree {given.tree!r} is not static; name one, or give its paths")
    given.tree_value, given.paths = tree, tree.paths
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in given.option)
    if given.threads:
        options["threads"] = given.threads
    with open_backend(given.device, options) as backend:
        given.compute = backend.dtypes(given.dtype).compute
        sampling = Sampling(
            temperature=given.temperature, top_k=given.top_k, cfg_scale=given.cfg,
            order="top_p_first",
        )  # fmt: skip
        settings = {
            "weights": given.weights.name if given.weights else f"random, size {given.size}",
            "tree": tree.model_dump(mode="json"),
            "sampling": sampling.model_dump(mode="json"),
            "k": given.k,
            "lambda": given.lam,
            "residual": given.residual,
            "device": str(backend.device),
            "dtype": str(given.compute).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "options": {k: str(v) for k, v in options.items()},
        }
        report = Race(
            settings=settings,
            environment=describe(backend, given.compute),
            runners=[Runner(name="official", note="eager"), Runner(name="ours")],
        )
        report = resume(given.output, report, lambda stored: stored.settings, "race_lantern.py")
        table = given.k + 1
        if given.weights:
            weights = stored_weights(given.weights, table, given.caption)
        else:
            weights = random_weights(llamagen_config(given.size, 256, text=True), table, given.seed)
        torch.manual_seed(given.seed)
        official = Official(module, weights, backend, given)
        ours = Ours(weights, backend, given, sampling)
        report = race(
            backend,
            report,
            {"official": official, "ours": ours},
            repeats=given.repeats,
            out=given.output,
            say=lambda text: say(text, to_stderr=True, style="dim"),
        )
        if given.temperature == 0 and official.made.numel() == ours.made.numel():
            equal = int((official.made.cpu() == ours.made).sum())
            report.checks = {"tokens": ours.made.numel(), "tokens_equal": equal}
        return report


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, race both, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clone", help="folder of a clone of jadohu/LANTERN")
    parser.add_argument("--size", default="B", choices=["B", "L", "XL", "XXL", "3B"])
    parser.add_argument("--weights", type=Path, default=None, help="folder of safetensors and JSON")
    parser.add_argument("--caption", type=int, default=1, help="of the folder's captions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the backend; repeat for several",
    )
    parser.add_argument("--tree", default="naive_extend_57")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=1000)
    parser.add_argument("--cfg", type=float, default=7.5)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--lam", type=float, default=2.0, help="lambda; 1: exact acceptance")
    parser.add_argument("--residual", default="aggregate", choices=["aggregate", "official"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON; a race goes on")
    given = parser.parse_args(arguments)
    try:
        report = run(given)
    except LanternError as error:
        say(str(error), label="error", style="bold red", to_stderr=True)
        return 2
    print(report.table())
    for runner in report.runners:
        if runner.laps:
            print(f"{runner.name}: {runner.ms('steps') / runner.ms('tokens'):.2f} tokens per step")
    if report.checks:
        print(f"greedy tokens alike: {report.checks}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
