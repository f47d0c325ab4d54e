"""Wire formats: `encode(x) -> payload`, `decode(payload, n) -> x`, one file each."""

from jaxcomm.codecs._codec import Codec
from jaxcomm.codecs.bfloat16 import BFloat16, bfloat16
from jaxcomm.codecs.float16 import Float16, float16
from jaxcomm.codecs.float32 import Float32, float32

BY_NAME = {"float32": float32, "bfloat16": bfloat16, "float16": float16}


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
    "Codec",
    "Float16",
    "Float32",
    "bfloat16",
    "float16",
    "float32",
    "from_name",
]
