"""Tiny random models of transformers' and diffusers' own classes, of any sizes."""

from __future__ import annotations

from typing import Any

import torch

from support.chi_square import misfit
from support.glm_image import RECORDED


def filled(model: Any, seed: int) -> Any:
    """Give every parameter random numbers of a size that shows mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "norm" in name and weight.dim() == 1:
                weight.copy_(drawn * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            elif weight.dim() == 1:
                weight.copy_(drawn * 0.3)
            else:
                weight.copy_(drawn * 1.5 / weight[0].numel() ** 0.5)
    return model.eval().requires_grad_(False)


def janus(
    seed: int = 0,
    *,
    dim: int = 48,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int | None = None,
    layers: int = 2,
    grid: int = 4,
    codes: int = 40,
    theta: float = 10000.0,
) -> Any:
    """Return a tiny ``JanusForConditionalGeneration``; ids: bos 90, pad 91, start of image 92."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    text = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": dim, "intermediate_size": 56,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256, "head_dim": head_dim or dim // heads, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": 90, "pad_token_id": 91, "eos_token_id": 93,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 4 * grid, "mlp_ratio": 2, "projection_dim": dim, "num_image_tokens": grid**2,
    }  # fmt: skip
    vq = {
        "embed_dim": 8, "num_embeddings": codes, "latent_channels": 32, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": dim,
        "image_token_embed_dim": dim,
    }  # fmt: skip
    made = JanusForConditionalGeneration(
        JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=94)
    )
    said = made.generation_config
    said.bos_token_id, said.pad_token_id, said.eos_token_id = 90, 91, 93
    said.generation_kwargs = {"boi_token_id": 92}
    return filled(made, seed)


def glm(
    seed: int = 0,
    *,
    dim: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    layers: int = 2,
    sections: tuple[int, int, int] = (1, 1, 1),
    partial: float = 0.5,
    codes: int = 128,
    bias: bool = True,
) -> Any:
    """Return a tiny ``GlmImageForConditionalGeneration`` for the recorded processor."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig.from_pretrained(RECORDED / "vision_language_encoder").to_dict()
    text = {
        "hidden_size": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim or dim // heads, "num_hidden_layers": layers, "intermediate_size": 56,
        "vision_vocab_size": codes + 16, "attention_bias": bias,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0, "mrope_section": list(sections),
            "partial_rotary_factor": partial,
        },
    }  # fmt: skip
    config["text_config"] |= text
    config["text_config"].pop("dtype", None)
    config["vq_config"]["num_embeddings"] = codes
    made = GlmImageForConditionalGeneration(GlmImageConfig(**config)).float()
    filled(made, seed)
    with torch.no_grad():
        made.lm_head.weight[codes:] *= 0.1  # greedily no id is drawn that is no code
    said = made.generation_config
    said.do_sample, said.temperature, said.top_p, said.top_k = True, 0.9, 0.75, codes + 16
    said.eos_token_id, said.pad_token_id = 129, 458
    return made


def glm_processor() -> Any:
    """Return the recorded processor."""
    from transformers import GlmImageProcessor

    return GlmImageProcessor.from_pretrained(RECORDED / "processor")


def glm_inputs(processor: Any, texts: list[str], height: int, width: int) -> Any:
    """Return what the processor makes of prompts for one picture size."""
    return processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts],
        tokenize=True, padding=len(texts) > 1, target_h=height, target_w=width, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip


def glm_draws_fairly(prior: Any, inputs: Any, tokens: torch.Tensor, **sampling: Any) -> None:
    """Compare the first two tokens of many pictures of one prompt with the law that ``generate`` has.

    ``sampling``: what else ``generate`` takes. The second token is looked at after the first's mode.
    """
    codes = prior.config.text_config.vision_vocab_size - 16  # the rows after them are not drawn
    for known in ([], [int(tokens[:, 0].mode().values)]):
        rows = tokens[(tokens[:, : len(known)] == torch.tensor(known)).all(dim=1)]
        ids = torch.cat((inputs["input_ids"], torch.tensor([known], dtype=torch.int64)), dim=1)
        given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = prior.generate(
                **given, max_new_tokens=1, do_sample=True, output_scores=True,
                return_dict_in_generate=True, **sampling,
            ).scores[0][0]  # fmt: skip
        law = torch.softmax(logits[:codes].float(), dim=-1)
        seen = rows[:, len(known)].bincount(minlength=codes)
        assert abs(misfit(seen, law)) < 4, (known, sampling)


def glm_pipeline(prior: Any, processor: Any, codes: int = 128) -> Any:
    """Return a ``GlmImagePipeline`` of tiny random parts around a prior."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        GlmImagePipeline,
        GlmImageTransformer2DModel,
    )
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    torch.manual_seed(5)
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(4, 8, 8, 8), latent_channels=4,
        layers_per_block=1, norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    transformer = GlmImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, text_embed_dim=32, time_embed_dim=16, condition_dim=8,
        prior_vq_quantizer_codebook_size=codes,
    )  # fmt: skip
    text_encoder = T5EncoderModel(
        T5Config(vocab_size=384, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    )
    made = GlmImagePipeline(
        tokenizer=ByT5Tokenizer(), processor=processor, text_encoder=text_encoder.eval(),
        vision_language_encoder=prior, vae=vae.eval(), transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(  # as published: it shifts by the picture's size
            use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75
        ),
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made
