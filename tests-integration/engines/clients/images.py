"""Diffusion models trained as the examples of diffusers do it, with their calls of Accelerate in their order.

``images.py unconditional|text|lora|inversion|dreambooth FOLDER``
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from models import tokenizer
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel
from tuning import text

logger = get_logger(__name__)
STEPS, SAVE_EVERY, ACCUMULATE, SIZE = 4, 2, 2, 16


class Pictures(Dataset):
    def __init__(self, count=21):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.rand(count, 3, SIZE, SIZE, generator=generator) * 2 - 1
        words = tokenizer()
        self.ids = [words(text(index, 6), return_tensors="pt")["input_ids"][0] for index in range(count)]

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "input_ids": self.ids[index]}


def unconditional_model():
    return UNet2DModel(
        sample_size=SIZE, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def text_models():
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, eos_token_id=63, bos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=SIZE,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIZE // 2, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16,
        norm_num_groups=4, attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return encoder, vae, unet


class Run:
    """What the examples share: the accelerator, its saving, and the loop."""

    def __init__(self, folder, mixed_precision="no"):
        self.folder = folder
        config = ProjectConfiguration(project_dir=folder, logging_dir=f"{folder}/logs")
        self.accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATE, mixed_precision=mixed_precision, log_with="tensorboard",
            project_config=config,
        )  # fmt: skip
        logger.info(self.accelerator.state, main_process_only=False)
        set_seed(1)
        if self.accelerator.is_main_process:
            os.makedirs(folder, exist_ok=True)
        self.losses = []
        self.noise = DDPMScheduler(num_train_timesteps=100)
        self.generator = torch.Generator().manual_seed(5 + self.accelerator.process_index)

    def save_with(self, kind, ema=None):
        """Models are saved and loaded in folders of their own, as the examples do."""

        def save(models, weights, output):
            if self.accelerator.is_main_process:
                if ema is not None:
                    ema.save_pretrained(f"{output}/ema")
                for model in models:
                    self.accelerator.unwrap_model(model).save_pretrained(f"{output}/unet")
                    weights.pop()

        def load(models, folder):
            for _ in range(len(models)):
                model = models.pop()
                loaded = kind.from_pretrained(folder, subfolder="unet")
                model.register_to_config(**loaded.config)
                model.load_state_dict(loaded.state_dict())

        self.accelerator.register_save_state_pre_hook(save)
        self.accelerator.register_load_state_pre_hook(load)

    def noised(self, values):
        noise = torch.randn(values.shape, generator=self.generator)
        steps = torch.randint(0, 100, (len(values),), generator=self.generator)
        return noise, self.noise.add_noise(values, noise, steps), steps

    def train(self, model, parameters, loader, loss_of, ema=None, after=None, rate=1e-2):
        accelerator = self.accelerator
        optimizer = torch.optim.AdamW(parameters, lr=rate)
        schedule = get_scheduler(
            "cosine", optimizer=optimizer, num_warmup_steps=accelerator.num_processes,
            num_training_steps=STEPS * accelerator.num_processes,
        )  # fmt: skip
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if accelerator.is_main_process:
            accelerator.init_trackers("example", config={"rate": rate})
        per_epoch = math.ceil(len(loader) / ACCUMULATE)
        done = 0
        for _ in range(math.ceil(STEPS / per_epoch)):
            model.train()
            total = 0.0
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    gathered = accelerator.gather(loss.repeat(len(batch["pixel_values"]))).mean()
                    total += gathered.item() / ACCUMULATE
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if after is not None:
                    after(model)
                if accelerator.sync_gradients:
                    if ema is not None:
                        ema.step(model.parameters())
                    done += 1
                    accelerator.log({"train_loss": total, "lr": schedule.get_last_lr()[0]}, step=done)
                    self.losses.append([total, schedule.get_last_lr()[0]])
                    total = 0.0
                    if accelerator.is_main_process and done % SAVE_EVERY == 0:
                        accelerator.save_state(f"{self.folder}/checkpoint-{done}")
                if done >= STEPS:
                    break
        accelerator.wait_for_everyone()
        return model

    def result(self, model, ema=None):
        sums = {name: value.double().sum().item() for name, value in model.state_dict().items()}
        again = None
        if os.path.isdir(f"{self.folder}/checkpoint-{SAVE_EVERY}/unet"):
            again = type(model).from_pretrained(f"{self.folder}/checkpoint-{SAVE_EVERY}", subfolder="unet")
            again = {name: value.double().sum().item() for name, value in again.state_dict().items()}
        self.accelerator.end_training()
        return {"losses": self.losses, "weights": sums, "saved": again}


def loader():
    # With a generator of its own, as Accelerate's order on several processes is otherwise not that of the seed.
    return DataLoader(Pictures(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def unconditional(folder):
    run = Run(folder)
    model = unconditional_model()
    ema = EMAModel(model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config)
    run.save_with(UNet2DModel, ema)

    def loss_of(model, batch):
        noise, noisy, steps = run.noised(batch["pixel_values"])
        return F.mse_loss(model(noisy, steps).sample, noise)

    model = run.accelerator.unwrap_model(run.train(model, model.parameters(), loader(), loss_of, ema))
    found = run.result(model)
    ema.copy_to(model.parameters())
    return {**found, "ema": [value.double().sum().item() for value in model.parameters()]}


def conditioned(run, encoder, vae):
    def loss_of(model, batch, given=None):
        latents = vae.encode(batch["pixel_values"]).latent_dist.mode() * 0.18
        noise, noisy, steps = run.noised(latents)
        hidden = (given or encoder)(batch["input_ids"])[0]
        return F.mse_loss(model(noisy, steps, hidden).sample.float(), noise.float())

    return loss_of


def text_to_image(folder):
    run = Run(folder, mixed_precision="bf16")
    encoder, vae, unet = text_models()
    encoder.requires_grad_(False)
    vae.requires_grad_(False)
    run.save_with(UNet2DConditionModel)
    loss_of = conditioned(run, encoder, vae)

    def under_autocast(model, batch):
        with run.accelerator.autocast():
            return loss_of(model, batch)

    assert AcceleratorState().mixed_precision == "bf16"
    return run.result(
        run.accelerator.unwrap_model(run.train(unet, unet.parameters(), loader(), under_autocast))
    )


def lora(folder):
    run = Run(folder)
    encoder, vae, unet = text_models()
    for frozen in (encoder, vae, unet):
        frozen.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    layers = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    trained = run.accelerator.unwrap_model(run.train(unet, layers, loader(), conditioned(run, encoder, vae)))
    adapter = {
        name: value.double().sum().item() for name, value in get_peft_model_state_dict(trained).items()
    }
    return {**run.result(trained), "adapter": adapter}


def inversion(folder):
    """One embedding is trained; the others are put back after every step."""
    run = Run(folder)
    encoder, vae, unet = text_models()
    vae.requires_grad_(False)
    unet.requires_grad_(False)
    encoder.requires_grad_(False)
    encoder.get_input_embeddings().requires_grad_(True)
    original = encoder.get_input_embeddings().weight.data.clone()
    loss_of = conditioned(run, encoder, vae)

    def of_the_encoder(model, batch):
        return loss_of(unet, batch, given=model)

    def restore(model):
        kept = torch.ones(64, dtype=torch.bool)
        kept[5] = False
        with torch.no_grad():
            run.accelerator.unwrap_model(model).get_input_embeddings().weight[kept] = original[kept]

    parameters = encoder.get_input_embeddings().parameters()
    trained = run.train(encoder, parameters, loader(), of_the_encoder, after=restore)
    return run.result(run.accelerator.unwrap_model(trained))


def dreambooth(folder):
    """The U-Net and the text encoder are trained together, and go on from a state that was saved between."""
    run = Run(folder)
    accelerator = run.accelerator
    encoder, vae, unet = text_models()
    vae.requires_grad_(False)
    optimizer = torch.optim.AdamW([*unet.parameters(), *encoder.parameters()], lr=1e-2)
    schedule = get_scheduler("constant", optimizer=optimizer)
    # In order: of a shuffled loader this library restores the generator with the state, and Accelerate does not.
    ordered = DataLoader(Pictures(), batch_size=2)
    unet, encoder, optimizer, batches, schedule = accelerator.prepare(
        unet, encoder, optimizer, ordered, schedule
    )
    loss_of = conditioned(run, encoder, vae)

    def steps(count):
        for index, batch in enumerate(batches):
            with accelerator.accumulate(unet, encoder):
                loss = loss_of(unet, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_([*unet.parameters(), *encoder.parameters()], 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
            run.losses.append(accelerator.gather(loss).mean().item())
            if index + 1 == count * ACCUMULATE:
                break

    steps(2)
    accelerator.save_state(f"{folder}/between")
    before = copy.deepcopy(accelerator.unwrap_model(unet).state_dict())
    steps(1)
    accelerator.load_state(f"{folder}/between")
    for name, value in accelerator.unwrap_model(unet).state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    steps(2)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(f"{folder}/between")
    return run.result(accelerator.unwrap_model(unet))


if __name__ == "__main__":
    what = {
        "unconditional": unconditional, "text": text_to_image, "lora": lora, "inversion": inversion,
        "dreambooth": dreambooth,
    }  # fmt: skip
    found = what[sys.argv[1]](sys.argv[2])
    from accelerate import PartialState

    if PartialState().is_main_process:
        print("RESULT", json.dumps(found))
