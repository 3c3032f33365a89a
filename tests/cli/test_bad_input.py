"""Tests of wrong arguments and unexpected ends: a clear error message, the right exit code, and no loss of data."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable
from pathlib import Path

import pytest
from ngramspec_cli import app
from ngramspec_cli.serve import ServeOptions
from support.cli_runner import COMMAND, DEMO, ENDLESS, PATIENCE, RunResult, run, run_process, run_with_signal, shell
from support.model_files import write_gguf
from support.signals import SIGNALS, by_signal, signal_after, signal_at

from ngramspec.chat.conversation import ChatTemplate
from ngramspec.data import NGramSpecError
from ngramspec.drafting import DRAFTERS
from ngramspec.instruments.prompts import load_prompts
from ngramspec.llama.passes import Passes
from ngramspec.memory.memory import saves_answers
from ngramspec.policies import POLICIES

SMALL = ["complete", "-t", "1", "-c", "512", "-n", "4"]
PLAIN = ["--no-draft", "--exact", "off"]
TEXT = b"def add(a, b):\n    return a + b\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_bytes(TEXT)
    return path


WITH_MODEL = ("chat", "complete", "serve", "bench", "verify", "tune", "info")
"""Commands whose argument MODEL can also be named with -m."""

WITH_JSON = ("bench", "replay -", "tune", "tune --quants qwen2.5-1.5b", "verify")
"""Commands that check the files of their results before anything that takes time."""

CONVERSATION = '{"prompt": "Hi", "response": "Hello"}'

SHAPE = "layers=2,embd=64,ff=96,heads=2,vocab=100,tied=yes"

CONTRADICTIONS = [
    ("finish", "'finish'. (see ngramspec --help)"),
    ("--", "a command is required, such as ngramspec chat (see ngramspec --help)"),
    ("memory --", "a command is required, such as ngramspec memory add (see ngramspec memory --help)"),
    ("memory forget", "'forget'"),
    ("memory add --model DEMO ''", "must not be empty"),
    ("memory remove ''", "must not be empty"),
    ("memory add", "PATH"),
    ("memory remove", "--answers"),
    ("memory save-answers maybe", "Invalid value for 'state': 'maybe' is not one of 'on', 'off' (see"),
    ("complete -c big", "Invalid value for '-c' / '--ctx-size': 'big' is not a whole number (see"),
    ("complete -c 1", "-c must be 0 or from 16 to 16777216, got 1"),
    ("complete -c 4294967808", "-c must be 0 or from 16 to 16777216, got 4294967808"),
    ("serve -t 0", "Invalid value for '-t' / '--threads': '0' is neither a whole number of at least 1 nor 'auto' (see"),
    ("complete -ub 1", "Invalid value for '-ub' / '--ubatch-size': 1 is below the minimum of 64 (see"),
    ("run m.gguf hello", "there is no command 'run'; use ngramspec chat (see ngramspec --help)"),
    ("m.gguf", "there is no command 'm.gguf'; use ngramspec chat m.gguf (see ngramspec --help)"),
    ("-m m.gguf", "-m must follow a command, such as ngramspec chat (see ngramspec --help)"),
    *((f"chat {option}", f"Option '{option}' requires an argument.") for option in ("-m", "-n", "--temp")),
    ("chat a.gguf b.gguf", "(b.gguf); pass one model (see ngramspec chat --help)"),
    *((f"{command} a.gguf -m b.gguf", "two models were given: a.gguf and -m b.gguf") for command in WITH_MODEL),
    *((f"{command} -m a.gguf -hf b/c", "two models were given: a.gguf and -hf b/c") for command in ("info", "serve")),
    *(
        (f"{command} -p hi", "-p is not supported: only chat and complete have")
        for command in ("bench", "info", "serve")
    ),
    ("info -md x.gguf", "No such option: -md (see ngramspec info --help)"),
    ("chat -mm x.gguf", "-mm is not supported: the server accepts only text"),
    ("complete DEMO b.gguf", "two models were given: DEMO and b.gguf"),
    ("complete a.txt DEMO", "the model comes before the text: ngramspec complete DEMO a.txt"),
    ("complete -p hi a.txt -m m.gguf", "two texts were given: a.txt and -p/--prompt"),
    ("complete -p hi -f a.txt", "two texts were given: -f/--file a.txt and -p/--prompt"),
    ("chat -p hi -f a.txt", "two first messages were given: -f/--file a.txt and -p/--prompt"),
    ("chat m.gguf hello", "(hello); pass a text with -p/--prompt (see ngramspec chat --help)"),
    ("serve --lora-scaled a.gguf", "--lora-scaled must be FILE:SCALE, got 'a.gguf'"),
    ("complete --lora-scaled a.gguf:inf", "--lora-scaled must be file names with a finite scale each, got "),
    ("chat DEMO -c 512 -t 1 --show-drafts", "--show-drafts: drafts can only be shown in a terminal"),
    ("chat --lora a.gguf,", "--lora must be a list of file names, got 'a.gguf,'"),
    ("serve --ssl-key-file key.pem", "--ssl-key-file and --ssl-cert-file must be used together"),
    ("serve --chat-template llama5", "'llama5' is neither a Jinja template nor one of: bailing, "),
    ("serve --chat-template-kwargs {", "--chat-template-kwargs is not valid JSON: "),
    ("serve --chat-template-kwargs []", "--chat-template-kwargs: the chat template's variables must be a JSON object"),
    ("serve --chat-template-kwargs '{\"tools\": 1}'", "the chat template's variable 'tools' cannot be set"),
    ("serve --chat-template x --chat-template-file y", "--chat-template cannot be combined with --chat-template-file"),
    ("serve --port 99999", "Invalid value for '--port': 99999 is above the maximum of 65535 (see"),
    ("tune --time-limit soon", "Invalid value for '--time-limit': 'soon' is not a number (see"),
    ("complete --psychic", "--psychic (see ngramspec complete --help)"),
    ("complete one.txt two.txt three.txt", "three.txt"),
    ("complete -f one.txt DEMO two.txt", "two texts were given: two.txt and -f/--file one.txt"),
    ("complete DEMO -hf owner/repo", "two models were given: "),
    ("complete ''", "must not be empty"),
    ("complete --suffix ''", "the name of the --suffix file must not be empty"),
    ("complete - --suffix -", "the text and --suffix must be different files, got stdin for both"),
    ("complete -n 0", "-n/--predict must be at least 1"),
    ("complete -n -5", "(until the context is full), got -5"),
    ("complete --temp -0.1", "temperature must be finite and at least 0, in 32 bits, got -0.1"),
    ("complete -s -2", "seed must be a whole number from 0 to 2^64 - 1, got -2"),
    ("complete --drafter psychic", f"choose one of: {', '.join(DRAFTERS)}, model"),
    ("bench --policy psychic", f"unknown policy 'psychic'; choose one of: {', '.join(POLICIES)}, all"),
    ("complete --policy psychic", "'psychic'; choose one of: "),
    ("complete --acceptance psychic", "'psychic' is not one of 'coupled'"),
    ("complete --stop ''", "--stop"),
    ("complete -ctv q8_0 -fa off", "flash attention"),
    ("complete --rpc host", "--rpc: 'host' is not HOST:PORT"),
    ("complete --rpc a:1 -ngl 0", "-ngl 0 cannot be combined with --rpc"),
    ("complete --logit-bias green", "'green' is not a token id with a bias"),
    ("complete --grammar 'root ::= [a]' --json-schema {}", "--grammar and --json-schema cannot be combined"),
    ("complete --logprobs 3", "requires --json"),
    ("complete --acceptance rejection --mirostat 2 --temp 1", "mirostat cannot be combined with rejection sampling"),
    ("complete --lenience 0.5 --acceptance match", "lenience has no effect with acceptance 'match'"),
    ("chat --lenience 0.5 --temp 0 --reasoning-budget 5", "cannot be combined with a reasoning budget"),
    ("complete --lenience 0.5 --temp 0 --min-tokens 5", "cannot be combined with min_tokens"),
    ("complete --lenience 0.5 --no-draft", "lenience 0.5 cannot be combined with --no-draft"),
    ("complete --drafter model", "requires a draft model; set -md"),
    ("complete -md m.gguf --no-draft", "cannot be combined with --no-draft"),
    ("complete -md m.gguf --drafter ngram", "--drafter ngram cannot be combined with -md"),
    ("complete -md m.gguf --drafter model --memory mine", "does not use a memory"),
    ("complete --memory x --no-memory", "cannot be combined"),
    ("complete --memory x --no-draft", "cannot be combined with --no-draft"),
    ("chat --memory x --drafter ngram", "'ngram' does not use a memory"),
    ("complete -md m.gguf --mtp", "-md cannot be combined with --mtp"),
    ("complete --mtp --no-draft", "--mtp cannot be combined with --no-draft"),
    ("complete --mtp --drafter ngram", "--drafter ngram cannot be combined with --mtp"),
    ("serve -td 1", "require a draft model; set -md"),
    ("complete --beams 2 --temp 0.5", "cannot be combined with --temp"),
    ("complete --beams 2 --repeat-penalty 1.2", "cannot be combined with penalties"),
    ("complete --beams 2 --samplers 'top_k;infill;temperature' --suffix a", "cannot be combined with penalties"),
    ("complete --beams 2 --acceptance match", "cannot be combined with --acceptance"),
    ("complete --beams 2 --drafter ngram", "--beams cannot be combined with --drafter"),
    ("complete --beams 2 -md m.gguf", "--beams cannot be combined with --draft-model"),
    ("complete --beams 2 --trace t.jsonl", "--beams cannot be combined with --trace"),
    ("complete --beams 2 --min-tokens 5", "--beams cannot be combined with --min-tokens"),
    ("complete --beams 2 --exact on", "cannot be combined with --exact on"),
    ("bench --policy all --no-draft", "cannot be combined with --no-draft"),
    ("serve --mmproj x.gguf", "--mmproj is not supported: the server accepts only text"),
    ("serve --fit on", "--fit is not supported: -ngl auto fits the model into GPU memory, -ngl all does not"),
    ("serve -nkvo", "-nkvo is not supported: "),
    ("complete -dev none -ngl 5", "-dev none cannot be combined with -ngl"),
    ("complete -dev none --rpc a:1", "none cannot be combined with --rpc"),
    ("complete -md m.gguf -devd none -ngld 5", "none cannot be combined with -ngld"),
    ("complete -devd CUDA0", "require a draft model; set -md"),
    ("complete -ts 0,0", "-ts must be a list of numbers of at least 0 with a positive sum, got '0,0'"),
    ("complete -ts 1,one", "-ts must be a list of numbers"),
    ("complete -sm none -ts 1,2", "-ts cannot be combined with -sm none"),
    ("complete -sm tensor", "-sm"),
    ("complete -cmoe -ncmoe 3", "-cmoe cannot be combined with -ncmoe"),
    ("complete -ot attn", "-ot must be REGEX=DEVICE, got 'attn'"),
    ("complete -ot 'a(=CPU'", "-ot must be REGEX=DEVICE, got 'a(=CPU'"),
    ("complete -dev ,", "-dev must be a list of different device names, or 'none', got ','"),
    ("complete -dev A,A", "-dev must be a list of different device names, or 'none', got 'A,A'"),
    ("complete --list-devices", "--list-devices is not supported: use ngramspec info --list-devices"),
    ("bench --category poetry", "unknown category 'poetry'; choose from: chat, "),
    ("bench --markdown --json -", "--markdown and --json cannot both be written to stdout; name a file"),
    ("bench --svg out --json ./out", "--svg and --json cannot both be written to ./out; name another file"),
    ("verify --drafter memory", "requires a memory"),
    ("tune --apply --reset", "cannot be combined"),
    ("tune --reset --json gone/found.json", "--json cannot be combined with --reset"),
    (f"tune --quants --apply {SHAPE}", "--apply cannot be combined with --quants"),
    (f"tune --quants -c 512 {SHAPE}", "-c cannot be combined with --quants"),
    (f"tune --quants -ub 64 {SHAPE}", "-ub cannot be combined with --quants"),
    (f"tune --quants --exact on {SHAPE}", "--exact cannot be combined with --quants"),
    (f"tune --quants -hf owner/repo {SHAPE}", "a shape and a model were given"),
    ("tune --quants layers=2", "the shape lacks embd"),
    ("complete DEMO -c 512 --logit-bias 999999+1", "the token of a logit bias must be 0 to 4095, got 999999"),
    ("complete DEMO -c 512 --logprobs 5000 --json", "--logprobs must be at most 4096"),
    ("verify DEMO -c 512 -n 510 --exact off", "510 tokens leave no room for a prompt in a context of 512"),
    ("bench --against URL --repeat 2 --html x.html", "--against cannot be combined with --repeat, --html"),
    ("bench --against URL --repeat-penalty 1.1", "--against supports only the sampling options"),
    ("complete --prediction x --no-draft", "cannot be combined with --no-draft"),
    ("complete --prediction x --beams 2", "cannot be combined with --beams"),
    ("complete --prediction x --drafter ngram", "does not support --prediction"),
    ("serve --pooling mean", "require --embeddings"),
    ("serve --embd-normalize 1", "require --embeddings"),
    ("serve --embeddings --pooling max", "not one of 'none', 'mean'"),
    ("serve --reasoning-format none", "'none' is not one of 'auto', 'deepseek'"),
    ("replay", "FILE"),
    ("replay talks --curve round", "unknown curve 'round'"),
    ("replay talks --drafter psychic", f"unknown drafter 'psychic'; choose one of: {', '.join(DRAFTERS)}"),
    ("replay talks --drafter model", "unknown drafter 'model'"),
    ("replay talks --policy psychic", "'psychic'"),
    ("replay talks -t 2", "require --model"),
]
"""Mistakes, most of which are detected before the command reads the text or looks for a model."""

RANGES = {
    "complete": "-tb 0, -tb 1099511627776, -ngl some, -ctk q2, --draft-max 0, --min-tokens -1, --temp x",
    "bench": "-n 1",
    "verify": "-n 1, --time-limit 0, -s -1",
    "tune": "--time-limit 1, --context-depth 8",
    "chat": "--reasoning-budget -2, --min-tokens -1",
    "serve": "--reasoning-budget -2",
    "replay talks": "--limit 0, --draft-max 64, --memory maybe",
}
"""Values that an option rejects, whatever the other options are."""
for _command, _options in RANGES.items():
    CONTRADICTIONS += [(f"{_command} {o}", f"Invalid value for '{o.split()[0]}'") for o in _options.split(", ")]

UNUSABLE = [
    ("serve --api-key-file gone.txt", "gone.txt: No such file"),
    ("serve --api-key-file DEMO", "is a model (GGUF), not UTF-8 text"),
    ("serve --ssl-key-file DEMO --ssl-cert-file DEMO", "cannot use the certificate "),
    ("complete gone.txt", "gone.txt: No such file or directory; to continue a text itself, use -p/--prompt TEXT"),
    ("complete DEMO 'def f(n):'", "def f(n):: No such file or directory; to continue a text itself, use -p"),
    (f"complete -m DEMO {'x' * 9999}", f"{'x' * 80}...: File name too long; to continue a text itself, use -p"),
    ("complete -p ''", "-p/--prompt is empty"),
    ("chat -p ' '", "-p/--prompt is empty"),
    ("complete -f DEMO", "is a model (GGUF), not UTF-8 text"),
    ("chat -f DEMO", "is a model (GGUF), not UTF-8 text"),
    ("complete --suffix gone.py", "gone.py: No such file"),
    ("complete --prediction gone.txt", "gone.txt: No such file"),
    ("chat -f gone.txt", "gone.txt: No such file"),
    ("chat --resume", "there is no saved conversation; ngramspec chat --keep saves one"),
    ("complete --grammar-file gone.gbnf", "gone.gbnf: No such file"),
    ("complete --memory a/b", "'a/b' is not a valid name for a memory"),
    ("memory add --memory ../x .", "'../x' is not a valid name"),
    ("memory add --memory '' .", "'' is not a valid name"),
    ("memory add --model DEMO gone", "gone: no such file"),
    ("memory add --model gone.gguf .", "gone.gguf"),
    ("memory list --memory nothing", "'nothing' is empty"),
    ("memory remove x", "is empty"),
    ("tune --quants qwen9-1b", "the shapes with names are smollm2-135m, "),
    ("complete DEMO -c 512 --grammar root:=x", "the grammar does not parse: expected ::= in line 1"),
    ("""complete DEMO -c 512 --grammar 'a::="x"'""", "the grammar has no rule named root"),
    ("complete --json-schema {", "the JSON schema is not JSON"),
    ("complete --trace gone/at/all.jsonl", "cannot write the trace gone/at/all.jsonl"),
    *((f"{command} gone.gguf", "no such model file: gone.gguf") for command in ("complete", "complete -m")),
    ("complete lmstudio:me/typo", "typo"),
    ("complete DEMO -md gone.gguf", "no such model file: gone.gguf"),
    *((f"{command} -f /dev//null", "/dev//null is empty") for command in ("complete", "chat")),
    ("complete <<< ", "standard input is empty"),
    ("chat -f - <<< \n\n", "standard input is empty"),
    ("complete <<< Gr\xfc\xdfe", "standard input is not UTF-8 text (byte 2 is 0xfc)"),
    ("complete <<< half a character \xe2\x82", "standard input is not UTF-8"),
    ("chat -f - <<< a\xff", "standard input is not UTF-8"),
    ("bench --prompts gone", "no such file or folder of prompts: gone"),
    ("bench --html a.html --svg gone/b.svg", "b.svg: No such file"),
    ("verify --prompts gone", "no such file or folder of prompts: gone"),
    ("replay gone.jsonl", "gone.jsonl: No such file"),
    *((f"replay - {flag} gone.gguf <<< {CONVERSATION}", "gone.gguf") for flag in ("--vocab", "--model")),
    ("replay - <<< ", "no conversations to replay in -"),
    ("replay - <<< {\n" + CONVERSATION.replace("Hello", ""), "1 broken, 1 without a response"),
    ("serve DEMO -c 512 --port 0 --grammar 'root ::= ('", "grammar"),
    *((f"{command} --json gone/found.json", "cannot write gone/found.json") for command in WITH_JSON),
]
"""Unusable files, names and grammars, most of which the command detects before it looks for a model.

