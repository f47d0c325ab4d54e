"""No module of jaxcomm is in a circle of imports."""

import pytest

from test_structure import imports, modules, within


def circles(found: dict[str, str]) -> list[str]:
    """The modules of jaxcomm in a circle of imports, those inside functions included.

    `from a import b` imports the module `a.b`, or else `a`. That every import of `a.b` also runs
    `a/__init__.py` makes no circle.
    """
    inside = {n.removesuffix(".__init__"): (n, s) for n, s in found.items() if within(n, "jaxcomm")}
    needs = {}
    for name, (module, source) in inside.items():
        targets = imports(source, module)
        known = {t if t in inside else t.rpartition(".")[0] for t in targets} & set(inside)
        needs[name] = known - {name}
    # What needs nothing that is left is in no circle, and neither is what nothing needs.
    while ends := {n for n in needs if not needs[n] or not any(n in own for own in needs.values())}:
        needs = {name: own - ends for name, own in needs.items() if name not in ends}
    return [f"{name} imports {', '.join(sorted(own))}" for name, own in needs.items()]


CIRCLES: tuple[tuple[dict[str, str], int], ...] = (  # modules, and how many are in a circle
    (
        {
            "jaxcomm.a": "from jaxcomm import b",
            "jaxcomm.b": "def f():\n    import jaxcomm.c",
            "jaxcomm.c": "from jaxcomm.a import x",
            "jaxcomm.d": "from jaxcomm import a",
        },
        3,
    ),
    (
        {
            "jaxcomm.f.__init__": "def f():\n    from jaxcomm.f import kernel",
            "jaxcomm.f.kernel": "from jaxcomm.f import plain",
        },
        2,
    ),
    (
        {
            "jaxcomm.f.__init__": "from jaxcomm.f import kernel, plain",
            "jaxcomm.f.kernel": "from jaxcomm.f import plain\nfrom .plain import x",
            "jaxcomm.f.plain": "import jax",
        },
        0,
    ),
)


def test_no_circles() -> None:
    assert circles(modules()) == []


@pytest.mark.parametrize(("found", "number"), CIRCLES)
def test_circles_are_found(found: dict[str, str], number: int) -> None:
    assert len(circles(found)) == number
