"""The network, what it reads, and its checkpoint: folders of diffusers, opened without running any code from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

from real_envs.files import write_atomically
from worldmodel.extras import loading
from worldmodel.extras.screen.data import MAPS, ScreenTransition, action_map, new_lines, padded, word_features
from worldmodel.extras.screen.objective import Velocity, velocity_to
from worldmodel.extras.screen.settings import HEADS, ScreenSettings

SHAPE = "screen.json"
MASK_LOGIT = -2.0  # log-odds that a pixel is drawn anew, before anything is learned
TRAIN_STEPS = 1000  # diffusers counts noise in thousandths


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a batch of next screens depends on."""

    before: Tensor  # the last screens, float32 ``[batch, 3, height, width]`` in [-1, 1]
    maps: Tensor  # where the actions went, ``[batch, MAPS, height, width]``
    words: Tensor  # features of the words of action, task and page, ``[batch, count, features]``
    present: Tensor  # bool ``[batch, count]``

    def rows(self, which: Tensor) -> Conditions:
        return Conditions(self.before[which], self.maps[which], self.words[which], self.present[which])

    def to(self, device: torch.device) -> Conditions:
        return Conditions(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ScreenShape:
    """What a checkpoint must know besides its network.

    Attributes:
        height, width: of screens in the model, in its pixels, before they are padded.
    """

    height: int
    width: int
    shrink: int
    patch: int
    words: int
    word_features: int
    finest: int
    levels: int
    page_words: int = 0  # not in checkpoints from before there were any

    @property
    def inside(self) -> tuple[int, int]:
        """Height and width with the padding that patches and levels need."""
        return padded((self.height, self.width), self.patch * 2 ** (self.levels - 1))  # as ``ScreenSettings.multiple``


class ScreenModel(nn.Module):
    """Predicts the next screen: the last one and, where the network says so, what it draws in its place.

    A window that closes leaves nothing of its text behind, which a network that adds to the last screen would have to
    know to the pixel; and what stays is not touched (masks beside contents, as in the two streams of Vondrick et al.,
    arXiv 1609.02612). An untrained model predicts that hardly anything changes: its last layer starts at 0, and its
    masks at ``MASK_LOGIT``.
    """

    def __init__(
        self, unet: UNet2DConditionModel, scheduler: FlowMatchEulerDiscreteScheduler, shape: ScreenShape
    ) -> None:
        super().__init__()
        self.unet, self.scheduler, self.shape = unet, scheduler, shape

    @classmethod
    def create(cls, settings: ScreenSettings, size: tuple[int, int]) -> ScreenModel:
        """A random one for screens of this height and width, after shrinking."""
        area, levels = settings.patch**2, len(settings.channels)
        unet = UNet2DConditionModel(
            in_channels=(3 + 3 + MAPS) * area,
            out_channels=(3 + 1) * area,
            block_out_channels=tuple(settings.channels),
            layers_per_block=1,
            down_block_types=("DownBlock2D",) * levels,
            mid_block_type="UNetMidBlock2DCrossAttn",
            up_block_types=("UpBlock2D",) * levels,
            cross_attention_dim=64,
            encoder_hid_dim=settings.word_features,
            encoder_hid_dim_type="text_proj",
            # a page's words also reach every layer, beside the time: they can decide what is drawn anywhere
            addition_embed_type="text" if settings.page_words else None,
            addition_embed_type_num_heads=HEADS,
            class_embed_type="timestep",  # the length of a step, beside the time
            attention_head_dim=4,
            norm_num_groups=8,
            conv_in_kernel=1,  # a patch is wide enough, and has many channels
        )
        nn.init.zeros_(unet.conv_out.weight)
        nn.init.zeros_(unet.conv_out.bias)
        with torch.no_grad():
            unet.conv_out.bias[3 * area :] = MASK_LOGIT
        shared = {
            k: getattr(settings, k) for k in ("shrink", "patch", "words", "word_features", "finest", "page_words")
        }
        return cls(unet, make_scheduler(), ScreenShape(*size, **shared, levels=levels))

    def conditions(self, before: Sequence[Tensor], turns: Sequence[ScreenTransition]) -> Conditions:
        shape = self.shape
        words = [
            word_features(
                turn.action,
                turn.goal,
                shape.words,
                shape.word_features,
                new_lines(turn.page, turn.answer) if shape.page_words else "",
                shape.page_words,
            )
            for turn in turns
        ]
        return Conditions(
            before=self.to_data(before),
            maps=torch.stack([action_map(turn.place, shape.inside, shape.shrink) for turn in turns]),
            words=torch.stack([features for features, _ in words]),
            present=torch.stack([present for _, present in words]),
        )

    def to_data(self, screens: Sequence[Tensor]) -> Tensor:
        """uint8 ``[3, height, width]`` each, as float32 ``[batch, 3, ...]`` in [-1, 1] with the edges repeated."""
        pixels = torch.stack(list(screens)).float() / 127.5 - 1
        height, width = self.shape.inside
        room = (0, width - pixels.shape[3], 0, height - pixels.shape[2])
        return F.pad(pixels, room, mode="replicate")

    def to_screens(self, data: Tensor) -> Tensor:
        """The other way round: uint8 ``[batch, 3, height, width]``."""
        pixels = data[:, :, : self.shape.height, : self.shape.width]
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def predict(self, conditions: Conditions, x_t: Tensor, t: Tensor, d: Tensor) -> Tensor:
        """The next screens, from where ``x_t`` is on the way from noise; ``t`` and ``d`` as in ``objective``."""
        patches = F.pixel_unshuffle(torch.cat([x_t, conditions.before, conditions.maps], dim=1), self.shape.patch)
        drawn = self.unet(
            patches,
            (1 - t) * TRAIN_STEPS,
            conditions.words,
            class_labels=d * TRAIN_STEPS,
            encoder_attention_mask=conditions.present,
        ).sample
        content, mask = F.pixel_shuffle(drawn, self.shape.patch).split([3, 1], 1)
        return conditions.before.lerp(content, mask.sigmoid())

    @torch.no_grad()
    def dream(self, conditions: Conditions, steps: int, seeds: Sequence[int]) -> Tensor:
        """The next screens, dreamed in ``steps`` steps: uint8 ``[batch, 3, height, width]``.

        A row is decided by its seed and conditions, whatever stands beside it in the batch.
        """

        def velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
            return velocity_to(self.predict(conditions, x, t, d), x, t)

        rows = [
            torch.randn(conditions.before.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        noise = torch.stack(rows).to(conditions.before.device)
        return self.to_screens(sample(velocity, noise, steps, self.scheduler))

    def save(self, folder: Path) -> None:
        """``unet/`` and ``scheduler/`` as diffusers writes them, and ``screen.json``."""
        self.unet.save_pretrained(folder / "unet", safe_serialization=True)
        self.scheduler.save_pretrained(folder / "scheduler")
        write_atomically(folder / SHAPE, json.dumps(asdict(self.shape), indent=1))

    @classmethod
    def load(cls, folder: Path) -> ScreenModel:
        """Raises ``UserError`` where the folder holds no such model, see ``loading``."""
        with loading(folder, "screens", "imagine fit-world-model worldmodel.kind=screen"):
            shape = ScreenShape(**json.loads((folder / SHAPE).read_text(encoding="utf-8")))
            unet = UNet2DConditionModel.from_pretrained(folder / "unet", use_safetensors=True, local_files_only=True)
            scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
            if unet.config.out_channels != (3 + 1) * shape.patch**2:
                raise ValueError("it is of a version that drew without masks")
        return cls(unet.eval(), scheduler, shape)


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Euler steps on a straight line. Its sigma is our ``1 - t``, and its model output points from picture to noise."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=1.0)


@torch.no_grad()
def sample(velocity: Velocity, noise: Tensor, steps: int, scheduler: FlowMatchEulerDiscreteScheduler) -> Tensor:
    """The picture at the end of ``steps`` equal steps from standard normal noise; ``d = 1 / steps``."""
    # a scheduler counts its steps; and the sigmas that it would choose itself do not divide the line evenly
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)], device=noise.device)
    x, batch = noise, noise.shape[0]
    d = torch.full((batch,), 1 / steps, device=noise.device)
    for k, timestep in enumerate(scheduler.timesteps):
        t = torch.full((batch,), k / steps, device=noise.device)
        x = scheduler.step(-velocity(x, t, d), timestep, x, return_dict=False)[0]
    return x
