"""The components of Stable Diffusion 1.5 at their true sizes, offloaded. Run with `hatch run engines:diffusers`.

Weights are random, in bfloat16: 860 million in the UNet, 123 in the text encoder, 84 in the VAE. The oracle is the same
models in memory. Needs 3 GB of memory and 2.2 GB of disk.
"""

from __future__ import annotations

import json

import pytest
import torch

from accel_bigmodel import dispatch_model, init_empty_weights, load_checkpoint_in_model, offload_stats
from accel_bigmodel.streaming.transfer import HostTransfer

diffusers = pytest.importorskip("diffusers", reason="hatch run engines:diffusers installs it")
transformers = pytest.importorskip("transformers")

LIMIT = 800_000_000
SHARD = "400MB"
SIDE = 8  # of the latents; 64 makes an image of 512 x 512
pytestmark = pytest.mark.timeout(1800)  # without AVX-512 convolutions in bfloat16 are a hundred times slower

BLOCKS = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}

# What each component may hold on the device at one time, together less than the limit.
MEMORY = {"text_encoder": 100_000_000, "unet": 550_000_000, "vae": 100_000_000}
PARAMETERS = {"text_encoder": 123_060_480, "unet": 859_520_964, "vae": 83_653_863}


def text_encoder():
    config = transformers.CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=77, projection_dim=768, hidden_act="quick_gelu",
    )  # fmt: skip
    return transformers.CLIPTextModel(config)


def unet():
    return diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


def vae():
    return diffusers.AutoencoderKL(**BLOCKS, latent_channels=4, layers_per_block=2, sample_size=512)


MAKERS = {"text_encoder": text_encoder, "unet": unet, "vae": vae}


def empty(name):
    with init_empty_weights():
        return MAKERS[name]().to(torch.bfloat16).eval()


def filled(name):
    """The component in memory. Weights are small enough for activations to stay in range."""
    model = empty(name).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(len(name))
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.data.normal_(0, 0.02 if parameter.dim() < 2 else fan_in**-0.5, generator=generator)
        if parameter.dim() < 2:
            parameter.data.add_(1)
    for buffer in model.buffers():
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))  # CLIP's position_ids
    return model


@torch.no_grad()
def denoise(parts):
    """One step from noise to an image, with guidance."""
    generator = torch.Generator().manual_seed(0)
    scheduler = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler.set_timesteps(1)
    tokens = torch.randint(0, 49408, (2, 77), generator=generator)
    context = parts["text_encoder"](tokens).last_hidden_state
    latents = torch.randn((1, 4, SIDE, SIDE), generator=generator).to(torch.bfloat16)
    (step,) = scheduler.timesteps
    without, guided = parts["unet"](torch.cat([latents] * 2), step, context).sample.chunk(2)
    latents = scheduler.step(without + 7.5 * (guided - without), step, latents).prev_sample.to(torch.bfloat16)
    image = parts["vae"].decode(latents / parts["vae"].config.scaling_factor).sample
    return {"context": context, "latents": latents, "image": image}


def image_of_pipeline(parts, context):
    """What diffusers' own pipeline makes of the components, in one step."""
    scheduler = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    pipeline = diffusers.StableDiffusionPipeline(
        **parts, tokenizer=None, scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    without, guided = context.chunk(2)
    return pipeline(
        prompt_embeds=guided, negative_prompt_embeds=without, num_inference_steps=1, output_type="pt",
        height=8 * SIDE, width=8 * SIDE, generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of sharded checkpoints, and what the models in memory answer."""
    folder = tmp_path_factory.mktemp("sd15")
    parts = {}
    for name in MAKERS:
        parts[name] = filled(name)
        assert sum(parameter.numel() for parameter in parts[name].parameters()) == PARAMETERS[name]
        parts[name].save_pretrained(folder / name, max_shard_size=SHARD)
    assert len(json.loads(next((folder / "unet").glob("*.index.json")).read_text())["weight_map"]) == 686
    expected = denoise(parts)
    expected["pipeline"] = image_of_pipeline(parts, expected["context"])
    return folder, expected


def same(mine, theirs):
    for name, answer in mine.items():
        assert answer.isfinite().all()
        assert answer.std() > 0
        assert torch.equal(answer, theirs[name]), name


def test_streamed_within_800_megabytes(saved, tmp_path):
    folder, expected = saved
    parts = {}
    for name in MAKERS:
        parts[name] = empty(name)
        load_checkpoint_in_model(parts[name], folder / name, {"": "disk"}, offload_folder=tmp_path)
        dispatch_model(
            parts[name],
            {"": "disk"},
            offload_dir=tmp_path,
            device_memory=MEMORY[name],
            transfer=HostTransfer(),
        )
    for _ in range(2):  # the second step runs in the order that the first has shown
        same(denoise(parts), expected)
    stats = {name: offload_stats(part) for name, part in parts.items()}
    for name, each in stats.items():
        assert each.slot_bytes + each.resident_bytes <= each.peak_bytes <= MEMORY[name]
        assert each.bytes_moved > 0
    assert sum(each.peak_bytes for each in stats.values()) < LIMIT
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_mapped_on_the_cpu(saved):
    folder, expected = saved
    parts = {}
    for name in MAKERS:
        parts[name] = empty(name)
        load_checkpoint_in_model(parts[name], folder / name, {"": "disk"})
        dispatch_model(parts[name], {"": "disk"})
    same(denoise(parts), expected)


def test_the_pipeline_of_diffusers_takes_placed_components(saved):
    folder, expected = saved
    parts = {}
    for name in MAKERS:
        parts[name] = empty(name)
        load_checkpoint_in_model(parts[name], folder / name, {"": "disk"})
        dispatch_model(parts[name], {"": "disk"}, device_memory=MEMORY[name], transfer=HostTransfer())
    same({"pipeline": image_of_pipeline(parts, expected["context"])}, expected)
