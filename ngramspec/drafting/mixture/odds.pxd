cdef class ChanceMixer:
    cdef public int[::1] states
    cdef public int[::1] views
    cdef public int[::1] facts
    cdef public double[::1] p
    cdef double[::1] _inputs
    cdef double[::1] _said
    cdef long long[::1] _from
    cdef double[::1] _rate
    cdef double[::1] _seen
    cdef double[::1] _odds
    cdef double[::1] _weights
    cdef double[::1] _blend
    cdef double[::1] _bias
    cdef double[::1] _slope
    cdef double[::1] _token_weights
    cdef double[::1] _token_bias
    cdef double[::1] _token_slope
    cdef tuple _sets
    cpdef double judge(self, Py_ssize_t cell) noexcept
    cpdef void learn(self, Py_ssize_t cell, bint right) noexcept
    cdef void _learn_facts(self, Py_ssize_t cell, double error) noexcept
