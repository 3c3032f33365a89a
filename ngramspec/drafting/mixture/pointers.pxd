from ngramspec.drafting.mixture.correction cimport Correction
from ngramspec.drafting.mixture.history cimport History

cdef class Pointers:
    cdef public int[::1] tokens
    cdef Correction _correction
    cdef int[::1] _kinds
    cdef long long[::1] _places
    cdef double[::1] _confirmed
    cdef int[::1] _missed
    cpdef begin(self)
    cpdef bint look(self, History h, Py_ssize_t end, Py_ssize_t at)
    cpdef take(self, int token)
    cdef _follow(self, int i, int token, int said)
    cpdef add(self, History h, int token)
    cdef Py_ssize_t _latest(self, History h, unsigned long long state, int order)
    cdef _begin_at(self, History h, Py_ssize_t place, int token)
    cdef _order(self)
    cdef bint _stronger(self, int i, int k)
    cpdef double judge(self, Py_ssize_t cell, int token, double p, int length) noexcept
    cpdef void learn(self, Py_ssize_t cell, bint right) noexcept
