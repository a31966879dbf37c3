"""Records joined into a story: which model was made how, and what was read from it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from deepseal.apps.report import words
from deepseal.record import Record

Role = Literal["marked", "attacked", "unmarked", "other"]

KNOWN_KINDS = (
    "model.train",
    "model.evaluate",
    "watermark.keygen",
    "watermark.embed",
    "watermark.verify",
    "attack.run",
)
_ORDER: dict[Role, int] = {"marked": 0, "attacked": 1, "other": 2, "unmarked": 3}
_GROUPS = {
    "marked model": "marked model",
    "attacked copy": "attacked copies",
    "attacked copy of another model": "attacked copies",
    "a suspect": "suspects",
    "another model": "other models",
    "model before it was marked": "before marking",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model: how it was made and what was read from it.

    Attributes:
        role: ``marked``, ``attacked``, ``unmarked`` (the same model before it was marked), or ``other``.
        name: the role in words.
        file: name of the model's file, if recorded.
        attacks: the attacks that made it, the first one first.
        accuracy: as recorded by the run that made it, or else by an evaluation.
        reading: the verification, or the embedding's own check; None when nothing was read.
        failure: the run that was to give this row, if it failed.
        trained: the run that trained it, for a model that is neither marked nor attacked.
    """

    role: Role
    name: str
    file: str | None
    attacks: tuple[Record, ...]
    accuracy: object
    reading: Record | None
    failure: Record | None = None
    trained: Record | None = None

    @property
    def verdict(self) -> str:
        """The recorded verdict, or ``failed``, ``interrupted`` or ``not-verified``."""
        if self.failure is not None:
            return self.failure.status
        if self.reading is None:
            return "not-verified"
        recorded = self.reading.results.get("verdict")
        return recorded if isinstance(recorded, str) and recorded else words.MISSING

    @property
    def verdict_in_words(self) -> str:
        """The verdict for people."""
        return "not verified" if self.verdict == "not-verified" else words.verdict(self.verdict)

    @property
    def key(self) -> str:
        """Fingerprint of the key that was looked for."""
        source = self.reading or self.failure
        return source.fingerprints.get("key", "") if source is not None else ""

    @property
    def how(self) -> str:
        """How the model was made, as far as the records say."""
        if self.trained is not None:
            seed = "" if self.trained.seed is None else f", seed {words.clean(self.trained.seed)}"
            return f"trained on {words.text(self.trained.params.get('data'))}{seed}"
        return "; then ".join(words.attack(record) for record in self.attacks)


