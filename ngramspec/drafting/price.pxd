cdef class TokenPrice:
    cdef readonly double worth
    cdef readonly double seconds
    cdef readonly double stake
    cdef readonly object slopes
    cdef readonly object costs
    cdef double[::1] _slopes
    cpdef bint pays(self, double reach, Py_ssize_t length) except? -1
