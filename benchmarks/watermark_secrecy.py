"""How secret a mark is, on the digits: can it be read without the triggers, and can it be seen at all?

    python benchmarks/watermark_secrecy.py [--schemes deepsigns,ewe] [--models 20] [--summary]

`public`: the owner's key with public inputs in place of its triggers, on every marked model. `inference`: half of the
models are marked, each from its own weights and with its own key; the others had as many further updates without a
mark. A classifier is trained on statistics of weights and of activations on public data (property inference), and
judged on folds that it has not seen. One record a scheme; what each model gave is kept in ``build/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cells import code, is_done  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from scipy import stats  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import roc_auc_score  # noqa: E402
from sklearn.model_selection import StratifiedKFold, cross_val_predict  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from watermark_baselines import ARCH, DATA, NAMES, OWNER, trained  # noqa: E402

from deepseal.adapter import Classifier, Dataset, Recipe, Split, checkpoint, load, load_data, train  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng, expand  # noqa: E402
from deepseal.statistics import rate  # noqa: E402
from deepseal.watermark import SCHEMES, Key, embed, images  # noqa: E402
from deepseal.watermark.scheme import scheme_of  # noqa: E402
from deepseal.watermark.zhang import sourced  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "watermark-secrecy"
KEPT = HERE.parent / "build" / "benchmarks" / "watermark-secrecy"
CODE = code()
FOLDS, RESAMPLED = 5, 2000


def spectrum(matrix: NDArray[np.float64]) -> list[float]:
    """Norms and shape of the singular values of a matrix."""
    values = np.linalg.svd(matrix, compute_uv=False)
    share = values**2 / np.sum(values**2)
    entropy = -np.sum(share * np.log(share + 1e-12))
    return [*np.log(values[:3] + 1e-9), np.log(np.median(values) + 1e-9), entropy, 1.0 / share[0]]


def moments(values: NDArray[np.float64]) -> list[float]:
    """Mean, spread, skewness, kurtosis, and quantiles of the size."""
    size = np.quantile(np.abs(values), [0.1, 0.5, 0.9, 0.99, 1.0])
    return [values.mean(), values.std(), stats.skew(values, axis=None), stats.kurtosis(values, axis=None), *size]


def features(model: Classifier, public: Split) -> NDArray[np.float64]:
    """What anybody who holds the weights and public data can compute."""
    found: list[float] = []
    for tensor in model.tensors().values():
        weight = tensor.detach().double().numpy()
        found += moments(weight)
        if weight.ndim > 1:
            flat = weight.reshape(len(weight), -1)
            found += [*spectrum(flat), *moments(flat.mean(axis=0)), *moments(flat.mean(axis=1))]
            found += moments(np.linalg.norm(flat, axis=1))
    layers = [name for name, layer in model.module.named_modules() if isinstance(layer, torch.nn.Linear)]
    for values in model.features(public.x, layers).values():
        seen = values.flatten(1).double().numpy()
        means = np.stack([seen[public.y.numpy() == label].mean(axis=0) for label in range(model.spec.num_classes)])
        found += [*moments(seen), (seen > 0).mean(), *spectrum(seen), *spectrum(means), *moments(means)]
    scores = model.query(public.x).double()
    likely = scores.softmax(dim=1)
    entropy = -(likely * likely.clamp_min(1e-12).log()).sum(dim=1)
    loss = torch.nn.functional.cross_entropy(scores, public.y)
    found += [*moments(scores.amax(dim=1).numpy()), float(entropy.mean()), float(loss), model.accuracy(public).value]
    return np.nan_to_num(np.asarray(found, dtype=np.float64), posinf=1e6, neginf=-1e6)


def public_inputs(name: str, key: Key, base: Classifier, data: Dataset) -> dict[str, torch.Tensor]:
    """What somebody who has the key's secret but not its triggers would ask instead."""
    other = expand(key.secret, "somebody else's", 32)
    if name == "deepsigns":
        carriers = torch.tensor(key.public["carriers"])
        members = torch.nonzero(torch.isin(data.test.y, carriers)).reshape(-1)
        return {"trigger_x": data.test.tensor[members], "trigger_y": data.test.y[members]}
    if name == "diction":
        return {"trigger_x": images.noisy(other, "diction", len(key.tensors["trigger_x"]), key.spec)}
    if name in ("zhang", "ewe"):  # the owner's patterns, on images of the same classes that nobody trained on
        scheme, votes = scheme_of(key), int(key.public["votes"])
        values, places = images.stamps(key.secret, name, key.bits, key.spec, scheme.size)  # type: ignore[attr-defined]
        drawn = []
        for group, label in enumerate(key.tensors["avoided"].tolist()):
            own = data.test.take(torch.nonzero(data.test.y == label).reshape(-1))
            drawn.append(sourced(own, expand(other, str(group), 32), 1, votes)[0])
        x = torch.cat(drawn)
        return {"trigger_x": torch.where(places.repeat_interleave(votes, 0), values.repeat_interleave(votes, 0), x)}
    if not key.tensors:
        return {}
    drawn = scheme_of(key).keygen(base, data.test, owner="somebody else", rng=Rng(0).child(name, key.binding))
    return {"trigger_x": drawn.tensors["trigger_x"]}  # made as the owner's are, from public data


