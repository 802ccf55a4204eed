"""What every script and service needs: the command line, the process, what is printed and drawn."""

import logging

# peft imports bitsandbytes, which warns at every start about kernels that it would fetch from the Hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
