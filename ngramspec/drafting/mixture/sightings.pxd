from ngramspec.drafting.mixture.history cimport History

cdef class ContextCounts:
    cdef public int[::1] found
    cdef public int[::1] tokens
    cdef public int[::1] seen
    cdef public int[::1] count
    cdef public int[::1] latest
    cdef public Py_ssize_t best
    cdef public int best_token
    cdef long long[::1] _slots
    cdef int[::1] _indexes
    cdef long long[::1] _places
    cdef int[::1] _matches
    cdef int _kept
    cdef int _recalled
    cpdef clear(self, Py_ssize_t at)
    cpdef int enter(self, Py_ssize_t at, int token)
    cpdef int follow(self, History h, Py_ssize_t at, Py_ssize_t end)
    cpdef int recall(self, History h, memory, Py_ssize_t at, Py_ssize_t end, int longest)
    cdef _recall_at(self, Py_ssize_t at, int token, int number, Py_ssize_t place, int match, int longest)
