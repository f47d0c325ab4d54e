"""Which kernels a device can run."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest

from jaxcomm import _compat
from jaxcomm.kernels import _device


def pretend(capability: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the first device one of this compute capability."""
    known = {} if capability is None else {"compute_capability": capability}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [SimpleNamespace(**known)])


def works(require: Callable[[str], None], message: str) -> bool:
    try:
        require("f")
    except NotImplementedError as error:
        assert str(error).startswith("f: ") and message in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("found", "version", "expected"),
    [
        (None, (0, 12, 0), False),
        ("7.5", (0, 12, 0), False),
        ("8.6", (0, 10, 2), False),
        ("8.6", (0, 11, 0), True),
        ("9.0", (0, 10, 2), True),
        ("10.0", (0, 10, 2), True),
        ("gfx942", (0, 12, 0), False),
    ],
)
def test_where_mosaic_works(
    found: str | None, version: tuple[int, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(found, monkeypatch)
    monkeypatch.setattr(_compat, "jax_version", lambda: version)
    assert works(_device.require_mosaic, 'implementation "mosaic" needs') == expected


@pytest.mark.parametrize(
    ("found", "expected"), [(None, False), ("7.5", False), ("8.0", True), ("9.0", True)]
)
def test_where_triton_works(
    found: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(found, monkeypatch)
    assert works(_device.require_triton, "needs compute capability 8.0") == expected
    monkeypatch.setattr(_device, "find_spec", lambda module: None)
    assert not works(_device.require_triton, "this jax has no Triton")


def test_the_device_that_is_set_is_the_one() -> None:
    assert _device.current() == jax.local_devices()[0]
    with jax.default_device(jax.local_devices()[3]):
        assert _device.current() == jax.local_devices()[3]
