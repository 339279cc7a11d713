"""The network, what it reads and how it is trained, and its checkpoint: folders of diffusers, of which no code is run.

Flow matching with shortcut forcing: a picture ``x1`` is reached from noise ``x0`` on a line, ``x_t = (1 - t) x0 + t
x1``, whose velocity is ``x1 - x0`` (rectified flow; Liu et al., arXiv 2209.03003, eq. 1). A network that also knows how
long a step ``d`` it takes learns that one step of ``2d`` ends where two of ``d`` do (shortcut models; Frans et al.,
arXiv 2410.12557, eq. 5). As in Dreamer 4 (Hafner et al., arXiv 2509.24527, eq. 7) it predicts ``x1`` in place of the
velocity. Dreamer 4 draws ``t`` evenly (eq. 4) and weighs a row by ``0.9 t + 0.1`` (eq. 8), since near the noise there
is little to learn of a film; of a page there is most to learn there, so ``t`` is drawn more often there, and all rows
weigh the same.

Shapes: pictures are ``[batch, channels, height, width]``; ``t`` and ``d`` are ``[batch]`` and lie in [0, 1].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

from real_envs.files import write_atomically
from worldmodel.extras import loading
from worldmodel.extras.screen.data import MAPS, ScreenTransition, action_map, new_lines, padded, word_features
from worldmodel.extras.screen.settings import HEADS, ScreenSettings

# (which rows of the batch, x_t, t, d) -> x1
Predict = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (x_t, t, d) -> velocity
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def interpolate(x0: Tensor, x1: Tensor, t: Tensor) -> Tensor:
    """``x_t = (1 - t) x0 + t x1``."""
    return (1 - _wide(t)) * x0 + _wide(t) * x1


def velocity_to(x1: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The velocity that leads straight from ``x_t`` to ``x1``: ``(x1 - x_t) / (1 - t)``, for ``t`` below 1."""
    return (x1 - x_t) / (1 - _wide(t))


def shortcut_target(velocity: Velocity, x_t: Tensor, t: Tensor, d: Tensor) -> Tensor:
    """What the velocity of a step of ``2d`` should be (arXiv 2410.12557, eq. 5)::

    s(x_t, t, d) / 2  +  s(x', t + d, d) / 2,      x' = x_t + d s(x_t, t, d)
    """
    first = velocity(x_t, t, d)
    second = velocity(x_t + _wide(d) * first, t + d, d)
    return (first + second) / 2


@dataclass(frozen=True, slots=True)
class Noise:
    """What is random about a batch."""

    x0: Tensor  # of the pictures' shape, standard normal
    t: Tensor  # where on the line, a multiple of ``d`` below 1
    d: Tensor  # how long a step is learned
    # bool, ``[batch]``; rows that learn from two steps of half the length. The others have the finest ``d`` and learn
    # from the data.
    bootstrap: Tensor

    def to(self, device: torch.device) -> Noise:
        return Noise(*(getattr(self, f.name).to(device) for f in fields(self)))


def draw_noise(like: Tensor, finest: int, share: float, generator: torch.Generator) -> Noise:
    """Noise for pictures like these.

    Each of the steps 1, 1/2, ... down to twice the finest is ``d`` of as many bootstrapped rows, whose ``t`` is uniform
    over the multiples of ``d`` below 1 (Dreamer 4, eq. 4). That of the others is the square of a uniform number,
    rounded down to such a multiple.

    Args:
        finest: number of the shortest steps, a power of two.
        share: of the rows that are bootstrapped; the first ones.
    """
    count = like.shape[0]
    x0 = torch.randn(like.shape, generator=generator)
    bootstrap = torch.arange(count) < (round(share * count) if finest > 1 else 0)
    levels = finest.bit_length() - 1  # 1, 1/2, ..., 2/finest
    level = torch.randint(0, max(1, levels), (count,), generator=generator)
    steps = torch.where(bootstrap, 2**level, torch.full_like(level, finest))
    chance = torch.rand(count, generator=generator)
    place = (torch.where(bootstrap, chance, chance.square()) * steps).long().clamp(max=finest - 1)
    return Noise(x0, place / steps, 1 / steps, bootstrap)


def shortcut_forcing_loss(predict: Predict, x1: Tensor, noise: Noise) -> tuple[Tensor, dict[str, float]]:
    """Dreamer 4's loss of a batch without its weights (arXiv 2509.24527, eq. 7), a mean over rows and pixels::

        |x̂1 - x1|²                                        rows that learn from the data
        (1 - t)² |(x̂1 - x_t) / (1 - t) - target|²         bootstrapped rows, target of steps d/2

    Returns:
        the loss, and the plain errors of both kinds of rows where there are any.
    """
    rows = torch.arange(x1.shape[0], device=x1.device)
    x_t = interpolate(noise.x0, x1, noise.t)
    guess = predict(rows, x_t, noise.t, noise.d)
    goal = x1.clone()
    if noise.bootstrap.any():
        chosen = rows[noise.bootstrap]
        start, t, half = x_t[chosen], noise.t[chosen], noise.d[chosen] / 2

        def velocity(x: Tensor, at: Tensor, d: Tensor) -> Tensor:
            return velocity_to(predict(chosen, x, at, d), x, at)

        with torch.no_grad():
            # (1 - t)² |(x̂1 - x_t) / (1 - t) - target|² is the distance of x̂1 to this point
            goal[chosen] = start + _wide(1 - t) * shortcut_target(velocity, start, t, half)
    error = (guess - goal).square().flatten(1).mean(1)
    errors = {}
    for name, which in (("flow_error", ~noise.bootstrap), ("shortcut_error", noise.bootstrap)):
        if which.any():
            errors[name] = float(error[which].detach().mean())
    return error.mean(), errors


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
