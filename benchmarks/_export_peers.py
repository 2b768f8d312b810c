"""The peers of an export, each alone in a process of its own: auto-round's own command, and llama.cpp's quantiser.

python _export_peers.py auto_round MODEL OUT FORMAT     # FORMAT as auto-round calls it, gguf:q4_k_m
python _export_peers.py llama_cpp SOURCE.gguf OUT.gguf TYPE
"""

from __future__ import annotations

import sys


def auto_round(model: str, out: str, form: str) -> None:
    """auto-round's rounding to nearest: no rows, no tuning, as ours by default."""
    from auto_round import AutoRound

    scheme = form.upper() if form.startswith("gguf") else "W4A16"
    made = AutoRound(model=model, iters=0, scheme=scheme, device_map="cpu", disable_opt_rtn=True)
    made.quantize_and_save(out, format=form)


def llama_cpp(source: str, out: str, kind: str) -> None:
    """llama.cpp's own quantiser, from a file of float32."""
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.nthread = 1
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters))
    if status:
        sys.exit(f"llama.cpp ended with {status}")


if __name__ == "__main__":
    {"auto_round": auto_round, "llama_cpp": llama_cpp}[sys.argv[1]](*sys.argv[2:])
