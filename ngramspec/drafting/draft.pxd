cdef class MarginalCost:
    cdef readonly double rate
    cdef readonly double seconds
    cdef readonly double loss_budget
    cdef readonly object slopes
    cdef object _make_costs
    cdef object _costs
    cdef double[::1] _slopes
    cpdef bint worth_extending(self, double reach, Py_ssize_t length) except? -1

cdef class Ask:
    cdef readonly Py_ssize_t limit
    cdef readonly object choose
    cdef readonly bint fixed_length
    cdef readonly object price
