"""What holds for every test."""

import torch

# The tensors here are small: a second thread costs more in waiting than it saves in work.
torch.set_num_threads(1)
