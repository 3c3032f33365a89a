cimport cython

cdef class ChanceMixer:
    cdef public int[::1] states
    cdef public int[::1] views
    cdef public int[::1] facts
    cdef public double[::1] p
    cdef double[::1] _inputs
    cdef double[::1] _outputs
    cdef long long[::1] _first_sets
    cdef double[::1] _rate
    cdef double[::1] _counts
    cdef double[::1] _log_odds
    cdef double[::1] _weights
    cdef double[::1] _blend
    cdef double[::1] _bias
    cdef double[::1] _slope
    cdef double[::1] _token_weights
    cdef double[::1] _token_bias
    cdef double[::1] _token_slope
    cdef readonly dict global_weights
    cdef readonly dict token_weights
    @cython.locals(
        i=cython.Py_ssize_t, k=cython.Py_ssize_t, w=cython.Py_ssize_t, state=cython.int, fact=cython.int,
        weight=cython.double, x=cython.double
    )
    cpdef double estimate(self, Py_ssize_t cell) noexcept
    @cython.locals(
        i=cython.Py_ssize_t, k=cython.Py_ssize_t, w=cython.Py_ssize_t, at=cython.Py_ssize_t, count=cython.double,
        rate=cython.double, step=cython.double
    )
    cpdef void learn(self, Py_ssize_t cell, bint right) noexcept

cdef class Correction:
    cdef public int[::1] facts
    cdef public double[::1] p
    cdef double[::1] _place
    cdef double[::1] _height
    cdef double[::1] _slope
    cdef double[::1] _token_height
    cdef double[::1] _token_slope
    cdef readonly dict global_weights
    cdef readonly dict token_weights
    @cython.locals(i=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cpdef double estimate(self, Py_ssize_t cell, double p) noexcept
    @cython.locals(i=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cpdef void learn(self, Py_ssize_t cell, bint right) noexcept