Bytes after <<< are stdin.
"""


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [*((*mistake, 2) for mistake in CONTRADICTIONS), *((*mistake, 1) for mistake in UNUSABLE)],
)
def test_cli_with_invalid_arguments_prints_one_line_error(
    env: dict[str, str], tmp_path: Path, line: str, words: str, code: int
) -> None:
    line, typed, stdin = line.partition(" <<< ")
    arguments = [str(DEMO) if word == "DEMO" else word for word in shlex.split(line)]
    raw = stdin.encode("latin-1") if typed else TEXT
    done = run(env | {"NGRAMSPEC_MODEL": os.devnull}, *arguments, stdin=raw, cwd=tmp_path)
    done.assert_failed(words.replace("DEMO", str(DEMO)), code=code)
    assert os.devnull not in done.err
    assert list(tmp_path.iterdir()) == []


def test_cli_without_command_prints_help(env: dict[str, str]) -> None:
    done = run(env)
    assert (done.code, done.raw) == (2, b"")
    assert all(name in done.err for name in ("Usage:", "chat", "complete", "bench", "info"))
    assert run(env, "--help").ok().out == done.err


DRAFTER = """from ngramspec import Draft, Drafter
class Mine(Drafter):
    def begin(self, prompt): pass
    def propose(self, ask): return Draft((1, 2))
    def accept(self, tokens): pass
