"""Time passes over 1 to 32 rows in turns with llama.cpp's, on random weights of LlamaGen's shapes.

    pip install gguf llama-cpp-python    # built for this processor
    python tools/race_llama.py b xl

Both have 256 tokens in the cache and return the logits of every row. Each is a process of its own, which
sleeps while the other works, so that their threads do not compete.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS, KNOWN = (1, 2, 4, 8, 16, 32), 256
#: Formats of both that hold about as many bits.
FORMATS = {"full": "f16", "int8": "q8_0", "int4": "q4_0"}
LLAMA, OURS = "llama.cpp", "lantern_accel"
QUIET: Any = None


def write(path: Path, config: Any, kind: str) -> None:
    """Write random weights of a target's sizes as llama.cpp reads them."""
    import gguf
    import numpy as np

    out = gguf.GGUFWriter(path, "llama")
    dim, ffn, vocab = config.dim, config.hidden_dim, config.vocab_size
    out.add_context_length(2048)
    out.add_embedding_length(dim)
    out.add_block_count(config.n_layer)
    out.add_feed_forward_length(ffn)
    out.add_head_count(config.n_head)
    out.add_head_count_kv(config.n_head)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(dim // config.n_head)
    out.add_vocab_size(vocab)
    out.add_tokenizer_model("no_vocab")
    stored, rng = gguf.GGMLQuantizationType[kind.upper()], np.random.default_rng(0)
    shapes = {f"attn_{n}": (dim, dim) for n in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (ffn, dim), "ffn_up": (ffn, dim), "ffn_down": (dim, ffn)}
    named = {f"blk.{i}.{n}": s for i in range(config.n_layer) for n, s in shapes.items()}
    for name, shape in {"token_embd": (vocab, dim), "output": (vocab, dim), **named}.items():
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        out.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)
    norms = [f"blk.{i}.{n}_norm" for i in range(config.n_layer) for n in ("attn", "ffn")]
    for name in ("output_norm", *norms):
        out.add_tensor(f"{name}.weight", np.ones(dim, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def theirs(size: str, weights: str, threads: int, repack: bool) -> Callable[[int], float]:
    """Return what times a pass of llama.cpp in milliseconds, by its rows."""
    import time

    import llama_cpp as lc

    global QUIET  # what llama.cpp calls must live as long
    QUIET = lc.llama_log_callback(lambda level, text, data: None)
    from lantern_accel.families.random_weights import manifest_of_size

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path, manifest_of_size(f"llamagen-{size}-384").target, FORMATS[weights])
        lc.llama_log_set(QUIET, None)
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        model_params.n_gpu_layers, model_params.use_extra_bufts = 0, repack
        model = lc.llama_model_load_from_file(str(path).encode(), model_params)
    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = threads
    context = lc.llama_init_from_model(model, params)
    memory = lc.llama_get_memory(context)

    def run(first: int, count: int) -> float:
        batch = lc.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.logits[i] = 5 + i, first + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        began = time.perf_counter()
        code = lc.llama_decode(context, batch)
        lc.llama_synchronize(context)
        took = time.perf_counter() - began
        lc.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        lc.llama_memory_seq_rm(memory, 0, max(first, KNOWN), -1)
        return 1e3 * took

    run(0, KNOWN)
    return lambda rows: run(KNOWN, rows)


def ours(size: str, weights: str, threads: int, _: bool) -> Callable[[int], float]:
    """Return what times a pass of this package in milliseconds, by its rows."""
    from lantern_accel.device.context import inference
    from lantern_accel.device.plugins import open_backend
    from lantern_accel.families.random_weights import manifest_of_size
    from lantern_accel.strategy.values import Sampling
    from lantern_accel_profiles.measure.record import StepCell
    from lantern_accel_profiles.measure.steps import PLAIN, StepTimer, make_model

    backend, manifest = (
        open_backend("cpu", {"threads": threads}),
        manifest_of_size(f"llamagen-{size}-384"),
    )
    at = (KNOWN + 0.5) / manifest.target.num_tokens
    with inference(backend):
        model = make_model(backend, manifest, "auto", 1, weights)
        timers = {
            rows: StepTimer(
                backend,
                model,
                StepCell(kind="pass", strategy=PLAIN, batch=1, nodes=rows, at=at),
                Sampling(),
            )
            for rows in ROWS
        }

    def run(rows: int) -> float:
        with inference(backend):
            return timers[rows].ms()

    return run


def _serve(pipe: Any, program: str, *of: Any) -> None:
    run = (theirs if program == LLAMA else ours)(*of)
    for rows in ROWS:
        run(rows)
    pipe.send("ready")
    while (rows := pipe.recv()) is not None:
        pipe.send(run(rows))


def _start(program: str, *of: Any) -> tuple[Any, Any]:
    spawn = multiprocessing.get_context("spawn")
    pipe, end = spawn.Pipe()
    held = spawn.Process(target=_serve, args=(end, program, *of))
    held.start()
    end.close()
    pipe.recv()
    return pipe, held


def rows(size: str, laps: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a program's medians in milliseconds by rows, for each format of the weights.

    Where llama.cpp crashes on weights that it has repacked for the processor, they stay as stored.
    """
    import torch

    for weights, kind in FORMATS.items():
        of, note = (size, weights, torch.get_num_threads()), ""
        try:
            their = _start(LLAMA, *of, True)
        except EOFError:
            their, note = _start(LLAMA, *of, False), ", not repacked"
            say("  llama.cpp crashed on weights that it had repacked; measured without")
        run = {LLAMA: their, OURS: _start(OURS, *of, True)}
        found: dict[str, dict[int, list[float]]] = {p: {n: [] for n in ROWS} for p in run}
        for lap in range(2 * laps):
            for count in ROWS:
                for program in sorted(run, reverse=bool(lap % 2)):
                    run[program][0].send(count)
                    found[program][count].append(run[program][0].recv())
        for program, (pipe, held) in run.items():
            pipe.send(None)
            held.join()
            ms = {str(n): statistics.median(each) for n, each in found[program].items()}
            stored = kind + note if program == LLAMA else weights
            say(f"  {size}, {program}, {stored}: {ms}")
            yield {"model": size, "program": program, "weights": stored, "ms": ms}


if __name__ == "__main__":
    for named in sys.argv[1:]:
        print(json.dumps(list(rows(named, 5, lambda text: print(text, file=sys.stderr)))))