def one(name: str, index: int, data: Dataset, marked: bool) -> dict[str, NDArray[Any]]:
    """A model's features; of a marked one also the wrong and readable bits with the triggers, and without."""
    own = Rng(0).child("secrecy", "marked" if marked else "unmarked", index)
    path = KEPT / f"base-{'marked' if marked else 'unmarked'}-{index}-{CODE}.safetensors"
    if not path.exists():
        checkpoint.save(trained(data, own), path)
    base = load(path)
    scheme = SCHEMES.build(name, {"models": 0} if name == "deepsigns-blackbox" else {})
    key = scheme.keygen(base, data.train, owner="Example Ltd", rng=own.child(name))
    if not marked:
        steps = len(scheme.embedding(base, data.train, key, rng=Rng(0)))
        again = KEPT / f"plain-{steps}-{index}-{CODE}.npz"
        if not again.exists():
            recipe = Recipe(steps=steps, schedule="cosine")
            plain = train(base, data.train, recipe=recipe, rng=own.child("plain"))
            np.savez(again, features=features(plain, data.test))
        return dict(np.load(again))
    model = embed(base, data.train, key, rng=own.child(name, "embed"))
    result = {"features": features(model, data.test), "own": wrong(model, key, key)}
    replaced = public_inputs(name, key, base, data)
    if replaced:
        asked = dataclasses.replace(key, tensors={**key.tensors, **replaced})
        result |= {"public": wrong(model, key, asked), "public_unmarked": wrong(base, key, asked)}
    return result


def wrong(model: Classifier, key: Key, asked: Key) -> NDArray[np.int64]:
    """Wrong and readable bits of a key, when the inputs of another are asked."""
    scheme = scheme_of(key)
    read = scheme.decode(scheme.observe(model, asked), key)
    return np.array([int((read.bits != key.message())[read.usable].sum()), int(read.usable.sum())])


def kept(name: str, index: int, data: Dataset, marked: bool) -> dict[str, NDArray[Any]]:
    """``one``, made once."""
    path = KEPT / f"{name}-{'marked' if marked else 'unmarked'}-{index}-{CODE}.npz"
    if not path.exists():
        np.savez(path, **one(name, index, data, marked))  # type: ignore[arg-type]
    return dict(np.load(path))


