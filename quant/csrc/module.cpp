// The extension module itself is empty: Python finds the file by importing it and calls the functions by ctypes.
#include <Python.h>

#include "common.h"
#if GQ_X86
#include <cpuid.h>
#endif

// Bit 0 AVX2, bit 1 AVX-512 (F, BW, DQ, VL), bit 2 VPOPCNTDQ, bit 3 VBMI and VNNI, bit 4 FMA and F16C, bit 5
// AVX-512 VNNI, bit 6 AVX-512 BF16.
GQ_API int gq_features() {
#if GQ_X86
    __builtin_cpu_init();
    int found = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) found |= 1;
    if ((found & 1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found |= 2;
    if ((found & 2) && __builtin_cpu_supports("avx512vpopcntdq")) found |= 4;
    if ((found & 2) && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")) found |= 8;
    unsigned a, b, c, d;
    if ((found & 1) && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C)) found |= 16;
    if ((found & 2) && __builtin_cpu_supports("avx512vnni")) found |= 32;
    if ((found & 2) && __builtin_cpu_supports("avx512bf16")) found |= 64;
    return found;
#else
    return 0;
#endif
}

// Raised with every change of a signature; kernels/native.py refuses another one.
GQ_API int gq_version() { return 2; }

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Native kernels, called by ctypes.", -1,
                                        nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
