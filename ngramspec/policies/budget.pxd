cimport cython

cdef class DraftValue:
    cdef double[::1] _gross
    cdef double[::1] _p
    cdef double[::1] _cost
    cdef double[::1] _later
    @cython.locals(
        i=cython.Py_ssize_t, k=cython.Py_ssize_t, reach=cython.double, n_expected=cython.double, value=cython.double,
        best=cython.double
    )
    cpdef list read(self, acceptance_probs, costs, double rate, double max_cost, Py_ssize_t longest)
