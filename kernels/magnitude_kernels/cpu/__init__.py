"""A step of a packed model on the CPU, compiled by LLVM through numba."""
