"""Laws for every registered scheme."""

from __future__ import annotations

import numpy as np
import pytest

from deepseal.adapter import Oracle
from deepseal.errors import DeepSealError
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, Key, extract, verify
from deepseal.watermark.verify import strangers

QUICK = {
    "deepsigns-blackbox": {"models": 1},
    "blackmarks": {"models": 1, "bits": 32, "votes": 3},
    "diction": {"training": 50},
}


@pytest.mark.parametrize("name", SCHEMES.names())
class TestEveryScheme:
    def make(self, name, base, digits, seed=0) -> Key:
        return SCHEMES.build(name, QUICK.get(name, {})).keygen(base, digits.train, owner="Example Ltd", rng=Rng(seed))

    def test_same_seed_same_bytes_and_same_verdict(self, name, base, digits):
        first, second = (self.make(name, base, digits) for _ in range(2))
        assert first.to_bytes() == second.to_bytes()
        assert verify(base, first) == verify(base, second)
        assert self.make(name, base, digits, seed=1).to_bytes() != first.to_bytes()

    def test_a_key_without_seed_is_not_reproducible(self, name, base, digits):
        scheme = SCHEMES.build(name, QUICK.get(name, {}))
        keys = [scheme.keygen(base, digits.train, owner="Example Ltd") for _ in range(2)]
        assert not any(key.reproducible for key in keys)
        assert keys[0].secret != keys[1].secret
        assert len(keys[0].secret) == 32

    def test_key_survives_its_file_form(self, name, base, digits):
        key = self.make(name, base, digits)
        again = Key.from_bytes(key.to_bytes())
        assert again.to_bytes() == key.to_bytes()
        assert verify(base, again) == verify(base, key)

    def test_unmarked_model_is_not_owned(self, name, base, digits):
        key = self.make(name, base, digits)
        result = verify(base, key, max_false_positive=1e-3)
        assert result.verdict == "not-owned"
        chance = extract(base, key).chance.mean()
        assert result.bit_error_rate > 1 - chance - 4 * np.sqrt(chance * (1 - chance) / result.bits)

    def test_secret_is_not_shown(self, name, base, digits):
        key = self.make(name, base, digits)
        for shown in (repr(key), str(key), repr(key.public), repr(key.params)):
            assert key.secret.hex() not in shown
            assert repr(key.secret) not in shown
            assert "trigger_x" not in shown

    def test_extraction_is_well_formed(self, name, base, digits):
        key = self.make(name, base, digits)
        read = extract(base, key)
        assert len(read.bits) == len(read.usable) == len(read.chance) == len(read.margin) == key.bits
        assert set(np.unique(read.bits)) <= {0, 1}
        right = read.bits == key.message()
        assert np.array_equal(right[read.usable], (read.margin > 0)[read.usable])

    def test_a_margin_of_1_is_a_standard_deviation_of_strangers(self, name, base, digits):
        """On logits; and the scale of a model's logits, which a thief chooses, is nothing to it."""
        key = self.make(name, base, digits)
        scheme = SCHEMES.build(name, key.params)
        seen = scheme.observe(base, key)
        read = [scheme.decode(seen, stranger) for stranger in key.strangers(100)]
        margins = np.concatenate([one.margin[one.usable] for one in read])
        assert np.std(margins) == pytest.approx(1.0, abs=0.06)
        if key.public["access"] == "black-box" and name != "plain":
            hotter = Oracle(lambda x: 3.0 * base.query(x), base.spec, output="logits")
            assert extract(hotter, key).margin == pytest.approx(extract(base, key).margin, rel=1e-4, abs=1e-6)

    def test_strangers_are_wrong_as_often_as_promised(self, name, base, digits):
        """At least: where a model answers a class that no stranger's label is, they agree less than chance."""
        key = self.make(name, base, digits)
        errors, bits = strangers(base, key, 200).T
        rate = 1 - extract(base, key).chance.mean()
        deviation = np.sqrt(rate * (1 - rate) / bits.sum())
        assert errors.sum() / bits.sum() > rate - 4 * deviation
        if key.public["access"] == "white-box":
            assert errors.sum() / bits.sum() < rate + 4 * deviation


def test_unknown_scheme_names_the_near_one():
    with pytest.raises(DeepSealError, match="'deepsigns'"):
        SCHEMES.get("deepsign")
