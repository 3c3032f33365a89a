cdef class Correction:
    cdef public int[::1] facts
    cdef public double[::1] p
    cdef double[::1] _place
    cdef double[::1] _height
    cdef double[::1] _slope
    cdef double[::1] _token_height
    cdef double[::1] _token_slope
    cpdef double judge(self, Py_ssize_t cell, double p) noexcept
    cpdef void learn(self, Py_ssize_t cell, bint right) noexcept
