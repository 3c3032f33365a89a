cdef class DraftValue:
    cdef public double[::1] tokens
    cdef double[::1] _p
    cdef double[::1] _cost
    cdef double[::1] _behind
    cpdef int read(self, chances, costs, double rate, double dearest)
