"""Generate an image with GLM-Image in diffusers; lantern_accel decodes the tokens of its prior.

python examples/diffusers_glm_image.py "a red fox" --model zai-org/GLM-Image
"""

from __future__ import annotations

import argparse

import torch
from diffusers import GlmImagePipeline

import lantern_accel.integrations as integrations


def main() -> None:
    """Generate with the pipeline's own arguments; its prior is decoded in fewer forward passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="zai-org/GLM-Image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50, help="of the diffusion model")
    parser.add_argument("-o", "--output", default="glm.png")
    options = parser.parse_args()
    pipe = GlmImagePipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16)
    pipe.to(options.device)
    integrations.accelerate(pipe)  # pipe.restore() undoes it
    made = pipe(
        options.prompt,
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(7),
    )
    made.images[0].save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
