"""The options that choose tokens and accept drafts, as a user types them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.cli_runner import DEMO, run

TEXT = b"def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "wide": {"type": "boolean"}},
    "required": ["name", "wide"],
}

BAD = [
    ("--grammar root:=x", 1, "the grammar does not parse: expecting ::= in line 1"),
    ("--grammar a::=x", 1, "Undefined rule identifier 'x'"),
    ('--grammar a::="x"', 1, "grammar does not contain a 'root' symbol"),
    ("--grammar-file missing.gbnf", 1, "missing.gbnf: No such file"),
    ("--json-schema {", 1, "the JSON schema is not JSON"),
    ("--json-schema []", 1, "the JSON schema is a list, but must be an object"),
    ('--json-schema {"type":"colour"}', 1, "cannot be turned into a grammar: 'colour' is no type of JSON"),
    ('--json-schema {} --grammar root::="x"', 2, "--grammar and --json-schema exclude each other"),
    ("--logit-bias 999999+1", 2, "logit bias of token 999999, but the vocabulary has tokens 0 to 4095 only"),
    ("--logit-bias green", 2, "'green' is no token id with a bias"),
    ("--logit-bias 5+nan", 2, "the logit bias of token 5 is nan"),
    ("--lenience 0.5 --acceptance match --temp 0", 2, "lenience has no say in acceptance 'match'"),
    ("--lenience 0.5 --acceptance coupled --temp 1", 2, "lenience has no say in acceptance 'coupled'"),
    ("--lenience 0.5 --no-draft", 2, "lenience 0.5 is for drafts"),
    ("--lenience 0", 2, "lenience is 0.0, but must be above 0"),
    ("--lenience 0.5 --repeat-penalty 1.2", 2, "lenience at temperature 0 compares bare logits"),
    ("--typical-acceptance", 2, "typical acceptance needs a temperature above 0"),
    ("--typical-acceptance --acceptance rejection --temp 1", 2, "a rule of its own"),
    ("--mirostat 2", 2, "temperature 0 takes the likeliest"),
    ("--mirostat 2 --temp 1 --acceptance rejection", 2, "no place for rejection sampling"),
    ("--mirostat 2 --temp 1 --top-k 5", 2, "mirostat takes the place of other samplers; leave out top_k"),
    ("--mirostat 3 --temp 1", 2, "mirostat is 3, but must be 0"),
    ("--samplers top_k;foo --temp 1", 2, "unknown sampler 'foo'"),
    ("--samplers top_k;temperature --temp 1 --typical-p 0.5", 2, "typical_p is set, but samplers leaves out typ_p"),
    ("--samplers top_k", 2, "temperature is 0.0, but samplers leaves it out"),
    ("--repeat-penalty 0", 2, "repeat_penalty is 0.0, but must be finite and above 0"),
    ("--top-p nan", 2, "top_p is nan"),
    ("--logprobs 3", 2, "add --json"),
    ("--logprobs 5000 --json", 2, "the vocabulary has 4096 tokens"),
    ("--trace /nowhere/at/all.jsonl", 1, "cannot write the trace /nowhere/at/all.jsonl"),
]


@pytest.mark.parametrize(("arguments", "code", "complaint"), BAD, ids=[a for a, _, _ in BAD])
def test_bad_input_is_one_line(env: dict[str, str], arguments: str, code: int, complaint: str) -> None:
    done = run(env, "complete", DEMO, "-n", "4", "-t", "1", *arguments.split(), stdin=TEXT)
    assert (done.code, done.out) == (code, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    "drafts", [["--no-draft"], ["--policy", "fixed", "--drafter", "ngram"], ["--acceptance", "match"]]
)
@pytest.mark.parametrize(
    "settings",
    [
        "--repeat-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.1 --repeat-last-n -1",
        "--dry-multiplier 0.8 --dry-base 1.5 --dry-allowed-length 1 --dry-penalty-last-n 9 --dry-sequence-breaker none",
        "--typical-p 0.8 --xtc-probability 0.5 --xtc-threshold 0.2 --dynatemp-range 0.4 --dynatemp-exp 1.2",
        "--top-n-sigma 1.5 --samplers temperature;top-k;top_n_sigma",
        "--mirostat 2 --mirostat-lr 0.2 --mirostat-ent 3",
        "-l 40-inf --logit-bias 50+2",
    ],
)
def test_a_seed_gives_one_text(env: dict[str, str], texts: dict[str, str], settings: str, drafts: list[str]) -> None:
    common = ["-n", "24", "-t", "1", "--exact", "on", "--temp", "0.9", "-s", "11", *settings.split()]
    done = run(env, "complete", DEMO, *common, *drafts, stdin=TEXT)
    assert done.code == 0, done.err
    assert done.out == texts.setdefault(settings, done.out)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The text of each setting, as the first run gave it."""
    return {}


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_schema_is_kept_to(env: dict[str, str], tmp_path: Path, temperature: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    arguments = ["-n", "80", "-t", "1", "--temp", temperature, "-s", "3", "--exact", "on"]
    outputs = {
        run(env, "complete", DEMO, *arguments, *more, stdin=TEXT).out
        for more in (
            ["-jf", file],
            ["--json-schema", json.dumps(SCHEMA), "--no-draft"],
            ["-jf", file, "--policy", "fixed"],
        )
    }
    assert len(outputs) == 1
    answer = json.loads(outputs.pop())
    assert set(answer) == {"name", "wide"}
    assert isinstance(answer["wide"], bool)


def test_logprobs_are_those_of_plain_decoding(env: dict[str, str]) -> None:
    arguments = ["-n", "20", "-t", "1", "--exact", "on", "--json", "--logprobs", "3"]
    plain = run(env, "complete", DEMO, *arguments, "--no-draft", stdin=TEXT)
    drafted = run(env, "complete", DEMO, *arguments, "--policy", "fixed", stdin=TEXT)
    a, b = json.loads(plain.out), json.loads(drafted.out)
    assert b["accepted"] > 0
    assert a["logprobs"] == b["logprobs"]
    assert len(a["logprobs"]) == a["tokens"]
    for one in a["logprobs"]:
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]
        assert len(one["top_logprobs"]) == 3
        # Greedy: the token itself is the likeliest.
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]
        assert sum(math.exp(top["logprob"]) for top in one["top_logprobs"]) <= 1
    assert b["text"] == "".join(one["token"] for one in b["logprobs"])


