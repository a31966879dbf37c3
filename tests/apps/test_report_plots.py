"""The pictures of a report: points, thresholds and axes stand where the records say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import Node
from report_records import changed, of_kind

from deepseal.apps.report import plots, story
from deepseal.record import Record

ATTACKS = ["Attack prune", "Attack fine-tune", "Attack overwrite"]


def figure(page: Node, attack: str) -> tuple[Node, Node]:
    (found,) = [f for f in page.all("figure") if f.one("figcaption").text.startswith(f"Attack {attack}")]
    accuracy, bits = (node for node in found.all("svg") if node.attributes.get("role") == "img")
    return accuracy, bits


def test_the_pictures_show_the_records_values(page: Node, records: list[Record]) -> None:
    attacks = {
        r.fingerprints.get("attacked"): r for r in of_kind(records, "attack.run") if r.params["attack"] == "prune"
    }
    checks = [r for r in of_kind(records, "watermark.verify") if r.fingerprints["model"] in attacks]
    accuracy, bits = figure(page, "prune, by sparsity")
    expected = [
        (
            attacks[r.fingerprints["model"]].params["attack_params"]["sparsity"],
            attacks[r.fingerprints["model"]].results["accuracy_after"],
            r.results["bit_errors"],
        )
        for r in checks
    ]
    expected.sort()
    assert len(expected) == 4
    for picture, column in ((accuracy, 1), (bits, 2)):
        points = picture.all("g", class_="point")
        assert [(float(p.attributes["data-x"]), float(p.attributes["data-y"])) for p in points] == [
            (row[0], row[column]) for row in expected
        ]
        assert all(f"sparsity {row[0]}" in p.one("title").text for row, p in zip(expected, points, strict=True))
        assert len(picture.one("polyline").attributes["points"].split()) == 4


def test_points_stand_where_the_axis_says(page: Node) -> None:
    for attack in ("prune", "fine-tune", "overwrite"):
        for picture in figure(page, attack):
            ticks = [
                (float(t.attributes["y"]) - 4, t.text)
                for t in picture.all("text", class_="tick")
                if t.attributes["text-anchor"] == "end"
            ]
            values = [(y, float(t.rstrip("%").replace(",", "")) / (100 if t.endswith("%") else 1)) for y, t in ticks]
            (y0, v0), (y1, v1) = values[0], values[-1]
            for point in picture.all("g", class_="point"):
                shown = [node for node in point.children if isinstance(node, Node) and node.tag != "title"]
                if shown[0].tag == "circle":
                    value = v0 + (float(shown[0].attributes["cy"]) - y0) * (v1 - v0) / (y1 - y0)
                    assert value == pytest.approx(float(point.attributes["data-y"]), abs=1e-3 * abs(v1 - v0))


def test_the_threshold_and_chance_are_drawn_and_labelled(page: Node) -> None:
    _, bits = figure(page, "prune")
    threshold, chance = bits.one("line", class_="threshold"), bits.one("line", class_="chance")
    assert bits.one("text", class_="threshold").text == "allowed at 1 × 10⁻⁹: 80"
    assert bits.one("text", class_="chance").text == "chance: 128"
    y80, y128, y0 = float(threshold.attributes["y1"]), float(chance.attributes["y1"]), plots.BOTTOM
    assert (y0 - y80) / (y0 - y128) == pytest.approx(80 / 128, abs=1e-3)
    assert float(threshold.attributes["x2"]) - float(threshold.attributes["x1"]) == plots.RIGHT - plots.LEFT
    assert "allowed at 1 × 10⁻⁹: 80" in bits.one("desc").text


def test_points_are_below_the_threshold_exactly_when_owned(page: Node) -> None:
    for attack in ("prune", "overwrite"):
        _, bits = figure(page, attack)
        limit = float(bits.one("line", class_="threshold").attributes["y1"])
        for circle in bits.all("circle"):
            assert circle.parent is not None
            assert (float(circle.attributes["cy"]) >= limit) == circle.parent.one("title").text.endswith(", owned")


def test_where_fewer_bits_are_readable_the_threshold_is_drawn_by_point(page: Node) -> None:
    _, bits = figure(page, "fine-tune")
    assert {node.text for node in bits.all("text", class_="threshold")} == {
        "allowed at 1 × 10⁻⁹: 80",
        "allowed at 1 × 10⁻⁹: 31",
    }
    assert {node.text for node in bits.all("text", class_="chance")} == {"chance: 128", "chance: 65"}
    assert len(bits.all("line", class_="threshold")) == 3


def test_chance_is_drawn_where_the_verification_says(records: list[Record]) -> None:
    """Secret answers are nearly all wrong by chance, bits half of them; records from before do not say."""
    for expected, drawn in ((None, 128.0), (227.6, 227.6)):
        told = [
            changed(record, results={**record.results, "expected_errors": expected})
            if record.kind == "watermark.verify"
            else record
            for record in records
        ]
        panel = next(panel for panel in plots.panels(story.rows(told)) if panel.bits is not None)
        assert panel.bits is not None
        (chance,) = [level for level in panel.bits.levels if level.kind == "chance"]
        assert any(f"{drawn:,g}" in label.text for label in chance.labels)


def test_labels_do_not_lie_on_each_other(records: list[Record]) -> None:
    """Where the threshold moves a little from point to point, one label says from where to where."""
    thresholds = iter(range(70, 90))
    told = [
        changed(record, results={**record.results, "threshold": next(thresholds)})
        if record.kind == "watermark.verify"
        else record
        for record in records
    ]
    for panel in plots.panels(story.rows(told)):
        for level in panel.bits.levels if panel.bits else ():
            for one, other in itertools.combinations(level.labels, 2):
                assert not plots._overlap(one, other), (one, other)
    prune = next(panel for panel in plots.panels(story.rows(told)) if panel.attack == "prune")
    assert prune.bits is not None
    (threshold,) = [level for level in prune.bits.levels if level.kind == "threshold"]
    assert [label.text.partition(": ")[2] for label in threshold.labels] == ["72 to 75"]


def test_a_single_point_is_not_connected_and_series_have_a_legend(page: Node) -> None:
    accuracy, bits = figure(page, "overwrite, by strength")
    for picture in (accuracy, bits):
        assert len(picture.all("g", class_="point")) == 1 and not picture.all("polyline")
    (tuned,) = [f for f in page.all("figure") if f.one("figcaption").text.startswith("Attack fine-tune")]
    legend = [item.text for item in tuned.one("ul", class_="legend").all("li")]
    assert legend == ["mode ftal", "mode ftal, optimizer sgd, learning_rate 10.0", "mode rtal"]


def test_the_null_attack_has_no_picture(page: Node) -> None:
    assert [f.one("figcaption").text.split(",")[0] for f in page.all("figure")] == ATTACKS


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [
        ([1.0], False),
        ([0.5, 0.99], False),
        ([1.0, 1000.0], True),
        ([-3.0, 3.0], False),
        ([0.0, 1000.0], False),
        ([1e-12, 1e12], True),
    ],
)
def test_axes_hold_all_their_values(values: list[float], logarithmic: bool, records: list[Record]) -> None:
    row = story.rows(records)[0]
    axis = plots._axis("strength", [plots._Sample(value, value, "", row) for value in values], numeric=True)
    assert axis.logarithmic == logarithmic
    places = [axis.place(value) for value in values]
    assert places == sorted(places) and all(plots.LEFT < place < plots.RIGHT for place in places)
    assert axis.ticks and all(plots.LEFT - 1 <= axis.place(tick) <= plots.RIGHT + 1 for tick, _ in axis.ticks)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(), st.integers(-5, 300), st.integers(-5, 300), st.none() | st.integers(-5, 300), st.floats(-1, 2)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_pictures_stay_on_their_canvas(values: list[tuple[float, int, int, int | None, float]]) -> None:
    some = []
    for index, (strength, errors, bits, threshold, accuracy) in enumerate(values):
        common: dict[str, Any] = {"status": "ok", "environment": {}, "started": "", "seconds": 0.0}
        attack = {"attack": "prune", "attack_params": {"sparsity": strength}}
        prints = {"model": "m", "attacked": str(index)}
        some.append(
            Record(
                kind="attack.run", params=attack, fingerprints=prints, results={"accuracy_after": accuracy}, **common
            )
        )
        read = {"bit_errors": errors, "bits": bits, "threshold": threshold, "verdict": "owned"}
        some.append(Record(kind="watermark.verify", fingerprints={"model": str(index)}, results=read, **common))
    for panel in plots.panels(story.rows(some)):
        for plot in (panel.accuracy, panel.bits):
            if plot is not None:
                for series in plot.series:
                    assert all(
                        plots.LEFT <= p.x <= plots.RIGHT and plots.TOP <= p.y <= plots.BOTTOM for p in series.points
                    )
                for level in plot.levels:
                    for x1, x2, y in level.segments:
                        assert plots.LEFT <= x1 <= x2 <= plots.RIGHT and plots.TOP <= y <= plots.BOTTOM
