"""Simulated devices as if they were on several hosts, and what leaves one of these."""

from typing import Any

import jaxcomm


def crossing(compiled: Any, per_host: int) -> float:
    """Bytes that the first host sends to others, by groups: an all-gather's go around a ring."""
    total = 0.0
    for collective in jaxcomm.wire_report(compiled).collectives:
        if collective.op == "collective-permute":
            pairs = [(a, b) for a, b in collective.groups if a < per_host <= b]
            total += sum(collective.sent[a] for a, _ in pairs) * (collective.times or 0)
            continue
        for group in collective.groups:
            inside = [device for device in group if device < per_host]
            outside = len(group) - len(inside)
            if inside and outside:
                each = sum(collective.sent[device] for device in inside)
                leave = 1 / len(inside) if collective.op == "all-gather" else 1.0
                total += each * leave * outside / (len(group) - 1) * (collective.times or 0)
    return total
