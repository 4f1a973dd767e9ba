"""Tasks by name, as the command line names them: from the name to an adapter and its settings.

    math · chat · code · tools · shell · sums
                                          the recipes of this package
    reasoning_gym:NAME                    a generator of the reasoning-gym package, or a mixture: NAME*2+NAME
    file:PATH                             prompts and answers: .jsonl, .parquet, .csv, a folder of `datasets`
    verifiers:NAME                        a taskset of the verifiers package, of one turn or many
    textarena:GAME                        a game of one player of the textarena package
    openenv:URL                           an environment of the openenv package, on its server
    ifeval:CONSTRAINTS                    requests with constraints of IFEval, checked by the if-verifiable package
    module:Class · path/to/file.py:Class  an adapter of your own

A task is imported only when it is asked for.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mint.errors import InvalidRequestError, MintError, MissingExtraError
from mint.recipes.question_task import DEMO
from mint.rl import RLConfig
from mint.rl.adapter import Task, as_task, missing_methods
from mint.rl.objective import is_recorded_function
from mint.runs.damage import read_config

RECIPES = {
    "math": "MathAdapter",
    "chat": "ChatAdapter",
    "code": "CodeAdapter",
    "tools": "ToolsAdapter",
    "shell": "ShellAdapter",
    "sums": "SumsAdapter",
}
"""Module of `mint.recipes` → its adapter."""

SOURCES = {
    "reasoning_gym": ("mint.recipes.task_sources.reasoning_gym", "load_reasoning_gym"),
    "file": ("mint.recipes.task_sources.files", "FileAdapter"),
    "verifiers": ("mint.recipes.task_sources.verifiers", "load_verifiers_task"),
    "textarena": ("mint.recipes.task_sources.textarena", "TextArenaAdapter"),
    "openenv": ("mint.recipes.task_sources.openenv", "OpenEnvAdapter"),
    "ifeval": ("mint.recipes.task_sources.ifeval", "IFEvalAdapter"),
}
"""Prefix → module, and the adapter or a function that makes one; the rest of the name is its first argument."""

CHOICES = ", ".join([*RECIPES, "reasoning_gym:NAME", "file:PATH", "verifiers:NAME", "textarena:GAME"])
CHOICES += ", openenv:URL, ifeval:CONSTRAINTS, module:Class or path.py:Class"


BASE_CLASSES = "mint.rl.RLAdapter or mint.rl.MessageEnvAdapter"
"""What a task of one's own derives from."""


@dataclass(frozen=True)
class TaskChoice:
    """A task and the settings to train it with."""

    adapter: Task
    config: RLConfig


def load_task(name: str, *, seed: int = 0, **options: Any) -> TaskChoice:
    """The task called `name`, with the settings that suit it on the bundled model.

    `options` are arguments of its adapter. `seed` goes to the adapter and into the settings.

    Raises:
        InvalidRequestError: no such task, or an option that it does not take; names the choices.
        MissingExtraError: the task needs a package that is not installed; names it.
    """
    choice = _find(name, seed, options)
    choice.adapter.spec = {"task": name, "seed": seed, "options": options}
    return choice


@contextmanager
def open_task(name: str, words: Mapping[str, Any]) -> Generator[TaskChoice]:
    """The task called `name`, closed at the end. Of `words`, those that name a field of `RLConfig` are settings; the
    others are options of the task.

    The learning rate that suits a task on its own base model is not taken for another one, which gets that of the
    environment, or the default of `RLConfig`: the bundled model of 1.8M parameters wants a rate 100 times as high,
    which destroys a large model.

    Raises:
        InvalidRequestError: unknown task, setting or option.
    """
    settings = {key: value for key, value in words.items() if key in RLConfig.model_fields and key != "run_dir"}
    options = {key: value for key, value in words.items() if key not in RLConfig.model_fields}
    seed = RLConfig.from_texts({key: value for key, value in settings.items() if key == "seed"}).seed
    with suggestion_of_settings(options, RLConfig.model_fields):
        choice = load_task(name, seed=seed, **options)
    proposed = choice.config.model_dump()
    if settings.get("base_model", proposed["base_model"]) != proposed["base_model"]:
        proposed["learning_rate"] = RLConfig.from_env().learning_rate
    config = RLConfig.from_texts({**proposed, **settings})
    try:
        yield TaskChoice(choice.adapter, config)
    finally:
        choice.adapter.close()


