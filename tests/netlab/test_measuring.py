"""What the lab makes of counted bytes."""

import math

from benchmarks.netlab.measuring import _rate_between
from jaxcomm import plan


def test_a_stream_stays_on_one_of_several_links() -> None:
    made = plan.load("star", hosts=2, rate=100, links_per_host=2)
    switch = made.switches[0]
    assert _rate_between(made, made.hosts[0], switch) == 100
    assert _rate_between(plan.load("star", hosts=2, rate="unlimited"), "h0", "s0") == math.inf
