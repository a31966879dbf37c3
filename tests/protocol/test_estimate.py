"""The estimate of a question: its bytes are the bytes that go over the channel."""

import pytest
from test_mixed import NETWORKS, asked, compiled, drawn

from deepseal.errors import InputError
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.estimate import estimate
from deepseal.secure_inference.roles.layers import prepare
from deepseal.secure_inference.roles.rates import Rates, measure

RATES = Rates(garble=1e8, evaluate=2e8, mask=5e8, open=9e8, send=1e8, receive=1e8)


def measured(program, weights, samples, transfer, ahead):
    """Bytes of one question from the client and to it, and of what went ahead, by two sessions that differ in it."""
    totals = []
    for questions in (0, 1):
        prepared = (samples,) * questions if ahead else ()
        batches = [drawn(program, samples)] * questions
        _, counters = asked(program, weights, batches, Settings(transfer), ahead=prepared)
        totals.append(counters["client"])
    sent = totals[1].bytes_sent - totals[0].bytes_sent
    received = totals[1].bytes_received - totals[0].bytes_received
    before = totals[1].phases.get("ahead", {"bytes_sent": 0, "bytes_received": 0})
    offline = before["bytes_sent"] + before["bytes_received"]
    return sent - before["bytes_sent"], received - before["bytes_received"], offline


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["dense", "convolution", "max pooling with padding", "residual"])
def test_bytes_are_those_of_the_channel(name, ahead):
    program, weights = compiled(NETWORKS[name]())
    for samples, transfer in ((1, TransferSettings()), (3, TransferSettings(k=4))):
        found = estimate(
            prepare(program),
            bandwidth=1e9,
            latency=0.0,
            samples=samples,
            transfer=transfer,
            ahead=ahead,
            rates=RATES,
        )
        wanted = measured(program, weights, samples, transfer, ahead)
        assert (found.bytes_sent, found.bytes_received, found.offline_bytes) == wanted


@pytest.mark.parametrize("permits", ["label", "logits"])
def test_checked_transfers_and_logits(permits):
    program, weights = compiled(NETWORKS["dense"](), permits=permits)
    transfer = TransferSettings(checks=True)
    found = estimate(prepare(program), bandwidth=1e9, latency=0.0, transfer=transfer, rates=RATES)
    assert (found.bytes_sent, found.bytes_received) == measured(program, weights, 1, transfer, False)[:2]


def test_seconds_follow_the_network():
    program, _ = compiled(NETWORKS["dense"]())
    ready = prepare(program)

    def seconds(bandwidth, latency):
        return estimate(ready, bandwidth=bandwidth, latency=latency, rates=RATES).seconds

    found = estimate(ready, bandwidth=1e6, latency=0.5, rates=RATES)
    assert found.rounds == 3
    assert found.seconds == pytest.approx(3 * 0.5 + 8 * (found.bytes_sent + found.bytes_received) / 1e6, rel=0.02)
    assert seconds(1e9, 0.1) - seconds(1e9, 0.0) == pytest.approx(0.3)


@pytest.mark.parametrize("change", [{"bandwidth": 0}, {"bandwidth": float("nan")}, {"latency": -1}, {"samples": 0}])
def test_refusals(change):
    program, _ = compiled(NETWORKS["dense"]())
    with pytest.raises(InputError, match="bandwidth above 0"):
        estimate(prepare(program), **{"bandwidth": 1e9, "latency": 0.0, "rates": RATES, **change})


def test_rates_of_this_machine():
    """All are above zero, and so is the one that takes a second process."""
    found = measure("portable", yao=True)
    assert min(found.garble, found.evaluate, found.mask, found.open, found.send, found.receive) > 1e4
    assert found.yao_garble > 1e4
    assert found.yao_garble != Rates.yao_garble
