"""What computes: model files, the transformer, the arrays of the slots, sampling."""

import os

# A step is hundreds of short parallel kernels. Between them OpenMP's threads spin before they sleep,
# by default for so long that on a machine whose cores are shared with anything else (the HTTP side,
# for one) they mostly keep the thread they wait for off its core. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

# Weights and KV are read whole at every step: pages of 2 MB spare the walks through the page table.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
