"""Deliberate faults of the product, and for each the test of the default run that must fail (`test_mutations.py`).

A fault replaces a function or method; its own function receives the original first, and then the arguments. It runs in
a child process whose pytest loads this file as a plugin (`-p support.mutations`) and finds the fault's name in the
environment variable `MUTATION`. Faults patch the interfaces between the parts (verify, propose, plan, rollback,
evaluate, push), not lines inside them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import pytest


class Fault(NamedTuple):
    """A fault.

    Attributes:
        patches: New attributes by "module:name" or "module:Class.name"; each is made from the original.
        caught_by: Pytest's name of the test that must fail.
    """

    patches: Mapping[str, Callable[[Any], Any]]
    caught_by: str

    @property
    def is_compiled(self) -> bool:
        """True if the fault is in a compiled module, which cannot be patched and is replaced by its source."""
        specs = [find_spec(target.partition(":")[0]) for target in self.patches if target.startswith("ngramspec")]
        return any(spec is not None and not str(spec.origin).endswith(".py") for spec in specs)

    def make(self) -> None:
        """Patch this process."""
        for target, new in self.patches.items():
            module_name, _, path = target.partition(":")
            *parents, name = path.split(".")
            owner: Any = import_module(module_name)
            for parent in parents:
                owner = getattr(owner, parent)
            original = getattr(owner, name)
            setattr(owner, name, new(original))
            for module in [module for key, module in sys.modules.items() if key.startswith("ngramspec")]:
                if vars(module).get(name) is original:  # imported by name
                    setattr(module, name, new(original))


FAULTS: dict[str, Fault] = {}


def fault(caught_by: str, target: str) -> Callable[[Callable[..., Any]], None]:
    """Add a fault that replaces `target` by the decorated function."""

    def add(function: Callable[..., Any]) -> None:
        FAULTS[function.__name__] = Fault({target: replacement(function)}, f"tests/{caught_by}")

    return add


def replacement(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that wraps an original in `function`."""

    def make(original: Any) -> Any:
        @wraps(original)
        def new(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        return new

    return make


class PythonSources(MetaPathFinder):
    """Finder that prefers the source of a module to the compiled module."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        for folder in path if name.startswith("ngramspec.") else ():
            if spec := FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name):
                return spec
        return None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Make the fault of this process before any test is imported."""
    if "MUTATION_SOURCES" in os.environ:
        sys.meta_path.insert(0, PythonSources())
    if name := os.environ.get("MUTATION"):
        FAULTS[name].make()


# --------------------------------------------------------------------------- acceptance

VERIFIER = "ngramspec.acceptance.verifier"
RULES = "ngramspec.acceptance.rules"


@fault("acceptance/test_rules.py::test_rejection_rule_accepts_with_probability_sum_of_min", f"{RULES}:Rejection.decide")
def rejection_ignores_draft_probabilities(decide: Any, self: Any, row: Any, guess: Any, position: int, q: Any) -> Any:
    return decide(self, row, guess, position, q if guess is None else {guess: 1.0})


@fault(
    "acceptance/test_rules.py::test_verifier_with_sampling_settings_follows_target_distribution",
    f"{RULES}:_draw",
)
def residual_is_not_normalized(_: Any, ids: Any, weights: Any, u: float) -> int:
    return int(ids[min(weights.cumsum().searchsorted(u, side="right"), ids.size - 1)])


@fault(
    "acceptance/test_rules.py::test_verifier_after_first_rejection_reads_no_more_rows",
    f"{VERIFIER}:RuleVerifier.verify",
)
def verifier_emits_token_after_rejected_one(verify: Any, self: Any, rows: Any, draft: Any, position: int) -> Any:
    verdict = verify(self, rows, draft, position)
    after = verdict.accepted + 1
    return verdict._replace(tokens=(*verdict.tokens, *draft.tokens[after : after + 1]))


@fault(
    "acceptance/test_rules.py::test_coupled_rule_emits_argmax_of_noisy_logits",
    f"{VERIFIER}:RuleVerifier.verify",
)
def verifier_reuses_noise_of_first_position(verify: Any, self: Any, rows: Any, draft: Any, position: int) -> Any:
    decide = self._decide
    with mock.patch.object(self, "_decide", lambda row, guess, _, law: decide(row, guess, position, law)):
        return verify(self, rows, draft, position)


@fault(
    "decoding/test_decoder_sampling.py::test_decoder_with_coupled_acceptance_drafts_with_noise_of_target",
    f"{VERIFIER}:RuleVerifier.choose",
)
def drafter_uses_noise_of_next_position(choose: Any, self: Any, position: int) -> Any:
    return choose(self, position + 1)


@fault(
    "llama/test_samplers.py::test_sampler_chain_penalties_apply_to_last_n_tokens",
    "ngramspec.llama.samplers:SamplerChain.begin",
)
def penalties_omit_oldest_prompt_token(begin: Any, self: Any, prompt: Any) -> None:
    begin(self, prompt[max(0, len(prompt) - self._window + 1) :])


# --------------------------------------------------------------------------- decoding

LIMIT = "decoding/test_decoder.py::test_decoder_with_overlong_drafts_truncates_them"
PADDING = "decoding/test_decoder.py::test_decoder_pads_batches_to_cheaper_size"
TEXT = "decoding/test_text.py::test_text_stream_with_each_example_returns_expected_pieces"
MOCK = "support.mock_target:MockTarget"
SHAPE = "ngramspec.drafting.grammar:GrammarGuide.shape"


@fault("decoding/test_same_text.py::test_rejection_with_grammar_keeps_constrained_distribution", SHAPE)
def grammar_drops_fixed_length_drafts(
    shape: Any, self: Any, draft: Any, limit: int, *, fixed_length: bool = False
) -> Any:
    result = shape(self, draft, limit, fixed_length=fixed_length)
    return result.head(0) if fixed_length and result is draft else result


@fault(
    "decoding/test_same_text.py::test_rejection_with_any_drafter_keeps_target_distribution",
    f"{VERIFIER}:RuleVerifier.__init__",
)
def draft_length_depends_on_sampled_tokens(init: Any, self: Any, *args: Any) -> None:
    init(self, *args)
    self.fixed_length = False


@fault(LIMIT, f"{MOCK}.rollback")
def rollback_keeps_one_extra_token(rollback: Any, self: Any, length: int) -> None:
    rollback(self, min(length + 1, len(self.tokens)))


@fault(PADDING, f"{MOCK}.evaluate")
def last_token_uses_row_of_padding(evaluate: Any, self: Any, tokens: Any) -> Any:
    rows, size = evaluate(self, tokens), len(tokens)
    while size > 1 and tokens[size - 1] == tokens[0]:
        size -= 1
    rows[size - 1] = rows[-1]
    return rows


@fault(PADDING, f"{MOCK}.evaluate")
def padding_is_one_token_short(evaluate: Any, self: Any, tokens: Any) -> Any:
    is_padded = len(tokens) > 1 and tokens[-1] == tokens[0]
    return evaluate(self, tokens[:-1] if is_padded else tokens)


def cache_keeps_tokens_after_end_of_answer() -> Fault:
    """Roll back to the end of the last verdict, not to the end of the answer."""
    ends = [0]

    def verify(verify: Any, self: Any, rows: Any, draft: Any, position: int) -> Any:
        verdict = verify(self, rows, draft, position)
        ends[:] = [position + len(verdict.tokens) - 1]
        return verdict

    def rollback(rollback: Any, self: Any, length: int) -> None:
        rollback(self, min(max(length, *ends), len(self.tokens)))

    patches = {f"{VERIFIER}:RuleVerifier.verify": replacement(verify), f"{MOCK}.rollback": replacement(rollback)}
    return Fault(patches, f"tests/{LIMIT}")


FAULTS["cache_keeps_tokens_after_end_of_answer"] = cache_keeps_tokens_after_end_of_answer()


@fault(
    "decoding/test_decoder.py::test_generate_returns_names_of_control_tokens_on_request",
    "ngramspec.decoding.text:Text.__init__",
)
def text_omits_control_tokens(init: Any, self: Any, request: Any, *args: Any, **options: Any) -> None:
    init(self, replace(request, controls=frozenset()), *args, **options)


@fault(TEXT, "ngramspec.decoding.text:TextStream._find")
def stop_string_matches_only_at_end_of_piece(find: Any, self: Any, text: str) -> Any:
    hit = find(self, text)
    return hit if hit and text.endswith(hit[1]) else None


@fault(TEXT, "ngramspec.decoding.text:TextStream.push")
def incomplete_character_survives_ascii_piece(push: Any, self: Any, piece: bytes) -> Any:
    half = self.decoder.getstate()
    if piece.isascii():
        self.decoder.reset()
    text = push(self, piece)
    if piece.isascii():
        self.decoder.setstate(half)
    return text


# --------------------------------------------------------------------------- drafting


@fault("drafting/test_grammar_guide.py::test_grammar_guide_truncates_draft_before_forbidden_token", SHAPE)
def grammar_does_not_truncate_drafts(shape: Any, self: Any, draft: Any, limit: int, **options: Any) -> Any:
    result = shape(self, draft, limit, **options)
    return draft if len(result) < len(draft) else result


@fault("drafting/test_grammar_guide.py::test_grammar_guide_forces_no_end_token_and_keeps_position", SHAPE)
def draft_advances_grammar_of_answer(shape: Any, self: Any, draft: Any, limit: int, **options: Any) -> Any:
    result = shape(self, draft, limit, **options)
    for token in result.tokens:
        self.grammar.accept(token)
    return result


@fault(
    "drafting/test_drafters.py::test_propose_with_chooser_reports_true_q_of_all_drawn_tokens",
    "ngramspec.drafting.predictor:Continuations.probabilities",
)
def ngrams_report_uniform_probabilities(_: Any, self: Any) -> Any:
    return dict.fromkeys(self.counts, 1 / len(self.counts))


@fault(
    "drafting/test_ngram.py::test_predictor_update_batch_equals_updates_and_reset_clears",
    "ngramspec.drafting.predictor:NGramPredictor.update_batch",
)
def ngrams_across_updates_lose_context(update: Any, self: Any, tokens: Any) -> None:
    if tokens:
        self._keys = [*self._keys[:1], *self._keys]
    update(self, tokens)


@fault("drafting/test_ngram.py::test_roll_returns_hashes_of_last_tokens", "ngramspec.drafting.predictor:roll")
def keys_use_fnv_1_instead_of_fnv_1a(_: Any, keys: Any, token: int, orders: int) -> Any:
    from ngramspec.drafting.predictor import FNV_BASIS, FNV_PRIME

    return [((key * FNV_PRIME) ^ token) % (1 << 64) for key in [FNV_BASIS, *keys[: orders - 1]]]


@fault(
    "drafting/test_suffix.py::test_suffix_automaton_with_few_suffix_links_keeps_exact_counts",
    "ngramspec.drafting.baselines.suffix:SuffixAutomaton._split",
)
def suffix_automaton_does_not_split_states(_: Any, self: Any, p: int, token: int) -> Any:
    return self.goals[p][token]


@fault(
    "drafting/test_guesser.py::test_guesser_after_edit_continues_copy",
    "ngramspec.drafting.mixture.pointers:Pointers._follow",
)
def mixture_skips_every_second_token(follow: Any, self: Any, i: int, *tokens: int) -> None:
    follow(self, i, *tokens)
    self._places[i] += self._places[i] >= 0


# --------------------------------------------------------------------------- threads

GOVERNOR = "ngramspec.cpu.thread_governor"


@fault("cpu/test_threads.py::test_cpu_load_after_preempted_reads_stays_right", "ngramspec.cpu.cores:CpuLoad._update")
def slow_read_delays_next_read(update: Any, self: Any) -> None:
    began = self.clock()
    update(self)
    self.INTERVAL = max(0.2, 200 * (self.clock() - began))


FAULTS["old_load_counts"] = Fault(
    {"ngramspec.cpu.cores:CpuLoad.LONGEST": lambda _: math.inf},
    "tests/cpu/test_threads.py::test_cpu_load_without_two_recent_reads_is_unknown",
)
FAULTS["thread_trials_never_end"] = Fault(
    {f"{GOVERNOR}:FIRST_PAUSE": lambda _: 0, f"{GOVERNOR}:LAST_PAUSE": lambda _: 0},
    "tests/cpu/test_threads.py::test_thread_governor_approaches_best_fixed_number_at_each_load",
)
FAULTS["slower_thread_count_stays"] = Fault(
    {f"{GOVERNOR}:BETTER": lambda _: 0.0},
    "tests/cpu/test_threads.py::test_thread_governor_finds_hidden_load_by_slow_calls",
)


# --------------------------------------------------------------------------- cost and policies

TIMES = "ngramspec.cost.times:PassTimes"


FAULTS["one_slow_pass_is_believed"] = Fault(
    {"ngramspec.cost.times:FEW": lambda _: 1},
    "tests/cost/test_times.py::test_one_interruption_raises_nothing_and_is_hardly_charged",
)


@fault("cost/test_times.py::test_unknown_sizes_follow_neighbours", f"{TIMES}.ratio")
def unknown_sizes_cost_no_more(ratio: Any, self: Any, size: int) -> Any:
    return ratio(self, min(size, self.largest))


@fault(
    "policies/test_policy.py::test_cost_policy_plan_returns_expected_lengths", "ngramspec.policies.cost:CostPolicy.plan"
)
def policy_prefers_longest_draft(plan: Any, self: Any, draft: Any, times: Any, sizes: Any, restore: Any = None) -> Any:
    length = min(len(draft.tokens), sizes[-1] - 1)
    size = min(size for size in sizes if size > length)
    return (length, size) if length else plan(self, draft, times, sizes, restore)


@fault(
    "policies/test_never_slower.py::test_loss_budget_book_adds_saved_time_and_subtracts_cost",
    "ngramspec.policies.budget:LossBudget.record",
)
def loss_budget_ignores_losses(record: Any, self: Any, done: Any, drafting: bool) -> None:
    max_seconds = len(done.tokens) * done.plain_seconds - done.draft_seconds + done.interruption_seconds
    record(self, replace(done, seconds=min(done.seconds, max_seconds)) if drafting else done, drafting)


# --------------------------------------------------------------------------- llama.cpp

LOGITS = "test_model_contract.py::test_backend_random_walk_returns_logits_of_fresh_evaluation"
DRAFTS = "architectures/test_architectures.py::test_drafts_on_each_memory_kind_keep_text_up_to_rounding"
CACHE = "ngramspec.llama.cache:Cache"


@fault(f"{LOGITS}[attention]", f"{CACHE}._remove")
def cache_removes_one_extra_token(remove: Any, self: Any, length: int) -> Any:
    return remove(self, length - 1)


FAULTS["prefill_keeps_one_token_of_previous_text"] = Fault(
    {
        "ngramspec.llama.sequence:common_prefix": lambda common: (
            lambda tokens, others: min(common(tokens, others) + 1, len(tokens))
        )
    },
    f"tests/{DRAFTS}[llama]",
)


@fault(f"{LOGITS}[hybrid with snapshots]", f"{CACHE}.save")
def checkpoint_length_is_off_by_one(save: Any, self: Any, **options: Any) -> None:
    self.length -= 1
    save(self, **options)
    self.length += 1


@fault(
    "architectures/test_architectures.py::test_trial_passes_leave_state_of_text[qwen35]",
    "llama_cpp.llama_cpp:llama_state_seq_set_data_ext",
)
def checkpoint_is_not_restored(restore: Any, context: Any, state: Any, size: int, sequence: int, flags: int) -> Any:
    return size if flags == 1 else restore(context, state, size, sequence, flags)


@fault(f"{DRAFTS}[mamba]", f"{CACHE}._go_back")
def tokens_after_checkpoint_are_not_evaluated_again(go_back: Any, self: Any, length: int) -> None:
    go_back(self, length)
    self.length = length if self.length else 0


@fault(f"{DRAFTS}[qwen35]", f"{CACHE}.cut")
def rollback_trusts_snapshots_of_any_depth(cut: Any, self: Any, length: int) -> None:
    self.usable_snapshots = self.snapshots
    cut(self, length)


@fault(f"{LOGITS}[sliding window, sequences]", f"{CACHE}._shows")
def sliding_window_is_cut_beyond_its_tokens(*_: Any) -> bool:
    return True


@fault(
    "llama/test_head.py::test_heads_in_joint_batch_return_logits_of_each_text_alone[glm4moe-False]",
    "ngramspec.llama.head:HiddenStates.copy_rows",
)
def sequences_in_batch_share_hidden_states(original: Any, self: Any, rows: int, *tokens: Any) -> int:
    original(self, rows, *tokens)
    return rows


@fault(
    "llama/test_head.py::test_sequence_adopt_copies_hidden_states_for_its_head[glm4moe-False]",
    "ngramspec.llama.head:HiddenStates.adopt",
)
def adopt_keeps_old_hidden_states(*_: Any) -> None:
    pass


@fault(f"{LOGITS}[attention, sequences]", "ngramspec.llama.target:Target.evaluate_together")
def sequences_in_batch_swap_logits(evaluate: Any, self: Any, parts: Any) -> Any:
    numbers = [part.sequence.number for part in parts]
    return [rows for _, rows in sorted(zip(numbers, evaluate(self, parts), strict=True), key=lambda pair: pair[0])]


# --------------------------------------------------------------------------- files


@fault(
    "memory/test_store.py::test_store_rejects_newer_format_and_other_tokenizer", "ngramspec.memory.store:Store._check"
)
def store_accepts_other_tokenizer(check: Any, self: Any, db: Any) -> None:
    from ngramspec.memory.store import MemoryFileError

    try:
        check(self, db)
    except MemoryFileError as error:
        if "tokenizer" not in str(error):
            raise


@fault("models/test_check.py::test_read_header_rejects_broken_headers", "ngramspec.models.gguf:_Reader.skip")
def gguf_reader_trusts_lengths(skip: Any, self: Any, size: int) -> int:
    start = skip(self, min(size, max(0, len(self.data) - self.position)))
    self.position = start + size
    return int(start)


@fault(
    "instruments/trace/test_trace.py::test_trace_in_pipe_prints_one_marked_line_per_step",
    "ngramspec_cli.trace:_mark_tokens",
)
def trace_marks_rejected_tokens_as_not_reached(mark_tokens: Any, step: Any) -> Iterator[Any]:
    for mark, *rest in mark_tokens(step):
        yield "." if mark == "-" else mark, *rest


# --------------------------------------------------------------------------- front ends

ANSWER = "ngramspec.server.answer:Answer"


@fault("server/test_recorded.py::test_exchanges_are_as_recorded[anthropic]", f"{ANSWER}.write")
def answer_lacks_text_of_last_step(write: Any, self: Any, steps: Any) -> None:
    write(self, [step if step.stop is None else replace(step, pieces=("",) * len(step.pieces)) for step in steps])


@fault(
    "server/test_recorded.py::test_exchanges_are_as_recorded[openai_chat]",
    "ngramspec.chat.families:AnswerParser.finish",
)
def chat_loses_pending_text(finish: Any, self: Any, cut: bool = False) -> Any:
    finish(self, cut)
    return []


@fault("server/test_recorded.py::test_exchanges_are_as_recorded[llama_server]", f"{ANSWER}.add_event")
def stop_string_counts_as_limit(add_event: Any, self: Any, event: Any) -> None:
    add_event(self, event)
    if self.done is not None and self.stop_string is not None:
        self.reason, self.stop_string = "length", None


@fault(
    "server/test_recorded.py::test_exchanges_are_as_recorded[openai_chat]",
    "ngramspec.server.reply:ChunkReply.usage",
)
def usage_omits_first_token(usage: Any, self: Any) -> Any:
    fields = usage(self)
    return fields | {"completion_tokens": fields["completion_tokens"] - len(self.answers)}


@fault(
    "server/test_dialects.py::test_official_clients_receive_reasoning_text_and_tool_calls",
    "ngramspec.server.answer:Block.__init__",
)
def blocks_share_one_index(init: Any, self: Any, index: int, *rest: Any, **fields: Any) -> None:
    init(self, 0, *rest, **fields)


@fault(
    "server/test_recorded.py::test_exchanges_are_as_recorded[openai_completions]",
    "ngramspec.server.openai_completions:CompletionReply.events",
)
def stream_loses_text_of_last_step(events: Any, self: Any, answer: Any) -> Any:
    if answer.steps and answer.steps[-1].stop is not None:
        answer.changes = []
    return events(self, answer)


@fault(
    "server/test_access.py::test_access_requires_key_except_for_health",
    "ngramspec.server.access:Access._has_key",
)
def server_accepts_any_api_key(_: Any, self: Any, headers: Any) -> bool:
    return bool(headers.get("authorization"))


@fault(
    "cli/test_bad_input.py::test_complete_with_signal_during_decoding_prints_partial_text",
    "ngramspec_cli.console:Outcome.__exit__",
)
def sigterm_loses_partial_text(exit_: Any, self: Any, kind: Any, error: Any, traceback: Any) -> bool:
    from ngramspec_cli.console import Terminated

    return not isinstance(error, Terminated) and exit_(self, kind, error, traceback)


@fault(
    "chat/test_conversation.py::test_conversation_messages_start_with_system_and_undo_drops_turn",
    "ngramspec.chat.conversation:Conversation.messages",
)
def conversation_forgets_last_turn(messages: Any, self: Any, first: int = 0) -> Any:
    return messages(self, first)[:-2] if self.turns[first:] else messages(self, first)


@fault(
    "dropin/test_llama.py::test_llama_generate_equals_parent_in_tokens",
    "ngramspec.dropin.llama:SpeculativeEvaluator.end",
)
def dropin_leaves_draft_in_cache(end: Any, self: Any, generation: object) -> None:
    with mock.patch.object(self, "drop"):
        end(self, generation)


FAULTS["benchmark_omits_drafting_time"] = Fault(
    {
        "ngramspec.instruments.benchmark.runs:Run.tokens_per_second": lambda _: property(
            lambda run: run.stats.tokens / run.stats.seconds
        )
    },
    "tests/instruments/benchmark/test_runs.py::test_summarise_returns_medians_of_paired_ratios",
)


@fault(
    "instruments/replay/test_replay.py::test_curve_comparison_drafts_by_each_curve",
    "ngramspec.decoding.decoder:SpeculativeDecoder.__init__",
)
def replay_ignores_cost_curve(init: Any, self: Any, *args: Any, **options: Any) -> None:
    from ngramspec.cost.times import PassTimes

    init(self, *args, **options | {"times": PassTimes({1: 1.0}, is_fixed=True)})
