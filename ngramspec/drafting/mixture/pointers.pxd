cimport cython
from ngramspec.drafting.mixture.chance_mixer cimport Correction
from ngramspec.drafting.mixture.history cimport History

cdef class Pointers:
    cdef public int[::1] tokens
    cdef readonly Correction correction
    cdef int[::1] _kinds
    cdef long long[::1] _places
    cdef double[::1] _confirmations
    cdef int[::1] _misses
    @cython.locals(i=cython.int)
    cpdef begin(self)
    @cython.locals(i=cython.int, k=cython.int, n_confirmed=cython.Py_ssize_t, place=cython.Py_ssize_t)
    cpdef bint find_predictions(self, History h, Py_ssize_t end, Py_ssize_t at)
    @cython.locals(i=cython.int)
    cpdef advance(self, int token)
    cdef _follow(self, int i, int token, int prediction)
    @cython.locals(i=cython.int, order=cython.int, place=cython.Py_ssize_t, token_before=cython.ulonglong)
    cpdef add(self, History h, int token)
    @cython.locals(i=cython.int)
    cdef Py_ssize_t _latest(self, History h, unsigned long long state, int order)
    @cython.locals(i=cython.int)
    cdef _start_following(self, History h, Py_ssize_t place, int token)
    @cython.locals(i=cython.int, k=cython.int)
    cdef _order(self)
    cdef bint _is_stronger(self, int i, int k)
    @cython.locals(i=cython.int)
    cpdef double estimate(self, Py_ssize_t cell, int token, double p, int length) noexcept
