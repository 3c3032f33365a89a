cimport cython

cpdef unsigned long long mix(unsigned long long state, unsigned long long value) noexcept
cpdef int doublings(Py_ssize_t n, int maximum) noexcept

cdef class History:
    cdef public int[::1] tokens
    cdef public int[::1] links
    cdef public int[::1] heads
    cdef public Py_ssize_t size
    cdef Py_ssize_t capacity
    cdef public int match_kind
    @cython.locals(i=cython.Py_ssize_t)
    cpdef clear(self)
    cpdef add(self, int token)
    cpdef Py_ssize_t chain(self, unsigned long long state, Py_ssize_t order) noexcept
    @cython.locals(order=cython.Py_ssize_t, slot=cython.Py_ssize_t, token=cython.ulonglong)
    cdef _enter(self, Py_ssize_t n)
    @cython.locals(e=cython.Py_ssize_t, d=cython.Py_ssize_t, last=cython.ulonglong, before=cython.ulonglong)
    cpdef Py_ssize_t near(self, Py_ssize_t end, Py_ssize_t place)
