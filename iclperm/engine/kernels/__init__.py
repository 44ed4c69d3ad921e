"""Kernels between the model's matrix products: attention over a packed tree, element-wise rows, the head."""
