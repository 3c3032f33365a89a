cdef class Outlook:
    cdef public double[::1] tokens
    cdef double[::1] _p
    cdef double[::1] _cost
    cdef double[::1] _worth
    cpdef int read(self, chances, costs, double worth, double dearest)
