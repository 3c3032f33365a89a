"""Test that attributes are declared: asking for one by name with a default hides that it was renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

BUILD = "a function that only some versions or builds of llama.cpp have"
TYPER = "some versions of typer contain a copy of click, so its errors have no common class"
FROZEN = "set only in frozen applications"

UNDECLARED = {
    "cli/app.py": {
        "format_message": TYPER,
        "ctx": TYPER,
        "option_name": TYPER,
        "errors": "pydantic's errors, only in newer versions of typer",
        "AttributeError": "a process without stdout or stderr",
    },
    "cli/console.py": {"SIGHUP": "not on Windows"},
    "cli/serve.py": {"AttributeError": "a C library without the function"},
    "ngramspec/__init__.py": {"AttributeError": "raised for an unknown name of the package"},
    "ngramspec/cost/store.py": {"AttributeError": "a file whose JSON is not an object"},
    "ngramspec/cpu/cores.py": {
        "sched_getaffinity": "not on macOS and Windows",
        "getpriority": "not on Windows",
        "name": "times that psutil reports only on some systems",
        "nice": "a time that psutil reports only on some systems",
        "AttributeError": "a C library without the function",
    },
    "ngramspec/dropin/llama.py": {"_stack": "an attribute of llama-cpp-python's class"},
    "ngramspec/llama/bindings.py": {
        "llama_log_callback": BUILD,
        "_lib": "older versions of llama-cpp-python",
        "ggml_backend_dev_count": BUILD,
        "ggml_backend_load_all_from_path": BUILD,
        "load_mode": BUILD,
        "LLAMA_CONTEXT_TYPE_MTP": BUILD,
        "load_mtp": BUILD,
        "AttributeError": BUILD,
        "enumeration": "missing in versions whose constants are outside of enumerations",
        "__dict__": "constants outside of enumerations",
        "llama_model_n_embd_out": BUILD,
        "llama_vocab_get_suppress_tokens": BUILD,
    },
    "ngramspec/leaves.py": {"AttributeError": "raised for an unknown name of a leaf"},
    "ngramspec/llama/crash_check.py": {"frozen": FROZEN, "AttributeError": BUILD},
    "ngramspec/llama/devices.py": {"AttributeError": BUILD, "MADV_HUGEPAGE": "only on Linux"},
    "ngramspec/llama/rpc.py": {"AttributeError": BUILD},
    "ngramspec/llama/vocabulary.py": {"__dict__": "cached values of properties, deleted by the properties' own names"},
    "ngramspec/llm_plugin/__init__.py": {"Message": "older versions of llm"},
    "ngramspec/memory/store.py": {"sqlite_errorcode": "missing in errors that Python itself raises"},
    "ngramspec/user_class.py": {"class_name": "a class in a user's file", "__dict__": "all classes in a user's file"},
    "ngramspec/worker.py": {"frozen": FROZEN},
}
"""Uses that remain, with the reason, by file and attribute: those of other libraries, of systems and of users' files.
A handler of AttributeError also asks whether an attribute exists."""


WAYS = re.compile(r"(has|get|set)attr\(|__dict__|vars\(|AttributeError")
"""Pattern of the text of files that `undeclared` must parse."""


def undeclared(tree: ast.AST) -> Iterator[str]:
    """Yield each attribute that may be missing, or that is a string without need."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("hasattr"), [_, name]) | ast.Call(ast.Name("getattr"), [_, name, _]):
                yield str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)
            case ast.Call(ast.Name("getattr" | "setattr"), [_, ast.Constant(), *_]):
                yield f"{ast.unparse(node)}, which is an attribute"
            case ast.Attribute(attr="__dict__") | ast.Call(ast.Name("vars")):
                yield "__dict__"
            case ast.Name("AttributeError"):
                yield "AttributeError"


def test_attributes_asked_for_by_name_are_listed_with_reason() -> None:
    found = {}
    for folder in ("ngramspec", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text("utf-8")
            if WAYS.search(source) and (names := set(undeclared(ast.parse(source)))):
                found[path.relative_to(ROOT).as_posix()] = names
    assert found == {file: set(reasons) for file, reasons in UNDECLARED.items()}


def test_attribute_check_reports_each_way_to_ask() -> None:
    code = (
        "getattr(x, 'a', 1)\nhasattr(x, 'b')\ngetattr(x, name, None)\ngetattr(x, 'c')\nsetattr(x, 'd', 1)\n"
        "x.__dict__\nvars(y)\ntry: x.e\nexcept (OSError, AttributeError): pass\nwith suppress(AttributeError): x.f\n"
    )
    allowed = "getattr(x, name)\nsetattr(x, name, 1)\nx.h\n"
    expected = {"a", "b", "name", "__dict__", "AttributeError"}
    expected |= {f"{call}, which is an attribute" for call in ("getattr(x, 'c')", "setattr(x, 'd', 1)")}
    assert set(undeclared(ast.parse(code + allowed))) == expected
    assert set(undeclared(ast.parse(allowed))) == set()
