"""Triton: all kernels, one module a job. Imported only where one runs: elsewhere there may be no Triton."""
