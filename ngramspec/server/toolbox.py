"""`Toolbox`: the tools of OpenAI's APIs as functions, and the choice between them.

A model calls only functions with JSON arguments. So a custom tool, whose input is a free text, becomes a function with
the only argument `input`, and a tool of a namespace becomes a function with a longer name:

    {"type": "custom", "name": "patch"}                                     patch(input: str)
    {"type": "namespace", "name": "mcp", "tools": [{"name": "read"}]}       mcp__read(...)

The answers convert calls back: `origin("mcp__read")` is ("read", "mcp"), and `free_text` is the input of a custom tool.
"""

from __future__ import annotations

from collections.abc import Iterable

from ngramspec.chat.stream import Tool
from ngramspec.server.fields import Fields
from ngramspec.server.transcript import read_arguments

_PLAIN = "functions"  # namespace of tools without a namespace
_INPUT = {"input": {"type": "string"}}
_FREE = {"type": "object", "properties": _INPUT, "required": ["input"], "additionalProperties": False}
"""Parameters of a custom tool as a function: its only argument is the text that the tool receives."""


class Toolbox:
    """The conversion of tools in OpenAI's APIs to functions, and of calls of functions to calls of those tools."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []  # tools as functions with unique names
        # Original name and namespace of the tool of each function.
        self.origins: dict[str, tuple[str, str | None]] = {}
        self.custom_tools: set[str] = set()  # functions that represent custom tools

    def add_tools(self, tools: Iterable[Fields], namespace: str | None = None) -> None:
        """Add functions, custom tools, and namespaces of both (Codex has one for each MCP server).

        Other tools such as web search, which only OpenAI's servers or models provide, are omitted.
        """
        for tool in tools:
            match tool.require_name("type"):
                case "function" | "custom" as kind:
                    self.add_tool(tool, kind, namespace)
                case "namespace" if namespace is None:
                    name = tool.require_name("name")
                    self.add_tools(tool.objects("tools"), None if name == _PLAIN else name)

    def add_tool(
        self, tool: Fields, kind: str, namespace: str | None = None, *, unique: bool = True, schema: str = "parameters"
    ) -> None:
        """Add a tool, whose `kind` is "function" or "custom"; `unique` rejects a second tool of the same name.

        `schema` is the name of the field with the parameters, which is required if it is not "parameters".
        """
        own = tool.require_name("name")
        name = function_name(own, namespace)
        if unique and name in self.origins:
            raise tool.field_error("name", f"two tools are named {name!r}")
        description = tool.string("description") or ""
        if kind == "custom":
            grammar = tool.object("format")
            grammar = grammar and (grammar.object("grammar") or grammar)  # as in chat completions, or as in responses
            if grammar is not None and (definition := grammar.string("definition")):
                description += f"\nThe input keeps to this grammar:\n{definition}"
            self.custom_tools.add(name)
            self.tools.append(Tool(name, description, _FREE))
        else:
            schema_fields = tool.object(schema) if schema == "parameters" else tool.require_object(schema)
            parameters = {"type": "object", "properties": {}} if schema_fields is None else schema_fields.data
            self.tools.append(Tool(name, description, parameters, tool.boolean("strict")))
            self.custom_tools.discard(name)  # of several tools of one name the last counts
        self.origins[name] = own, namespace

    def read_choice(self, fields: Fields, field: str) -> str:
        """Return the choice of tools (see `ChatTask`); if only some tools are allowed, drop the others."""
        if not isinstance(fields.data.get(field), dict):
            return fields.choice(field, ("auto", "none", "required"), "auto")
        choice = fields.require_object(field)
        match choice.string("type"):
            case None | "function" | "custom":
                return self.choose(choice)
            case "allowed_tools":
                subset = choice.object("allowed_tools") or choice  # as in chat completions, or as in responses
                # Tools of OpenAI's servers have no name.
                keys = {"name", "function", "custom"}
                names = {self.choose(item) for item in subset.objects("tools") if keys & item.data.keys()}
                self.tools = [tool for tool in self.tools if tool.name in names]
                return subset.choice("mode", ("auto", "required"), "auto")
            case other:
                raise choice.field_error("type", f"unsupported tool type {other!r}")

    def choose(self, choice: Fields) -> str:
        """Return the function that a choice names with "name" and "namespace"."""
        tool = choice.object("function") or choice.object("custom") or choice
        name = function_name(tool.require_name("name"), tool.string("namespace"))
        if name not in self.origins:
            raise tool.field_error("name", f"there is no tool named {name!r}")
        return name

    def origin(self, function: str) -> tuple[str, str | None]:
        """Return the name and namespace of a function's tool; the given name for a function that does not exist."""
        return self.origins.get(function, (function, None))


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that represents a tool. Only some versions of Codex end namespaces with "__"."""
    if namespace is None or namespace == _PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def free_text(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; incomplete arguments stay as they are."""
    text = (read_arguments(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments
