"""`Toolbox`: the tools of OpenAI's APIs as functions, and calls of functions as calls of those tools."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from ngramspec.server.fields import Fields
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
    """The tools of a request."""

    tools: list[Tool] = field(default_factory=list)  # as functions, each under a name of its own
    origins: dict[str, Origin] = field(default_factory=dict)  # what these stand for, by the function's name

    def add(self, tools: Iterable[Fields], namespace: str | None = None) -> None:
        """Take in what a model can be given: functions, custom tools, and namespaces of both (one for each MCP server
        of Codex). Web search and its like, which OpenAI's servers or its own models bring along, are left out.
        """
        for tool in tools:
            match tool.needed_name("type"):
                case "function" | "custom" as kind:
                    self.add_one(tool, kind, namespace)
                case "namespace" if namespace is None:
                    name = tool.needed_name("name")
                    self.add(tool.objects("tools"), None if name == _PLAIN else name)

    def add_one(self, tool: Fields, kind: str, namespace: str | None = None, unique: bool = True) -> None:
        """Take in a tool of the kind "function" or "custom"; `unique`: there may be only one of its name."""
        origin = Origin(tool.needed_name("name"), namespace, kind == "custom")
        name = function_name(origin.name, namespace)
        if unique and name in self.origins:
            raise tool.refused("name", f"{name!r} is the name of two tools")
        description = tool.text("description") or ""
        if origin.custom:
            grammar = tool.object("format")
            grammar = grammar and (grammar.object("grammar") or grammar)  # as chat completions have it, or responses
            if grammar is not None and (definition := grammar.text("definition")):
                description += f"\nThe input keeps to this grammar:\n{definition}"
        given = None if origin.custom else tool.object("parameters")
        parameters = _FREE if origin.custom else {"type": "object", "properties": {}} if given is None else given.data
        self.tools.append(Tool(name, description, parameters, not origin.custom and tool.flag("strict")))
        self.origins[name] = origin

    def choose(self, choice: Fields) -> str:
        """The function that a choice names by "name" and "namespace"."""
        name = function_name(choice.needed_name("name"), choice.text("namespace"))
        if name not in self.origins:
            raise choice.refused("name", f"{name!r} is not the name of a tool that the model can be given")
        return name

    def allow(self, choice: Fields, names: Iterable[str]) -> str:
        """Keep only the tools of these names; the tool choice that "mode" says."""
        mode, kept = choice.choice("mode", ("auto", "required"), "auto"), set(names)
        self.tools = [tool for tool in self.tools if tool.name in kept]
        if mode == "required" and not self.tools:
            raise choice.refused("tools", "names no tool that the model can be given")
        return mode

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
