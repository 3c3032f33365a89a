cimport cython
from ngramspec.drafting.draft cimport MarginalCost
from ngramspec.drafting.mixture.position_scorer cimport PositionScorer

cdef class Guesser(PositionScorer):
    cdef public int[::1] guesses
    cdef public double[::1] acceptance_probs
    cdef public int pending
    cdef readonly dict global_weights
    cdef readonly dict token_weights
    cpdef take_candidate(self, Py_ssize_t at, int c)
    cdef _append(self, Py_ssize_t at, int token, double chance)
    @cython.locals(c=cython.int)
    cpdef set_guess(self, Py_ssize_t at, int token)
    @cython.locals(at=cython.Py_ssize_t, token=cython.int)
    cpdef start_chain(self, tokens)
    @cython.locals(at=cython.Py_ssize_t, c=cython.Py_ssize_t, token=cython.int, right=cython.bint)
    cpdef accept(self, tokens)
    @cython.locals(place=cython.Py_ssize_t)
    cdef _add(self, int token)
