"""The page at `/`, in a real browser, over the server itself and an engine that follows a script.

What can be seen without a browser is in test_access.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import chromium
from support.cli_runner import PATIENCE
from support.fake_service import FakeService, Script
from support.http import listening, scripted

from ngramspec.errors import TargetError

pytestmark = pytest.mark.exhaustive
expect.set_options(timeout=PATIENCE * 1000)

CONTRAST = Path(__file__).with_name("contrast.js")
"""An expression for the contrast of the page's texts with what is behind them."""


class Visit:
    """A page of a browser that shows a scripted server.

    Attributes:
        page: playwright's.
        service: the engine.
        address: of the page.
        answer, note: of the latest question.
        requests: addresses that the page asked for, and what it sent.
        complaints: what its console said in anger, and exceptions that nobody caught.
    """

    def __init__(self, page: Page, service: FakeService, address: str) -> None:
        self.page, self.service, self.address = page, service, address
        self.answer, self.note = page.locator(".answer").last, page.locator(".note").last
        self.question, self.send, self.error = (page.locator(f"#{id}") for id in ("question", "send", "error"))
        self.requests: list[tuple[str, str | None]] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append((request.url, request.post_data)))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.goto(address)

    def say(self, text: str) -> None:
        self.question.fill(text)
        self.question.press("Enter")

    def answered(self, script: Script, question: str = "hi") -> None:
        """Let a question be answered from a script, to the end."""
        self.service.script = script
        count = self.page.locator("article").count()
        self.say(question)
        expect(self.page.locator("article")).to_have_count(count + 1)
        expect(self.send).to_be_visible()

    def begun(self, script: Script) -> None:
        """Let an answer begin."""
        self.service.script = script
        self.say("go on")
        expect(self.answer).not_to_be_empty()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A page in a profile and at a port of its own; the parameter: keys that the server asks for."""
    server, service = scripted(n_ctx=4096)
    with (
        listening(server, keys=getattr(request, "param", ())) as address,
        browser.new_context(viewport={"width": 900, "height": 700}) as context,  # streams go on until it is closed
    ):
        yield Visit(context.new_page(), service, f"{address}/")


def test_an_answer_grows_and_then_says_how_fast_it_was(visit: Visit) -> None:
    go = threading.Semaphore(2)
    text = "one two three four five six"
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
    assert visit.complaints == []


def test_accepted_drafts_are_green_on_demand(visit: Visit) -> None:
    def looks() -> list[list[str]]:
        shown = """(all) => all.map((e) => {
            const look = getComputedStyle(e);
            return [e.textContent, look.color, look.backgroundColor];
        })"""
        return visit.page.locator(".answer span").evaluate_all(shown)

    text = "one two 🙂 three four 🙂🙂 five six seven"
    visit.answered(Script(text, step=7))
    plain = looks()
    assert "".join(piece for piece, *_ in plain) == text
    assert len({tuple(look) for _, *look in plain}) == 1
    visit.page.get_by_label("Accepted drafts in green").check()
    green = looks()
    assert green[0] == plain[0], "the first step has no draft"
    assert len({tuple(look) for _, *look in green}) == 2
    body = {"messages": [{"role": "user", "content": "hi"}], "return_drafts": True}
    (choice,) = httpx.post(f"{visit.address}v1/chat/completions", json=body).json()["choices"]
    drafted = "".join(text[start:end] for start, end in choice["drafted"])
    assert "".join(piece for piece, *look in green if look != green[0][1:]) == drafted


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped(visit: Visit, how: str) -> None:
    visit.begun(Script("on and on ", ends=False, step=2, go=threading.Semaphore(3)))
    if how == "button":
        visit.page.get_by_role("button", name="Stop").click()
    else:
        visit.page.keyboard.press("Escape")
    expect(visit.send).to_be_visible()
    (ticket,) = visit.service.tickets
    assert ticket.ended.wait(PATIENCE), "the server goes on"
    expect(visit.note).to_have_text(re.compile("stopped$"))
    expect(visit.answer).to_have_text(re.compile("^on and"))
    expect(visit.error).to_be_hidden()
    assert visit.complaints == []


def test_the_next_question_comes_with_those_before(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.keyboard.type("Be short.")  # it has the focus
    visit.page.get_by_label("Temperature").fill("0.5")
    visit.page.get_by_label("Most tokens").fill("64")
    visit.answered(Script("Yes.\nNo."), "Well?")
    visit.service.script = Script("Two.")
    visit.page.keyboard.type("one")  # the question has the focus again
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("line")
    visit.page.keyboard.press("Enter")
    expect(visit.answer).to_have_text("Two.")
    assert json.loads(visit.requests[-1][1] or "")["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes.\nNo."},
        {"role": "user", "content": "one\nline"},
    ]
    request = visit.service.requests[-1]
    assert (request.sampling.temperature, request.max_tokens) == (0.5, 64)


def test_a_refusal_is_told_in_the_servers_words_and_the_question_is_kept(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_label("Temperature").fill("-1")
    visit.say("hi")
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}
    told = httpx.post(f"{visit.address}v1/chat/completions", json=body).json()["error"]["message"]
    assert "temperature" in told
    expect(visit.error).to_have_text(told)
    expect(visit.question).to_have_value("hi")
    expect(visit.page.locator("article")).to_have_count(0)


def test_an_error_amid_an_answer_keeps_what_came(visit: Visit) -> None:
    visit.answered(Script("one two three", fails=TargetError("out of memory <b>"), after=2))
    expect(visit.error).to_contain_text("out of memory <b>")
    expect(visit.note).to_have_text(re.compile("broken off$"))
    came = visit.answer.inner_text()
    assert came
    assert "one two three".startswith(came)


@pytest.mark.parametrize("visit", [["secret"]], indirect=True)
def test_a_key_is_asked_for_sent_and_kept_in_the_tab_alone(visit: Visit) -> None:
    visit.say("hi")
    expect(visit.error).to_have_text("Invalid API Key")
    expect(visit.page.get_by_label("API key")).to_be_focused()
    visit.page.keyboard.type("secret")
    visit.question.press("Enter")
    expect(visit.answer).to_have_text("Hello, world")
    expect(visit.page.locator("#model")).to_have_text("demo")
    assert visit.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert "secret" in visit.page.evaluate("Object.values(sessionStorage).join()")


HOSTILE = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>
```html"><b>
<b onclick="1">bold</b>
 ``
```
</div>&amp; <style>* { display: none }</style>"""