def test_lossy_output_is_labelled(env: dict[str, str]) -> None:
    arguments = ["-n", "8", "-t", "1", "--json", "--temp", "0.8"]
    lenient = run(env, "complete", DEMO, *arguments, "--lenience", "0.5", stdin=TEXT)
    assert json.loads(lenient.out)["lossy"] == "lenience 0.5"
    assert lenient.err.count("lenience 0.5") == 2
    typical = run(env, "complete", DEMO, *arguments, "--typical-acceptance", stdin=TEXT)
    assert json.loads(typical.out)["lossy"] == "typical acceptance"
    exact = run(env, "complete", DEMO, *arguments, stdin=TEXT)
    assert json.loads(exact.out)["lossy"] is None


def test_the_entropy_policy_shows_its_steps(env: dict[str, str]) -> None:
    done = run(env, "complete", DEMO, "-n", "12", "-t", "1", "--json", "--policy", "entropy", stdin=TEXT)
    report = json.loads(done.out)
    assert len(report["steps"]) == report["target_passes"]
    assert all(0 <= step["entropy"] <= 1 and 1 <= step["gamma"] <= 16 for step in report["steps"])


def test_a_trace_of_a_completion(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    done = run(env, "complete", DEMO, "-n", "16", "-t", "1", "--policy", "fixed", "--trace", file, stdin=TEXT)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["ngramspec_trace"] == 1
    assert "".join(piece for line in lines[1:] for piece in line["pieces"]) == done.out
    shown = run(env, "trace", file)
    assert shown.code == 0
    assert len(shown.out.splitlines()) >= len(lines)


def test_chat_answers_keep_to_a_grammar(env: dict[str, str], tmp_path: Path) -> None:
    grammar, trace = tmp_path / "yes.gbnf", tmp_path / "trace.jsonl"
    grammar.write_text('root ::= "yes" | "no"')
    arguments = ["--grammar-file", grammar, "--trace", trace, "-t", "1", "-s", "1"]
    done = run(env, "chat", DEMO, *arguments, stdin=b"Is water wet?\nIs fire cold?\n")
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line] in ([a, b] for a in ("yes", "no") for b in ("yes", "no"))
    prefills = [line for line in map(json.loads, trace.read_text().splitlines()) if line.get("batch") == 0]
    assert len(prefills) == 2