"""
TALK = '{"messages": [\n{"role": "user", "content": "hi"},\n{"role": "assistant", "content": "Hello."}]}\n'
PAIRS = "=== prompt\nRepeat: one two three\n=== response\none two three four\n"
CURVE = '{\n"1": 1.0,\n"4": 2.0\n}'
SMALL_CHAT = "chat -t 1 -c 512 -n 4 -s 1"
PLACES = [
    ("text", "Grüße an dich,\nund an", "complete FILE"),
    ("text", "Grüße an dich,\nund an", "complete -f FILE"),
    ("text", "Grüße an dich,\nund an", "complete"),
    ("text", "def f():\n    return ", "complete -p hi --suffix FILE"),
    ("text", "def f():\n    return ", "complete - --suffix other.txt"),
    ("text", "hi there\nall", "complete -p hi --prediction FILE"),
    ("any.gbnf", 'root ::= (\n  "yes" # or\n  | no )\nno ::= "no"\n', "complete -p hi --grammar-file FILE"),
    ("any.json", '{\n"enum": ["yes", "no"]\n}\n', "complete -p hi -jf FILE"),
    ("mine.py", DRAFTER, "complete -p hi --drafter FILE:Mine"),
    ("text", "hi,\nand you?", f"{SMALL_CHAT} -f FILE"),
    ("text", "hi,\nand you?", f"{SMALL_CHAT} -f -"),
    ("turns", "hi\nand you?\n", SMALL_CHAT),
    ("text", "a = 1\nb = 2\n", f"{SMALL_CHAT} <<< '/file FILE\nhi'"),
    ("text", "I am\nthe one", f"{SMALL_CHAT} <<< '/prediction FILE\nhi'"),
    ("talk.json", TALK, f"{SMALL_CHAT} <<< '/load FILE\nhi'"),
    ("text", "a = 1\nb = 2\n", "memory add FILE"),
    ("run.jsonl", "", "trace FILE"),
    ("run.jsonl", "", "trace -"),
    ("talks.jsonl", '{"prompt": "Hi", "response": "Hello you"}\n' * 2, "replay FILE --json -"),
    ("talks.jsonl", '{"prompt": "Hi", "response": "Hello you"}\n' * 2, "replay - --json -"),
    ("pairs.txt", PAIRS, "replay FILE --json -"),
    ("curve.json", CURVE, "replay other.txt --curve FILE --json -"),
]
"""Name and contents of a file, and a command that reads FILE or, if it does not name one, stdin."""


@pytest.mark.parametrize(("name", "text", "line"), PLACES)
def test_cli_reads_files_written_on_windows(
    env: dict[str, str], tmp_path: Path, name: str, text: str, line: str
) -> None:
    """A byte order mark changes nothing, line ends only a text for the model, and UTF-16 gives one clear line."""
    path, label = tmp_path / name, name if "FILE" in line else "stdin"
    (tmp_path / "other.txt").write_text(PAIRS)
    line, _, typed = line.replace("FILE", str(path)).partition(" <<< ")
    command, *words = shlex.split(line)

    if command == "trace":
        run(env, *SMALL, *PLAIN, "-p", "hi", "--trace", path).ok()
        text = path.read_text()

    def read(raw: bytes) -> RunResult:
        if command == "memory":
            run(env, "memory", "clear").ok()
        path.write_bytes(raw)
        drafts = {"--prediction", "--drafter"} & {*words}
        start = [command] if command != "complete" else SMALL if drafts else [*SMALL, *PLAIN]
        return run(env, *start, *words, stdin=typed.strip("'").encode() or raw, cwd=tmp_path)

    def outcome(raw: bytes) -> object:
        done = read(raw).ok()
        if command == "replay":  # its other figures are times
            return [done.json[key] for key in ("categories", "decode_tokens", "skipped", "curves")]
        return done.raw or done.err

    written = text if name == "text" else text.replace("\n", "\r\n")
    assert outcome(BOM_UTF8 + written.encode()) == outcome(text.encode())
    done = read(text.encode("utf-16"))
    errors = [error for error in done.err.splitlines() if error.startswith("ngramspec:")]
    assert done.code in (1, 2)
    assert len(errors) == 1, done.err
    assert label in errors[0].replace("standard input", "stdin")
    assert re.search("UTF-16, not UTF-8 text; convert it|not UTF-8 text, convert", errors[0])


def render(file: Path) -> str:
    """Return the prompt of a chat template from a file."""
    source = ServeOptions(chat_template_file=file).template
    return str(ChatTemplate(source or "", {}).lay_out({"messages": [{"role": "user", "content": "hi"}]}).text)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "keys": ("first\nsecond\n", lambda file: ServeOptions(api_key_file=file).keys),
    "own.jinja": ("a\n{{ messages[0].content }}\nb\n", render),
    "config.toml": ("# mine\nsave_answers = true\n", saves_answers),
    "prompts.toml": ('category = "c"\n[[prompts]]\nid = "1"\ntext = """a\nb"""\n', load_prompts),
    "prompts.jsonl": ('{"id": "1", "category": "c", "text": "t"}\n', load_prompts),
}
"""Contents and readers of files that commands read after a start of some seconds."""


@pytest.mark.parametrize("name", READERS)
def test_readers_accept_files_written_on_windows(tmp_path: Path, name: str) -> None:
    file, (text, read) = tmp_path / name, READERS[name]

    def outcome(raw: bytes) -> object:
        file.write_bytes(raw)
        return read(file)

    wanted = outcome(text.encode())
    assert outcome(BOM_UTF8 + text.encode()) == outcome(text.replace("\n", "\r\n").encode()) == wanted
    for mark, encoding in ((BOM_UTF16_LE, "utf-16-le"), (BOM_UTF16_BE, "utf-16-be")):
        with pytest.raises(NGramSpecError, match=f"{name}.* UTF-16, not UTF-8 text; convert it to UTF-8$"):
            outcome(mark + text.encode(encoding))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_complete_rejects_unreadable_files(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    for name, raw in (("locked.txt", TEXT), ("locked.gguf", b"GGUF")):
        locked = tmp_path / name
        locked.write_bytes(raw)
        locked.chmod(0)
        run(env, *SMALL, locked, *([file] if name.endswith("gguf") else [])).assert_failed(name, "Permission denied")


@pytest.mark.parametrize("stdin", ["closed", "a terminal"])
def test_complete_without_piped_stdin_rejects_missing_text(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], stdin: str
) -> None:
    ours, its = os.openpty()
    with open(ours, "rb"), open(its) as terminal:
        monkeypatch.setattr(app, "raise_on_signals", lambda: None)
        monkeypatch.setattr(sys, "stdin", terminal if stdin == "a terminal" else None)
        code = app.run(SMALL)
    out, err = capfdbinary.readouterr()
    RunResult(code, out, err.decode()).assert_failed("no text to continue", code=2)


def changed(path: Path, old: bytes, new: bytes) -> Path:
    """Write the demo model with the first occurrence of these bytes replaced."""
    path.write_bytes(DEMO.read_bytes().replace(old, new, 1))
    return path


def test_complete_rejects_unusable_models(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    """Errors of llama.cpp; those of `check_model_file` are in tests/models."""
    key, odd = b"general.architecture", tmp_path / "[red]odd:bug:.txt"
    odd.write_bytes(TEXT)
    for model, word in (
        # The printing library must treat it neither as markup nor as the name of an emoji.
        (odd, "looks like a text file"),
        (write_gguf(tmp_path / "new.gguf", architecture="next-years"), "unknown model architecture: 'next-years'"),
        (write_gguf(tmp_path / "bare.gguf"), "llama.cpp cannot load this model"),
        (changed(tmp_path / "type.gguf", key + struct.pack("<I", 8), key + struct.pack("<I", 99)), key.decode()),
        (changed(tmp_path / "key.gguf", b"embedding_length", b"embedding_lengtX"), "llama.embedding_length"),
    ):
        run(env, *SMALL, model, file).assert_failed(str(model), word)


@pytest.mark.skipif(sys.platform != "linux", reason="not every system limits a process's memory")
def test_complete_with_context_beyond_memory_fails(env: dict[str, str], file: Path) -> None:
    done = shell(env, 'ulimit -v 6000000 && exec "$@"', "complete", "-t", "1", "-c", "2000000", file)
    done.assert_failed("create a context of 2000000 tokens", "-c/--ctx-size")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [[*SMALL, *PLAIN], ["--help"]], ids=" ".join)
def test_cli_with_full_disk_fails_with_one_line(env: dict[str, str], arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        run_process(env, *arguments, stdin=TEXT, stdout=full.fileno()).assert_failed("No space left on device")


def test_complete_with_closed_stdout_fails(env: dict[str, str]) -> None:
    shell(env, '"$@" >&-', *SMALL).assert_failed("stdout is closed")


@pytest.mark.parametrize(("redirection", "text"), [("2>&-", "code.py"), ("2>/dev/full", "gone.py")])
def test_complete_without_stderr_returns_same_output_and_code(
    env: dict[str, str], file: Path, redirection: str, text: str
) -> None:
    options = [*SMALL, *PLAIN, file.with_name(text)]
    wanted = run(env, *options)
    assert wanted.code == (0 if text == file.name else 1)
    done = shell(env, f'"$@" {redirection}', *options)
    assert (done.code, done.raw, done.err) == (wanted.code, wanted.raw, "")


@pytest.mark.parametrize(("number", "code"), [*SIGNALS, (signal.SIGHUP, 143)])
def test_complete_with_signal_during_decoding_prints_partial_text(
    env: dict[str, str], file: Path, number: int, code: int
) -> None:
    options = ["complete", "-t", "1", "-c", "512", "-n", "400", *PLAIN, *ENDLESS, str(file)]
    with signal_after(number, steps=5):
        told = run(env, *options, "--json")
    with signal_after(number, steps=5):
        shown = run(env, *options)
    result = json.loads(told.out)
    assert (result["stop_reason"], result["tokens"], result["text"]) == ("interrupted", 5, shown.out)
    for done in (told, shown):
        assert done.code == code
        assert re.search(r"^interrupted; 5 tokens .*; seed 1$", done.err, re.MULTILINE)


@by_signal
def test_complete_with_signal_during_prefill_returns_empty_text(env: dict[str, str], number: int, code: int) -> None:
    with signal_at(number, Passes, "decode", 2):
        done = run(env, "complete", "-t", "1", "-c", "2048", "-n", "4", "--json", *PLAIN, stdin=TEXT * 70)
    assert done.code == code, done.err
    result = json.loads(done.out)
    assert (result["text"], result["tokens"], result["stop_reason"]) == ("", 0, "interrupted")


LOADS = [[*SMALL, *PLAIN], ["info", "-t", "1", "-c", "512"]]


@pytest.mark.parametrize(
    ("number", "code", "command"),
    [(*SIGNALS[0], LOADS[0]), pytest.param(*SIGNALS[1], LOADS[1], marks=pytest.mark.exhaustive)],
)
def test_cli_with_signal_during_model_load_prints_nothing(
    env: dict[str, str], number: int, code: int, command: list[str]
) -> None:
    done = run_with_signal(env, number, *command, stdin=TEXT)
    assert (done.code, done.raw) == (code, b""), done.err


CALLED_BACK = """
import ctypes, signal, sys, time
from ngramspec_cli.console import Terminated, raise_on_signals