@contextmanager
def open_task_of_run(run: Path, task: str | None) -> Generator[TaskChoice]:
    """The task and the settings of a run in its folder; `task` names it where the run folder does not.

    Raises:
        InvalidRequestError: neither says which task it is.
    """
    described = read_config(run)
    recorded = described.get("task_spec")
    if task is not None and recorded and recorded.get("task") != task:
        raise InvalidRequestError(
            f"is not the task of the run, which is {recorded.get('task')}",
            field="--task",
            value=task,
            remedy="Leave it out: it is for runs that were started from Python",
        )
    spec: dict[str, Any] | None = recorded or (
        {"task": task, "seed": described.get("seed", 0), "options": {}} if task is not None else None
    )
    if spec is None:
        raise InvalidRequestError(
            "does not name its task, because it was started from Python",
            field="run",
            value=str(run),
            remedy="Name it: --task path.py:Class",
        )
    # A function of the user's own objective is in the record by name alone; sampling and grading do not need it.
    settings = {
        key: value
        for key, value in described.items()
        if key in RLConfig.model_fields and not is_recorded_function(value)
    }
    with open_task(spec["task"], {**settings, **spec["options"], "seed": spec["seed"]}) as choice:
        yield choice


@contextmanager
def suggestion_of_settings(options: Iterable[str], settings: Iterable[str]) -> Generator[None]:
    """Adds to a refusal of task options the setting that a mistyped one is similar to, or else all settings."""
    try:
        yield
    except InvalidRequestError as error:
        similar = [name for option in options for name in get_close_matches(option, list(settings), n=1, cutoff=0.78)]
        if similar:
            error.remedy = f"{error.remedy}. Among the settings of a run, did you mean {similar[0]}?"
        elif error.message.startswith(_WRONG_OPTIONS) and error.value is not None:  # not one that is missing
            error.remedy = f"{error.remedy}. The settings of a run are {', '.join(settings)}"
        raise


def _find(name: str, seed: int, options: dict[str, Any]) -> TaskChoice:
    source, _, rest = name.partition(":")
    if name in RECIPES:
        module = importlib.import_module(f"mint.recipes.{name}")
        adapter = _construct_own(getattr(module, RECIPES[name]), name, (), {"seed": seed, **options})
        return _choice(adapter, module.DEMO, seed)
    if source in SOURCES and rest:
        home, cls = SOURCES[source]
        make = getattr(importlib.import_module(home), cls)
        adapter = _construct_own(make, name, (rest,), {"seed": seed, **options})
        return _choice(adapter, DEMO, seed)
    if source.endswith(".py") and not rest and Path(source).is_file():
        raise InvalidRequestError(
            "does not name a class of this file",
            field="task",
            value=name,
            remedy=f"Name it: {source}:{_first_class(Path(source))}",
        )
    if rest:
        module = _user_module(source, name)
        make = _user_class(module, rest, name)
        wants_seed = "seed" in inspect.signature(make).parameters
        given = {"seed": seed, **options} if wants_seed else options
        with _errors_of_user_class(module, rest, name):
            adapter = as_task(_construct(make, name, (), given))
        return _choice(adapter, _own_settings(module, source), seed)
    raise unknown_task(name)


def _own_settings(module: ModuleType, source: str) -> RLConfig:
    """The settings that a user's file proposes as `DEMO`, or else those of the environment.

    Raises:
        InvalidRequestError: `DEMO` is something else.
    """
    own = getattr(module, "DEMO", None)
    if own is None:
        return RLConfig.from_env()
    if not isinstance(own, RLConfig):
        remedy = "Write DEMO = RLConfig(…), or give it another name"
        raise InvalidRequestError(
            f"is no RLConfig, but {type(own).__name__}", field=f"{source}: DEMO", value=own, remedy=remedy
        )
    return own


def _choice(adapter: Task, config: RLConfig, seed: int) -> TaskChoice:
    return TaskChoice(adapter, config.changed(seed=seed))


_WRONG_OPTIONS = "does not take these options"
"""Begins the refusal of options that are no parameters of a task."""


def _construct(make: Callable[..., Any], name: str, place: tuple[str, ...], options: dict[str, Any]) -> Any:
    signature = inspect.signature(make)
    try:
        signature.bind(*place, **options)
    except TypeError as error:
        known = list(signature.parameters)[len(place) :]
        unknown = {option: value for option, value in options.items() if option not in known}
        raise InvalidRequestError(
            f"{_WRONG_OPTIONS} ({error})",
            field=f"task {name}",
            value=unknown or None,
            remedy=f"Its options are {', '.join(known)}" if known else "It has no options",
        ) from error
    return make(*place, **options)


