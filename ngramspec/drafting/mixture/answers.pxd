cimport cython
from ngramspec.drafting.mixture.chance_mixer cimport Correction
from ngramspec.drafting.mixture.history cimport History

cdef class RejectedRowPredictions:
    cdef readonly int place_token
    cdef readonly int pool_token
    cdef readonly Correction correction
    cdef unsigned long long[::1] _checks
    cdef int[::1] _answers
    cdef int[::1] _runs
    cdef long long[::1] _places
    cdef int[::1] _tokens
    cdef int[::1] _depths
    cdef long long[::1] _call_numbers
    cdef int[::1] _tokens_before
    cdef long long _n_calls
    cdef int _in_place
    cdef int _in_pool
    @cython.locals(i=cython.Py_ssize_t)
    cpdef begin(self)
    @cython.locals(
        at=cython.Py_ssize_t, order=cython.int, i=cython.int, answer=cython.int, slot=cython.Py_ssize_t,
        token=cython.ulonglong, state=cython.ulonglong
    )
    cpdef record(self, History h, Py_ssize_t start, answers)
    @cython.locals(order=cython.int, token=cython.ulonglong, depth=cython.int)
    cpdef bint find_predictions(self, History h, Py_ssize_t end)
    cpdef double estimate(self, Py_ssize_t cell, int token, double p, int top, int length) noexcept