signal.signal(signal.SIGINT, signal.default_int_handler)
raise_on_signals()
dropped = sys.unraisablehook
sys.unraisablehook = lambda lost: (print("lost"), dropped(lost))
for number in (signal.SIGINT, signal.SIGTERM):
    try:
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()
        for _ in range(100):
            time.sleep(0.1)
    except (KeyboardInterrupt, Terminated) as error:
        print(type(error).__name__)
"""


def test_raise_on_signals_inside_c_callback_raises_later(env: dict[str, str]) -> None:
    done = run_process(env, command=[sys.executable, "-c", CALLED_BACK])
    assert (done.code, done.out.split(), done.err) == (0, ["lost", "KeyboardInterrupt", "lost", "Terminated"], "")


def test_complete_with_external_signal_prints_partial_text(env: dict[str, str], file: Path) -> None:
    command = [*COMMAND, "complete", "-t", "1", "-c", "16384", "-n", "-1", *PLAIN, *ENDLESS, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as running:
        first = running.stdout.read(1)
        running.send_signal(signal.SIGTERM)
        rest, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 143
    assert first + rest
    assert re.search(rb"^interrupted; .*; seed 1$", errors, re.MULTILINE)


def test_cli_with_unusable_home_generates_but_rejects_memory_add(env: dict[str, str]) -> None:
    nowhere = {key: value for key, value in env.items() if not key.startswith("XDG_")} | {"HOME": "/dev/null"}
    assert run(nowhere, *SMALL, DEMO, stdin=TEXT).ok().out
    run(nowhere, "memory", "add", Path(__file__)).assert_failed("/dev/null", "Not a directory")
