cimport cython
from ngramspec.drafting.mixture.answers cimport RejectedRowPredictions
from ngramspec.drafting.mixture.history cimport History
from ngramspec.drafting.mixture.chance_mixer cimport ChanceMixer, Correction
from ngramspec.drafting.mixture.pointers cimport Pointers
from ngramspec.drafting.mixture.context_counts cimport ContextCounts

cdef int _share(int count, int n_seen, int latest) noexcept
cdef int _length(int match) noexcept
cdef int _free(unsigned long long state) noexcept
cdef int _token(unsigned long long state) noexcept
cdef int _pair(unsigned long long state) noexcept
cdef int _rarity(double p) noexcept

cdef class PositionScorer:
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
    cdef public int[::1] match_lengths
    cdef int[::1] _best
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
    cdef int _longest
    cdef int _memory_match
    cdef Py_ssize_t _copy_at
    cdef int _copy_token
    cdef int _match_kind
    cdef int _copy_class
    cdef int _run
    cdef int _recent_class
    cdef int _length
    cdef int _source
    cdef int _distance
    cdef int _step
    cdef unsigned long long _last_token
    cdef unsigned long long _token_before
    @cython.locals(c=cython.int)
    cpdef int score_position(self, Py_ssize_t at)
    @cython.locals(i=cython.int)
    cdef _gather_candidates(self, Py_ssize_t at, Py_ssize_t end)
    cdef _describe_position(self, Py_ssize_t depth, Py_ssize_t end)
    @cython.locals(i=cython.int)
    cdef int _set_states(self, Py_ssize_t at, int c) noexcept
    cdef void _set_facts(self, Py_ssize_t at, int c, int top) noexcept
    cdef double _estimate(self, Py_ssize_t at, int c, int top) noexcept
    @cython.locals(c=cython.int, i=cython.int)
    cdef _correct(self, Py_ssize_t at, int n)
    @cython.locals(best=cython.int)
    cpdef int score_branch_position(self, Py_ssize_t at, Py_ssize_t depth, int fork)
