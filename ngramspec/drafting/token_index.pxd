cpdef unsigned long long slot(
    unsigned long long a, unsigned long long b, unsigned long long c, unsigned long long mask
) noexcept

cdef class TokenIndex:
    cdef public int[::1] tokens
    cdef public int[::1] links
    cdef public int[::1] heads
    cdef public Py_ssize_t size
    cpdef append(self, int token)
    cdef _enter(self, Py_ssize_t n)
