"""The one option: how it is checked, and which implementation it names."""

import importlib
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxcomm.kernels import _implementations
from jaxcomm.kernels._implementations import OPERATIONS, check, choose

BOTH = ("integers.encode", "select.compact")  # in Mosaic, and in Triton


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])


def test_a_name_holds_for_every_operation(hopper: None) -> None:
    assert choose("integers.encode", "mosaic", 1) == "mosaic"
    assert choose("select.compact", "triton", 1) == "triton"
    for operation in OPERATIONS:
        assert choose(operation, "xla", 1) == "xla"
        assert choose(operation, "measure", 1) == "measure"


def test_a_mapping_holds_for_the_operations_in_it(hopper: None) -> None:
    option = {"select.compact": "triton", "integers.encode": None}
    for same in (option, tuple(option.items())):
        assert choose("select.compact", same, 1) == "triton"
        assert choose("integers.encode", same, 1) == choose("integers.encode", None, 1)
        assert choose("nine_bits.encode", same, 1) == choose("nine_bits.encode", None, 1)


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_name_that_an_operation_lacks_is_refused(name: str) -> None:
    message = f'no implementation \'{name}\'; use "xla", "mosaic", "measure" or None'
    with pytest.raises(NotImplementedError, match=message):
        choose("integers.encode", name, 1)


def test_a_name_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        choose("integers.encode", "mosaic", 1)


def test_indices_of_32_bits_reach_all_elements() -> None:
    message = r"nine_bits.encode: .* at most 2\^31 - 1 elements, got 2147"
    with pytest.raises(ValueError, match=message):
        choose("nine_bits.encode", "mosaic", 2**31)
    assert choose("nine_bits.encode", "xla", 2**31) == "xla"


def test_check_returns_what_can_be_hashed() -> None:
    assert check(None, (), "bfloat16") is None
    assert check("mosaic", ("integers.encode",), "int8") == "mosaic"
    option = check({"select.compact": None, "integers.encode": "mosaic"}, BOTH, "a method")
    assert option == (("integers.encode", "mosaic"), ("select.compact", None))
    assert hash(option) and check(option, BOTH, "a method") == option


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        (3, TypeError, r"a name, or a mapping from operations to names such as .*, got 3"),
        ("cuda", ValueError, 'unknown implementation \'cuda\'; choose one of "xla", "mosaic"'),
        ({"select.compact": "cuda"}, ValueError, "unknown implementation 'cuda'"),
        ({"select.compress": "xla"}, ValueError, "unknown operation 'select.compress'; the known"),
        (
            {"nine_bits.encode": "xla"},
            ValueError,
            '"nine_bits.encode", which a method does not use; its',
        ),
        (
            "mosaic",
            ValueError,
            r"a method: select.compact has no implementation 'mosaic'. .*"
            r'select.compact has "xla", "triton". Name one for each: implementation='
            r'\{"integers.encode": "mosaic", "select.compact": "xla"\}',
        ),
        ({"select.compact": "mosaic"}, ValueError, "select.compact has no implementation 'mosaic'"),
    ],
)
def test_check_says_what_is_wrong(option: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        check(option, BOTH, "a method")


@pytest.mark.parametrize("option", [None, "xla", "measure"])
def test_what_every_method_has_is_always_right(option: Any) -> None:
    assert check(option, (), "bfloat16") == option


@pytest.mark.parametrize("option", ["mosaic", {"nine_bits.encode": "xla"}])
def test_a_method_without_kernels_takes_no_other_option(option: Any) -> None:
    with pytest.raises(ValueError, match="bfloat16 has only the plain version; leave out"):
        check(option, (), "bfloat16")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_table_and_the_kernels_agree(operation: str) -> None:
    """An operation `integers.encode` is a function `encode` in the folder of `integers`."""
    modules = {
        "cnat": "powers_of_two.window_",
        "fp8": "block_quantization.",
        "integers": "block_quantization.",
        "nine_bits": "powers_of_two.",
    }
    module, _, function = operation.rpartition(".")
    start = modules.get(module, f"{module or function}.")
    for kernel in ("mosaic", "triton"):
        try:
            found = importlib.import_module(f"jaxcomm.kernels.{start}{kernel}")
        except ModuleNotFoundError:
            assert kernel not in OPERATIONS[operation]
            continue
        assert hasattr(found, function) == (kernel in OPERATIONS[operation])


def test_nothing_runs_as_the_plain_version() -> None:
    ran = _implementations.call("nine_bits.encode", "measure", lambda name: name, (), elements=0)
    assert ran == "xla"
