"""Tests of the page at `/` in a real browser, with the real server and a scripted engine.

`test_access` and `test_markdown` cover the parts that need no browser.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import chromium
from support.cli_runner import PATIENCE
from support.fake_service import FakeService, Script
from support.http import make_server, run_server

from ngramspec.chat.conversation import Turn, load, save
from ngramspec.data import TargetError

pytestmark = pytest.mark.exhaustive
expect.set_options(timeout=PATIENCE * 1000)

CUT = """async () => {
    for (const _ of [1, 2]) await new Promise(requestAnimationFrame);  // tables are fitted after the first
    const all = [...document.querySelectorAll('main, main :is(.code, pre, table, .formula, .question)')];
    const scrolls = (e) => !e.matches('main') && getComputedStyle(e).overflow !== 'visible';
    return all.filter((e) => e.scrollWidth > e.clientWidth || scrolls(e)).map((e) => e.outerHTML.slice(0, 80));
}"""
"""JavaScript function that returns the parts of the conversation that are cut off or scroll to the side."""

CONTRAST = Path(__file__).with_name("contrast.js")
"""JavaScript expression for the contrast between the page's texts and their backgrounds."""


class Visit:
    """The page of a scripted server in a browser, with its latest answer and the note below it."""

    def __init__(self, page: Page, service: FakeService, address: str) -> None:
        self.page, self.service, self.address = page, service, address
        self.answer, self.note = page.locator(".answer").last, page.locator(".note").last
        self.question, self.send, self.error = (page.locator(f"#{id}") for id in ("question", "send", "error"))
        self.requests: list[tuple[str, str | None]] = []  # URLs and bodies of the page's requests
        self.complaints: list[str] = []  # errors in the console, with violations of the policy, and exceptions
        self.typed: str | None = ""  # text entered into dialogs; `None` means that dialogs are cancelled
        page.on("dialog", lambda box: box.dismiss() if self.typed is None else box.accept(self.typed))
        page.on("request", lambda request: self.requests.append((request.url, request.post_data)))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.goto(address)

    def say(self, text: str) -> None:
        self.question.fill(text)
        self.question.press("Enter")

    def answered(self, script: Script, question: str = "hi") -> None:
        """Ask a question and wait for the complete answer from a script."""
        self.service.script = script
        count = self.page.locator("article").count()
        self.say(question)
        expect(self.page.locator("article")).to_have_count(count + 1)
        self.settled()

    def answered_again(self, script: Script, question: str) -> None:
        """Send an edited question and wait for the answer from a script."""
        self.service.script = script
        self.say(question)
        expect(self.answer).to_have_text(script.text)
        self.settled()

    def listed(self) -> list[str]:
        """Return the names in the list of conversations."""
        return self.page.locator("#list li > button").all_inner_texts()

    def settled(self) -> None:
        """Wait until the answer is complete and rendered."""
        expect(self.send).to_be_visible()
        expect(self.page.locator("article").last).to_have_attribute("aria-busy", "false")

    def press(self, name: str) -> None:
        """Press the last button with this name; if answers have it, this is the latest answer's button."""
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def sent(self) -> Any:
        """Return the fields of the latest chat request."""
        return json.loads([body for url, body in self.requests if url.endswith("completions")][-1] or "")

    def begun(self, script: Script) -> None:
        """Ask a question and wait until the answer begins."""
        self.service.script = script
        self.say("continue")
        expect(self.answer).not_to_be_empty()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """Open a page with a separate browser profile and port; the parameter contains the server's keys."""
    server, service = make_server(n_ctx=4096)
    with (
        run_server(server, keys=getattr(request, "param", ())) as address,
        browser.new_context(viewport={"width": 900, "height": 700}) as context,  # closing it ends streams
    ):
        found = Visit(context.new_page(), service, f"{address}/")
        yield found
        # The console also reports requests that the server rejects.
        assert [said for said in found.complaints if not said.startswith("Failed to load resource")] == []


