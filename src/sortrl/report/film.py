"""Episodes as an animated GIF: the picture, and under it the radius of every decision so far."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from sortrl.core.files import atomic_path
from sortrl.evaluate.watch import Episode, pictures

WIDTH = 300  # pixels of a panel
MOST_FRAMES = 200
MOST_BYTES = 3_000_000
COLOURS = 64
_TITLE, _STATUS, _MARKS, _STRIP, _GAP = 22, 20, 9, 48, 10  # heights of the parts of a panel, and between panels
_STEP = 2  # pixels of a decision in the strip
_GREEN, _PALE_GREEN = (44, 154, 94), (223, 242, 230)
_RED, _PALE_RED = (216, 72, 79), (250, 223, 224)
_INK, _MUTED, _PAPER = (29, 34, 40), (91, 100, 112), (255, 255, 255)
_LAST_FRAME_MS = 2000


def film(episodes: Sequence[Episode], path: str | Path) -> None:
    """Write episodes side by side, in step with each other, as a GIF of at most 200 frames and 3 MB.

    Under each picture stand the radii of the last 150 decisions: green where certified at eps, red where not; a black tick
    above marks a step at which the attack changed the action.
    """
    longest = max(map(len, episodes))
    shown = [int(step) for step in np.unique(np.linspace(0, longest, min(MOST_FRAMES, longest + 1)).round())]
    top = _radius_scale(episodes)
    panels = [_Panel(episode, shown, top) for episode in episodes]
    frames = [_side_by_side([panel.at(index) for panel in panels]) for index in range(len(shown))]
    milliseconds = 1000.0 / panels[0].pace * longest / len(shown)
    data = _gif(frames, milliseconds)
    while len(data) > MOST_BYTES and len(frames) > 20:
        frames, milliseconds = [*frames[:-1:2], frames[-1]], 2 * milliseconds
        data = _gif(frames, milliseconds)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def _radius_scale(episodes: Sequence[Episode]) -> float:
    """The radius at the top of the strips: most radii fit, and eps is well visible."""
    radii = np.concatenate([episode.radii for episode in episodes])
    return max(float(np.quantile(radii, 0.95)), 2.0 * episodes[0].eps_unit, 1e-6)


class _Panel:
    """One episode: its pictures, scaled, and its strip of radii."""

    def __init__(self, episode: Episode, shown: list[int], top: float) -> None:
        self.episode, self.shown = episode, shown
        own = sorted({min(step, len(episode)) for step in shown})
        taken, self.pace = pictures(episode, own)
        self.pictures = dict(zip(own, map(_scaled, taken), strict=True))
        self.strip = _strip(episode, top)
        self.level = round(_STRIP * episode.eps_unit / top)
        self.returns = np.concatenate([[0.0], np.cumsum(episode.rewards)])
        self.certified = np.concatenate([[0], np.cumsum(episode.certified)])

    def at(self, index: int) -> Image.Image:
        """The panel when ``shown[index]`` steps have been played."""
        played = min(self.shown[index], len(self.episode))
        picture = self.pictures[played]
        strip_top = _TITLE + picture.height + _STATUS
        frame = Image.new("RGB", (WIDTH, strip_top + _MARKS + _STRIP), _PAPER)
        frame.paste(picture, (0, _TITLE))
        window = (_STEP * max(0, played - WIDTH // _STEP), 0, _STEP * played, self.strip.height)
        if played:
            frame.paste(self.strip.crop(window), (0, strip_top))
        draw = ImageDraw.Draw(frame)
        self._words(draw, played, strip_top - _STATUS + 4)
        bottom = frame.height - 1
        draw.line([(0, bottom), (WIDTH, bottom)], fill=_MUTED)
        for x in range(0, WIDTH, 6):
            draw.line([(x, bottom - self.level), (x + 2, bottom - self.level)], fill=_INK)
        return frame

    def _words(self, draw: ImageDraw.ImageDraw, played: int, y: int) -> None:
        episode, ended = self.episode, played == len(self.episode)
        attack = "clean" if episode.attack == "none" else episode.attack
        title = f"{episode.agent}, {attack}" if episode.agent else attack
        draw.text((4, 4), title, fill=_INK, font=_font(12))
        if played:
            share = f"{math.floor(100 * self.certified[played] / played)} % certified at ε = {episode.eps_unit:g}"
            draw.text((WIDTH - 4, 5), share, fill=_MUTED, font=_font(10), anchor="ra")
        text = f"{'ended, ' if ended else ''}step {played}, return {self.returns[played]:.4g}"
        draw.text((4, y), text, fill=_MUTED, font=_font(10))
        if not ended:
            safe = bool(episode.certified[played])
            radius = f"radius {episode.radii[played]:.3f}, {'certified' if safe else 'not certified'}"
            draw.text((WIDTH - 4, y), radius, fill=_GREEN if safe else _RED, font=_font(10), anchor="ra")


def _strip(episode: Episode, top: float) -> Image.Image:
    """The radii of a whole episode as bars ``_STEP`` pixels wide, on a pale ground that shows the smallest ones too."""
    strip = Image.new("RGB", (_STEP * len(episode), _MARKS + _STRIP), _PAPER)
    draw = ImageDraw.Draw(strip)
    bottom = strip.height - 1
    for step, (radius, safe, changed) in enumerate(zip(episode.radii, episode.certified, episode.changed, strict=True)):
        left, right = _STEP * step, _STEP * step + _STEP - 1
        tall = round(_STRIP * min(1.0, float(radius) / top))
        draw.rectangle([(left, _MARKS), (right, bottom)], fill=_PALE_GREEN if safe else _PALE_RED)
        draw.rectangle([(left, bottom - max(1, tall)), (right, bottom)], fill=_GREEN if safe else _RED)
        if changed:
            draw.rectangle([(left, 0), (right, _MARKS - 3)], fill=_INK)
    return strip


def _scaled(picture: npt.NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(picture)
    return image.resize((WIDTH, max(1, round(image.height * WIDTH / image.width))), Image.Resampling.BOX)


def _side_by_side(images: list[Image.Image]) -> Image.Image:
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    whole = Image.new("RGB", (width, max(image.height for image in images)), _PAPER)
    for index, image in enumerate(images):
        whole.paste(image, (index * (WIDTH + _GAP), 0))
    return whole


def _gif(frames: list[Image.Image], milliseconds: float) -> bytes:
    """All frames in one palette: without one of its own, a frame stores only what changed."""
    sample = frames[:: max(1, len(frames) // 8)]
    mosaic = Image.new("RGB", (frames[0].width, frames[0].height * len(sample)))
    for index, frame in enumerate(sample):
        mosaic.paste(frame, (0, index * frame.height))
    palette = mosaic.quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    pace = max(20, round(milliseconds / 10) * 10)  # viewers slow down what is faster
    buffer = io.BytesIO()
    durations = [*[pace] * (len(flat) - 1), _LAST_FRAME_MS]
    flat[0].save(buffer, "GIF", save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=False)
    return buffer.getvalue()


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
