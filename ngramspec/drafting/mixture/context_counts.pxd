cimport cython
from ngramspec.drafting.mixture.history cimport History

cdef class ContextCounts:
    cdef public int[::1] found
    cdef public int[::1] tokens
    cdef public int[::1] seen
    cdef public int[::1] count
    cdef public int[::1] latest
    cdef public Py_ssize_t best
    cdef public int best_token
    cdef long long[::1] _slots
    cdef int[::1] _indexes
    cdef long long[::1] _places
    cdef int[::1] _matches
    cdef int _kept
    cdef int _recalled
    @cython.locals(i=cython.int)
    cpdef clear(self, Py_ssize_t at)
    @cython.locals(i=cython.int)
    cpdef int enter(self, Py_ssize_t at, int token)
    @cython.locals(
        order=cython.int, i=cython.int, match=cython.int, seen=cython.int, steps=cython.int, c=cython.int,
        e=cython.Py_ssize_t, same=cython.bint, token=cython.ulonglong
    )
    cpdef int follow(self, History h, Py_ssize_t at, Py_ssize_t end)
    @cython.locals(
        e=cython.Py_ssize_t, i=cython.int, number=cython.int, match=cython.int, steps=cython.int, seen=cython.int
    )
    cpdef int recall(self, History h, memory, Py_ssize_t at, Py_ssize_t end, int longest)
    cdef _recall_at(self, Py_ssize_t at, int token, int number, Py_ssize_t place, int match, int longest)
