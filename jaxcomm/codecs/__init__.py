"""Wire formats: `encode(x) -> payload`, `decode(payload, n) -> x`, one file each."""

from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs.bfloat16 import BFloat16, bfloat16
from jaxcomm.codecs.cnat import Cnat, cnat
from jaxcomm.codecs.float16 import Float16, float16
from jaxcomm.codecs.float32 import Float32, float32
from jaxcomm.codecs.fp8 import Fp8E4M3, Fp8E5M2, fp8_e4m3, fp8_e5m2
from jaxcomm.codecs.integer import Int4, Int8, int4, int8
from jaxcomm.codecs.qsgd import Qsgd, qsgd
from jaxcomm.codecs.random_k import RandomK, random_k
from jaxcomm.codecs.scaled_sign import ScaledSign, scaled_sign
from jaxcomm.codecs.terngrad import TernGrad, terngrad

BY_NAME = {
    "float32": float32,
    "bfloat16": bfloat16,
    "float16": float16,
    "fp8_e4m3": fp8_e4m3,
    "fp8_e5m2": fp8_e5m2,
    "int8": int8,
    "int4": int4,
    "cnat": cnat,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "random_k": random_k,
    "scaled_sign": scaled_sign,
}


def from_name(codec: str | Codec) -> Codec:
    """The codec that a string is short for; a codec is returned as it is.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor a codec.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(
            f"codec must be a name ({', '.join(BY_NAME)}) or a codec, got {codec!r}; "
            "a factory must be called: jaxcomm.codecs.bfloat16()."
        )
    if codec not in BY_NAME:
        raise ValueError(f"unknown codec {codec!r}; choose one of {', '.join(BY_NAME)}.")
    return BY_NAME[codec]()


__all__ = [
    "BY_NAME",
    "BFloat16",
    "Cnat",
    "Codec",
    "Float16",
    "Float32",
    "Fp8E4M3",
    "Fp8E5M2",
    "Int4",
    "Int8",
    "Qsgd",
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "bfloat16",
    "cnat",
    "float16",
    "float32",
    "fp8_e4m3",
    "fp8_e5m2",
    "from_name",
    "int4",
    "int8",
    "qsgd",
    "random_k",
    "scaled_sign",
    "terngrad",
]
