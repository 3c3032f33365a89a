cimport cython
from ngramspec.drafting.mixture.history cimport History

cdef class ContextCounts:
    cdef public int[::1] n_candidates
    cdef public int[::1] tokens
    cdef public int[::1] occurrences
    cdef public int[::1] count
    cdef public int[::1] latest
    cdef public Py_ssize_t best_place
    cdef public int best_token
    cdef long long[::1] _slots
    cdef int[::1] _indexes
    cdef long long[::1] _places
    cdef int[::1] _matches
    cdef int _n_places
    cdef int _memory_match
    @cython.locals(i=cython.int)
    cpdef clear(self, Py_ssize_t at)
    @cython.locals(i=cython.int)
    cpdef int add_candidate(self, Py_ssize_t at, int token)
    @cython.locals(
        order=cython.int, i=cython.int, match=cython.int, n_seen=cython.int, steps=cython.int, c=cython.int,
        e=cython.Py_ssize_t, same=cython.bint, token=cython.ulonglong
    )
    cpdef int count_in_request(self, History h, Py_ssize_t at, Py_ssize_t end)
    @cython.locals(
        e=cython.Py_ssize_t, i=cython.int, number=cython.int, match=cython.int, steps=cython.int, n_seen=cython.int
    )
    cpdef int count_in_memory(self, History h, memory, Py_ssize_t at, Py_ssize_t end, int longest)
    cdef _count_place(self, Py_ssize_t at, int token, int number, Py_ssize_t place, int match, int longest)