def _construct_own(make: Callable[..., Any], name: str, place: tuple[str, ...], options: dict[str, Any]) -> Any:
    """A task of mint. Its options have types; a text or number in the place of something else is refused."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    for option, value in options.items():
        kinds = _flat(hints.get(option, Any))
        if not isinstance(value, str | int | float) or Any in kinds or _fits(value, kinds):
            continue
        takes = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not NoneType))
        raise InvalidRequestError(
            "is of the wrong type", field=f"task {name}: {option}", value=value, remedy=f"It takes {takes}"
        )
    return _construct(make, name, place, options)


def _flat(hint: Any) -> set[Any]:
    """The types that a value may have. Which values of a Literal there are, the task itself says."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(_flat, get_args(hint)))
    return set(map(type, get_args(hint))) if get_origin(hint) is Literal else {hint}


def _fits(value: str | float, kinds: set[Any]) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return not kinds.isdisjoint({int, float})
    return type(value) in kinds or (isinstance(value, str) and Path in kinds)


def _user_module(source: str, name: str) -> ModuleType:
    if source.endswith(".py"):
        return _module_from_file(Path(source), name)
    try:
        found = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise unknown_task(name)
    try:
        return importlib.import_module(source)
    except MissingExtraError:
        raise
    except ImportError as error:
        raise InvalidRequestError(
            f"cannot be imported ({error})", field="task", value=name, remedy="Install what the module imports"
        ) from error


def _module_from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mint_task_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InvalidRequestError("is not a file", field="task", value=name, remedy=f"Choose {CHOICES}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python PATH` does, so that the file can import those beside it
    try:
        spec.loader.exec_module(module)
    except MintError:
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"cannot be loaded ({type(error).__name__}: {error})",
            field="task",
            value=name,
            remedy=f"`python {path}` shows where",
        ) from error
    return module


def _first_class(path: Path) -> str:
    """The name of the first class of the file with a base class, most likely the task; `Class` if there is none."""
    try:
        statements = ast.parse(path.read_text()).body
    except (SyntaxError, ValueError):
        return "Class"
    return next((each.name for each in statements if isinstance(each, ast.ClassDef) and each.bases), "Class")


def _user_class(module: ModuleType, cls: str, name: str) -> Callable[..., Any]:
    """The class, or function that makes a task, called `cls` in the user's module.

    Raises:
        InvalidRequestError: the module has none, or it is a class that is no task.
    """
    make = getattr(module, cls, None)
    tasks = [each for each, value in vars(module).items() if _is_own_class(value, module) and _is_task(value)]
    choices = f"Its tasks are {', '.join(tasks)}" if tasks else f"Write a class that derives from {BASE_CLASSES}"
    if not callable(make):
        raise InvalidRequestError(f"has no class {cls}", field="task", value=name, remedy=choices)
    if inspect.isclass(make) and (missing := missing_methods(make)):
        if not _is_own_class(make, module):
            raise InvalidRequestError(
                f"names {make.__module__}.{make.__name__}, which is no task", field="task", value=name, remedy=choices
            )
        remedy = f"Write {'them' if len(missing) > 1 else 'it'} in the class"
        if not issubclass(make, Task):
            remedy += f", and derive it from {BASE_CLASSES}"
        raise InvalidRequestError(f"has no {', '.join(missing)}", field="task", value=name, remedy=remedy)
    return make


def _is_own_class(value: Any, module: ModuleType) -> bool:
    """Whether `value` is a class of the module or of a module below it, not one that it imports from elsewhere."""
    return inspect.isclass(value) and f"{value.__module__}.".startswith(f"{module.__name__}.")


def _is_task(cls: type) -> bool:
    return issubclass(cls, Task) or not missing_methods(cls)


@contextmanager
def _errors_of_user_class(module: ModuleType, cls: str, name: str) -> Generator[None]:
    """Says of an error in the user's code which class and line raised it."""
    try:
        yield
    except MintError:
        raise
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__
        ]
        where = f" in line {lines[-1]} of {module.__file__}" if lines else ""
        raise InvalidRequestError(
            f"{cls} raised {type(error).__name__}{where} ({error})",
            field="task",
            value=name,
            remedy="Correct the class, or give it the options that it needs",
        ) from error


def unknown_task(name: str) -> InvalidRequestError:
    """The error for a name that is no task: it has a similar name, and the choices."""
    similar = get_close_matches(name, RECIPES, n=1)
    guess = f"Did you mean {similar[0]}? " if similar else ""
    return InvalidRequestError("is not a task", field="task", value=name, remedy=f"{guess}Choose {CHOICES}")
