cimport cython

cdef class SuffixAutomaton:
    cdef public Py_ssize_t size
    cdef public Py_ssize_t states
    cdef public Py_ssize_t edges
    cdef public Py_ssize_t last
    cdef public int[::1] length
    cdef public int[::1] link
    cdef public int[::1] first
    cdef public int[::1] best
    cdef public int[::1] latest
    cdef public int[::1] total
    cdef public int[::1] origin
    cdef public int[::1] token
    cdef public int[::1] goal
    cdef public int[::1] count
    cdef public int[::1] sibling
    cdef public int[::1] slots
    @cython.locals(i=cython.Py_ssize_t)
    cpdef clear(self)
    cpdef add(self, int token)
    cdef Py_ssize_t _split(self, Py_ssize_t p, Py_ssize_t edge)
    cdef Py_ssize_t _state(self, int length, Py_ssize_t link)
    cdef Py_ssize_t _connect(self, Py_ssize_t state, int token, Py_ssize_t goal, int count)
    cdef _take(self, Py_ssize_t state, Py_ssize_t edge)
    cdef _enter(self, Py_ssize_t edge)
    cpdef Py_ssize_t find(self, Py_ssize_t state, int token) noexcept
