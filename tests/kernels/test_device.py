"""What a device is said to be able to do."""

from types import SimpleNamespace

import jax
import pytest

from jaxcomm import _compat
from jaxcomm.kernels import _device


@pytest.mark.parametrize(
    ("found", "version", "works"),
    [
        (None, (0, 12, 0), False),
        ("7.5", (0, 12, 0), False),
        ("8.6", (0, 10, 2), False),
        ("8.6", (0, 11, 0), True),
        ("9.0", (0, 10, 2), True),
        ("9.0", (0, 10, 1), False),
        ("10.0", (0, 10, 2), True),
        ("gfx942", (0, 12, 0), False),
    ],
)
def test_where_mosaic_works(
    found: str | None, version: tuple[int, ...], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace() if found is None else SimpleNamespace(compute_capability=found)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    monkeypatch.setattr(_compat, "jax_version", lambda: version)
    if works:
        assert _device.choose("f", "mosaic", ("xla", "mosaic"), 1) == "mosaic"
    else:
        with pytest.raises(NotImplementedError, match="f: the implementation"):
            _device.choose("f", "mosaic", ("xla", "mosaic"), 1)


@pytest.mark.parametrize(
    ("found", "works"), [(None, False), ("7.5", False), ("8.0", True), ("9.0", True)]
)
def test_where_triton_works(
    found: str | None, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace() if found is None else SimpleNamespace(compute_capability=found)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    if works:
        assert _device.choose("f", "triton", ("xla", "triton"), 1) == "triton"
    else:
        with pytest.raises(NotImplementedError, match=r"f: .*triton.* capability 8.0"):
            _device.choose("f", "triton", ("xla", "triton"), 1)
    monkeypatch.setattr(_device, "find_spec", lambda module: None)
    with pytest.raises(NotImplementedError, match="f: this jax has no Triton"):
        _device.choose("f", "triton", ("xla", "triton"), 1)


def test_none_is_xla_everywhere() -> None:
    assert _device.choose("f", None, ("xla", "mosaic"), 1) == "xla"


def test_indices_of_32_bits_reach_all_elements() -> None:
    with pytest.raises(ValueError, match=r"f: .* at most 2\^31 - 1 elements, got 2147483648"):
        _device.choose("f", "mosaic", ("xla", "mosaic"), 2**31)
    assert _device.choose("f", "xla", ("xla", "mosaic"), 2**31) == "xla"
