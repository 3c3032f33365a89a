from ngramspec.drafting.history cimport History
from ngramspec.drafting.odds cimport Odds

cdef class Guesser:
    cdef public History history
    cdef public Odds odds
    cdef public list memory
    cdef public int[::1] tokens
    cdef public int[::1] found
    cdef public int[::1] guesses
    cdef public double[::1] chances
    cdef public int[::1] lengths
    cdef public int pending
    cdef int[::1] _count
    cdef int[::1] _latest
    cdef int[::1] _seen
    cdef long long[::1] _slots
    cdef double _recent
    cdef int _streak
    cdef Py_ssize_t _place
    cdef int _copied
    cdef Py_ssize_t _at_place
    cdef int _at_copied
    cdef Py_ssize_t _best
    cdef int _best_token
    cdef int _near_token
    cdef Py_ssize_t _near_place
    cdef int _candidate(self, Py_ssize_t at, int token)
    cdef int _follow(self, Py_ssize_t at, Py_ssize_t end)
    cdef int _recall(self, Py_ssize_t at, Py_ssize_t end, int longest)
    cpdef int look(self, Py_ssize_t at)
    cpdef take(self, Py_ssize_t at, int c)
    cdef _add(self, int token)
