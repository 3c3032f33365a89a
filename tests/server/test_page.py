"""The page at `/`, in a real browser, over the server itself and an engine that follows a script."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.browser import PATIENCE, Browser, find_browser
from support.fake_service import FakeService, Script
from support.http import scripted
from support.scripted_server import listening

from ngramspec.errors import TargetError
from ngramspec.server.app import make_app

SEND_AGAIN = "!document.querySelector('#send').hidden"
ANSWER = "document.querySelector('article:last-child .answer').innerText"
NOTE = "document.querySelector('article:last-child .note').textContent"
ERROR = "document.querySelector('#error').innerText"
QUESTION = "document.querySelector('#question').value"

CONTRAST = Path(__file__).with_name("contrast.js")
"""An expression for the contrast of the page's texts with what is behind them."""

needs_browser = pytest.mark.skipif(find_browser() is None, reason="neither Chromium nor Chrome is on the PATH")


class Visit:
    """A browser that shows the page of a scripted server.

    Attributes:
        browser: at the page.
        service: the engine.
        address: of the page.
    """

    def __init__(self, browser: Browser, service: FakeService, address: str) -> None:
        self.browser, self.service, self.address = browser, service, address

    def say(self, text: str) -> None:
        """Type a message and send it."""
        self.browser.ask("document.querySelector('#question').focus()")
        self.browser.type(text)
        self.browser.press("Enter")

    def answered(self, script: Script, question: str = "hi") -> None:
        """Let a question be answered from a script, to the end."""
        self.service.script = script
        self.say(question)
        self.browser.until(f"document.querySelector('.note') && {SEND_AGAIN} && {NOTE} !== ''")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    assert executable is not None
    with Browser(executable, tmp_path_factory.mktemp("profile")) as browser:
        browser.window(900, 700)
        yield browser


@pytest.fixture
def keys() -> list[str]:
    return []


@pytest.fixture
def visit(browser: Browser, keys: list[str]) -> Iterator[Visit]:
    server, service = scripted(n_ctx=4096)
    with ExitStack() as stack:
        # A port of its own, and so a conversation of its own.
        address = stack.enter_context(listening(make_app(server, keys=keys))) + "/"
        browser.complaints.clear()
        browser.requests.clear()
        browser.open(address)
        yield Visit(browser, service, address)
        # Streams would go on for as long as the page is open.
        browser.open("about:blank")


@needs_browser
def test_an_answer_grows_and_then_says_how_fast_it_was(visit: Visit) -> None:
    go = threading.Semaphore(2)
    visit.service.script = Script(text="one two three four five six", step=3, go=go)
    visit.say("count")
    begun = visit.browser.until(f"document.querySelector('article') && {ANSWER}")
    assert "one two three four five six".startswith(begun)
    assert begun != "one two three four five six"
    assert not visit.browser.ask(SEND_AGAIN)
    go.release(100)
    visit.browser.until(SEND_AGAIN)
    assert visit.browser.ask(ANSWER) == "one two three four five six"
    assert re.match(
        r"\d+ tokens · \d+\.\d tokens/s · gain \d\.\d\d\u00d7 · \d+ of \d+ drafted", visit.browser.ask(NOTE)
    )
    assert visit.browser.complaints == []


@needs_browser
def test_accepted_drafts_are_green_on_demand(visit: Visit) -> None:
    visit.answered(Script(text="one two 🙂 three four five six seven", step=3))
    colours = """(() => [...document.querySelectorAll('.answer span')].map(
        (span) => [span.textContent, getComputedStyle(span).color, getComputedStyle(span).backgroundColor]))()"""
    plain = visit.browser.ask(colours)
    assert "".join(text for text, *_ in plain) == "one two 🙂 three four five six seven"
    assert len({tuple(look) for _, *look in plain}) == 1
    visit.browser.click("#green")
    green = visit.browser.ask(colours)
    assert [text for text, *_ in green] == [text for text, *_ in plain]
    looks = [tuple(look) for _, *look in green]
    # Runs differ from those beside them: drafted ones from the model's own.
    assert len(set(looks)) == 2
    assert all(a != b for a, b in pairwise(looks))
    assert looks[0] == tuple(plain[0][1:]), "the first step has no draft"


@needs_browser
@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped(visit: Visit, how: str) -> None:
    visit.service.script = Script(text="on and on ", ends=False, step=2, go=threading.Semaphore(3))
    visit.say("go on")
    visit.browser.until(f"document.querySelector('article') && {ANSWER}")
    if how == "button":
        visit.browser.click("#stop")
    else:
        visit.browser.press("Escape")
    visit.browser.until(SEND_AGAIN)
    (ticket,) = visit.service.tickets
    assert ticket.ended.wait(PATIENCE), "the server goes on"
    assert visit.browser.ask(NOTE).endswith("stopped")
    assert visit.browser.ask(ANSWER).startswith("on and")
    assert visit.browser.ask("document.querySelector('#error').hidden")
    assert visit.browser.complaints == []


