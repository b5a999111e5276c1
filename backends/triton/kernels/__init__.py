"""One file a kernel: what it computes, which calls it refuses, the kernel, and how a call becomes launches."""