def test_page_streams_answer_and_then_reports_speed(visit: Visit) -> None:
    go = threading.Semaphore(2)
    text = " ".join(["one two three four five six"] * 8)
    visit.begun(Script(text, step=3, go=go))
    begun = visit.answer.inner_text()
    assert text.startswith(begun)
    assert begun != text
    expect(visit.send).to_be_hidden()
    go.release(100)
    expect(visit.send).to_be_visible()
    expect(visit.answer).to_have_text(text)
    speed = r"\d+ tokens · \d+\.\d tokens/s · gain \d\.\d\d× · \d+ of \d+ drafted"  # noqa: RUF001
    expect(visit.note).to_have_text(re.compile(speed))
    expect(visit.note).to_have_text(re.compile(r"\d+ of 4096 tokens of context$"))


def test_page_with_green_option_colours_accepted_drafts(visit: Visit) -> None:
    def looks() -> list[list[str]]:
        """Return the colours of the answer and of each draft in it."""
        shown = "(all) => all.map((e) => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor])"
        return visit.page.locator(".answer p, .answer .drafted").evaluate_all(shown)

    text = "one two 🙂 three four 🙂🙂 five six seven"
    visit.answered(Script(text, step=7))
    expect(visit.answer).to_have_text(text)
    assert len(set(map(tuple, looks()))) == 1
    visit.page.get_by_label("Accepted drafts in green").check()
    answer, *drafts = looks()
    assert answer not in drafts
    assert len(set(map(tuple, drafts))) == 1
    body = {"messages": [{"role": "user", "content": "hi"}], "return_drafts": True}
    (choice,) = httpx.post(f"{visit.address}v1/chat/completions", json=body).json()["choices"]
    drafted = "".join(text[start:end] for start, end in choice["drafted"])
    assert "".join(visit.page.locator(".answer .drafted").all_text_contents()) == drafted


@pytest.mark.parametrize(
    ("way", "label"),
    [("button", "stopped"), ("key", "stopped"), ("reload", "interrupted"), ("error", "interrupted")],
)
def test_page_with_answer_that_ends_early_keeps_its_text(visit: Visit, way: str, label: str) -> None:
    go, error = threading.Semaphore(3), TargetError("out of memory <b>") if way == "error" else None
    visit.begun(Script("on and on ", ends=False, step=2, go=go, error=error, after=3))
    match way:
        case "button":
            visit.page.get_by_role("button", name="Stop").click()
        case "key":
            visit.page.keyboard.press("Escape")
        case "reload":
            visit.page.reload()
        case "error":
            go.release()
    expect(visit.note).to_have_text(re.compile(f"{label}$"))
    expect(visit.answer).to_have_text(re.compile("^on and"))
    expect(visit.error).to_have_text("" if error is None else str(error))
    expect(visit.send).to_be_visible()
    (ticket,) = visit.service.tickets
    assert ticket.end.wait(PATIENCE), "the server continues"


def test_page_sends_earlier_messages_with_next_message(visit: Visit) -> None:
    visit.press("Settings")
    visit.page.keyboard.type("Be short.")  # The system message has the focus.
    visit.answered(Script("Yes.\nNo."), "Well?")
    visit.service.script = Script("Two.")
    visit.page.keyboard.type("one")  # The question has the focus again.
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("line")
    visit.page.keyboard.press("Enter")
    expect(visit.answer).to_have_text("Two.")
    assert visit.sent()["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes.\nNo."},
        {"role": "user", "content": "one\nline"},
    ]


def test_page_settings_are_sent_and_survive_reload(visit: Visit) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "repeat_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 11,
    }
    expect(visit.page.locator("#top_k")).to_have_attribute("placeholder", "40")
    visit.press("Settings")
    for name, value in (given | {"max_tokens": 64}).items():
        visit.page.locator(f"#{name}").fill(str(value))
    visit.page.keyboard.press("Escape")
    expect(visit.page.locator("#settings")).to_be_hidden()
    expect(visit.page.locator("#options")).to_be_focused()
    visit.page.reload()
    visit.answered(Script())
    request = visit.service.requests[-1]
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert request.max_tokens == 64


def test_page_json_schema_constrains_the_answer(visit: Visit) -> None:
    visit.press("Settings")
    schema = visit.page.get_by_label("JSON schema")
    schema.fill('{"type": ')
    visit.say("hi")
    expect(visit.error).to_contain_text("JSON schema: ")
    expect(visit.question).to_have_value("hi")
    schema.fill('{"type": "integer"}')
    visit.answered(Script("12"))
    assert '"type": "integer"' in (visit.service.requests[-1].sampling.grammar or "")


