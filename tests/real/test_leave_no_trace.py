"""Every registered algorithm on every model: it works, or says in a line why not, and leaves the model as it was."""

from __future__ import annotations

import warnings

import pytest
from everything import ALGORITHMS, WORKS, attempt, detector, failing, few
from zoo import ZOO

from deepseal.adapter import Classifier, Split
from deepseal.attacks import EVASION

pytest.importorskip("skimage", reason="for the environment of 'make real-env'; run 'make test-real'")

TRIGGERS = ("adi", "zhang", "le-merrer", "deepsigns-blackbox", "ewe", "blackmarks")
REWIRING = ("permute", "rescale", "dummy")
NO_STREAM = {"rotate": "a residual stream that layers only add to and read linearly"}
FIXED_SCALES = {"rescale": "activations that pass on a factor or a sign", **NO_STREAM}
NO_CLASSES = dict.fromkeys((*TRIGGERS, "other-task", "distil", *EVASION.names()), "a model with classes")
NOT_PLAIN = dict.fromkeys(
    (*TRIGGERS, "diction", *EVASION.names()), "a model from one float tensor of fixed shape to logits"
)
UNTRACED = dict.fromkeys((*REWIRING, "rotate"), "a network whose forward pass can be traced")
UNMOVABLE = {**dict.fromkeys(REWIRING, "hidden neurons that can be moved"), **NO_STREAM}
TWO_INPUTS = dict.fromkeys((*REWIRING, "rotate"), "inputs that are one tensor")
NOT_DRAWN = {
    **dict.fromkeys(("deepsigns-blackbox", "blackmarks"), "layers whose weights can be drawn again"),
    "distil": "layers that can be reset",
}
LARGE_IMAGES = {"jsma": "at most 4096 features"}
SCRIPT = "a module whose layers run in Python"

REFUSED: dict[str, dict[str, str]] = {
    "efficientnet-lite0": {**UNMOVABLE, **LARGE_IMAGES, "blackmarks": "samples of every class"},
    "crepe-tiny": {**NO_CLASSES, **UNTRACED},
    "crepe-full": {},
    "resemblyzer": {
        **NO_CLASSES,
        **UNMOVABLE,
        **dict.fromkeys(("hash-bound", "uchida"), "a model with a hidden linear or convolutional layer"),
    },
    "minilm": {**NO_CLASSES, **NOT_PLAIN, **TWO_INPUTS, "query-noise": "a model of one floating-point input"},
    "onet": {**NO_CLASSES, **NOT_PLAIN, **UNMOVABLE},
    "experts": {**UNTRACED, **NOT_DRAWN},
    "mamba": {**UNTRACED, **NOT_DRAWN},
    "decoder": {**NO_CLASSES, **NOT_PLAIN, **FIXED_SCALES, "query-noise": "a model of one floating-point input"},
    "resnet-18": {**LARGE_IMAGES, **NO_STREAM},
    "resnet-50": {**LARGE_IMAGES, **NO_STREAM},
    "mobilenet-v3": {**LARGE_IMAGES, **NO_STREAM},
    "vit-b-16": {**FIXED_SCALES, **LARGE_IMAGES, **NOT_DRAWN},
    "swin-t": {**FIXED_SCALES, **LARGE_IMAGES, **NOT_DRAWN},
    "silero": {**dict.fromkeys(ALGORITHMS, SCRIPT), **NO_CLASSES},
}
UNTOUCHED = {"none", "query-noise"}  # also of TorchScript
SAMPLES = {"crepe-full": 4, "efficientnet-lite0": 8, "resnet-50": 14, "vit-b-16": 14, "swin-t": 14}
RUNS = {"deepsigns", "fine-tune", "overwrite", "query-noise"}  # the model, whichever it is


def algorithms(name: str) -> tuple[str, ...]:
    return ("deepsigns",) if name == "crepe-full" else ALGORITHMS  # the small one is the same network


def loaded(name: str) -> tuple[Classifier, Split]:
    if name != "silero":
        if missing := ZOO[name].missing():
            pytest.skip(f"{', '.join(missing)} not installed; run 'make test-real'")
        return few(ZOO[name], SAMPLES.get(name, 24))
    pytest.importorskip("silero_vad", reason="silero_vad not installed; run 'make test-real'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return detector()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", REFUSED)
def test_everything_works_or_is_refused_in_a_line(name: str, no_trace):
    model, data = loaded(name)
    told = {}
    for algorithm in algorithms(name):
        with no_trace(model):
            told[algorithm] = attempt(algorithm, model, data)
    wanted = REFUSED[name]
    if name == "silero":
        wanted = {algorithm: reason for algorithm, reason in wanted.items() if algorithm not in UNTOUCHED}
    refused = {algorithm: text for algorithm, text in told.items() if text != WORKS}
    assert set(refused) == set(wanted), refused
    for algorithm, text in refused.items():
        assert text.startswith(f"expected {wanted[algorithm]}"), text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "calls"), [(name, n) for name in REFUSED if name != "silero" for n in (0, 2) if n or name not in SAMPLES]
)
def test_a_failure_in_the_middle_of_a_pass_leaves_no_trace_either(name: str, calls: int, no_trace):
    model, data = loaded(name)
    mend = failing(model, calls)
    failed = set()
    try:
        for algorithm in algorithms(name):
            with no_trace(model):
                try:
                    attempt(algorithm, model, data)
                except RuntimeError as error:
                    assert "the forward pass fails here" in str(error), error
                    failed.add(algorithm)
    finally:
        mend()
    assert failed >= (RUNS & set(algorithms(name)) if calls == 0 else {"deepsigns"}) - set(REFUSED[name]), failed
