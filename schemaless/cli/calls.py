"""Commands that derive from calls of the contract: their arguments, options, --json, --yes and --dry-run."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any

import msgspec
import typer

from schemaless.cli.output import print_json
from schemaless.cli.targets import Command, api_command, offering
from schemaless.client.client import Client
from schemaless.contract.call import ApiCall, Option, notes
from schemaless.errors import Invalid

_PLAIN = {"integer": int, "number": float, "boolean": bool, "string": str}
_YES = Parameter(
    "yes", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, typer.Option("--yes", help="don't ask")]
)
_RESET = "take back what isn't given: the defaults count again"


def call_command(
    call: ApiCall, asks: str | None = None, without: Sequence[str] = (), **fixed: str
) -> Callable[[Command], Command]:
    """Makes the command of a call from a function that prints its answer, whose docstring is the help.

    Parts of the path are arguments. Parameters of the query, and members of the payload that have an Option, are
    options, but for the members `without`. Members that are `fixed` have this value. The function gets the answer and
    those of the arguments that it names, all parts of the path among them. With `asks`, the command prints the answer
    of a dry run, and asks this question before it goes on.
    """

    def decorate(show: Command) -> Command:
        named = inspect.signature(show, eval_str=True).parameters
        offered = [] if call.payload is None else _options(call.payload)
        members = [member for member in offered if member.name not in without]
        parameters = [
            *(_keyword(name, named[name].annotation) for name in call.path_parameters),
            *members,
            *map(_option_of_query, call.parameters),
            *([_YES] if asks else []),
        ]
        of_payload = {member.name for member in members} - {"reset"}

        def run(client: Client, as_json: bool, yes: bool = False, reset: bool = False, **given: Any) -> None:
            sent = {name: value for name, value in given.items() if _is_given(value)}
            query = {name: value for name, value in sent.items() if name not in of_payload}
            payload = {name: given[name] for name in of_payload if reset or name in sent}

            def answer(**more: Any) -> dict[str, Any]:
                return client.call(call, {**payload, **fixed, **more} if call.payload is not None else None, **query)

            def print_answer(document: dict[str, Any]) -> None:
                show(document, **{name: value for name, value in given.items() if name in named})

            if asks and not given["dry_run"] and not yes:
                if as_json:
                    raise Invalid("--json", "needs --dry-run or --yes, because nobody can be asked")
                print_answer(answer(dry_run=True))
                typer.confirm(asks, abort=True)
            document = answer()
            if as_json:
                print_json(document)
            else:
                print_answer(document)

        leading = [_keyword("client", Client), _keyword("as_json", bool)]
        return api_command(offering([*leading, *parameters], run, show))

    return decorate


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


def _keyword(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_of_query(parameter: Any) -> Parameter:
    kind = _PLAIN[parameter.schema["type"]]
    bounds = _bounds(parameter.schema)
    option = typer.Option(f"--{parameter.name.replace('_', '-')}", help=parameter.description, **bounds)
    return _keyword(parameter.name, Annotated[kind if kind is bool else kind | None, option], None)


def _options(payload: type[msgspec.Struct]) -> Iterator[Parameter]:
    """Yields the options of the members that have one, and --reset where members can be null or left out."""
    hints, has_unset = typing.get_type_hints(payload), False
    for field in msgspec.structs.fields(payload):
        noted = notes(payload)[field.name]
        schemas = [note.extra_json_schema or {} for note in noted if isinstance(note, msgspec.Meta)]
        for note in noted:
            if isinstance(note, Option):
                kind = _kind(hints[field.name])
                flag = note.flag or f"--{field.name.replace('_', '-')}"
                bounds = _bounds(schemas[0] if schemas else {})
                offered = (
                    typer.Option(flag, help=note.says, **bounds)
                    if flag.startswith("-")
                    else typer.Argument(help=note.says)
                )
                given = field.default if isinstance(field.default, int | float) else None
                default = Parameter.empty if field.required else given
                optional = kind if field.required or kind is bool else kind | None
                yield _keyword(field.name, Annotated[optional, offered], default)
                has_unset |= field.default is msgspec.UNSET
    if has_unset:
        yield _keyword("reset", Annotated[bool, typer.Option("--reset", help=_RESET)], False)


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {typer_name: schema[name] for name, typer_name in (("minimum", "min"), ("maximum", "max")) if name in schema}


def _kind(hint: Any) -> Any:
    """Returns the type of an option: of several, a list goes before what a list has."""
    parts = [
        part for part in (hint, *typing.get_args(hint)) if part in _PLAIN.values() or typing.get_origin(part) is list
    ]
    return next((part for part in parts if typing.get_origin(part) is list), parts[0])