def test_page_saves_and_selects_system_messages(visit: Visit) -> None:
    visit.press("Settings")
    system, presets = visit.page.get_by_label("System message", exact=True), visit.page.locator("#preset")
    for visit.typed, text in (("short", "Be short."), ("rhymes", "Rhyme.")):
        system.fill(text)
        visit.press("Save as …")
    visit.page.reload()
    visit.press("Settings")
    expect(presets.locator("option")).to_have_text(["Saved messages …", "rhymes", "short"])
    presets.select_option("short")
    expect(system).to_have_value("Be short.")
    visit.answered(Script())
    assert visit.sent()["messages"][0] == {"role": "system", "content": "Be short."}
    visit.press("Delete")
    expect(presets.locator("option")).to_have_text(["Saved messages …", "rhymes"])
    # A conversation keeps its own system message.
    visit.press("New chat")
    presets.select_option("rhymes")
    visit.answered(Script(), "other")
    visit.press("Chats")
    visit.page.locator("#list button", has_text="hi").click()
    expect(system).to_have_value("Be short.")


def test_page_shows_server_error_and_keeps_message(visit: Visit) -> None:
    visit.press("Settings")
    visit.page.get_by_label("Temperature").fill("-1")
    visit.say("hi")
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}
    told = httpx.post(f"{visit.address}v1/chat/completions", json=body).json()["error"]["message"]
    assert "temperature" in told
    expect(visit.error).to_have_text(told)
    expect(visit.question).to_have_value("hi")
    expect(visit.page.locator("article")).to_have_count(0)


def test_page_hides_error_when_the_model_is_loaded(visit: Visit) -> None:
    loading = {"error": {"message": "Loading model"}}
    visit.page.route("**/v1/**", lambda route: route.fulfill(status=503, json=loading))
    visit.page.reload()
    expect(visit.page.locator("#model")).to_have_text("Loading the model …")
    visit.say("hi")
    expect(visit.error).to_contain_text("Loading model")
    visit.page.unroute_all()
    expect(visit.page.locator("#context")).to_have_text("context 4096")
    expect(visit.error).to_be_hidden()
    expect(visit.question).to_have_value("hi")


@pytest.mark.parametrize("visit", [["secret"]], indirect=True)
def test_page_asks_for_api_key_and_stores_it_only_in_the_tab(visit: Visit) -> None:
    visit.say("hi")
    expect(visit.error).to_have_text("Invalid API Key")
    expect(visit.page.get_by_label("API key")).to_be_focused()
    visit.page.keyboard.type("secret")
    visit.question.press("Enter")
    expect(visit.answer).to_have_text("Hello, world")
    expect(visit.page.locator("#model")).to_have_text("demo")
    expect(visit.page.locator("#context")).to_have_text("context 4096")
    assert "secret" not in visit.page.evaluate("Object.values(localStorage).join() + document.cookie")
    visit.page.reload()
    assert "secret" in visit.page.evaluate("Object.values(sessionStorage).join()")
    expect(visit.answer.locator("p")).to_have_text("Hello, world")  # The endpoint that renders it requires the key.


