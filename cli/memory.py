"""`ngramspec memory`: which of the user's own texts are drafted from, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from ngramspec.drafting.mixture import learnt
from ngramspec.memory import MemoryFileError, Store
from ngramspec.memory.documents import total
from ngramspec.memory.indexing import remove_files
from ngramspec.memory.names import DEFAULT, memory_folder, memory_names
from ngramspec.memory.remember import remembers, settings_path, write_remember
from ngramspec.memory.statistics import Statistics, report
from ngramspec.memory.store import Contents

from .console import (
    FAILED,
    USAGE,
    complain,
    counted,
    fail,
    guarded_stdout,
    note,
    printable,
    usage_error,
    write_stdout,
)
from .json_output import JsonOutput, json_option
from .memory_add import Name, add, paths_of, watch
from .options import grouped
from .posts import PostOptions, Posts, command_line

app = typer.Typer(
    name="memory",
    add_completion=False,
    help="Texts of yours to draft from: files and folders you add, and answers, if you switch that on.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(USAGE)


app.command("add")(add)
app.command("watch")(watch)


@app.command("list")
def list_(memory: Name = DEFAULT) -> None:
    """List the files of a memory with their tokens."""
    with guarded_stdout(), _complaints() as complaints:
        for store in _stores(memory):
            with complaints():
                contents = store.read()
                documents = contents.documents()
                write_stdout(f"tokenizer of {_model(contents)}\n")
                for document in documents:
                    if document.kind == "file":
                        write_stdout(f"{document.tokens:>12,}  {printable(document.name)}\n")
                answers = [d for d in documents if d.kind == "answer"]
                if answers:
                    write_stdout(f"{total(answers):>12,}  in {counted(len(answers), 'answer')} that were remembered\n")


@app.command("remove")
def remove(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH...", help="Files, and folders with all below them.")
    ] = None,
    answers: Annotated[bool, typer.Option("--answers", help="Remove the answers that were remembered.")] = False,
    memory: Name = DEFAULT,
) -> None:
    """Remove files, folders or answers from a memory, whether the files still exist or not."""
    if not paths and not answers:
        usage_error("name what to remove: files, folders, or --answers")
    chosen, stores = paths_of(paths or ()), _stores(memory)
    for path in chosen:
        count = sum(remove_files(store, path) for store in stores)
        if not count:
            fail(f"memory {memory!r} has no file {path}, nor any below it (ngramspec memory list shows what it has)")
        note(f"{path}: {counted(count, 'file')} removed")
    if answers:
        for store in stores:
            store.update(lambda texts: [t for t in texts if t.document.kind != "answer"])
        note("the answers are removed")


@app.command("clear")
def clear(memory: Name = DEFAULT) -> None:
    """Delete a memory with all that is in it, damaged or not; with the default one, what drafts have learnt too."""
    stores = Store.all_in(memory_folder(memory))
    for store in stores:
        store.clear()
    note(f"memory {memory!r} is {'deleted' if stores else 'empty already'}")
    if memory == DEFAULT:
        for file in (files := learnt.files()):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                fail(f"cannot delete {file}: {error.strerror or error}")
        if files:
            note("what drafts have learnt is forgotten")


def stats(
    post: PostOptions,
    memory: Name = DEFAULT,
    as_json: Annotated[str | None, json_option("all figures")] = None,
) -> None:
    """Show what a memory holds and takes, and whether answers are remembered.

    To post: --markdown prints a table, --svg draws how much there is of each kind of file, --html writes one page. No
    names of files and no texts are in them.
    """
    with JsonOutput(as_json) as output, Posts(post, as_json) as posts, guarded_stdout(), _complaints() as complaints:
        lines: list[str] = []
        found: list[Statistics] = []
        data: dict[str, Any] = {"memory": memory}
        with complaints():
            data["remember"] = remembers()
            lines.append(f"remembering answers: {'on' if data['remember'] else 'off'} ({settings_path()})")
        files = learnt.files()
        size = sum(file.stat().st_size for file in files)
        held = f"{counted(len(files), 'vocabulary', 'vocabularies')}, {size / 2**10:.0f} KiB" if files else "nothing"
        lines.append(f"learnt by drafts: {held} ({learnt.folder()})")
        names = memory_names()
        lines.append(f"memories: {', '.join(names) or 'none'}")
        data |= {"learnt": {"vocabularies": len(files), "size_bytes": size}, "memories": names}
        for store in _stores(memory) if memory in names or memory != DEFAULT else ():
            with complaints():
                contents = store.read()
                found.append(Statistics.of(contents))
                lines.append(_statistics(found[-1], contents))
        if not posts.silent:
            write_stdout("\n".join(lines) + "\n")
        if output.wanted:
            output.write(data | {"stores": [asdict(one) for one in found]})
        posts.write(lambda: report(memory, found, command_line("memory stats", [], {"--memory": memory})))


app.command("stats")(grouped(stats))


@app.command("remember")
def remember(
    state: Annotated[Literal["on", "off"], typer.Argument(help="Whether later answers are kept for later sessions.")],
) -> None:
    """Switch the remembering of answers on or off. It is off unless you switch it on."""
    write_remember(state == "on")
    if state == "on":
        note("answers of chat and complete are kept from now on, on this machine (ngramspec memory remember off)")
    else:
        note("answers are no longer kept; those there are stay (ngramspec memory remove --answers removes them)")


def _stores(memory: str) -> list[Store]:
    stores = Store.all_in(memory_folder(memory))
    if not stores:
        fail(f"memory {memory!r} is empty (ngramspec memory add PATH adds files)")
    return stores


def _statistics(one: Statistics, contents: Contents) -> str:
    return (
        f"tokenizer of {_model(contents)}: {counted(one.files, 'file')} with {counted(one.file_tokens, 'token')},"
        f" {counted(one.answers, 'answer')} with {counted(one.answer_tokens, 'token')}\n"
        f"  {one.size_bytes / 2**20:.1f} MiB, {one.bytes_per_token:.1f} bytes a token: {contents.path}"
    )


def _model(contents: Contents) -> str:
    return printable(contents.table.model).replace("\n", " ")


@contextmanager
def _complaints() -> Iterator[Complaints]:
    """Report errors of single files and go on with the rest; the exit code tells of them at the end."""
    complaints = Complaints()
    yield complaints
    if complaints.any:
        raise typer.Exit(FAILED)


class Complaints:
    """Reports errors and counts them."""

    any = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Report an error of the block."""
        try:
            yield
        except MemoryFileError as error:
            complain(str(error))
            self.any = True
