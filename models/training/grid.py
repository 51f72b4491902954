"""Matched arms: the same body from the same seed, trained on the same batches in the same order. Only the arm differs."""

import dataclasses
from pathlib import Path
from typing import Any

from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.files import write_json
from models.ops import check_impl
from models.presets import ARMS, find_preset, parse_arm
from models.settings import ArmSettings, RunSettings, check, flatten
from models.training.folder import check_free, read_result
from models.training.loop import choose_device, look_up, train_run
from models.training.progress import read_metrics
from models.training.ranks import Ranks
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
    check_ready(settings, arms, data, out, resume)
    width = max(len(name) for name in arms)
    results = []
    for name, arm in arms.items():
        folder = arm_folder(out, name)
        result = train_run(dataclasses.replace(settings, arm=arm), data, folder, resume, label=name.ljust(width))
        results.append({"arm": name, "parts": arm.parts, "folder": str(folder), **result})
        check_same_batches(results)

    def finish() -> str:
        write_json(out / "results.json", {"settings": flatten(settings), "data": data.fingerprint, "arms": results})
        return write_report(out, results)

    return Ranks.current().lead(finish)


def arm_folder(out: Path, name: str) -> Path:
    """Where the arm called ``name`` lives in the grid's folder."""
    return out / name.replace("/", "-")


def check_ready(settings: RunSettings, arms: dict[str, ArmSettings], data: TokenData, out: Path, resume: bool) -> None:
    """Raise what would stop any arm, before the first one trains for an hour."""
    if (out / "config.json").exists():
        raise UsageError(f"{out}: holds a single run; give another --out for several arms")
    device = choose_device(settings.train.device)
    for name, arm in arms.items():
        own = dataclasses.replace(settings, arm=arm)
        check_impl(arm.impl, device)
        check_free(arm_folder(out, name), own, resume)
        read_result(arm_folder(out, name), data.fingerprint)
        look_up(own, data)


def check_same_batches(results: list[dict[str, Any]]) -> None:
    """Raise UserError unless every arm's logged batch hashes are equal step by step, and all codes the same."""
    reference: list[str] = []
    for result in results:
        hashes = [row["batch"] for row in read_metrics(Path(result["folder"]) / "metrics.jsonl")]
        if len(hashes) != result["steps"]:
            held = f"holds {len(hashes)} of {result['steps']} steps"
            raise UserError(f"{result['folder']}/metrics.jsonl: {held}: it was cut or changed")
        if len({r["codes"] for r in results if r["codes"]}) > 1:
            raise UserError(f"{result['folder']}: trained with other sign codes than the arms before it; train it in another --out")
        reference = reference or hashes
        if hashes != reference:
            pairs = zip(hashes, reference, strict=False)
            step = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(hashes), len(reference)))
            raise UserError(f"{result['folder']}: saw other batches than {results[0]['folder']} from step {step + 1} on")