HOSTILE = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>
```html"><b>
<b onclick="1">bold</b>
 ``
```
</div>&amp; <style>* { display: none }</style>"""


def test_page_shows_html_in_messages_as_text(visit: Visit) -> None:
    text = f"{HOSTILE}\n\n[a](javascript:hit=1) ![b](http://127.0.0.2:9/c.png)"
    visit.answered(Script(text), text)
    for shown in (visit.answer, visit.page.locator(".question")):
        expect(shown.locator("p").first).to_have_text(HOSTILE.splitlines()[0])
        expect(shown.locator("pre")).to_have_text('<b onclick="1">bold</b>\n ``\n')
        expect(shown.locator(":is(img, script, style, b, i)")).to_have_count(0)
        expect(shown.locator("a")).to_have_count(1)
        shown.locator("a").hover()
    assert visit.page.evaluate("window.hit") is None


def test_page_renders_answer_equally_during_stream_and_after_reload(visit: Visit) -> None:
    text = "# A\n\nb *c* $d_1 e_2$\n\n- f\n- g\n\n```py\nx = 1\n```\n\n|h|i|\n|-|-|\n|1|2|\n\n> j\n\n[k](https://l.m)"
    go = threading.Semaphore(0)
    visit.service.script = Script(text, step=2, go=go)
    visit.say("hi")
    shown = set[str]()
    while visit.send.is_hidden():
        go.release()
        visit.page.wait_for_timeout(30)
        shown.add(visit.answer.inner_html())
    visit.settled()
    whole = visit.answer.inner_html()
    assert len(shown) > 2
    assert any("<h3>A</h3>" in html and "<table>" not in html for html in shown)
    for tag in ("h3", "em", "ul > li + li", "pre .number", "td + td", "blockquote p", ".formula", "a[rel~=noopener]"):
        expect(visit.answer.locator(tag)).to_have_count(1)
    visit.page.reload()
    expect(visit.answer.locator("table")).to_be_visible()
    assert visit.answer.inner_html() == whole


def test_page_renders_questions_like_answers(visit: Visit) -> None:
    question = visit.page.locator(".question").last
    visit.answered(Script(), "Fix *this*:\n\n```py\nx = 1\n```\n\n- a\n\n|b|\n|-|\n|c|")
    for tag in ("em", "pre .number", "ul > li", "td"):
        expect(question.locator(f".text {tag}")).to_have_count(1)
    # Code without a fence keeps its indentation and marks.
    code = "# fix\ndef __init__(self):\n    return a*b*c"
    visit.answered(Script(), code)
    assert question.locator(".text").text_content() == code
    expect(question.locator("h3, strong, em, pre")).to_have_count(0)
    visit.answered(Script(), "word\n" * 60)
    expect(visit.page.locator(".folded p")).to_have_count(1)
    folded = question.bounding_box()["height"]
    visit.press("Show all")
    assert question.bounding_box()["height"] > folded * 2
    visit.press("Show less")
    assert question.bounding_box()["height"] == folded


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("```py\nimport os\n```\n\nExplain **this** `line`.", "Explain this line."),
        ("```py\nimport os\n```", "import os"),
        ("~~~\n---\n# A title\n", "A title"),
        ("## Plan for x_1\nmore", "Plan for x_1"),
        ("?!", "Untitled"),
    ],
)
def test_page_names_conversation_after_first_words(visit: Visit, question: str, title: str) -> None:
    visit.answered(Script(), question)
    visit.press("Chats")
    assert visit.listed() == [title]


def test_page_without_renderer_shows_plain_text(visit: Visit) -> None:
    visit.page.route("**/markdown", lambda route: route.abort())
    visit.answered(Script("*one*\n\n- two"))
    assert visit.answer.text_content() == "*one*\n\n- two"


@pytest.mark.parametrize("clipboard", [True, False])
def test_page_copies_answers_and_code(visit: Visit, clipboard: bool) -> None:
    text = "Say *this*:\n\n```py\nx = 1\ny = 2\n```"
    if clipboard:
        visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    else:  # as on a page loaded by HTTP from another machine
        visit.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        visit.page.reload()
    visit.answered(Script(text))
    for name, copied in (("Copy answer", text), ("Copy code", "x = 1\ny = 2\n")):
        visit.page.locator("#status").evaluate("status => { status.textContent = '' }")
        visit.press(name)
        expect(visit.page.locator("#status")).to_have_text("Copied.")
        visit.question.focus()
        visit.page.keyboard.press("Control+V")
        expect(visit.question).to_have_value(copied)
        visit.question.fill("")


def test_page_regenerate_replaces_answer_unless_request_fails(visit: Visit) -> None:
    visit.answered(Script("first"), "hi")
    visit.service.script = Script("second")
    visit.press("Regenerate")
    expect(visit.answer).to_have_text("second")
    assert visit.sent()["messages"] == [{"role": "user", "content": "hi"}]
    visit.settled()
    visit.service.script = Script(start_error=TargetError("no"))
    visit.press("Regenerate")
    expect(visit.error).to_have_text("no")
    expect(visit.answer).to_have_text("second")
    expect(visit.page.locator(".question")).to_have_count(1)


def test_page_continue_extends_the_answer(visit: Visit) -> None:
    visit.press("Settings")
    visit.page.get_by_label("Maximum tokens").fill("3")
    visit.answered(Script("one two three four"))
    begun = visit.answer.inner_text()
    assert "one two three four".startswith(begun)
    expect(visit.note).to_have_text(re.compile("stopped at the token limit$"))
    visit.service.script = Script(" and more")
    visit.press("Continue")
    expect(visit.answer).to_have_text(re.compile(f"^{begun} and"))
    assert visit.sent()["messages"][-1] == {"role": "assistant", "content": begun}
    expect(visit.page.locator("article")).to_have_count(1)


def test_page_edit_resends_changed_message(visit: Visit) -> None:
    visit.answered(Script("first"), "helo")
    visit.page.keyboard.press("ArrowUp")
    expect(visit.question).to_have_value("helo")
    expect(visit.page.locator("#editing")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.question).to_have_value("")
    visit.press("Edit")
    visit.answered_again(Script("second"), "hello")
    assert visit.sent()["messages"] == [{"role": "user", "content": "hello"}]
    visit.answered(Script("third"), "more")
    # Editing an earlier question keeps the conversation with the later ones.
    visit.page.get_by_role("button", name="Edit").first.click()
    visit.answered_again(Script("fourth"), "hallo")
    visit.press("Chats")
    assert visit.listed() == ["hallo", "hello"]
    visit.page.locator("#list button", has_text="hello").click()
    expect(visit.page.locator(".answer")).to_have_text(["second", "third"])


def test_page_sends_attached_text_files(visit: Visit, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = '``` é'\n")
    (tmp_path / "b.md").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"\xff\x00")
    names = visit.page.locator("#files li")
    with visit.page.expect_file_chooser() as chosen:
        visit.press("Attach text files")
    chosen.value.set_files([tmp_path / name for name in ("a.py", "b.md", "c.bin")])
    expect(visit.error).to_have_text("c.bin is not a UTF-8 text file.")
    expect(names).to_have_text([re.compile("a.py"), re.compile("b.md")])
    visit.press("Remove b.md")
    dropped = visit.page.evaluate_handle(
        "() => { const data = new DataTransfer(); data.items.add(new File(['drop'], 'd.txt')); return data; }"
    )
    visit.page.dispatch_event("main", "drop", {"dataTransfer": dropped})
    expect(names).to_have_text([re.compile("a.py"), re.compile("d.txt")])
    visit.answered(Script(), "Mend this.")
    content = "a.py\n````py\nx = '``` é'\n````\n\nd.txt\n```txt\ndrop\n```\n\nMend this."
    assert visit.sent()["messages"] == [{"role": "user", "content": content}]
    expect(names).to_have_count(0)
    expect(visit.page.locator(".question li")).to_have_text(["a.py", "d.txt"])
    expect(visit.page.locator(".question > .text")).to_have_text("Mend this.")
    visit.page.locator(".question summary").first.click()
    expect(visit.page.locator(".question pre")).to_have_text("x = '``` é'\n")
    expect(visit.page.locator(".question pre .string")).to_have_text("'``` é'")
    visit.press("Edit")
    expect(names).to_have_text([re.compile("a.py"), re.compile("d.txt")])


def test_page_lists_renames_searches_and_deletes_conversations(visit: Visit) -> None:
    visit.answered(Script("alpha"), "first\nline")
    visit.press("New chat")
    visit.answered(Script("beta"), "second")
    visit.press("Chats")
    assert visit.listed() == ["second", "first"]
    visit.typed = "renamed"
    visit.press("Rename")
    assert visit.listed() == ["renamed", "first"]
    visit.page.get_by_label("Search conversations").fill("ALPHA")
    assert visit.listed() == ["first"]
    visit.page.locator("#list button").first.click()
    expect(visit.answer).to_have_text("alpha")
    visit.page.reload()
    expect(visit.answer).to_have_text("alpha")
    visit.press("Chats")
    assert visit.listed() == ["renamed", "first"]
    expect(visit.page.locator("#list [aria-current]")).to_have_text("first")
    visit.typed = None
    visit.press("Delete")
    assert visit.listed() == ["renamed", "first"], "it was not confirmed"
    visit.typed = ""
    visit.press("Delete")
    assert visit.listed() == ["renamed"]
    expect(visit.page.locator("article")).to_have_count(0)


def test_page_stops_answer_of_closed_or_deleted_conversation(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1200, "height": 640})
    visit.begun(Script("on and on ", ends=False, step=2, go=threading.Semaphore(3)))
    visit.press("New chat")
    assert visit.service.tickets[0].end.wait(PATIENCE), "the server continues"
    expect(visit.page.locator("#list button")).to_have_text("continue")
    visit.page.locator("#list button").click()
    expect(visit.note).to_have_text(re.compile("stopped$"))
    visit.press("Regenerate")
    visit.press("Delete")
    assert visit.service.tickets[1].end.wait(PATIENCE)
    visit.answered(Script("new"), "other")
    assert visit.listed() == ["other"]


def test_page_exports_and_imports_conversations(visit: Visit, tmp_path: Path) -> None:
    visit.press("Settings")
    visit.page.keyboard.type("Be short.")
    visit.answered(Script("one *two* three", step=3), "hi")
    visit.press("New chat")
    visit.answered(Script("four"), "other")
    visit.press("Chats")
    for name, expected in (("Export", ["other"]), ("Export all", ["other", "hi"])):
        with visit.page.expect_download() as got:
            visit.press(name)
        got.value.save_as(tmp_path / f"{name}.json")
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert [one["messages"][1]["content"] for one in saved.get("conversations", [saved])] == expected
    (tmp_path / "wrong.json").write_text('{"messages": [{"role": "user", "content": 5}]}')
    # The command line's chat reads and writes the same files.
    loaded = load(tmp_path / "Export.json")[0]
    assert (loaded.system, loaded.turns) == ("Be short.", [Turn("other", "four")])
    loaded.add(Turn("further", "five"), 0)
    save(loaded, tmp_path / "saved.json", model="m", sampling={})
    visit.page.evaluate("localStorage.clear()")
    visit.page.reload()
    visit.press("Chats")
    with visit.page.expect_file_chooser() as chosen:
        visit.press("Import")
    chosen.value.set_files([tmp_path / f"{name}.json" for name in ("Export all", "wrong", "saved")])
    expect(visit.error).to_have_text("wrong.json contains no conversation.")
    assert visit.listed() == ["other", "other", "hi"]
    visit.page.locator("#list button", has_text="hi").click()
    expect(visit.answer.locator("em")).to_have_text("two")
    expect(visit.answer.locator(".drafted")).not_to_have_count(0)
    expect(visit.note).to_contain_text("drafted")
    expect(visit.page.get_by_label("System message", exact=True)).to_have_value("Be short.")


def test_page_reload_keeps_conversation_and_drafts(visit: Visit) -> None:
    def looks() -> str:
        # The label of an ended state need not be restored.
        html = visit.page.locator("#log").inner_html().replace(' aria-busy="false"', "")
        return f"{html}{visit.page.locator('body').get_attribute('class')}"

    log = visit.page.locator("#log > *")
    visit.answered(Script("one two three\n```py\nfour five six\n```\n", step=3))
    visit.page.get_by_label("Accepted drafts in green").check()
    expect(visit.note).not_to_be_empty()
    before = looks()
    assert "drafted" in before
    visit.page.reload()
    expect(visit.answer.locator("pre")).to_be_visible()
    assert looks() == before
    visit.press("New chat")
    expect(log).to_have_count(0)
    visit.page.reload()
    expect(log).to_have_count(0)


def test_page_shows_prefill_progress_and_reload_restores_unanswered_message(visit: Visit) -> None:
    visit.answered(Script("one"), "first")
    visit.service.script = Script(begin=threading.Event())
    visit.say("second")
    expect(visit.note).to_have_text(re.compile(r"^Reading, \d+ of \d+ tokens$"))
    visit.page.reload()
    expect(visit.question).to_have_value("second")
    expect(visit.page.locator(".question")).to_have_count(1)


def test_page_contacts_no_other_host(visit: Visit) -> None:
    visit.answered(Script())
    expect(visit.page.locator("#model")).to_contain_text("demo")
    asked = {url.removeprefix(visit.address) for url, _ in visit.requests if not url.startswith("data:")}
    assert asked == {"", "v1/models", "props", "v1/chat/completions", "markdown"}
    assert visit.complaints == []
    # The browser itself blocks requests to other hosts.
    fetched = "fetch('http://127.0.0.2:9/').then(() => 'asked', (error) => error.name)"
    assert visit.page.evaluate(fetched) == "TypeError"
    assert "Content Security Policy" in " ".join(visit.complaints)
    # Turning text into markup by mistake is an error.
    slip = "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.message; } }"
    assert "TrustedHTML" in visit.page.evaluate(slip)
    visit.complaints.clear()


def test_page_fits_each_width_and_meets_contrast_requirement(visit: Visit) -> None:
    code = "```py\n# " + "x" * 200 + "\ndef f(): return 'a' + 1\n```"
    tables = f"|{'w' * 90}|b|\n|-|-|\n|1|2|\n\n" + "\n".join(("|name" * 10, "|-" * 10, "|value" * 10))
    text = f"{'word ' * 30}\n{code}\n{'y' * 200} `z`\n\n{tables}\n\n$$\n{'f' * 200}\n$$\n\n> q"
    visit.answered(Script(text, step=3), f"{text}\n{code}\n{code}\n" * 5)
    expect(visit.page.locator(".question table")).to_have_count(10)
    visit.page.get_by_label("Accepted drafts in green").check()
    visit.press("Settings")
    visit.page.evaluate("(name) => (document.getElementById('model').textContent = name)", "a-long-name" * 20)
    for width in (320, 900, 1200):
        visit.page.set_viewport_size({"width": width, "height": 640})
        if visit.page.locator("#chats").is_hidden():
            visit.press("Chats")
        names = "send question new options menu attach green import filter key context"
        for id in names.split():
            visit.page.locator(f"#{id}").scroll_into_view_if_needed()
            box = visit.page.locator(f"#{id}").bounding_box()
            assert box["x"] >= 0, id
            assert box["x"] + box["width"] <= width, id
            assert box["y"] + box["height"] <= 640, id
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        assert visit.page.evaluate(CUT) == []
        for colours in ("light", "dark"):
            visit.page.emulate_media(color_scheme=colours)
            for green in (True, False):
                visit.page.evaluate("(yes) => document.body.classList.toggle('green', yes)", green)
                ratios = visit.page.evaluate(CONTRAST.read_text())
                assert {"question", "drafted", "note", "keyword", "listed", "tools"} <= set(ratios)
                # WCAG's level AA requires a contrast of 4.5 to 1.
                assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    controls = "(all) => all.filter((e) => !e.labels?.length && !e.ariaLabel && !e.textContent.trim()).length"
    assert visit.page.locator("button, input, textarea, select").evaluate_all(controls) == 0, "some have no name"


def test_page_conversation_list_adapts_to_window_width(visit: Visit) -> None:
    chats, menu = visit.page.locator("#chats"), visit.page.get_by_role("button", name="Chats")
    expect(chats).to_be_hidden()
    menu.click()
    expect(visit.page.get_by_label("Search conversations")).to_be_focused()
    expect(menu).to_have_attribute("aria-expanded", "true")
    visit.page.keyboard.press("Escape")
    expect(chats).to_be_hidden()
    expect(menu).to_be_focused()
    visit.page.set_viewport_size({"width": 1200, "height": 640})
    expect(chats).to_be_visible()
    assert visit.page.locator("#chat").bounding_box()["x"] == chats.bounding_box()["width"]
    # The buttons stay at the bottom if there is no conversation.
    assert visit.page.locator("#export").bounding_box()["y"] > 540
    visit.page.set_viewport_size({"width": 900, "height": 640})
    menu.click()
    expect(chats).to_be_visible()
    visit.page.locator("main").click(position={"x": 800, "y": 300})
    expect(chats).to_be_hidden()
