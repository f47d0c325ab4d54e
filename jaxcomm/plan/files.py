"""Topologies as small YAML files.

A file names a fabric and its settings, each of which can be overridden:

    fabric: star            # star, chain, ring, clusters, fat_tree, dln, dln_2d, or explicit
    hosts: 4
    rate: 50                # Mbit/s in each direction of a link; or 1Gbit, or unlimited
    links_per_host: 1

The settings are the arguments of the functions in `fabrics`. `explicit` has `switches` and `links`,
a list of `[end, end, rate]`, in which hosts are h0, h1, ... A file may contain `version: 1`.
"""

import inspect
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxcomm.plan.fabrics import FABRICS, rate_of
from jaxcomm.plan.topology import LinkError, Topology

TOPOLOGIES = Path(__file__).parent / "topologies"
VERSION = 1
_RATES = ("rate", "middle", "shortcut")
_KINDS = {
    "closed": (bool, "true or false"),
    "hosts": (numbers.Integral, "a whole number"),
    "links": (list, "a list of [end, end, rate]"),
    "rates": (list, "a list of rates"),
    "switches": (list, "a list of names"),
}


def load(name: str, **overrides: Any) -> Topology:
    """Reads a topology.

    Args:
      name: the name of a file in `TOPOLOGIES`, or a path.
      **overrides: settings that replace the file's; None keeps the file's.

    Returns:
      The topology.

    Raises:
      TypeError: for anything but a name or a path.
      ValueError: for an unknown name or invalid settings, in one line with the file and line.
      ImportError: without PyYAML.
    """
    if not isinstance(name, str | Path):
        raise TypeError(f"load takes a file, or the name of a topology, got {name!r}.")
    file = File(find(str(name)))
    return topology_of(file, file.settings, {k: v for k, v in overrides.items() if v is not None})


def find(name: str) -> Path:
    """The path of the topology with this name or path.

    Raises:
      ValueError: if there is none.
    """
    path = TOPOLOGIES / f"{name}.yaml"
    path = path if path.exists() else Path(name)
    if not path.is_file():
        known = sorted(p.stem for p in TOPOLOGIES.glob("*.yaml"))
        wrong = f"{name} is a folder" if path.is_dir() else f"there is no file {name!r}"
        if not path.exists() and not path.suffix and path.name == name:
            wrong = f"there is no topology {name!r}"
        raise ValueError(f"{wrong}; name a file, or one of {', '.join(known)}.")
    return path


