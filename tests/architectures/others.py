"""Two things that are no requests: the probe of batch sizes, and beam search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from architectures.comparison import LEAST, MARGIN, N_CTX, Bench, Result, Status
from architectures.settings import Ask, Prompts
from ngramspec.beams.draft import BeamDrafter
from ngramspec.beams.search import SEQUENCES, BeamSearch
from ngramspec.cost.kernels import POSITIONS, SIZES, probe
from ngramspec.llama.lane import TAIL
from ngramspec.llama.target import Target

DEPTH = 96
BEAMS = 3
BEAM_LEAST = 0.02
"""A mean difference of logarithms that is rounding anyway: where beams lie in the cache moves last bits."""


def check_probe(bench: Bench) -> Result:
    """What the probe says of batch sizes, against the same tokens in contexts of which nothing was taken back.

    Corrupt is a largest difference beyond rounding; "rounding" would be other classes of sizes.
    """
    rng = np.random.default_rng(0)
    text = [int(t) for t in rng.integers(0, bench.target.n_vocab, DEPTH + 24)]  # the probe's own
    found = probe(bench.target, (DEPTH,))
    rows = {}
    # Which sizes agree depends on the state they begin from, so it is read in the target's own chunks: two states that
    # give the same logits now may round to different ones later on.
    end = 0 if bench.target.can_branch else TAIL
    for size in SIZES:
        passes = -(-POSITIONS // size)
        tail = text[DEPTH : DEPTH + passes * size]
        rows[size] = bench.reference.follow(text[:DEPTH], [*tail, 0], size, end=end)[1 : 1 + POSITIONS]
    classes: dict[bytes, list[int]] = {}
    for size, logits in rows.items():
        classes.setdefault(logits.tobytes(), []).append(size)
    largest = max(float(np.abs(logits - rows[1]).max()) for logits in rows.values())
    gap, tolerance = abs(found.max_difference - largest), max(LEAST, MARGIN * largest)
    same = found.classes == tuple(tuple(sizes) for sizes in classes.values())
    status: Status = "CORRUPT" if gap > tolerance else "equal" if same else "rounding"
    return Result(Ask("probe", POSITIONS), status, None, gap, tolerance, 0, 0, sum(-(-POSITIONS // n) for n in SIZES))


def check_beams(path: Path, bench: Bench, length: int, tokens: int = 24) -> list[Result]:
    """Beam search without and with drafts: scores against the reference's of the same texts, per token.

    Empty where the memory is recurrent and beams are refused.
    """
    with Target(path, n_ctx=N_CTX, threads=bench.target.threads, n_seq=SEQUENCES, exact="off") as target:
        if not target.can_branch:
            return []
        results: list[Result] = []
        texts: list[list[tuple[int, ...]]] = []
        for name in ("same", "shorter"):
            prompt = Prompts(target.n_vocab, length)[name]
            for drafter in (None, BeamDrafter()):
                search = BeamSearch(target, BEAMS, drafter=drafter)
                for _ in search.run(prompt, max_tokens=tokens):
                    pass
                found = search.hypotheses()
                texts.append([tuple(each.tokens) for each in found])
                status: Status = "equal"
                gap = tolerance = 0.0
                for each in found:
                    rows = bench.reference.follow(prompt, each.tokens)
                    score = sum(log_softmax(row, token) for row, token in zip(rows, each.tokens, strict=True))
                    gap = max(gap, off := abs(score - each.score) / tokens)
                    for tolerances in bench.tolerances(prompt, each.tokens, rows):
                        # Each of the two terms of a logarithm moves as far as a logit.
                        tolerance = max(BEAM_LEAST, 2 * float(tolerances.mean()))
                        if off <= tolerance:
                            break
                    else:
                        status = "CORRUPT"
                if status == "equal" and drafter is not None and texts[-1] != texts[-2]:
                    status = "rounding"
                stats = search.stats
                ask = Ask(name, tokens)
                results.append(Result(ask, status, None, gap, tolerance, stats.drafted, stats.accepted, stats.passes))
    return results


def log_softmax(row: NDArray[np.float32], token: int) -> float:
    """Natural logarithm of a token's probability, from logits of shape (n_vocab,), in float64."""
    gaps = row.astype(np.float64) - float(row.max())
    return float(gaps[token] - np.log(np.exp(gaps).sum()))
