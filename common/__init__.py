"""What every script and service needs: the command line, the process, what is printed and drawn."""

import logging

# peft imports it, and it warns at every start of kernels that it would fetch from the Hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
