"""`livescale models …`: make an ordinary Hugging Face directory without a network, and ask a
running pool over HTTP to publish, change, withdraw or list models. What may be asked is the
gateway's business.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import quote

from livescale.cli.pool_calls import add_pool_arguments, call_pool
from livescale.common.errors import UserError
from livescale.common.help_format import add_setting
from livescale.common.settings import Setting, read_values, shown_default
from livescale.config.model import CHANGEABLE_SETTINGS, MODEL_SETTINGS
from livescale.engine.files.make import FAMILY_NAMES, PRESETS, make_model
from livescale.gateway.contract.backend import ModelStatus
from livescale.gateway.endpoints.admin import AdministeredModels, RemovedModel
from livescale.report.run.terminal import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("make", help="Write a model with random weights.")
    make.add_argument("directory", type=Path, metavar="DIR", help="Folder to write.")
    make.add_argument("--preset", choices=sorted(PRESETS), default="small", help="Size.")
    make.add_argument(
        "--family", choices=sorted(FAMILY_NAMES), default="llama", help="Architecture."
    )
    make.add_argument("--seed", type=int, default=0, help="Seed of the weights.")
    _add_calls(actions)


def run(arguments: argparse.Namespace) -> int:
    """Make a model, or ask the pool and print what came of it. Raises UserError with the pool's
    own words."""
    if arguments.action == "make":
        return _make(arguments)
    print(_ACTIONS[arguments.action](arguments))
    return 0


def _make(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed} is invalid. Give a number of at least 0")
    try:
        make_model(arguments.directory, arguments.preset, arguments.seed, family=arguments.family)
    except OSError as error:
        raise UserError(str(error)) from error
    size = sum(file.stat().st_size for file in arguments.directory.glob("*.safetensors"))
    print(
        f"{arguments.directory}: {arguments.family}, preset {arguments.preset},"
        f" {size / 1e6:.1f} MB of parameters"
    )
    return 0


#: of `models:` in the configuration; `add` takes each as a flag
_SETTINGS = tuple(setting for setting in MODEL_SETTINGS if setting.name != "path")


def _add_calls(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = actions.add_parser("add", help="Publish a model in a running pool.")
    add.add_argument("directory", type=Path, metavar="DIR", help="Folder of the model.")
    for setting in _SETTINGS:
        add_setting(add, setting, f" (default: {shown_default(setting)})")
    change = actions.add_parser("set", help="Change limits of a model in a running pool.")
    change.add_argument("name", metavar="NAME", help="Name of the model.")
    for setting in CHANGEABLE_SETTINGS:
        add_setting(change, setting)
    remove = actions.add_parser("remove", help="Remove a model from a running pool.")
    remove.add_argument("name", metavar="NAME", help="Name of the model.")
    listing = actions.add_parser("list", help="List the models of a running pool.")
    for action in (add, change, remove, listing):
        add_pool_arguments(action)


# -- helpers, in the order used -------------------------------------------------------------------


def _add(arguments: argparse.Namespace) -> str:
    settings = _given(arguments, _SETTINGS)
    body = {"path": str(arguments.directory.resolve()), **settings}
    model = call_pool(arguments, ModelStatus, "POST", "/admin/models", body)
    what = f"{model.name}: {_words(model.state)}, copies in host memory: {model.host_copies}"
    return "\n".join([what, _outlook(model), *(f"warning: {w}" for w in model.warnings)])


def _outlook(model: ModelStatus) -> str:
    """What becomes of it, as it is now, when the pool starts again."""
    if model.survives_restart:
        return f"{model.name}: kept across restarts of the pool"
    return (
        f"{model.name}: kept until the pool ends. To keep models across restarts, start the "
        "pool with --state DIR"
    )


def _set(arguments: argparse.Namespace) -> str:
    changes = _given(arguments, CHANGEABLE_SETTINGS)
    if not changes:
        flags = ", ".join(setting.flag for setting in CHANGEABLE_SETTINGS)
        raise UserError(f"No change. Give at least one of {flags}")
    path = f"/admin/models/{quote(arguments.name, safe='')}"
    model = call_pool(arguments, ModelStatus, "PATCH", path, changes)
    limits = f"{model.min_replicas} to {model.max_replicas} instances, priority {model.priority}"
    return f"{model.name}: {limits}\n{_outlook(model)}"


def _given(arguments: argparse.Namespace, settings: tuple[Setting, ...]) -> dict[str, object]:
    """Checked values of the flags that were given. Raises UserError."""
    given = {s.name: vars(arguments)[s.name] for s in settings if s.name in vars(arguments)}
    return read_values(given, settings, "flags: ", is_text=True)


def _remove(arguments: argparse.Namespace) -> str:
    path = f"/admin/models/{quote(arguments.name, safe='')}"
    removed = call_pool(arguments, RemovedModel, "DELETE", path)
    return f"{removed.name}: rejects new requests, and is removed after its running requests end"


def _list(arguments: argparse.Namespace) -> str:
    models = call_pool(arguments, AdministeredModels, "GET", "/admin/models").data
    header = [
        "model",
        "state",
        "instances",
        "host copies",
        "spares",
        "requests",
        "tokens",
        "device s",
    ]
    problems = [f"{m.name}: problem: {m.problem}" for m in models if m.problem]
    return "\n".join([table([*header, "path"], [_row(model) for model in models]), *problems])


def _row(model: ModelStatus) -> list[object]:
    states = [
        f"{count} {state}{role and f' {role}'}"
        for role, counts in (model.instances_by_role or {"": model.instances}).items()
        for state, count in sorted(counts.items())
    ]
    usage = model.usage
    return [
        *(model.name, _words(model.state), ", ".join(states) or "none", model.host_copies),
        *(model.warm_spares, usage.requests, usage.generation_tokens),
        *(round(usage.device_seconds), model.path),
    ]


_ACTIONS = {"add": _add, "set": _set, "remove": _remove, "list": _list}


def _words(state: str) -> str:
    return state.replace("_", " ")
