"""What takes how many bytes in a packed file, or in that of a preset whose weights need not exist."""

import re
from typing import TYPE_CHECKING, Any

from models.packed.file import HEADER, PackedFile

if TYPE_CHECKING:
    from models.arm import ModelDescription

COUNTS = ("tensors", "sections", "bytes")


def file_rows(file: PackedFile) -> list[dict[str, Any]]:
    """A row per tensor, those that only differ in their block as one: what, name, dtype, shape, tensors, sections, bytes."""
    from models.packed.sections import ROLES, role

    arm = file.model["arm"]
    rows: dict[tuple, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        what = role(tensor.name, tensor.shape, arm["interface"], arm["head"])
        name = re.sub(r"\.blocks\.\d+\.", ".blocks.*.", tensor.name)
        empty = {"what": what, "name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)} | dict.fromkeys(COUNTS, 0)
        row = rows.setdefault((name, tensor.dtype, tensor.shape), empty)
        for count, more in zip(COUNTS, (1, len(tensor.sections), tensor.nbytes), strict=True):
            row[count] += more
    return sorted(rows.values(), key=lambda row: ROLES.index(row["what"]))


def file_sums(file: PackedFile) -> list[dict[str, Any]]:
    """Rows of what takes how many bytes; the last is what no tensor and no index in force takes. Their sum is the file's size."""
    sums: dict[str, dict[str, Any]] = {}
    for row in file_rows(file):
        total = sums.setdefault(row["what"], {"what": row["what"], "tensors": 0, "bytes": 0})
        total["tensors"], total["bytes"] = total["tensors"] + row["tensors"], total["bytes"] + row["bytes"]
    known = sum(row["bytes"] for row in sums.values())
    index = {"what": "header and index", "tensors": 0, "bytes": HEADER + file.slot.bytes}
    unused = {"what": "alignment, replaced indices", "tensors": 0, "bytes": file.size - known - index["bytes"]}
    return [*sums.values(), index, unused]


def describe_preset(preset: str, arm: str, bitnet_scale: str) -> "ModelDescription":
    """The model of a preset's arm (by its name there, in general, or spelled out). Raises UsageError for unknown names."""
    import dataclasses

    from models.presets import describe, find_preset, parse_arm
    from models.settings import ArmSettings, RunSettings, check
    from models.vocab.fixed_data import uses_codes

    found = find_preset(preset)
    settings = RunSettings(arm=parse_arm(arm, ArmSettings(preset=preset), found.arms))
    check(settings)
    description = describe(settings, found.vocab_size, found.code_bits if uses_codes(settings.arm) else 0)
    return dataclasses.replace(description, body=dataclasses.replace(description.body, bitnet_scale=bitnet_scale))
