cimport cython


cdef class Window:
    cdef public list values
    cdef public double value
    cdef public double before
    cdef public list seen
    @cython.locals(is_new=cython.bint, middle=cython.double)
    cpdef bint add(self, double value, Py_ssize_t now)

cdef class PassTimes:
    cdef public bint is_fixed
    cdef public Py_ssize_t offset
    cdef public double level
    cdef public Py_ssize_t pairs
    cdef public Py_ssize_t largest
    cdef public Py_ssize_t _now
    cdef public Py_ssize_t _last
    cdef public Py_ssize_t _position
    cdef dict _prior
    cdef public dict _ratios
    cdef tuple _changes
    cdef tuple _copies
    cdef list _calls
    cdef public list _extra
    cdef list _recent
    cdef double _plain
    cdef double _plain_level
    cdef Py_ssize_t _plain_at
    cdef list _run
    cdef list _bounds
    cdef list _recent_drafts
    cdef bint _has_past
    cdef PassTimes _root
    cdef dict _others
    cdef dict _batches
    cdef dict _slopes
    cdef public list _own
    cdef dict _points
    cdef set _known
    cpdef double ratio(self, Py_ssize_t size) except? -1
    cpdef double change_now(self, Py_ssize_t size) except? -1
    cpdef double charge_drafting(self, double seconds) except? -1
    cpdef optimal_batches(self, sizes)
    cpdef begin_pass(self, Py_ssize_t size)
    cpdef observe(self, Py_ssize_t size, double seconds, bint is_timed=*)
    cdef double _follow(self, double seconds) except? -1
    cdef double _observe_plain(self, Py_ssize_t position, double seconds) except? -1
    cdef double _learn(self, Py_ssize_t size, double cost) except? -1
    @cython.locals(n=cython.Py_ssize_t, fitting=cython.Py_ssize_t, best=cython.Py_ssize_t, cost=cython.double, best_cost=cython.double)
    cdef _make_batches(self, sizes)
