cimport cython

cdef class CostCurve:
    cdef public double level
    cdef public double measured_level
    cdef public double switch "_switch"
    cdef public double capture
    cdef public Py_ssize_t last
    cdef public bint last_is_first
    cdef public double worst
    cdef public bint measured
    cdef Py_ssize_t _since_plain
    cdef int _restarting
    cdef public object threads
    cdef double _excess_single
    cdef double _excess_more
    cdef dict _ratios
    cdef list _table
    cdef dict _plans
    cdef dict _slopes
    cdef int _unseen
    cpdef double seconds(self, Py_ssize_t size) except? -1
    cpdef double ratio(self, Py_ssize_t size) except? -1
    @cython.locals(
        n=cython.Py_ssize_t, i=cython.Py_ssize_t, below=cython.Py_ssize_t, above=cython.Py_ssize_t,
        low=cython.double, share=cython.double, slope=cython.double
    )
    cdef _extend(self, Py_ssize_t size)
    @cython.locals(
        n=cython.Py_ssize_t, fitting=cython.Py_ssize_t, best_size=cython.Py_ssize_t, largest=cython.Py_ssize_t,
        cost=cython.double, best_cost=cython.double
    )
    cpdef optimal_batches(self, sizes)
    cpdef slopes(self, sizes)
    cpdef double switch_cost(self, Py_ssize_t size, Py_ssize_t plain) except? -1
    cpdef double change_seconds(self, Py_ssize_t size) except? -1
    @cython.locals(before=cython.double)
    cpdef double without_interruption(self, Py_ssize_t size, double seconds, bint is_quiet=*) except? -1
    @cython.locals(scale=cython.double, known=cython.double, weight=cython.double)
    cpdef restart(self)
    cpdef observe(self, Py_ssize_t size, double seconds, bint is_quiet=*)
