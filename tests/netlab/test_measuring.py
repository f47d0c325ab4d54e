"""What the lab makes of counted bytes."""

import math

from benchmarks.netlab.measuring import _rate_between, _usual
from jaxcomm import plan


def test_a_stream_stays_on_one_of_several_links() -> None:
    made = plan.load("star", hosts=2, rate=100, links_per_host=2)
    switch = made.switches[0]
    assert _rate_between(made, made.hosts[0], switch) == 100
    assert _rate_between(plan.load("star", hosts=2, rate="unlimited"), "h0", "s0") == math.inf


def test_bytes_that_were_sent_twice_are_not_counted() -> None:
    link, other = ("a", "b", 0), ("b", "a", 0)
    runs = [{link: 100, other: 7}, {link: 130, other: 90}, {link: 99, other: 101}]
    assert _usual(runs) == runs[2] and _usual(runs[:1]) == runs[0]
