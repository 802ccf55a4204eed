"""What is not proven on the machine that it is for: nothing here is imported unless a flag asks for it."""