@needs_browser
def test_the_next_question_comes_with_those_before(visit: Visit) -> None:
    visit.browser.click("#options")
    visit.browser.type("Be short.")
    for name, value in (("temperature", "0.5"), ("max_tokens", "64")):
        visit.browser.click(f"#{name}")
        visit.browser.type(value)
    bodies = watched(visit.browser)
    visit.answered(Script(text="Yes.\nNo."), "Well?")
    visit.service.script = Script(text="Two.")
    visit.say("Line")
    visit.browser.until(f"document.querySelectorAll('article').length === 2 && {SEND_AGAIN}")
    _, second = visit.browser.ask(bodies)
    assert second["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes.\nNo."},
        {"role": "user", "content": "Line"},
    ]
    request = visit.service.requests[-1]
    assert (request.sampling.temperature, request.max_tokens) == (0.5, 64)


def watched(browser: Browser) -> str:
    """From now on, an expression for the bodies of what the page asks."""
    browser.ask(
        """(() => {
            const real = window.fetch;
            window.bodies = [];
            window.fetch = (url, how) => {
                if (how.body) bodies.push(JSON.parse(how.body));
                return real(url, how);
            };
        })()"""
    )
    return "window.bodies"


@needs_browser
def test_shift_enter_begins_a_line(visit: Visit) -> None:
    visit.browser.click("#question")
    visit.browser.type("first")
    visit.browser.press("Enter", shift=True)
    visit.browser.type("second")
    assert visit.browser.ask(QUESTION) == "first\nsecond"
    assert visit.service.tickets == []


@needs_browser
def test_a_refusal_is_told_in_the_servers_words_and_the_question_is_kept(visit: Visit) -> None:
    visit.browser.click("#options")
    visit.browser.click("#temperature")
    visit.browser.type("-1")
    visit.say("hi")
    told = visit.browser.until(ERROR)
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}
    answer = httpx.post(f"{visit.address}v1/chat/completions", json=body)
    assert told == answer.json()["error"]["message"]
    assert "temperature" in told
    assert visit.browser.ask(QUESTION) == "hi"
    assert visit.browser.ask("document.querySelectorAll('article').length") == 0


@needs_browser
def test_an_error_amid_an_answer_keeps_what_came(visit: Visit) -> None:
    visit.answered(Script(text="one two three", fails=TargetError("out of memory <b>"), after=2))
    assert "out of memory <b>" in visit.browser.ask(ERROR)
    assert visit.browser.ask(NOTE).endswith("broken off")
    assert "one two three".startswith(visit.browser.ask(ANSWER))
    assert visit.browser.ask(ANSWER)


@needs_browser
@pytest.mark.parametrize("keys", [["secret"]])
def test_a_key_is_asked_for_sent_and_kept_in_the_tab_alone(visit: Visit) -> None:
    visit.say("hi")
    visit.browser.until(f"{ERROR} === 'Invalid API Key' && document.activeElement.id === 'key'")
    visit.browser.type("secret")
    visit.browser.ask("document.querySelector('#question').focus()")
    visit.browser.press("Enter")
    visit.browser.until(f"document.querySelector('article') && {SEND_AGAIN}")
    assert visit.browser.ask(ANSWER) == "Hello, world"
    assert visit.browser.until("document.querySelector('#model').textContent") == "demo"
    assert visit.browser.ask("localStorage.length === 0 && document.cookie === ''")
    assert "secret" in visit.browser.ask("Object.values(sessionStorage).join()")


