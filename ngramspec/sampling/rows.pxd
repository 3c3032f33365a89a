cimport cython

cdef unsigned long long _out(unsigned long long state, unsigned long long counter) noexcept
@cython.locals(i=cython.Py_ssize_t)
cdef Py_ssize_t _find_above(const float[::1] row, Py_ssize_t start, float limit) noexcept

cdef class Candidates:
    cdef readonly object data
    cdef int[:] _ids
    cdef float[:] _logits
    cdef float[:] _p
    @cython.locals(i=cython.Py_ssize_t)
    cpdef Py_ssize_t take_all(self, const float[::1] row) except -1
    @cython.locals(i=cython.Py_ssize_t)
    cpdef Py_ssize_t take_largest(self, const float[::1] row, Py_ssize_t count) except -1
    @cython.locals(i=cython.Py_ssize_t)
    cpdef Py_ssize_t move_to_end(self, Py_ssize_t count, const int[::1] ids, const float[::1] row) except -1
    cdef void _sift(self, Py_ssize_t at, Py_ssize_t count) noexcept
    @cython.locals(i=cython.Py_ssize_t)
    cpdef int best(self, Py_ssize_t first, Py_ssize_t count) except? -1
    @cython.locals(i=cython.Py_ssize_t)
    cpdef int draw(
        self, Py_ssize_t first, Py_ssize_t count, unsigned long long seed, long long position,
        unsigned long long attempt
    ) except? -1

cdef class CoupledChoice:
    cdef unsigned long long _seed
    cdef long long _position

@cython.locals(r=cython.Py_ssize_t)
cpdef bint append_most_likely(const float[:, ::1] rows, draft, tokens) except? -1
