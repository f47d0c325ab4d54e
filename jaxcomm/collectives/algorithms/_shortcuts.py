"""In which order the devices of a switch take the shortcuts to other switches.

A block travels to the switch that owns it by one hop for each bit of the switches' numbers, in any
order of the bits. So each of the z devices of a switch may have its own order. A hop by bit k leads
to the switch whose number differs in this bit (`sign` 0), or to the switch 2^k forward or back
around the ring (`sign` 1 or -1): for each set of signs, every distance is a sum of hops in exactly
one way.

A shortcut over half a ring leads to one switch, all others to two, one in each direction. In
`spread` every shortcut carries equally many devices in each round, as nearly as possible:

    counts    how many devices take bit b in round j. Each row and each column adds up to z. In each
              round the busiest shortcut carries as few devices as possible; the last round, which
              has the shortest messages, takes what is left.
    halves    the counts are split in two over and over, for the devices with even and odd numbers,
              and so on. What is left for one device is a permutation: its order. And the devices
              whose numbers are equal modulo w, which may share one of w cables, are spread too.
    signs     of the devices that take the same bit in a round, every second one goes back.
"""

import math

Hop = tuple[int, int]  # the bit of the number of a device, and the sign
Counts = list[list[int]]


def shifted(per_switch: int, grid: tuple[int, ...]) -> list[list[Hop]]:
    """Device l of a switch begins with bit l: one dimension of the grid after the other.

    Before that, inside the switch, all devices take its bits from the lowest on.
    """
    low = per_switch.bit_length() - 1

    def one(place: int) -> list[Hop]:
        hops, base = [(bit, 0) for bit in range(low)], low
        for size in grid:
            width = size.bit_length() - 1
            hops += [(base + (place + j) % width, 0) for j in range(width)]
            base += width
        return hops

    return [one(place) for place in range(per_switch)]


def spread(per_switch: int, grid: tuple[int, ...]) -> list[list[Hop]]:
    """The hops of each device of a switch, in order; see the module docstring.

    Inside the switch devices go around a ring too. No two devices send to each other, except in the
    last of these rounds, which has the shortest messages.
    """
    low = per_switch.bit_length() - 1
    ways = [1 if 2 << k == size else 2 for size in grid for k in range(size.bit_length() - 1)]
    orders = _permutations(_counts(per_switch, ways)) if ways else [[]] * per_switch
    hops: list[list[Hop]] = [[(bit, 1) for bit in range(low)] for _ in orders]
    by_cable = sorted(range(per_switch), key=lambda place: f"{place:0{max(low, 1)}b}"[::-1])
    for j in range(len(ways)):
        met = [0] * len(ways)
        for place in by_cable:
            bit = orders[place][j]
            hops[place].append((low + bit, 1 if ways[bit] == 1 or met[bit] % 2 == 0 else -1))
            met[bit] += 1
    return hops


def after(device: int, hop: Hop, sizes: tuple[int, ...]) -> int:
    """The device at the end of a hop; the sizes are those of a switch and of the grid."""
    bit, sign = hop
    if sign == 0:
        return device ^ (1 << bit)
    stride, size = 1, 1
    for size in sizes:
        if 1 << bit < stride * size:
            break
        stride *= size
    along = device // stride % size
    return device + ((along + sign * (1 << bit) // stride) % size - along) * stride


def _counts(devices: int, ways: list[int]) -> Counts:
    """`counts[j][b]`: how many devices take bit b in round j; each sum is `devices`."""
    left = [devices] * len(ways)
    counts = []
    for _ in ways[1:]:
        row, most = [0] * len(ways), 1  # most: how many devices a shortcut has to carry
        while sum(min(most * w, n) for w, n in zip(ways, left, strict=True)) < devices:
            most += 1
        for _ in range(devices):  # the shortcut for which most devices are left
            free = [b for b, w in enumerate(ways) if row[b] < most * w and left[b]]
            b = max(free, key=lambda b: (left[b] / ways[b], -b))
            row[b] += 1
            left[b] -= 1
        counts.append(row)
    return [*counts, left]


def _permutations(counts: Counts) -> list[list[int]]:
    """Counts whose sums are a power of two, as permutations; even numbers are of the first half."""
    if sum(counts[0]) == 1:
        return [[row.index(1) for row in counts]]
    halves = [_permutations(half) for half in _halves(counts)]
    return [order for pair in zip(*halves, strict=True) for order in pair]


def _halves(counts: Counts) -> tuple[Counts, Counts]:
    """Two halves with equal sums.

    All sums are even, so a row or a column with one odd count has another one, and odd counts form
    cycles. Around each cycle, the two halves take the odd unit in turn.
    """
    half = [[count // 2 for count in row] for row in counts]
    odd = {(j, b) for j, row in enumerate(counts) for b, count in enumerate(row) if count % 2}
    while odd:
        j, b = min(odd)
        along_row = True
        while True:
            odd.remove((j, b))
            half[j][b] += along_row
            onward = [c for c in sorted(odd) if (c[0] == j if along_row else c[1] == b)]
            if not onward:
                break
            j, b = onward[0]
            along_row = not along_row
    other = [[n - h for n, h in zip(a, b, strict=True)] for a, b in zip(counts, half, strict=True)]
    return half, other


def require(world: int, sizes: tuple[int, ...]) -> None:
    """Raises a ValueError unless the switches hold the axis's devices, all powers of two."""
    if math.prod(sizes) != world or any(s < 1 or s & (s - 1) for s in sizes):
        raise ValueError(
            "shifted and spread orders need devices_per_switch x switches to be the "
            f"{world} devices of the axis, all powers of two; got {' x '.join(map(str, sizes))}."
        )
