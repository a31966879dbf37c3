"""The one decision for all schemes: exact p-value, threshold, verdict, and the empirical null beside it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepseal.adapter import BlackBox
from deepseal.errors import InputError
from deepseal.statistics import allowed_errors, p_value
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Extraction, Observation, Published, Scheme, observed, published_rule, scheme_of

Verdict = Literal["owned", "not-owned", "inconclusive"]


@dataclasses.dataclass(frozen=True)
class Null:
    """Bit error rates where there is no mark of this key: strangers' keys on the suspect, or other models.

    ``wrong_bits`` says how often each number of wrong bits was read, as pairs (wrong bits, readings) in order.
    """

    n: int
    mean_bit_error_rate: float
    lowest_bit_error_rate: float
    owned: int
    wrong_bits: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """A verdict and everything it rests on.

    Attributes:
        verdict: ``owned`` iff p_value * tried <= max_false_positive; ``inconclusive`` when the readable bits could
            not reach that rate even without an error, or when strangers' keys reach it on the same model.
        bits: readable bits; ``erasures`` are those whose score is numerical noise.
        bit_errors: readable bits that differ from the message.
        expected_errors: how many would on average, on a model that is independent of the key.
        p_value: probability of so few errors on a model that is independent of the key (exact).
        max_false_positive: the stated rate; ``tried`` divides it (keys or models that were tried).
        threshold: most errors that give ``owned``; None when no number does.
        margin_mean, margin_median, margin_5_percent, margin_lowest: over the readable bits, how far each score is on
            the message's side of its decision boundary, in standard deviations of the scores that strangers' keys
            (same triggers, another secret) read from this suspect; negative where the bit is wrong.
        message: text that the bits spell, if they spell one.
        null_keys, null_models: the empirical nulls, if asked for.
        warnings: what a reader must know.
        published: what the paper's own rule says of the same reading, where the scheme knows it.
    """

    verdict: Verdict
    bits: int
    erasures: int
    bit_errors: int
    bit_error_rate: float
    expected_errors: float
    p_value: float
    max_false_positive: float
    tried: int
    threshold: int | None
    margin_mean: float
    margin_median: float
    margin_5_percent: float
    margin_lowest: float
    message: str | None
    null_keys: Null | None
    null_models: Null | None
    warnings: tuple[str, ...]
    published: Published | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record; ``null`` is the null from random keys (sample size, mean and lowest rate)."""
        values = dataclasses.asdict(self)
        keys, models = values.pop("null_keys"), values.pop("null_models")
        return {**values, "warnings": list(self.warnings), "null": keys, "null_models": models}


