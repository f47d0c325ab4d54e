"""Wire formats: `encode(x) -> payload`, `decode(payload, n) -> x`, one file each.

The names in `BY_NAME` are the strings that `codec=` accepts. To add a codec, write its file and add
its row here.
"""

from collections.abc import Callable

from jaxcomm._names import from_table
from jaxcomm.codecs import _checking
from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs.bfloat16 import bfloat16
from jaxcomm.codecs.cnat import cnat
from jaxcomm.codecs.float16 import float16
from jaxcomm.codecs.float32 import float32
from jaxcomm.codecs.fp8 import fp8_e4m3, fp8_e5m2
from jaxcomm.codecs.int2 import int2
from jaxcomm.codecs.integer import int4, int8
from jaxcomm.codecs.qsgd import qsgd
from jaxcomm.codecs.random_k import random_k
from jaxcomm.codecs.scaled_sign import scaled_sign
from jaxcomm.codecs.terngrad import terngrad

__all__ = [
    "BY_NAME",
    "Codec",
    "bfloat16",
    "cnat",
    "float16",
    "float32",
    "fp8_e4m3",
    "fp8_e5m2",
    "from_name",
    "int2",
    "int4",
    "int8",
    "qsgd",
    "random_k",
    "scaled_sign",
    "terngrad",
]

#: The factory of each codec, by the name that `codec=` accepts.
BY_NAME: dict[str, Callable[..., Codec]] = {
    "float32": float32,
    "bfloat16": bfloat16,
    "float16": float16,
    "fp8_e4m3": fp8_e4m3,
    "fp8_e5m2": fp8_e5m2,
    "int8": int8,
    "int4": int4,
    "int2": int2,
    "cnat": cnat,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "random_k": random_k,
    "scaled_sign": scaled_sign,
}


def from_name(codec: str | Codec) -> Codec:
    """The codec of a name.

    Args:
      codec: a name in `BY_NAME`, such as "int8", or a codec, which is returned as it is.

    Returns:
      The codec, with its defaults.

    Raises:
      TypeError: for anything else, such as a factory that was not called.
      ValueError: for an unknown name; the message has the known ones.
    """
    found = from_table(codec, BY_NAME, Codec, "codec", "jaxcomm.codecs.bfloat16()")
    if not type(found).__module__.startswith("jaxcomm."):
        _checking.check(found)
    return found
