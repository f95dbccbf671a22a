"""``lantern-accel generate``: images from prompts, with the figures of the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import say
from lantern_accel.cli.opening import bar, opened
from lantern_accel.cli.options import OPTION, read_options, read_size

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern_accel.generation.result import GenerationResult


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate")(generate)


def generate(
    prompts: list[str] = typer.Argument(
        ..., metavar="PROMPT...", help="What to draw; class ids for class-conditional models."
    ),
    output: Path = typer.Option(
        Path("lantern.png"), "--output", "-o", help="Picture to write; several get -0, -1, ..."
    ),
    json_path: str = typer.Option(
        "", "--json", metavar="FILE", help="Write the run's figures here; - for standard output."
    ),
    device: str = typer.Option("auto", help="A backend's name, NAME:INDEX, or auto (the best)."),
    model: str = typer.Option(
        "lantern-emoji",
        help="A name that `lantern-accel models` lists, or a folder or file of weights.",
    ),
    preset: str = typer.Option(
        None, help="Published settings by name; `lantern-accel models --presets` lists them."
    ),
    strategy: str = typer.Option(
        None, help="vanilla, eagle, eagle2, lantern or lantern++ (the default)."
    ),
    num_images: int = typer.Option(1, min=1, help="Images a prompt."),
    seed: int = typer.Option(None, min=0, help="Fixes the images; drawn and printed if left out."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    batch_size: int = typer.Option(None, min=1, help="Images decoded together."),
    size: str = typer.Option(
        None, metavar="WxH", help="Pixels, where a model draws several sizes."
    ),
    temperature: float = typer.Option(None, help="0 is greedy. Default: the model's."),
    top_k: int = typer.Option(None, help="Keep the k most likely codes; 0 keeps all."),
    top_p: float = typer.Option(None, help="Keep the codes that hold this share."),
    cfg_scale: float = typer.Option(None, "--cfg-scale", help="Guidance; 1 or less is off."),
    cfg_interval: int = typer.Option(
        None, "--cfg-interval", help="Guide up to this token after the first; -1: all."
    ),
    cfg_scale_image: float = typer.Option(
        None,
        "--cfg-scale-image",
        help="Anole's three-way guidance: weight of the prompt's pictures.",
    ),
    tree: str = typer.Option(
        None,
        help="none, chain:4, dynamic:TOP_K,DEPTH,TOTAL, a tree's name, paths 0,1,00,01, or window:16.",
    ),
    window: int = typer.Option(
        None, help="Tokens in the window of a strategy that drafts without a drafter."
    ),
    k: int = typer.Option(None, "--k", help="Neighbours that may count for a drafted code."),
    delta: float = typer.Option(
        None, help="LANTERN's bound on a draft's borrowed mass, in (0, 1]."
    ),
    lam: float = typer.Option(None, "--lambda", help="LANTERN++'s bound, 1 or more."),
    residual: str = typer.Option(None, help="aggregate, official or optimal."),
    neighbour_space: str = typer.Option(
        None, "--neighbour-space", help="Where neighbours are measured: decoder or raw."
    ),
    vq: Path = typer.Option(None, "--vq", help="An image tokenizer that lies elsewhere."),
    drafter: str = typer.Option(None, help="A drafter that lies elsewhere; none: decode without."),
    text_encoder: Path = typer.Option(
        None, "--text-encoder", help="A text encoder's folder that lies elsewhere."
    ),
    text_device: str = typer.Option(
        "device", "--text-device", help="Where a large text encoder runs: device or cpu."
    ),
    embeddings: Path = typer.Option(
        None, help="The prompts' features (.safetensors, .npz), in place of the text encoder."
    ),
    threads: int = typer.Option(None, min=1, help="Processor threads, where the backend has them."),
    option: list[str] = OPTION,
    scale: int = typer.Option(1, min=1, max=16, help="Enlarge the written pictures."),
    grid: bool = typer.Option(False, help="Write all images into one picture, a row a prompt."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors."),
) -> None:
    """Draw PROMPT and write a picture.

    Example: lantern-accel generate "red heart" --seed 7 -o heart.png
    """
    _check_output(output, json_path)
    from lantern_accel.errors import DeviceLostError

    with opened(
        model,
        quiet,
        device=device,
        dtype=dtype,
        options=read_options(option, threads),
        vq=vq,
        drafter=drafter,
        text_encoder=text_encoder,
        text_device=text_device,
        embeddings=embeddings,
    ) as pipeline:
        arguments = {
            "preset": preset,
            "strategy": strategy,
            "num_images": num_images,
            "seed": seed,
            "batch_size": batch_size,
            "size": read_size(size),
            "tree": tree,
            "window": window,
            "k": k,
            "delta": delta,
            "lam": lam,
            "residual": residual,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "cfg_scale": cfg_scale,
            "cfg_interval": cfg_interval,
            "neighbour_space": neighbour_space,
            "cfg_scale_image": cfg_scale_image,
        }
        prompt: str | list[str] = prompts[0] if len(prompts) == 1 else prompts
        try:
            with bar("decoding", quiet, unit="tokens") as report:
                result = pipeline.generate(prompt, on_progress=report, **arguments)
        except DeviceLostError as lost:
            _keep(lost.images, output)
            raise
    written = _write(result, output, num_images if grid else 0, scale)
    if json_path == "-":
        typer.echo(result.stats.model_dump_json(indent=2))
    elif json_path:
        from lantern_accel.files import write_json

        write_json(Path(json_path), result.stats.model_dump(mode="json"))
    if not quiet and json_path != "-":
        _summary(result, written)


def _check_output(output: Path, json_path: str) -> None:
    """Raise before any work where a file could not be written or its format is unknown."""
    import tempfile

    from PIL import Image

    from lantern_accel.errors import RequestError

    known = Image.registered_extensions()
    if output.suffix.lower() not in known or known[output.suffix.lower()] not in Image.SAVE:
        raise RequestError(
            f"{output} has no picture format that can be written; name it .png, .jpg or .webp"
        )
    for path in (output, *([Path(json_path)] if json_path and json_path != "-" else [])):
        if path.is_dir():
            raise RequestError(f"{path} is a folder; name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise RequestError(
                f"{path} cannot be written ({error.strerror}); choose another folder with -o"
            ) from None


def _keep(images: list[Image], output: Path) -> None:
    """Write the images that were finished before a device was lost, and say where."""
    from lantern_accel.generation.result import save_images

    if images:
        written = save_images(images, output)
        kept = ", ".join(str(path) for path in written)
        say(kept, label="kept", style="bold yellow", to_stderr=True)


def _write(result: GenerationResult, output: Path, columns: int, scale: int) -> list[Path]:
    from dataclasses import replace

    from PIL import Image

    images = result.images
    if scale > 1:
        images = [
            i.resize((i.width * scale, i.height * scale), Image.Resampling.LANCZOS) for i in images
        ]
    if columns:
        width, height = images[0].size
        rows = -(-len(images) // columns)
        sheet = Image.new("RGB", (columns * width, rows * height), "white")
        for i, image in enumerate(images):
            sheet.paste(image, (i % columns * width, i // columns * height))
        images = [sheet]
    return replace(result, images=images).save(output)


def _summary(result: GenerationResult, written: list[Path]) -> None:
    from lantern_accel.strategy.values import StaticTree, Window

    stats = result.stats
    seconds = stats.seconds
    say(", ".join(str(path) for path in written), label="wrote", style="bold green")
    if stats.tokens_per_second is None:
        speed = f"{stats.tokens} tokens on the {stats.device_name}, whose times are no device's"
        rest = ""
    else:
        busy = seconds.prefill + seconds.decode
        speed = f"{stats.tokens} tokens in {busy:.2f} s ({stats.tokens_per_second:.0f} tokens/s)"
        rest = f"; text {seconds.text:.2f} s, pixels {seconds.pixels:.2f} s"
    say(
        f"{speed}, {stats.step_compression:.2f} tokens a step{rest}",
        label="decoded",
        style="bold",
    )
    tree = stats.strategy.tree
    shape = f"the tree {getattr(tree, 'name', tree.kind)}"
    if isinstance(tree, StaticTree):
        shape += f" ({len(tree.paths)} drafts)"
    elif isinstance(tree, Window):
        shape = f"a window of {tree.length} tokens"
    say(
        f"{stats.strategy.name} over {shape} on {stats.device} "
        f"({stats.device_name}, {stats.dtype}), model {stats.model}, seed {stats.seed}",
        label="with",
        style="bold",
    )
