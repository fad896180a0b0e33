"""All Triton kernels, one module per job. Imported only where one runs: elsewhere there may be no Triton."""
