"""Prepared data for the tests of data and batches."""

import random

from models.data.document import Document
from models.data.prepare import PrepareSettings

SETTINGS = PrepareSettings(tokenizer="bpe:300", validation_fraction=0.2, seed=1)


class Listed:
    """A source of given documents."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents

    def documents(self):
        yield from self._documents

    def describe(self):
        return {"source": "listed", "documents": [list(document) for document in self._documents]}


def some_documents(n: int = 40) -> list[Document]:
    rng = random.Random(3)
    words = ["the", "cat", "sat", "on", "—", "naïve", "東京", "😀", "Ωmega", "and\nthen", "<|endoftext|>", "it\u200bs\u00a0tail"]
    return [Document(f"doc{i}", f"{i} " + " ".join(rng.choices(words, k=rng.randint(5, 60)))) for i in range(n)]
