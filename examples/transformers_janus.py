"""Generate an image with Janus-Pro in transformers, decoded by lantern_accel.

python examples/transformers_janus.py "a red fox" --model deepseek-community/Janus-Pro-1B
"""

from __future__ import annotations

import argparse

import torch
from PIL import Image
from transformers import AutoProcessor, JanusForConditionalGeneration

import lantern_accel.integrations as integrations


def main() -> None:
    """Generate with transformers' own loop replaced; the seed and the settings stay transformers'."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="deepseek-community/Janus-Pro-1B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", default="janus.png")
    options = parser.parse_args()
    processor = AutoProcessor.from_pretrained(options.model)
    model = JanusForConditionalGeneration.from_pretrained(options.model, dtype="auto")
    model.to(options.device)
    integrations.accelerate(model)  # strategy="scd" chooses one; model.restore() undoes it
    inputs = processor(text=options.prompt, generation_mode="image", return_tensors="pt")
    torch.manual_seed(7)
    codes = model.generate(
        **inputs.to(options.device), generation_mode="image", do_sample=True, top_k=0
    )
    pixels = model.decode_image_tokens(codes)[0].float().clamp(-1, 1)  # height, width, channels
    Image.fromarray(((pixels + 1) * 127.5).byte().cpu().numpy()).save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
