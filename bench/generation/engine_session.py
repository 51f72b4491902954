"""Our engine on a packed file, as child.py measures it."""

from models.engine.engine import Engine
from models.engine.session import Sampling

GREEDY = [Sampling(temperature=0.0)]


class EngineSession:
    """See ``child.Generator``."""

    def __init__(self, file: str, threads: int, kv: str) -> None:
        self.engine = Engine(file, threads=threads, kv=kv)
        self.vocab_size = self.engine.vocab_size
        self.session = None
        self.code_bytes = 0

    def start(self, tokens: int) -> None:
        if self.session is not None:
            self.session.close()
        self.session = self.engine.session()
        self.code_bytes = 0

    def read(self, ids: list[int]) -> int:
        token = self.engine.read([self.session], [ids], GREEDY)[0]
        self.code_bytes += self.engine.code_bytes
        return token
