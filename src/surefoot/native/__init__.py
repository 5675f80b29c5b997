"""Kernels for CPUs in C, compiled on first use by the system's compiler for the CPU that they run on."""
