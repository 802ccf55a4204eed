"""What is changed inside the model: loss, attention, its kernels and its bias, joined products, masks, new tokens."""
