"""A text in memory, as a TFDS builder gives it."""

import types


class InMemory:
    """A data set of a few bytes in each split, numbered from 0."""

    def __init__(self, **sizes: int):
        self.texts = {split: bytes(range(size)) for split, size in sizes.items()}
        self.info = types.SimpleNamespace(features={"text": None})

    def as_data_source(self, split: str) -> list[dict[str, bytes]]:
        if split not in self.texts:
            raise ValueError(f"Unknown split {split!r}")
        half = len(self.texts[split]) // 2
        return [{"text": self.texts[split][:half]}, {"text": self.texts[split][half:]}]
