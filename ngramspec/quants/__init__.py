"""The costs of a model's quantisations on this machine, for `ngramspec tune --quants`."""