HOSTILE = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>
```html"><b>
<b onclick="1">bold</b>
 ``
```
</div>&amp; <style>* { display: none }</style>"""


@needs_browser
def test_markup_in_an_answer_is_text(visit: Visit) -> None:
    visit.answered(Script(text=HOSTILE), "<i>Why</i>?")
    assert visit.browser.ask("document.querySelector('.question').textContent") == "<i>Why</i>?"
    assert visit.browser.ask("document.querySelector('pre').textContent") == '<b onclick="1">bold</b>\n ``\n'
    first, _, last = visit.browser.ask(
        "[...document.querySelectorAll('.answer > *')].map((e) => (e.querySelector('pre') || e).textContent)"
    )
    assert [first, last] == [HOSTILE.splitlines()[0], HOSTILE.splitlines()[-1]]
    assert visit.browser.ask("document.querySelector('.bar span').textContent") == 'html"><b>'
    assert visit.browser.ask("window.hit") is None
    assert (
        visit.browser.ask("document.querySelectorAll('#log img, #log script, #log style, #log b, #log i').length") == 0
    )


@needs_browser
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\n```py\nx = 1\n```", [["", "a"], ["py", "x = 1\n"]]),
        ("```\nx\n```\n\nb", [["", "x\n"], ["", "b"]]),
        ("````md\n```\nx\n```\n````\n", [["md", "```\nx\n```\n"]]),
        ("a ``` b `c`\n``d``", [["", "a ``` b `c`\n``d``"]]),
        ("```py\nx = '```'\n", [["py", "x = '```'\n"]]),
        ("a\n```", [["", "a\n```"]]),
    ],
)
def test_code_stands_between_fences(visit: Visit, text: str, blocks: list[Any], step: int) -> None:
    visit.answered(Script(text=text, step=step))
    found = visit.browser.ask(
        """[...document.querySelectorAll('.answer > *')].map((e) => e.className === 'code'
            ? [e.querySelector('.bar span').textContent, e.querySelector('pre').textContent] : ['', e.textContent])"""
    )
    assert found == blocks


@needs_browser
def test_a_conversation_survives_a_reload_with_its_drafts(visit: Visit) -> None:
    visit.answered(Script(text="one two three\n```py\nfour five six\n```\n", step=3))
    visit.browser.click("#green")
    looks = "document.querySelector('#log').innerHTML + document.body.className"
    before, note = visit.browser.ask(looks), visit.browser.ask(NOTE)
    assert note
    assert "drafted" in before
    visit.browser.reload()
    # A label of a state that is over need not come back.
    busy = ' aria-busy="false"'
    assert visit.browser.ask(looks) == before.replace(busy, "")
    visit.browser.click("#new")
    assert visit.browser.ask("document.querySelector('#log').children.length") == 0
    visit.browser.reload()
    assert visit.browser.ask("document.querySelector('#log').children.length") == 0


@needs_browser
def test_a_reload_amid_an_answer_keeps_what_came(visit: Visit) -> None:
    visit.service.script = Script(text="on and on ", ends=False, go=threading.Semaphore(3))
    visit.say("go on")
    came = visit.browser.until(f"document.querySelector('article') && {ANSWER}")
    visit.browser.reload()
    assert visit.browser.ask(ANSWER).startswith(came)
    assert visit.browser.ask(NOTE).endswith("broken off")
    (ticket,) = visit.service.tickets
    assert ticket.ended.wait(PATIENCE), "the server goes on"


@needs_browser
def test_no_other_host_is_asked(visit: Visit) -> None:
    visit.answered(Script())
    visit.browser.until("document.querySelector('#model').textContent")
    asked = [url for url in visit.browser.requests if not url.startswith(("data:", "about:"))]
    assert [url.removeprefix(visit.address) for url in asked] == ["", "v1/models", "v1/chat/completions"]
    # Nor could it: the browser itself refuses.
    refused = visit.browser.ask("fetch('http://127.0.0.2:9/').then(() => 'asked', (error) => error.name)")
    assert refused == "TypeError"
    assert "Content Security Policy" in " ".join(visit.browser.complaints)
    # And markup made of text, by whatever slip, is an error.
    assert "TrustedHTML" in visit.browser.ask(
        "(() => { try { document.body.innerHTML = '<b>'; } catch (e) { return e.message; } })()"
    )


@needs_browser
@pytest.mark.parametrize("width", [320, 900])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_can_be_read(visit: Visit, width: int, dark: bool) -> None:
    browser = visit.browser
    browser.window(width, 640, dark=dark)
    visit.answered(Script(text=f"{'word ' * 30}\n```py\n{'x' * 200}\n```\n{'y' * 200} end", step=3))
    browser.click("#green")
    browser.click("#options")
    assert browser.ask("document.documentElement.scrollWidth") == width
    for id in ("send", "question", "new", "options", "key", "green"):
        box = json.loads(browser.ask(f"JSON.stringify(document.getElementById('{id}').getBoundingClientRect())"))
        assert box["left"] >= 0, id
        assert box["right"] <= width, id
        assert box["bottom"] <= 640, id
    # WCAG's AA: 4.5 to 1.
    ratios = browser.ask(CONTRAST.read_text())
    assert {"question", "drafted", "note"} <= set(ratios)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    unnamed = """[...document.querySelectorAll('button, input, textarea')].filter(
        (e) => !e.labels?.length && !e.textContent.trim()).length"""
    assert browser.ask(unnamed) == 0


# --------------------------------------------------------------------------- without a browser


@pytest.mark.parametrize("keys", [["secret"]])
def test_the_page_is_shown_to_anyone_and_may_do_little(keys: list[str]) -> None:
    server, _ = scripted()
    with listening(make_app(server, keys=keys)) as address:
        response = httpx.get(address)
        assert httpx.get(f"{address}/v1/models").status_code == 401
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-", policy)) == 2
    # What needs no browser to be seen: nothing is fetched, and no text is made into markup.
    assert re.findall(r"(?:src|href)=\"(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", response.text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", response.text) == []
