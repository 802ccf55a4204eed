"""What every script and service needs: the command line, the process, what is printed and drawn."""

import logging
import os

# peft imports bitsandbytes, which warns at every start about kernels that it would fetch from the Hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# torch (since 2.2, on Linux) takes large tensors from pages of 2 MiB, if its first tensor on the CPU finds this.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
