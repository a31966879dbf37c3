"""Sounds that nobody recorded: tones of known pitch, and voices made of a pulse train and a vowel's resonances."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from torch import Tensor

RATE = 16_000
# Peterson and Barney (1952), table II, men: the first three formants in Hz.
VOWELS = (
    (270, 2290, 3010),
    (390, 1990, 2550),
    (530, 1840, 2480),
    (660, 1720, 2410),
    (730, 1090, 2440),
    (570, 840, 2410),
    (440, 1020, 2240),
    (300, 870, 2240),
)


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, 1024) frames at 16 kHz, each of zero mean and unit variance, and their pitch in Hz (60 … 1,000)."""
    draw = np.random.default_rng(seed)
    time = np.arange(1024) / RATE
    frames, pitches = [], []
    for _ in range(count):
        pitch = float(np.exp(draw.uniform(np.log(60), np.log(1000))))
        order = np.arange(1, min(12, int(0.45 * RATE / pitch)) + 1)
        weight = draw.uniform(0.3, 1.0, len(order)) / order ** draw.uniform(0.5, 2.0)
        phase = draw.uniform(0, 2 * np.pi, len(order))
        tone = (weight[:, None] * np.sin(2 * np.pi * pitch * order[:, None] * time + phase[:, None])).sum(axis=0)
        noise = draw.normal(size=len(time)) * tone.std() * 10 ** (-draw.uniform(0, 30) / 20)
        frame = tone + noise
        frames.append((frame - frame.mean()) / frame.std())
        pitches.append(pitch)
    return torch.from_numpy(np.stack(frames)).float(), torch.tensor(pitches)


def utterance(speaker: int, number: int, seconds: float = 1.62) -> NDArray[np.float64]:
    """A speaker says a few vowels. Who speaks fixes pitch, length of the throat, damping, tilt and breath."""
    who = np.random.default_rng([speaker, 0])
    pitch, throat = np.exp(who.uniform(np.log(85), np.log(260))), who.uniform(0.85, 1.25)
    damping, tilt, breath = who.uniform(50, 140, 3), who.uniform(0.85, 0.97), who.uniform(0.005, 0.06)
    say = np.random.default_rng([speaker, 1 + number])
    samples, sound = int(seconds * RATE), []
    while sum(map(len, sound)) < samples:
        length = int(say.uniform(0.12, 0.3) * RATE)
        glide = pitch * np.exp(np.linspace(*say.normal(0, 0.06, 2), length))
        phase = np.cumsum(glide / RATE) + say.uniform()
        source = np.diff(np.floor(phase), prepend=np.floor(phase[0])) + breath * say.normal(size=length)
        source = lfilter([1], [1, -tilt], source)
        for formant, width in zip(VOWELS[say.integers(len(VOWELS))], damping, strict=True):
            radius, angle = np.exp(-np.pi * width / RATE), 2 * np.pi * formant * throat / RATE
            source = lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], source)
        rise = np.minimum(1, np.arange(length) / 400)
        sound.append(source * rise * rise[::-1])
    wave = np.concatenate(sound)[:samples]
    return wave * 0.03 / wave.std()
