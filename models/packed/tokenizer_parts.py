"""Which tensors a packed file has of its tokenizer, and that they agree with each other."""

from models.packed.codec import CHARACTERS, ENCODER_TENSORS, RANKS
from models.packed.encoder_tables import encoder_tables
from models.packed.file import PackedFile
from models.packed.splitting import SPACES
from models.packed.tokenizer_json import SETTINGS, WHOLE
from models.vocab.tokenizer import Tokenizer

Wanted = dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]]  # name -> (dtypes, shape; None: any of one dimension)


def tokenizer_layout(file: PackedFile, size: int) -> Wanted:
    """The tensors of the tokenizer of a file with ``size`` ids, as its index promises them."""
    encoder = file.index["tokenizer"].get("encoder")
    text = SETTINGS if encoder is not None and SETTINGS in file.tensors else WHOLE
    wanted: Wanted = {text: (("uint8",), None), "tokenizer.bytes": (("uint8",), None), "tokenizer.ends": (("uint32",), (size,))}
    if encoder is None:
        return wanted
    names = ENCODER_TENSORS | ({RANKS: "uint32"} if RANKS in file.tensors else {})
    wanted |= {name: ((dtype,), _rows(file, "tokenizer.merges")) for name, dtype in names.items()}
    wanted["tokenizer.alphabet"] = (("uint32",), (256,))
    if isinstance(encoder, dict) and encoder.get("rule") == SPACES:
        wanted |= {name: ((dtype,), _rows(file, "tokenizer.characters")) for name, dtype in CHARACTERS.items()}
    return wanted


def _rows(file: PackedFile, name: str) -> tuple[int, ...]:
    tensor = file.tensors.get(name)
    return tensor.shape[:1] if tensor else ()


def check_encoder(file: PackedFile, tokenizer: Tokenizer) -> None:
    """Raise UserError unless what text is encoded with, if the file has it, is what ``tokenizer``, the file's own, means."""
    about = file.index["tokenizer"].get("encoder")
    if about is None:
        return
    tables = encoder_tables(tokenizer)
    if not tables or tables.about() != about:
        raise file.fault("tokenizer.encoder of the index is not what tokenizer.json means")
    tensors = {tensor.name: tensor for tensor in tables.tensors()}
    for name in ENCODER_TENSORS.keys() | CHARACTERS.keys() | {RANKS}:
        expected = b"".join(tensors[name].data) if name in tensors else b""
        if expected != (file.read(name) if name in file.tensors else b""):
            raise file.fault(f"{name} is not that of tokenizer.json")
