"""llama.cpp's own quantizer on a GGUF file: python peer_quantize.py IN OUT TYPE, in the peers' environment."""

import ctypes
import os
import sys

import llama_cpp


def main(given: str, made: str, kind: str) -> int:
    """Requantize `given` (any type) to `kind`, a name like BF16, Q8_0, Q4_0. Returns llama.cpp's code, 0 for success."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.allow_requantize = True
    options.nthread = os.cpu_count() or 1
    return llama_cpp.llama_model_quantize(given.encode(), made.encode(), ctypes.byref(options))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
