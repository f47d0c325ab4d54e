"""The help texts of Python itself as a TensorFlow Datasets builder: no download, no TensorFlow.

`help("topics")` prints them: about 80 chapters of the language reference, 460 KB of English with
examples of code, which come with every CPython. They differ between versions of Python, so the
version of the data set is that of Python. The split is by position in the text, as that of TFDS's
`tiny_shakespeare`: its first 90 % are for training, the next 5 % for validation, the last 5 % for
the test.

References:
  The Python Language Reference, docs.python.org/3/reference (PSF licence).
"""

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from train.prepare import prepared


class PythonTopics(tfds.core.GeneratorBasedBuilder):
    """The help texts of the Python that prepares them; each split is one long text."""

    VERSION = tfds.core.Version(".".join(map(str, sys.version_info[:3])))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://docs.python.org/3/reference",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # Nothing is downloaded.
        text = whole_text()
        bounds = [0, len(text) * 90 // 100, len(text) * 95 // 100, len(text)]
        parts = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        names = ("train", "validation", "test")
        return {n: self._generate_examples(p) for n, p in zip(names, parts, strict=True)}

    def _generate_examples(self, text: str) -> Iterator[tuple[str, dict[str, str]]]:
        yield "text", {"text": text}


def whole_text() -> str:
    """All topics in the order of their names."""
    # Imported here: half a megabyte that is only needed to prepare the data.
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def prepare(data_dir: str) -> tfds.core.DatasetBuilder:
    """Writes the data set below a directory, once, and returns its builder."""
    return prepared(PythonTopics, data_dir)
