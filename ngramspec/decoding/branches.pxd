cimport cython
from ngramspec.drafting.mixture.guesser cimport Guesser
from ngramspec.drafting.draft cimport MarginalCost

cdef class BranchFinder:
    cdef Guesser _guesser
    cdef int[::1] _fork
    cdef list _path
    cdef int[::1] _goes_on
    cdef double[::1] _reach
    cdef double[::1] _probability
    cdef int[::1] _best_candidate
    cdef double[::1] _best_reach
    @cython.locals(node=cython.int, best=cython.int, n=cython.int, cell=cython.int)
    cpdef find(self, chances, int n_sent, int limit, int leaves, MarginalCost price)
    @cython.locals(c=cython.int)
    cdef _rate(self, int node, double chance, int draft_token)
    @cython.locals(c=cython.int)
    cdef _next(self, int node)
    @cython.locals(i=cython.int)
    cdef _look(self, int node)