class Lineage:
    """Which run made which model, by fingerprint."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.embeds: dict[str, Record] = {}
        self.originals: dict[str, Record] = {}
        self.measured: dict[str, Record] = {}
        self.trained: dict[str, Record] = {}
        self.files: dict[str, str] = {}
        self._attacks: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.status == "ok":
                self._add(record)

    def _add(self, record: Record) -> None:
        prints, model = record.fingerprints, record.fingerprints.get("model")
        made = model
        if record.kind == "watermark.embed":
            made = prints.get("marked")
            if made is not None:
                self.embeds[made] = record
            if model is not None:
                self.originals[model] = record
        elif record.kind == "attack.run":
            made = prints.get("attacked")
            if made is not None:
                self._attacks[made].append(record)
        elif record.kind in ("model.train", "model.evaluate") and model is not None:
            self.measured.setdefault(model, record)
            if record.kind == "model.train":
                self.trained.setdefault(model, record)
        file = record.results.get("file")
        if made is not None and isinstance(file, str) and record.kind != "watermark.keygen":
            self.files.setdefault(file, made)

    def attacks(self, model: str | None, file: str | None) -> tuple[Record, ...]:
        """The chain of attacks that made a model.

        An attack may give back the very model it got (``none`` does): then the file's name says which of the two it is.
        """
        last = self._attack(model, file)
        chain: list[Record] = []
        while last is not None and last not in chain:
            chain.insert(0, last)
            before = last.fingerprints.get("model")
            last = None if before is None or before in self.embeds else self._attack(before, None)
        return tuple(chain)

    def _attack(self, model: str | None, file: str | None) -> Record | None:
        candidates = self._attacks.get(model or "", [])
        named = [r for r in candidates if file is not None and words.file_name(r.results.get("file")) == file]
        real = [r for r in candidates if model not in self.embeds and r.fingerprints.get("model") != model]
        return next(iter([*named, *real]), None)

    def row(self, record: Record) -> Row:
        """The row of a verification."""
        path = record.params.get("model")
        file = words.suspect(record.params)
        model = record.fingerprints.get("model") or (self.files.get(path) if isinstance(path, str) else None) or ""
        attacks = self.attacks(model, file)
        role: Role = "other"
        accuracy = words.at(self.measured[model].results, "accuracy") if model in self.measured else None
        if attacks:
            start = attacks[0].fingerprints.get("model")
            role, name = (
                "attacked",
                "attacked copy" if not self.embeds or start in self.embeds else "attacked copy of another model",
            )
            accuracy = attacks[-1].results.get("accuracy_after")
        elif model in self.embeds:
            role, name = "marked", "marked model"
            accuracy = self.embeds[model].results.get("accuracy_after")
        elif model in self.originals:
            role, name = "unmarked", "model before it was marked"
            accuracy = self.originals[model].results.get("accuracy_before", accuracy)
        else:
            name = "another model" if model in self.trained else "a suspect"
        good, bad = (record, None) if record.status == "ok" else (None, record)
        trained = self.trained.get(model) if role in ("other", "unmarked") else None
        return Row(role, name, file, attacks, accuracy, good, bad, trained)


def rows(records: Sequence[Record]) -> list[Row]:
    """One row a model that was made or checked: the marked model, the attacked copies, other models."""
    lineage = Lineage(records)
    found: list[Row] = []
    verified = {record.fingerprints.get("model") for record in records if record.kind == "watermark.verify"}
    for record in records:
        results, file = record.results, words.file_name(record.results.get("file"))
        if record.kind == "watermark.verify":
            found.append(lineage.row(record))
        elif record.kind == "watermark.embed":
            if record.status != "ok":
                found.append(Row("marked", "marked model", file, (), None, None, record))
            elif record.fingerprints.get("marked") not in verified:
                found.append(Row("marked", "marked model", file, (), results.get("accuracy_after"), record))
        elif record.kind == "attack.run":
            if record.status != "ok":
                found.append(Row("attacked", "attacked copy", file, (record,), None, None, record))
            elif record.fingerprints.get("attacked") not in verified:
                attacks = lineage.attacks(record.fingerprints.get("attacked"), file) or (record,)
                found.append(Row("attacked", "attacked copy", file, attacks, results.get("accuracy_after"), None))
    return sorted(found, key=lambda row: _ORDER[row.role])


def owners(records: Sequence[Record], shown: Sequence[Row]) -> list[str]:
    """Owners of the keys that were looked for, as the keys' records name them, or else as the bits spell them."""
    keys = {row.key for row in shown if row.key}
    named = [
        r.params.get("owner") for r in records if r.kind == "watermark.keygen" and r.fingerprints.get("key") in keys
    ]
    spelled = [row.reading.results.get("message") for row in shown if row.reading is not None]
    known = [words.clean(owner, 80) for owner in (named or spelled) if isinstance(owner, str) and owner.strip()]
    return list(dict.fromkeys(known))


def headline(records: Sequence[Record], shown: Sequence[Row]) -> tuple[str, list[str]]:
    """What the verifications say together: a sentence, and remarks to it."""
    decided = [row for row in shown if row.reading is not None]
    owner = " or ".join(f"“{name}”" for name in owners(records, shown)[:3])
    mark = f"the mark of {owner}" if owner else "the mark"
    failed = [record for record in records if record.status != "ok"]
    remarks = []
    if failed:
        remarks.append(f"{len(failed)} of {len(records)} runs did not finish (listed below).")
    if not decided:
        return "No ownership check is among these records.", remarks
    if len(decided) == 1:
        row = decided[0]
        other = f"model “{row.file}”" if row.file else "model"
        model = f"the {other if row.role == 'other' else row.name}"
        says = {
            "owned": f"Owned: {model} carries {mark}.",
            "not-owned": f"Not owned: {mark} is not in {model}.",
            "inconclusive": f"Could not decide whether {model} carries {mark}.",
        }
        return says.get(row.verdict, f"The verdict on {model} is {row.verdict_in_words}."), remarks
    counts = []
    for group in dict.fromkeys(_GROUPS.values()):
        members = [row for row in decided if _GROUPS[row.name] == group]
        if members:
            counts.append(f"{group} {sum(row.verdict == 'owned' for row in members)} of {len(members)}")
    undecided = sum(row.verdict == "inconclusive" for row in decided)
    if undecided:
        counts.append(f"could not decide {undecided}")
    owned = sum(row.verdict == "owned" for row in decided)
    return f"{owned} of {len(decided)} checks found {mark}.", [f"Found in: {'; '.join(counts)}.", *remarks]
