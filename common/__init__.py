"""What every script and service needs: the command line, the process, what is printed and drawn."""
