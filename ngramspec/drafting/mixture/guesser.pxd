cimport cython
from ngramspec.drafting.mixture.answers cimport RejectedRowPredictions
from ngramspec.drafting.mixture.history cimport History
from ngramspec.drafting.mixture.chance_mixer cimport ChanceMixer, Correction
from ngramspec.drafting.mixture.pointers cimport Pointers
from ngramspec.drafting.mixture.context_counts cimport ContextCounts
from ngramspec.drafting.draft cimport MarginalCost

cdef int _share(int count, int n_seen, int latest) noexcept
cdef int _length(int match) noexcept
cdef int _free(unsigned long long state) noexcept
cdef int _token(unsigned long long state) noexcept
cdef int _pair(unsigned long long state) noexcept
cdef int _rarity(double p) noexcept

cdef class Guesser:
    cdef public History history
    cdef public ChanceMixer mixer
    cdef public Correction correction
    cdef public ContextCounts counts
    cdef public RejectedRowPredictions answers
    cdef public Pointers pointers
    cdef int[::1] _has_answer
    cdef int[::1] _has_pointer
    cdef public list memory
    cdef public bint local
    cdef public int[::1] guesses
    cdef public double[::1] acceptance_probs
    cdef public int[::1] match_lengths
    cdef int[::1] _best
    cdef public int pending
    cdef Py_ssize_t _prompt
    cdef double _recent
    cdef int _streak
    cdef Py_ssize_t _copy_place
    cdef int _copy_length
    cdef Py_ssize_t _chain_copy_place
    cdef int _chain_copy_length
    cdef Py_ssize_t _branch_offset
    cdef int _fork
    cdef int _near_token
    cdef Py_ssize_t _near_place
    @cython.locals(c=cython.int, i=cython.int)
    cpdef int score_position(self, Py_ssize_t at)
    @cython.locals(best=cython.int)
    cpdef int score_branch_position(self, Py_ssize_t at, Py_ssize_t depth, int fork)
    @cython.locals(c=cython.int, i=cython.int)
    cdef _correct(self, Py_ssize_t at, int source, int n)
    cpdef take_candidate(self, Py_ssize_t at, int c)
    cdef _append(self, Py_ssize_t at, int token, double chance)
    @cython.locals(c=cython.int)
    cpdef set_guess(self, Py_ssize_t at, int token)
    @cython.locals(at=cython.Py_ssize_t, c=cython.Py_ssize_t, token=cython.int, right=cython.bint)
    cpdef accept(self, tokens)
    @cython.locals(place=cython.Py_ssize_t)
    cdef _add(self, int token)
