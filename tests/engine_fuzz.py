"""Damaged packed files through the engine: python tests/engine_fuzz.py FOLDER COUNT SEED [--sanitized]

Of each file in FOLDER, COUNT damaged versions. Each is refused by a UserError that names it, or loads, and all that is asked of it
then works. Prints how often which, as JSON. A process of its own, as C may end it: the file that did it is then left in FOLDER.
"""

import argparse
import faulthandler
import json
import random
import sys
from pathlib import Path

import fuzzing
import sanitized
from packed_mutations import damaged

HANG_S = 120  # of wall time; C code that hangs does not see fuzzing's own limit
MOST_SESSIONS = 8
fuzzing.ROOM = 1 << 30


def ways_to_draw(sampling: type, draw: random.Random, vocabulary: int) -> list:
    return [
        sampling(temperature=0),
        sampling(temperature=0.8, top_k=draw.choice([1, 5, 1000, 1 << 30]), seed=draw.getrandbits(62)),
        sampling(top_p=0.9, repetition_penalty=1.3, seen=[0, vocabulary - 1], seed=draw.getrandbits(62)),
        sampling(temperature=draw.choice([1e-300, 1e-30, 1e30, 1e300]), min_p=0.1),
    ]


def load_and_use(path: Path, draw: random.Random) -> None:
    """Read every id, or as many as some sessions have room for; draw, go back, score, decode."""
    from models.engine.engine import Engine
    from models.engine.session import Sampling

    with Engine(path, draw.choice([1, 1, 2]), draw.choice(["float16", "int8"])) as engine:
        vocabulary, length = engine.vocab_size, min(engine.context, draw.choice([1, 5, 40, 70]))
        ids, ways = draw.sample(range(vocabulary), vocabulary), ways_to_draw(Sampling, draw, vocabulary)
        engine.skip_codes(draw.choice(["auto", "always", "never"]))
        rows = [ids[start : start + length] for start in range(0, vocabulary, length)][:MOST_SESSIONS]
        sessions = [engine.session() for _ in rows]
        drawn = engine.read(sessions, rows, [ways[number % len(ways)] for number in range(len(rows))])
        session, read = sessions[0], len(rows[0])
        drawn += [engine.draw([session], [way])[0] for way in ways]
        if read < engine.context:
            drawn += engine.read([session, session.copy()], [[drawn[0]], [drawn[1]]], ways[:2])
            session.rewind(read)
            session.score([drawn[-1]], [vocabulary - 1])
        assert all(0 <= token < vocabulary for token in drawn), f"drew {drawn} of {vocabulary}"
        engine.tokenizer.decode(range(engine.tokenizer.vocab_size))
        if engine.tokenizer.encoder:  # the samples of random tokens have none
            ids = engine.tokenizer.encode("the kingmaker of the riverbank")
            assert all(0 <= token < engine.tokenizer.vocab_size for token in ids), f"encoded {ids}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--sanitized", action="store_true")
    asked = parser.parse_args()
    if asked.sanitized:
        sanitized.use()
    found = {}
    for number, path in enumerate(sorted(asked.folder.glob("*.tfree"))):
        draw = random.Random(asked.seed + number)

        def load(path: Path = path, draw: random.Random = draw) -> None:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            load_and_use(path, draw)
            faulthandler.cancel_dump_traceback_later()

        print(path, file=sys.stderr, flush=True)
        load()  # as it is: what fails below is the damage's work
        found[path.stem] = fuzzing.fuzz(path, damaged(path.read_bytes(), asked.seed + number), asked.count, load)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
