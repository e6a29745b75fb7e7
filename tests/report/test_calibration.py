"""The page of a calibration says what the numbers say, and draws each set that was held out."""

import re

import msgspec
import pytest

from rowwise.base.records import ProfileQuality
from rowwise.report.calibration import draw_calibration

QUALITY = {
    "sets": 700, "held_out": 3, "again": 40, "noise": 0.021, 
    "raw_noise": 0.05, "drift": 0.07, "links": 12, "links_error": 0.08, "networks_error": 0.05,
    "errors": [{"model": "networks that keep bounds", "error": 0.043, "tau": 0.951, "raw_error": 0.11}],
    "predicted_s": [1e-3, 2e-2, 5e-4], "measured_s": [1.1e-3, 1.9e-2, 5e-4],
    "stages": {"lookup": {"model": "m", "error": 0.05, "tau": 0.9, "raw_error": 0.1}},
}  # fmt: skip


def page_of(**changes):
    return draw_calibration("here <1>", "measured on this machine", msgspec.convert(QUALITY | changes, ProfileQuality))


def test_it_draws_each_set_and_says_the_errors():
    shown = page_of()
    points = re.search(r'class="dots blue" d="([^"]*)"', shown)
    assert points is not None
    assert points[1].count("M") == 3
    words = re.sub(r"<[^>]*>", " ", shown)
    for said in ("4.3", "0.951", "2.1", "here &lt;1&gt;", "lookup alone", "12"):
        assert said in words


def test_points_on_the_diagonal_are_on_the_line():
    shown = page_of(predicted_s=[2e-3], measured_s=[2e-3])
    level = re.search(r'class="level" x1="([\d.]+)" x2="([\d.]+)" y1="([\d.]+)" y2="([\d.]+)"', shown)
    point = re.search(r'class="dots blue" d="M([\d.]+) ([\d.]+)h0"', shown)
    assert level is not None
    assert point is not None
    (x1, x2, y1, y2), (x, y) = map(float, level.groups()), map(float, point.groups())
    assert (y - y1) * (x2 - x1) == pytest.approx((y2 - y1) * (x - x1), abs=x2 - x1)