def test_markup_in_an_answer_is_text(visit: Visit) -> None:
    visit.answered(Script(HOSTILE), "<i>Why</i>?")
    assert visit.page.locator(".question").text_content() == "<i>Why</i>?"
    first, *code, last = HOSTILE.splitlines()
    assert blocks(visit) == [["", first], ['html"><b>', f"{code[1]}\n{code[2]}\n"], ["", last]]
    expect(visit.page.locator("#log :is(img, script, style, b, i)")).to_have_count(0)
    assert visit.page.evaluate("window.hit") is None


def blocks(visit: Visit) -> list[list[str]]:
    """What the latest answer consists of: the language of each piece of code, and texts."""
    parts: list[list[str]] = visit.answer.locator("> *").evaluate_all(
        """(all) => all.map((e) => e.className === 'code'
            ? [e.querySelector('.bar span').textContent, e.querySelector('pre').textContent] : ['', e.textContent])"""
    )
    return parts


def test_code_stands_between_fences(visit: Visit) -> None:
    for text, expected in (
        ("a\n```py\nx = 1\n```", [["", "a"], ["py", "x = 1\n"]]),
        ("```\nx\n```\n\nb", [["", "x\n"], ["", "b"]]),
        ("````md\n```\nx\n```\n````\n", [["md", "```\nx\n```\n"]]),
        ("a ``` b `c`\n``d``", [["", "a ``` b `c`\n``d``"]]),
        ("```py\nx = '```'\n", [["py", "x = '```'\n"]]),
        ("a\n```", [["", "a\n```"]]),
    ):
        for step in (1, 4):
            visit.answered(Script(text, step=step))
            assert blocks(visit) == expected


def test_a_conversation_survives_a_reload_with_its_drafts(visit: Visit) -> None:
    def looks() -> str:
        # A label of a state that is over need not come back.
        html = visit.page.locator("#log").inner_html().replace(' aria-busy="false"', "")
        return f"{html}{visit.page.locator('body').get_attribute('class')}"

    log = visit.page.locator("#log > *")
    visit.answered(Script("one two three\n```py\nfour five six\n```\n", step=3))
    visit.page.get_by_label("Accepted drafts in green").check()
    expect(visit.note).not_to_be_empty()
    before = looks()
    assert "drafted" in before
    visit.page.reload()
    assert looks() == before
    visit.page.get_by_role("button", name="New chat").click()
    expect(log).to_have_count(0)
    visit.page.reload()
    expect(log).to_have_count(0)


def test_a_reload_amid_an_answer_keeps_what_came(visit: Visit) -> None:
    visit.begun(Script("on and on ", ends=False, go=threading.Semaphore(3)))
    came = visit.answer.inner_text()
    visit.page.reload()
    expect(visit.answer).to_have_text(re.compile(f"^{came}"))
    expect(visit.note).to_have_text(re.compile("broken off$"))
    (ticket,) = visit.service.tickets
    assert ticket.ended.wait(PATIENCE), "the server goes on"


def test_no_other_host_is_asked(visit: Visit) -> None:
    visit.answered(Script())
    expect(visit.page.locator("#model")).to_have_text("demo")
    asked = [url for url, _ in visit.requests if not url.startswith("data:")]
    assert [url.removeprefix(visit.address) for url in asked] == ["", "v1/models", "v1/chat/completions"]
    assert visit.complaints == []
    # Nor could it: the browser itself refuses.
    fetched = "fetch('http://127.0.0.2:9/').then(() => 'asked', (error) => error.name)"
    assert visit.page.evaluate(fetched) == "TypeError"
    assert "Content Security Policy" in " ".join(visit.complaints)
    # And markup made of text, by whatever slip, is an error.
    slip = "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.message; } }"
    assert "TrustedHTML" in visit.page.evaluate(slip)


def test_it_fits_and_can_be_read(visit: Visit) -> None:
    visit.answered(Script(f"{'word ' * 30}\n```py\n{'x' * 200}\n```\n{'y' * 200} end", step=3))
    visit.page.get_by_label("Accepted drafts in green").check()
    visit.page.get_by_role("button", name="Settings").click()
    for width in (320, 900):
        visit.page.set_viewport_size({"width": width, "height": 640})
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        for id in ("send", "question", "new", "options", "key", "green"):
            box = visit.page.locator(f"#{id}").bounding_box()
            assert box["x"] >= 0, id
            assert box["x"] + box["width"] <= width, id
            assert box["y"] + box["height"] <= 640, id
        for colours in ("light", "dark"):
            visit.page.emulate_media(color_scheme=colours)
            ratios = visit.page.evaluate(CONTRAST.read_text())
            assert {"question", "drafted", "note"} <= set(ratios)
            # WCAG's AA: 4.5 to 1.
            assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    controls = "(all) => all.filter((e) => !e.labels?.length && !e.textContent.trim()).length"
    assert visit.page.locator("button, input, textarea").evaluate_all(controls) == 0, "some have no name"