def topology_of(
    file: "File", settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Topology:
    """The topology of a file's settings, some of which may be overridden.

    Raises:
      ValueError: for invalid settings, in one line with the file and the line number.
    """
    settings = {**settings, **overrides}
    version = settings.pop("version", VERSION)
    if version != VERSION:
        wrong = f"the file is version {version!r}; this jaxcomm reads version {VERSION}."
        raise file.error("version", wrong)
    fabric = settings.pop("fabric", None)
    if not isinstance(fabric, str) or fabric not in FABRICS:
        known = ", ".join(FABRICS)
        wrong = "it has no fabric" if fabric is None else f"unknown fabric {fabric!r}"
        raise file.error("fabric", f"{wrong}; write one of {known}.", overrides)
    takes = inspect.signature(FABRICS[fabric]).parameters
    for key in settings:
        if key == "name" or key not in takes:
            allowed = ", ".join(k for k in takes if k != "name")
            raise file.error(key, f"unknown key {key!r}; {fabric} takes {allowed}.", overrides)
    for key, parameter in takes.items():
        if key != "name" and parameter.default is parameter.empty and key not in settings:
            raise file.error(key, f"{fabric} needs {key!r}.")
    for key, (kinds, what) in _KINDS.items():
        if settings.get(key) is not None and not isinstance(settings[key], kinds):
            raise file.error(key, f"{key} is {what}, got {settings[key]!r}.", overrides)
    for key in (*_RATES, "links", "hosts"):
        if key in settings and settings[key] is None:
            kind = ", such as 1Gbit, or unlimited" if key in _RATES else ""
            raise file.error(key, f"{key} is empty; give it a value{kind}.", overrides)
    for key in _RATES:
        if key in settings:
            _check_rate(file, key, settings[key], overrides)
    for i, rate in enumerate(settings.get("rates") or ()):
        _check_rate(file, "rates", rate, overrides, i, settings["rate"])
    try:
        return FABRICS[fabric](file.path.stem, **settings)
    except LinkError as error:
        raise file.error("links", str(error), overrides, item=error.link) from None
    except (ValueError, TypeError) as error:
        changed = ", ".join(f"{key}={value}" for key, value in overrides.items())
        where = f"{file.path}{f' with {changed}' if changed else ''}"
        raise ValueError(f"{where}: {error}") from None


def _check_rate(
    file: "File",
    key: str,
    value: Any,
    overrides: Mapping[str, Any],
    item: int | None = None,
    whole: Any = None,
) -> None:
    try:
        rate = rate_of(value, whole)
    except ValueError as error:
        raise file.error(key, str(error), overrides, item) from None
    if rate is not None and not 0 < rate < float("inf"):
        wrong = f"{key} is {rate:g} Mbit/s; rates are positive, or unlimited."
        raise file.error(key, wrong, overrides, item)


def pyyaml() -> Any:
    """PyYAML, which only files need; an ImportError says how to install it."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError("files need PyYAML: pip install pyyaml") from error
    return yaml


def value_of(text: str) -> Any:
    """A value, parsed as in a file.

    Raises:
      ValueError: for invalid YAML.
    """
    yaml = pyyaml()
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"this is not YAML: {_problem(error)}.") from None


def _problem(error: Exception) -> str:
    """What is wrong, in a line."""
    for name in ("problem", "reason"):
        if getattr(error, name, None):
            return getattr(error, name)
    return str(error)


def _key_twice(node: Any) -> Any:
    """The first key that appears twice in one mapping, at any depth; None if there is none."""
    waiting, known = [node], set()
    while waiting:
        node = waiting.pop()
        if node.id == "scalar" or id(node) in known:  # an alias may refer to an ancestor
            continue
        known.add(id(node))
        if node.id == "sequence":
            waiting += node.value
            continue
        keys = set()
        for key, value in node.value:
            name = str(key.value)
            if name in keys:
                return key
            keys.add(name)
            waiting.append(value)
    return None


class File:
    """A YAML mapping, and the line of each of its keys and items.

    Args:
      path: the path of the file.
      example: an example of a line, for messages.

    Raises:
      ValueError: for anything but a mapping, in one line with the file and the line number.
      ImportError: without PyYAML.
    """

    def __init__(self, path: Path, example: str = "fabric: star"):
        yaml = pyyaml()
        self.path = path
        self.settings: dict[str, Any] = {}
        self._lines: dict[str, int] = {}
        self._items: dict[str, list[int]] = {}
        read = path.read_bytes()
        try:
            text = read.decode()
        except UnicodeDecodeError as error:
            line = 1 + read.count(b"\n", 0, error.start)
            raise ValueError(f"{path}, line {line}: this is not UTF-8 text.") from None
        try:
            node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
            wrong = f"this is not YAML: {_problem(error)}."
            raise ValueError(f"{path}, line {line + 1}: {wrong}") from None
        if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
            raise ValueError(f"{path} has no settings; write `key: value` lines, as {example}.")
        if twice := _key_twice(node):
            line = twice.start_mark.line + 1
            raise ValueError(f"{path}, line {line}: the key {twice.value!r} appears twice.")
        for key, value in node.value:
            self._lines[str(key.value)] = key.start_mark.line + 1
            if isinstance(value, yaml.SequenceNode):
                self._items[str(key.value)] = [item.start_mark.line + 1 for item in value.value]
        self.settings = {str(key): value for key, value in values.items()}

    def error(
        self,
        key: str,
        message: str,
        overrides: Mapping[str, Any] | None = None,
        item: int | None = None,
    ) -> ValueError:
        """What is wrong and where: in the file, or in the override."""
        if key in (overrides or {}):
            return ValueError(f"{key}={(overrides or {})[key]}: {message}")
        items = self._items.get(key, [])
        line = items[item] if item is not None and item < len(items) else self._lines.get(key)
        return ValueError(f"{self.path}{f', line {line}' if line else ''}: {message}")
