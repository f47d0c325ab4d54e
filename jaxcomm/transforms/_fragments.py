"""Leaves that are exchanged at different steps."""

import dataclasses
import math
from typing import Any

import jax
import optax

from jaxcomm.transforms._layout import Layout, filled_leaves


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fragments:
    """`of[i]` is the number of the fragment that leaf i is exchanged in."""

    of: tuple[int, ...]

    def part(self, tree: Any, number: int) -> Any:
        """A fragment of a tree, with `optax.MaskedNode` for other leaves; the only one is whole."""
        if max(self.of) == 0:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, self.of, strict=True)
        return treedef.unflatten([x if k == number else optax.MaskedNode() for x, k in pairs])

    def whole(self, part: Any, number: int, tree: Any) -> Any:
        """`tree` with the leaves of a fragment from `part`."""
        own = iter(jax.tree.leaves(part))
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, self.of, strict=True)
        return treedef.unflatten([next(own) if k == number else x for x, k in pairs])

    @property
    def count(self) -> int:
        """The number of fragments."""
        return max(self.of) + 1

    def offset(self, number: int, every: int) -> int:
        """The first step after which a fragment's pseudo-gradient is taken."""
        return (number + 1) * every // self.count


def dealt(layout: Layout, count: int) -> Fragments:
    """The leaves, dealt to fragments of about equal sizes.

    Raises:
      ValueError: if there are fewer leaves than fragments.
    """
    filled = filled_leaves(layout)
    if not filled:
        raise ValueError("local_steps needs a parameter that has elements; there is none.")
    if len(filled) < count:
        raise ValueError(
            f"fragments={count} is more than the {len(filled)} parameters, which are exchanged "
            f"whole; use at most {len(filled)}."
        )
    sizes = [0] * count
    of = [0] * len(layout.leaves)
    elements = {i: math.prod(layout.leaves[i].shape) for i in filled}
    for i in sorted(filled, key=lambda i: -elements[i]):
        of[i] = sizes.index(min(sizes))
        sizes[of[i]] += elements[i]
    return Fragments(tuple(of))
