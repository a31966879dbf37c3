"""Protect your own model: from key to verdict, with a network, a checkpoint and data that DeepSeal does not know."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split, save, train
from deepseal.attacks import REMOVAL
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, embed, save_key, verify

# Your data: inputs in data space, one row a sample, and integer labels.
bunch = load_digits()
x = torch.from_numpy(bunch.images / 16.0).float()[:, None]
y = torch.from_numpy(bunch.target)
mine, held_out = Split(x[:1400], y[:1400]), Split(x[1400:], y[1400:])

# Your network, trained as you like; here with DeepSeal's own loop.
module = nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
model = Classifier(module, InputSpec(shape=(1, 8, 8), num_classes=10))
model = train(model, mine, recipe=Recipe(epochs=15, batch_size=64), rng=Rng(0))

# Mark it.
key = DeepSigns(bits=256).keygen(model, mine, owner="Example Ltd")
marked = embed(model, mine, key, rng=Rng(0))
folder = Path(tempfile.mkdtemp())
save_key(key, folder / "owner.key", passphrase="use a better one")
save(marked, folder / "marked.safetensors")
print(f"accuracy {model.accuracy(held_out).value:.3f} before, {marked.accuracy(held_out).value:.3f} after")

# A thief prunes 80 % of the weights. Whose is the copy?
stolen = REMOVAL.build("prune", {"sparsity": 0.8}).remove(marked, mine, rng=Rng(0)).model
for name, suspect in (("marked", marked), ("stolen", stolen), ("unmarked", model)):
    result = verify(suspect, key, max_false_positive=1e-9)
    print(f"{name}: {result.verdict}, {result.bit_errors} of {result.bits} bits wrong, p-value {result.p_value:.1e}")
