"""What programs for GPUs and TPUs send: the closed forms, in the formats that were asked for."""

import math

import pytest

from benchmarks.aot.targets import TARGETS, TPU
from gpu_aot.exchanges import DENSITY
from gpu_aot.targets import compiled_in_a_process, needs_gpu_aot, needs_tpu_aot
from jaxcomm import codecs
from jaxcomm.codecs import sign

n, WORLD = 2**16, 8
OTHERS = WORLD - 1
FLAG = 2 * OTHERS / WORLD * 4  # one float32 beside everything else
REPORT = 3 * FLAG  # of sparse means
# On TPUs, XLA gathers some messages whose length is no multiple of 128 by an all-reduce.
UNEVEN = ("one_bit_adam", "topk_allgather", "one_bit_adam by hosts", "topk_allgather by hosts")
UNEVEN += ("topk_chunks",)
ENTRY = 4 + 2  # bytes of a value and of an index below 2^16


def two_hops(message: int) -> dict[str, float]:
    return {"all-to-all": OTHERS * message, "all-gather": OTHERS * message}


def expected() -> dict[str, tuple[dict[str, float], set[str]]]:
    """Bytes by kind of collective, and their dtypes; means without residuals need no flag."""
    each, k, flag = n // WORLD, round(DENSITY * n), {"all-reduce": FLAG}
    bits = {"circulant": 2.0, "halving_doubling": 2.25, "ring": 3.0}  # of votes, by algorithm
    table = {
        "mean": ({"all-reduce": 2 * OTHERS / WORLD * 4 * n}, {"f32"}),
        "bfloat16": (two_hops(2 * each), {"u16"}),
        "bfloat16 native": ({"all-reduce": 2 * OTHERS / WORLD * 2 * n}, {"bf16"}),
        "cnat": (two_hops(codecs.cnat().message_bytes(each)), {"u8"}),
        "int8": (two_hops(codecs.int8().message_bytes(each)), {"u8"}),
        # float32 within two hosts of four, codes or counts of up to four votes between them.
        "int8 by hosts": (
            {
                "all-to-all": 3 * 4 * n // 4 + codecs.int8().message_bytes(each),
                "all-gather": (1 + 3 * 2) * codecs.int8().message_bytes(each),
            },
            {"f32", "u8"},
        ),
        "vote by hosts": (
            {"all-to-all": (3 * 2 + 3) * each // 8, "all-gather": (1 + 3 * 2) * each // 8} | flag,
            {"u32", "f32"},
        ),
        "scaled_sign": (two_hops(codecs.scaled_sign().message_bytes(each)), {"u8"}),
        "vote": (two_hops(each // 8) | flag, {"u32", "f32"}),
        "vote direct": (two_hops(each // 8) | flag, {"u32", "f32"}),
        # It also holds the warm-up's float32, in the other branch.
        "one_bit_adam": (
            two_hops(4 * each // sign.BLOCK + each // 8)
            | {"all-reduce": 2 * OTHERS / WORLD * 4 * n},
            {"u32", "f32"},
        ),
        "topk_allgather": (
            {"all-gather": OTHERS * math.ceil(1.25 * k) * ENTRY, "all-reduce": FLAG + REPORT},
            {"u16", "f32"},
        ),
        # Of 16 chunks with 41 entries each: 8 planes of bits, and 4 + 1 words of a chunk.
        "topk_chunks": (
            {"all-gather": OTHERS * 4 * (8 * 21 + 16 * 5), "all-reduce": FLAG + REPORT},
            {"u32", "f32"},
        ),
        # float32 within hosts there and back, in the latter case bits of both hosts.
        "topk_allgather by hosts": (
            {
                "all-to-all": 3 * 4 * n // 4,
                "all-gather": math.ceil(1.25 * round(DENSITY * n / 4)) * ENTRY + 3 * 4 * n // 4,
                "all-reduce": FLAG + REPORT,
            },
            {"u16", "f32"},
        ),
        "one_bit_adam by hosts": (
            {
                "all-to-all": 3 * 4 * n // 4 + 4 * each // sign.BLOCK + each // 8,
                "all-gather": (1 + 3 * 2) * (4 * each // sign.BLOCK + each // 8),
                "all-reduce": 2 * OTHERS / WORLD * 4 * n,
            },
            {"u32", "f32"},
        ),
        "gtopk": (
            {"collective-permute": 3 * k * ENTRY, "all-reduce": FLAG + REPORT},
            {"u16", "f32"},
        ),
    }
    for algorithm, votes in bits.items():
        sixteen, planes = 2 * OTHERS * 2 * each, votes * n / 8
        table[f"bfloat16 {algorithm}"] = ({"collective-permute": sixteen}, {"u16"})
        table[f"vote {algorithm}"] = ({"collective-permute": planes} | flag, {"u32", "f32"})
    return table


@pytest.mark.parametrize(
    "target",
    [
        *(pytest.param(name, marks=[needs_gpu_aot, pytest.mark.gpu_aot]) for name in TARGETS),
        pytest.param(TPU, marks=[needs_tpu_aot, pytest.mark.tpu_aot]),
    ],
)
def test_closed_forms(target: str) -> None:
    report = compiled_in_a_process("exchanges", target, str(n))
    assert report.keys() == expected().keys()
    for method, (nbytes, dtypes) in expected().items():
        row = report[method]
        if target == TPU and method in UNEVEN:
            assert row["bytes"]["all-reduce"] > nbytes["all-reduce"]
            fewer = row["bytes"].get("all-gather", 0) < nbytes["all-gather"]
            assert fewer, f"libtpu gathers {method} now: mend the docs"
            continue
        assert row["bytes"] == nbytes, method
        assert set(row["dtypes"]) == dtypes, method