def separated(x: NDArray[np.float64], y: NDArray[np.int64], seed: int) -> dict[str, Any]:
    """Area under the curve of each classifier on unseen folds, with a 95 % bootstrap interval."""
    found = {}
    candidates = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=5000)),
        "random forest": RandomForestClassifier(500, random_state=seed),
    }
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    draw = Rng(seed).child("bootstrap").numpy()
    ones, zeros = np.flatnonzero(y == 1), np.flatnonzero(y == 0)
    for title, classifier in candidates.items():
        scores = cross_val_predict(classifier, x, y, cv=folds, method="predict_proba")[:, 1]
        resampled = []
        for _ in range(RESAMPLED):
            index = np.concatenate([draw.choice(ones, len(ones)), draw.choice(zeros, len(zeros))])
            resampled.append(roc_auc_score(y[index], scores[index]))
        found[title] = {
            "auc": float(roc_auc_score(y, scores)),
            "interval_95": [float(end) for end in np.quantile(resampled, [0.025, 0.975])],
            "accuracy": rate(int(((scores > 0.5) == y).sum()), len(y)).as_dict(),
        }
    return found


def fill(run: Run, name: str, data: Dataset, models: int) -> None:
    """Both measurements of one scheme."""
    rows = {marked: [kept(name, index, data, marked) for index in range(models)] for marked in (False, True)}
    x = np.stack([row["features"] for marked in rows for row in rows[marked]])
    y = np.repeat([0, 1], models)
    run.results["inference"] = {"models_each": models, "features": x.shape[1], **separated(x, y, 0)}
    for kind in ("own", "public", "public_unmarked"):
        if kind in rows[True][0]:
            errors, bits = np.sum([row[kind] for row in rows[True]], axis=0)
            run.results[f"wrong_{kind}"] = rate(int(errors), int(bits)).as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(NAMES))
    parser.add_argument("--models", type=int, default=20, help="marked ones, and as many unmarked")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for folder in (RECORDS, KEPT):
        folder.mkdir(parents=True, exist_ok=True)
    data = load_data(DATA)
    for name in options.schemes.split(",") if not options.summary else ():
        params = {"scheme": name, "scheme_params": SCHEMES.build(name, {}).as_dict(), "arch": ARCH, "data": DATA}
        params |= {"owner": OWNER.as_dict(), "models": options.models, "code": CODE}
        path = RECORDS / f"{name}.json"
        if is_done(path, params):
            continue
        run = Run("benchmark.watermark-secrecy", seed=0, params=params)
        fill(run, name, data, options.models)
        run.record().write(path, force=True)
        print(name, run.results, flush=True)
    (RECORDS / "README.md").write_text(summary([read_record(path) for path in sorted(RECORDS.glob("*.json"))]))


def summary(records: list[Record]) -> str:
    """Markdown: a row a scheme."""
    lines = ["# How secret the marks are, on the digits", ""]
    lines += ["Made by `python benchmarks/watermark_secrecy.py` from these records: 8x8 digits, MLP, default recipes."]
    lines += ["Wrong bits over all marked models. AUC of telling marked models from unmarked ones on unseen folds:"]
    lines += ["0.5 is a guess, 1 is certain; 95 % bootstrap interval.", ""]
    lines += [
        "| scheme | models, marked and not | wrong bits, own triggers | public inputs | the same, unmarked models"
    ]
    lines[-1] += " | AUC, logistic regression | AUC, random forest |"
    lines += ["|---" * 7 + "|"]
    for name in NAMES:
        for record in (r for r in records if r.params["scheme"] == name):
            found = record.results
            shares = [found.get(f"wrong_{kind}") for kind in ("own", "public", "public_unmarked")]
            cells = [f"{100 * s['value']:.1f} % of {s['n']:,}" if s else "" for s in shares]
            told = [found["inference"][title] for title in ("logistic regression", "random forest")]
            cells += [f"{t['auc']:.2f} ({t['interval_95'][0]:.2f} to {t['interval_95'][1]:.2f})" for t in told]
            lines.append(f"| {name} | {found['inference']['models_each']} each | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
