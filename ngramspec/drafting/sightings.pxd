from ngramspec.drafting.history cimport History

cdef class Sightings:
    cdef public int[::1] found
    cdef public int[::1] tokens
    cdef public int[::1] seen
    cdef public int[::1] count
    cdef public int[::1] latest
    cdef public Py_ssize_t best
    cdef public int best_token
    cdef long long[::1] _slots
    cpdef clear(self, Py_ssize_t at)
    cpdef int enter(self, Py_ssize_t at, int token)
    cpdef int follow(self, History h, Py_ssize_t at, Py_ssize_t end)
    cpdef int recall(self, History h, memory, Py_ssize_t at, Py_ssize_t end, int longest)
