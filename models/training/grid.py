"""Matched arms: the same body from the same seed, trained on the same batches in the same order. Only the arm differs."""

import dataclasses
from pathlib import Path
from typing import Any

from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.files import write_json
from models.presets import ARMS, find_preset, parse_arm
from models.settings import ArmSettings, RunSettings, check, flatten
from models.training.loop import choose_device, look_up, train_run
from models.training.progress import read_metrics
from models.training.report import write_report


def parse_arms(text: str, base: ArmSettings) -> dict[str, ArmSettings]:
    """``"table,kron,sign/code/none"`` -> settings by arm name (see ``models.presets.parse_arm``).

    Raises UsageError that lists every problem.
    """
    arms: dict[str, ArmSettings] = {}
    problems = []
    for name in (word.strip() for word in text.split(",")):
        if name in arms:
            problems.append(f"arm {name!r} is named twice")
            continue
        try:
            arms[name] = parse_arm(name, base, ARMS | find_preset(base.preset).arms)
            check(RunSettings(arm=arms[name]))
        except UsageError as error:
            problems.append(f"--arms {name}: {error}")
    if problems:
        raise UsageError("\n".join(problems))
    return arms


def train_grid(settings: RunSettings, arms: dict[str, ArmSettings], data: TokenData, out: Path, resume: bool) -> str:
    """Train each arm in ``out/NAME``, check that all saw the same batches, write the report; returns its table.

    With ``resume`` finished arms are kept and a stopped one continues.
    """
    for arm in arms.values():  # before the first arm trains for an hour, see that the last one can
        look_up(dataclasses.replace(settings, arm=arm), data)
    choose_device(settings.train.device)
    width = max(len(name) for name in arms)
    results = []
    for name, arm in arms.items():
        folder = out / name.replace("/", "-")
        result = train_run(dataclasses.replace(settings, arm=arm), data, folder, resume, label=name.ljust(width))
        results.append({"arm": name, "parts": arm.parts, "folder": str(folder), **result})
        check_same_batches(results)
    write_json(out / "results.json", {"settings": flatten(settings), "data": data.fingerprint, "arms": results})
    return write_report(out, results)


def check_same_batches(results: list[dict[str, Any]]) -> None:
    """Raise UserError unless every arm's logged batch hashes are equal step by step."""
    reference: list[str] = []
    for result in results:
        hashes = [row["batch"] for row in read_metrics(Path(result["folder"]) / "metrics.jsonl")]
        reference = reference or hashes
        if hashes != reference:
            pairs = zip(hashes, reference, strict=False)
            step = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(hashes), len(reference)))
            raise UserError(f"{result['folder']}: saw other batches than {results[0]['folder']} from step {step + 1} on")
