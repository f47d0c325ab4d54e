"""What the updates of a transformation are: its state says so, in an attribute `roles`.

A method that is built on another one asks: the mean of `jaxcomm.factored_adam` may be any mean, but
not a vote, and not a chain that ends with an optimizer.
"""

from typing import Any

import jax

MEANS = "means"
SIGNS = "signs"
LOCAL = "local gradients"
MOMENTA = "means of momenta"
FINISHED = "finished updates"
IN_BACKWARD = "means that the backward pass has made"
ZEROS = "zeros"
WRAPPED = "wrapped exchanges"
OTHER = "others"  # of transformations that are not jaxcomm's

_INSTEAD = {
    SIGNS: 'a vote, whose updates are signs; in one bit, jaxcomm.mean("data", "scaled_sign", '
    "error_feedback=True) takes a mean",
    FINISHED: "an optimizer; give the exchange alone",
    IN_BACKWARD: "one in the backward pass, after which there is no local gradient",
    ZEROS: "jaxcomm.set_to_zero; give it the frozen part of an optax.partition",
    WRAPPED: "one inside a wrapper, such as optax.partition, optax.named_chain or "
    "optax.inject_hyperparams; give the exchange alone",
    OTHER: "a chain with other transformations; give the exchange alone: clipping and the like "
    "belong with the optimizer",
}


def roles_of(state: Any) -> frozenset[str]:
    """The roles of the transformation of a state, or of all members of a chain."""
    if type(state) is tuple:
        return frozenset().union(*map(roles_of, state))
    return getattr(state, "roles", frozenset({WRAPPED if exchanges(state) else OTHER}))


def exchanges(state: Any) -> bool:
    """Whether any transformation of a state takes local gradients and returns something else."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "roles"))
    return any(getattr(node, "roles", frozenset()) - {LOCAL} for node in nodes)


def require_means(state: Any, who: str) -> None:
    """Raises a ValueError unless a state belongs to a mean; `who` is for the message."""
    for role, instead in _INSTEAD.items():
        if role in roles_of(state):
            raise ValueError(f"{who} needs an exchange of means, got {instead}.")
    if not exchanges(state):
        raise ValueError(
            f"{who} needs an exchange of means, got nothing that exchanges; put jaxcomm.mean into "
            "it, after what changes local gradients."
        )
