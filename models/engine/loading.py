"""From a packed file into the library's memory, piece by piece: no second copy of the weights exists at any time."""

import ctypes
from array import array

from models.engine.description import PLACES, SCALE_OF, Description, Part
from models.engine.library import KINDS, check
from models.packed.file import PackedFile, Tensor

PIECE_BYTES = 1 << 18  # read at once, so that loading takes hardly more memory than the model
_COLUMN = {PLACES[name] for name in ("prior", "lengths", "gf2")}  # one value a token or bit: rows of one column


def load_model(library: ctypes.CDLL, file: PackedFile, description: Description, backend: str | None) -> ctypes.c_void_p:
    """A finished tf_model; the caller frees it. Raises UserError that names the file and what is wrong with it, or MemoryError."""
    model = ctypes.c_void_p()
    name = None if backend is None else backend.encode()
    check(library, library.tf_model_create(description.config, name, ctypes.byref(model)), f"{file.path}: ")
    try:
        _Loader(library, file, description, model).load()
    except BaseException:
        library.tf_model_free(model)
        raise
    return model


class _Loader:
    def __init__(self, library: ctypes.CDLL, file: PackedFile, description: Description, model: ctypes.c_void_p) -> None:
        self.library, self.file, self.description, self.model = library, file, description, model
        self.loaded: set[str] = set()

    def load(self) -> None:
        for part in self.description.parts():
            tensor = self._tensor(part.name)
            self._load(part, tensor)
            if scale := self._scale_of(part, tensor):
                self._load(scale, self._tensor(scale.name))
        for name in self.file.tensors:
            if name not in self.loaded and not name.startswith("tokenizer."):
                raise self.file.fault(f"{name}: the model it describes has no such tensor")
        check(self.library, self.library.tf_model_finish(self.model), f"{self.file.path}: ")

    def _tensor(self, name: str) -> Tensor:
        if name not in self.file.tensors:
            raise self.file.fault(f"{name} is missing, and the model it describes has it")
        return self.file.tensors[name]

    def _scale_of(self, part: Part, tensor: Tensor) -> Part | None:
        if part.name.endswith(".packed"):
            return Part(part.name.removesuffix("packed") + "scale", part.layer, part.place + SCALE_OF)
        if tensor.dtype == "int8":
            return Part(f"{part.name}.scale", part.layer, part.place + SCALE_OF)
        return None

    def _load(self, part: Part, tensor: Tensor) -> None:
        self.loaded.add(part.name)
        rows, columns = self._shape(part, tensor)
        kind = KINDS["ternary" if part.name.endswith(".packed") else tensor.dtype]
        about = f"{self.file.path}: {part.name}: "
        check(self.library, self.library.tf_model_declare(self.model, part.layer, part.place, kind, rows, columns), about)
        vector = rows == 1 and len(tensor.shape) < 2 and part.place not in _COLUMN
        row_bytes = tensor.nbytes if vector else tensor.row_bytes
        pieces = [self.file.read(part.name)] if vector else (bytes(piece) for _, piece in self.file.rows(part.name, PIECE_BYTES))
        for piece in pieces:
            data = _shifted(piece, part.offset) if part.offset else piece
            count = len(piece) // row_bytes
            check(self.library, self.library.tf_model_load(self.model, part.layer, part.place, count, data, len(data)), about)

    def _shape(self, part: Part, tensor: Tensor) -> tuple[int, int]:
        """Rows and columns as the library counts them."""
        shape = tensor.shape
        if max((1, *shape)) >= 1 << 31 or len(shape) > 2:
            raise self.file.fault(f"{part.name}: a shape of {list(shape)}, which no part of a model has")
        if part.name.endswith(".packed"):
            columns = self._ternary_columns(part, tensor)
            return shape[0], columns
        if len(shape) == 2:
            return shape[0], shape[1]
        size = shape[0] if shape else 1
        return (size, 1) if part.place in _COLUMN else (1, size)

    def _ternary_columns(self, part: Part, tensor: Tensor) -> int:
        """Four weights lie in a byte, so the model says how many a row has."""
        config = self.description.config
        columns = {3: config.heads * config.head_dim, 6: config.ffn}.get(part.place, config.width)
        if len(tensor.shape) != 2 or tensor.shape[1] != (columns + 3) // 4 or tensor.dtype != "uint8":
            raise self.file.fault(f"{part.name}: is {tensor.dtype} {list(tensor.shape)}, expected rows of {columns} weights")
        return columns


def _shifted(data: bytes, offset: float) -> bytes:
    """float32 values plus ``offset``, rounded once."""
    values = array("f", data)
    return array("f", (value + offset for value in values)).tobytes()