def verify(
    model: BlackBox,
    key: Key,
    *,
    max_false_positive: float = 1e-6,
    null_keys: int = 0,
    null_models: Sequence[BlackBox] = (),
    tried: int = 1,
) -> Verification:
    """Decide whether a model carries the key's mark, at a stated false-positive rate.

    Args:
        model: the suspect; for a scheme with black-box access anything that answers, such as a ``RemoteOracle``.
        key: the owner's key.
        max_false_positive: greatest probability of ``owned`` for a model that is independent of the key.
        null_keys: number of strangers' keys to read from the suspect, for the empirical null; they are expanded from
            the key's secret, so that nobody can have prepared the suspect for them.
        null_models: models known to be independent of the key, for the empirical null.
        tried: number of keys or models among which this pair was chosen; the rate is divided by it (Bonferroni).

    Raises:
        InputError: a suspect that the key cannot read, or a rate outside (0, 1).
    """
    if not 0.0 < max_false_positive < 1.0:
        raise InputError(
            "a false-positive rate between 0 and 1", found=str(max_false_positive), do="use for instance 1e-6"
        )
    if tried < 1 or null_keys < 0:
        raise InputError("tried >= 1 and null_keys >= 0", found=f"{tried} and {null_keys}", do="correct them")
    scheme = scheme_of(key)
    rate = max_false_positive / tried
    observation = observed(scheme, model, key)
    extraction = scheme.decode(observation, key)
    errors, bits, p = _judge(extraction, key)
    usable = extraction.usable
    threshold = allowed_errors(extraction.chance[usable], rate)
    strangers = _stranger_null(scheme, observation, key, null_keys, rate) if null_keys else None
    others = _model_null(scheme, null_models, key, rate) if null_models else None
    warnings = _warnings(key, bits, extraction, threshold, strangers, others)
    impossible = threshold is None or (strangers is not None and strangers.owned > max(1, 10 * rate * strangers.n))
    verdict: Verdict = "inconclusive" if impossible else "owned" if p <= rate else "not-owned"
    margin = extraction.margin[usable]
    return Verification(
        verdict=verdict,
        bits=bits,
        erasures=len(usable) - bits,
        bit_errors=errors,
        bit_error_rate=errors / bits if bits else float("nan"),
        expected_errors=float((1.0 - extraction.chance[usable]).sum()),
        p_value=p,
        max_false_positive=max_false_positive,
        tried=tried,
        threshold=threshold,
        margin_mean=float(margin.mean()) if bits else float("nan"),
        margin_median=float(np.median(margin)) if bits else float("nan"),
        margin_5_percent=float(np.quantile(margin, 0.05)) if bits else float("nan"),
        margin_lowest=float(margin.min()) if bits else float("nan"),
        message=key.read_text(extraction.bits) if verdict == "owned" else None,
        null_keys=strangers,
        null_models=others,
        warnings=warnings,
        published=published_rule(scheme, extraction, key),
    )


def strangers(model: BlackBox, key: Key, count: int) -> NDArray[np.int64]:
    """What ``count`` strangers' keys read from a model: (count, 2) of wrong bits and readable bits."""
    scheme = scheme_of(key)
    observation = observed(scheme, model, key)
    read = [_judge(scheme.decode(observation, stranger), stranger)[:2] for stranger in key.strangers(count)]
    return np.asarray(read, dtype=np.int64)


def _judge(extraction: Extraction, key: Key) -> tuple[int, int, float]:
    usable = extraction.usable
    errors = int((extraction.bits != key.message())[usable].sum())
    return errors, int(usable.sum()), p_value(errors, extraction.chance[usable])


def _stranger_null(scheme: Scheme, seen: Observation, key: Key, count: int, rate: float) -> Null:
    return _null([(scheme.decode(seen, stranger), stranger) for stranger in key.strangers(count)], rate)


def _model_null(scheme: Scheme, models: Sequence[BlackBox], key: Key, rate: float) -> Null:
    return _null([(scheme.decode(observed(scheme, model, key), key), key) for model in models], rate)


def _null(readings: list[tuple[Extraction, Key]], rate: float) -> Null:
    judged = [_judge(extraction, key) for extraction, key in readings]
    rates = [errors / max(1, bits) for errors, bits, _ in judged]
    owned = sum(p <= rate for _, _, p in judged)
    counts = tuple(sorted(Counter(errors for errors, _, _ in judged).items()))
    return Null(len(rates), float(np.mean(rates)), float(np.min(rates)), owned, counts)


def _warnings(
    key: Key,
    bits: int,
    extraction: Extraction,
    threshold: int | None,
    strangers: Null | None,
    others: Null | None,
) -> tuple[str, ...]:
    found = []
    if key.reproducible:
        found.append(
            "the key was made from a seed: anybody who guesses the seed holds it; make evidence without --seed"
        )
    if bits < len(extraction.bits):
        found.append(f"{len(extraction.bits) - bits} of {len(extraction.bits)} bits are unreadable (numerical noise)")
    if bool((extraction.chance >= 1.0).any()):
        found.append("the paper's recipe fixes the labels, and nobody knows how many of them an unmarked model gives")
    elif threshold is None:
        found.append("too few readable bits to reach this false-positive rate even without an error")
    for null, what in ((strangers, "random keys"), (others, "independent models")):
        if null is not None and null.owned:
            found.append(f"{null.owned} of {null.n} {what} read as owned too: the null is violated")
    return tuple(found)
