"""The tools of OpenAI's Responses API as functions, and calls of functions as calls of those tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ngramspec.server.fields import Fields
from ngramspec.server.needs import needed_name, wrong
from ngramspec.tool_calls.deltas import Tool

_PLAIN = "functions"
"""The namespace of tools that are in none."""

_FREE = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""A custom tool takes any text; as a function it takes that text as its one argument."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a function stands for: a tool, by its name in its namespace, custom or not."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        tools: as functions, each under a name of its own.
        origins: what these stand for, by the function's name.
    """

    tools: list[Tool] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def add(self, tools: Iterable[Fields], namespace: str | None = None) -> None:
        """Take in what a model can be given: functions, custom tools, and namespaces of both (one for each MCP server
        of Codex). Web search and its like, which OpenAI's servers or its own models bring along, are left out.

        Raises:
            ApiError: a tool has no name, or that of another.
        """
        for tool in tools:
            match needed_name(tool, "type"):
                case "function":
                    parameters = tool.object("parameters")
                    schema = parameters.data if parameters else {"type": "object", "properties": {}}
                    self._add(tool, schema, Origin(needed_name(tool, "name"), namespace))
                case "custom":
                    self._add(tool, _FREE, Origin(needed_name(tool, "name"), namespace, custom=True))
                case "namespace" if namespace is None:
                    name = needed_name(tool, "name")
                    self.add(tool.objects("tools"), None if name == _PLAIN else name)

    def _add(self, tool: Fields, parameters: Mapping[str, Any], origin: Origin) -> None:
        name = function_name(origin.name, origin.namespace)
        if name in self.origins:
            raise wrong(tool, "name", f"{name!r} is the name of two tools")
        description = tool.text("description") or ""
        grammar = tool.object("format") if origin.custom else None
        if grammar is not None and (definition := grammar.text("definition")):
            description += f"\nThe input keeps to this grammar:\n{definition}"
        self.tools.append(Tool(name, description, parameters))
        self.origins[name] = origin

    def origin(self, function: str) -> Origin:
        """What a function stands for; itself where the model made it up."""
        return self.origins.get(function, Origin(function))


def function_name(name: str, namespace: str | None) -> str:
    """The function that a tool is given as. Namespaces of Codex end in "__" or do not, by its version."""
    if namespace is None or namespace == _PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def free_text(arguments: str) -> str:
    """The input of a custom tool, out of the arguments of its function; the arguments themselves where they are cut."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
