"""What is changed inside the model: the loss, attention and its kernels, joined products, segment masks, new tokens."""
