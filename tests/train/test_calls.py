"""Calls in config fields."""

import re

import pytest

from jaxcomm import codecs
from train import sync
from train.calls import read_call
from train.errors import UserError


def test_names_and_nothing_stay_as_they_are() -> None:
    assert read_call("cnat", codecs.BY_NAME, "f") == "cnat"
    assert read_call(None, codecs.BY_NAME, "f") is None


def test_calls_and_calls_within() -> None:
    made = read_call("random_k(density=0.05, values=bfloat16())", codecs.BY_NAME, "f")
    assert made == codecs.random_k(density=0.05, values=codecs.bfloat16())
    algorithm = read_call(
        "halving_doubling(order='shifted', devices_per_switch=2, grid=(2, 2))",
        sync.CALLS["algorithm"],
        "f",
    )
    assert algorithm.grid == (2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qsdg", "f: there is no 'qsdg'; did you mean 'qsgd'?"),
        (
            "'qsgd(levels=0)'",
            "f: 'qsgd(levels=0)' contains quotes; leave them out: --f='qsgd(l",
        ),
        ('"cnat"', "f: \"cnat\" contains quotes; leave them out: --f='cnat'"),
        ("qsdg(levels=7)", "f: there is no 'qsdg'; did you mean 'qsgd'?"),
        ("qsgd(7)", "f: 'qsgd(7)': expected a name with named arguments"),
        ("qsgd(levels=7", "f: 'qsgd(levels=7': '(' was never closed"),
        ("qsgd(lvls=7)", "f: 'qsgd(lvls=7)': qsgd() got an unexpected keyword argument 'lvls'"),
        ("qsgd(levels=0)", "f: 'qsgd(levels=0)': "),
        ("qsgd(levels=open('x'))", "expected a name with named arguments"),
        ("qsgd(levels=__import__(name='os'))", "there is no '__import__'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_call(text, codecs.BY_NAME, "f")
